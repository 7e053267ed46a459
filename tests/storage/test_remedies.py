"""An error ends in the command that solves it, with the flags in use; it works as it is printed."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support.commands import niels_gpt
from support.errors import refused

from niels_gpt.cache import PretrainTokenStreamDataset, read_meta, write_meta
from niels_gpt.exchange.transfer.fetch import pull
from niels_gpt.kinds.kind import Limits, has_partitions
from niels_gpt.kinds.verify import verify
from niels_gpt.recipes.plan import every_key
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.remedies import build_command, instead_of, rebuild_command

PROGRAM = "niels-gpt"
ROWS = 8_000  # more than are read ahead, so that a source that fails later leaves an unfinished build


@pytest.fixture
def own(tmp_path):
    """A folder of user text: a file of rows, and a damaged one."""
    folder = tmp_path / "my texts"
    folder.mkdir()
    with open(folder / "a.jsonl", "w") as file:
        file.writelines(json.dumps({"id": f"row {number}", "text": f"text {number}"}) + "\n" for number in range(ROWS))
    (folder / "b.jsonl.gz").write_bytes(b"no gzip")
    return folder


@pytest.fixture
def flags(tmp_path, own, tiny_model_path):
    """Flags that all differ from their defaults."""
    lines = ["--pretrain", f"notes={own}", "--licence", "notes=CC0, or so", "--document-end", "none", "--seed", "7"]
    return [*lines, "--cache-dir", str(tmp_path / "the cache"), "--tokenizer", str(tiny_model_path)]


def carried_out(message):
    """Run the command that a message ends in; returns its exit status."""
    words = shlex.split(message.strip().splitlines()[-1].rpartition(": ")[2])
    if words[0] != PROGRAM:
        return subprocess.run(words, check=False).returncode
    return niels_gpt(*words[1:]).status


def test_the_command_of_a_build_has_the_partitions_of_the_caches_that_have_some():
    many = Settings(source_root="sample", partitions=4, rollouts="r=x", sft="s=y")
    for key in every_key(many)[1:]:
        assert ("--partitions 4" in build_command(many, key)) == has_partitions(key), key


def test_the_command_of_a_build_has_every_flag_that_matters_to_it(tmp_path):
    given = {"pretrain": "a=x;b=y z", "sft": "c=w", "licence": "b=CC0;a=MIT", "document_end": "none", "vocab_size": 300}
    settings = Settings(source_root="the mirror", **given)
    words = shlex.split(build_command(settings, "pretrain/b", "--restart"))
    assert words[0] == PROGRAM and words[1:] == [
        *["build", "b", "--restart", "--source-root", "the mirror", "--vocab-size", "300", "--document-end", "none"],
        *["--pretrain", "b=y z", "--licence", "b=CC0"],
    ]


def test_a_changed_source_is_read_from_scratch(own, flags):
    assert niels_gpt("build", *flags).status == 1
    (own / "b.jsonl.gz").unlink()
    (own / "a.jsonl").write_text((own / "a.jsonl").read_text().replace('"text 5"', '"other 5"'))
    done = niels_gpt("build", *flags)
    assert done.status == 1
    error = done.err
    assert "a.jsonl#6" in error or "'row 5'" in error
    assert "building-" not in error and "(None" not in error and "other 5" in error
    assert carried_out(error) == 0
    done = niels_gpt("build", *flags, "--dry-run")
    assert done.status == 0
    assert "pretrain/notes  up to date" in done.out


def test_a_restart_builds_what_is_up_to_date_too_and_only_what_was_asked_for(own, flags, tmp_path):
    assert niels_gpt("build", *flags).status == 1
    (own / "b.jsonl.gz").unlink()
    versions = tmp_path / "the cache" / "pretrain" / ".versions" / "notes"
    (journal,) = versions.glob("*.journal")
    other = ["--pretrain", f"more={own / 'a.jsonl'}"]
    for _ in range(2):
        done = niels_gpt("build", "more", *other, *flags[-4:], "--restart")
        assert done.status == 0
        assert re.search(r"^pretrain/more: .*, in \d+\.\d s$", done.out, re.MULTILINE)
    assert journal.is_dir()
    assert niels_gpt("build", *flags, "--restart").status == 0
    assert not journal.exists()


@pytest.mark.parametrize("family", ["pretrain", "sft"])
def test_a_build_without_text_keeps_nothing_so_that_its_advice_works(tmp_path, tiny_model_path, family):
    own = tmp_path / "a.jsonl"
    row = {"text": "<|eot|>"} if family == "pretrain" else {"messages": [{"role": "assistant", "content": "<|eot|>"}]}
    own.write_text(json.dumps(row) + "\n")
    flags = [f"--{family}", f"a={own}", "--cache-dir", str(tmp_path / "c"), "--tokenizer", str(tiny_model_path)]
    assert niels_gpt("build", *flags).status == 1
    assert not list(tmp_path.glob("c/*/.versions/a/building-*"))
    good = json.loads(json.dumps(row).replace("<|eot|>", "some words"))
    own.write_text("".join(json.dumps({**good, "id": number}) + "\n" for number in range(3)))
    done = niels_gpt("build", *flags)
    assert done.status == 0, done.err


def test_a_damaged_unfinished_build_is_started_from_scratch(own, flags, tmp_path):
    assert niels_gpt("build", *flags).status == 1
    (own / "b.jsonl.gz").unlink()
    (texts,) = (tmp_path / "the cache").rglob("texts.bin")
    texts.write_bytes(b"x" * texts.stat().st_size)
    done = niels_gpt("build", *flags)
    assert done.status == 3
    assert carried_out(done.err) == 0


@pytest.fixture
def built(own, flags, tmp_path):
    """A cache that was built with these flags, from 200 rows."""
    (own / "b.jsonl.gz").unlink()
    lines = (own / "a.jsonl").read_text().splitlines(keepends=True)
    (own / "a.jsonl").write_text("".join(lines[:200]))
    assert niels_gpt("build", *flags).status == 0
    return tmp_path / "the cache" / "pretrain" / "notes"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a flipped bit of meta.json": lambda cache: flip(cache / "meta.json"),
    "no JSON": lambda cache: (cache / "meta.json").write_text("{"),
    "a shard cut": lambda cache: os.truncate(next(cache.glob("train/*.bin")), 8),
    "no shard": lambda cache: next(cache.glob("train/*.bin")).unlink(),
    "a shard that is a link": lambda cache: (
        next(cache.glob("train/*.bin")).rename(cache / "x"),
        (cache / "train/shard_00000.bin").symlink_to("../x"),
    ),
    "ids of another tokenizer": lambda cache: edit(cache, tokenizer_sha256="0" * 64),
}


def read(cache):
    dataset = PretrainTokenStreamDataset(cache / "train", T=8, device="cpu")
    dataset.get_batch(B=2, generator=torch.Generator().manual_seed(0))


def edit(cache, **keys):
    write_meta(str(cache / "meta.json"), {**read_meta(str(cache / "meta.json")), **keys})


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_what_a_reader_refuses_is_built_again_by_the_command_it_names(built, damage):
    before = read_meta(str(built / "meta.json"))
    DAMAGES[damage](built.resolve())
    with pytest.raises((CacheError, FileNotFoundError)) as refused:
        read(built)
    assert carried_out(str(refused.value)) == 0, str(refused.value)
    read(built)
    assert read_meta(str(built / "meta.json")) == before


def test_what_verify_finds_is_built_again_by_the_command_it_names(built):
    flip(next(built.glob("train/*.bin")))
    (problem, *_) = verify(built, Limits(deep=True))["files_match_meta"].problems
    assert carried_out(problem) == 0, problem
    assert not any(verdict.problems for verdict in verify(built, Limits(deep=True)).values())


def test_a_damaged_tokenizer_is_made_again(built, flags):
    model = built.parent.parent / "tokenizer" / "spm.model"
    shutil.copy(flags[-1], model)
    edit(model.parent, tokenizer_sha256="0" * 64)
    done = niels_gpt("build", *flags[:-2])
    assert done.status == 3
    message = done.err.strip().splitlines()[-1]
    remove, build = message[message.index(": rm ") + 2 :].split(" && ")
    subprocess.run(remove, shell=True, check=True)
    assert build.startswith(f"{PROGRAM} ") and niels_gpt(*shlex.split(build)[1:]).status == 0
    assert niels_gpt("build", *flags[:-2]).status == 0


@pytest.mark.parametrize("damage", ["a shard cut", "no shard", "no JSON", "no description"])
@pytest.mark.parametrize("place", ["copy", "other/pretrain/notes", "other/sft/dolly15k"])
def test_of_a_copy_another_one_is_to_be_taken(built, tmp_path, place, damage):
    copy = tmp_path / place
    shutil.copytree(built, copy)
    {**DAMAGES, "no description": lambda cache: (cache / "meta.json").unlink()}[damage](copy)
    done = niels_gpt("locate", copy, "train", "0")
    assert done.status == 3 and "take another copy" in done.err and "niels-gpt build" not in done.err
    assert "next:" not in niels_gpt("verify", copy).out


def test_of_a_copy_that_took_the_place_of_a_build_another_one_is_to_be_taken(built, flags, own, tmp_path):
    mine = shutil.copytree(built, tmp_path / "mine", symlinks=False)
    (own / "a.jsonl").write_text((own / "a.jsonl").read_text()[:2_000].rpartition("\n")[0])
    assert niels_gpt("build", *flags).status == 0
    pull(mine.as_uri(), built)
    DAMAGES["a shard cut"](built.resolve())
    with pytest.raises(CacheError) as refused:
        read(built)
    assert "take another copy" in str(refused.value)


def test_of_a_copy_beside_another_tokenizer_its_own_is_to_be_given(built, tmp_path):
    root = tmp_path / "other"
    shutil.copytree(built, root / "pretrain" / "notes")
    shutil.copytree(built.parent.parent / "tokenizer", root / "tokenizer")
    edit(root / "tokenizer", tokenizer_sha256="0" * 64)
    with refused("E402", "copied from"):
        PretrainTokenStreamDataset(root / "pretrain" / "notes" / "train", T=8, device="cpu")


def test_a_record_of_a_strangers_folder_gives_no_other_command(built):
    runs = built.parent.parent / ".runs" / "pretrain.notes.jsonl"
    hostile = {"seed": "$(touch x)", "cache_dir": "/elsewhere", "exclude": "a;rm -r b\n", "sft": "x=y;`id`", "nope": 1}
    runs.write_text(json.dumps({"settings": {**hostile, "revision": "'; rm -r x #"}}) + "\n")
    words = shlex.split(str(rebuild_command(built)))
    where = ["--cache-dir", str(built.parent.parent)]
    assert words == [PROGRAM, "build", "notes", "--restart", *where, "--revision", "'; rm -r x #"]
    for content in (b"", b"[" * 100_000, b"[]", b'{"settings": 3}', b"\xff"):
        runs.write_bytes(content)
        assert rebuild_command(built) is not None


@pytest.mark.parametrize("url", ["s3://team/caches/wiki", "file:///caches/wiki", "file://localhost/caches/wiki"])
def test_a_url_in_place_of_a_folder_is_repeated_in_the_command_that_fetches_it(url):
    assert f"pull {url} FOLDER" in instead_of(url)
    assert "localhost" in url or f"pull {url} FOLDER" in instead_of(Path(url))
