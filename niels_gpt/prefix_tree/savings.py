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
    """Query-key pairs that a dense mask computes: T x T of each forest, which is one row whatever it shares."""
    longest: tuple[int, str] = (0, "")
    """Tokens of the longest forest after folding, and its first line."""
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
        """The same, where it computes all T x T pairs of each forest, as it does under a dense mask; may be below 1."""
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
        size = found.tokens_after
        self.dense_pairs += size * size
        where, factor = folded.lines[0].where, found.tokens_before / found.tokens_after
        self.token_factors.append(factor)
        self.flop_factors.append(1 / found.flop_ratio)
        if size > self.longest[0]:
            self.longest = (size, where)
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
            "longest_row": {"tokens": tokens, "dense_mask_bytes": tokens * tokens, "where": place},
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return everything as pairs of a name and a value for people."""
        sums, shape, tokens = self.sums, self.shape, self.longest[0]
        lost = "not known: no line tells prompt and completions apart"
        if self.completion_tokens:
            share = self.first_tokens / self.completion_tokens
            tokens_of = many(self.completion_tokens, "completion token")
            lost = f"{self.first_tokens:,} of {tokens_of}, {share:.1%}; LossEdges: 0"
        return [
            (
                "forests",
                f"{len(self.token_factors):,} from {many(self.lines, 'line')}, {self.groups:,} of them with a prompt",
            ),
            ("samples", f"{sums.samples:,}, {sums.shared_samples:,} of them duplicates or prefixes of another"),
            ("tokens", f"{sums.tokens_before:,} before, {sums.tokens_after:,} after: {fewer(self.token_factor)}"),
            ("  of one forest", f"{fewer(median(self.token_factors))} in the median"),
            ("    best", f"{fewer(self.best[0])}: {self.best[1]}"),
            ("    worst", f"{fewer(self.worst[0])}: {self.worst[1]}"),
            (
                "attention pairs",
                f"{sums.pairs_before:,} before, {sums.pairs_after:,} after: {fewer(self.pair_factor)}",
            ),
            (
                "training FLOPs",
                f"{sums.flops_before:.3g} before, {sums.flops_after:.3g} after: {fewer(self.flop_factor)}",
            ),
            ("  under a dense mask", f"{fewer(self.dense_flop_factor)}, for it computes all T x T pairs of a row"),
            (
                "  predicted for",
                f"{many(shape.parameters, 'parameter')}, {many(shape.layers, 'layer')}, width {shape.d_model:,}",
            ),
            ("first tokens that one label a row loses", lost),
            (
                "deepest tree",
                f"{many(sums.max_levels, 'node')}; the longest sample has {many(sums.max_depth, 'token')}",
            ),
            ("widest branch", f"{many(sums.max_branching, 'child', 'children')} of one node"),
            ("longest folded row", f"{many(tokens, 'token')}, to fit into the model's row: {self.longest[1]}"),
            ("  its dense mask", f"{many(tokens * tokens, 'byte')} as bool"),
        ]

    def interpretation(self) -> str:
        """Return what the numbers say to somebody who wonders whether to fold."""
        saved = _percent(1 - self.sums.flop_ratio)
        said = f"Folding saves {saved} of the training FLOPs where a batch holds whole forests."
        if self.flop_factor < LITTLE:
            said = (
                f"Folding buys little here, {saved} of the training FLOPs: the samples share few tokens.\n"
                "Short prompts with long completions are so, and rows that stand apart from the rest of their group."
            )
        return (
            f"{said}\nTime follows the FLOPs only where the attention skips what the mask forbids; "
            "generating the rollouts costs the same."
        )


def fewer(factor: float) -> str:
    """Return a factor in words: "1.70x fewer", "1.16x more", and no 1.00x that would be either."""
    if f"{max(factor, 1 / factor):.2f}" == "1.00":
        return "the same" if factor == 1 else "about the same"
    return f"{factor:.2f}x fewer" if factor > 1 else f"{1 / factor:.2f}x more"


def many(count: int, one: str, more: str = "") -> str:
    """Return a count and its noun: "1 node", "2 nodes". more: the plural, where it is not the singular and an s."""
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"


def _percent(share: float) -> str:
    """Return a share from 0 to 1 in percent; what is neither nothing nor all is not said to be."""
    if 0 < share < 0.005:
        return "less than 1%"
    return "more than 99%" if 0.995 <= share < 1 else f"{share:.0%}"


def measured(folded: Iterable[Folded], shape: ModelShape = SHAPE_7B) -> Savings:
    """Return what folding saves on some forests. Raises: whatever reading them raises; ValueError if there is none."""
    found = Savings(shape)
    for each in folded:
        found.add(each)
    return found
