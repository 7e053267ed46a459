"""The published contract of folding one prompt and its completions, by examples that can be done on paper."""

import ast
import copy
import inspect
import random
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refused

from niels_gpt.prefix_tree import fold
from niels_gpt.prefix_tree.fold import (
    CROSS_ENTROPY_IGNORE_IDX,
    FoldedRollouts,
    build_mock_rollout_dataset,
    fold_shared_prefix_rollouts,
    prefix_tree_collate_fn,
)

N = -100
IDS = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("prompt", "completions", "expected"),
    [
        (
            [1, 2],
            [[10, 11], [20, 21, 22]],
            ([1, 2, 10, 11, 20, 21, 22], [N, N, 11, N, 21, 22, N], [0, 1, 2, 3, 2, 3, 4], [2, 2, 3], [[0, 1], [0, 2]]),
        ),
        ([5], [[7, 8]], ([5, 7, 8], [N, 8, N], [0, 1, 2], [1, 2], [[0, 1]])),
        ([], [[10, 11], [20]], ([10, 11, 20], [11, N, N], [0, 1, 0], [0, 2, 1], [[1], [2]])),
        ([], [[4]], ([4], [N], [0], [0, 1], [[1]])),
        ([1, 2, 3], [[9]], ([1, 2, 3, 9], [N, N, N, N], [0, 1, 2, 3], [3, 1], [[0, 1]])),
        (
            [1, 2],
            [[10], [20], [30, 31]],
            ([1, 2, 10, 20, 30, 31], [N, N, N, N, 31, N], [0, 1, 2, 2, 2, 3], [2, 1, 1, 2], [[0, 1], [0, 2], [0, 3]]),
        ),
        # Equal completions, and equal first tokens, stay apart.
        ([1], [[5, 6], [5, 6]], ([1, 5, 6, 5, 6], [N, 6, N, 6, N], [0, 1, 2, 1, 2], [1, 2, 2], [[0, 1], [0, 2]])),
    ],
)
def test_worked_examples(prompt, completions, expected):
    given_prompt, given_completions = copy.deepcopy((prompt, completions))
    assert fold_shared_prefix_rollouts(prompt, completions) == FoldedRollouts(*expected)
    assert (prompt, completions) == (given_prompt, given_completions)


def test_the_result_is_a_plain_mutable_dataclass_of_lists():
    folded = fold_shared_prefix_rollouts((1,), ((2, 3),))
    assert list(vars(folded)) == ["input_ids", "labels", "position_ids", "node_lengths", "sample_paths"]
    assert all(type(value) is list for value in vars(folded).values())
    folded.labels[0] = 2
    assert folded != fold_shared_prefix_rollouts([1], [[2, 3]])
    for ignored in (
        fold_shared_prefix_rollouts([1], [[9, 8]], -1),
        fold_shared_prefix_rollouts([1], [[9, 8]], ignore_idx=-1),
    ):
        assert ignored.labels == [-1, 8, -1]
    assert CROSS_ENTROPY_IGNORE_IDX == torch.nn.CrossEntropyLoss().ignore_index == -100


@settings(derandomize=True, max_examples=40)
@given(st.lists(st.integers(0, 3), max_size=5), st.lists(IDS, min_size=1, max_size=5))
def test_a_path_reads_as_its_sample_and_a_label_is_the_next_token(prompt, completions):
    folded = fold_shared_prefix_rollouts(prompt, completions)
    ends = np.cumsum(folded.node_lengths)
    nodes = [list(range(end - length, end)) for end, length in zip(ends, folded.node_lengths, strict=True)]
    for path, completion in zip(folded.sample_paths, completions, strict=True):
        rows = [row for node in path for row in nodes[node]]
        assert [folded.input_ids[row] for row in rows] == prompt + completion
        assert [folded.position_ids[row] for row in rows] == list(range(len(rows)))
        labels = [folded.labels[row] for row in rows]
        assert labels == [N] * len(prompt) + completion[1:] + [N]  # the first token of a completion is no label


@pytest.mark.parametrize(
    "as_given",
    [
        tuple,
        np.array,
        lambda ids: np.array(ids, dtype=np.int16),
        lambda ids: np.array(ids, dtype=np.uint64),
        torch.tensor,
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        lambda ids: [np.int64(token) for token in ids],
        lambda ids: [torch.tensor(token) for token in ids],
        lambda ids: array("i", ids),
    ],
)
def test_tuples_arrays_and_tensors_are_taken_as_lists(as_given):
    folded = fold_shared_prefix_rollouts(as_given([1, 2]), [as_given([10, 11]), as_given([20])])
    assert folded == fold_shared_prefix_rollouts([1, 2], [[10, 11], [20]])
    assert {type(token) for value in vars(folded).values() for token in value} == {int, list}
    table = [[10, 11], [20, 21]]  # rows of one array are completions, and an empty array is an empty prompt
    expected = fold_shared_prefix_rollouts([], table)
    assert fold_shared_prefix_rollouts(np.array([]), np.array(table)) == expected
    assert fold_shared_prefix_rollouts(torch.tensor([]), torch.tensor(table)) == expected
    assert fold_shared_prefix_rollouts(range(0), [range(10, 12), range(20, 22)]) == expected


NONE, EMPTY = "completions must be non-empty", "every completion must be non-empty"


@pytest.mark.parametrize(
    ("completions", "message"),
    [(none, NONE) for none in ([], (), np.zeros((0, 3), dtype=int), torch.zeros(0, 3))]
    + [(empty, EMPTY) for empty in ([[]], [[1], []], [(), (1,)], [np.array([])], torch.zeros(2, 0))],
)
def test_no_completion_and_an_empty_one_are_errors(completions, message):
    with refused("E801", message):
        fold_shared_prefix_rollouts(1.5, completions)  # before the prompt is looked at


@pytest.mark.parametrize(
    ("prompt", "completions", "message"),
    [
        ([1], [[2], [3, 4.0]], "completion 1[1] is 4.0"),
        ([1], [[True]], "completion 0[0] is True"),
        ([1], [[np.True_]], "completion 0[0] is np.True_"),
        ([1], [[torch.tensor(True)]], "completion 0[0] is tensor(True)"),
        ([1], [[torch.tensor(2.0)]], "completion 0[0] is tensor(2.)"),
        ([1], [np.array([2.0])], "completion 0 is float64 of shape [1]"),
        ([1], [torch.tensor([True])], "completion 0 is bool of shape"),
        ([1], [torch.tensor([[2]])], "completion 0 is int64 of shape [1, 1]"),
        ([1], [2, 3], "completion 0 is 2"),
        ([1], ["two"], "completion 0 is 'two'"),
        ([[1]], [[2]], "prompt_ids[0] is [1]"),
        (None, [[2]], "prompt_ids is None"),
    ],
)
def test_what_is_not_an_integer_is_refused_by_its_place(prompt, completions, message):
    with refused("E801", message, kind=TypeError):
        fold_shared_prefix_rollouts(prompt, completions)


def test_a_batch_is_three_rows_of_int64_and_the_structure():
    group = {"prompt_ids": [1, 2], "completions": [[10, 11], [20]], "reward": [0.5, 1.0]}
    batch = prefix_tree_collate_fn([group])
    assert list(batch) == ["input_ids", "labels", "position_ids", "prefix_tree"]
    assert batch["prefix_tree"] == ([2, 2, 1], [[0, 1], [0, 2]]) and type(batch["prefix_tree"]) is tuple
    expected = {"input_ids": [1, 2, 10, 11, 20], "labels": [N, N, 11, N, N], "position_ids": [0, 1, 2, 3, 2]}
    for name, row in expected.items():
        assert batch[name].dtype == torch.int64 and batch[name].tolist() == [row]
    for groups in (0, 2, 3):
        with refused("E801", "prefix_tree_collate_fn", "size=1", f"got {groups} groups"):
            prefix_tree_collate_fn([group] * groups)
    for missing in ("prompt_ids", "completions"):
        with refused("E102", f"'{missing}'", "'reward']", kind=KeyError):
            prefix_tree_collate_fn([{key: value for key, value in group.items() if key != missing}])


def test_mock_groups_come_from_pythons_generator_prompt_first_and_a_data_loader_takes_them():
    groups = build_mock_rollout_dataset(
        num_groups=2, completions_per_group=2, prompt_len=3, completion_len=2, vocab_size=10, seed=5
    )
    draws = random.Random(5)
    flat = [token for group in groups for ids in (group["prompt_ids"], *group["completions"]) for token in ids]
    assert flat == [draws.randint(2, 9) for _ in range(2 * (3 + 2 * 2))]
    assert [len(group["prompt_ids"]) for group in groups] == [3, 3]
    loader = torch.utils.data.DataLoader(groups, batch_size=1, collate_fn=prefix_tree_collate_fn)
    assert [batch["input_ids"].shape for batch in loader] == [(1, 7)] * 2
    groups = build_mock_rollout_dataset()
    assert groups == build_mock_rollout_dataset(seed=0) != build_mock_rollout_dataset(seed=1)
    assert len(groups) == 16
    for group in groups:
        assert len(group["prompt_ids"]) == 32 and [len(completion) for completion in group["completions"]] == [16] * 4
    assert (
        max(token for group in groups for ids in (group["prompt_ids"], *group["completions"]) for token in ids) < 1024
    )
    with pytest.raises(TypeError):
        build_mock_rollout_dataset(2)  # by name only


def test_the_module_imports_nothing_of_attention():
    tree = ast.parse(inspect.getsource(fold))
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (getattr(node, "module", None) or "", *(alias.name for alias in node.names))
    }
    imported -= {"niels_gpt.storage.errors"}  # the classes of its errors
    assert not {name for name in imported if "niels_gpt" in name or "attention" in name or "transformers" in name}
