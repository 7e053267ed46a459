"""One prompt and its completions as one row with one label each: the published contract of nemo-automodel.

    prompt [1, 2]   completions [[10, 11], [20, 21, 22]]

    row            0    1    2    3    4    5    6
    input_ids      1    2   10   11   20   21   22
    labels      -100 -100   11 -100   21   22 -100
    position_ids   0    1    2    3    2    3    4
    node_lengths [2, 2, 3]   sample_paths [[0, 1], [0, 2]]

This is the layout of verl's RFC 6401 and Automodel's issue 2385 for one device (cp=1: no context parallelism). A row
holds one group; every completion sees the whole prompt and, causally, itself. The batch carries the structure as
`prefix_tree`; the attention backend pops it and builds the mask (`AttnMaskSpec.prefix_tree` in masks.py).

The branch point: the last token of the prompt is stored once and has at most one label, but the completions continue
with different tokens. So it has no label in this layout, and the first token of each completion is not trained on. That
is a limit of one label per row, not of folding: niels_gpt.prefix_tree.edges supervises these tokens too, as (row,
target) pairs.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from niels_gpt.storage.errors import TreeError, TreeTypeError

CROSS_ENTROPY_IGNORE_IDX = -100
"""The label that cross-entropy ignores: torch's default `ignore_index`."""


@dataclass
class FoldedRollouts:
    """One group in the layout above, in plain lists: T flat tokens, N completions. It does not contain the mask.

    input_ids: [T] the prompt, then each completion.
    labels: [T] the token to predict at a row, already shifted: the loss must not shift again. The rows of the prompt
        and the last row of each completion have the ignored label.
    position_ids: [T] 0 to P - 1 for the prompt of P tokens; each completion starts at P.
    node_lengths: [N + 1] tokens of the prompt and of each completion.
    sample_paths: [N] of [0, i + 1], the nodes of a sample from its root; of [i + 1] where the prompt is empty.
    """

    input_ids: list[int]
    labels: list[int]
    position_ids: list[int]
    node_lengths: list[int]
    sample_paths: list[list[int]]


def fold_shared_prefix_rollouts(
    prompt_ids: Sequence[int], completions: Sequence[Sequence[int]], ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX
) -> FoldedRollouts:
    """Fold one prompt and the completions sampled from it. Nothing is merged: equal completions stay two nodes.

    Args:
        prompt_ids: the prompt's tokens, as a list, a tuple, an integer array or tensor; may be empty.
        completions: one such sequence for each completion; at least one, and none empty.
        ignore_idx: the label of rows that predict nothing.

    Returns the layout; the input is not changed. The first token of each completion has no label, see above.

    Raises:
        TreeError (a ValueError, E801): there is no completion, or one is empty.
        TreeTypeError (a TypeError, E801): something is not a sequence of integers; floats and bools are refused.
    """
    if len(completions) == 0:
        raise TreeError("completions must be non-empty (need at least one rollout).")
    answers = [_as_ids(completion, f"completion {index}") for index, completion in enumerate(completions)]
    if not all(answers):
        raise TreeError("every completion must be non-empty.")
    prompt = _as_ids(prompt_ids, "prompt_ids")

    input_ids, labels, position_ids = list(prompt), [ignore_idx] * len(prompt), list(range(len(prompt)))
    for answer in answers:
        input_ids += answer
        labels += [*answer[1:], ignore_idx]
        position_ids += range(len(prompt), len(prompt) + len(answer))
    return FoldedRollouts(
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        node_lengths=[len(prompt), *map(len, answers)],
        sample_paths=[[0, node] if prompt else [node] for node in range(1, len(answers) + 1)],
    )


def _as_ids(ids: Any, name: str) -> list[int]:
    """Return the ids as a new list of ints; an empty array may have any dtype, since NumPy's default is float."""
    if isinstance(ids, torch.Tensor):
        ids = ids.detach().cpu().numpy()
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
            raise TreeTypeError(
                f"{name} is {ids.dtype} of shape {list(ids.shape)}; expected integers of shape [tokens]"
            )
        return [int(token) for token in ids.tolist()]
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise TreeTypeError(f"{name} is {ids!r}; expected a list, tuple, array or tensor of integers")
    if set(map(type, ids)) <= {int}:
        return list(ids)
    integers = []
    for place, token in enumerate(ids):
        # Bools are integers for Python and torch; here they are a misplaced mask.
        is_bool = isinstance(token, bool) or str(getattr(token, "dtype", "")).endswith("bool")
        try:
            if is_bool:
                raise TreeTypeError("a bool")
            integers.append(operator.index(token))
        except TypeError as error:
            raise TreeTypeError(f"{name}[{place}] is {token!r}; expected an integer") from error
    return integers


def prefix_tree_collate_fn(batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make the batch of one rollout group, for a model on one device (cp=1).

    Args:
        batch: one mapping with the keys `prompt_ids` and `completions`; other keys are ignored.

    Returns `input_ids`, `labels` and `position_ids`, int64 [1, T], and `prefix_tree`: the tuple (node_lengths,
    sample_paths) of plain lists. The attention backend pops `prefix_tree` and builds the mask from it: a model that
    gets the other three without a mask computes wrong values without an error.

    Raises:
        TreeError (a ValueError, E801): not exactly one group, as the mask belongs to one (`PrefixForest.joined` puts
            several into a row); no completion, or an empty one.
        TreeTypeError (a TypeError, E801): something is not a sequence of integers.
        KeyError: a key is missing.
    """
    if len(batch) != 1:
        raise TreeError(f"prefix_tree_collate_fn supports local_batch_size=1 only, got {len(batch)} groups.")
    (group,) = batch
    for key in ("prompt_ids", "completions"):
        if key not in group:
            raise KeyError(f"the rollout group has no {key!r}; its keys are {sorted(map(str, group))}")
    folded = fold_shared_prefix_rollouts(group["prompt_ids"], group["completions"])
    tensors = {name: torch.tensor([getattr(folded, name)]) for name in ("input_ids", "labels", "position_ids")}
    return {**tensors, "prefix_tree": (folded.node_lengths, folded.sample_paths)}


def build_mock_rollout_dataset(
    *,
    num_groups: int = 16,
    completions_per_group: int = 4,
    prompt_len: int = 32,
    completion_len: int = 16,
    vocab_size: int = 1024,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return random groups of `prompt_ids` and `completions` for testing a pipeline, with ids 2 to vocab_size - 1.

    Draws from Python's generator in nemo-automodel's order, prompt first, so that both make the same data.
    """
    rng = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [rng.randint(2, vocab_size - 1) for _ in range(length)]

    groups = []
    for _ in range(num_groups):
        prompt = tokens(prompt_len)
        groups.append(
            {"prompt_ids": prompt, "completions": [tokens(completion_len) for _ in range(completions_per_group)]}
        )
    return groups
