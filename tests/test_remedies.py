"""A refusal ends in the command that mends it, with the flags in use; it works as it is printed.

Run: pytest tests/test_remedies.py
"""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from niels_gpt.cache import cli
from niels_gpt.recipes.commands import build_command
from niels_gpt.settings import Settings

PYTHON = ["python", "-m", "niels_gpt.cache.cli"]
ROWS = 8_000  # more than are read ahead, so that a source that breaks later leaves something unfinished


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of one's own text: a file of rows, and one that is damaged."""
    folder = tmp_path / "my texts"
    folder.mkdir()
    with open(folder / "a.jsonl", "w") as file:
        file.writelines(json.dumps({"id": f"row {number}", "text": f"text {number}"}) + "\n" for number in range(ROWS))
    (folder / "b.jsonl.gz").write_bytes(b"no gzip")
    return folder


@pytest.fixture
def flags(tmp_path: Path, own: Path, tiny_model_path: Path) -> list[str]:
    """Flags of which no one has its default."""
    lines = ["--pretrain", f"notes={own}", "--licence", "notes=CC0, or so", "--no-append-eot", "--seed", "7"]
    return [*lines, "--cache-dir", str(tmp_path / "the cache"), "--tokenizer-model", str(tiny_model_path)]


def remedy(message: str) -> list[str]:
    """Return the words of the command that a message ends in."""
    return shlex.split(message.strip().splitlines()[-1].rpartition(": ")[2])


def carried_out(message: str) -> int:
    """Run the command that a message ends in; returns its exit status."""
    words = remedy(message)
    if words[:3] != PYTHON:
        return subprocess.run(words, check=False).returncode
    return cli.main(words[3:])


def change(file: Path, number: int) -> None:
    lines = file.read_text().splitlines(keepends=True)
    lines[number] = lines[number].replace('"text ', '"other ')
    file.write_text("".join(lines))


def test_the_command_of_a_build_has_every_flag_that_matters_to_it(tmp_path: Path) -> None:
    given = {"pretrain": "a=x;b=y z", "sft": "c=w", "licence": "b=CC0;a=MIT", "append_eot": False, "vocab_size": 300}
    settings = Settings(source_root="the mirror", **given)  # type: ignore[arg-type]
    words = shlex.split(build_command(settings, "pretrain/b", "--restart"))
    assert words[:3] == PYTHON and words[3:] == [
        *["build", "b", "--restart", "--source-root", "the mirror", "--vocab-size", "300", "--no-append-eot"],
        *["--pretrain", "b=y z", "--licence", "b=CC0"],
    ]


def test_a_source_that_changed_is_taken_from_scratch(
    own: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["build", *flags]) == 1
    (own / "b.jsonl.gz").unlink()
    change(own / "a.jsonl", 5)
    capsys.readouterr()
    assert cli.main(["build", *flags]) == 1
    error = capsys.readouterr().err
    assert "a.jsonl#6" in error or "'row 5'" in error
    assert "building-" not in error and "(None" not in error and "other 5" in error
    assert carried_out(error) == 0
    assert cli.main(["build", *flags, "--dry-run"]) == 0
    assert "pretrain/notes  up to date" in capsys.readouterr().out


def test_a_restart_builds_what_is_up_to_date_too_and_only_what_was_asked_for(
    own: Path, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["build", *flags]) == 1
    (own / "b.jsonl.gz").unlink()
    versions = tmp_path / "the cache" / "pretrain" / ".versions" / "notes"
    (journal,) = versions.glob("*.journal")
    other = ["--pretrain", f"more={own / 'a.jsonl'}"]
    for _ in range(2):
        assert cli.main(["build", "more", *other, *flags[-4:], "--restart"]) == 0
        assert "pretrain/more  built  " in capsys.readouterr().out
    assert journal.is_dir()
    assert cli.main(["build", *flags, "--restart"]) == 0
    assert not journal.exists()


@pytest.mark.parametrize("family", ["pretrain", "sft"])
def test_a_build_without_text_keeps_nothing_so_that_its_advice_works(
    tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    own = tmp_path / "a.jsonl"
    row = {"text": "<|eot|>"} if family == "pretrain" else {"messages": [{"role": "assistant", "content": "<|eot|>"}]}
    own.write_text(json.dumps(row) + "\n")
    flags = [f"--{family}", f"a={own}", "--cache-dir", str(tmp_path / "c"), "--tokenizer-model", str(tiny_model_path)]
    assert cli.main(["build", *flags]) == 1
    capsys.readouterr()
    assert not list(tmp_path.glob("c/*/.versions/a/building-*"))
    good = json.loads(json.dumps(row).replace("<|eot|>", "some words"))
    own.write_text("".join(json.dumps({**good, "id": number}) + "\n" for number in range(3)))
    assert cli.main(["build", *flags]) == 0, capsys.readouterr().err


def test_a_damaged_unfinished_build_is_started_from_scratch(
    own: Path, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["build", *flags]) == 1
    (own / "b.jsonl.gz").unlink()
    (texts,) = (tmp_path / "the cache").rglob("texts.bin")
    texts.write_bytes(b"x" * texts.stat().st_size)
    capsys.readouterr()
    assert cli.main(["build", *flags]) == 1
    assert carried_out(capsys.readouterr().err) == 0
