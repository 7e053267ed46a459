"""verify_fold passes a right fold and names what is wrong with another: `pytest tests/test_prefix_tree_verify.py`.

Each control breaks one thing. The model is a small transformer in float64, written here, so that a fault can be put
where a test wants it; a Llama of transformers stands beside it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from causal_models import tiny_model
from float64_models import VOCAB, float64_llama
from prefix_trees import grown
from torch import Tensor, nn

from niels_gpt.prefix_tree.attention import hf_forward
from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.fold import FoldedRollouts, fold_shared_prefix_rollouts, prefix_tree_collate_fn
from niels_gpt.prefix_tree.fold_report import ADVICE
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.verify import FoldReport, verify_fold

pytestmark = pytest.mark.usefixtures("one_thread")

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
GROUP = ([1, 2], [[10, 11], [20, 21, 22]])  # 5 targets; rows 1 2 10 11 20 21 22
SEQUENCES = [[1, 2, 10, 11], [1, 2, 20, 21, 22]]


class Transformer(nn.Module):
    """Two layers of attention with one head and a residual stream; every position has an embedding."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.token, self.place = nn.Embedding(VOCAB, width), nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.head = nn.Linear(width, VOCAB)
        self.dropout = nn.Dropout(dropout)
        self.double()

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        hidden = self.dropout(self.token(ids) + self.place(positions))
        for layer in self.layers:
            query, key, value = layer(hidden).chunk(3, -1)
            scores = (query @ key.mT / 4).masked_fill(~mask[:, 0], -torch.inf)
            hidden = hidden + scores.softmax(-1) @ value
        return self.head(hidden)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer()


def group() -> PrefixForest:
    return PrefixForest.from_rollout_group(*GROUP)


def causal(rows: int) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).tril()[None, None]


# --- right folds ------------------------------------------------------------------------------------------------------


def test_a_right_fold_has_no_finding_and_its_figures_are_of_rounding(model: Transformer) -> None:
    report = verify_fold(model, group(), samples=SEQUENCES)
    assert report.ok and report.findings == []
    assert (report.samples, report.tokens_before, report.tokens_after) == (2, 9, 7)
    assert (report.targets, report.unpredictable, report.lost_targets) == (5, 0, 0)
    assert report.probes == 7 and report.leak == 0 and report.blind_probes == 0
    assert report.logprob_error is not None and report.logprob_error < 1e-13
    assert report.gradient_error is not None and report.gradient_error < 1e-13
    assert report.worst_parameter is not None and report.worst_parameter[0] in dict(model.named_parameters())
    assert str(report).startswith(
        "2 samples, 9 tokens folded into 7 rows; torch.float64, tolerance 1e-10: ok\n"
        "ok      samples: 0 differ of 2 in the fold and 2 given ones.\n"
        "ok      determinism: logits of two equal runs differ by 0 at most.\n"
    )
    assert str(report).endswith("\nNothing to do.")


def odd_forests() -> dict[str, PrefixForest]:
    grown_samples = grown(random.Random(5))
    masks = [[random.Random(5).randint(0, 1) for _ in sample] for sample in grown_samples]
    return {
        "random, several roots": PrefixForest.from_sequences(grown_samples, loss_mask=masks),
        "padded": group().padded(16, pad_id=9),
        "groups in a row": PrefixForest.joined([group(), PrefixForest.from_rollout_group([1, 2, 3], [[4], [4, 5]])]),
        "one token": PrefixForest.from_sequences([[7]]),
        "one-token samples": PrefixForest.from_sequences([[7], [8], [7]]),
        "one id": PrefixForest.from_sequences([[7, 7, 7]]),
        "duplicates and prefixes": PrefixForest.from_sequences([[1, 2, 3], [1, 2, 3], [1, 2], [1]]),
        "no prompt": PrefixForest.from_rollout_group([], [[10, 11], [10, 12], [20]]),
        "no target": PrefixForest.from_sequences([[1, 2], [1, 3]], loss_mask=[[0, 0], [0, 0]]),
        "a sample without a target": PrefixForest.from_sequences([[1, 2], [1, 3]], loss_mask=[[1, 1], [0, 0]]),
        "equal siblings": PrefixForest.from_node_paths([2, 1, 1, 1], [[0, 1, 2], [0, 3]], [1, 2, 3, 4, 3]),
    }


@pytest.mark.parametrize("name", odd_forests())
@pytest.mark.parametrize("weighting", ["per_sample", "sample_mean", "unique"])
def test_odd_forests_are_right_too(model: Transformer, name: str, weighting: str) -> None:
    report = verify_fold(model, odd_forests()[name], weighting=weighting)
    assert report.ok, report
    assert report.logprob_error is not None and report.gradient_error is not None


def test_weights_of_ones_own_are_checked_as_they_are_given(model: Transformer) -> None:
    advantages = torch.tensor([0.5, -2.0])  # per sample
    assert verify_fold(model, group(), weighting=advantages).ok
    edges = LossEdges.from_forest(group(), weighting=advantages)
    assert verify_fold(model, group(), edges=edges, weighting=advantages).ok
    assert "weights" in verify_fold(model, group(), edges=edges).findings
    assert verify_fold(model, group(), weighting=torch.tensor([0.0, 1.0])).ok  # 0 is a weight
    with pytest.raises(ValueError, match="weighting is 'mean'"):
        verify_fold(model, group(), weighting="mean")


def test_a_layout_that_is_not_in_pre_order_is_taken_as_it_is(model: Transformer) -> None:
    # Both completions stand before their prompt [1, 2], and a row before theirs in the mask.
    batch = {
        "input_ids": torch.tensor([[10, 11, 20, 1, 2]]),
        "position_ids": torch.tensor([[2, 3, 2, 0, 1]]),
        "labels": torch.tensor([[11, -100, -100, 2, -100]]),
        "prefix_tree": ([2, 1, 2], [[2, 0], [2, 1]]),
    }
    report = verify_fold(model, batch, loss_mask=[[0, 0, 0, 1], [0, 0, 0]])
    assert report.findings == ["extra targets", "gradients"] and report.extra_targets == 1, report
    batch["labels"] = torch.tensor([[11, -100, -100, -100, -100]])
    assert verify_fold(model, batch, loss_mask=[[0, 0, 0, 1], [0, 0, 0]]).ok


def test_a_pair_of_weight_zero_is_none(model: Transformer) -> None:
    masks = [[0, 0, 1, 1], [0, 0, 1, 1, 1]]
    forest, edges = group(), LossEdges.from_forest(group())
    extra = replace(  # row 0 -> 2 is no target, and a masked pair may have a target that is none
        edges,
        row=torch.cat([edges.row, torch.tensor([0, 3])]),
        target=torch.cat([edges.target, torch.tensor([2, -100])]),
        weight=torch.cat([edges.weight, torch.zeros(2, dtype=torch.float64)]),
    )
    assert verify_fold(model, forest, edges=extra, loss_mask=masks).ok
    extra.weight[5:6] = 1
    assert verify_fold(model, forest, edges=extra, loss_mask=masks).findings == ["extra targets", "gradients"]


def test_a_target_of_weight_zero_may_be_left_out(model: Transformer) -> None:
    forest, advantages = group(), torch.tensor([0.0, 1.0])  # the first sample has none
    edges = LossEdges.from_forest(forest)
    kept = edges.weight.clone()
    kept[(edges.target == 10) | (edges.target == 11)] = 0
    zeroed = replace(edges, weight=kept)
    chosen = kept != 0
    left_out = replace(edges, row=edges.row[chosen], target=edges.target[chosen], weight=kept[chosen])
    for other in (zeroed, left_out):
        assert verify_fold(model, forest, edges=other, weighting=advantages).ok
        assert verify_fold(model, forest, edges=other).findings == ["lost targets", "gradients"]
    report = verify_fold(model, forest, edges=edges, weighting=advantages)
    assert report.findings == ["weights", "gradients"] and (report.weight_errors, report.weight_error) == (2, math.inf)


def test_advantages_that_cancel_out_leave_a_pair_without_a_weight(model: Transformer) -> None:
    forest = PrefixForest.from_rollout_group([1, 2], [[10, 11], [10, 12], [10, 13]])  # 10 is of all three
    advantages = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)  # 0.1 + 0.2 - 0.3 is 5.6e-17
    edges = LossEdges.from_forest(forest, weighting=advantages)
    chosen = edges.target != 10
    left_out = replace(edges, row=edges.row[chosen], target=edges.target[chosen], weight=edges.weight[chosen])
    for given in (edges, left_out, replace(edges, weight=edges.weight.masked_fill(~chosen, 3e-17))):
        assert verify_fold(model, forest, edges=given, weighting=advantages).ok


@pytest.mark.parametrize(("factor", "findings"), [(1 + 1e-3, ["weights"]), (1 + 1e-7, [])])
def test_weights_may_have_passed_through_float32_but_not_more(
    model: Transformer, factor: float, findings: list[str]
) -> None:
    edges = LossEdges.from_forest(group())
    edges.weight[1] *= factor
    assert verify_fold(model, group(), edges=edges, tolerance=0.01).findings == findings


# --- what a layout loses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "completions", "targets", "lost"),
    [
        ([1, 2], [[10, 11], [20, 21, 22]], 5, 2),
        ([5], [[7, 8]], 2, 1),
        ([1, 2], [[10], [20], [30, 31]], 4, 3),
        ([1, 2, 3], [[9]], 1, 1),  # nothing is left
        ([], [[10, 11], [20, 21, 22]], 3, 0),  # without a prompt no row could predict them
    ],
)
def test_one_label_per_row_loses_the_first_token_of_every_completion(
    model: Transformer, prompt: list[int], completions: list[list[int]], targets: int, lost: int
) -> None:
    folded = fold_shared_prefix_rollouts(prompt, completions)
    batch = prefix_tree_collate_fn([{"prompt_ids": prompt, "completions": completions}])
    for report in (verify_fold(model, folded), verify_fold(model, batch)):
        assert (report.targets, report.lost_targets, report.lost_first_tokens) == (targets, lost, lost)
        assert report.findings == (["lost targets", "gradients"] if lost else [])
        assert report.leak == 0 and report.logprob_error is not None and report.logprob_error < 1e-13
        assert report.unpredictable == 0 and "where no row predicts" not in str(report)
        if lost:
            assert f"{lost} of {targets} supervised tokens have no loss, {lost} of them first in" in str(report)
            assert str(report).splitlines()[-1] == f"What to do: {ADVICE['lost targets']}"


def test_edges_repair_that_layout(model: Transformer) -> None:
    folded = fold_shared_prefix_rollouts(*GROUP)
    forest = PrefixForest.from_node_paths(folded.node_lengths, folded.sample_paths, folded.input_ids, loss_nodes=[1, 2])
    assert verify_fold(model, folded, edges=LossEdges.from_forest(forest)).ok


def test_a_lost_target_inside_a_completion_is_no_first_token(model: Transformer) -> None:
    folded = fold_shared_prefix_rollouts(*GROUP)
    folded.labels[4] = -100  # 20 -> 21
    report = verify_fold(model, folded)
    assert (report.lost_targets, report.lost_first_tokens) == (3, 2)


def test_first_tokens_are_those_behind_a_branch_point_or_what_is_no_target(model: Transformer) -> None:
    # One node, 1 2 | 10 11 by the mask alone: 10 has no label.
    batch = {"input_ids": [1, 2, 10, 11], "position_ids": [0, 1, 2, 3], "labels": [-100, -100, 11, -100]}
    report = verify_fold(model, {**batch, "prefix_tree": ([4], [[0]])}, loss_mask=[[0, 0, 1, 1]])
    assert (report.targets, report.lost_targets, report.lost_first_tokens) == (2, 1, 1)
    # The prompt is supervised too: 2 has a label, 10 and 20 have none.
    batch = {"input_ids": [1, 2, 10, 20], "position_ids": [0, 1, 2, 2], "labels": [2, -100, -100, -100]}
    report = verify_fold(model, {**batch, "prefix_tree": ([2, 1, 1], [[0, 1], [0, 2]])}, loss_mask=[[1, 1, 1]] * 2)
    assert (report.targets, report.unpredictable, report.lost_targets, report.lost_first_tokens) == (4, 2, 2, 2)


def test_labels_where_nothing_is_a_target_are_off_beyond_measure(model: Transformer) -> None:
    report = verify_fold(model, fold_shared_prefix_rollouts(*GROUP), loss_mask=[[0] * 4, [0] * 5])
    assert report.findings == ["extra targets", "gradients"]
    assert (report.extra_targets, report.gradient_error) == (3, math.inf)


def test_another_ignored_label_can_be_given(model: Transformer) -> None:
    folded = fold_shared_prefix_rollouts([], GROUP[1], -1)
    assert verify_fold(model, folded, ignore_idx=-1).ok
    with pytest.raises(ValueError, match=r"targets from -1; expected .* or the label ignore_idx=-100"):
        verify_fold(model, folded)


def test_labels_weigh_a_node_of_two_samples_once(model: Transformer) -> None:
    # 1 | 2 3 | 4  and  1 | 2 3 | 5: the label 3 in the row of 2 stands for a token of both samples.
    batch = {
        "input_ids": [1, 2, 3, 4, 5],
        "position_ids": [0, 1, 2, 3, 3],
        "labels": [-100, 3, -100, -100, -100],
        "prefix_tree": ([1, 2, 1, 1], [[0, 1, 2], [0, 1, 3]]),
    }
    report = verify_fold(model, batch, loss_mask=[[0, 0, 1, 0]] * 2)
    assert report.findings == ["weights", "gradients"]
    assert (report.weight_errors, report.weight_error) == (1, 0.5)
    assert verify_fold(model, batch, loss_mask=[[0, 0, 1, 0]] * 2, weighting="unique").ok


def test_edges_without_multiplicity_are_found(model: Transformer) -> None:
    forest = PrefixForest.from_rollout_group([1, 2], [[10, 11], [10, 12], [20]])  # row 1 -> 10 twice
    edges = LossEdges.from_forest(forest)
    ones = replace(edges, weight=torch.ones_like(edges.weight))
    report = verify_fold(model, forest, edges=ones)
    assert report.findings == ["weights", "gradients"]
    assert (report.weight_errors, report.weight_error) == (1, 0.5)
    assert report.gradient_error is not None and report.gradient_error > 0.01
    nothing = replace(edges, weight=torch.full_like(edges.weight, math.nan))
    assert verify_fold(model, forest, edges=nothing).weight_errors == 4


# --- broken batches ---------------------------------------------------------------------------------------------------


def test_labels_shifted_once_too_few_are_wrong_targets(model: Transformer) -> None:
    folded = fold_shared_prefix_rollouts(*GROUP)
    own = [-100, -100, *folded.input_ids[2:]]  # for a loss that shifts: the row of a token has its own id
    report = verify_fold(model, replace(folded, labels=own))
    assert report.findings == ["wrong targets", "lost targets", "gradients"]
    assert (report.wrong_targets, report.lost_targets, report.lost_first_tokens) == (5, 5, 2)


def test_a_supervised_prompt_is_an_extra_target(model: Transformer) -> None:
    folded = fold_shared_prefix_rollouts(*GROUP)
    folded.labels[0] = 2
    report = verify_fold(model, folded)
    assert (report.extra_targets, report.wrong_targets, report.lost_targets) == (1, 0, 2)


def test_positions_that_do_not_begin_again_are_counted(model: Transformer) -> None:
    forest = replace(group(), position_ids=torch.arange(7))
    report = verify_fold(model, forest)  # 1 2 10 11 are right; 20 21 22 stand at 4 5 6 instead of 2 3 4
    assert report.findings[0] == "positions" and "log-probs" in report.findings
    assert (report.wrong_positions, report.position_where) == (3, (1, 2))
    assert report.logprob_where is not None and report.logprob_where[0] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [1]}, "there are 7 input_ids, 7 position_ids, 1 labels; expected 7 of each"),
        ({"node_lengths": [2, 2, 4]}, "expected 8 of each, the sum of node_lengths"),
        ({"sample_paths": [[0, 1]]}, "on no path"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(model: Transformer, change: dict[str, Any], message: str) -> None:
    folded: FoldedRollouts = replace(fold_shared_prefix_rollouts(*GROUP), **change)
    with pytest.raises(ValueError, match=message):
        verify_fold(model, folded)


def test_a_batch_whose_tree_a_backend_has_popped_is_refused(model: Transformer) -> None:
    batch = prefix_tree_collate_fn([{"prompt_ids": GROUP[0], "completions": GROUP[1]}])
    del batch["prefix_tree"]
    with pytest.raises(ValueError, match="a dict, has no prefix_tree; expected a PrefixForest"):
        verify_fold(model, batch)


def test_a_tree_of_tensors_is_taken(model: Transformer) -> None:
    batch = prefix_tree_collate_fn([{"prompt_ids": GROUP[0], "completions": GROUP[1]}])
    batch["prefix_tree"] = (torch.tensor([2, 2, 3]), torch.tensor([[0, 1], [0, 2]]))
    report = verify_fold(model, batch, samples=SEQUENCES)
    assert report.findings == ["lost targets", "gradients"] and report.lost_targets == 2
    batch["prefix_tree"] = (torch.tensor([2, 2, 3]), [torch.tensor([0, 1]), torch.tensor([0, 2])])
    assert str(verify_fold(model, batch, samples=SEQUENCES)) == str(report)
    with pytest.raises(TypeError, match="float"):
        verify_fold(model, {**batch, "prefix_tree": ([2.0, 2.0, 3.0], [[0, 1], [0, 2]])})


def test_rows_behind_the_last_node_are_padding(model: Transformer) -> None:
    batch = prefix_tree_collate_fn([{"prompt_ids": GROUP[0], "completions": GROUP[1]}])
    for name, value in {"input_ids": 9, "position_ids": 0, "labels": -100}.items():
        batch[name] = torch.cat([batch[name], torch.tensor([[value]])], 1)
    report = verify_fold(model, batch, samples=SEQUENCES)
    assert report.findings == ["lost targets", "gradients"] and report.leak == 0
    assert (report.tokens_after, report.padding) == (7, 1)
    assert "9 tokens folded into 7 rows and 1 of padding; torch.float64" in str(report)
    batch["labels"][0, 7] = 5  # a loss on padding
    assert verify_fold(model, batch).wrong_targets == 1


def test_labels_are_not_asked_for_where_there_are_edges(model: Transformer) -> None:
    batch = prefix_tree_collate_fn([{"prompt_ids": GROUP[0], "completions": GROUP[1]}])
    del batch["labels"]
    assert verify_fold(model, batch, edges=LossEdges.from_forest(group()), samples=SEQUENCES).ok
    with pytest.raises(ValueError, match="a dict, has no labels"):
        verify_fold(model, batch)


# --- the samples that went in -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folded", "changed", "first"),
    [
        ([[1, 2, 10, 11]], 1, (1, 0)),  # the second is lost
        ([[1, 2, 10, 11], [1, 2, 20, 21]], 1, (1, 4)),  # its last token is lost
        ([[1, 2, 10, 12], [1, 2, 20, 21, 22]], 1, (0, 3)),
        ([[1, 2, 20, 21, 22], [1, 2, 10, 11]], 2, (0, 2)),  # another order: advantages would go to the wrong ones
        ([*SEQUENCES, [1, 2]], 1, (2, 0)),  # one is added
    ],
)
def test_a_fold_that_lost_or_changed_a_sample_is_found_given_the_samples(
    model: Transformer, folded: list[list[int]], changed: int, first: tuple[int, int]
) -> None:
    forest = PrefixForest.from_sequences(folded)
    report = verify_fold(model, forest, samples=[torch.tensor(sample) for sample in SEQUENCES])
    assert report.findings == ["samples"] and not report.ok
    assert (report.samples, report.given_samples) == (len(folded), 2)
    assert (report.changed_samples, report.sample_where) == (changed, first)
    text = str(report)
    assert f"FAILED  samples: {changed} differ of {len(folded)} in the fold and 2 given ones (sample {first[0]}" in text
    assert "-       gradients: not compared: the samples are others." in text and "\nok" not in text
    assert text.splitlines()[-1] == f"What to do: {ADVICE['samples']}"
    # A mask for the samples that went in fits no other number of them; what is wrong is said all the same.
    masks = [[0] * len(sample) for sample in SEQUENCES]
    assert verify_fold(model, forest, samples=SEQUENCES, loss_mask=masks).findings == ["samples"]

    alone = verify_fold(model, forest)
    assert alone.ok and alone.changed_samples is None  # the fold agrees with itself
    assert "-       samples: not compared: they are taken from the fold; pass samples=" in str(alone)


def test_samples_of_a_layout_that_is_not_in_pre_order_are_compared_too(model: Transformer) -> None:
    batch = {
        "input_ids": [10, 11, 20, 1, 2],
        "position_ids": [2, 3, 2, 0, 1],
        "labels": [11, -100, -100, -100, -100],
        "prefix_tree": ([2, 1, 2], [[2, 0], [2, 1]]),
    }
    given = {"loss_mask": [[0, 0, 0, 1], [0, 0, 0]]}
    assert verify_fold(model, batch, samples=[[1, 2, 10, 11], [1, 2, 20]], **given).ok
    assert verify_fold(model, batch, samples=[[1, 2, 20], [1, 2, 10, 11]], **given).findings == ["samples"]


def test_edges_of_another_forest_are_refused(model: Transformer) -> None:
    edges = LossEdges.from_forest(PrefixForest.from_sequences([list(range(20))]))
    with pytest.raises(ValueError, match=r"supervision has rows of 0 to 18 .* expected rows of 0 to 6"):
        verify_fold(model, group(), edges=edges)


# --- broken forwards --------------------------------------------------------------------------------------------------


def test_a_dropped_mask_leaks(model: Transformer) -> None:
    report = verify_fold(lambda ids, at, mask: model(ids, at, causal(ids.shape[1])), group(), parameters=model)
    assert report.findings == ["leaks", "log-probs", "gradients"]
    assert report.leak > 1e-3 and report.leak_where is not None
    changed, moved = report.leak_where
    assert changed in (2, 3) and moved in (4, 5, 6)  # from the first completion into the second
    assert f"(row {moved}, by a change of row {changed})" in str(report)
    assert str(report).splitlines()[-1] == f"What to do: {ADVICE['leaks']}"


def test_one_probe_finds_a_dropped_mask_whatever_the_seed(model: Transformer) -> None:
    for seed in range(10):
        report = verify_fold(lambda ids, at, mask: model(ids, at, causal(ids.shape[1])), group(), probes=1, seed=seed)
        assert report.probes == 1 and report.leak > 0


def test_probes_spread_over_nodes_and_follow_the_seed(model: Transformer) -> None:
    completions = [[10 * branch + step for step in range(5)] for branch in range(1, 9)]
    forest = PrefixForest.from_rollout_group([1, 2, 3], completions)

    def probed(seed: int) -> list[int]:
        rows: list[int] = []

        def forward(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
            if ids.shape[1] == 43 and not torch.equal(ids, forest.input_ids[None]):
                rows.append(int((ids[0] != forest.input_ids).nonzero()))
            return model(ids, at, mask)

        assert verify_fold(forward, forest, probes=7, seed=seed).ok
        return rows

    nodes = [(row - 3) // 5 for row in probed(0)]
    assert sorted(nodes) == list(range(7))  # not in the prompt, which all see, nor in the last branch
    assert all((row - 3) % 5 < 4 for row in probed(0))  # and not the last of a branch, which nobody sees
    assert probed(0) == probed(0) != probed(1)


def test_a_leak_of_rounding_is_said_and_is_no_finding(model: Transformer) -> None:
    with torch.no_grad():
        largest = float(model(group().input_ids[None], group().position_ids[None], causal(7)).abs().max())

    def leaking(by: float) -> Forward:
        def forward(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
            changed = ids.shape[1] == 7 and not torch.equal(ids[0], group().input_ids)
            return model(ids, at, mask) + changed * by

        return forward

    ulp = largest * torch.finfo(torch.float64).eps
    report = verify_fold(leaking(2 * ulp), group())
    assert report.ok and 0 < report.leak <= report.rounding
    assert "which is rounding, as of experts that get more or fewer tokens." in str(report)
    report = verify_fold(leaking(100 * ulp), group())
    assert report.findings == ["leaks"] and "which is rounding" not in str(report)
    assert "which is rounding" not in str(verify_fold(model, group()))


def test_a_mixture_of_experts_whose_matrices_change_size_does_not_leak() -> None:
    experts = tiny_model("deepseek_v3")
    report = verify_fold(hf_forward(experts), PrefixForest.from_sequences(grown(random.Random(1))), seed=1)
    assert report.ok and report.leak < 1e-5, report


def test_a_forward_that_writes_into_its_arguments_changes_no_batch(model: Transformer) -> None:
    def forward(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        kept = [given.clone() for given in (ids, at, mask)]
        for given in (ids, at, mask):
            given.fill_(0)
        return model(*kept)

    batch = prefix_tree_collate_fn([{"prompt_ids": GROUP[0], "completions": GROUP[1]}])
    forest = group()
    assert verify_fold(forward, forest, parameters=model, samples=SEQUENCES).ok
    assert verify_fold(forward, batch, edges=LossEdges.from_forest(forest), samples=SEQUENCES).ok
    assert forest.input_ids.tolist() == [1, 2, 10, 11, 20, 21, 22] == batch["input_ids"][0].tolist()
    assert forest.position_ids.tolist() == [0, 1, 2, 3, 2, 3, 4] == batch["position_ids"][0].tolist()


def test_probes_use_ids_of_the_batch_and_the_next_one_where_there_is_no_other(model: Transformer) -> None:
    def probed(forest: PrefixForest) -> set[int]:
        used: set[int] = set()

        def forward(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
            used.update(ids.unique().tolist())
            return model(ids, at, mask)

        assert verify_fold(forward, forest).ok
        return used

    assert probed(group()) == {1, 2, 10, 11, 20, 21, 22}
    last = VOCAB - 1
    assert probed(PrefixForest.from_sequences([[last, last]])) == {last, 0}


def test_a_future_that_is_seen_leaks_too(model: Transformer) -> None:
    report = verify_fold(lambda ids, at, mask: model(ids, at, mask | mask.mT), PrefixForest.from_sequences([[1, 2, 3]]))
    assert report.leak > 0 and report.leak_where is not None and report.leak_where[1] < report.leak_where[0]


def test_a_mask_that_lets_nothing_through_is_blind(model: Transformer) -> None:
    alone = torch.eye(7, dtype=torch.bool)[None, None]
    report = verify_fold(lambda ids, at, mask: model(ids, at, alone if ids.shape[1] == 7 else mask), group())
    assert report.leak == 0 and report.blind_probes == 5  # all but 11 and 22, behind which nobody is
    assert report.findings == ["blind probes", "log-probs"]


def test_a_forward_that_ignores_ids_is_blind(model: Transformer) -> None:
    report = verify_fold(lambda ids, at, mask: model(torch.zeros_like(ids), at, mask), group())
    assert report.blind_probes == report.probes == 7
    assert report.findings == ["blind probes"]


def test_a_branch_that_does_not_see_its_prompt_is_a_difference_not_a_leak(model: Transformer) -> None:
    def forward(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        mask = mask.clone()
        if ids.shape[1] == 7:
            mask[:, :, 2:, :2] = False
        return model(ids, at, mask)

    report = verify_fold(forward, group())
    assert report.leak == 0 and report.findings[-1] == "log-probs"
    assert report.logprob_where in {(0, 3), (1, 3), (1, 4)}  # tokens that a row of a branch predicts


def test_dropout_is_said_first_and_nothing_is_compared_with_it() -> None:
    report = verify_fold(Transformer(dropout=0.5), group())
    assert report.findings == ["determinism"] and report.noise > 0
    assert report.logprob_error is None and report.gradient_error is None and report.probes == 0
    assert "-       log-probs: not compared: the forward is not deterministic." in str(report)
    assert str(report).splitlines()[-1] == f"What to do: {ADVICE['determinism']}"


def test_rows_that_are_not_finite_are_a_finding(model: Transformer) -> None:
    def forward(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        mask = mask.clone()
        mask[:, :, 7:] = False  # padding that sees nothing is NaN, and 0 * NaN in the next layer too, for all rows
        return model(ids, at, mask)

    report = verify_fold(forward, group().padded(8))
    assert report.findings == ["finite logits"] and report.nonfinite_rows == 8
    assert verify_fold(forward, group()).ok


def test_samples_that_are_not_finite_alone_differ(model: Transformer) -> None:
    def forward(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        return model(ids, at, mask) * (math.nan if ids.shape[1] == 5 else 1)

    report = verify_fold(forward, group(), parameters=model)
    assert report.findings == ["log-probs", "gradients"]
    assert report.logprob_error == report.gradient_error == math.inf
    assert report.logprob_where is not None and report.logprob_where[0] == 1


def test_logits_that_leave_out_an_id_by_minus_infinity_are_fine(model: Transformer) -> None:
    def forward(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        return model(ids, at, mask).index_fill(-1, torch.tensor([90]), -math.inf)

    assert verify_fold(forward, group(), parameters=model).ok


def test_a_backward_pass_that_differs_is_found_by_gradients_alone(model: Transformer) -> None:
    def forward(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        logits = model(ids, at, mask)
        if ids.shape[1] == 7:
            logits = torch.cat([logits[:, :4], logits[:, 4:].detach()], 1)
        return logits

    report = verify_fold(forward, group(), parameters=model.named_parameters())
    assert report.findings == ["gradients"]
    assert report.gradient_error is not None and report.gradient_error > 0.1


def test_a_gradient_that_is_zero_but_for_rounding_is_no_finding(model: Transformer) -> None:
    shift = torch.zeros(
        (), dtype=torch.float64, requires_grad=True
    )  # moves all logits alike, as a key bias does scores

    def forward(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        return model(ids, at, mask) + shift

    report = verify_fold(forward, odd_forests()["random, several roots"], parameters=[*model.parameters(), shift])
    assert report.ok, report


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda ids, at, mask: torch.zeros(1, 3, VOCAB), r"torch.float32 of shape \[1, 3, 97\] for 7 ids"),
        (lambda ids, at, mask: torch.zeros(ids.shape[1]), r"of shape \[7\]"),
        (lambda ids, at, mask: torch.zeros(2, ids.shape[1], VOCAB), r"of shape \[2, 7, 97\]"),
        (lambda ids, at, mask: torch.zeros(1, ids.shape[1], VOCAB, dtype=torch.long), "torch.int64"),
        (lambda ids, at, mask: {"logits": 0}, "returned a dict; expected logits"),
        (lambda ids, at, mask: torch.zeros(1, ids.shape[1], 20), "20 logits a row; the batch has the id 22"),
    ],
)
def test_a_forward_of_another_form_is_an_error(forward: Forward, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify_fold(forward, group())


def test_logits_may_come_without_the_batch_dimension(model: Transformer) -> None:
    assert verify_fold(lambda *given: model(*given)[0], group(), parameters=model).ok


# --- parameters -------------------------------------------------------------------------------------------------------


def test_gradients_that_are_there_stay_as_they_are() -> None:
    model = Transformer()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.place.weight.requires_grad_(False)
    assert verify_fold(model, group()).ok
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())


def test_parameters_are_found_or_asked_for(model: Transformer) -> None:
    class Wrapper:
        def __init__(self) -> None:
            self.model = model

        def __call__(self, ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
            return model(ids, at, mask)

    def partly_detached(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        logits = model(ids, at, mask)
        return logits.detach() if ids.shape[1] == 5 else logits

    def compared(forward: Forward, parameters: Any = None) -> FoldReport:
        return verify_fold(forward, group(), parameters=parameters)

    for report in (
        compared(Wrapper()),
        compared(model.forward),
        compared(lambda *given: model(*given), model),
        compared(lambda *given: model(*given), model.parameters()),
    ):
        assert report.gradient_error is not None and report.ok
    without = compared(lambda *given: model(*given))
    assert without.gradient_error is None and without.ok
    assert str(without).splitlines()[0].endswith("tolerance 1e-10: ok, but not compared: samples, gradients")
    assert str(without).endswith("\nNothing to mend in what was compared.")
    assert "-       gradients: not compared: the logits depend on no known parameter; pass parameters=." in str(without)
    assert torch.no_grad()(compared)(model).gradient_error is not None  # also inside another's no_grad
    partly = compared(partly_detached, model)
    assert partly.findings == ["gradients"]
    frozen = compared(torch.no_grad()(model.__call__), model)
    assert frozen.gradient_error is None and frozen.ok


def test_parameters_that_nothing_uses_are_no_difference(model: Transformer) -> None:
    unused = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert verify_fold(model, group(), parameters=[*model.parameters(), unused]).ok


def test_a_small_parameter_is_measured_by_its_own_gradient(model: Transformer) -> None:
    bias = torch.zeros(VOCAB, dtype=torch.float64, requires_grad=True)

    def forward(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        of_fold = ids.shape[1] == 7
        return model(ids, at, mask) + 0.1 * (bias.detach() if of_fold else bias)

    named = [*model.named_parameters(), ("bias", bias)]
    report = verify_fold(forward, group(), parameters=named, tolerance=0.1)
    assert report.gradient_error is not None and 0.01 < report.gradient_error < 0.05  # the bias is small
    assert report.worst_parameter == ("bias", 1.0) and report.findings == ["gradients"]


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
def test_other_precisions_have_a_tolerance_that_rounding_keeps_and_an_error_does_not(
    dtype: torch.dtype, tolerance: float
) -> None:
    model = Transformer().to(dtype)

    def off(by: float) -> Forward:
        def forward(ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
            logits = model(ids, at, mask).float()  # as some models end
            scale = torch.zeros(VOCAB).index_fill(0, torch.tensor([10, 11, 20, 21, 22]), by)
            return logits + scale * (ids.shape[1] == 7)

        return forward

    for forward in (model, off(0)):
        report = verify_fold(forward, group(), parameters=model)
        assert report.ok and (report.dtype, report.tolerance) == (dtype, tolerance), report
    frozen = verify_fold(off(0), group(), parameters=Transformer().to(dtype).requires_grad_(False))
    assert frozen.tolerance == tolerance  # what is not trained rounds too
    wrong = verify_fold(off(4 * tolerance), group(), parameters=model)
    assert "log-probs" in wrong.findings and "half precision" in ADVICE["log-probs"].lower()


def test_logits_coarser_than_the_parameters_set_the_tolerance(model: Transformer) -> None:
    report = verify_fold(lambda *given: model(*given).bfloat16(), group(), parameters=model)
    assert report.ok and (report.dtype, report.tolerance) == (torch.bfloat16, 5e-2), report


# --- a model of transformers ------------------------------------------------------------------------------------------


def test_a_llama_is_right_on_its_routes_and_wrong_with_the_mask_of_another() -> None:
    llama = float64_llama(num_hidden_layers=1)
    forest = PrefixForest.from_sequences(grown(random.Random(2), samples=8, levels=3)).padded(8)
    report = verify_fold(hf_forward(llama), forest, parameters=llama)
    assert report.ok and report.logprob_error is not None and report.logprob_error < 1e-13

    assert verify_fold(hf_forward(llama), forest).gradient_error is not None  # its parameters are known
    with pytest.raises(ValueError, match=r"forward is a LlamaForCausalLM of .* wrap it: hf_forward\(model\)"):
        verify_fold(llama, forest)

    llama.set_attn_implementation("eager")
    assert verify_fold(hf_forward(llama), forest, parameters=llama, tolerance=1e-6).ok  # its softmax is float32
    added = verify_fold(
        lambda ids, at, mask: llama(input_ids=ids, position_ids=at, attention_mask=mask, use_cache=False).logits, forest
    )
    assert added.findings[0] == "leaks"  # a boolean mask is added to the scores as 0 and 1
