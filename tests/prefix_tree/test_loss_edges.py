"""LossEdges: every target once per sample, a completion's first token too."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refused
from support.prefix_trees import SAMPLES, Samples, grown, plain_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from niels_gpt.prefix_tree.edges import (
    LossEdges,
    at_predictions,
    edge_logprobs,
    folded_cross_entropy,
    sample_logprobs,
    unfold,
)
from niels_gpt.prefix_tree.forest import PrefixForest

VOCAB = 97
QUICK = settings(derandomize=True, max_examples=40)


def masked(samples, seed):
    generator = random.Random(seed)
    masks = [[generator.randint(0, 1) for _ in sample] for sample in samples]
    return PrefixForest.from_sequences(samples, loss_mask=masks), masks


def test_the_row_of_the_branch_serves_both_completions_by_hand():
    edges = LossEdges.from_forest(PrefixForest.from_rollout_group([1, 2], [[10, 11], [20, 21, 22]]))
    pairs = list(zip(edges.row.tolist(), edges.target.tolist(), edges.weight.tolist(), strict=True))
    assert pairs == [(1, 10, 1), (1, 20, 1), (2, 11, 1), (4, 21, 1), (5, 22, 1)]
    assert edges.sample_edge.tolist() == [0, 2, 1, 3, 4]
    assert edges.sample_offsets.tolist() == [0, 2, 5]
    assert edges.sample_token.tolist() == [2, 3, 6, 7, 8]
    assert edges.sample.tolist() == [0, 0, 1, 1, 1]
    assert edges.rows.tolist() == [1, 2, 4, 5]
    assert (edges.num_edges, edges.num_loss_tokens, edges.unpredictable) == (5, 5, 0)
    assert repr(edges) == "LossEdges(5 edges for 5 supervised tokens, per_sample)"
    logp = torch.arange(5.0)
    assert sample_logprobs(logp, edges).tolist() == [0, 2, 1, 3, 4]
    assert sample_logprobs(logp, edges, pad=9).tolist() == [[0, 2, 9], [1, 3, 4]]
    assert at_predictions(torch.arange(7), edges).tolist() == [1, 2, 1, 4, 5]  # of a critic's values
    assert at_predictions(torch.zeros(1, 7, 3), edges).shape == (5, 3)
    moved = edges.to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, Tensor)]
    assert len(tensors) == 8 and all(value.device.type == "meta" for value in tensors)
    assert moved.num_rows == 7 and moved.weighting == "per_sample"


def test_weights_by_hand():
    # 1 2 | 10 11 and 1 2 | 10 12 share the edge (row 1, target 10).
    forest = PrefixForest.from_rollout_group([1, 2], [[10, 11, 9], [10, 12]])
    mean = LossEdges.from_forest(forest, weighting="sample_mean").weight
    assert mean.tolist() == pytest.approx([1 / 3 + 1 / 2, 1 / 3, 1 / 2, 1 / 3])  # targets 10, 11, 12, 9
    own = LossEdges.from_forest(forest, weighting=torch.tensor([3.0, -1.0]))  # an advantage for each sample
    assert own.weight.tolist() == [2, 3, -1, 3] and own.weighting == "given"
    with refused("E801", "weighting is 'mean'", "per_sample, sample_mean, unique"):
        LossEdges.from_forest(forest, weighting="mean")


@QUICK
@given(SAMPLES, st.integers(0, 2**32 - 1))
def test_edges_are_the_targets_of_the_samples_and_their_weights_the_uses(samples: Samples, seed: int) -> None:
    forest, masks = masked(samples, seed)
    rows = {prefix: row for row, prefix in enumerate(plain_rows(samples))}
    uses = [
        (rows[tuple(sample[:place])], sample[place])
        for sample, mask in zip(samples, masks, strict=True)
        for place in range(1, len(sample))
        if mask[place]
    ]
    edges = LossEdges.from_forest(forest)
    found = list(zip(edges.row.tolist(), edges.target.tolist(), strict=True))
    assert [found[edge] for edge in edges.sample_edge.tolist()] == uses
    assert dict(zip(found, edges.weight.tolist(), strict=True)) == Counter(uses)
    assert len(set(found)) == len(found) and edges.row.tolist() == sorted(edges.row.tolist())
    assert edges.num_loss_tokens == len(uses) == int(edges.weight.sum())
    assert edges.unpredictable == sum(mask[0] for mask in masks)
    counts = [sum(mask[1:]) for mask in masks]
    assert edges.sample_offsets.diff().tolist() == counts
    unique = LossEdges.from_forest(forest, weighting="unique")
    assert unique.weight.tolist() == [1] * len(found)
    if uses:
        mean = LossEdges.from_forest(forest, weighting="sample_mean").weight
        assert float(mean.sum()) == pytest.approx(sum(count > 0 for count in counts))
    own = torch.rand(len(forest.loss_mask), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sums = [0.0] * edges.num_edges
    for edge, token in zip(edges.sample_edge.tolist(), edges.sample_token.tolist(), strict=True):
        sums[edge] += float(own[token])
    weighted = LossEdges.from_forest(forest, weighting=own)  # given weights add up by edge
    assert weighted.weight.tolist() == pytest.approx(sums, rel=1e-12)


@QUICK
@given(SAMPLES, st.integers(1, 4))
def test_unfolding_gives_each_sample_its_values_and_padding_the_rest(samples: Samples, multiple: int) -> None:
    forest = PrefixForest.from_sequences(samples).padded(multiple)
    pairs = torch.stack([forest.input_ids, forest.position_ids], dim=1)
    wanted = [[token, place] for sample in samples for place, token in enumerate(sample)]
    assert unfold(pairs, forest).tolist() == wanted
    assert unfold(pairs[None], forest).tolist() == wanted
    padded = unfold(pairs, forest, pad=-1)
    longest = max(map(len, samples))
    assert padded.shape == (len(samples), longest, 2)
    assert [row[: len(sample), 0].tolist() for row, sample in zip(padded, samples, strict=True)] == samples
    assert int((padded[..., 0] == -1).sum()) == len(samples) * longest - len(wanted)
    edges, ragged = LossEdges.from_forest(forest), torch.arange(len(wanted))  # a field of every form means the same
    rows = [ragged[begin:end] for begin, end in pairwise(forest.sample_offsets.tolist())]
    columns = torch.full((len(samples), longest), -1)
    columns[padded[..., 0] != -1] = ragged
    for values, per in ((rows, None), ([row[1:] for row in rows], None), (columns, "token")):
        assert edges.field(values, per=per).tolist() == edges.sample_token.tolist()


def logprobs(logits, edges):
    pairs = zip(edges.row.tolist(), edges.target.tolist(), strict=True)
    return [float(torch.log_softmax(logits[row].double(), -1)[target]) for row, target in pairs]


@settings(QUICK, max_examples=10)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_logprobs_in_chunks_are_those_of_all_rows_and_so_are_gradients(seed, chunk):
    edges = LossEdges.from_forest(PrefixForest.from_sequences(grown(random.Random(seed))))
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, edges.num_rows, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(5, VOCAB, dtype=torch.float64)
    whole = edge_logprobs(head(hidden), edges, chunk=10**9)
    assert whole.tolist() == pytest.approx(logprobs(head(hidden)[0].detach(), edges), rel=1e-12)
    inputs = [hidden, *head.parameters()]
    wanted = torch.autograd.grad((whole * edges.weight).sum(), inputs)
    seen = []
    parts = edge_logprobs(hidden, edges, lambda rows: seen.append(rows) or head(rows), chunk=chunk)
    assert torch.equal(torch.cat(seen), hidden[0, edges.rows]) and max(map(len, seen)) <= chunk, "each loss row once"
    assert torch.allclose(parts, whole, rtol=1e-12)
    for found, expected in zip(torch.autograd.grad((parts * edges.weight).sum(), inputs), wanted, strict=True):
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_temperature_divides_and_half_precision_is_summed_in_float32():
    edges = LossEdges.from_forest(PrefixForest.from_rollout_group([1], [[2, 3], [4]]))
    logits = 5 * torch.randn(edges.num_rows, VOCAB)
    cooled = edge_logprobs(logits, edges, temperature=2.0)
    assert cooled.tolist() == pytest.approx(logprobs(logits / 2, edges), rel=1e-5)
    low = logits.bfloat16()
    assert edge_logprobs(low, edges).dtype == torch.float32
    assert edge_logprobs(low, edges).tolist() == pytest.approx(logprobs(low, edges), rel=1e-5)


def plain_entropy(logits, edges):
    logp = logits.log_softmax(-1)[edges.row]
    return -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [2, 10**9])
def test_entropies_come_with_the_logprobs_and_have_the_gradient_of_the_plain_ones(chunk):
    edges = LossEdges.from_forest(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4, 5], [1, 6]]))
    hidden = torch.randn(1, edges.num_rows, 4, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(4, 11, dtype=torch.float64)

    def both(hidden, weight):
        def product(rows):
            return rows @ weight.T

        return edge_logprobs(hidden, edges, product, temperature=0.7, chunk=chunk, entropies=True)

    logp, entropy = both(hidden, head.weight)
    logits = hidden[0] @ head.weight.T / 0.7
    assert torch.allclose(entropy, plain_entropy(logits, edges), rtol=1e-12)
    assert torch.equal(logp, edge_logprobs(hidden, edges, lambda rows: rows @ head.weight.T, temperature=0.7))
    assert sample_logprobs(entropy, edges).shape == (edges.num_loss_tokens,)
    assert torch.autograd.gradcheck(both, (hidden, head.weight))
    with torch.no_grad():
        assert torch.equal(both(hidden, head.weight)[1], entropy)
    low = logits.detach().bfloat16()
    assert edge_logprobs(low, edges, entropies=True)[1].dtype == torch.float32


def test_entropies_of_extreme_logits_are_exact_and_have_finite_gradients():
    edges = LossEdges.from_forest(PrefixForest.from_sequences([[1, 2], [3, 0]]))
    logits = torch.tensor([[1e4, 1e4, -math.inf], [0, 0, 0], [1e4, 0, 0], [0, 0, 0]], requires_grad=True)
    edges = replace(edges, row=torch.tensor([0, 2]), target=torch.tensor([1, 0]), num_rows=4)
    _, entropy = edge_logprobs(logits, edges, entropies=True)
    assert entropy.tolist() == [pytest.approx(math.log(2), rel=1e-6), 0]
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert gradient.isfinite().all() and not gradient[:, 2].any()


def test_entropies_keep_nothing_of_the_size_of_the_logits():
    rows, vocab = 8, 64
    edges = LossEdges.from_forest(PrefixForest.from_rollout_group([1], [[2] * rows]))
    logits = torch.randn(edges.num_rows, vocab, requires_grad=True)

    def kept(**options):
        large = set()

        def pack(value):
            large.update([value.data_ptr()] if value.numel() >= rows * vocab else [])
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            found = edge_logprobs(logits, edges, **options)
        assert isinstance(found, tuple) == bool(options)
        return len(large)

    assert kept(entropies=True) == kept() == 1


class TestFields:
    """Samples 1 2 | 10 11 and 1 2 | 20 21 22, of which the token 21 (a tool's, say) is no target."""

    forest = PrefixForest.from_sequences(
        [[1, 2, 10, 11], [1, 2, 20, 21, 22]], loss_mask=[[0, 0, 1, 1], [0, 0, 1, 0, 1]], prompt_lengths=[2, 2]
    )
    edges = LossEdges.from_forest(forest)

    def test_gradients_reach_a_field(self):
        values = torch.zeros(2, requires_grad=True)
        self.edges.field(values, per="sample").sum().backward()
        assert values.grad is not None and values.grad.tolist() == [2, 2]

    @pytest.mark.parametrize(
        ("values", "per", "wanted"),
        [
            ([1.5, 2.5], "sample", [1.5, 1.5, 2.5, 2.5]),
            ([torch.tensor(1), torch.tensor(2)], "sample", [1, 1, 2, 2]),
            (np.array([1, 2]), "sample", [1, 1, 2, 2]),
            (torch.tensor([[1], [2]]), "sample", [1, 1, 2, 2]),
            ([[0, 0, 1, 2], [0, 0, 3, 9, 4]], "token", [1, 2, 3, 4]),
            ([[1, 2], [3, 9, 4]], "completion", [1, 2, 3, 4]),
            ([[1, 2], (3, 4)], "target", [1, 2, 3, 4]),
            ([0, 0, 1, 2, 0, 0, 3, 9, 4], "token", [1, 2, 3, 4]),
            (np.array([1, 2, 3, 9, 4]), "completion", [1, 2, 3, 4]),
            (torch.tensor([1, 2, 3, 4]), "target", [1, 2, 3, 4]),
        ],
    )
    def test_every_form_comes_into_the_order_of_targets(self, values, per, wanted):
        assert self.edges.field(values, per=per).tolist() == wanted
        if getattr(values, "ndim", 1) == 1:  # the sizes of these say it too
            assert self.edges.field(values).tolist() == wanted

    def test_the_floats_and_integers_of_lists_keep_their_values(self):
        for values in ([0.1, 0.2], [[0.1, 0.1], [0.2, 0.2]], [(0.1, 0.1), [0.2, 0.2]]):
            assert self.edges.field(values).tolist() == [0.1, 0.1, 0.2, 0.2]
        assert self.edges.field([2**53 + 1, 1]).tolist()[0] == 2**53 + 1
        assert self.edges.field(torch.ones(2)).dtype == self.edges.field(np.ones(2, "f4")).dtype == torch.float32
        assert self.edges.field([torch.tensor([1.0, 2]), torch.tensor([3.0, 4])]).dtype == torch.float32
        forest = PrefixForest.from_sequences([[1, 2], [1, 3, 4]], loss_mask=[[0, 0], [0, 1, 1]])
        edges = LossEdges.from_forest(forest, weighting=[[], [0.1, 0.2]])
        assert edges.weight.tolist() == [0.1, 0.2]
        assert edges.field([[], [2**53 + 1, 1]]).tolist()[0] == 2**53 + 1
        assert folded_cross_entropy(torch.zeros(4, 9), edges, normalizer=1).dtype == torch.float32

    @pytest.mark.parametrize("width", [5, 6, 16])
    def test_padded_rows_may_be_of_any_width_but_have_to_say_what_a_column_is(self, width):
        def padded(*rows):
            return torch.tensor([row + [-7] * (width - len(row)) for row in rows])

        assert self.edges.field(padded([0, 0, 1, 2], [0, 0, 3, 9, 4]), per="token").tolist() == [1, 2, 3, 4]
        assert self.edges.field(padded([1, 2], [3, 9, 4]), per="completion").tolist() == [1, 2, 3, 4]
        assert self.edges.field(padded([1, 2], [3, 4]), per="target").tolist() == [1, 2, 3, 4]
        with refused("E801", "[2, ", 'per="completion"'):
            self.edges.field(padded([1, 2], [3, 9, 4]))

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ([[1, 2], [3]], "sample 1 has 1 values; expected one of: 1 (per sample), 5 (per token), 3"),
            ([None, 1.0], "a field has [None, 1.0]"),
            ([[1, 2]], "a field has 1 rows"),
            ([torch.ones(2, 1), torch.ones(3, 1)], "the field of sample 0 has shape [2, 1]"),
            ([1.0, [1.0, 2.0]], "the field of sample 0 has shape []"),
            (torch.zeros(3), "shape [3]; expected 2 rows, or one axis of 2 (per sample), 9 (per token)"),
            *((value, "a field has shape") for value in (torch.zeros(2, 5, 1), torch.zeros(3, 5), [])),
        ],
    )
    def test_other_sizes_are_refused_with_the_sizes_that_fit(self, values, words):
        with refused("E801", words, kind=(ValueError, TypeError)):
            self.edges.field(values)
        with refused("E801", "[2, 3]"):
            self.edges.field(torch.zeros(2, 3), per="sample")
        with refused("E801", "5 columns"):
            self.edges.field(torch.zeros(2, 4), per="token")
        with refused("E801", "per is 'edge'", "sample, token, completion, target"):
            self.edges.field(values, per="edge")
        with refused("E801", "a field is a dict", kind=TypeError):
            self.edges.field({0: 1.0, 1: 2.0})

    def test_what_may_mean_two_things_is_refused(self):
        # Two samples and two targets, both of the second sample.
        forest = PrefixForest.from_sequences([[1, 2], [1, 3, 4]], loss_mask=[[0, 0], [0, 1, 1]])
        edges = LossEdges.from_forest(forest)
        with refused("E801", "2 (per sample)", "per='sample'"):
            edges.field(torch.tensor([1.0, 2.0]))
        assert edges.field([1.0, 2.0], per="sample").tolist() == [2, 2]
        assert edges.field([[], [1.0, 2.0]]).tolist() == [1, 2]
        own = LossEdges.from_forest(forest, weighting=[[], [1.0, 2.0]])
        assert own.weight.tolist() == [1, 2]

    def test_a_column_is_a_token_of_the_completion_though_its_first_one_is_no_target(self):
        """The second completion begins with a tool's token: 21 and 22 stand in columns 1 and 2, not 0 and 1."""
        old = torch.tensor([[10, 11, 12], [20, 21, 22]])
        group = PrefixForest.from_rollout_group([1, 2], old.tolist(), completion_mask=[[1, 1, 1], [0, 1, 1]])
        samples = [[1, 2, *row] for row in old.tolist()]
        mask = [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
        told = PrefixForest.from_sequences(samples, loss_mask=mask, prompt_lengths=[2, 2])
        for forest in (group, told, group.padded(8), PrefixForest.joined([group])):
            edges = LossEdges.from_forest(forest)
            assert edges.field(old, per="completion").tolist() == [10, 11, 12, 21, 22]
            assert edges.field(old.tolist(), per="completion").tolist() == [10, 11, 12, 21, 22]
            assert edges.field(old.tolist()).tolist() == [10, 11, 12, 21, 22]
            assert edges.target[edges.sample_edge].tolist() == [10, 11, 12, 21, 22]

    def test_where_completions_begin_is_never_guessed(self):
        masks = [[0, 0, 1, 1], [0, 0, 0, 1, 1]]
        samples = [[1, 2, 10, 11], [1, 2, 20, 21, 22]]
        untold = PrefixForest.from_sequences(samples, loss_mask=masks)
        joined = PrefixForest.joined([PrefixForest.from_rollout_group([1], [[2]]), untold])
        for forest, rows in ((untold, 2), (joined, 3)):
            with refused("E801", "prompt_lengths", "per='token'"):
                LossEdges.from_forest(forest).field(torch.zeros(rows, 5), per="completion")
        with refused("E801", "sample 1 has 3 values"):
            LossEdges.from_forest(untold).field([[1, 2], [0, 3, 4]])
        prompted = PrefixForest.from_sequences(samples, prompt_lengths=[2, 2])  # each token is a target
        with refused("E801", "'completion'", "prompt", "per='token'"):
            LossEdges.from_forest(prompted).field(torch.zeros(2, 5), per="completion")
        for lengths in ([2], [2, 6], [-1, 2]):
            with refused("E801", "prompt_lengths"):
                PrefixForest.from_sequences(samples, prompt_lengths=lengths)


def test_what_is_not_of_this_row_is_refused():
    forest = PrefixForest.from_rollout_group([1, 2], [[10, 11], [20]])
    edges = LossEdges.from_forest(forest)
    for shape in [(2, 5, 9), (4, 9), (6, 9), (1, 6, 9)]:
        for call, of in ((edge_logprobs, edges), (unfold, forest), (at_predictions, edges)):
            with refused("E801", f"shape [{shape[0]}, ", "[5, ...] or [1, 5, ...]"):
                call(torch.zeros(shape), of)
    assert LossEdges.from_forest(forest.padded(8)).num_rows == 8
    logp = edge_logprobs(torch.zeros(5, 30), edges)
    with refused("E801", "edge_logp", "[5]", "[3]"):
        sample_logprobs(torch.zeros(5), edges)
    assert sample_logprobs(logp, edges).shape == (3,)
    for wrong in ({"chunk": 0}, {"temperature": 0.0}, {"temperature": -1.0}, {"temperature": math.nan}):
        with refused("E801", "1 or more", "above 0"):
            edge_logprobs(torch.zeros(5, 30), edges, **wrong)


def test_weights_of_ones_own_need_a_normalizer_and_no_target_at_all_gives_zero_with_one():
    forest = PrefixForest.from_rollout_group([1, 2], [[10, 11], [20]])
    own = LossEdges.from_forest(forest, weighting=torch.tensor([1.0, -1.0]))
    with refused("E801", "normalizer=len(samples)"):
        folded_cross_entropy(torch.zeros(5, 30), own)
    assert float(folded_cross_entropy(torch.zeros(5, 30), own, normalizer=3)) == pytest.approx(math.log(30) / 3)
    nothing = LossEdges.from_forest(PrefixForest.from_sequences([[1], [2]]))
    assert (nothing.num_edges, nothing.unpredictable) == (0, 2)
    hidden, head = torch.randn(2, 4, requires_grad=True), torch.nn.Linear(4, 30)
    with refused("E801", "supervised", "normalizer"):
        folded_cross_entropy(hidden, nothing, head)
    loss = folded_cross_entropy(hidden, nothing, head, normalizer=10)
    assert float(loss.detach()) == 0
    loss.backward()  # as every rank has to
    assert hidden.grad is not None and not hidden.grad.any()
    assert head.weight.grad is not None and not head.weight.grad.any()


def test_dropout_in_the_head_is_the_same_when_a_chunk_is_computed_again():
    edges = LossEdges.from_forest(PrefixForest.from_rollout_group([1], [list(range(2, 34))]))
    hidden = torch.randn(edges.num_rows, 4, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 40, dtype=torch.float64))
    kept = []
    head[0].register_forward_hook(lambda module, inputs, output: kept.append((output != 0).double() * 2))
    logp = edge_logprobs(hidden, edges, head, chunk=8)
    (found,) = torch.autograd.grad(logp.sum(), hidden)
    masks = torch.cat(kept[:4])
    logits = head[1](hidden[edges.rows] * masks)
    wanted = logits.log_softmax(-1)[torch.arange(len(logits)), edges.target].sum()
    assert torch.allclose(found, torch.autograd.grad(wanted, hidden)[0], rtol=1e-10)


def test_the_backward_pass_holds_the_logits_of_one_chunk_at_a_time():
    rows, vocab, chunk = 512, 1024, 32
    edges = LossEdges.from_forest(PrefixForest.from_rollout_group([1], [[2] * rows]))
    hidden = torch.randn(edges.num_rows, 8, requires_grad=True)
    head = torch.nn.Linear(8, vocab, bias=False)
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(each.numel() for each in tree_leaves(out) if isinstance(each, Tensor))])
            return out

    with Largest():
        folded_cross_entropy(hidden, edges, head, chunk=chunk).backward()
    assert largest == chunk * vocab < rows * vocab


def test_what_is_made_beside_a_generation_can_be_trained_on():
    with torch.inference_mode():
        forest = PrefixForest.joined([PrefixForest.from_rollout_group([1, 2], [[10, 11], [20]]).padded(2)]).padded(8)
        edges = LossEdges.from_forest(forest)
        unfold(torch.zeros(8), forest)
    hidden = torch.randn(8, 30, requires_grad=True)
    (unfold(hidden, forest).sum() + edge_logprobs(hidden, edges).sum()).backward()
    assert hidden.grad is not None and hidden.grad.any()
