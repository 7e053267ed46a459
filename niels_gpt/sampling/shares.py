"""How many samples of each source a mixture has, by weight and until sources end, and their order in a block.

Of the first x samples of a phase, the source of the largest weight w has round(x * w / W), where W is the sum of all
weights and round(z) = floor(z + 1/2); of the rest, the source of the next weight has its part in the same way, and the
last source has the rest. So the counts are integers that sum to x, never fall as x grows, and depend only on x. Of n
sources, none is further from its exact share than 1/2 + (1 + 1/2 + ... + 1/(n - 1)) / 2 samples.

The places of a block are assigned to sources by halving. A run of m places, c_1, ..., c_n of them for the sources,
has a left part of h = m div 2 places, and a number r from 0 to m - 1 is drawn for it: of sources 1 to s together, the
left part has (h * (c_1 + ... + c_s) + r) div m places, and the right one the rest. So each place belongs to each source
with the probability of its share, parts of a block have nearly the shares of the whole, and the source of a place is
found in log2(m) steps, without the other places.

Weights may change at given samples: each such stage counts its samples from its first one, in blocks that begin there.
A mixture may begin at a later sample, with what each source has had before (state.py). Its blocks are counted from
there, and that sample is added to the key that decides their places.

This is a format: if it changes, MIXTURE_VERSION in mixture.py must be raised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.sampling.permutation import mix
from niels_gpt.sampling.state import MAX_SAMPLES, Origin
from niels_gpt.storage.meta_json import checked_int, shortened

MAX_BLOCK = 2**30  # its square is an int64
_SMALLEST_SHARE = Fraction(1, 2**32)


Weights = Sequence[float] | Sequence[tuple[int, Sequence[float]]]
"""A weight for each source, or stages: (sample, weights from that sample on)."""


class Stage(NamedTuple):
    """Weights, and the first sample that is drawn by them."""

    first: int
    weights: list[float]
    whole: list[int]
    """Integers in the ratios of the weights."""


def stages_of(weights: Weights, sources: int) -> list[Stage]:
    """Return the stages of a mixture; constant weights are one. Raises: ValueError for weights that do not fit."""
    given = list(weights)
    is_schedule = bool(given) and isinstance(given[0], tuple | list)
    pairs: list[Any] = given if is_schedule else [(0, given)]
    stages: list[Stage] = []
    for number, pair in enumerate(pairs):
        where = f"weights[{number}]" if is_schedule else "weights"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"{where}={shortened(pair)}: expected (sample, weights from that sample on)")
        first = checked_int(f"{where}: sample", pair[0], stages[-1].first + 1 if stages else 0)
        if first > (MAX_SAMPLES if stages else 0):
            raise ValueError(f"{where}: sample is {first}, expected {f'at most {MAX_SAMPLES}' if stages else 0}")
        if texts := [weight for weight in pair[1] if isinstance(weight, str | bytes)]:
            raise ValueError(f"{where}: {shortened(texts[0])} is a text, expected numbers")
        stage = [float(weight) for weight in pair[1]]
        if len(stage) != sources:
            raise ValueError(f"{where}: {len(stage)} weights for {sources} streams: expected as many of each")
        stages.append(Stage(first, stage, whole_weights(stage, f"{where}[1]" if is_schedule else where, is_schedule)))
    for source in range(sources):
        if not any(stage.weights[source] for stage in stages):
            raise ValueError(f"weights: streams[{source}] has weight 0 in every stage, expected one above 0")
    return stages


def whole_weights(weights: Sequence[float], where: str = "weights", zero_is_allowed: bool = False) -> list[int]:
    """Return integers without a common divisor, in the ratios of the decimal numbers that Python prints for weights.

    where: how errors begin.
    Raises: ValueError for a weight that is not above 0 (or 0, if it is allowed) and finite, or below 2 ** -32 of their
        sum, and if all are 0.
    """
    for number, weight in enumerate(weights):
        if not (0 < weight < math.inf or (zero_is_allowed and weight == 0)):
            expected = "a number, 0 or more" if zero_is_allowed else "a number above 0"
            raise ValueError(f"{where}[{number}]={weight}: expected {expected}")
    exact = [Fraction(repr(weight)) for weight in weights]
    if not any(exact):
        raise ValueError(f"{where}={weights}: expected one above 0")
    for number, fraction in enumerate(exact):
        if 0 < fraction / sum(exact) < _SMALLEST_SHARE:
            raise ValueError(
                f"{where}[{number}]={weights[number]} of {weights}: expected 2 ** -32 of their sum or more"
            )
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    divisor = math.gcd(*whole)  # small integers: the counts below are then exact in int64 as far as they go
    return [weight // divisor for weight in whole]


def by_weight(weights: Sequence[int], samples: Any) -> list[Any]:
    """Return how many of the first samples of a phase each source has.

    samples: an integer, or an array of integers; for an array, one array per source is returned.
    """
    counts, left, weight_left = [0 * samples] * len(weights), samples, sum(weights)
    for source in sorted(range(len(counts)), key=lambda s: (-weights[s], s)):
        if weight_left:
            counts[source] = (2 * weights[source] * left + weight_left) // (2 * weight_left)
        left, weight_left = left - counts[source], weight_left - weights[source]
    return counts


@dataclass(frozen=True)
class Phase:
    """Consecutive blocks with the same sources and weights."""

    first: int
    """Its first sample."""
    first_block: int
    size: int
    """Samples per block."""
    blocks: int | None
    """None: without end."""
    consumed: list[int]
    """Samples of each source before the phase."""
    weights: list[int]
    """0: the source has ended."""
    counts: list[int] | None = None
    """Samples of each source if the phase is one block in which a source ends; None: by weight."""

    def before(self, blocks: Any) -> list[Any]:
        """Return the number of samples of each source in the first `blocks` blocks of the phase.

        blocks: an integer, or an array of integers; for an array, one array per source is returned.
        """
        if self.counts is not None:
            return [blocks * count for count in self.counts]
        return by_weight(self.weights, blocks * self.size)

    def blocks_until(self, source: int, count: int) -> int:
        """Return the smallest number of blocks in which a source has at least `count` samples."""
        low, high = 0, 1  # too few blocks, and possibly enough
        while self.before(high)[source] < count:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.before(middle)[source] >= count else (middle, high)
        return high

    def whole_blocks(self, left: Sequence[int | None], end: int | None) -> tuple[int, int | None]:
        """Return the number of blocks by weight only, and the size of the next, in which a source or stage ends.

        left: samples that each source still has; None: without end. end: the first sample of the next stage.
        The size is 0 if the stage ends with a block, None if the phase has no end.
        """
        until = min((self.blocks_until(s, n) for s, n in enumerate(left) if n and self.weights[s]), default=0)
        if until and self.first + until * self.size <= (MAX_SAMPLES if end is None else end):
            return until - 1, self.size
        return (0, None) if end is None else divmod(end - self.first, self.size)

    def parts(self, blocks: int, size: int, left: Sequence[int | None]) -> Iterator[Phase]:
        """Yield the phase of `blocks` blocks by weight, and the phase of the block of this size after them.

        left: samples that each source still has; None: without end.
        """
        if blocks:
            yield replace(self, blocks=blocks)
        if size:
            counts = self.before(blocks)
            wanted = _minus(by_weight(self.weights, blocks * self.size + size), counts)
            filled, consumed = _filled(wanted, self.weights, _less(left, counts)), _plus(self.consumed, counts)
            first, first_block = self.first + blocks * self.size, self.first_block + blocks
            yield Phase(first, first_block, sum(filled), 1, consumed, self.weights, filled)

    def located(self, samples: NDArray[np.int64], key: np.uint64) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample, and its number among the samples of that source: int64 [n] both.

        samples: [n] numbers of samples of this phase, in any order. key: decides the places in blocks.
        """
        sources, earlier, blocks, before = self._drawn(samples, key)
        return sources, np.take_along_axis(earlier, sources[None], axis=0)[0] + before[blocks, sources]

    def positions(self, samples: NDArray[np.int64], key: np.uint64) -> NDArray[np.int64]:
        """Return how many samples of each source come before each of these samples: int64 [n, sources].

        samples: [n], also the one after the last of the phase. key: see `located`.
        """
        _, earlier, blocks, before = self._drawn(samples, key)
        return earlier.T + before[blocks]

    def _drawn(self, samples: NDArray[np.int64], key: np.uint64) -> tuple[NDArray[np.int64], ...]:
        """Return the source of each sample [n]; how many of each source come before it in its block [sources, n].

        And the block of each sample [n], counted from the first one that is asked for, and how many samples of each
        source come before these blocks [blocks, sources].
        """
        blocks, places = np.divmod(samples - self.first, self.size)
        low, high = (int(blocks.min()), int(blocks.max())) if len(blocks) else (0, 0)
        if high - low < len(blocks):
            named, which = np.arange(low, high + 1), blocks - low
        else:
            named, which = np.unique(blocks, return_inverse=True)
        edges = np.union1d(named, named + 1)
        largest = (2 * int(edges.max(initial=0)) * self.size + 1) * sum(self.weights)
        exact = edges if largest < 2**63 else edges.astype(object)  # Python integers for weights of many digits
        table = np.stack(self.before(exact), axis=1).astype(np.int64)
        at = edges.searchsorted(named)
        before = table[at]
        salts = mix(key + (named + self.first_block).astype(np.uint64))
        sources, earlier = drawn(places, which, table[at + 1] - before, salts, self.size)
        return sources, earlier, which, before + np.array(self.consumed, dtype=np.int64)


def drawn(
    places: NDArray[np.int64], which: NDArray[np.int64], counts: NDArray[np.int64], salts: NDArray[np.uint64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each place of a block, and how many earlier places of the block each source has.

    places, which: [n], in which of the blocks; counts: [blocks, sources]; salts: [blocks]; size: of every block, at
    most 2 ** 30. The results are int64 [n] and [sources, n].
    """
    # Halving in place of a shuffle: a rank of 1,024 finds its own places without the others of the block.
    # Of each run: places of the first sources, cumulated, and those of the block before the run. Sources come first,
    # so that inner loops are over many runs: all runs of the blocks while these are fewer than places, [sources,
    # blocks, runs], then that of each place, [sources, n].
    ends = np.cumsum(np.ascontiguousarray(counts.T), axis=0)[:, :, None]
    before = np.zeros_like(ends)
    firsts, runs = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.uint64)
    sizes: Any = size if size & (size - 1) == 0 else np.full(1, size)  # one number if all are equal
    levels, shared = (size - 1).bit_length(), 0
    while shared < levels and 0 < len(counts) << shared + 1 <= len(places):
        halves = sizes // 2
        of_left = _of_left(ends, sizes, mix(salts[:, None] + runs))
        ends, before = _both(of_left, ends - of_left), _both(before, before + of_left)
        firsts, runs = _both(firsts, firsts + halves), _both(2 * runs, 2 * runs + np.uint64(1))
        sizes, shared = halves if isinstance(sizes, int) else _both(halves, sizes - halves), shared + 1
    run = places // sizes if isinstance(sizes, int) else firsts.searchsorted(places, side="right") - 1
    at = which * len(runs) + run
    ends, before = (each.reshape(len(each), -1).take(at, axis=1) for each in (ends, before))
    rest, runs, salts = places - firsts[run], runs[run], salts[which]
    sizes = sizes if isinstance(sizes, int) else sizes[run]
    for _ in range(levels - shared):
        halves, is_right = sizes // 2, rest >= sizes // 2
        of_left = _of_left(ends, sizes, mix(salts + runs))
        before += np.where(is_right, of_left, 0)
        ends = np.where(is_right, ends - of_left, of_left)
        rest -= np.where(is_right, halves, 0)
        sizes = halves if isinstance(sizes, int) else np.where(is_right, sizes - halves, halves)
        runs = 2 * runs + is_right
    sources = (ends == 0).sum(axis=0)
    return sources, np.diff(before, axis=0, prepend=0)


def _of_left(ends: NDArray[np.int64], sizes: Any, hashed: NDArray[np.uint64]) -> Any:
    """Return how many places of the first sources, cumulated, the left parts of runs have."""
    if isinstance(sizes, int):  # a power of two: the same without divisions
        return (ends * (sizes // 2) + (hashed & np.uint64(sizes - 1)).view(np.int64)) >> (sizes.bit_length() - 1)
    return (ends * (sizes // 2) + (hashed % sizes.astype(np.uint64)).astype(np.int64)) // sizes


def _both(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """Return values of runs, the left and the right part of each in turn, along the last axis."""
    shape = *left.shape[:-1], 2 * left.shape[-1]
    return np.stack((left, right), axis=-1).reshape(shape)


def phases(
    stages: Sequence[Stage], limits: Sequence[int | None], stops: Sequence[bool], block_size: int, origin: Origin
) -> tuple[list[Phase], list[int]]:
    """Return the phases of a mixture: at most two for each source that ends and for each stage, and one more.

    limits: total samples of each source, with those before the origin; None: without end. stops: whether the mixture
    ends with the source.
    The block in which a source reaches its limit is a phase of its own: the source gives its remaining samples, and the
    others fill the rest by weight. The next phase is without it. So is the last block of a stage, which is shorter if
    the next stage begins inside it.
    Also returns the sources that stop the mixture in its last block.
    Raises: ValueError if the sources of a stage end before the next stage begins, while others are left.
    """
    run: list[Phase] = []
    first, first_block, consumed = origin.sample, 0, list(origin.positions)
    left = [None if n is None else max(0, n - count) for n, count in zip(limits, consumed, strict=True)]
    ends = [stage.first for stage in stages[1:]]
    for stage, end in zip(stages, [*ends, None], strict=True):
        while any(n != 0 for n in left) and (end is None or first < end):
            active = [0 if n == 0 else weight for weight, n in zip(stage.whole, left, strict=True)]
            if not any(active) and end is None:
                return run, []
            if not any(active):
                raise ValueError(
                    f"weights: the sources drawn from sample {stage.first} on end at sample {first}, before the next "
                    f"stage begins at {end}: begin it at {first} or before, or let one of them repeat"
                )
            phase = Phase(first, first_block, block_size, None, consumed, active)
            blocks, size = phase.whole_blocks(left, end)
            if size is None:
                return [*run, phase], []
            for part in phase.parts(blocks, size, left):
                run.append(part)
                number = part.blocks or 0
                first, first_block, counts = first + number * part.size, first_block + number, part.before(number)
                consumed, left = _plus(consumed, counts), _less(left, counts)
            stopped = [s for s, stop in enumerate(stops) if stop and left[s] == 0]
            if stopped:
                return run, stopped
    return run, []


def _plus(counts: Sequence[int], others: Sequence[int]) -> list[int]:
    return [count + other for count, other in zip(counts, others, strict=True)]


def _minus(counts: Sequence[int], others: Sequence[int]) -> list[int]:
    return [count - other for count, other in zip(counts, others, strict=True)]


def _less(left: Sequence[int | None], counts: Sequence[int]) -> list[int | None]:
    return [None if n is None else n - count for n, count in zip(left, counts, strict=True)]


def _filled(wanted: Sequence[int], weights: Sequence[int], left: Sequence[int | None]) -> list[int]:
    """Return the counts of a block: a source gives at most the samples it has left; the others fill up by weight."""
    counts = [count if n is None else min(count, n) for count, n in zip(wanted, left, strict=True)]
    while lacking := sum(wanted) - sum(counts):
        able = [s for s, n in enumerate(left) if weights[s] and (n is None or counts[s] < n)]
        if not able:
            break
        for s, more in zip(able, _largest_remainder(lacking, [weights[s] for s in able]), strict=True):
            room = left[s]
            counts[s] += more if room is None else min(more, room - counts[s])
    return counts


def _largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    quotas = [divmod(total * weight, sum(weights)) for weight in weights]
    counts = [whole for whole, _ in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda s: (-quotas[s][1], s))
    for s in by_remainder[: total - sum(counts)]:
        counts[s] += 1
    return counts
