"""Bins: groups of samples under a token budget, for the micro-batches of a step and for several ranks.

    bins = pack(groups, max_tokens=16_384, ranks=4)        # the same on all ranks
    for each in bins[rank::4]:                             # as many bins on each rank, of about equal work
        loss = summed_loss(each.forest) / sum(one.loss_tokens for one in bins)
        loss.backward()                                    # the sum over bins is the gradient of all samples in one row

A bin is a set of samples, and its forest is one row. A group stays in one bin where it fits. A larger group is cut in
depth-first order, so that a piece shares as much as it can; each piece computes the shared tokens once. Each sample is
in one bin. Nothing is drawn: equal input gives equal bins.

`plan_bins` decides only on integers: the length of each sample, and the tokens that it shares with its predecessor in
depth-first order. They give tokens and attention pairs of any selection of samples without its forest.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from niels_gpt.prefix_tree.forest import SHAPE_7B, ModelShape, PrefixForest
from niels_gpt.prefix_tree.radix import Ints
from niels_gpt.storage.errors import TreeError, TreeTypeError

OVERSIZE = ("error", "own_bin")


class SampleSizes(NamedTuple):
    """The samples of groups in the depth-first order of their trees, one group after another."""

    lengths: Ints  # [S] tokens of each sample, at least 1
    shared: Ints  # [S] tokens that a sample shares with the sample before it; 0 for the first of a group
    group_offsets: Ints  # [G + 1] where a group begins

    @classmethod
    def of(cls, forests: Sequence[PrefixForest]) -> tuple[SampleSizes, Ints]:
        """Return the sizes of forests, each of them a group; and the number of each sample over all of them."""
        parts = [_depth_first(forest) for forest in forests]
        counts = np.array([0, *(forest.num_samples for forest in forests)]).cumsum()
        order = np.concatenate([part[0] + start for part, start in zip(parts, counts[:-1], strict=True)])
        lengths, shared = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
        return cls(lengths, shared, counts), order


def _depth_first(forest: PrefixForest) -> tuple[Ints, Ints, Ints]:
    """Return the samples in depth-first order, their lengths, and the tokens that each shares with its predecessor."""
    ends = forest.sample_ends.numpy(force=True)
    order = ends.argsort(kind="stable")  # nodes are in pre-order, so a sample comes before those that continue it
    lengths, nodes = forest.sample_lengths.numpy(force=True)[order], ends[order]
    above = forest.position_ids.numpy(force=True)[forest.node_starts.numpy(force=True)]  # tokens above each node
    shared = np.zeros(len(order), dtype=np.int64)
    # Two samples share all tokens above the node that begins highest between their ends: it hangs on the last node that
    # both have.
    if len(order) > 1:
        between = _least_between(above, nodes)
        shared[1:] = np.where(nodes[1:] == nodes[:-1], lengths[1:], between)
    return order, lengths, shared


def _least_between(values: Ints, places: Ints) -> Ints:
    """Return the least value after each place, up to the next place: [places - 1].

    Undefined between equal places.
    """
    bounds = np.stack([places[:-1] + 1, places[1:] + 1], 1).ravel()
    least: Ints = np.minimum.reduceat(np.append(values, 0), bounds)[::2]
    return least


class _Item(NamedTuple):
    """A group, or a piece of one: it stays in one bin. Ordered by work, then by place."""

    work: int
    begin: int
    end: int
    tokens: int


@dataclass(frozen=True, eq=False)
class BinPlan:
    """Which samples are in which bin. Bin i is the one of rank i % ranks in round i // ranks."""

    bins: list[Ints]
    """For each bin its samples, as rising indices into the sizes."""
    marginal_tokens: list[Ints]
    """For each bin the tokens that each of its samples adds, in the order of `bins`."""
    pairs: list[int]
    """Attention pairs of each bin."""
    ranks: int
    shape: ModelShape
    """Decides what a token and a pair cost."""

    @cached_property
    def tokens(self) -> list[int]:
        """Return the tokens of each bin after folding."""
        return [int(tokens.sum()) for tokens in self.marginal_tokens]

    @cached_property
    def work(self) -> list[int]:
        """Return the FLOPs of each bin."""
        return [self.shape.training_flops(*each) for each in zip(self.tokens, self.pairs, strict=True)]

    @property
    def imbalance(self) -> float:
        """Return the work of the busiest rank over the mean of all ranks: 1 where it is equal."""
        ranks = [sum(self.work[rank :: self.ranks]) for rank in range(self.ranks)]
        return max(ranks) * self.ranks / sum(ranks)

    @property
    def round_imbalance(self) -> float:
        """Return the imbalance where ranks wait for each other after each bin: the largest bin of each round counts."""
        rounds = [self.work[first : first + self.ranks] for first in range(0, len(self.bins), self.ranks)]
        return sum(map(max, rounds)) * self.ranks / sum(self.work)


def plan_bins(
    sizes: SampleSizes,
    max_tokens: int,
    *,
    ranks: int = 1,
    oversize: str = "error",
    shape: ModelShape = SHAPE_7B,
    names: Sequence[Any] | None = None,
) -> BinPlan:
    """Decide which samples are folded together, only from their sizes.

    Args:
        sizes: lengths and shared tokens of the samples.
        max_tokens: the most tokens of a bin after folding.
        ranks: processes that share the bins. Each gets the same number; the largest groups are cut if there are too
            few.
        oversize: for a sample of more than max_tokens: "error", or "own_bin", a bin that exceeds the budget.
        shape: sizes of the model, for the work of a bin. Its head is not counted: `sizes` do not say which rows have a
            loss.
        names: [S], the samples in errors. Default: their indices.

    With one rank the largest group comes first and goes into the fullest bin that has room (best fit decreasing).
    With more, the number of bins is fixed and each group goes into the bin with the least work that has room.

    Raises:
        TreeError (E801): a sample is larger than the budget, there are fewer samples than ranks, or an argument is out
            of range.
        TreeTypeError (E801): max_tokens or ranks is not a whole number.
    """
    for name, number in (("max_tokens", max_tokens), ("ranks", ranks)):
        if not isinstance(number, int | np.integer):
            raise TreeTypeError(f"{name} is {number!r}; expected a whole number")
    if max_tokens < 1 or ranks < 1 or oversize not in OVERSIZE:
        raise TreeError(
            f"max_tokens is {max_tokens}, ranks {ranks} and oversize {oversize!r}; expected 1 or more, 1 or more, and "
            f"one of {', '.join(OVERSIZE)}"
        )
    _check(sizes)
    measure = _Measure(sizes, shape)
    over = np.flatnonzero(sizes.lengths > max_tokens)
    if len(over) and oversize == "error":
        first = int(over[0])
        raise TreeError(
            f"sample {first if names is None else names[first]} has {sizes.lengths[first]} tokens, the "
            f"first of {len(over)} above max_tokens, {max_tokens}. Raise max_tokens to {sizes.lengths.max()} or "
            'more, cut the samples, or pass oversize="own_bin"'
        )
    if len(sizes.lengths) < ranks:
        raise TreeError(f"there are {len(sizes.lengths)} samples for {ranks} ranks; expected one for each at least")
    items = measure.items(max_tokens)
    found = _best_fit(items, max_tokens)
    if ranks > 1:
        found = _over_ranks(measure, items, len(found), max_tokens, ranks)
    bins = [np.concatenate([np.arange(item.begin, item.end) for item in sorted(each, key=_begin)]) for each in found]
    return BinPlan(bins, *measure.marginal(bins), ranks, shape)


def _check(sizes: SampleSizes) -> None:
    lengths, shared, offsets = map(np.asarray, sizes)
    whole = len(shared) == len(lengths) and len(offsets) > 0 and (offsets[0], offsets[-1]) == (0, len(lengths))
    before = np.append(0, lengths[:-1])
    if (
        not whole
        or np.any(np.diff(offsets) < 0)
        or np.any((lengths < 1) | (shared < 0) | (shared > np.minimum(lengths, before)))
    ):
        raise TreeError(
            "sizes: expected lengths of 1 or more, of shared tokens at most the lengths of the sample and of the one "
            "before it, and offsets of groups that rise from 0 to the number of samples"
        )


def _begin(item: _Item) -> int:
    return item.begin


class _Measure:
    """Tokens, attention pairs and work of any run of samples, from running sums."""

    def __init__(self, sizes: SampleSizes, shape: ModelShape) -> None:
        self.sizes, self.shape = sizes, shape
        lengths, shared = sizes.lengths, sizes.shared
        self.tokens = np.concatenate([[0], np.cumsum(lengths - shared)])
        self.pairs = np.concatenate([[0], np.cumsum(_triangle(lengths) - _triangle(shared))])

    def item(self, begin: int, end: int) -> _Item:
        """Return a run of samples of one group. The first one adds all of its tokens, also shared ones."""
        above = int(self.sizes.shared[begin])
        tokens = int(self.tokens[end] - self.tokens[begin]) + above
        pairs = int(self.pairs[end] - self.pairs[begin]) + above * (above + 1) // 2
        return _Item(self.shape.training_flops(tokens, pairs), begin, end, tokens)

    def items(self, max_tokens: int) -> list[_Item]:
        """Return each group as one run; a group above the budget as few runs as possible."""
        items: list[_Item] = []
        for begin, end in pairwise(self.sizes.group_offsets.tolist()):
            at = begin
            while at < end:
                room = int(self.tokens[at]) + max_tokens - int(self.sizes.shared[at])
                stop = min(end, int(self.tokens.searchsorted(room, side="right")) - 1)
                items.append(self.item(at, max(stop, at + 1)))  # a sample above the budget: its own
                at = items[-1].end
        return items

    def halves(self, item: _Item) -> list[_Item]:
        """Cut a run into two of about the same number of tokens."""
        begin, end = item.begin, item.end
        first = self.tokens[begin + 1 : end] - self.tokens[begin] + self.sizes.shared[begin]
        second = self.tokens[end] - self.tokens[begin + 1 : end] + self.sizes.shared[begin + 1 : end]
        at = begin + 1 + int(np.maximum(first, second).argmin())
        return [self.item(item.begin, at), self.item(at, item.end)]

    def marginal(self, bins: list[Ints]) -> tuple[list[Ints], list[int]]:
        """Return for each bin the tokens that each sample adds to its predecessors, and the pairs of the bin."""
        samples, ends = np.concatenate(bins), np.cumsum([len(each) for each in bins])
        lengths = self.sizes.lengths[samples]
        shared = np.zeros(len(samples), dtype=np.int64)
        # Over a gap two samples share the least that neighbours share between them; 0 between groups.
        if len(samples) > 1:
            shared[1:] = _least_between(self.sizes.shared, samples)
            shared[ends[:-1]] = 0
        pairs = np.add.reduceat(_triangle(lengths) - _triangle(shared), np.append(0, ends[:-1]))
        return np.split(lengths - shared, ends[:-1]), pairs.tolist()


def _triangle(tokens: Ints) -> Ints:
    return tokens * (tokens + 1) // 2


def _best_fit(items: Iterable[_Item], max_tokens: int) -> list[list[_Item]]:
    """Put items into the fullest bin that has room, the largest first."""
    bins: list[list[_Item]] = []
    room: list[tuple[int, int]] = []  # rising: tokens left in a bin, its number
    for item in sorted(items, key=lambda item: (-item.tokens, item.begin)):
        place = bisect_left(room, (item.tokens, -1))
        left, number = room.pop(place) if place < len(room) else (max_tokens, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(item)
        if left > item.tokens:
            insort(room, (left - item.tokens, number))
    return bins


def _over_ranks(measure: _Measure, items: list[_Item], least: int, max_tokens: int, ranks: int) -> list[list[_Item]]:
    """Return bins round by round, of about equal work; their number is a multiple of `ranks`, at least `least`.

    Tries a number of bins; if the greedy filling finds no room, a hundredth more. Cuts the group with the most work
    while there are fewer runs than bins.
    """
    count = -(-least // ranks) * ranks
    whole = [item for item in items if item.end - item.begin == 1]
    cuttable = [(-item.work, item.begin, item) for item in items if item.end - item.begin > 1]
    heapq.heapify(cuttable)
    while True:
        while len(whole) + len(cuttable) < count:
            if not cuttable:
                raise TreeError(
                    f"{len(whole)} samples cannot make {count} bins, the same number for each of {ranks} ranks. Use "
                    "fewer ranks, or more samples in a step"
                )
            for half in measure.halves(heapq.heappop(cuttable)[2]):
                if half.end - half.begin == 1:
                    whole.append(half)
                else:
                    heapq.heappush(cuttable, (-half.work, half.begin, half))
        bins = _least_work([*whole, *(item for *_, item in cuttable)], count, max_tokens)
        if bins is not None:
            return _dealt(bins, ranks)
        count += -(-count // (100 * ranks)) * ranks


def _least_work(items: list[_Item], count: int, max_tokens: int) -> list[list[_Item]] | None:
    """Put items into the bin with the least work; if it has no room, into the emptiest. None: no bin has room."""
    bins: list[list[_Item]] = [[] for _ in range(count)]
    work, tokens = [0] * count, [0] * count
    # Heaps with lazy deletion: a bin that grows gets a new entry, and `_first` skips its old ones.
    lightest, emptiest = ([(0, number) for number in range(count)] for _ in range(2))
    for item in sorted(items, key=lambda item: (-item.work, item.begin)):
        number = _first(lightest, work)
        if tokens[number] and tokens[number] + item.tokens > max_tokens:
            number = _first(emptiest, tokens)
            if tokens[number] + item.tokens > max_tokens:
                return None
        bins[number].append(item)
        work[number] += item.work
        tokens[number] += item.tokens
        heapq.heappush(lightest, (work[number], number))
        heapq.heappush(emptiest, (tokens[number], number))
    return bins


def _first(waiting: list[tuple[int, int]], now: list[int]) -> int:
    """Return the bin with the least amount, now[number], from a heap that may hold outdated entries."""
    while waiting[0][0] != now[waiting[0][1]]:
        heapq.heappop(waiting)
    return waiting[0][1]


def _dealt(bins: list[list[_Item]], ranks: int) -> list[list[_Item]]:
    """Return bins in rounds of similar work; in each, the rank with the least work so far gets the most."""
    done = [0] * ranks
    dealt: list[list[_Item]] = []
    heaviest = sorted(bins, key=lambda each: (-sum(item.work for item in each), each[0].begin))
    for first in range(0, len(bins), ranks):
        here: list[list[_Item]] = [[]] * ranks
        ready = sorted(range(ranks), key=lambda rank: (done[rank], rank))
        for rank, each in zip(ready, heaviest[first : first + ranks], strict=True):
            here[rank] = each
            done[rank] += sum(item.work for item in each)
        dealt += here
    return dealt


# --- forests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bin:
    """Samples that are folded into one row. The forest is made at its first use."""

    samples: Tensor
    """int64 [S], the number of each sample of `forest`, counted over all groups; groups in their order."""
    marginal_tokens: Tensor
    """int64 [S], the tokens that each sample adds to the row; shared ones count for the first in depth-first order."""
    pairs: int
    """Attention pairs."""
    loss_tokens: int
    """Targets that a row predicts. Divide a summed loss by the sum of loss_tokens of the step, over all ranks' bins."""
    parts: Sequence[tuple[PrefixForest, Tensor]]
    """The group of each part of the row, and the samples of that group."""

    @property
    def tokens(self) -> int:
        """Return the tokens of the row, without padding."""
        return int(self.marginal_tokens.sum())

    @cached_property
    def forest(self) -> PrefixForest:
        """Return the samples as one row."""
        return PrefixForest.joined([forest.subset(samples) for forest, samples in self.parts])


def pack(
    samples: Sequence[Any],
    max_tokens: int,
    *,
    groups: Iterable[Hashable] | None = None,
    loss_mask: Sequence[Any] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    ranks: int = 1,
    oversize: str = "error",
    shape: ModelShape = SHAPE_7B,
) -> list[Bin]:
    """Return bins of at most max_tokens tokens that hold each sample once; rank r of R takes bins[r::R].

    Args:
        samples: forests, each of them a group; or sequences of ids, as in PrefixForest.from_sequences.
        max_tokens: the most tokens of a row.
        groups: for sequences: a list, array or tensor with the group of each, such as the id of its prompt. Samples of
            different groups share nothing. Default: one group.
        loss_mask, prompt_lengths: for sequences, as in PrefixForest.from_sequences.
        ranks, oversize, shape: as in `plan_bins`.

    Raises:
        TreeError (E801): a sample is larger than the budget, there are fewer samples than ranks, arguments do not fit
            each other, or an argument for sequences comes with forests.
        TreeTypeError (E801): an id is not an integer, or max_tokens or ranks is not a whole number.
    """
    forests, numbers = _grouped(samples, groups, loss_mask, prompt_lengths)
    sizes, order = SampleSizes.of(forests)
    plan = plan_bins(sizes, max_tokens, ranks=ranks, oversize=oversize, shape=shape, names=numbers[order].tolist())
    group = np.repeat(np.arange(len(forests)), np.diff(sizes.group_offsets))
    targets = np.concatenate([_loss_tokens(forest) for forest in forests])
    bins = []
    for places, marginal, pairs in zip(plan.bins, plan.marginal_tokens, plan.pairs, strict=True):
        chosen = order[places]
        row = chosen.argsort()  # groups are in order already
        chosen = chosen[row]
        cuts = np.flatnonzero(np.diff(group[chosen])) + 1
        parts = [
            (forests[group[part[0]]], torch.from_numpy(part - sizes.group_offsets[group[part[0]]]))
            for part in np.split(chosen, cuts)
        ]
        mine, adds = torch.from_numpy(numbers[chosen]), torch.from_numpy(marginal[row])
        bins.append(Bin(mine, adds, pairs, int(targets[chosen].sum()), parts))
    return bins


def _grouped(
    samples: Sequence[Any],
    groups: Iterable[Hashable] | None,
    loss_mask: Sequence[Any] | None,
    prompt_lengths: Sequence[int] | None,
) -> tuple[list[PrefixForest], Ints]:
    """Return a forest for each group, and the caller's number of each of their samples."""
    samples = list(samples)
    if samples and all(isinstance(each, PrefixForest) for each in samples):
        if not groups is loss_mask is prompt_lengths is None:
            raise TreeError("forests have their groups, masks and prompts; expected these arguments for sequences only")
        return samples, np.arange(sum(forest.num_samples for forest in samples))
    keys = [0] * len(samples) if groups is None else _plain(groups)
    prompt_lengths = None if prompt_lengths is None else _plain(prompt_lengths)
    given = {"groups": keys, "loss_mask": loss_mask, "prompt_lengths": prompt_lengths}
    for name, values in given.items():
        if values is not None and len(values) != len(samples):
            raise TreeError(f"there are {len(values)} {name} for {len(samples)} samples; expected one for each")
    members: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        members.setdefault(key, []).append(number)
    forests = [
        PrefixForest.from_sequences(
            [samples[number] for number in numbers],
            loss_mask=None if loss_mask is None else [loss_mask[number] for number in numbers],
            prompt_lengths=None if prompt_lengths is None else [prompt_lengths[number] for number in numbers],
        )
        for numbers in members.values()
    ]
    if not forests:
        raise TreeError("there are no samples; expected at least one")
    return forests, np.concatenate([np.array(numbers, dtype=np.int64) for numbers in members.values()])


def _plain(values: Iterable[Any]) -> list[Any]:
    """Return values without tensors: as keys, tensors equal nothing but themselves."""
    values = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
    return [value.tolist() if isinstance(value, Tensor) else value for value in values]


def _loss_tokens(forest: PrefixForest) -> Ints:
    """Return for each sample its targets but the first token, which no row predicts."""
    wanted, offsets = forest.loss_mask.numpy(force=True).astype(np.int64), forest.sample_offsets.numpy(force=True)
    sums: Ints = np.add.reduceat(wanted, offsets[:-1]) - wanted[offsets[:-1]]
    return sums
