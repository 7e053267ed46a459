"""PrefixForest: the layout, the mask in one array, every sample back."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refused
from support.prefix_trees import SAMPLES, Samples, grown, plain_rows

from niels_gpt.prefix_tree.attention import AttnMaskSpec, dense_mask
from niels_gpt.prefix_tree.fold import fold_shared_prefix_rollouts
from niels_gpt.prefix_tree.forest import ModelShape, PrefixForest

QUICK = settings(derandomize=True, max_examples=40)


def test_a_prompt_and_two_completions_by_hand():
    forest = PrefixForest.from_rollout_group([1, 2], [[10, 11], [20, 21, 22]])
    assert forest.input_ids.tolist() == [1, 2, 10, 11, 20, 21, 22]
    assert forest.position_ids.tolist() == [0, 1, 2, 3, 2, 3, 4]
    assert forest.subtree_end.tolist() == [7, 7, 4, 4, 7, 7, 7]
    assert forest.node_starts.tolist() == [0, 2, 4]
    assert forest.node_lengths.tolist() == [2, 2, 3]
    assert forest.node_parents.tolist() == [-1, 0, 0]
    assert forest.sample_ends.tolist() == [1, 2]
    assert forest.sample_offsets.tolist() == [0, 4, 9]
    assert forest.sample_rows.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6]
    assert forest.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert forest.rows_above.tolist() == [-1, 0, 1, 2, 1, 4, 5]
    assert repr(forest) == "PrefixForest(2 samples of 9 tokens in 7, 3 nodes)"


@QUICK
@given(SAMPLES)
def test_rows_are_the_distinct_prefixes_in_pre_order_and_samples_come_back(samples: Samples) -> None:
    forest = PrefixForest.from_sequences(samples)
    rows = plain_rows(samples)
    assert forest.input_ids.tolist() == [prefix[-1] for prefix in rows]
    assert forest.position_ids.tolist() == [len(prefix) - 1 for prefix in rows]
    assert forest.samples() == samples
    ends = (forest.node_starts + forest.node_lengths - 1)[forest.sample_ends]
    assert [rows[end] for end in ends.tolist()] == [tuple(sample) for sample in samples]
    above = [rows.index(prefix[:-1]) if len(prefix) > 1 else -1 for prefix in rows]
    assert forest.rows_above.tolist() == above


@QUICK
@given(SAMPLES, st.integers(1, 5))
def test_the_mask_lets_a_token_see_exactly_its_own_prefix(samples: Samples, multiple: int) -> None:
    rows = plain_rows(samples)
    oracle = torch.tensor([[query[: len(key)] == key for key in rows] for query in rows])
    forest = PrefixForest.from_sequences(samples).padded(multiple)
    size, length = len(rows), len(forest.input_ids)
    assert length % multiple == 0 and length - size < multiple
    mask = dense_mask(forest)
    assert torch.equal(mask[:size, :size], oracle)
    assert torch.equal(mask[size:], torch.eye(length, dtype=torch.bool)[size:])  # padding sees itself
    assert not mask[:size, size:].any()


@QUICK
@given(SAMPLES, SAMPLES)
def test_joined_forests_are_blocks_of_the_mask(first: Samples, second: Samples) -> None:
    parts = [PrefixForest.from_sequences(first).padded(4), PrefixForest.from_sequences(second)]
    joined = PrefixForest.joined(parts)
    assert joined.samples() == first + second
    sizes = [part.num_tokens for part in parts]
    blocks = [dense_mask(part)[:size, :size] for part, size in zip(parts, sizes, strict=True)]
    assert torch.equal(dense_mask(joined), torch.block_diag(*blocks).bool())
    positions = [part.position_ids[:size] for part, size in zip(parts, sizes, strict=True)]
    assert torch.equal(joined.position_ids, torch.cat(positions))
    assert joined.num_samples == len(first) + len(second)


@QUICK
@given(st.lists(st.integers(0, 2), max_size=3), SAMPLES)
def test_a_rollout_group_is_its_sequences_with_the_completions_as_targets(prompt: list[int], group: Samples) -> None:
    forest = PrefixForest.from_rollout_group(prompt, group)
    assert forest.samples() == [prompt + completion for completion in group]
    wanted = [bit for completion in group for bit in [False] * len(prompt) + [True] * len(completion)]
    assert forest.loss_mask.tolist() == wanted
    masks = [[place % 2 for place in range(len(completion))] for completion in group]
    masked = PrefixForest.from_rollout_group(prompt, group, completion_mask=masks)
    assert masked.loss_mask.tolist() == [bit for mask in masks for bit in [0] * len(prompt) + mask]
    # Node paths of the published fold keep its layout and its mask.
    folded = fold_shared_prefix_rollouts(prompt, group)
    forest = PrefixForest.from_node_paths(folded.node_lengths, folded.sample_paths, folded.input_ids)
    assert forest.input_ids.tolist() == folded.input_ids
    assert forest.position_ids.tolist() == folded.position_ids
    assert forest.samples() == [prompt + completion for completion in group]
    spec, ranges = AttnMaskSpec.prefix_tree(folded.node_lengths, folded.sample_paths)
    assert torch.equal(dense_mask(forest), spec.dense())
    flat = [row for sample in ranges for begin, end in sample for row in range(begin, end)]
    assert forest.sample_rows.tolist() == flat


def test_node_paths_in_any_order_are_put_into_pre_order():
    #           node  0    1    2      3          paths 0-2, 0-3, 1; children before parents by number, node 4 is empty
    ids = [5, 6, 9, 7, 8, 1, 2]  # 5 6 | 9 | 7 8 | 1 2
    forest = PrefixForest.from_node_paths([2, 1, 2, 2, 0], [[2, 0], [4, 2, 3], [1]], ids, loss_nodes=[0, 3])
    assert forest.input_ids.tolist() == [9, 7, 8, 5, 6, 1, 2]
    assert forest.samples() == [[7, 8, 5, 6], [7, 8, 1, 2], [9]]
    assert forest.position_ids.tolist() == [0, 0, 1, 2, 3, 2, 3]
    assert forest.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0]
    assert PrefixForest.from_node_paths([1, 2], [[0, 1]]).input_ids.tolist() == [0, 0, 0]
    lengths, paths = torch.tensor([2, 1]), torch.tensor([[0, 1]])
    tensors = PrefixForest.from_node_paths(lengths, paths, torch.tensor([[7, 8, 9]]), loss_nodes=torch.tensor([1]))
    assert tensors.samples() == [[7, 8, 9]] and tensors.loss_mask.tolist() == [0, 0, 1]


REPLIES = [
    {"text": "a", "role": "assistant", "replies": [{"text": "q", "role": "prompter", "replies": []}]},
    {"text": "bb", "role": "assistant"},
]
TREE = {"message_tree_id": "t", "prompt": {"text": "p", "role": "prompter", "replies": REPLIES}}


def encode(message):
    """Return 0, then a byte for each character; those of the assistant are targets."""
    ids = [0, *message["text"].encode()]
    return ids, [0, *[int(message["role"] == "assistant")] * (len(ids) - 1)]


def test_a_tree_of_messages_gives_the_threads_to_its_last_replies():
    counters = Counter()
    forest = PrefixForest.from_message_tree(TREE, encode, counters=counters)
    p, a, b = ord("p"), ord("a"), ord("b")
    assert forest.samples() == [[0, p, 0, a], [0, p, 0, b, b]]
    assert forest.input_ids.tolist() == [0, p, 0, a, b, b]  # the replies share their role tag
    assert forest.loss_mask.tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 1]
    assert counters == {"cut_messages": 1}


def test_a_reply_is_in_one_thread_however_many_questions_behind_it_have_no_answer():
    unanswered = [{"text": text, "role": "prompter"} for text in ("x", "y")]
    answered = {"text": "q", "role": "prompter", "replies": [{"text": "B", "role": "assistant"}]}
    reply = {"text": "A", "role": "assistant", "replies": [*unanswered, answered]}
    tree = {"text": "p", "role": "prompter", "replies": [reply]}
    counters = Counter()
    forest = PrefixForest.from_message_tree(tree, encode, counters=counters)
    assert forest.samples() == [[0, ord("p"), 0, ord("A"), 0, ord("q"), 0, ord("B")]]
    assert counters == {"cut_messages": 2}
    with refused("E801", "no message", "encode"):
        PrefixForest.from_message_tree(unanswered[0], encode)
    with refused("E801", "1 ids", "a mask of 2", "{'text': 'x'"):
        PrefixForest.from_message_tree(unanswered[0], lambda message: ([1], [0, 1]))
    for wrong in ([1], {"prompt": [1]}, {**unanswered[0], "replies": "abc"}, {**unanswered[0], "replies": [5]}):
        with refused("E801", "no message", "replies as a list"):
            PrefixForest.from_message_tree(wrong, encode)


def test_a_thread_of_three_thousand_messages_is_no_recursion():
    message = {"text": "z", "role": "assistant"}
    for _ in range(3_000):
        message = {"text": "z", "role": "assistant", "replies": [message]}
    forest = PrefixForest.from_message_tree(message, encode)
    assert forest.num_tokens == 6_002 and forest.num_samples == 1
    assert forest.loss_mask.sum() == 3_001
    chain = PrefixForest.from_sequences([[1] * length for length in range(1, 1_500)])  # 1,499 nodes, one below another
    assert chain.stats().max_levels == 1_499
    assert chain.sample_lengths.tolist() == list(range(1, 1_500))


def test_ids_are_taken_from_lists_tuples_arrays_and_tensors():
    rows = [[1, 2, 3], (1, 2, 4), np.array([1, 5], dtype=np.uint16), torch.tensor([6])]
    assert PrefixForest.from_sequences(rows).samples() == [[1, 2, 3], [1, 2, 4], [1, 5], [6]]
    tensor = torch.tensor([[1, 2], [1, 3]])
    assert PrefixForest.from_sequences(tensor).samples() == tensor.tolist()
    assert PrefixForest.from_rollout_group(np.array([], dtype=np.int64), [[4]]).samples() == [[4]]


@pytest.mark.parametrize(
    ("samples", "error", "words"),
    [
        ([], ValueError, "no sequence was given"),
        ([[1], []], ValueError, "sequence 1 is empty"),
        ([[1], [2, -100]], ValueError, "sequence 1 has the id -100 at 1"),
        ([[1, 2**31]], ValueError, "sequence 0 has the id 2147483648 at 1; expected ids from 0 to 2147483647"),
        ([[1], [2.5]], TypeError, "sequence 1 is float64 of shape [1]"),
        ([[1], np.array([True])], TypeError, "sequence 1 is bool"),
        ([[[1]], [[2]]], TypeError, "sequence 0 is int64 of shape [1, 1]"),
        ([1, 2], TypeError, "sequence 0 is 1"),
        (torch.tensor([1, 2]), TypeError, "sequence 0 is tensor(1)"),
        ([[1], [True, False]], TypeError, "sequence 1 has bools"),
        (["ab"], TypeError, "sequence 0"),
    ],
)
def test_bad_ids_are_named_with_their_place(samples, error, words):
    with refused("E801", words, kind=error):
        PrefixForest.from_sequences(samples)


def test_bad_groups_masks_and_paths_are_named():
    for prompt, group, words in [
        ([1], [], "no completion was given"),
        ([1], [[2], []], "completion 1 is empty"),
        ([-1], [[2]], "the prompt has the id -1 at 0"),
    ]:
        with refused("E801", words):
            PrefixForest.from_rollout_group(prompt, group)
    for masks, words in [
        ([[1]], "there are 1 masks for 2 sequences"),
        ([[1], [0]], "the mask of sequence 1 has shape [1]; expected [2]"),
    ]:
        with refused("E801", words):
            PrefixForest.from_sequences([[1], [2, 3]], loss_mask=masks)
    for labels in ([-100, 5], [0.3, 1.0], [math.nan, 1.0], ["0", "1"]):
        with refused("E801", "0 and 1", "labels != -100"):
            PrefixForest.from_sequences([[4, 5]], loss_mask=[labels])
    for nodes in ([7], [-1]):
        with refused("E801", f"loss_nodes has [{nodes[0]}]", "0 to 1"):
            PrefixForest.from_node_paths([1, 1], [[0, 1]], loss_nodes=nodes)
    for nodes in ([False, True], "1", torch.tensor([False, True])):
        with refused("E801", "loss_nodes", kind=TypeError):
            PrefixForest.from_node_paths([1, 1], [[0, 1]], loss_nodes=nodes)
    for lengths, paths, words in [
        ([1, 1], [[0, 2]], "sample_paths[0] names node 2; there are 2"),
        ([1, 1], [[0]], "node 1 has 1 tokens"),
        ([1, 0], [[0], [1]], "sample_paths[1] is [1]"),
        ([1, 1, 1], [[0, 2], [1, 2]], "sample_paths[1] has node 2 below 1"),
        ([1, 1], [[0, 1, 0]], "has node 0 below 1"),
        ([2, -1], [[0]], "node 1 has -1 tokens"),
        ([0], [], "sample_paths is empty"),
        ([2**62] * 2, [[0], [1]], "the samples have 9223372036854775808 tokens"),
        ([2**20], [[0]] * 65, "the samples have 68157440 tokens"),
    ]:
        with refused("E801", words):
            PrefixForest.from_node_paths(lengths, paths)
    with refused("E801", "2 tokens", "3 input_ids"):
        PrefixForest.from_node_paths([2], [[0]], [1, 2, 3])
    with refused("E801", "multiple_of is 0"):
        PrefixForest.from_sequences([[1]]).padded(0)
    with refused("E801", "joined()"):
        PrefixForest.joined([])


def test_counts_by_hand():
    # Before: rows of 4 and 5 tokens, 10 + 15 pairs. After: 7 tokens, and 3 of the 25 pairs (the prompt's) fall away.
    stats = PrefixForest.from_rollout_group([1, 2], [[10, 11], [20, 21, 22]]).padded(8).stats()
    assert (stats.tokens_before, stats.tokens_after) == (9, 7)
    assert (stats.pairs_before, stats.pairs_after) == (25, 22)
    assert (stats.samples, stats.nodes, stats.max_depth, stats.max_levels, stats.max_branching) == (2, 3, 5, 2, 2)
    assert stats.tree_token_ratio == 7 / 9 and stats.pair_ratio == 22 / 25
    with refused("E801", "FLOPs", "d_model="):
        stats.flop_ratio  # noqa: B018
    shape = ModelShape(parameters=100, layers=2, d_model=3)
    counted = PrefixForest.from_rollout_group([1, 2], [[10, 11], [20, 21, 22]]).stats(shape)
    assert counted.flops_before == 3 * (2 * 100 * 9 + 4 * 3 * 2 * 25)
    assert counted.flop_ratio == (200 * 7 + 24 * 22) / (200 * 9 + 24 * 25)
    other = PrefixForest.from_sequences([[1, 2, 3], [1, 2, 3], [1, 2], [7]]).stats()
    assert (other.shared_samples, other.max_levels, other.max_branching) == (2, 2, 1)
    both = stats + other
    assert (both.tokens_before, both.samples, both.max_branching, both.max_depth) == (18, 6, 2, 5)
    assert (counted + other).flops_before is None


@QUICK
@given(st.integers(0, 2**32 - 1))
def test_equal_input_gives_an_equal_layout_and_pairs_count_the_mask(seed: int) -> None:
    samples = grown(random.Random(seed))
    first, second = PrefixForest.from_sequences(samples), PrefixForest.from_sequences(np.array(samples, dtype=object))
    for name, value in vars(first).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(second, name)), name
    assert first.stats().pairs_after == int(dense_mask(first).sum())
    assert first.to("cpu").samples() == samples
