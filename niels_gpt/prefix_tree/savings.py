"""What folding would save on recorded rollouts, counted before anyone integrates anything.

    found = measured(forests(read_rollouts(["rollouts.jsonl"])))
    print(found.token_factor, found.flop_factor)

Forests are counted one by one and dropped: a file of any size takes the memory of its largest one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.rollout_lines import Rollouts
from niels_gpt.prefix_tree.stats import ForestStats, ModelShape

SHAPE_7B = ModelShape(parameters=7_000_000_000, layers=32, d_model=4096)
ROWS = 1000
"""Consecutive `ids` rows that are folded together where no group key is named."""
LITTLE = 1.3
"""A smaller factor of FLOPs is said to be little: 256 tokens of prompt, 8 completions of 1,024 give 1.21."""


class Folded(NamedTuple):
    """A forest and the lines that it was made from."""

    forest: PrefixForest
    lines: list[Rollouts]


def forests(lines: Iterable[Rollouts], *, rows: int = ROWS) -> Iterator[Folded]:
    """Fold each group by itself, and rows of whole sequences in runs of `rows` consecutive ones; 0: all of a file.

    Lines that were read with a group key are folded together as long as they stand beside one another and agree in it,
    whatever their form. No forest holds lines of two files.
    """
    held: list[Rollouts] = []
    for line in lines:
        if held and not _is_together(held, line, rows):
            yield Folded(_folded(held), held)
            held = []
        held.append(line)
    if held:
        yield Folded(_folded(held), held)


def _is_together(held: list[Rollouts], line: Rollouts, rows: int) -> bool:
    if held[0].path != line.path or held[-1].line >= line.line or held[0].key != line.key:  # a file may come twice
        return False
    if line.key is not None:
        return True
    return line.prompt is None and held[0].prompt is None and (rows == 0 or len(held) < rows)


def _folded(lines: list[Rollouts]) -> PrefixForest:
    first = lines[0].prompt
    if len(lines) == 1 and first is not None:
        return PrefixForest.from_rollout_group(first, lines[0].sequences)
    none = np.empty(0, dtype=np.int64)
    wholes = [
        np.concatenate([none if line.prompt is None else line.prompt, each])
        for line in lines
        for each in line.sequences
    ]
    return PrefixForest.from_sequences(wholes)


# --- what it comes to -------------------------------------------------------------------------------------------------


@dataclass
class Savings:
    """Sums over forests, and what each of them saves. A factor is a number before folding by the one after it."""

    shape: ModelShape
    """Of the model whose FLOPs are predicted."""
    lines: int = 0
    groups: int = 0
    """Lines with a prompt and completions; the others are whole sequences."""
    total: ForestStats | None = None
    """None: no forest yet."""
    first_tokens: int = 0
    """Completions with a prompt in front: their first tokens have no loss in the layout with one label a row."""
    completion_tokens: int = 0
    """Of the lines with a prompt and completions."""
    dense_pairs: int = 0
    """Query-key pairs that a dense mask computes: T x T of each tree."""
    longest: tuple[int, str] = (0, "")
    """Tokens of the longest tree after folding, and the first line of its forest."""
    best: tuple[float, str] = (0.0, "")
    """The largest token factor of a forest, and its first line."""
    worst: tuple[float, str] = (math.inf, "")
    token_factors: array[float] = field(default_factory=lambda: array("d"))
    """Of each forest, in their order."""
    flop_factors: array[float] = field(default_factory=lambda: array("d"))

    @property
    def sums(self) -> ForestStats:
        """Counts of all forests together, with FLOPs. Raises: ValueError if there is no forest."""
        if self.total is None:
            raise ValueError("no rollouts: expected one forest at least")
        return self.total

    @property
    def token_factor(self) -> float:
        """Of all forests together."""
        return self.sums.tokens_before / self.sums.tokens_after

    @property
    def pair_factor(self) -> float:
        """Of the pairs of a query and a key that it sees."""
        return self.sums.pairs_before / self.sums.pairs_after

    @property
    def flop_factor(self) -> float:
        """Of the predicted training FLOPs, where the attention computes only the pairs that the mask allows."""
        return 1 / self.sums.flop_ratio

    @property
    def dense_flop_factor(self) -> float:
        """The same, where it computes all T x T pairs of each tree, as it does under a dense mask; may be below 1."""
        before = self.shape.training_flops(self.sums.tokens_before, self.sums.pairs_before)
        return before / self.shape.training_flops(self.sums.tokens_after, self.dense_pairs)

    def add(self, folded: Folded) -> None:
        """Count one more forest."""
        forest = folded.forest
        found = forest.stats(self.shape)
        self.total = found if self.total is None else self.total + found
        self.lines += len(folded.lines)
        for line in folded.lines:
            if line.prompt is not None:
                self.groups += 1
                self.first_tokens += len(line.sequences) if len(line.prompt) else 0
                self.completion_tokens += sum(map(len, line.sequences))
        begins = forest.node_starts[forest.node_parents < 0]
        trees = forest.subtree_end[begins] - begins
        self.dense_pairs += int((trees * trees).sum())
        where, factor = folded.lines[0].where, found.tokens_before / found.tokens_after
        self.token_factors.append(factor)
        self.flop_factors.append(1 / found.flop_ratio)
        if int(trees.max()) > self.longest[0]:
            self.longest = (int(trees.max()), where)
        if factor > self.best[0]:
            self.best = (factor, where)
        if factor < self.worst[0]:
            self.worst = (factor, where)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON has it, with the median in place of the factors of each forest."""
        tokens, place = self.longest
        return {
            "lines": self.lines,
            "groups": self.groups,
            "forests": len(self.token_factors),
            **{name: value for name, value in vars(self.sums).items() if name != "nodes"},
            "tree_token_ratio": self.sums.tree_token_ratio,
            "token_factor": self.token_factor,
            "pair_factor": self.pair_factor,
            "flop_factor": self.flop_factor,
            "dense_mask_flop_factor": self.dense_flop_factor,
            "model_shape": vars(self.shape),
            "first_tokens": self.first_tokens,
            "completion_tokens": self.completion_tokens,
            "median_token_factor": median(self.token_factors),
            "best": {"token_factor": self.best[0], "where": self.best[1]},
            "worst": {"token_factor": self.worst[0], "where": self.worst[1]},
            "longest_tree": {"tokens": tokens, "dense_mask_bytes": tokens * tokens, "where": place},
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return everything as pairs of a name and a value for people."""
        sums, shape, tokens = self.sums, self.shape, self.longest[0]
        lost = "not known: no line tells prompt and completions apart"
        if self.completion_tokens:
            share = self.first_tokens / self.completion_tokens
            lost = f"{self.first_tokens:,} of {self.completion_tokens:,} completion tokens, {share:.1%}; LossEdges: 0"
        return [
            (
                "forests",
                f"{len(self.token_factors):,} from {self.lines:,} lines, {self.groups:,} of them with a prompt",
            ),
            ("samples", f"{sums.samples:,}, {sums.shared_samples:,} of them duplicates or prefixes of another"),
            ("tokens", f"{sums.tokens_before:,} before, {sums.tokens_after:,} after: {_fewer(self.token_factor)}"),
            ("  of one forest", f"{median(self.token_factors):.2f}x fewer in the median"),
            ("    best", f"{_fewer(self.best[0])}: {self.best[1]}"),
            ("    worst", f"{_fewer(self.worst[0])}: {self.worst[1]}"),
            (
                "attention pairs",
                f"{sums.pairs_before:,} before, {sums.pairs_after:,} after: {_fewer(self.pair_factor)}",
            ),
            (
                "training FLOPs",
                f"{sums.flops_before:.3g} before, {sums.flops_after:.3g} after: {_fewer(self.flop_factor)}",
            ),
            ("  under a dense mask", f"{_fewer(self.dense_flop_factor)}, for it computes all T x T pairs of a tree"),
            ("  predicted for", f"{shape.parameters:,} parameters, {shape.layers:,} layers, width {shape.d_model:,}"),
            ("first tokens that one label a row loses", lost),
            ("deepest tree", f"{sums.max_levels:,} nodes; the longest sample has {sums.max_depth:,} tokens"),
            ("widest branch", f"{sums.max_branching:,} children of one node"),
            ("longest folded tree", f"{tokens:,} tokens, to fit into the model's row: {self.longest[1]}"),
            ("  its dense mask", f"{tokens * tokens:,} bytes as bool"),
        ]

    def interpretation(self) -> str:
        """Return what the numbers say to somebody who wonders whether to fold."""
        saved = 1 - 1 / self.flop_factor
        said = f"Folding saves {saved:.0%} of the training FLOPs where a batch holds whole forests."
        if self.flop_factor < LITTLE:
            said = (
                f"Folding buys little here, {saved:.0%} of the training FLOPs: the samples share few tokens.\n"
                "Short prompts with long completions are so, and rows that stand apart from the rest of their group."
            )
        return (
            f"{said}\nTime follows the FLOPs only where the attention skips what the mask forbids; "
            "generating the rollouts costs the same."
        )


def _fewer(factor: float) -> str:
    return f"{factor:.2f}x fewer" if factor >= 1 else f"{1 / factor:.2f}x more"


def measured(folded: Iterable[Folded], shape: ModelShape = SHAPE_7B) -> Savings:
    """Return what folding saves on some forests. Raises: whatever reading them raises; ValueError if there is none."""
    found = Savings(shape)
    for each in folded:
        found.add(each)
    return found
