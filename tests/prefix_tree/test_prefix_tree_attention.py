"""The mask of a folded row, as rectangles and dense, against the definition: a token sees its samples up to itself."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refused
from support.prefix_trees import SAMPLES, Samples, grown

from niels_gpt.prefix_tree.attention import AttentionRouteError, AttnMaskSpec, dense_mask, hf_attention_mask
from niels_gpt.prefix_tree.forest import PrefixForest

QUICK = settings(derandomize=True, max_examples=40)


def by_definition(forest, window=None):
    """Return the mask, row by row of every sample; padding sees itself."""
    mask = torch.eye(len(forest.input_ids), dtype=torch.bool)
    for rows in forest.sample_rows.split(forest.sample_lengths.tolist()):
        for place, query in enumerate(rows.tolist()):
            first = 0 if window is None else max(0, place - window + 1)
            mask[query, rows[first : place + 1]] = True
    return mask


def as_text(mask):
    return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]


def test_a_prompt_of_four_and_two_completions_by_hand():
    spec, ranges = AttnMaskSpec.prefix_tree([4, 2, 3], [[0, 1], [0, 2]])
    assert spec.q_ranges == [[0, 4], [4, 6], [4, 6], [6, 9], [6, 9]]
    assert spec.k_ranges == [[0, 4], [4, 6], [0, 4], [6, 9], [0, 4]]
    assert spec.mask_types == ["causal", "causal", "full", "causal", "full"]
    assert spec.total_seqlen == 9
    assert ranges == [[[0, 4], [4, 6]], [[0, 4], [6, 9]]]
    rows = "x........ xx....... xxx...... xxxx..... xxxxx.... xxxxxx... xxxx..x.. xxxx..xx. xxxx..xxx"
    assert as_text(spec.dense()) == rows.split()


def test_ancestors_come_from_the_root_and_shared_nodes_once():
    spec, ranges = AttnMaskSpec.prefix_tree([1, 1, 1, 2], [[0, 1, 2], [0, 1, 3], [0, 1]])
    assert spec.q_ranges == [[0, 1], [1, 2], [1, 2], [2, 3], [2, 3], [2, 3], [3, 5], [3, 5], [3, 5]]
    assert spec.k_ranges == [[0, 1], [1, 2], [0, 1], [2, 3], [0, 1], [1, 2], [3, 5], [0, 1], [1, 2]]
    assert spec.mask_types == ["causal", "causal", "full", *["causal", "full", "full"] * 2]
    assert ranges[1:] == [[[0, 1], [1, 2], [3, 5]], [[0, 1], [1, 2]]]


def test_a_causal_rectangle_ends_at_its_lower_right_corner():
    assert as_text(AttnMaskSpec([[2, 4]], [[0, 4]], ["causal"], 4).dense()) == ["....", "....", "xxx.", "xxxx"]
    assert as_text(AttnMaskSpec([[0, 3]], [[0, 2]], ["causal"], 3).dense()) == ["...", "x..", "xx."]


@pytest.mark.parametrize(
    ("lengths", "paths", "message"),
    [
        ([1, 2], [[0], [0, 2]], "sample_paths[1] is [0, 2]; expected nodes from 0 to 1"),
        ([1, 2], [[-1]], "sample_paths[0] is [-1]"),
        ([3], [[0, 0]], "sample_paths[0] is [0, 0]"),
        ([1, 1, 2], [[0, 2], [1, 2]], "[1] is [1, 2], with node 2 below node 1"),
        ([1, 1], [[0, 1], [1]], "with node 1 below node -1"),
        ([1, -2], [[0]], "lengths are [1, -2]"),
    ],
)
def test_trees_that_cannot_be_are_refused(lengths, paths, message):
    with refused("E801", message):
        AttnMaskSpec.prefix_tree(lengths, paths)


@QUICK
@given(SAMPLES)
def test_the_rectangles_of_a_tree_are_its_mask(samples: Samples) -> None:
    forest = PrefixForest.from_sequences(samples)
    parents = forest.node_parents.tolist()
    paths = []
    for node in forest.sample_ends.tolist():
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    spec, _ = AttnMaskSpec.prefix_tree(forest.node_lengths.tolist(), paths)
    assert torch.equal(spec.dense(), by_definition(forest))


@QUICK
@given(SAMPLES, st.none() | st.integers(1, 8), st.integers(1, 9))
def test_the_dense_mask_is_by_definition(samples: Samples, window: int | None, multiple_of: int) -> None:
    forest = PrefixForest.from_sequences(samples)
    deep = PrefixForest.from_sequences(grown(random.Random(multiple_of), samples=9))
    for row in (forest.padded(multiple_of), PrefixForest.joined([forest, deep]).padded(multiple_of)):
        assert torch.equal(dense_mask(row, window=window), by_definition(row, window))


def test_boolean_for_sdpa_and_additive_for_eager():
    forest = PrefixForest.from_sequences([[1, 2], [1, 3]])
    assert hf_attention_mask(forest, "sdpa", torch.float32).tolist() == [
        [[[True, False, False], [True, True, False], [True, False, True]]]
    ]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        added = hf_attention_mask(forest, "eager", dtype)
        low = torch.finfo(dtype).min
        assert added.dtype == dtype and added.tolist() == [[[[0, low, low], [0, 0, low], [0, low, 0]]]]
    windowed = hf_attention_mask(forest, "sdpa", torch.float32, window=1)
    assert torch.equal(windowed[0, 0], torch.eye(3, dtype=torch.bool))
    forest = forest.padded(4)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):  # added to scores, it leaves hidden tokens no weight
        scores = torch.full((4, 4), -50.0, dtype=dtype).tril().add(50)  # the hidden ones are the highest
        weights = (scores + hf_attention_mask(forest, "eager", dtype)[0, 0]).softmax(-1, dtype=torch.float32)
        assert torch.equal(weights > 0, dense_mask(forest))
    with refused("E802", "torch.int64", "dtype", kind=AttentionRouteError):
        hf_attention_mask(forest, "eager", torch.int64)
    with refused("E802", "attn_implementation=None", kind=AttentionRouteError):
        hf_attention_mask(forest, None, torch.float32)
    assert issubclass(AttentionRouteError, ValueError)
