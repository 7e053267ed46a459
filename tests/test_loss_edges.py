"""LossEdges: every target once per sample, a completion's first token too: `pytest tests/test_loss_edges.py`."""

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_trees import SAMPLES, Samples, grown, plain_rows
from torch import Tensor

from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs, folded_cross_entropy, sample_logprobs, unfold
from niels_gpt.prefix_tree.forest import PrefixForest

VOCAB = 97
QUICK = settings(deadline=None, derandomize=True)


def masked(samples: Samples, seed: int) -> tuple[PrefixForest, list[list[int]]]:
    generator = random.Random(seed)
    masks = [[generator.randint(0, 1) for _ in sample] for sample in samples]
    return PrefixForest.from_sequences(samples, loss_mask=masks), masks


def test_the_row_of_the_branch_serves_both_completions_by_hand() -> None:
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


def test_weights_by_hand() -> None:
    # 1 2 | 10 11 and 1 2 | 10 12 share the edge (row 1, target 10).
    forest = PrefixForest.from_rollout_group([1, 2], [[10, 11, 9], [10, 12]])
    assert LossEdges.from_forest(forest).weight.tolist() == [2, 1, 1, 1]  # targets 10, 11, 12, 9
    assert LossEdges.from_forest(forest, weighting="unique").weight.tolist() == [1, 1, 1, 1]
    mean = LossEdges.from_forest(forest, weighting="sample_mean").weight
    assert mean.tolist() == pytest.approx([1 / 6 + 1 / 4, 1 / 6, 1 / 4, 1 / 6])
    own = LossEdges.from_forest(forest, weighting=torch.tensor([3.0, -1.0]))  # an advantage for each sample
    assert own.weight.tolist() == [2, 3, -1, 3] and own.weighting == "given"
    with pytest.raises(
        ValueError, match="weighting is 'mean'; expected one of per_sample, sample_mean, unique, or a tensor"
    ):
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
        assert float(LossEdges.from_forest(forest, weighting="sample_mean").weight.sum()) == pytest.approx(1)


@QUICK
@given(SAMPLES, st.integers(0, 2**32 - 1))
def test_weights_of_ones_own_add_up_by_edge(samples: Samples, seed: int) -> None:
    forest, _ = masked(samples, seed)
    own = torch.rand(len(forest.loss_mask), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    edges = LossEdges.from_forest(forest, weighting=own)
    sums = [0.0] * edges.num_edges
    for edge, token in zip(edges.sample_edge.tolist(), edges.sample_token.tolist(), strict=True):
        sums[edge] += float(own[token])
    assert edges.weight.tolist() == pytest.approx(sums, rel=1e-12)


@QUICK
@given(SAMPLES, st.integers(1, 4))
def test_unfolding_gives_each_sample_its_values_and_padding_the_rest(samples: Samples, multiple: int) -> None:
    forest = PrefixForest.from_sequences(samples).padded(multiple)
    pairs = torch.stack([forest.input_ids, forest.position_ids], dim=1)
    wanted = [[token, place] for sample in samples for place, token in enumerate(sample)]
    assert unfold(pairs, forest).tolist() == wanted
    if len(forest.input_ids) > 1:
        assert unfold(pairs[None], forest).tolist() == wanted
    padded = unfold(pairs, forest, pad=-1)
    longest = max(map(len, samples))
    assert padded.shape == (len(samples), longest, 2)
    assert [row[: len(sample), 0].tolist() for row, sample in zip(padded, samples, strict=True)] == samples
    assert int((padded[..., 0] == -1).sum()) == len(samples) * longest - len(wanted)


def logprobs(logits: Tensor, edges: LossEdges) -> list[float]:
    pairs = zip(edges.row.tolist(), edges.target.tolist(), strict=True)
    return [float(torch.log_softmax(logits[row].double(), -1)[target]) for row, target in pairs]


@settings(QUICK, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_logprobs_in_chunks_are_those_of_all_rows_and_so_are_gradients(seed: int, chunk: int) -> None:
    edges = LossEdges.from_forest(PrefixForest.from_sequences(grown(random.Random(seed))))
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, edges.num_rows, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(5, VOCAB, dtype=torch.float64)
    whole = edge_logprobs(head(hidden), edges, chunk=10**9)
    assert whole.tolist() == pytest.approx(logprobs(head(hidden)[0].detach(), edges), rel=1e-12)
    inputs = [hidden, *head.parameters()]
    wanted = torch.autograd.grad((whole * edges.weight).sum(), inputs)
    parts = edge_logprobs(hidden, edges, head, chunk=chunk)
    assert torch.allclose(parts, whole, rtol=1e-12)
    for found, expected in zip(torch.autograd.grad((parts * edges.weight).sum(), inputs), wanted, strict=True):
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_the_head_sees_each_loss_row_once_and_no_other() -> None:
    edges = LossEdges.from_forest(PrefixForest.from_rollout_group([1, 2, 3], [[10], [11], [12, 13]]))
    hidden = torch.randn(edges.num_rows, 5)
    seen: list[Tensor] = []

    def head(rows: Tensor) -> Tensor:
        seen.append(rows)
        return torch.zeros(len(rows), VOCAB)

    with torch.no_grad():
        edge_logprobs(hidden, edges, head, chunk=1)
    assert torch.equal(torch.cat(seen), hidden[[2, 5]])  # the branch row for three targets, and the row of 12


def test_temperature_divides_and_half_precision_is_summed_in_float32() -> None:
    edges = LossEdges.from_forest(PrefixForest.from_rollout_group([1], [[2, 3], [4]]))
    logits = 5 * torch.randn(edges.num_rows, VOCAB)
    assert edge_logprobs(logits, edges, temperature=2.0).tolist() == pytest.approx(
        logprobs(logits / 2, edges), rel=1e-5
    )
    low = logits.bfloat16()
    assert edge_logprobs(low, edges).dtype == torch.float32
    assert edge_logprobs(low, edges).tolist() == pytest.approx(logprobs(low, edges), rel=1e-5)


def test_the_loss_is_the_mean_over_all_tokens_of_all_samples() -> None:
    samples = [[1, 2, 10, 11, 9], [1, 2, 10, 12], [1, 2, 10, 12]]
    forest = PrefixForest.from_rollout_group([1, 2], [sample[2:] for sample in samples])
    edges = LossEdges.from_forest(forest)
    logits = torch.randn(edges.num_rows, VOCAB, dtype=torch.float64)
    rows = [row.tolist() for row in torch.split(forest.sample_rows, forest.sample_lengths.tolist())]
    terms = [
        -torch.log_softmax(logits[before], -1)[token]
        for sample, path in zip(samples, rows, strict=True)
        for token, before in list(zip(sample[1:], path, strict=False))[1:]
    ]
    assert len(terms) == 7
    assert float(folded_cross_entropy(logits, edges)) == pytest.approx(float(sum(terms)) / 7, rel=1e-12)
    assert float(folded_cross_entropy(logits, edges, normalizer=1)) == pytest.approx(float(sum(terms)), rel=1e-12)
    mean = LossEdges.from_forest(forest, weighting="sample_mean")
    means = [sum(terms[:3]) / 3, sum(terms[3:5]) / 2, sum(terms[5:]) / 2]
    assert float(folded_cross_entropy(logits, mean)) == pytest.approx(float(sum(means)) / 3, rel=1e-12)
    assert float(folded_cross_entropy(logits[None], edges, chunk=1)) == pytest.approx(float(sum(terms)) / 7)


def test_logprobs_by_sample_ragged_and_padded() -> None:
    edges = LossEdges.from_forest(PrefixForest.from_rollout_group([1, 2], [[10, 11], [20, 21, 22]]))
    logp = torch.arange(5.0)
    assert sample_logprobs(logp, edges).tolist() == [0, 2, 1, 3, 4]
    assert sample_logprobs(logp, edges, pad=9).tolist() == [[0, 2, 9], [1, 3, 4]]


class TestFields:
    """Samples 1 2 | 10 11 and 1 2 | 20 21 22, of which the token 21 (a tool's, say) is no target."""

    forest = PrefixForest.from_sequences(
        [[1, 2, 10, 11], [1, 2, 20, 21, 22]], loss_mask=[[0, 0, 1, 1], [0, 0, 1, 0, 1]]
    )
    edges = LossEdges.from_forest(forest)

    @pytest.mark.parametrize(
        ("values", "wanted"),
        [
            ([1.5, 2.5], [1.5, 1.5, 2.5, 2.5]),
            ([torch.tensor(1), torch.tensor(2)], [1, 1, 2, 2]),
            ([[0, 0, 1, 2], [0, 0, 3, 9, 4]], [1, 2, 3, 4]),
            ([[1, 2], [3, 9, 4]], [1, 2, 3, 4]),
            ([[1, 2], [3, 4]], [1, 2, 3, 4]),
            (torch.tensor([[0, 0, 1, 2, 9], [0, 0, 3, 9, 4]]), [1, 2, 3, 4]),
            (torch.tensor([[1, 2, 9], [3, 9, 4]]), [1, 2, 3, 4]),
            (torch.tensor([[1, 2], [3, 4]]), [1, 2, 3, 4]),
            (torch.tensor([0, 0, 1, 2, 0, 0, 3, 9, 4]), [1, 2, 3, 4]),
            (torch.tensor([1, 2, 3, 4]), [1, 2, 3, 4]),
        ],
    )
    def test_every_form_comes_into_the_order_of_supervised_tokens(self, values: object, wanted: list[float]) -> None:
        assert self.edges.field(values).tolist() == wanted

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            (
                [[1, 2], [3]],
                r"the field of sample 1 has 1 values; expected one of: 5 \(all its tokens\), 3 \(from its first",
            ),
            ([[1, 2]], "a field has 1 rows; expected one for each of 2 samples"),
            (
                torch.zeros(3),
                r"a field has shape \[3\]; expected \[2\] \(a value per sample\), \[9\] \(per token of each sample\)",
            ),
            (
                torch.zeros(2, 4),
                r"shape \[2, 4\]; for 2 samples the widths are 5 \(all its tokens\), 3 .*expected one of these",
            ),
            (torch.zeros(2, 5, 1), "a field has shape"),
            ([], "a field has shape"),
        ],
    )
    def test_other_sizes_are_refused_with_the_sizes_that_fit(self, values: object, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            self.edges.field(values)

    def test_what_may_mean_two_things_is_refused(self) -> None:
        # Two samples and two targets, both of the second sample.
        forest = PrefixForest.from_sequences([[1, 2], [1, 3, 4]], loss_mask=[[0, 0], [0, 1, 1]])
        edges = LossEdges.from_forest(forest)
        with pytest.raises(ValueError, match="2 values may be one per sample or one per target"):
            edges.field(torch.tensor([1.0, 2.0]))
        assert edges.field([[], [1.0, 2.0]]).tolist() == [1, 2]
        # The longest tail and the most targets are both 3, but sample 0 has a hole.
        forest = PrefixForest.from_sequences([[1, 2, 3, 4], [1, 5, 6, 7]], loss_mask=[[0, 1, 0, 1], [0, 1, 1, 1]])
        with pytest.raises(ValueError, match="it may be more than one of these: pass a list of rows"):
            LossEdges.from_forest(forest).field(torch.zeros(2, 3))

    def test_gradients_reach_a_field(self) -> None:
        values = torch.zeros(2, requires_grad=True)
        self.edges.field(values).sum().backward()
        assert values.grad is not None and values.grad.tolist() == [2, 2]


@QUICK
@given(SAMPLES)
def test_a_field_of_every_form_means_the_same(samples: Samples) -> None:
    forest = PrefixForest.from_sequences(samples)
    edges = LossEdges.from_forest(forest)
    ragged = torch.arange(len(forest.loss_mask))
    rows = [ragged[begin:end] for begin, end in pairwise(forest.sample_offsets.tolist())]
    assert edges.field(rows).tolist() == edges.sample_token.tolist()
    assert edges.field([row[1:] for row in rows]).tolist() == edges.sample_token.tolist()
    padded = unfold(torch.zeros(forest.num_tokens, dtype=torch.int64), forest, pad=-1)
    padded[padded == 0] = ragged
    if padded.shape[1] > 1:
        assert edges.field(padded).tolist() == edges.sample_token.tolist()


def test_what_cannot_be_a_loss_is_refused() -> None:
    forest = PrefixForest.from_rollout_group([1, 2], [[10, 11], [20]])
    edges = LossEdges.from_forest(forest)
    with pytest.raises(ValueError, match=r"got a tensor of shape \[2, 5, 9\]; expected \[1, T, ...\] or \[T, ...\]"):
        edge_logprobs(torch.zeros(2, 5, 9), edges)
    with pytest.raises(ValueError, match="T of 5 or more"):
        unfold(torch.zeros(4, 9), forest)
    own = LossEdges.from_forest(forest, weighting=torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="say what the sum is divided by"):
        folded_cross_entropy(torch.zeros(5, 30), own)
    assert float(folded_cross_entropy(torch.zeros(5, 30), own, normalizer=3)) == pytest.approx(
        torch.tensor(30.0).log() / 3
    )
    nothing = LossEdges.from_forest(PrefixForest.from_sequences([[1], [2]]))
    assert (nothing.num_edges, nothing.unpredictable) == (0, 2)
    assert edge_logprobs(torch.zeros(2, 30), nothing).shape == (0,)
    with pytest.raises(ValueError, match="no token is supervised"):
        folded_cross_entropy(torch.zeros(2, 30), nothing)


def test_edges_move_with_all_their_tensors() -> None:
    edges = LossEdges.from_forest(PrefixForest.from_rollout_group([1, 2], [[10, 11], [20]]))
    moved = edges.to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, Tensor)]
    assert len(tensors) == 8 and all(value.device.type == "meta" for value in tensors)
    assert moved.num_rows == 5 and moved.weighting == "per_sample"
