"""Native caches become other tools' folders: whole samples, zeros where no loss looks, and both round trips."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import eagle3_native, small_eagle3
from support.commands import niels_gpt
from support.eagle3_looks import problems_of
from support.eagle3_runs import whole_tree
from support.errors import refused
from support.exchange_files import (
    BLOCKS,
    PROOF_TOKENS,
    Chat,
    assert_same_samples,
    in_bf16,
    states_of,
    write_speculators,
)

from niels_gpt.eagle3.cache import CachedEagle3Dataset
from niels_gpt.eagle3.derive import redraft
from niels_gpt.eagle3.exchange.export import export_cache
from niels_gpt.eagle3.native import NativeEagle3Dataset

pytestmark = pytest.mark.usefixtures("one_thread")
Import = Callable[..., Any]

FOR = "for eagle3, peagle only: dflash, dspark, mtp read states that the cache does not have"
NOTES = {"specforge": (), "speculators": (FOR,)}
"""speculators has one folder for all kinds of drafts."""


@pytest.mark.parametrize(("tool", "last"), [("specforge", "post_norm"), ("speculators", "pre_norm")])
def test_a_round_trip_gives_the_same_cache_bit_for_bit(folders, importing, tmp_path, tool, last):
    importing(tool, folders[tool], tmp_path / "c")
    done = export_cache(tmp_path / "c", tool, tmp_path / "f")
    counts = NativeEagle3Dataset(tmp_path / "c").counts.sum(0).tolist()
    assert (done.last_hidden, done.samples, done.made_for, done.notes) == (last, 10, "eagle3", NOTES[tool])
    assert [done.tokens, done.tokens - done.without_aux, done.tokens - done.without_last] == counts
    again = importing(tool, tmp_path / "f", tmp_path / "again")  # zeros, which no loss needs, are not compared
    assert (again.convention.aux_layer_ids, again.convention.last_hidden) == (BLOCKS, last)
    assert_same_samples(tmp_path / "c", tmp_path / "again")


def test_an_export_of_few_or_late_replies_is_imported_again(given, importing, model, tmp_path):
    silent = [replace(chat, mask=chat.mask & (index == 6)) for index, chat in enumerate(given)]
    ids = torch.cat([chat.ids for chat in given] * 3)[: PROOF_TOKENS + 20]
    late = Chat(ids, torch.arange(len(ids)) >= PROOF_TOKENS + 4, *states_of(model, ids))
    for name, chats in (("silent", silent), ("late", [late])):
        source = write_speculators(tmp_path / f"{name}-f", [in_bf16(chat) for chat in chats])
        importing("speculators", source, tmp_path / f"{name}-c")
        export_cache(tmp_path / f"{name}-c", "speculators", tmp_path / f"{name}-e")
        done = importing("speculators", tmp_path / f"{name}-e", tmp_path / f"{name}-again", samples=1)
        assert done.convention.aux_layer_ids == BLOCKS and not done.mask_checked
        assert_same_samples(tmp_path / f"{name}-c", tmp_path / f"{name}-again")
    nothing = write_speculators(
        tmp_path / "n", [replace(given[0], blocks=given[0].blocks * 0, mask=given[0].mask & False)]
    )
    with refused("E711", "1 samples", "1 have zeros"):
        importing("speculators", nothing, tmp_path / "d")


def test_an_export_has_the_states_of_every_token_with_loss_and_zeros_elsewhere(folders, given, importing, tmp_path):
    importing("speculators", folders["speculators"], tmp_path / "c", aux_fp8=True)
    done = export_cache(tmp_path / "c", "specforge", tmp_path / "f")
    assert len(done.notes) == 2 and "norm was applied" in done.notes[0] and "float8 to bf16" in done.notes[1]
    paths = sorted((tmp_path / "f").rglob("*.ckpt"), key=str)
    assert len(paths) == len(given)
    for path, chat in zip(paths, map(in_bf16, given), strict=True):
        held = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
        mask = chat.mask.tolist()
        rows = [t for t in range(1, len(mask)) if mask[t] or mask[t - 1]]
        empty = [t for t in range(len(mask)) if t not in rows]
        assert (
            held["input_ids"].tolist() == chat.ids.tolist() and held["loss_mask"].tolist() == chat.mask.long().tolist()
        )
        torch.testing.assert_close(held["hidden_state"][0, rows], chat.post[rows], rtol=0.02, atol=0.02)
        assert not held["hidden_state"][0, empty].any()
        aux = held["aux_hidden_state"][0].view(len(mask), 3, -1)
        torch.testing.assert_close(aux[: rows[-1]], chat.aux[: rows[-1]], rtol=0.07, atol=0.02)
        assert not aux[rows[-1] :].any()


def test_an_export_is_refused_where_the_tool_needs_what_the_cache_lacks(folders, importing, tmp_path):
    importing("specforge", folders["specforge"], tmp_path / "post")
    eagle3_native.write_native(tmp_path / "two", [[0, 1, 1]])
    small_eagle3.write_cache(tmp_path / "v1", samples=2, shard_size=2)
    for cache, tool, words in (
        ("post", "speculators", "final norm"),
        ("two", "specforge", "2 auxiliary layers, expected 3"),
        ("v1", "specforge", "version 1"),
    ):
        with refused("E710", tmp_path / cache, words):
            export_cache(tmp_path / cache, tool, tmp_path / "f")
        assert not (tmp_path / "f").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with refused("E704", tmp_path / "full"):
        export_cache(tmp_path / "two", "speculators", tmp_path / "full")


def test_an_imported_cache_gets_another_draft_vocabulary_and_becomes_version_1(folders, importing, tmp_path):
    for size in (300, 200):
        importing("specforge", folders["specforge"], tmp_path / str(size), draft_vocab_size=size)
    redraft(tmp_path / "300", tmp_path / "out", draft_vocab_size=200, special_token_ids=[1, 2])
    assert whole_tree(tmp_path / "out") == whole_tree(tmp_path / "200")
    how = ("--format", "1", "--shard-size", "4", "--output-dir", tmp_path / "1")
    assert niels_gpt("eagle3", "convert", tmp_path / "200", *how).status == 0
    assert problems_of(tmp_path / "out") == problems_of(tmp_path / "1") == []
    loss, probs = (CachedEagle3Dataset(tmp_path / "1")[0][name] for name in ("loss_mask", "target_probs"))
    expected = CachedEagle3Dataset(tmp_path / "200")[0]
    assert torch.equal(probs[loss == 1], expected["target_probs"][expected["loss_mask"] == 1])
