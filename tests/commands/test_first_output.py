"""What a newcomer sees: short names, public folders, no warning that the sample is small."""

import re

import pytest
from support.commands import niels_gpt

from niels_gpt.kinds.look import stats


@pytest.fixture
def caches(sample):
    return sample.parent


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
