"""Folders for drafts of every kind: which cache is enough for which, and what the files hold."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.commands import niels_gpt
from support.eagle3_looks import problems_of
from support.errors import refused
from support.exchange_files import BLOCKS, specforge_dict, write_row, write_specforge, write_speculators

from niels_gpt.eagle3.exchange.export import export_cache, refuse_for
from niels_gpt.eagle3.exchange.tools import KINDS
from niels_gpt.eagle3.format.drafters import DRAFTERS
from niels_gpt.eagle3.native import NativeEagle3Dataset

pytestmark = pytest.mark.usefixtures("one_thread")

ENOUGH = {
    "speculators": {
        "loss": {"eagle3", "peagle"},
        "reply": {"eagle3", "peagle", "dflash", "dspark"},
        "all": {"eagle3", "peagle", "dflash", "dspark", "mtp"},
    },
    "specforge": {
        "loss": {"eagle3", "dflash"},
        "reply": {"eagle3", "dflash", "dspark"},
        "all": {"eagle3", "dflash", "dspark"},
    },
    "automodel": {"loss": set(), "reply": {"dspark"}, "all": {"dspark"}},
}
"""Tool -> target rows of a cache with three blocks -> the kinds of drafts that the tool trains from it."""


def manifest_of(targets, layers=BLOCKS, last_hidden="pre_norm"):
    return {
        "format_version": "native-1",
        "targets": targets,
        "aux_layer_ids": [*layers],
        "conventions": {"last_hidden": last_hidden},
    }


def answers(tool, manifest):
    """The kinds of drafts that are not refused, and the texts of the other refusals."""
    taken, said = set(), {}
    for kind in DRAFTERS:
        try:
            refuse_for(tool, Path("c"), manifest, kind)
            taken.add(kind)
        except Exception as error:
            assert getattr(error, "code", None) == "E710"
            said[kind] = str(error)
    return taken, said


@pytest.mark.parametrize("tool", KINDS)
@pytest.mark.parametrize("targets", ["loss", "reply", "all"])
def test_a_tool_is_given_the_caches_that_have_what_its_draft_reads(tool, targets):
    taken, said = answers(tool, manifest_of(targets))
    assert taken == ENOUGH[tool][targets]
    for kind, text in said.items():
        reads = DRAFTERS[kind].reads
        lacks = f"has target rows for {targets} only, expected {reads}"
        assert (lacks in text and f"--targets {reads}" in text) if kind in KINDS[tool] else f"asked for {kind}" in text
    assert answers(tool, {"format_version": 2})[0] == set()


def test_blocks_and_the_side_of_the_norm_decide_too():
    for tool, expected in {"speculators": {"mtp"}, "specforge": set(), "automodel": set()}.items():
        taken, said = answers(tool, manifest_of("all", layers=()))
        assert taken == expected and all("has 0 auxiliary layers" in said[kind] for kind in {*KINDS[tool]} - {"mtp"})
    taken, said = answers("specforge", manifest_of("all", layers=(1, 2, 3, 4)))
    assert taken == {"dflash", "dspark"} and "has 4 auxiliary layers, expected 3" in said["eagle3"]
    taken, said = answers("speculators", manifest_of("reply", last_hidden="post_norm"))
    assert taken == set() and all("after the final norm, which cannot be undone" in text for text in said.values())
    remedies = {kind: text.partition("niels-gpt eagle3 export ")[2] for kind, text in said.items()}
    words = {kind: f"c OUT --to specforge --for {kind}" for kind in ("eagle3", "dflash", "dspark")}
    assert {kind: text for kind, text in remedies.items() if text} == words
    assert answers("specforge", manifest_of("reply", last_hidden="post_norm"))[0] == {*words}
    said = answers("speculators", manifest_of("loss", layers=(1, 2), last_hidden="post_norm"))[1]
    assert {kind for kind, text in said.items() if "--to specforge" in text} == {"dflash"}  # it reads no last state


@pytest.fixture(scope="module")
def whole(given, importing, tmp_path_factory):
    """A folder of speculators with states of float32, and caches of it by target rows."""
    folder = tmp_path_factory.mktemp("whole")
    source = write_speculators(folder / "speculators", given)
    for targets in ("loss", "reply", "all"):
        importing("speculators", source, folder / targets, targets=targets)
    return folder


def test_the_note_on_other_drafts_is_there_where_it_is_true(whole, tmp_path):
    notes = {
        "loss": ["for eagle3, peagle only: dflash, dspark, mtp read states that the cache does not have"],
        "reply": ["for dflash, dspark, eagle3, peagle only: mtp reads states that the cache does not have"],
        "all": [],
    }
    for targets, expected in notes.items():
        assert [*export_cache(whole / targets, "speculators", tmp_path / targets).notes] == expected
        done = export_cache(whole / targets, "specforge", tmp_path / f"s-{targets}", made_for="dflash")
        assert (done.notes, done.last_hidden, done.without_last) == ((), "none", 0)  # one folder for each kind


def files_of(folder, pattern):
    """The tensors of each file with states, by name."""
    from safetensors.torch import load_file

    paths = sorted(folder.rglob(pattern), key=lambda path: (len(path.name), path.name))
    return [torch.load(path) if path.suffix == ".ckpt" else load_file(path) for path in paths]


def assert_equal_files(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, each in one.items():
            assert each.dtype == other[name].dtype and torch.equal(each, other[name]), name


def test_speculators_files_of_a_whole_cache_are_those_of_its_producer(whole, importing, tmp_path):
    """Each state, none of zeros; the manifest says for which drafts it is made and enough."""
    done = importing("speculators", whole / "speculators", tmp_path / "c", made_for="mtp")
    assert (done.samples, done.target_rows) == (10, done.tokens)
    manifest = NativeEagle3Dataset(tmp_path / "c").manifest
    assert (manifest["made_for"], manifest["targets"], len(manifest["enough_for"])) == ("mtp", "all", 5)
    assert problems_of(tmp_path / "c") == []
    exported = export_cache(tmp_path / "c", "speculators", tmp_path / "f")
    assert (exported.made_for, exported.without_aux, exported.without_last, exported.left_out) == ("mtp", 0, 0, 0)
    assert_equal_files(files_of(tmp_path / "f", "hs_*"), files_of(whole / "speculators", "hs_*"))


def test_states_that_an_export_has_not_are_not_imported_as_if_they_were_there(whole, importing, tmp_path):
    for made, targets, part in (("loss", "reply", "last"), ("reply", "all", "auxiliary")):
        export_cache(whole / made, "speculators", tmp_path / made)
        with refused("E711", f"the {part} states of token", f"are zeros, and --targets {targets} stores them"):
            importing("speculators", tmp_path / made, tmp_path / "c", targets=targets)
    with refused("E101", "--for mtp with --targets reply", "reads the rows of all", "Leave --targets out"):
        importing("speculators", whole / "speculators", tmp_path / "c", made_for="mtp", targets="reply")


def test_states_without_blocks_are_imported_for_mtp_alone(given, importing, tmp_path):
    source = write_speculators(tmp_path / "f", given)
    for index, chat in enumerate(given):
        write_row(source, index, chat, hidden_states=chat.pre[:, None].clone())
    for how in ({}, {"made_for": "dflash"}):
        with refused("E711", "no auxiliary layers", "Pass --for mtp"):
            importing("speculators", source, tmp_path / "c", **how)
    done = importing("speculators", source, tmp_path / "c", made_for="mtp")
    assert (done.convention.aux_layer_ids, done.target_rows) == ((), done.tokens)
    assert problems_of(tmp_path / "c") == []
    export_cache(tmp_path / "c", "speculators", tmp_path / "again")
    assert_equal_files(files_of(tmp_path / "again", "hs_*"), files_of(source, "hs_*"))


def test_specforge_files_for_dspark_go_both_ways_and_become_those_for_dflash(given, importing, tmp_path):
    expected = [specforge_dict(chat, "dspark") for chat in given]
    write_specforge(tmp_path / "f", given, "dspark")
    done = importing("specforge", tmp_path / "f", tmp_path / "c", made_for="dspark")
    assert (done.convention.aux_layer_ids, done.convention.last_hidden) == (BLOCKS, "post_norm")
    assert done.target_rows == done.tokens
    manifest = NativeEagle3Dataset(tmp_path / "c").manifest
    assert (manifest["made_for"], manifest["targets"]) == ("dspark", "all") and problems_of(tmp_path / "c") == []
    exported = export_cache(tmp_path / "c", "specforge", tmp_path / "again")
    assert (exported.made_for, exported.last_hidden, exported.notes) == ("dspark", "post_norm", ())
    assert_equal_files(files_of(tmp_path / "again", "*.ckpt"), expected)
    export_cache(tmp_path / "c", "specforge", tmp_path / "dflash", made_for="dflash")
    for each in expected:
        del each["target_last_hidden_states"]
    assert_equal_files(files_of(tmp_path / "dflash", "*.ckpt"), expected)
    with refused("E710", "after the final norm", "--to specforge --for dspark"):
        export_cache(tmp_path / "c", "speculators", tmp_path / "no")
    with refused("E101", "--for dflash", "no last hidden states", "--for dspark"):
        importing("specforge", tmp_path / "dflash", tmp_path / "no", made_for="dflash")
    with refused("E101", "--for mtp", "eagle3, dflash, dspark"):
        importing("specforge", tmp_path / "f", tmp_path / "no", made_for="mtp")
    with refused("E711", "aux_hidden_state is None", "--for dspark"):
        importing("specforge", tmp_path / "f", tmp_path / "no")


def test_samples_that_specforge_would_refuse_are_left_out_and_counted(given, importing, tmp_path):
    alone = [replace(chat, mask=torch.arange(len(chat.ids)) % 2 == 1) for chat in given[:3]]
    importing("speculators", write_speculators(tmp_path / "f", [*alone, *given[3:]]), tmp_path / "c", targets="all")
    for kind, left in (("eagle3", 0), ("dflash", 3), ("dspark", 3)):
        command = ("eagle3", "export", tmp_path / "c", tmp_path / kind, "--to", "specforge", "--for", kind)
        done = niels_gpt(*command, "--json")
        assert done.status == 0 and (done.json["samples"], done.json["left_out"]) == (10 - left, left)
        assert done.json["tokens"] == sum(len(chat.ids) for chat in given[3 if left else 0 :])
        assert len([*(tmp_path / kind).rglob("*.ckpt")]) == 10 - left
    done = niels_gpt(*command[:3], tmp_path / "text", *command[4:])
    assert "left out     3 samples without two tokens with loss side by side" in done.out
    assert "for          dspark" in done.out and "zeros        none" in done.out
    importing("speculators", write_speculators(tmp_path / "g", alone), tmp_path / "d", targets="all")
    with refused("E710", "not one of 3 samples has two tokens with loss side by side"):
        export_cache(tmp_path / "d", "specforge", tmp_path / "e", made_for="dspark")
    assert not (tmp_path / "e").exists()


def test_the_size_of_a_sample_counts_each_state_in_its_dtype(given, importing, tmp_path, monkeypatch):
    mixed = [replace(chat, post=chat.post.bfloat16()) for chat in given]
    source = write_specforge(tmp_path / "f", mixed)
    for targets in ("loss", "reply"):
        importing("specforge", source, tmp_path / targets, targets=targets)
    data = NativeEagle3Dataset(tmp_path / "loss")
    assert (data.manifest["aux_dtype"], data.manifest["dtype"]) == ("fp32", "bf16")
    states = int(data.counts[:, 0].max()) * data.manifest["hidden_size"]  # a block's numbers in the longest sample
    for tool, targets, size in (("automodel", "reply", states * 4 * 4), ("specforge", "loss", states * (3 * 4 + 2))):
        monkeypatch.setattr("niels_gpt.eagle3.exchange.export.MAX_INFLATED", size - 1)
        with refused("E710", f"would have {size:,} bytes"):
            export_cache(tmp_path / targets, tool, tmp_path / tool)
    monkeypatch.setattr("niels_gpt.eagle3.exchange.export.MAX_INFLATED", size)
    export_cache(tmp_path / targets, tool, tmp_path / tool)
