"""build --partition, seal, and what --dry-run, --json and a wrong use of --partitions say."""

import shlex

import pytest
from support.commands import niels_gpt
from support.data_files import write
from support.tiny_texts import TINY_TEXTS


@pytest.fixture
def notes(tmp_path, tiny_model_path, monkeypatch):
    """The flags of a cache in two partitions; the text is below the current folder."""
    for number, text in enumerate(TINY_TEXTS[:12]):
        write(tmp_path / f"notes/{number:02}.md", text)
    monkeypatch.chdir(tmp_path)
    return ["--partitions", "2", "--pretrain", "notes=notes/*.md", "--tokenizer", str(tiny_model_path)]


def test_partitions_are_built_and_sealed_by_the_commands_that_are_printed(notes):
    done = niels_gpt("build", "notes", "--partition", "1", *notes)
    assert done.status == 0
    out = done.out
    assert "pretrain/notes: partition 1 of 2: " in out and "1 of 2 partitions is not finished" in out
    assert "next:" not in out
    done = niels_gpt("build", "notes", "--dry-run", *notes)
    assert done.status == 0 and "2 partitions: 1 finished, 1 missing" in " ".join(done.out.split())
    done = niels_gpt("seal", "notes", *notes)
    assert done.status == 1 and "E510" in done.err
    done = niels_gpt("build", "notes", "--partition", "0", "--json", *notes)
    assert done.status == 0
    found = done.json
    assert (found["partition"], found["partitions"], found["reused"], found["unfinished"]) == (0, 2, False, [])
    done = niels_gpt("build", "notes", "--partition", "0", *notes)
    assert done.status == 0
    last = done.out.splitlines()[-1]
    done = niels_gpt(*shlex.split(last)[2:])
    assert last.startswith("next: niels-gpt seal notes ") and done.status == 0
    assert "2 partitions" in done.out
    done = niels_gpt("seal", "notes", "--sizes-only", "--json", *notes)
    assert done.status == 0 and done.json["caches"][0]["state"] == "up to date"
    done = niels_gpt("build", "notes", "--partition", "0", "--json", *notes)
    assert done.status == 0
    found = done.json
    assert (found["sealed"], found["reused"]) == (True, True) and not {"docs", "totals"} & {*found}
    done = niels_gpt("build", "notes", "--partition", "0", "--restart", *notes)
    assert done.status == 0 and "nothing of partition 0 was damaged" in done.out
    assert niels_gpt(*shlex.split(done.out.splitlines()[-1])[2:]).status == 0
    done = niels_gpt("build", "notes", "--partition", "1", "--restart", "--json", *notes)
    assert (done.json["sealed"], done.json["mended"], done.json["damaged"]) == (True, [], [])
    done = niels_gpt("build", "notes", "--partition", "0", *notes)
    assert done.status == 0 and "up to date" in done.out


def test_the_other_face_builds_and_seals_too(notes):
    for words in (["build", "--partition", "0"], ["build", "--partition", "1"], ["seal"]):
        assert niels_gpt(*words, "notes", *notes, module="niels_gpt.cache.cli").status == 0


@pytest.mark.parametrize(
    "words",
    [
        ["build", "trees/oasst1", "--partitions", "8"],
        ["build", "trees/oasst1", "--partitions", "8", "--partition", "1"],
        ["build", "roam", "--partition", "1"],
        ["build", "roam", "wikitext", "--partitions", "8", "--partition", "1"],
        ["build", "roam", "--partitions", "8", "--partition", "8"],
        ["build", "gutenberg", "--partitions", "8", "--partition", "1"],
        ["build", "--all", "--partitions", "8", "--partition", "1"],
        ["build", "roam", "--partitions", "8", "--partition", "1", "--dry-run"],
        ["seal", "trees/oasst1", "--partitions", "8"],
        ["seal", "roam"],
    ],
)
def test_a_wrong_use_is_an_error_of_usage(words, tmp_path):
    done = niels_gpt(*words, "--cache-dir", tmp_path / "c")
    assert done.status == 2 and "E10" in done.err and not (tmp_path / "c").exists()


def test_of_several_caches_those_without_partitions_are_named_once(
    flags,
):
    done = niels_gpt("build", "roam", "oasst1", "trees/oasst1", "--partitions", "2", *flags)
    assert done.status == 0
    said = [line for line in done.err.splitlines() if "W505" in line]
    assert len(said) == 1 and " trees/oasst1: " in said[0] and "sft/oasst1" in done.out
    done = niels_gpt("build", "trees/oasst1", *flags)
    assert done.status == 0
    assert "up to date" in done.out, "whole is whole"


def test_a_dry_run_says_that_each_partition_may_cut_a_document_at_its_part_of_the_budgets(notes, mirror):
    flags = ["--tokenizer", notes[-1], "--source-root", str(mirror), "--dry-run"]
    for name, told in {"fineweb_edu": True, "wikitext": False}.items():
        done = niels_gpt("build", name, "--partitions", "3", *flags)
        assert done.status == 0, done.err
        assert ("3 partitions may cut a document" in " ".join(done.out.split())) == told
    assert "may cut" not in niels_gpt("build", "fineweb_edu", *flags).out
