"""Rows of TRL: equal to TRL's own code where that is installed, and right in its loss."""

import random
import warnings
from typing import Any

import pytest
import torch
from support.prefix_trees import Samples, grown
from torch import Tensor

from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.tree_rows import tree_row

Masks = list[list[int]]


def drawn(seed: int) -> tuple[Samples, Masks]:
    """Return samples of several trees, with a duplicate and a prefix, and masks; every third draw trains all tokens."""
    draw = random.Random(seed)
    samples = grown(draw, samples=draw.randint(5, 22), vocab=draw.choice([2, 5, 97]))
    return samples, [[draw.randrange(2) if seed % 3 else 1 for _ in sample] for sample in samples]


def packed(samples: Samples, masks: Masks, old: list[Tensor], advantages: Tensor) -> dict[str, Tensor]:
    """Return the row that TRL makes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its experimental modules say that they are
        packing: Any = pytest.importorskip("trl.experimental.async_grpo.packing", reason="TRL's rows need the extra rl")
    row = packing.TreeRow()
    for ids, mask, logps, advantage in zip(samples, masks, old, advantages.tolist(), strict=True):
        columns = {"input_ids": torch.tensor(ids), "completion_mask": torch.tensor(mask), "old_log_probs": logps}
        row.add({**columns, "advantage": advantage, "group_id": 0})
    found: dict[str, Tensor] = row.pack()
    return found


@pytest.mark.parametrize("seed", range(24))
def test_the_early_layout_is_the_row_of_trl(seed: int) -> None:
    samples, masks = drawn(seed)
    old, advantages = [torch.randn(len(sample)) for sample in samples], torch.randn(len(samples))
    half = len(samples) // 2 if seed % 2 else len(samples)  # joined trees share nothing, but TRL's rows do
    forest = PrefixForest.joined(
        [
            PrefixForest.from_sequences(samples[a:b], loss_mask=masks[a:b])
            for a, b in ((0, half), (half, len(samples)))
            if a < b
        ]
    )
    edges = LossEdges.from_forest(forest)
    per_token = [advantage.expand(len(sample)) for advantage, sample in zip(advantages, samples, strict=True)]
    wanted = packed(samples, masks, old, advantages)
    found = tree_row(forest, edges, fork_early=True, old_logprobs=old, advantages=per_token)
    assert list(found) == list(wanted)
    for name, column in wanted.items():
        assert found[name].dtype == column.dtype and torch.equal(found[name], column), name
    # The default has its keys and dtypes, every target as a label, and no more tokens.
    default = tree_row(forest, edges, old_logprobs=old, advantages=per_token)
    assert {name: column.dtype for name, column in default.items()} == {n: column.dtype for n, column in wanted.items()}
    assert torch.equal(default["shift_labels"][default["token_index"]], edges.target[edges.sample_edge])
    assert len(default["input_ids"]) <= len(wanted["input_ids"]) or seed % 2
