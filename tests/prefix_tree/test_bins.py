"""Bins hold every sample once under the budget, cost what was planned, and add up to the gradients of one row."""

import math
import random

import numpy as np
import pytest
import torch
from support.errors import refused
from support.prefix_trees import grown

from niels_gpt.prefix_tree.attention import dense_mask, model_inputs
from niels_gpt.prefix_tree.bins import Bin, SampleSizes, pack, plan_bins
from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs
from niels_gpt.prefix_tree.forest import ModelShape, PrefixForest

PLAIN = ModelShape(parameters=100, layers=1, d_model=4)


def drawn_groups(draw):
    return [
        grown(draw, samples=draw.randint(6, 14), levels=3, vocab=draw.choice([2, 50]))
        for _ in range(draw.randint(1, 5))
    ]


def sizes_of_group(prompt, *completions):
    lengths = np.array([prompt + length for length in completions])
    shared = np.array([0] + [prompt] * (len(completions) - 1))
    return SampleSizes(lengths, shared, np.array([0, len(completions)]))


@pytest.mark.parametrize("seed", range(12))
def test_every_sample_is_in_one_bin_that_costs_what_was_planned(seed):
    draw = random.Random(seed)
    groups = drawn_groups(draw)
    masks = [[[draw.randint(0, 1) for _ in sample] for sample in group] for group in groups]
    forests = [PrefixForest.from_sequences(*each[:1], loss_mask=each[1]) for each in zip(groups, masks, strict=True)]
    samples, all_masks = [each for group in groups for each in group], [each for group in masks for each in group]
    longest, ranks = max(map(len, samples)), draw.randint(1, 3)
    bins = pack(forests, budget := longest + draw.randint(0, 30), ranks=ranks)
    assert len(bins) % ranks == 0
    assert sorted(torch.cat([each.samples for each in bins]).tolist()) == list(range(len(samples)))
    for each in bins:
        chosen = each.samples.tolist()
        assert each.forest.samples() == [samples[number] for number in chosen]
        assert each.forest.loss_mask.tolist() == [bit for number in chosen for bit in all_masks[number]]
        assert each.tokens == each.forest.num_tokens <= budget and int(each.marginal_tokens.min()) >= 0
        assert each.pairs == each.forest.stats().pairs_after
        assert each.loss_tokens == LossEdges.from_forest(each.forest).num_loss_tokens


@pytest.mark.parametrize("seed", range(8))
def test_a_subset_is_the_fold_of_its_samples(seed):
    draw = random.Random(seed)
    samples = grown(draw, vocab=2)
    chosen = sorted(draw.sample(range(len(samples)), draw.randint(1, len(samples))))
    starts = [draw.randint(0, len(sample)) for sample in samples]
    forest = PrefixForest.from_sequences(samples, prompt_lengths=starts).padded(16)
    part, whole = forest.subset(chosen), PrefixForest.from_sequences([samples[one] for one in chosen])
    assert part.samples() == whole.samples() and part.stats() == whole.stats()  # no node is left with an only child
    assert part.completion_starts.tolist() == [starts[one] for one in chosen]
    seen = torch.zeros(part.num_tokens, part.num_tokens, dtype=torch.bool)
    for rows in part.sample_rows.split(part.sample_lengths.tolist()):
        assert part.position_ids[rows].tolist() == list(range(len(rows)))
        seen[rows[:, None], rows] |= torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
    assert torch.equal(dense_mask(part), seen)


@pytest.mark.parametrize("wrong", [[], [1, 0], [0, 0], [-1, 0], [0, 99]])
def test_a_subset_of_other_numbers_is_refused(wrong):
    with refused("E801", "rising", "0 to 1"):
        PrefixForest.from_sequences([[1, 2], [1, 3]]).subset(wrong)


@pytest.mark.parametrize(
    "sizes",
    [([0], [0], [0, 1]), ([5, 5], [0, 9], [0, 2]), ([5, 5], [0, -1], [0, 2]), ([5, 5], [0, 0], [0, 7]), ([5], [], [0])],
)
def test_sizes_that_no_samples_have_are_refused(sizes):
    with refused("E801", "sizes:"):
        plan_bins(SampleSizes(*map(np.array, sizes)), 64)


def test_gradients_of_bins_add_up_to_those_of_one_row():
    float64_models = pytest.importorskip("support.float64_models")
    model = float64_models.float64_llama()
    draw = random.Random(5)
    groups = [grown(draw, samples=10, levels=3) for _ in range(3)]
    samples, keys = [each for group in groups for each in group], [number for number in range(3) for _ in range(10)]

    def gradients(forests, tokens):
        for forest in forests:
            edges = LossEdges.from_forest(forest)
            logp = edge_logprobs(model(**model_inputs(forest, model, backend="prefix_tree")).logits, edges)
            (-(edges.weight * logp).sum() / tokens).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole = PrefixForest.joined([PrefixForest.from_sequences(group) for group in groups])
    expected = gradients([whole], sum(map(len, samples)) - len(samples)).clone()
    for budget, ranks in ((whole.num_tokens, 1), (60, 1), (60, 2), (max(map(len, samples)), 1)):
        model.zero_grad()
        bins = pack(samples, budget, groups=keys, ranks=ranks)
        found = gradients([each.forest for each in bins], sum(each.loss_tokens for each in bins))
        assert float((found - expected).norm() / expected.norm()) < 1e-12


def test_groups_stay_together_and_one_above_the_budget_is_cut_in_depth_first_order():
    keys = ["a", "b", "a", "c", "b", "b"]
    samples = [[1, 2, 3], [1, 2, 3, 9], [1, 2, 4], [7] * 9, [1, 2, 3, 8], [1, 5]]
    found = [each.samples.tolist() for each in pack(samples, 9, groups=keys)]
    assert sorted(found) == [[0, 2], [1, 4, 5], [3]], "a has 4 tokens and b 6: together they have 10"
    assert [each.samples.tolist() for each in pack(samples, 10, groups=keys)][1] == [0, 2, 1, 4, 5]
    cut = pack([[1, 2, 3, number] for number in (5, 6, 7, 8)] + [[1, 2, 3, 5, 5]], 6)
    assert sorted(each.samples.tolist() for each in cut) == [[0, 1, 4], [2, 3]]
    assert sum(each.tokens for each in cut) == 8 + 3, "the prefix that both pieces share is stored twice"


@pytest.mark.parametrize("keys", [torch.tensor([3, 3]), np.array([3, 3]), [torch.tensor(3), torch.tensor(3)]])
def test_equal_groups_are_one_however_they_are_given(keys):
    (found,) = pack([[1, 2], [1, 3]], 9, groups=keys, prompt_lengths=torch.tensor([1, 1]))
    assert found.tokens == 3


def test_equal_input_gives_equal_bins():
    draw = random.Random(3)
    forests = [PrefixForest.from_sequences(group) for group in drawn_groups(draw) + drawn_groups(draw)]
    one, two = (pack(forests, 64, ranks=2) for _ in range(2))
    assert [each.samples.tolist() for each in one] == [each.samples.tolist() for each in two]


def plan_of(groups, ranks, **options):
    draw = np.random.default_rng(0)
    parts = [sizes_of_group(int(draw.integers(50, 400)), *draw.integers(10, 500, 8).tolist()) for _ in range(groups)]
    lengths, shared = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    return plan_bins(SampleSizes(lengths, shared, np.arange(groups + 1) * 8), 8192, ranks=ranks, **options)


def test_ranks_get_as_many_bins_of_about_equal_work():
    plan = plan_of(200, 4)
    assert len(plan.bins) % 4 == 0 and max(plan.tokens) <= 8192
    assert sum(plan.tokens) / len(plan.bins) > 0.8 * 8192
    assert 1 <= plan.imbalance < 1.01 and plan.imbalance <= plan.round_imbalance < 1.05
    assert sorted(np.concatenate(plan.bins).tolist()) == list(range(1600))
    heavy = plan_of(200, 4, shape=ModelShape(parameters=1, layers=1, d_model=1000))  # attention decides
    assert heavy.imbalance < 1.02 and heavy.work != plan.work


def test_few_groups_are_cut_until_each_rank_has_a_bin():
    plan = plan_bins(sizes_of_group(10, 5, 5, 5, 5), 1000, ranks=4, shape=PLAIN)
    assert [each.tolist() for each in sorted(plan.bins, key=min)] == [[0], [1], [2], [3]] and plan.imbalance == 1
    with refused("E801", "3 samples", "4 ranks"):
        plan_bins(sizes_of_group(10, 5, 5, 5), 1000, ranks=4)
    with refused("E801", "5 samples", "6 bins"):
        plan_bins(sizes_of_group(0, 10, 10, 10, 10, 10), 12, ranks=3)


def test_marginal_tokens_are_those_a_sample_adds():
    (only,) = pack([[1, 2, 3, 4], [1, 2], [1, 2, 3, 5], [1, 2, 3, 4]], 100)
    assert isinstance(only, Bin) and only.marginal_tokens.tolist() == [2, 2, 1, 0]


def test_a_sample_above_the_budget_is_named_or_gets_its_own_bin():
    samples = [[1, 2], [1] * 9, [1, 3]]
    with refused("E801", "sample 1 has 9 tokens", "max_tokens, 8"):
        pack(samples, 8)
    found = {tuple(each.samples.tolist()): each.tokens for each in pack(samples, 8, oversize="own_bin")}
    assert found == {(1,): 9, (0, 2): 3}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"max_tokens": "9"}, "max_tokens is '9'"),
        ({"max_tokens": math.nan}, "max_tokens is nan"),
        ({"ranks": 0}, "ranks 0"),
        ({"oversize": "drop"}, "'drop'"),
        ({"groups": [1]}, "1 groups for 2 samples"),
        ({"loss_mask": [[1]]}, "1 loss_mask for 2"),
        ({"samples": []}, "samples"),
        ({"samples": [PrefixForest.from_sequences([[1]])], "groups": [1]}, "sequences only"),
    ],
)
def test_what_cannot_be_packed_is_refused(arguments, said):
    with refused("E801", said, kind=(ValueError, TypeError)):
        pack(**{"samples": [[1, 2], [1, 3]], "max_tokens": 9, **arguments})
