"""The disk that a build takes at least, known before it starts, for prose, code and tables; a full disk is refused."""

import gzip
import random
import shlex
import shutil
from pathlib import Path

import pytest
from support import ROOT
from support.commands import niels_gpt
from support.data_files import lines
from support.power_loss import recorded_below

from niels_gpt.recipes import disk
from niels_gpt.recipes.disk import needed_bytes
from niels_gpt.recipes.plan import RECIPES, recipes
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.settings import Settings

PROSE = (Path(__file__).parent.parent.parent / "README.md").read_text().replace("<|", "<")  # no sentinel
TEXTS = {
    "prose": PROSE,
    "code": "".join(path.read_text() for path in sorted((ROOT / "niels_gpt" / "recipes").glob("*.py"))),
    "table": "\n".join(f"{n},{n * 7919 % 1009},{n / 7:.3f},x{n:04x}" for n in range(3_000)),
    "chinese": "".join(map(chr, random.Random(0).choices(range(0x4E00, 0x9000), k=8_000))),
}


def rows_of(text):
    chance, at = random.Random(0), 0
    while at < len(text):
        size = chance.randint(1, 400)
        yield {"text": text[at : at + size]}
        at += size


FORMS = {
    "document.txt": lambda path, text: path.write_text(text),
    "rows.jsonl": lambda path, text: path.write_bytes(lines(*rows_of(text))),
    "rows.jsonl.gz": lambda path, text: path.write_bytes(gzip.compress(lines(*rows_of(text)))),
    "parts.jsonl.gz": lambda path, text: path.write_bytes(
        b"".join(gzip.compress(lines(*rows_of(part))) for part in (text, text[:99]))
    ),
    "lines.jsonl": lambda path, text: path.write_bytes(lines(*({"text": line} for line in text.splitlines()))),
}


def most_on_disk(folder, build):
    """Return the most bytes that lay in a folder at any moment of a build, by the record of what was done there."""
    sizes = {}
    most = 0
    for verb, path, *rest in recorded_below(folder, build):
        if verb == "write":
            sizes[path] = max(sizes.get(path, 0), rest[0] + len(rest[1]))
        elif verb == "cut":
            sizes[path] = rest[0]
        elif verb == "rename":
            for name in [name for name in sizes if name == path or name.startswith(f"{path}/")]:
                sizes[rest[0] + name[len(path) :]] = sizes.pop(name)
        elif verb == "unlink":
            sizes.pop(path, None)
        most = max(most, sum(sizes.values()))
    return most


@pytest.mark.parametrize("kind", sorted(TEXTS))
def test_a_build_takes_no_less_than_was_said(tmp_path, tiny_model_path, kind):
    for form, write in FORMS.items():
        folder = tmp_path / form
        folder.mkdir()
        write(folder / form, TEXTS[kind])
        settings = Settings(
            pretrain=f"own={folder / form}", cache_dir=str(tmp_path / f"{form}-c"), tokenizer=str(tiny_model_path)
        )
        need = needed_bytes(settings, resolve_source(settings, "own"), None)
        ensure_tokenizer(settings)
        taken = most_on_disk(Path(settings.cache_dir), lambda of=settings: recipes(of)["pretrain/own"](of))
        assert 0 < need <= taken, (form, need, taken)


def test_a_token_takes_two_bytes_or_four_by_the_vocabulary_and_two_where_it_is_not_known(tmp_path):
    (tmp_path / "own.txt").write_text(PROSE)
    settings = Settings(pretrain=f"own={tmp_path / 'own.txt'}", cache_dir=str(tmp_path / "c"))
    source = resolve_source(settings, "own")
    narrow, wide, unknown = (needed_bytes(settings, source, size) for size in (65_536, 65_537, None))
    assert narrow == unknown == len(PROSE) // 8 * 2 and wide == 2 * narrow


def test_what_other_plans_have_written_is_no_room_for_this_one(tmp_path):
    for name in ("building-0123", "partitions-0123456789ab/.versions/00000", "partitions-ba9876543210"):
        folder = tmp_path / ".versions/notes" / name
        folder.mkdir(parents=True)
        (folder / "train").write_bytes(bytes(100))
        (folder / "link").symlink_to(folder / "train")
    assert disk.unfinished_bytes(tmp_path / "notes") == 300
    assert disk.unfinished_bytes(tmp_path / "notes", "0123456789ab" + "c" * 52) == 200


@pytest.mark.parametrize("key", sorted(RECIPES))
def test_the_projects_caches_take_no_less_than_was_said(settings, key):
    need = needed_bytes(settings, resolve_source(settings, key.split("/")[1]), settings.vocab_size)
    ensure_tokenizer(settings)
    taken = most_on_disk(Path(settings.cache_dir), lambda: recipes(settings)[key](settings))
    assert taken / 20 <= need <= taken, (need, taken)


def test_what_does_not_fit_is_refused_before_the_first_byte_unless_asked_for(tmp_path, tiny_model_path, monkeypatch):
    own = tmp_path / "own.txt"
    own.write_text(PROSE)
    flags = ["--pretrain", f"own={own}", "--cache-dir", str(tmp_path / "c"), "--tokenizer", str(tiny_model_path)]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=len(PROSE) // 8))
    for more in ([], ["--dry-run"]):
        done = niels_gpt("build", *flags, *more)
        assert done.status == 1
        assert " of disk are needed" in done.err
        assert not (tmp_path / "c").exists()
    done = niels_gpt("build", *flags)
    assert done.status == 1
    command = shlex.split(done.err.strip().rpartition(": ")[2])
    assert niels_gpt(*command[1:]).status == 0
    assert niels_gpt("build", *flags).status == 0  # nothing to do
