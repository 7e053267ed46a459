"""Rows that are read for several batches at once, and cut into batches: each batch is two casts and a few small copies.

A batch of short rows, read alone, would spend most of its time in the overhead of calls on small arrays.

Ahead         reads rows for the next batches together, and hands out the rows of each
ReadRows      ids, targets and segments of rows that were read
PlacedPieces  which tokens of a split some rows hold; `read_pieces` reads them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.formats import IGNORE_INDEX, Ids
from niels_gpt.cache.pretrain_dataset import PretrainSplit, empty_int64
from niels_gpt.sampling.batch import Rows, Segments
from niels_gpt.storage.errors import CacheError

Numbers = NDArray[np.int64]

_TOKENS_AHEAD = 1 << 20  # 2 MiB of ids of 16 bits
_BATCHES_AHEAD = 64  # so that the first batch of a stream of short rows does not wait for thousands


class Ahead:
    """Located rows that are read for several batches at once, where the calls of each batch would cost more."""

    def __init__(self, total: int, T: int, make: Callable[[slice], ReadRows], *, slowly: bool = False) -> None:
        """total: rows that are located. make: reads some of them.

        slowly: read one batch at first, then two, four and so on: where rows are fetched, the first batch waits for
            no others.
        """
        self._total, self._T, self._make = total, T, make
        self._batches = 1 if slowly else _BATCHES_AHEAD
        self._kept: tuple[int, int, ReadRows] | None = None

    def read(self, first: int, count: int, device: str) -> Rows:
        """Return rows first to first + count - 1; see `Located`."""
        if not count:
            empty = torch.empty((0, self._T), dtype=torch.int64, device=device)
            return Rows(empty, empty.clone(), Segments.whole_rows(0, self._T))
        kept = self._kept
        if kept is None or first < kept[0] or first + count > kept[1]:
            self._kept = kept = self._made(first, count)
        return kept[2].part(first - kept[0], count, device)

    def _made(self, first: int, count: int) -> tuple[int, int, ReadRows]:
        """Read the rows of up to _BATCHES_AHEAD batches, or of as many as have _TOKENS_AHEAD tokens."""
        batches = min(max(1, _TOKENS_AHEAD // (count * self._T)), self._batches)
        self._batches = min(2 * self._batches, _BATCHES_AHEAD)
        last, stop = first + count, min(first + batches * count, self._total)
        try:
            return first, stop, self._make(slice(first, stop))
        except CacheError:
            if stop == last:
                raise
        return first, last, self._make(slice(first, last))  # the damage may be in a row of a later batch


class ReadRows:
    """Rows [R, T] with their targets and segments."""

    def __init__(
        self,
        x: Ids,
        y: NDArray[Any],
        segments: tuple[NDArray[np.int32], Numbers, Numbers],
        others: tuple[Numbers, Numbers] | None = None,
    ) -> None:
        """x, y: [R, T] ids and targets, each of any dtype; y has -100 where there is no target, if its dtype is signed.

        segments: their starts in all rows end to end, and R * T: int32 [K + 1]; their pieces and documents, see
        `Segments`: int64 [2, K]; how many each row has, 1 or more: int64 [R]. others: places in y.reshape(-1),
        ascending, and the targets there that y does not have: int64 [n] both; None: y has all.
        """
        (self._starts, self._numbers, counts), self._others = segments, others
        self._x, self._y, (rows, self._T) = x, y, x.shape
        stops = counts.cumsum()
        self._stops = [0, *stops.tolist()]
        self._longest: list[int] = np.maximum.reduceat(np.diff(self._starts), stops - counts).tolist()
        if others is not None:
            self._other_stops: list[int] = others[0].searchsorted(np.arange(rows + 1) * self._T).tolist()

    def part(self, first: int, count: int, device: str) -> Rows:
        """Return rows first to first + count - 1."""
        last, begin = first + count, first * self._T
        at, to = self._stops[first], self._stops[last]
        pieces, documents = self._numbers[:, at:to].copy()
        segments = Segments(self._starts[at : to + 1] - begin, pieces, documents, max(self._longest[first:last]))
        x, y = empty_int64((2, count, self._T))  # one array: the memory of two large ones is used again
        x[...], y[...] = self._x[first:last], self._y[first:last]
        if self._others is not None:
            places, targets = self._others
            some = slice(self._other_stops[first], self._other_stops[last])
            y.reshape(-1)[places[some] - begin] = targets[some]
        return Rows(_moved(x, device), _moved(y, device), segments)


def _moved(values: Numbers, device: str) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    if str(device) == "cpu":
        return tensor
    on_cuda = torch.device(device).type == "cuda"  # pinned, so that the call does not wait for the copy
    return (tensor.pin_memory() if on_cuda else tensor).to(device, non_blocking=on_cuda)


class PlacedPieces(NamedTuple):
    """The pieces of some rows, in their order, each of at most T tokens."""

    counts: Numbers
    """Number of pieces of each row, 1 or more: int64 [R]."""
    numbers: Numbers
    """Number of each piece, and of its document: int64 [2, n]."""
    begins: Numbers
    """First token of each piece, in tokens of the split: int64 [n]."""
    ends: Numbers
    """int64 [n]."""
    is_cut: NDArray[np.bool_] | None
    """Whether token ends[i] is the target of the last token of piece i: bool [n]; None: of none."""
    opened: NDArray[np.bool_] | None = None
    """Whether each piece begins inside a reply, in a split of chats without loss bits: bool [n]; None: none does."""


def read_pieces(split: Any, placed: PlacedPieces, T: int, pad_id: int) -> ReadRows:
    """Read rows of T tokens, each of whole pieces and padding after them.

    split: `PretrainSplit` or `SFTSplit`. Raises: CacheError E409 for an id outside the vocabulary.
    """
    lengths = placed.ends - placed.begins
    lasts = placed.counts.cumsum() - 1  # the last piece of each row
    filled = lengths.cumsum()[lasts]
    filled[1:] -= filled[:-1].copy()
    pads = np.zeros(len(lengths), dtype=np.int64)  # tokens of padding after each piece
    pads[lasts] = T - filled
    stops, size = (lengths + pads).cumsum() - pads, len(lasts) * T  # where each piece ends in the rows, end to end
    cut = np.zeros(0, dtype=np.int64) if placed.is_cut is None else placed.is_cut.nonzero()[0]
    ids = split.read(*_with_targets(placed, pads, cut), pad_id)
    x, segments = ids[:size].reshape(-1, T), _segments(placed, stops, filled, T)
    if isinstance(split, PretrainSplit):
        return ReadRows(x, _next(ids, size).reshape(-1, T), segments, _others(stops, pads, cut, ids[size:]))
    masked, has_loss = split.masked_ranges(ids[:size], (placed.begins, placed.ends, stops), placed.opened, cut)
    y = np.empty_like(masked)
    y[:-1] = masked[1:]
    y[stops - lengths - 1] = IGNORE_INDEX  # before the first token of each piece; y[-1] before that of the first piece
    y[stops[cut] - 1] = np.where(has_loss, ids[size:], np.int64(IGNORE_INDEX))
    return ReadRows(x, y.reshape(-1, T), segments)


def _next(ids: Ids, size: int) -> Ids:
    """Return the next one of each of the first `size` ids, a view where there is one; after the last one any id."""
    return ids[1 : size + 1] if len(ids) > size else np.append(ids[1:], ids[:1])


def _others(stops: Numbers, pads: Numbers, cut: Numbers, last_targets: Ids) -> tuple[Numbers, Numbers]:
    """Return where the target of a text is not the next id of its row, and that target: int64 [n] both.

    That is the last token of each piece, and all of its padding: a target of -100, and of cut pieces `last_targets`.
    """
    sizes = pads[: len(stops)] + 1
    ends: Numbers = sizes.cumsum()
    places: Numbers = np.repeat(stops - 1 - (ends - sizes), sizes)
    places += np.arange(len(places))
    targets: Numbers = np.full(len(places), IGNORE_INDEX, dtype=np.int64)
    targets[(ends - sizes)[cut]] = last_targets
    return places, targets


def _with_targets(placed: PlacedPieces, pads: Numbers, cut: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return begins, ends and padding of all pieces, and behind them of the last targets of those that are cut."""
    if not len(cut):
        return placed.begins, placed.ends, pads
    after = placed.ends[cut]
    ends = np.concatenate((placed.ends, after + 1))
    return np.concatenate((placed.begins, after)), ends, np.concatenate((pads, np.zeros_like(cut)))


def _segments(
    placed: PlacedPieces, stops: Numbers, filled: Numbers, T: int
) -> tuple[NDArray[np.int32], Numbers, Numbers]:
    """Return `starts`, `numbers` and `counts` of `ReadRows`: a segment of each piece, and one of a row's padding.

    stops: of each piece, in the rows read one after the other; filled: the tokens of pieces in each row: [R].
    """
    (short,) = (filled < T).nonzero()
    starts, numbers, counts = np.concatenate((np.zeros(1, np.int64), stops)), placed.numbers, placed.counts
    if len(short):
        at = counts.cumsum()[short]  # the padding comes before these pieces
        counts = counts.copy()
        counts[short] += 1
        is_piece = np.ones(len(stops) + len(short), dtype=np.bool_)
        is_piece[at + np.arange(len(short))] = False
        ends = np.empty(len(is_piece), dtype=np.int64)
        ends[is_piece], ends[~is_piece] = stops, (short + 1) * T
        starts, numbers = np.concatenate((starts[:1], ends)), np.full((2, len(is_piece)), -1)
        numbers[:, is_piece] = placed.numbers
    return starts.astype(np.int32), numbers, counts
