"""The native form's files: which rows, which bytes, as safetensors writes them; what a receipt reveals."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from support.eagle3_native import damaged_samples, write_native
from support.errors import refused

from niels_gpt.eagle3.cache import shard_path, verify
from niels_gpt.eagle3.format.drafters import DRAFTERS, TARGETS, Drafter, drafters_of, manifest_keys
from niels_gpt.eagle3.format.native import has_target_row, row_counts, target_positions, with_loss
from niels_gpt.eagle3.native import NativeEagle3Dataset

MASKS = [[0, 0, 1, 1, 0, 0, 1, 0, 0, 0], [0, 0, 0], [1], [1, 0, 0], [0, 1, 1, 1, 1]]
POSITIONS = {  # on paper
    "loss": [[2, 3, 4, 6, 7], [], [], [1], [1, 2, 3, 4]],  # t >= 1 with m[t] = 1 or m[t - 1] = 1
    "reply": [[1, 2, 3, 4, 5, 6, 7], [], [0], [0, 1], [0, 1, 2, 3, 4]],  # and 0 if m[0] = 1, and t with m[t + 1] = 1
    "all": [[*range(10)], [0, 1, 2], [0], [0, 1, 2], [0, 1, 2, 3, 4]],
}
AUX_ROWS = {"loss": [7, 0, 0, 1, 4], "reply": [7, 0, 0, 1, 4], "all": [10, 3, 1, 3, 5]}  # the last position, or L
SUPERVISED = [[2, 3, 6], [], [], [], [1, 2, 3, 4]]  # positions with loss, 0 left out: no draft predicts it
DRAFTS = {"reply": ["dflash", "dspark", "eagle3", "peagle"], "all": ["dflash", "dspark", "eagle3", "mtp", "peagle"]}
FORMS = [{}, {"aux_dtype": "fp8"}, {"aux_dtype": "fp16", "dtype": "fp32"}]
FORMS += [{"targets": "reply", "enough_for": DRAFTS["reply"]}]
FORMS += [{"targets": "all", "enough_for": DRAFTS["all"], "aux_dtype": "fp8", "made_for": "dspark"}]
FORMS += [{"targets": "all", "enough_for": ["mtp"], "aux_layer_ids": []}]


@pytest.mark.parametrize("targets", TARGETS)
def test_the_rows_of_concatenated_samples_are_those_of_each(targets):
    starts, mask = np.cumsum([0, *map(len, MASKS)]), np.concatenate(MASKS)
    for given in (mask, mask.astype(np.bool_)):
        counts = row_counts(starts, given, targets)
        assert counts[:, 1].tolist() == AUX_ROWS[targets] and counts[:, 0].tolist() == [*map(len, MASKS)]
        assert counts[:, 2].tolist() == [*map(len, POSITIONS[targets])]
        expected = [
            [at in rows for at in range(len(each))] for each, rows in zip(MASKS, POSITIONS[targets], strict=True)
        ]
        assert has_target_row(starts, given, targets).tolist() == [*itertools.chain(*expected)]
        of_loss = [at in own for rows, own in zip(POSITIONS[targets], SUPERVISED, strict=True) for at in rows]
        assert with_loss(starts, given, targets).tolist() == of_loss
    assert target_positions(np.zeros(0), targets).tolist() == []


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_shard_is_read_as_written_and_equals_safetensors_own(tmp_path, form):
    written = write_native(tmp_path, MASKS, cuts=[3], **form)
    shards, rule = NativeEagle3Dataset(tmp_path), form.get("targets", "loss")
    assert shards.counts.tolist() == [
        [len(mask), aux, len(rows)] for mask, aux, rows in zip(MASKS, AUX_ROWS[rule], POSITIONS[rule], strict=True)
    ]
    names = ("aux_hidden_states", "aux_scales", "last_hidden_states", "log_normalizers", "argmax_ids")
    for index, sample in enumerate(written):
        read = shards[index]
        assert read.input_ids.tolist() == sample.input_ids.tolist() and read.loss_mask.tolist() == [
            *map(bool, MASKS[index])
        ]
        assert read.positions.tolist() == POSITIONS[rule][index]
        assert read.positions[read.with_loss].tolist() == SUPERVISED[index]
        for name in names:
            ours, theirs = getattr(read, name), getattr(sample, name)
            assert (ours is None) == (theirs is None)
            assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours.float(), theirs.float())), name
    first = written[:3]
    tensors = {
        name: torch.cat([getattr(each, name) for each in first])
        for name in names
        if form.get("aux_dtype") == "fp8" or name != "aux_scales"
    }
    tensors["argmax_ids"] = tensors["argmax_ids"].to(torch.uint32)
    tensors["input_ids"] = torch.from_numpy(np.concatenate([each.input_ids for each in first]))
    tensors["loss_bits"] = torch.tensor([0b01001100, 0b00100000], dtype=torch.uint8)
    for number, name in enumerate(("token_starts", "aux_starts", "row_starts")):
        tensors[name] = torch.tensor([0, *shards.counts[:3, number].cumsum()])
    assert Path(shard_path(tmp_path, 0)).read_bytes() == save(tensors)
    assert verify(tmp_path) == []


def rewritten(folder, **changed):
    """Change keys of a manifest; `...` takes one out."""
    manifest = json.loads((folder / "manifest.json").read_bytes()) | changed
    left = {key: value for key, value in manifest.items() if value is not ...}
    (folder / "manifest.json").write_text(json.dumps(left))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"targets": "loss"}, "targets is 'loss'"),
        ({"targets": ["all"]}, "targets is ['all']"),
        ({"targets": "every"}, "targets is 'every'.*one of reply, all"),
        ({"enough_for": ["mtp"]}, "enough_for is ['mtp']"),
        ({"enough_for": ...}, "enough_for is missing"),
        ({"enough_for": 10**6 * ["mtp"]}, "enough_for is "),
        ({"targets": ...}, "enough_for is .*no such key without targets"),
        ({"made_for": "eagle3"}, "made_for is 'eagle3'"),
        ({"made_for": "medusa"}, "made_for is 'medusa'"),
        ({"made_for": {}}, "made_for is {}"),
        ({"targets": ..., "enough_for": ..., "made_for": "mtp"}, "made_for is 'mtp'"),
        ({"aux_layer_ids": [], "targets": "reply", "enough_for": []}, "aux_layer_ids is []"),
        ({"aux_layer_ids": None, "enough_for": ["mtp"]}, "aux_layer_ids is "),
    ],
    ids=str,
)
def test_a_manifest_that_contradicts_its_target_rows_is_refused(tmp_path, changed, said):
    write_native(tmp_path, MASKS, targets="all", enough_for=DRAFTS["all"])
    rewritten(tmp_path, **changed)
    with refused("E701", "manifest.json", *said.split(".*")):
        NativeEagle3Dataset(tmp_path)


def test_a_kind_of_draft_that_is_added_later_changes_no_cache(tmp_path, monkeypatch):
    write_native(tmp_path, MASKS, targets="reply", enough_for=DRAFTS["reply"])
    monkeypatch.setitem(DRAFTERS, "later", Drafter("reply", "reply", "dflash:5"))
    assert drafters_of(NativeEagle3Dataset(tmp_path).manifest) == sorted([*DRAFTS["reply"], "later"])
    assert manifest_keys("reply", [0], "later") == {
        "targets": "reply",
        "enough_for": DRAFTS["reply"],
        "made_for": "later",
    }


@pytest.mark.parametrize(("wrote", "says"), [(a, b) for a in TARGETS for b in TARGETS if a != b])
def test_other_target_rows_than_the_manifest_says_are_refused_by_the_file(tmp_path, wrote, says):
    write_native(
        tmp_path, MASKS, cuts=[3], **({} if wrote == "loss" else {"targets": wrote, "enough_for": DRAFTS[wrote]})
    )
    keys = {"targets": says, "enough_for": DRAFTS[says]} if says != "loss" else {"targets": ..., "enough_for": ...}
    rewritten(tmp_path, **keys)
    for opening in (lambda: NativeEagle3Dataset(tmp_path)[0], lambda: verify(tmp_path)):
        with refused("E701", "shard-000000.safetensors"):
            opening()


@pytest.mark.parametrize("form", [{}, {"aux_dtype": "fp8"}], ids=str)
def test_a_flipped_bit_of_each_tensor_is_found_in_its_sample(tmp_path, form):
    write_native(tmp_path, MASKS, **form)
    path = Path(shard_path(tmp_path, 0))
    whole = path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    places = {name: entry["data_offsets"] for name, entry in json.loads(whole[8:size]).items()}
    for name, offsets in places.items():
        begin, end = (size + offset for offset in offsets)
        for offset, samples in ((begin, {0}), (end - 1, {4})):
            if (name, offset) == ("loss_bits", end - 1):  # tokens 16 to 21: of samples 3 and 4
                samples = {3}
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
            found = {*damaged_samples(tmp_path)}
            assert samples <= found and len(found) <= 2, (name, offset)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 0x80]))  # behind the last of 22 tokens
    assert damaged_samples(tmp_path) == [None]
    path.write_bytes(whole[:9] + b" " + whole[10:])
    assert damaged_samples(tmp_path) == [None]
