"""What a newcomer sees: tables of at most 100 columns, short names, public folders, no warning that it is small."""

from pathlib import Path

import pytest

from niels_gpt.commands.main import main
from niels_gpt.display.numbers import count_text, size_text
from niels_gpt.display.tables import WIDTH, table
from niels_gpt.inspection.stats import stats

ROLLOUTS = '{"prompt_ids": [1, 2, 3], "completions": [[4, 5], [4, 6], [7]]}\n'


@pytest.fixture
def caches(sample: Path) -> Path:
    return sample.parent


@pytest.mark.parametrize(
    "command",
    [
        "list sample",
        "build --all --source-root sample --cache-dir . --tokenizer sample/tokenizer/spm.model",
        "build --all --source-root sample --cache-dir . --tokenizer sample/tokenizer/spm.model --dry-run",
        "build --all --source-root sample --cache-dir none --dry-run",
        "stats sample/sft/oasst1",
        "stats sample/pretrain/roam",
        "diff sample/sft/oasst1 sample/sft/dolly15k",
        "verify .",
        "tree stats rollouts.jsonl",
        "tree show rollouts.jsonl",
        "explain E106",
    ],
)
def test_what_a_command_prints_fits_100_columns_and_names_public_folders(
    caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(caches)
    (caches / "rollouts.jsonl").write_text(ROLLOUTS)
    capsys.readouterr()
    main(command.split())
    out, err = capsys.readouterr()
    assert out and "error[" not in err, err
    assert [line for line in out.splitlines() if len(line) > WIDTH] == []
    assert ".versions" not in out and "ngpt_" not in out


@pytest.mark.parametrize(
    "command", ["show sample/sft/oasst1", "show sample/pretrain/roam --tokens 2000", "locate sample/sft/oasst1 val 0"]
)
def test_what_shows_text_has_short_names_and_the_public_folder(
    caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(caches)
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert "<|eot|>" in out and "ngpt_" not in out and ".versions" not in out


def test_the_size_of_the_sample_is_no_reason_to_warn(
    caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(caches)
    flags = ["--source-root", "sample", "--cache-dir", "silent"]
    assert main(["build", "fineweb_edu", "gutenberg", *flags]) == 0
    out, err = capsys.readouterr()
    codes = [getattr(record, "code", None) for record in caplog.records]
    assert "W306" not in codes and "W408" not in codes and "W201" not in err and "asked for" not in out


def test_the_figures_of_a_cache_print_as_a_table_and_as_html(caches: Path) -> None:
    found = stats(caches / "sample/sft/oasst1")
    assert dict(found)["licence"] == "MIT"
    assert str(found) == repr(found) and "licence  " in str(found)
    html = found._repr_html_()
    assert html.startswith("<table>") and "<th>licence</th><td>MIT</td>" in html


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (14_225, "14,225"),
        (99_999, "99,999"),
        (123_456, "123k"),
        (999_999, "1M"),
        (205_000_000, "205M"),
        (1.5e9, "1.5B"),
    ],
)
def test_counts_are_exact_until_they_are_long(count: float, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (32 << 10, "32 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (73_253_478, "69.9 MiB"),
        (3 << 39, "1.5 TiB"),
    ],
)
def test_sizes_have_a_unit(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_the_last_column_of_a_table_is_folded() -> None:
    lines = table([("name", "value"), ("a", "word " * 40), ("b", "\x1b[2J")]).splitlines()
    assert max(map(len, lines)) <= WIDTH and lines[2].startswith("      word") and "\x1b" not in lines[-1]
    assert " ".join(" ".join(lines[1:-1]).split()) == "a " + "word " * 39 + "word"
