"""Batches of the native form against the same slots written out in plain Python, in the process and in workers."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.eagle3_native import write_native
from support.errors import refused

from niels_gpt.eagle3.native import NativeEagle3Dataset, build_native_dataloader, native_batch

MASKS = [[0, 0, 1, 1, 0, 0, 1, 0, 0, 0], [0, 0, 0], [1], [1, 0, 0], [0, 1, 1, 1, 1]]
KNOWN = [40, *range(0, 30, 3)]


def slots_of(samples, known, width):
    """Return the batch as lists: slot p has the token at p + 1, and the states at p."""
    batch = {name: [] for name in ("input_ids", "attention_mask", "loss_mask", "position_mask", "aux")}
    batch |= {name: [] for name in ("target_slots", "last_hidden_states", "log_normalizers", "argmax_ids")}
    for row, sample in enumerate(samples):
        ids, mask, length = sample.input_ids.tolist(), sample.loss_mask.tolist(), len(sample.input_ids)
        positions = sample.positions.tolist()
        layers, hidden = sample.aux_hidden_states.shape[1:]
        states = sample.aux_hidden_states.float()
        if sample.aux_scales is not None:
            states = states * sample.aux_scales.unsqueeze(-1)
        for name in ("input_ids", "attention_mask", "loss_mask", "position_mask", "aux"):
            batch[name].append([])
        for slot in range(width):
            learnt = slot + 1 < length and mask[slot + 1]
            at = positions.index(slot + 1) if learnt else -1
            batch["input_ids"][-1].append(ids[slot + 1] if slot + 1 < length else 0)
            batch["attention_mask"][-1].append(int(slot < length))
            batch["loss_mask"][-1].append(int(learnt))
            batch["position_mask"][-1].append([bool(learnt and sample.argmax_ids[at].item() in known)])
            there = slot < len(states)
            batch["aux"][-1].append(states[slot].flatten().tolist() if there else [0.0] * (layers * hidden))
            if learnt:
                batch["target_slots"].append(row * width + slot)
                for name in ("last_hidden_states", "log_normalizers", "argmax_ids"):
                    batch[name].append(getattr(sample, name)[at].tolist())
    return batch


@pytest.mark.parametrize("form", [{}, {"aux_dtype": "fp8"}, {"aux_dtype": "fp16", "dtype": "fp32"}], ids=str)
@pytest.mark.parametrize("pad_to", [None, 16])
def test_a_batch_has_each_slot_of_the_oracle(tmp_path, form, pad_to):
    samples = write_native(tmp_path, MASKS, cuts=[2], **form)
    dataset = NativeEagle3Dataset(tmp_path)
    batch = native_batch([dataset[index] for index in range(5)], selected_token_ids=KNOWN, pad_to=pad_to)
    oracle = slots_of(samples, KNOWN, pad_to or 10)
    aux = batch.pop("aux_hidden_states")
    assert aux.dtype == (torch.float16 if form.get("aux_dtype") == "fp16" else torch.bfloat16)
    assert torch.equal(aux, torch.tensor(oracle.pop("aux")).to(aux.dtype))
    dtypes = {"position_mask": torch.bool, "log_normalizers": torch.float32}
    dtypes["last_hidden_states"] = torch.float32 if form.get("dtype") == "fp32" else torch.bfloat16
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        name: dtypes.get(name, torch.int64) for name in batch
    }
    assert {name: tensor.tolist() for name, tensor in batch.items()} == oracle


def test_workers_give_the_batches_of_the_process_itself(tmp_path):
    write_native(tmp_path, MASKS, cuts=[2])
    dataset = NativeEagle3Dataset(tmp_path)
    ids = dataset.selected_token_ids
    expected = [native_batch([dataset[i] for i in part], selected_token_ids=ids) for part in ([0, 1], [2, 3], [4])]
    for workers in (0, 2):
        found = list(build_native_dataloader(tmp_path, 2, False, num_workers=workers))
        assert len(found) == 3
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("form", [{}, {"aux_dtype": "fp8"}], ids=str)
def test_a_loader_uses_the_memory_of_a_batch_again_when_nothing_refers_to_it(tmp_path, form):
    write_native(tmp_path, MASKS * 2, cuts=[2], **form)
    dataset, states = NativeEagle3Dataset(tmp_path), ("aux_hidden_states", "last_hidden_states")
    alone = [native_batch([dataset[2 * at], dataset[2 * at + 1]], selected_token_ids=KNOWN) for at in range(5)]
    loader, kept, seen = build_native_dataloader(tmp_path, 2, False), [], []
    for _ in range(3):
        for at, batch in enumerate(loader):
            assert all(torch.equal(batch[name], alone[at][name]) for name in states)
            seen.append(batch["aux_hidden_states"].data_ptr())
            if at == 3:
                kept.append(batch["aux_hidden_states"].view(torch.int16)[:, 1:])  # a view keeps the whole
    assert all(torch.equal(view, alone[3]["aux_hidden_states"].view(torch.int16)[:, 1:]) for view in kept)
    assert len({view.data_ptr() for view in kept}) == 3 and len({*seen}) < len(seen)
    assert len(pickle.dumps(loader.collate_fn)) < 10_000


def test_a_loader_goes_from_inference_mode_to_training(tmp_path):
    write_native(tmp_path, MASKS, cuts=[2], aux_dtype="fp8")
    loader = build_native_dataloader(tmp_path, 2, False)
    with ThreadPoolExecutor(1) as pool:  # a thread has its own memory: this one has none yet
        evaluated = pool.submit(torch.inference_mode()(lambda: [batch["aux_hidden_states"] for batch in loader]))
        trained = pool.submit(lambda: [batch["aux_hidden_states"] for batch in loader])
    pairs = list(zip(evaluated.result(), trained.result(), strict=True))
    assert all(torch.equal(*pair) and pair[1].requires_grad_() is pair[1] for pair in pairs)


def test_each_rank_has_its_share_in_the_order_of_its_epoch(tmp_path):
    write_native(tmp_path, [[0, 1]] * 7)
    ids = [sample.input_ids[1] for sample in NativeEagle3Dataset(tmp_path)]
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")  # two ranks, of which this is the second
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=fake.FakeStore())
    try:
        loader = build_native_dataloader(tmp_path, 2, True, distributed=True)
        orders = []
        for epoch in (0, 1):
            loader.sampler.set_epoch(epoch)
            batches = list(loader)
            assert [len(batch["input_ids"]) for batch in batches] == [2, 2]  # 7 samples and one repeated, by two
            orders.append([int(row) for batch in batches for row in batch["input_ids"][:, 0]])
            order = torch.randperm(7, generator=torch.Generator().manual_seed(epoch)).tolist()
            assert orders[-1] == [ids[index] for index in [*order, order[0]][1::2]]
    finally:
        torch.distributed.destroy_process_group()


def test_a_batch_without_target_rows_and_samples_that_do_not_fit(tmp_path):
    write_native(tmp_path / "a", MASKS)
    write_native(tmp_path / "b", MASKS, hidden_size=8)
    ours, wider = NativeEagle3Dataset(tmp_path / "a"), NativeEagle3Dataset(tmp_path / "b")
    batch = native_batch([ours[1], ours[2]], selected_token_ids=KNOWN)
    assert batch["last_hidden_states"].shape == (0, 4) and batch["aux_hidden_states"].eq(0).all()
    assert batch["argmax_ids"].shape == batch["target_slots"].shape == (0,) and not batch["position_mask"].any()
    for samples, width, found in (
        ([ours[0], wider[0]], None, "2 samples of 2 forms"),
        ([], None, "0 samples of 0 forms"),
        ([ours[0]], 9, "10 tokens, expected one form and 9 "),
    ):
        with refused("E102", found):
            native_batch(samples, selected_token_ids=KNOWN, pad_to=width)
