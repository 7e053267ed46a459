"""What folding saves: tokens, attention pairs, and the FLOPs that follow for a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from niels_gpt.prefix_tree.forest import PrefixForest


@dataclass(frozen=True)
class ModelShape:
    """What of a decoder decides the cost of a token and of an attention pair."""

    parameters: int  # those that every token is multiplied with
    layers: int
    d_model: int

    def training_flops(self, tokens: int, pairs: int) -> int:
        """Return the FLOPs of forward and backward: 3 * (2 * parameters * tokens + 4 * d_model * layers * pairs)."""
        return 3 * (2 * self.parameters * tokens + 4 * self.d_model * self.layers * pairs)


@dataclass(frozen=True)
class ForestStats:
    """Counts of one forest, or of several added up. `before`: each sample a row of its own; `after`: folded.

    An attention pair is a query and a key that it sees; padding counts in nothing.
    """

    samples: int
    nodes: int
    tokens_before: int
    tokens_after: int
    pairs_before: int
    pairs_after: int
    max_depth: int  # tokens of the longest sample
    max_levels: int  # nodes of the sample with the most
    max_branching: int  # children of the node with the most; 1 where nothing branches
    shared_samples: int  # duplicates and prefixes of another: samples that take no token of their own
    flops_before: int | None = None  # of training, by ModelShape
    flops_after: int | None = None

    @classmethod
    def of(cls, forest: PrefixForest, shape: ModelShape | None = None) -> ForestStats:
        """Count a forest."""
        lengths = forest.sample_lengths
        size = forest.num_tokens
        before, after = int(lengths.sum()), size
        pairs_before = int((lengths * (lengths + 1) // 2).sum())
        ends = forest.subtree_end[:size]
        pairs_after = int((ends - torch.arange(size, device=ends.device)).sum())
        parents = forest.node_parents.tolist()
        levels: list[int] = []
        for parent in parents:
            levels.append(1 if parent < 0 else levels[parent] + 1)
        inner = set(parents)
        leaves = set(range(len(parents))) - inner
        children = torch.bincount(forest.node_parents[forest.node_parents >= 0])
        return cls(
            samples=forest.num_samples,
            nodes=len(parents),
            tokens_before=before,
            tokens_after=after,
            pairs_before=pairs_before,
            pairs_after=pairs_after,
            max_depth=int(lengths.max()),
            max_levels=max(levels),
            max_branching=int(children.max()) if len(children) else 1,
            shared_samples=forest.num_samples - len(leaves),  # every leaf is the end of a sample
            flops_before=shape.training_flops(before, pairs_before) if shape else None,
            flops_after=shape.training_flops(after, pairs_after) if shape else None,
        )

    @property
    def tree_token_ratio(self) -> float:
        """Return tokens after folding over tokens before: 1 saves nothing."""
        return self.tokens_after / self.tokens_before

    @property
    def pair_ratio(self) -> float:
        """Return attention pairs after folding over those before."""
        return self.pairs_after / self.pairs_before

    @property
    def flop_ratio(self) -> float:
        """Return FLOPs after folding over those before.

        Raises:
            ValueError: the counts were made without a ModelShape.
        """
        if self.flops_before is None or self.flops_after is None:
            raise ValueError("FLOPs need a shape: forest.stats(ModelShape(parameters=..., layers=..., d_model=...))")
        return self.flops_after / self.flops_before

    def __add__(self, other: ForestStats) -> ForestStats:
        """Add the counts of two forests; of each maximum the larger one stays."""
        sums: dict[str, Any] = {}
        for name, mine in vars(self).items():
            theirs = getattr(other, name)
            if mine is None or theirs is None:
                sums[name] = None
            else:
                sums[name] = max(mine, theirs) if name.startswith("max_") else mine + theirs
        return ForestStats(**sums)
