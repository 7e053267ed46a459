"""speculators 0.9.0 trains an EAGLE-3 draft on a native cache: it lies below what NIELS_GPT_PEERS names."""

from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import eagle3_native, speculators_run
from support.documents import lines_to_copy
from support.exchange_files import BLOCKS, HIDDEN, VOCAB, chats, small_model
from support.peer_caches import PEERS
from support.peer_exchange import Tool

from niels_gpt.eagle3 import make_target_cache
from niels_gpt.eagle3.exchange.export import export_cache
from niels_gpt.eagle3.format.drafters import DRAFTERS, manifest_keys
from niels_gpt.eagle3.native import NativeEagle3Dataset

FOLDER = Path(PEERS or "") / "speculators-0.9.0"
pytestmark = [
    pytest.mark.skipif(
        PEERS is None or not FOLDER.is_dir(),
        reason="set NIELS_GPT_PEERS to a folder with speculators-0.9.0, see .ci/run",
    ),
    pytest.mark.usefixtures("one_thread"),
]
DRAFT = 200
KINDS = ("peagle", "dflash", "dspark", "mtp")


@pytest.fixture(scope="module")
def speculators():
    tool = Tool(FOLDER, speculators_run.__file__)
    yield tool
    tool.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target, and native caches of what it says about 20 chats, with the export of each beside it."""
    folder, model = tmp_path_factory.mktemp("made"), small_model()
    model.save_pretrained(folder / "target")
    given = chats(model, 20)
    rows = [
        SimpleNamespace(id=str(n), input_ids=c.ids.tolist(), loss_mask=c.mask.int().tolist())
        for n, c in enumerate(given)
    ]
    common = [token for token, _ in Counter(chain(*(row.input_ids for row in rows))).most_common(DRAFT)]
    for name in ("bf16", "fp8", *KINDS):
        aux, kind = ("bf16", name) if name in KINDS else (name, "eagle3")
        layers = [] if kind == "mtp" else [*BLOCKS]
        manifest = {
            "format_version": "native-1",
            "target_model": "small",
            "target_vocab_size": VOCAB,
            "draft_vocab_size": DRAFT,
            "selected_token_ids": common,
            "hidden_size": HIDDEN,
            "aux_layer_ids": layers,
            "aux_dtype": aux,
            "dtype": "bf16",
            "seq_length": 64,
            "shard_bytes": 20_000,
            **manifest_keys(DRAFTERS[kind].targets, layers, kind),
        }
        made = {"tokenizer": {"sha256": "a" * 64, "template_sha256": None, "mask_by": "given", "pad_id": 0}}
        made["target"] = {"name": "small", "vocab_size": VOCAB, "hidden_size": HIDDEN, "config_sha256": "c" * 64}
        made["run"] = {"device": "cpu", "threads": 1, "attention": "sdpa", "compute_dtype": "fp32"}
        make_target_cache(folder / name, rows, lambda _: model, manifest, **made)
        export_cache(folder / name, "speculators", folder / f"{name}-export")
    return folder


@pytest.fixture(scope="module")
def lines():
    return lines_to_copy("niels_gpt.trainers.speculators")


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert (
            value.dtype == other[name].dtype and torch.equal(value, other[name]) if is_tensor else value == other[name]
        )


@pytest.mark.parametrize("split", [{}, {"train_ratio": 0.7}, {"train_ratio": 0.7, "split": "val"}])
@pytest.mark.parametrize("aux", ["bf16", "fp8"])
def test_rows_are_those_of_an_export(speculators, made, aux, split):
    (ours, our_lengths), (theirs, their_lengths) = speculators.call("both", made / aux, made / f"{aux}-export", **split)
    assert len(ours) == {1.0: 20, 0.7: 14 if "split" not in split else 6}[split.get("train_ratio", 1.0)]
    assert our_lengths == their_lengths
    for one, other in zip(ours, theirs, strict=True):
        assert_equal(one, other)
        assert one["hidden_states"].shape[1] == 3 * HIDDEN and one["hidden_states"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_batches_for_a_draft_of_another_kind_are_those_of_an_export(speculators, made, kind):
    """The cache says for which kind it was made; the rows have each state, zeros where its loss reads none."""
    (ours, our_lengths), (theirs, their_lengths) = speculators.call("both", made / kind, made / f"{kind}-export")
    assert our_lengths == their_lengths and len(ours) == 20
    for one, other in zip(ours, theirs, strict=True):
        assert_equal(one, other)
        assert one["hidden_states"].shape[1] == (0 if kind == "mtp" else 3 * HIDDEN)
        is_whole = bool(one["verifier_last_hidden_states"].any(-1).all())
        assert is_whole == (kind in ("dspark", "mtp"))
    for one, other in zip(*speculators.call("batches", made / kind, made / f"{kind}-export", kind), strict=True):
        assert_equal(one, other)
        shifted = kind == "peagle"
        assert int(one["position_ids"][0, 0]) == shifted
        assert ("verifier_last_hidden_states" in one) == (kind != "mtp")


def test_a_cache_of_all_rows_serves_each_kind_that_is_named(speculators, made):
    for kind in ("eagle3", *KINDS):
        folders = made / "dspark", made / "dspark-export"
        for one, other in zip(*speculators.call("batches", *folders, kind, made_for=kind), strict=True):
            assert_equal(one, other)
    for cache, kind, words in (
        ("bf16", "dflash", "target rows for loss only, expected reply"),
        ("peagle", "mtp", "target rows for loss only, expected all"),
        ("dflash", "mtp", "target rows for reply only, expected all"),
        ("mtp", "eagle3", "has 0 auxiliary layers"),
        ("mtp", "medusa", "asked for medusa, expected one of eagle3, peagle, dflash, dspark, mtp"),
    ):
        code, text = speculators.call("errors", made / cache, made_for=kind)
        assert code == "E710" and words in text, text


@pytest.mark.parametrize("aux", ["bf16", "fp8"])
def test_losses_are_those_of_an_export(speculators, made, lines, aux):
    found = speculators.call("losses", lines, made / aux, made / "target")
    assert found == speculators.call("losses", lines, made / aux, made / "target", made / f"{aux}-export")
    assert len(found) == speculators_run.STEPS and sum(found[-4:]) < 0.9 * sum(found[:4]), found


def test_resumes_in_mid_epoch_by_speculators_own_code(speculators, made, lines):
    whole, rest = speculators.call("resumed", lines, made / "bf16", made / "target", 3)
    assert len(whole) > 6 and len(rest) == len(whole) - 3
    for one, other in zip(whole[3:], rest, strict=True):
        assert_equal(one, other)


def test_what_speculators_cannot_take_is_refused(speculators, made, tmp_path):
    known = eagle3_native.manifest_of(1, 1)
    known["conventions"]["last_hidden"], known["head"]["norm"] = "post_norm", "none"
    eagle3_native.write_native(tmp_path / "post", [[0, 1, 1]], conventions=known["conventions"], head=known["head"])
    code, text = speculators.call("errors", tmp_path / "post")
    assert code == "E710" and "after the final norm" in text
    for split in ({"split": "test"}, {"train_ratio": 0.01}, {"split": "val"}, {"train_ratio": 1.5}):
        assert speculators.call("errors", made / "bf16", **split)[0] == "E101"
    known = NativeEagle3Dataset(made / "bf16").fingerprint()
    assert speculators.call("errors", made / "bf16", expect=known) is None
    assert speculators.call("errors", made / "fp8", expect=known)[0] == "E213"
