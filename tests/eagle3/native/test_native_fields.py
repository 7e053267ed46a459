"""Fields of native caches, a row for each token: items and batches against the rule written out in plain Python."""

import pickle

import pytest
import torch
from support.eagle3_native import write_native
from support.errors import refused
from torch.utils.data import DataLoader

from niels_gpt.eagle3.native import FIELDS, NativeEagle3Dataset, build_native_dataloader, token_batch

MASKS = [[0, 0, 1, 1, 0, 0, 1, 0, 0, 0], [0, 0, 0], [1], [0], [1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 1]]
FORMS = [(targets, form) for targets in ("reply", "all") for form in ({}, {"aux_dtype": "fp8"})]
FORMS += [("reply", {"aux_dtype": "fp16", "dtype": "fp32"}), ("all", {"aux_layer_ids": [], "aux_dtype": "fp8"})]


def has_row(mask, token, targets):
    """Whether a token has a target row, as docs/formats.md says it."""
    if targets == "all" or (token and (mask[token] or mask[token - 1])):
        return True
    return targets == "reply" and bool(mask[token] or (token + 1 < len(mask) and mask[token + 1]))


def expected_of(sample, mask, targets, layers):
    """Return the fields of a sample as lists."""
    rows, aux = sample.last_hidden_states.tolist(), sample.aux_hidden_states.float()
    if sample.aux_scales is not None:
        aux = (aux * sample.aux_scales.unsqueeze(-1)).bfloat16()
    aux = aux.flatten(1).tolist()
    return {
        "input_ids": sample.input_ids.tolist(),
        "loss_mask": mask,
        "aux_hidden_states": [aux[token] if token < len(aux) else [0.0] * 4 * layers for token in range(len(mask))],
        "last_hidden": [rows.pop(0) if has_row(mask, token, targets) else [0.0] * 4 for token in range(len(mask))],
        "last_hidden_mask": [int(has_row(mask, token, targets)) for token in range(len(mask))],
    }


@pytest.mark.parametrize(("targets", "form"), FORMS, ids=str)
def test_an_item_and_a_batch_have_each_token_of_the_oracle(tmp_path, targets, form):
    layers = len(form.get("aux_layer_ids", "12"))
    samples = write_native(tmp_path, MASKS, cuts=[2], targets=targets, **form)
    dataset = NativeEagle3Dataset(tmp_path, fields=FIELDS, max_open_shards=1, check="blocks")
    oracle = [expected_of(sample, mask, targets, layers) for sample, mask in zip(samples, MASKS, strict=True)]
    aux = {"fp8": torch.bfloat16, "fp16": torch.float16}.get(form.get("aux_dtype"), torch.bfloat16)
    last = torch.float32 if form.get("dtype") == "fp32" else torch.bfloat16
    for number in (*range(7), -7, -1):
        item = dataset[number]
        assert [*item] == [*FIELDS]
        assert [tensor.dtype for tensor in item.values()] == [torch.int64, torch.int64, aux, last, torch.int64]
        assert item["aux_hidden_states"].shape == (len(MASKS[number]), 4 * layers)
        assert {name: tensor.tolist() for name, tensor in item.items()} == oracle[number]
    for index in (7, -8):
        with pytest.raises(IndexError):
            dataset[index]
    for pad_to, width in ((None, 10), (16, 16)):
        (batch,) = build_native_dataloader(tmp_path, 7, False, fields=FIELDS, pad_to=pad_to)
        assert [*batch] == [*FIELDS, "attention_mask"]
        assert batch["attention_mask"].sum(1).tolist() == [*map(len, MASKS)]
        for row, (one, mask) in enumerate(zip(oracle, MASKS, strict=True)):
            assert batch["attention_mask"][row, : len(mask)].all()
            for name, tensor in batch.items():
                assert tensor.shape[:2] == (7, width)
                assert not tensor[row, len(mask) :].any(), name
                assert name == "attention_mask" or tensor[row, : len(mask)].tolist() == one[name], name


def test_fields_come_alone_and_in_the_order_asked_for(tmp_path):
    samples = write_native(tmp_path, MASKS)  # of targets loss, which has not the last hidden state of each token
    dataset = NativeEagle3Dataset(tmp_path, fields=iter(["aux_hidden_states", "input_ids", "input_ids"]))
    assert [*dataset[0]] == ["aux_hidden_states", "input_ids"] and "aux_hidden_states, input_ids" in repr(dataset)
    assert [item["input_ids"].tolist() for item in dataset] == [sample.input_ids.tolist() for sample in samples]
    assert [*token_batch(samples[:2], ["loss_mask"])] == ["loss_mask", "attention_mask"]
    with refused("E710", "targets reply", "last_hidden"):
        NativeEagle3Dataset(tmp_path, fields=iter(FIELDS))
    with refused("E102", "last_hidden", "reply or all"):
        token_batch(samples)
    for fields in (["input_ids", "logits"], "input_ids", []):
        with refused("E101", "input_ids, loss_mask, aux_hidden_states, last_hidden"):
            build_native_dataloader(tmp_path, 2, False, fields=fields)
        with refused("E101", "input_ids, loss_mask, aux_hidden_states, last_hidden"):
            token_batch(samples, fields)


def test_an_item_has_memory_of_its_own(tmp_path):
    write_native(tmp_path, [[0] * 400 + [1]] * 50, targets="all", seq_length=401)
    dataset = NativeEagle3Dataset(tmp_path, fields=FIELDS)
    before, item = dataset[3], dataset[3]
    for tensor in item.values():
        tensor.fill_(1)
    assert all(tensor.equal(before[name]) for name, tensor in dataset[3].items())
    held = sum(tensor.nbytes for tensor in before.values())
    assert len(pickle.dumps(before)) < held + 3000 and len(pickle.dumps(dataset)) < 20_000  # not the whole shard
    fingerprint = dataset.fingerprint()
    assert len(NativeEagle3Dataset(tmp_path, fields=["input_ids"], expect=fingerprint)) == 50
    with refused("E213"):
        NativeEagle3Dataset(tmp_path, fields=["input_ids"], expect={**fingerprint, "samples": 49})


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_items_and_batches_come_out_of_workers_alone(tmp_path, method):
    write_native(tmp_path, MASKS, cuts=[2], targets="reply", aux_dtype="fp8")
    items = NativeEagle3Dataset(tmp_path, fields=FIELDS)
    batches = build_native_dataloader(tmp_path, 3, False, fields=FIELDS)
    how = {"num_workers": 1, "multiprocessing_context": method}
    loaders = {DataLoader(batches.dataset, batch_size=3, collate_fn=batches.collate_fn, **how): batches}
    if method == "fork":  # a process that is spawned takes seconds
        loaders[DataLoader(items, batch_size=None, **how)] = items
    for loader, here in loaders.items():
        for found, one in zip(loader, here, strict=True):
            assert found.keys() == one.keys() and all(found[name].equal(tensor) for name, tensor in one.items())


@pytest.mark.parametrize(("targets", "form"), FORMS[:4], ids=str)
def test_memory_that_is_used_again_shows_nothing_of_the_batch_before(tmp_path, targets, form):
    write_native(tmp_path, MASKS * 2, cuts=[2], targets=targets, **form)
    dataset = NativeEagle3Dataset(tmp_path)
    order = [[0, 5], [1, 3], [2, 4], [0, 6], [7, 1]]
    collate, seen = NativeEagle3Dataset(tmp_path, fields=FIELDS).collate_fn(pad_to=12), []
    for numbers in order * 2:
        samples = [dataset[number] for number in numbers]
        batch = collate(samples)
        fresh = token_batch(samples, FIELDS, pad_to=12)
        assert all(batch[name].equal(tensor) for name, tensor in fresh.items())
        seen.append((batch["aux_hidden_states"].data_ptr(), batch["last_hidden"].data_ptr()))
    assert all(len({*places}) < 4 for places in zip(*seen, strict=True))
