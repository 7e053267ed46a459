"""A tokenizer is checked first and installed last: a refused build leaves every cache readable."""

import dataclasses
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from support.commands import niels_gpt
from support.errors import refused
from support.fault_builds import die_at
from support.tiny_texts import TINY_TEXTS

from niels_gpt.kinds.verify import find_damage
from niels_gpt.recipes import plan as plans
from niels_gpt.recipes import tokenizer as recipe
from niels_gpt.recipes.plan import recipes
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer


@pytest.fixture(scope="session")
def other_model(tmp_path_factory):
    """A good model that is another one than the tiny one."""
    trained = train_tokenizer(TINY_TEXTS[:40], vocab_size=350, trained_on="other texts")
    return write_tokenizer(trained, tmp_path_factory.mktemp("other")).model_path


@pytest.fixture
def built(settings):
    """Settings that name no model, and a folder with pretrain/roam and sft/oasst1 in it."""
    for key in ("pretrain/roam", "sft/oasst1"):
        recipes(settings)[key](settings)
    return dataclasses.replace(settings, tokenizer=None)


def is_as_it_was(settings):
    """Whether all that was built is sound, and up to date."""
    keys = ["pretrain/roam", "sft/oasst1"]
    sound = all(not find_damage(Path(settings.cache_dir) / key, deep=True, progress=None) for key in keys)
    return sound and [item.action for item in plans.plan(settings, keys)] == ["up to date"] * 3


def flags_of(settings):
    return ["--source-root", settings.source_root, "--cache-dir", settings.cache_dir]


def models(tmp_path):
    """Return models that no build of real text can use."""
    sample = ensure_tokenizer(Settings(source_root="sample", cache_dir=str(tmp_path / "s"), vocab_size=500)).path
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "added_tokens": [], "model": {"type": "BPE"}}')
    (tmp_path / "noise.model").write_bytes(b"\x0a\xff\xff noise")
    os.mkfifo(tmp_path / "fifo.model")
    (tmp_path / "endless.model").symlink_to("/dev/zero")
    (tmp_path / "huge.model").touch()
    os.truncate(tmp_path / "huge.model", 10**11)
    names = ("tokenizer.json", "noise.model", "fifo.model", "endless.model", "huge.model")
    return {"sample": sample / "spm.model", **{name: tmp_path / name for name in names}}


def test_a_model_that_cannot_be_used_is_refused_before_anything_is_changed(built, tmp_path, capfd):
    said = {
        "sample": "trained on the bundled sample",
        "tokenizer.json": "is damaged, or of an unknown form",
        "noise.model": "is no SentencePiece model",
        "fifo.model": "is not a regular file",
        "endless.model": "is not a regular file",
        "huge.model": "100,000,000,000 bytes",
    }
    for name, model in models(tmp_path).items():
        for more in ([], ["--dry-run"]):
            capfd.readouterr()
            command = ["build", "roam", *flags_of(built), "--tokenizer", str(model), *more]
            done = niels_gpt(*command, module="niels_gpt.cache.cli")
            errors = done.out + done.err + "".join(capfd.readouterr())  # of libraries in C++ too
            assert done.status == 1, errors
            assert said[name] in errors and str(model) in errors, errors
            assert "protobuf" not in errors and "building/" not in errors and ".cc(" not in errors
    assert is_as_it_was(built)


def test_a_refused_source_leaves_the_tokenizer_as_it_was(built, other_model, tmp_path):
    link = os.readlink(Path(built.cache_dir) / "tokenizer")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"title": "no text"}\n')
    command = ["build", "--pretrain", f"bad={bad}", *flags_of(built), "--tokenizer", str(other_model), "--yes"]
    for _ in range(2):
        done = niels_gpt(*command)
        assert done.status == 1
        assert "stays as it was" in done.err
        assert os.readlink(Path(built.cache_dir) / "tokenizer") == link and is_as_it_was(built)
    bad.write_text('{"text": "now it has one"}\n{"text": "and another"}\n')
    assert niels_gpt(*command).status == 0
    assert load_tokenizer(Path(built.cache_dir) / "tokenizer").sha256 == load_tokenizer(other_model).sha256


def test_a_kill_before_the_first_cache_is_done_leaves_the_tokenizer_as_it_was(built, other_model, monkeypatch):
    named = dataclasses.replace(built, tokenizer=str(other_model), document_end="none")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        die_at(patch, "commit", KeyboardInterrupt())
        recipes(named)["pretrain/roam"](named)
    assert is_as_it_was(built)
    assert not recipes(named)["pretrain/roam"](named).reused


def test_a_new_tokenizer_is_announced_and_both_commands_work_as_printed(built, other_model, caplog):
    before = load_tokenizer(Path(built.cache_dir) / "tokenizer").sha256
    done = niels_gpt("build", "roam", *flags_of(built), "--tokenizer", str(other_model), "--yes")
    assert done.status == 0
    warned = [line for line in done.err.splitlines() if "niels-gpt build" in line]
    assert len(warned) == 2 and "pretrain/roam, sft/oasst1" in warned[0]
    assert not is_as_it_was(dataclasses.replace(built, tokenizer=str(other_model)))
    again, back = (shlex.split(line[line.index("niels-gpt build") :]) for line in warned)
    assert again[0] == back[0] == "niels-gpt"
    assert niels_gpt(*again[1:]).status == 0 and is_as_it_was(built)
    assert load_tokenizer(Path(built.cache_dir) / "tokenizer").sha256 != before
    assert niels_gpt(*back[1:]).status == 0 and is_as_it_was(built)
    assert load_tokenizer(Path(built.cache_dir) / "tokenizer").sha256 == before


def test_a_trained_tokenizer_waits_too_and_is_trained_once(mirror, tmp_path):
    own = shutil.copytree(mirror, tmp_path / "own")
    first = Settings(source_root=str(own), cache_dir=str(tmp_path / "c"), vocab_size=600)
    recipes(first)["pretrain/roam"](first)
    changed = dataclasses.replace(first, vocab_size=500)
    rows = next((own / "databricks").rglob("*.jsonl"))
    whole = rows.read_text()
    rows.write_text("this is no json\n")
    with refused("E303", "dolly15k", "unreadable_row", "databricks-dolly-15k.jsonl"):
        recipes(changed)["sft/dolly15k"](changed)
    assert [item.action for item in plans.plan(first, ["pretrain/roam"])] == ["up to date"] * 2
    assert recipe.stage_tokenizer(changed).reused  # the one that was trained a moment ago
    rows.write_text(whole)  # of a source that failed
    assert not recipes(changed)["sft/dolly15k"](changed).reused
    assert load_tokenizer(tmp_path / "c" / "tokenizer").vocab_size <= 500


def test_a_first_model_is_installed_with_the_first_cache(settings):
    folder = Path(settings.cache_dir) / "tokenizer"
    absent = dataclasses.replace(settings, source_root=str(folder.parent / "nowhere"))
    with refused("E301", kind=FileNotFoundError):
        recipes(absent)["pretrain/roam"](absent)
    assert not folder.exists()
    recipes(settings)["pretrain/roam"](settings)
    assert load_tokenizer(folder).sha256


def test_a_tokenizer_of_little_text_and_a_source_that_it_has_not_seen_are_said(
    tmp_path,
):
    (tmp_path / "tiny.txt").write_text("a little text\n" * 9)
    (tmp_path / "more.txt").write_text("\n".join(TINY_TEXTS))
    flags = ["--cache-dir", str(tmp_path / "c")]
    done = niels_gpt("build", "--pretrain", f"tiny={tmp_path}/tiny.txt", *flags)
    assert done.status == 0 and "little text, 126 bytes of tiny" in done.err.replace("125 bytes", "126 bytes")
    assert "of 16,000 asked for" in done.out and "has not seen" not in done.err
    size = load_tokenizer(tmp_path / "c" / "tokenizer").vocab_size
    more = ["build", "--pretrain", f"more={tmp_path}/more.txt", *flags]
    done = niels_gpt(*more)
    (said,) = [line for line in done.err.splitlines() if "has not seen" in line]
    assert done.status == 0 and "pretrain/more: " in said and "of tiny" in said
    done = niels_gpt(*more)
    assert done.status == 0 and "has not seen" not in done.err  # it is up to date
    build = said[said.index("niels-gpt build") :]
    assert "--retrain-tokenizer" in build
    assert niels_gpt(*shlex.split(build)[1:]).status == 0
    meta = json.loads((tmp_path / "c" / "tokenizer" / "meta.json").read_bytes())
    assert set(meta["trained_on_bytes"]) == {"tiny", "more"} and meta["vocab_size"] > size


@pytest.mark.parametrize(
    "put",
    [
        lambda model: model.symlink_to(model.parent / "meta.json"),
        lambda model: model.symlink_to("/dev/zero"),
        lambda model: (model.touch(), os.truncate(model, 10**11)),
        os.mkfifo,
    ],
)
def test_whatever_stands_for_the_model_of_a_cache_is_not_read(built, put):
    model = Path(built.cache_dir) / "tokenizer" / "spm.model"
    shutil.copyfile(model, model.parent.parent / "good.model")
    model.unlink()
    put(model)
    with pytest.raises(CacheError, match=r"link|no.* regular file|100,000,000,000 bytes"):
        load_tokenizer(model, follow_links=False)
    roam, chats = (f"{built.cache_dir}/{key}" for key in ("pretrain/roam", "sft/oasst1"))
    assert niels_gpt("show", roam).status == 3
    done = niels_gpt("locate", chats, "val", "0")
    assert done.status == 0
    assert "[[4]]" in done.out  # ids, for there is no tokenizer to read them with
    assert niels_gpt("diff", roam, roam).status == 0
    named = model.parent.parent / "named.model"
    named.symlink_to(model.parent.parent / "good.model")
    assert niels_gpt("show", roam, "--tokenizer", str(named)).status == 0  # a user may name a link
