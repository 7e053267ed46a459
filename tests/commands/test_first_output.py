"""What a newcomer sees: tables of at most 100 columns, short names, public folders, no warning that it is small."""

import re

import pytest
from support.commands import niels_gpt

from niels_gpt.kinds.look import stats

ROLLOUTS = '{"prompt_ids": [1, 2, 3], "completions": [[4, 5], [4, 6], [7]]}\n'


@pytest.fixture
def caches(sample):
    return sample.parent


@pytest.mark.parametrize(
    "command",
    [
        "list sample",
        pytest.param(
            "build --all --source-root sample --cache-dir . --tokenizer sample/tokenizer/spm.model",
            marks=pytest.mark.slow,
        ),
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
def test_what_a_command_prints_fits_100_columns_and_names_public_folders(caches, monkeypatch, command):
    monkeypatch.chdir(caches)
    (caches / "rollouts.jsonl").write_text(ROLLOUTS)
    done = niels_gpt(*command.split())
    out, err = done.out, done.err
    assert out and "error[" not in err, err
    assert [line for line in out.splitlines() if len(line) > 100] == []
    assert ".versions" not in out and "ngpt_" not in out


@pytest.mark.parametrize(
    "command", ["show sample/sft/oasst1", "show sample/pretrain/roam --tokens 2000", "locate sample/sft/oasst1 val 0"]
)
def test_what_shows_text_has_short_names_and_the_public_folder(caches, monkeypatch, command):
    monkeypatch.chdir(caches)
    done = niels_gpt(*command.split())
    assert done.status == 0
    out = done.out
    assert "<|eot|>" in out and "ngpt_" not in out and ".versions" not in out


def test_the_size_of_the_sample_is_no_reason_to_warn(caches, monkeypatch):
    monkeypatch.chdir(caches)
    flags = ["--source-root", "sample", "--cache-dir", "silent"]
    done = niels_gpt("build", "fineweb_edu", "gutenberg", *flags)
    assert done.status == 0 and "asked for" not in done.out
    assert not {"W306", "W408", "W201"} & set(re.findall(r"W\d+", done.err))


def test_what_leaves_no_text_for_a_tokenizer_is_told_once(tmp_path):
    done = niels_gpt("build", "roam", "--source-root", tmp_path / "none", "--cache-dir", tmp_path / "cache")
    assert "error[E406]" in done.err and done.err.count("no folder at") == 1
    assert "roam, wikitext, " in done.err and "trained without" not in done.err


def test_the_figures_of_a_cache_print_as_a_table_and_as_html(caches):
    found = stats(caches / "sample/sft/oasst1")
    assert dict(found)["licence"] == "MIT"
    assert str(found) == repr(found) and "licence  " in str(found)
    html = found._repr_html_()
    assert html.startswith("<table>") and "<th>licence</th><td>MIT</td>" in html
