"""The target's outputs become the fields of the cache: on paper, and against a slow and plain version."""

import math

import pytest
import torch
from support.errors import refused
from support.target_outputs import check_finite, in_parts_of, stored_fields

from niels_gpt.eagle3.forward import draft_distribution
from niels_gpt.eagle3.target import Eagle3TargetBatch

VOCAB, HIDDEN, WIDTH = 40, 4, 9
LENGTHS = [9, 4, 1]
SELECTED = torch.tensor([7, 30, 2, 11, 0, 25, 39, 14, 22, 5])
KNOWN = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, SELECTED, True)
NAMES = ["first", "second", "third"]
LAYERS = [5, 17, 32]


def batch_of(*, dtype=torch.float32, garbage=7.0):
    """Return a shifted batch of three rows; what the target makes of the padding is `garbage`."""
    chance = torch.Generator().manual_seed(0)
    real = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    inner = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None] - 1
    logits = 4 * torch.randn(3, WIDTH, VOCAB, generator=chance)
    logits[0, :6, 30] += 20  # tokens that the draft knows are the first choice here and there
    logits[0, 2, 1] += 50
    logits[1, 0, 7] += 20
    logits[:, -1] = 0
    logits[~inner & (torch.arange(WIDTH) < WIDTH - 1)] = garbage
    hidden = torch.randn(3, WIDTH, 3 * HIDDEN, generator=chance).masked_fill(~real[..., None], garbage)
    loss = torch.randint(0, 5, (3, WIDTH), generator=chance).clamp_max(1)  # of the padding too
    ids = torch.randint(VOCAB, (3, WIDTH), generator=chance)
    return Eagle3TargetBatch(hidden.to(dtype), logits.to(dtype), ids, real.long(), loss)


def fields_of(batch, **other):
    return stored_fields(batch, LENGTHS, SELECTED, KNOWN, **{"topk": 0, "dtype": torch.float32, **other})


def test_a_distribution_on_paper():
    logits = torch.tensor([[[0.0, math.log(2), math.log(6), math.log(9)], [0.0, math.log(3), 0.0, 0.0]]])
    selected, known = torch.tensor([2, 1]), torch.tensor([False, True, True, False])
    probs, position_mask = draft_distribution(logits, torch.tensor([[1, 1]]), selected, known)
    assert torch.allclose(probs, torch.tensor([[[0.75, 0.25], [0.25, 0.75]]]))
    # The first choice of slot 0 is token 3, which the draft does not know, though it is none of the selected logits.
    assert position_mask.tolist() == [[[False], [True]]] and position_mask.dtype == torch.bool
    assert not draft_distribution(logits, torch.tensor([[0, 0]]), selected, known)[1].any()


@pytest.mark.parametrize("topk", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fields_and_facts_are_those_of_a_slow_and_plain_version(topk, dtype):
    batch = batch_of()
    fields, facts = fields_of(batch, topk=topk, dtype=dtype)
    probs, aux = torch.zeros(3, WIDTH, 10), torch.zeros(3, WIDTH, 3 * HIDDEN)
    positions = torch.zeros(3, WIDTH, 1, dtype=torch.bool)
    plain = {name: [0.0] * 3 for name in ("supervised", "positions", "kept_mass", "draft_mass")}
    for row, length in enumerate(LENGTHS):
        for slot in range(length):
            aux[row, slot] = batch.aux_hidden_states[row, slot]
            logits = batch.logits[row, slot] if slot < length - 1 else torch.zeros(VOCAB)
            probs[row, slot] = torch.softmax(logits[SELECTED], -1)
            if slot == length - 1 or batch.loss_mask[row, slot] != 1:
                continue
            positions[row, slot] = bool(KNOWN[int(logits.argmax())])
            plain["supervised"][row] += 1
            plain["draft_mass"][row] += float(torch.softmax(logits.double(), -1)[SELECTED].sum())
            if positions[row, slot]:
                plain["positions"][row] += 1
                plain["kept_mass"][row] += float(probs[row, slot].double().sort().values[-3:].sum())
    assert torch.equal(fields.pop("aux_hidden_states"), aux.to(dtype))
    assert torch.equal(fields.pop("position_mask"), positions)
    for name in ("input_ids", "attention_mask", "loss_mask"):
        found = fields.pop(name)
        assert found.dtype == torch.int64 and torch.equal(found, getattr(batch, name))
    if topk:
        values, indices = fields.pop("target_probs_values"), fields.pop("target_probs_indices")
        assert values.dtype == dtype and indices.dtype == torch.int32 and values.shape == indices.shape == (3, 9, 3)
        best = probs.sort(-1, descending=True).values[..., :3]
        best = best / best.sum(-1, keepdim=True).clamp_min(1e-30)
        assert torch.allclose(values.float(), best, atol=1e-6 if dtype == torch.float32 else 4e-3)
        real = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
        assert not indices[~real].any() and not values[~real].any()
        assert torch.allclose(probs.gather(-1, indices.long())[real].sum(-1), probs.topk(3).values[real].sum(-1))
    else:
        assert torch.equal(fields.pop("target_probs"), probs.to(dtype))
        plain.pop("kept_mass")
        assert facts.pop("kept_mass") is None
    assert not fields and facts.keys() == plain.keys()
    assert facts["positions"][0] >= 2 and 0 < facts["positions"][0] < facts["supervised"][0]
    for name, numbers in plain.items():
        assert facts[name] == pytest.approx(numbers, abs=1e-5), name


@pytest.mark.parametrize("topk", [0, 3])
def test_nothing_of_what_the_target_makes_of_padding_is_kept(topk):
    calm, calm_facts = fields_of(batch_of(), topk=topk)
    for garbage in (-1e30, math.inf, math.nan):
        wild, wild_facts = fields_of(batch_of(garbage=garbage), topk=topk)
        assert all(torch.equal(calm[name], wild[name]) for name in calm) and calm_facts == wild_facts


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("topk", [0, 3])
def test_parts_of_any_size_give_the_same_bits(topk, slots):
    batch = batch_of(dtype=torch.bfloat16)
    fields, facts = fields_of(batch, topk=topk)
    probs, position_mask = draft_distribution(batch.logits, batch.loss_mask, SELECTED, KNOWN)
    with in_parts_of((slots + 1) * VOCAB - 1):
        again, facts_again = fields_of(batch, topk=topk)
        again_probs, again_mask = draft_distribution(batch.logits, batch.loss_mask, SELECTED, KNOWN)
    assert fields.keys() == again.keys() and all(torch.equal(fields[name], again[name]) for name in fields)
    for name in facts.keys() - {"draft_mass", "kept_mass"}:
        assert facts_again[name] == facts[name]
    assert facts_again["draft_mass"] == pytest.approx(facts["draft_mass"], rel=1e-6)
    if topk:
        assert facts_again["kept_mass"] == pytest.approx(facts["kept_mass"], rel=1e-6)
    exact = torch.softmax(batch.logits.double()[..., SELECTED], -1)
    assert probs.dtype == torch.float32 and torch.allclose(probs.double(), exact, atol=1e-6), "of bf16 logits too"
    assert torch.equal(again_probs, probs) and torch.equal(again_mask, position_mask)


def test_a_draft_that_knows_all_tokens_has_all_of_the_mass_and_a_k_of_all_is_stored_whole():
    whole, known = torch.arange(VOCAB).flip(0), torch.ones(VOCAB, dtype=torch.bool)
    fields, facts = stored_fields(batch_of(), LENGTHS, whole, known, topk=VOCAB, dtype=torch.float32)
    assert facts["draft_mass"] == facts["supervised"] == facts["positions"] != [0, 0, 0]
    assert "target_probs" in fields and "target_probs_values" not in fields and facts["kept_mass"] is None
    in_that_order = batch_of().logits[0, :8].softmax(-1)[:, whole]
    assert torch.allclose(fields["target_probs"][0, :8], in_that_order, atol=1e-6)


@pytest.mark.parametrize("lengths", [[9, 4], [9, 4, 0], [10, 4, 1], [[9, 4, 1]]])
def test_lengths_fit_the_batch(lengths):
    with refused("E102", "3 rows", "width 9"):
        stored_fields(batch_of(), lengths, SELECTED, KNOWN, topk=0, dtype=torch.float32)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("place", "layer"), [(0, 5), (3, 5), (4, 17), (11, 32), (None, None)])
def test_what_is_no_number_is_named_by_sample_and_block(place, layer, value):
    batch = batch_of(dtype=torch.bfloat16)
    if place is None:
        batch.logits[1, 2, 3] = value
        said = f"slot 2, logits: {value}"
    else:
        batch.aux_hidden_states[1, 3, place] = value  # the last slot of the second row
        said = f"slot 3, block {layer}: {value}"
    with refused("E708", f"'second', {said}", "1 such places in 1 of 3 samples", kind=RuntimeError):
        check_finite(batch, NAMES, LENGTHS, LAYERS)


@pytest.mark.parametrize("slots", [1, 2, 3, 100])
def test_every_place_that_is_not_finite_is_counted_and_padding_and_last_logits_may_be_anything(slots):
    for garbage in (0.0, math.inf, math.nan):
        batch = batch_of(garbage=garbage)
        batch.logits[1, 3] = garbage  # the last slot: these are not stored
        with in_parts_of(slots * VOCAB):
            check_finite(batch, NAMES, LENGTHS, LAYERS)
            assert fields_of(batch)[0]["target_probs"].isfinite().all()
    batch.logits[0, 3:8, 1] = math.inf
    batch.logits[1, 2, 3] = math.nan
    batch.aux_hidden_states[0, 8, 4:] = -math.inf  # the last slot: two layers of three
    found = ("sample 'first', slot 3, logits: inf", "8 such places in 2 of 3 samples")
    with in_parts_of(slots * VOCAB), refused("E708", *found, kind=RuntimeError):
        check_finite(batch, NAMES, LENGTHS, LAYERS)


def test_a_hidden_state_that_the_stored_dtype_cannot_hold_is_named():
    batch = batch_of()
    batch.aux_hidden_states[2, 0, 5] = 65519.0  # float16 rounds it down to its largest number
    check_finite(batch, NAMES, LENGTHS, LAYERS, torch.float16)
    batch.aux_hidden_states[2, 0, 5] = -65520.0
    check_finite(batch, NAMES, LENGTHS, LAYERS, torch.bfloat16)
    with refused("E708", "'third', slot 0, block 17: -65520.0", "torch.float16", kind=RuntimeError):
        check_finite(batch, NAMES, LENGTHS, LAYERS, torch.float16)
