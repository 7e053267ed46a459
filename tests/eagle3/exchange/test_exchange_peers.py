"""Folders go both ways between this project and speculators 0.9.0 and specforge 0.2.0, whose own code runs beside ours.

Where the packages lie in folders named speculators-0.9.0 and specforge-0.2.0, and NIELS_GPT_PEERS names the folder
above them. .ci/run makes it so; elsewhere these tests are left out.

The states of speculators come from vLLM, which needs a GPU: its files are written here by the rule of its reader, and
its own check accepts them.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exchange_files import BLOCKS, in_bf16, specforge_dict, write_row, write_speculators
from support.peer_caches import PEERS
from support.peer_exchange import Tool

from niels_gpt.eagle3.exchange.export import export_cache
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.native import NativeEagle3Dataset, native_batch

FOLDERS = {name: Path(PEERS or "") / name for name in ("speculators-0.9.0", "specforge-0.2.0")}
pytestmark = [
    pytest.mark.skipif(
        PEERS is None or not all(folder.is_dir() for folder in FOLDERS.values()),
        reason=f"set NIELS_GPT_PEERS to a folder with {' and '.join(FOLDERS)}, see .ci/run",
    ),
    pytest.mark.usefixtures("one_thread"),
]
Import = Callable[..., Any]


@pytest.fixture(scope="module")
def speculators():
    tool = Tool(FOLDERS["speculators-0.9.0"])
    yield tool
    tool.close()


@pytest.fixture(scope="module")
def specforge():
    tool = Tool(FOLDERS["specforge-0.2.0"])
    yield tool
    tool.close()


def test_speculators_reads_an_export_as_the_rows_that_our_batches_have(speculators, folders, importing, tmp_path):
    importing("speculators", folders["speculators"], tmp_path / "c")
    export_cache(tmp_path / "c", "speculators", tmp_path / "f")
    assert speculators.call("speculators_refusals", str(tmp_path / "f")) == []
    rows, ours = speculators.call("speculators_rows", str(tmp_path / "f")), NativeEagle3Dataset(tmp_path / "c")
    assert len(rows) == len(ours) == 10
    for row, sample in zip(rows, ours, strict=True):
        batch = native_batch([sample], selected_token_ids=ours.selected_token_ids)
        length, aux_rows = len(sample.loss_mask) - 1, len(sample.aux_hidden_states)
        assert torch.equal(row["input_ids"], batch["input_ids"][0, :length])
        assert torch.equal(row["loss_mask"], batch["loss_mask"][0, :length])
        slots = row["loss_mask"].nonzero()[:, 0]
        assert torch.equal(slots, batch["target_slots"]) and int(slots[-1]) < aux_rows
        assert torch.equal(row["verifier_last_hidden_states"][slots], batch["last_hidden_states"])
        assert torch.equal(row["hidden_states"][:aux_rows], batch["aux_hidden_states"][0, :aux_rows])


@pytest.mark.parametrize("source", ["specforge", "speculators"])
def test_specforge_reads_an_export_as_the_rows_of_its_unshifted_mask(specforge, folders, importing, tmp_path, source):
    importing(source, folders[source], tmp_path / "c")
    export_cache(tmp_path / "c", "specforge", tmp_path / "f")
    rows, ours = specforge.call("specforge_rows", str(tmp_path / "f")), NativeEagle3Dataset(tmp_path / "c")
    head = TargetHead.of_cache(tmp_path / "c")
    assert len(rows) == len(ours) == 10
    for row, sample in zip(rows, ours, strict=True):
        assert row["input_ids"].tolist() == [*sample.input_ids[1:].tolist(), 0]
        assert row["loss_mask"][:, 0].tolist() == [*map(int, sample.loss_mask[:-1]), 0]
        slots = row["loss_mask"][:, 0].nonzero()[:, 0]
        target_rows = [sample.positions.tolist().index(slot + 1) for slot in slots.tolist()]
        last = head.normed(sample.last_hidden_states[target_rows]).to(torch.bfloat16)
        assert torch.equal(row["target"][slots], last)
        assert torch.equal(row["aux"][slots], sample.aux_hidden_states[slots].flatten(1))


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_specforge_reads_the_same_from_an_export_of_a_whole_cache_as_from_its_own_files(
    specforge, given, importing, tmp_path, kind
):
    """Each state of float32, bit for bit; its files for DFlash have those for DSpark but the last hidden states."""
    made = "eagle3" if kind == "eagle3" else "dspark"
    keys = {"hidden_state": "target_last_hidden_states", "aux_hidden_state": "hidden_states"}
    named = keys if made == "dspark" else {}
    held = [{named.get(name, name): each for name, each in specforge_dict(chat).items()} for chat in given]
    specforge.call("specforge_write", str(tmp_path / "f"), held)
    importing("specforge", tmp_path / "f", tmp_path / "c", made_for=made, targets="all")
    export_cache(tmp_path / "c", "specforge", tmp_path / "again", made_for=kind)
    theirs, ours = (specforge.call("specforge_samples", kind, str(tmp_path / name)) for name in ("f", "again"))
    assert len(ours) == len(theirs) == 10 and ("target_last_hidden_states" in ours[0]) == (kind == "dspark")
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "dspark", "mtp"])
def test_speculators_reads_the_same_from_an_export_of_a_whole_cache_as_from_its_own_files(
    speculators, given, importing, tmp_path, kind
):
    importing("speculators", write_speculators(tmp_path / "f", given), tmp_path / "c", made_for=kind, targets="all")
    assert export_cache(tmp_path / "c", "speculators", tmp_path / "again").made_for == kind
    assert speculators.call("speculators_refusals", str(tmp_path / "again")) == []
    theirs, ours = (speculators.call("speculators_rows", str(tmp_path / name), kind) for name in ("f", "again"))
    assert len(ours) == len(theirs) == 10 and ("verifier_last_hidden_states" in ours[0]) == (kind != "mtp")
    assert_same(ours, theirs)


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, each in one.items():
            assert each.dtype == other[name].dtype and torch.equal(each, other[name]), name
            assert name not in ("hidden_states", "verifier_last_hidden_states") or bool(each.any(-1).all())


def test_what_specforge_writes_is_imported(specforge, given, importing, tmp_path):
    stored = [in_bf16(chat) for chat in given]
    specforge.call("specforge_write", str(tmp_path / "f"), [specforge_dict(chat) for chat in stored])
    done = importing("specforge", tmp_path / "f", tmp_path / "c")
    assert (done.convention.aux_layer_ids, done.convention.last_hidden) == (BLOCKS, "post_norm")
    export_cache(tmp_path / "c", "specforge", tmp_path / "again")
    theirs = (specforge.call("specforge_rows", str(tmp_path / name)) for name in ("f", "again"))
    for written, exported in zip(*theirs, strict=True):  # the same training rows: all that a slot with loss takes
        assert torch.equal(written["input_ids"], exported["input_ids"])
        assert torch.equal(written["loss_mask"], exported["loss_mask"])
        slots = written["loss_mask"][:, 0].nonzero()[:, 0]
        assert torch.equal(written["target"][slots], exported["target"][slots])
        upto = int(slots[-1]) + 1  # a draft attends to all states before
        assert torch.equal(written["aux"][:upto], exported["aux"][:upto])


def test_what_speculators_accepts_is_imported_its_fp8_too(speculators, folders, given, importing, tmp_path):
    assert speculators.call("speculators_refusals", str(folders["speculators"])) == []
    folder = shutil.copytree(folders["speculators"], tmp_path / "f")
    for index, chat in enumerate(given):
        states = torch.cat([chat.aux, chat.pre[:, None]], dim=1)
        values, scales = speculators.call("speculators_fp8", states)
        write_row(folder, index, chat, hidden_states=values.view(torch.float8_e4m3fn), hidden_states_scales=scales)
    done = importing("speculators", folder, tmp_path / "c")
    assert (done.convention.aux_layer_ids, done.convention.last_hidden) == (BLOCKS, "pre_norm")
    export_cache(tmp_path / "c", "speculators", tmp_path / "again")
    assert speculators.call("speculators_refusals", str(tmp_path / "again")) == []
