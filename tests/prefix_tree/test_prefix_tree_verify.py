"""verify_fold passes a right fold and names what is wrong with another.

Each control breaks one thing. The model is a small transformer in float64, written here, so that a fault can be put
where a test wants it; a Llama of transformers stands beside it.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from support.errors import refused
from support.prefix_trees import advice, grown
from support.small_transformer import GROUP, SEQUENCES, Transformer, group

from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.fold import fold_shared_prefix_rollouts, prefix_tree_collate_fn
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.verify import verify_fold

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return Transformer()


def test_a_right_fold_has_no_finding_and_its_figures_are_of_rounding(model):
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


def odd_forests():
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


@pytest.mark.parametrize("weighting", ["per_sample", "sample_mean", "unique"])
def test_odd_forests_are_right_too(model, weighting):
    for name, forest in odd_forests().items():
        report = verify_fold(model, forest, weighting=weighting, probes=4)
        assert report.ok, f"{name}: {report}"
        assert report.logprob_error is not None and report.gradient_error is not None


def test_weights_of_ones_own_are_checked_as_they_are_given(model):
    advantages = torch.tensor([0.5, -2.0])  # per sample
    assert verify_fold(model, group(), weighting=advantages).ok
    edges = LossEdges.from_forest(group(), weighting=advantages)
    assert verify_fold(model, group(), edges=edges, weighting=advantages).ok
    assert "weights" in verify_fold(model, group(), edges=edges).findings
    assert verify_fold(model, group(), weighting=torch.tensor([0.0, 1.0])).ok  # 0 is a weight
    with refused("E801", "weighting is 'mean'"):
        verify_fold(model, group(), weighting="mean")


def test_a_layout_that_is_not_in_pre_order_is_taken_as_it_is(model):
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
    given = {"loss_mask": [[0, 0, 0, 1], [0, 0, 0]]}
    assert verify_fold(model, batch, samples=[[1, 2, 10, 11], [1, 2, 20]], **given).ok
    assert verify_fold(model, batch, samples=[[1, 2, 20], [1, 2, 10, 11]], **given).findings == ["samples"]


def test_a_pair_of_weight_zero_is_none(model):
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


def test_weights_may_have_cancelled_out_or_passed_through_float32_but_not_more(model):
    forest = PrefixForest.from_rollout_group([1, 2], [[10, 11], [10, 12], [10, 13]])  # 10 is of all three
    advantages = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)  # 0.1 + 0.2 - 0.3 is 5.6e-17
    edges = LossEdges.from_forest(forest, weighting=advantages)
    chosen = edges.target != 10
    left_out = replace(edges, row=edges.row[chosen], target=edges.target[chosen], weight=edges.weight[chosen])
    for given in (edges, left_out, replace(edges, weight=edges.weight.masked_fill(~chosen, 3e-17))):
        assert verify_fold(model, forest, edges=given, weighting=advantages).ok
    for factor, findings in ((1 + 1e-3, ["weights"]), (1 + 1e-7, [])):
        edges = LossEdges.from_forest(group())
        edges.weight[1] *= factor
        assert verify_fold(model, group(), edges=edges, tolerance=0.01).findings == findings


def test_a_target_of_weight_zero_may_be_left_out(model):
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
def test_one_label_per_row_loses_the_first_token_of_every_completion(model, prompt, completions, targets, lost):
    folded = fold_shared_prefix_rollouts(prompt, completions)
    batch = prefix_tree_collate_fn([{"prompt_ids": prompt, "completions": completions}])
    for report in (verify_fold(model, folded), verify_fold(model, batch)):
        assert (report.targets, report.lost_targets, report.lost_first_tokens) == (targets, lost, lost)
        assert report.findings == (["lost targets", "gradients"] if lost else [])
        assert report.leak == 0 and report.logprob_error is not None and report.logprob_error < 1e-13
        assert report.unpredictable == 0 and "where no row predicts" not in str(report)
        if lost:
            assert f"{lost} of {targets} supervised tokens have no loss, {lost} of them first in" in str(report)
            assert str(report).splitlines()[-1] == advice("lost targets")


FOLDED, N = fold_shared_prefix_rollouts(*GROUP), -100


@pytest.mark.parametrize(
    ("labels", "findings", "wrong", "extra", "lost", "lost_first"),
    [
        ({4: N}, ["lost targets", "gradients"], 0, 0, 3, 2),  # 20 -> 21, inside a completion: no first token
        ({0: 2}, ["lost targets", "extra targets", "gradients"], 0, 1, 2, 2),  # the prompt
        (  # for a loss that shifts: the row of a token has its own id
            dict(enumerate([N, N, *FOLDED.input_ids[2:]])),
            ["wrong targets", "lost targets", "gradients"],
            *(5, 0, 5, 2),
        ),
    ],
)
def test_wrong_labels_are_counted(model, labels, findings, wrong, extra, lost, lost_first):
    report = verify_fold(model, replace(FOLDED, labels=[labels.get(row, own) for row, own in enumerate(FOLDED.labels)]))
    assert report.findings == findings
    assert (report.wrong_targets, report.extra_targets) == (wrong, extra)
    assert (report.lost_targets, report.lost_first_tokens) == (lost, lost_first)


def test_edges_repair_that_layout_and_labels_where_nothing_is_a_target_are_beyond_measure(model):
    paths = FOLDED.node_lengths, FOLDED.sample_paths, FOLDED.input_ids
    edges = LossEdges.from_forest(PrefixForest.from_node_paths(*paths, loss_nodes=[1, 2]))
    assert verify_fold(model, FOLDED, edges=edges).ok
    report = verify_fold(model, FOLDED, loss_mask=[[0] * 4, [0] * 5])
    assert report.findings == ["extra targets", "gradients"]
    assert (report.extra_targets, report.gradient_error) == (3, math.inf)
    assert verify_fold(model, fold_shared_prefix_rollouts([], GROUP[1], -1), ignore_idx=-1).ok


def test_first_tokens_are_those_behind_a_branch_point_or_what_is_no_target(model):
    # One node, 1 2 | 10 11 by the mask alone: 10 has no label.
    batch = {"input_ids": [1, 2, 10, 11], "position_ids": [0, 1, 2, 3], "labels": [-100, -100, 11, -100]}
    report = verify_fold(model, {**batch, "prefix_tree": ([4], [[0]])}, loss_mask=[[0, 0, 1, 1]])
    assert (report.targets, report.lost_targets, report.lost_first_tokens) == (2, 1, 1)
    # The prompt is supervised too: 2 has a label, 10 and 20 have none.
    batch = {"input_ids": [1, 2, 10, 20], "position_ids": [0, 1, 2, 2], "labels": [2, -100, -100, -100]}
    report = verify_fold(model, {**batch, "prefix_tree": ([2, 1, 1], [[0, 1], [0, 2]])}, loss_mask=[[1, 1, 1]] * 2)
    assert (report.targets, report.unpredictable, report.lost_targets, report.lost_first_tokens) == (4, 2, 2, 2)


def test_labels_weigh_a_node_of_two_samples_once(model):
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


def test_edges_without_multiplicity_are_found(model):
    forest = PrefixForest.from_rollout_group([1, 2], [[10, 11], [10, 12], [20]])  # row 1 -> 10 twice
    edges = LossEdges.from_forest(forest)
    ones = replace(edges, weight=torch.ones_like(edges.weight))
    report = verify_fold(model, forest, edges=ones)
    assert report.findings == ["weights", "gradients"]
    assert (report.weight_errors, report.weight_error) == (1, 0.5)
    assert report.gradient_error is not None and report.gradient_error > 0.01
    nothing = replace(edges, weight=torch.full_like(edges.weight, math.nan))
    assert verify_fold(model, forest, edges=nothing).weight_errors == 4


def test_positions_that_do_not_begin_again_are_counted(model):
    forest = replace(group(), position_ids=torch.arange(7))
    report = verify_fold(model, forest)  # 1 2 10 11 are right; 20 21 22 stand at 4 5 6 instead of 2 3 4
    assert report.findings[0] == "positions" and "log-probs" in report.findings
    assert (report.wrong_positions, report.position_where) == (3, (1, 2))
    assert report.logprob_where is not None and report.logprob_where[0] == 1


def test_a_tree_of_tensors_is_taken_and_rows_behind_the_last_node_are_padding(model):
    batch = prefix_tree_collate_fn([{"prompt_ids": GROUP[0], "completions": GROUP[1]}])
    batch["prefix_tree"] = (torch.tensor([2, 2, 3]), torch.tensor([[0, 1], [0, 2]]))
    report = verify_fold(model, batch, samples=SEQUENCES)
    assert report.findings == ["lost targets", "gradients"] and report.lost_targets == 2
    batch["prefix_tree"] = (torch.tensor([2, 2, 3]), [torch.tensor([0, 1]), torch.tensor([0, 2])])
    assert str(verify_fold(model, batch, samples=SEQUENCES)) == str(report)
    for name, value in {"input_ids": 9, "position_ids": 0, "labels": -100}.items():
        batch[name] = torch.cat([batch[name], torch.tensor([[value]])], 1)
    report = verify_fold(model, batch, samples=SEQUENCES)
    assert report.findings == ["lost targets", "gradients"] and report.leak == 0
    assert (report.tokens_after, report.padding) == (7, 1)
    assert "9 tokens folded into 7 rows and 1 of padding; torch.float64" in str(report)
    batch["labels"][0, 7] = 5  # a loss on padding
    assert verify_fold(model, batch).wrong_targets == 1


def without(*names):
    batch = prefix_tree_collate_fn([{"prompt_ids": GROUP[0], "completions": GROUP[1]}])
    return {name: value for name, value in batch.items() if name not in names}


OTHER = LossEdges.from_forest(PrefixForest.from_sequences([list(range(20))]))


@pytest.mark.parametrize(
    ("batch", "how", "error", "code", "found"),
    [
        (replace(FOLDED, labels=[1]), {}, ValueError, "E803", "7 input_ids, 7 position_ids, 1 labels"),
        (replace(FOLDED, node_lengths=[2, 2, 4]), {}, ValueError, "E803", "expected 8 of each"),
        (replace(FOLDED, sample_paths=[[0, 1]]), {}, ValueError, "E801", "node 2 has 3 tokens"),
        (fold_shared_prefix_rollouts([], GROUP[1], -1), {}, ValueError, "E803", "from -1; expected rows of 0 to 4"),
        ({**without(), "prefix_tree": ([2.0, 2.0, 3.0], [[0, 1], [0, 2]])}, {}, TypeError, "E801", "float"),
        (without("labels"), {}, ValueError, "E803", "a dict, has no labels;"),
        (without("labels", "prefix_tree"), {}, ValueError, "E803", "has no labels, prefix_tree;"),
        (group(), {"edges": OTHER}, ValueError, "E803", "expected rows of 0 to 6"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(model, batch, how, error, code, found):
    with refused(code, found, kind=error):
        verify_fold(model, batch, **how)
    edges = LossEdges.from_forest(group())  # where there are edges, labels are not asked for
    assert verify_fold(model, without("labels"), edges=edges, samples=SEQUENCES).ok


@pytest.mark.parametrize("more", [SEQUENCES[1], SEQUENCES[1][:2]])
def test_a_fold_that_lost_a_sample_whose_tokens_another_has_is_found(model, more):
    report = verify_fold(model, group(), samples=[*SEQUENCES, more])
    assert report.findings == ["samples"] and report.sample_where == (len(SEQUENCES), 0)


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
def test_a_fold_that_lost_or_changed_a_sample_is_found_given_the_samples(model, folded, changed, first):
    forest = PrefixForest.from_sequences(folded)
    report = verify_fold(model, forest, samples=[torch.tensor(sample) for sample in SEQUENCES])
    assert report.findings == ["samples"] and not report.ok
    assert (report.samples, report.given_samples) == (len(folded), 2)
    assert (report.changed_samples, report.sample_where) == (changed, first)
    text = str(report)
    assert f"FAILED  samples: {changed} differ of {len(folded)} in the fold and 2 given ones (sample {first[0]}" in text
    assert "-       gradients: not compared: the samples differ." in text and "\nok" not in text
    assert text.splitlines()[-1] == advice("samples")
    # A mask for the samples that went in fits no other number of them; what is wrong is said all the same.
    masks = [[0] * len(sample) for sample in SEQUENCES]
    assert verify_fold(model, forest, samples=SEQUENCES, loss_mask=masks).findings == ["samples"]

    alone = verify_fold(model, forest)
    assert alone.ok and alone.changed_samples is None  # the fold agrees with itself
    assert "-       samples: not compared: they were read from the fold; pass samples=" in str(alone)
