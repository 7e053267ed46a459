"""build --partition, seal, and what --dry-run, --json and a wrong use of --partitions say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from support.data_files import write
from support.tiny_texts import TINY_TEXTS

from niels_gpt.cache import cli
from niels_gpt.commands.main import main


@pytest.fixture
def notes(tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flags of a cache in two partitions; the text is below the current folder."""
    for number, text in enumerate(TINY_TEXTS[:12]):
        write(tmp_path / f"notes/{number:02}.md", text)
    monkeypatch.chdir(tmp_path)
    return ["--partitions", "2", "--pretrain", "notes=notes/*.md", "--tokenizer", str(tiny_model_path)]


def test_partitions_are_built_and_sealed_by_the_commands_that_are_printed(
    notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "notes", "--partition", "1", *notes]) == 0
    out = capsys.readouterr().out
    assert "pretrain/notes: partition 1 of 2: " in out and "1 of 2 partitions is not finished" in out
    assert "next:" not in out
    assert main(["build", "notes", "--dry-run", *notes]) == 0
    assert "2 partitions: 1 finished, 1 missing" in " ".join(capsys.readouterr().out.split())
    assert main(["seal", "notes", *notes]) == 1
    assert "E510" in capsys.readouterr().err
    assert main(["build", "notes", "--partition", "0", "--json", *notes]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["partition"], found["partitions"], found["reused"], found["unfinished"]) == (0, 2, False, [])
    assert main(["build", "notes", "--partition", "0", *notes]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("next: niels-gpt seal notes ") and main(shlex.split(last)[2:]) == 0
    assert "2 partitions" in capsys.readouterr().out
    assert main(["seal", "notes", "--sizes-only", "--json", *notes]) == 0
    assert json.loads(capsys.readouterr().out)["caches"][0]["state"] == "up to date"
    assert main(["build", "notes", "--partition", "0", "--json", *notes]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sealed"], found["reused"]) == (True, True) and not {"docs", "totals"} & {*found}
    assert main(["build", "notes", "--partition", "0", "--restart", *notes]) == 2
    again = shlex.split(capsys.readouterr().err.rpartition("scratch: ")[2])
    assert again[:2] == ["niels-gpt", "build"] and "--restart" in again and "--partition" not in again
    assert main([*again[1:], "--dry-run"]) == 0
    assert main(["build", "notes", "--partition", "0", *notes]) == 0
    assert "up to date" in capsys.readouterr().out


def test_the_other_face_builds_and_seals_too(notes: list[str]) -> None:
    for number in "01":
        assert cli.main(["build", "notes", "--partition", number, *notes]) == 0
    assert cli.main(["seal", "notes", *notes]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["build", "oasst1", "--partitions", "8"],
        ["build", "oasst1", "--partitions", "8", "--partition", "1"],
        ["build", "roam", "--partition", "1"],
        ["build", "roam", "wikitext", "--partitions", "8", "--partition", "1"],
        ["build", "roam", "--partitions", "8", "--partition", "8"],
        ["build", "gutenberg", "--partitions", "8", "--partition", "1"],
        ["build", "--all", "--partitions", "8", "--partition", "1"],
        ["build", "roam", "--partitions", "8", "--partition", "1", "--dry-run"],
        ["seal", "oasst1", "--partitions", "8"],
        ["seal", "roam"],
    ],
)
def test_a_wrong_use_is_an_error_of_usage(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--cache-dir", str(tmp_path / "c")]) == 2
    assert "E10" in capsys.readouterr().err and not (tmp_path / "c").exists()


def test_of_several_caches_those_without_partitions_are_named_once(
    flags: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["build", "roam", "oasst1", "dolly15k", "--partitions", "2", *flags]) == 0
    said = [record.getMessage() for record in caplog.records if getattr(record, "code", "") == "W505"]
    assert len(said) == 1 and "sft/oasst1, sft/dolly15k" in said[0] and "pretrain/roam" in capsys.readouterr().out
    assert main(["build", "oasst1", *flags]) == 0
    assert "up to date" in capsys.readouterr().out, "whole is whole"
