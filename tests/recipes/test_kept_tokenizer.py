"""A build takes the tokenizer that is there; another one is made only where this run asks for it, and agrees."""

import contextlib
import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import niels_gpt
from support.data_files import lines, write
from support.tiny_texts import TINY_TEXTS

from niels_gpt.kinds.verify import find_damage
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import load_tokenizer


@pytest.fixture
def notes(tmp_path):
    """The flags of a cache of notes, built with a tokenizer of at most 320 pieces, and its folder of caches."""
    write(tmp_path / "notes.jsonl", lines(*[{"text": text} for text in TINY_TEXTS]))
    write(tmp_path / "more.jsonl", lines(*[{"text": f"{text} And more."} for text in TINY_TEXTS]))
    flags = ["--pretrain", f"notes={tmp_path}/notes.jsonl", "--cache-dir", str(tmp_path / "c")]
    assert niels_gpt("build", *flags, "--vocab-size", "320").status == 0
    return flags


def more(notes, *flags):
    """Return the arguments that build a second cache in the same folder."""
    folder = Path(notes[-1])
    return ["build", "--pretrain", f"more={folder.parent}/more.jsonl", *notes[2:], *flags]


def tokenizer_of(notes):
    return load_tokenizer(Path(notes[-1]) / "tokenizer").sha256


def test_a_build_without_flags_keeps_the_tokenizer_and_every_cache(notes):
    before, cache = tokenizer_of(notes), Path(notes[-1]) / "pretrain"
    done = niels_gpt(*more(notes))
    assert done.status == 0 and "W404" not in done.err and tokenizer_of(notes) == before
    assert not find_damage(cache / "notes", deep=True) and not find_damage(cache / "more", deep=True)
    same = niels_gpt("build", *notes, "--vocab-size", "320", "--json")  # equal to what is recorded: asks nothing
    assert same.status == 0 and same.json["caches"][-1]["state"] == "up to date"


@pytest.mark.parametrize("flags", [["--vocab-size", "350"], ["--vocab-size", "16000"], ["--retrain-tokenizer"]])
def test_another_one_needs_yes_where_it_ends_a_cache_that_is_not_built_again(notes, flags):
    before = tokenizer_of(notes)
    done = niels_gpt(*more(notes, *flags))
    assert done.status == 2 and "error[E412]" in done.err and "pretrain/notes" in done.err and "--yes" in done.err
    assert tokenizer_of(notes) == before and not (Path(notes[-1]) / "pretrain" / "more").exists()
    assert niels_gpt(*more(notes, *flags, "--dry-run")).status == 0
    assert niels_gpt(*more(notes, *flags, "--yes")).status == 0 and tokenizer_of(notes) != before
    again = niels_gpt("build", *notes)  # the one that is there now is kept, too
    assert again.status == 0 and not find_damage(Path(notes[-1]) / "pretrain" / "notes", deep=True)


def test_nothing_is_asked_where_every_cache_is_built_again(notes):
    before = tokenizer_of(notes)
    both = [*more(notes), *notes[:2]]
    assert niels_gpt(*both, "--vocab-size", "350").status == 0 and tokenizer_of(notes) != before
    for name in ("notes", "more"):
        assert not find_damage(Path(notes[-1]) / "pretrain" / name, deep=True)


def test_the_remedy_of_a_damaged_tokenizer_makes_the_same_one(notes, tiny_model_path):
    assert niels_gpt("build", *notes, "--tokenizer", str(tiny_model_path)).status == 0
    before, model = tokenizer_of(notes), Path(notes[-1]) / "tokenizer" / "spm.model"
    raw = model.read_bytes()
    model.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    done = niels_gpt("build", *notes, "--own-val-frac", "0.2")
    (line,) = (line for line in done.err.splitlines() if "rm " in line)
    removed, command = line[line.index("rm ") :].split(" && ")
    assert shlex.split(removed)[-1] == f"{notes[-1]}/tokenizer" and f"--tokenizer {tiny_model_path}" in command
    (Path(notes[-1]) / "tokenizer").unlink()
    assert niels_gpt(*shlex.split(command)[1:]).status == 0 and tokenizer_of(notes) == before


def test_settings_in_python_ask_as_flags_do(notes):
    folder = Path(notes[-1])
    settings = Settings(cache_dir=str(folder), pretrain=notes[1])
    before = tokenizer_of(notes)
    assert build_token_cache(settings, "notes").reused and ensure_tokenizer(settings).reused
    build_token_cache(dataclasses.replace(settings, vocab_size=350), "notes")
    assert tokenizer_of(notes) != before


@pytest.mark.parametrize(("answer", "status"), [("n", 2), ("y", 0)])
def test_on_a_terminal_it_is_asked(notes, answer, status):
    before = tokenizer_of(notes)
    ours, theirs = os.openpty()
    command = [
        sys.executable,
        "-c",
        "from niels_gpt.commands import start; raise SystemExit(start())",
        *more(notes, "--vocab-size", "350"),
    ]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs, env=os.environ) as process:
        os.write(ours, f"{answer}\n".encode())
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # the terminal is gone with the process
            while part := os.read(ours, 4096):
                said += part
    os.close(ours)
    assert b"Replace it?" in said and process.returncode == status, said
    assert (tokenizer_of(notes) == before) == (answer == "n")
