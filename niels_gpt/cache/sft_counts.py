"""What T and its settings make of an sft split: rows, truncated and lost tokens, and the warning.

One pass over a split when a reader opens it: `count_rows`. A row is at most T + 1 tokens of one example: its first
ones, or with over_length="split" a window of it: ceil((L - 1) / T) windows at stride T in L tokens, so that
each target is in exactly one row.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import reply_edges
from niels_gpt.cache.mmap import public_file, public_name
from niels_gpt.cache.sft_split import Numbers, SFTSplit
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.errors import CacheError

OverLength = Literal["truncate", "drop", "error", "split"]
"""An example of more than T + 1 tokens is truncated (PR-03), dropped, an error at opening, or split into rows."""

_BLOCK_TOKENS = 1 << 20  # counted at once
_WARN_SHARE = 0.05  # of the supervised tokens
_PACKAGE = str(Path(__file__).parent.parent) + os.sep


@dataclass(frozen=True)
class SFTCounts:
    """How T and the settings of a dataset change a split; a row is an example in a batch, truncated and padded."""

    examples: int  # of the split
    rows: int  # that batches are drawn from: examples without the two kinds left out
    rows_cut: int  # truncated: of examples of more than T + 1 tokens
    rows_dropped: int  # by over_length="drop"
    rows_without_last_eot: int  # truncated before the example's last EOT; with loss bits before its last target
    rows_without_target: int  # y_masked is -100 everywhere
    rows_left_out_without_target: int  # by require_targets
    supervised_tokens: int  # of all whole examples, as in meta.json
    supervised_tokens_lost: int  # those in no row: truncated, dropped or left out
    examples_split: int = 0  # into several rows, by over_length="split"


class SFTRows:
    """Which tokens of a split each row has. A row is an example, or with over_length="split" a window of one."""

    def __init__(self, T: int, kept: Numbers | None, firsts: Numbers | None, opened: NDArray[np.bool_] | None) -> None:
        """kept: the numbers of the examples or windows that are rows, ascending; None: all are.

        firsts: int64 [N + 1], the windows before each example, and all of them; None: a row is the example's beginning.
        opened: bool [windows], those that begin inside a reply.
        """
        self.T, self.kept, self.firsts, self.opened = T, kept, firsts, opened

    def places(self, split: SFTSplit, rows: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return where rows are: begins and ends, at most T + 1 tokens apart, their pieces, and their examples.

        begins, ends: as in `SFTSplit`. A piece is an example, or with over_length="split" a window; both count from 0
        through the split, those that are no rows included.
        """
        pieces = examples = rows if self.kept is None else self.kept[rows]
        if self.firsts is not None:
            examples = self.firsts.searchsorted(pieces, "right") - 1
        begins, ends = split.bounds(examples)
        if self.firsts is not None:
            begins = begins + (pieces - self.firsts[examples]) * self.T
        return begins, np.minimum(ends, begins + (self.T + 1)), pieces, examples


def windows_of(lengths: Numbers, T: int) -> Numbers:
    """Return the number of rows that an example of each length is split into: int64, at least 1."""
    return np.maximum(-(-(lengths - 1) // T), 1)


def count_rows(split: SFTSplit, *, T: int, over_length: OverLength, require_targets: bool) -> tuple[SFTCounts, SFTRows]:
    """Return what T and the settings make of a split, and its rows. All tokens, or all loss bits, are read once.

    Raises: CacheError if no row is left, for offsets or bits of other tokens, and with over_length="error" for an
        example of more than T + 1 tokens.
    """
    totals: Counter[str] = Counter()
    kept, num_windows, opened = [], [], []
    for first, stop in _blocks(split):
        block, is_row, windows, inside = _count_block(split, first, stop, T, over_length, require_targets)
        totals.update(block)
        kept.append(is_row)
        num_windows.append(windows)
        opened.append(inside)
    counts = SFTCounts(**totals)
    if over_length == "error":  # after counting, which refuses offsets of other tokens
        _refuse_over_length(split, T)
    if counts.rows == 0:
        found = (
            f"no row is left: of {counts.examples} examples {counts.rows_dropped} are longer than T + 1 = {T + 1} "
            f"tokens (over_length), and {counts.rows_left_out_without_target} have no target in them (require_targets)"
        )
        raise CacheError(
            public_file(split.tokens_path), found, remedy="Pass a larger T, or other settings", code="E107"
        )
    rows = None if counts.rows == sum(map(len, kept)) else np.concatenate(kept).nonzero()[0]
    if over_length != "split":
        return counts, SFTRows(T, rows, None, None)
    return counts, SFTRows(T, rows, np.cumsum(np.concatenate([[0], *num_windows])), np.concatenate(opened))


def count_targets(split: SFTSplit, *, T: int, over_length: OverLength) -> tuple[int, int]:
    """Return the supervised tokens of a split, and how many of these rows of whole pieces lose: see `PackedStream`.

    A piece of at most T tokens has the token after them as a target too. Only "truncate" and "drop" lose any.
    Raises: CacheError for offsets or bits of other tokens.
    """
    total = left = 0
    for first, stop in _blocks(split):
        starts, ends = split.bounds(np.arange(first, stop))
        limits = {"truncate": starts + T, "drop": np.where(ends - starts > T, starts, ends)}.get(over_length, ends)
        for before, last, _ in _replies(split, first, starts, ends):
            of = ends.searchsorted(last, side="right")
            total += int((last - before).sum())
            left += int(np.maximum(np.minimum(last, limits[of]) - before, 0).sum())
    return total, total - left


def warn_of_counts(split: SFTSplit, counts: SFTCounts, T: int, over_length: OverLength) -> None:
    """Warn the caller of this package of rows without a target, and of more than 5 % of the supervised tokens lost."""
    messages = []
    lost, total = counts.supervised_tokens_lost, counts.supervised_tokens
    if counts.rows_without_target:
        larger = "" if over_length == "split" else "a larger T, or "
        messages.append(
            f"{counts.rows_without_target} of {counts.rows} rows have no target in T + 1 = {T + 1} tokens, and the "
            f"cross entropy of a batch of such rows is nan; {lost} of {total} supervised tokens are lost. "
            f"Pass {larger}require_targets=True"
        )
    if lost > _WARN_SHARE * total:
        kept = _kept_by_t(split, over_length == "drop")
        needed = [int(kept.searchsorted(math.ceil(share * total))) for share in (0.99, 1)]
        most, every = (str(needs) if len(kept) > needs else f"{needs} or more" for needs in needed)
        messages.append(
            f"T={T} loses {lost} of {total} supervised tokens ({lost / total:.1%}). T={most} keeps 99 % of them, "
            f"T={every} all"
        )
    if messages:
        said = CodedWarning("W203", f"{public_name(split.tokens_path)}: {'. '.join(messages)}")
        warnings.warn(said, stacklevel=_levels_to_caller())


def _levels_to_caller() -> int:
    """Return the stacklevel of a warning issued by the caller of this for the first function outside this package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level - 1


def _refuse_over_length(split: SFTSplit, T: int) -> None:
    lengths = np.diff(split.starts)
    too_long, longest = np.count_nonzero(lengths > T + 1), int(lengths.argmax())
    if too_long:
        found = f"{too_long} of {len(split)} examples are longer than T + 1 = {T + 1} tokens, the longest is"
        remedy = f'Pass T={lengths[longest] - 1}, or over_length="truncate" or "drop"'
        path, found = public_file(split.tokens_path), f"{found} example {longest} with {lengths[longest]}"
        raise CacheError(path, found, remedy=remedy, code="E107")


def _blocks(split: SFTSplit) -> Iterator[tuple[int, int]]:
    """Yield the first example of a block, and the one after its last: at most _BLOCK_TOKENS, or one example."""
    starts, first = split.first_tokens, 0
    split.will_read_all()
    while first < len(split):
        stop = max(first + 1, int(starts.searchsorted(starts[first] + _BLOCK_TOKENS, side="right")) - 1)
        yield first, stop
        first = stop


class _Replies(NamedTuple):
    """Runs of supervised tokens, by their places in the token file; a run is in one example."""

    before: Numbers
    """The token before the first one of each run."""
    last: Numbers
    ends: Numbers
    """Tokens that a row should have: each EOT; with loss bits, the last token of each run."""


def _replies(split: SFTSplit, first: int, starts: Numbers, ends: Numbers) -> Iterator[_Replies]:
    """Yield the runs of a block of whole examples, or of one long example piece by piece.

    first: the number of the first example; starts, ends: of the examples. Raises the errors of `SFTSplit.check_starts`.
    """
    begin, end, opened = int(starts[0]), int(ends[-1]), False
    for at in range(begin, end, _BLOCK_TOKENS) if end - begin > _BLOCK_TOKENS else (begin,):
        stop = min(at + _BLOCK_TOKENS, end) if end - begin > _BLOCK_TOKENS else end
        ids = None if split.has_bits else split.unchecked(at, stop)
        if at == begin:
            split.check_starts(first, starts, ids)
        if ids is None:
            yield _by_bits(split, at, stop)
            continue
        stops = ends - at if stop == end else np.array([stop - at])
        found, opened = _by_sentinels(ids, stops, opened, split.sentinels)
        yield _Replies(*(places + at for places in found))


def _by_bits(split: SFTSplit, begin: int, end: int) -> _Replies:
    has_loss = np.zeros(end - begin + 2, dtype=np.int8)
    has_loss[1:-1] = split.is_target(np.zeros(0, np.uint16), np.array([begin]), np.array([end]))
    changes = np.diff(has_loss)
    last = (changes < 0).nonzero()[0] + (begin - 1)
    return _Replies((changes > 0).nonzero()[0] + (begin - 1), last, last)


def _by_sentinels(ids: NDArray[Any], ends: Numbers, opened: bool, sentinels: dict[str, Any]) -> tuple[_Replies, bool]:
    """Return the runs of tokens, by their places in ids, and whether a reply is open after the last token.

    opened: whether one is open before the first.
    """
    places, opens = reply_edges(ids, ends - 1, **sentinels)
    kinds = ids[places]
    is_eot = kinds == sentinels["eot_id"]
    latest = (is_eot | (kinds == sentinels["asst_id"])).nonzero()[0][-1:]
    after = bool(not is_eot[latest[0]]) if len(latest) else opened
    eots = places[is_eot]
    if opened:
        places, opens = np.append(-1, places), np.append(True, opens)
    (begins,) = opens.nonzero()
    return _Replies(places[begins], places[begins + 1], eots), after


def _count_block(
    split: SFTSplit, first: int, stop: int, T: int, over_length: OverLength, require_targets: bool
) -> tuple[dict[str, int], NDArray[np.bool_], Numbers, NDArray[np.bool_]]:
    """Return the counts of examples first to stop - 1; which of their rows are kept; how many rows each has.

    And which of the windows of over_length="split" begin inside a reply.
    """
    starts, ends = split.bounds(np.arange(first, stop))
    count, cut = len(starts), np.minimum(ends, starts + (T + 1)) - 1  # the last token of each when it is truncated
    splits, drop = over_length == "split", over_length == "drop"
    windows = windows_of(ends - starts, T) if splits else np.ones(count, dtype=np.int64)
    targets, left = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    lost_end, (has_target, opened) = np.zeros(count, dtype=np.bool_), np.zeros((2, int(windows.sum())), dtype=np.bool_)
    firsts = np.cumsum(windows) - windows
    for before, last, ends_of_turns in _replies(split, first, starts, ends):
        of = ends.searchsorted(last, side="right")
        targets += np.bincount(of, last - before, count).astype(np.int64)
        left += np.bincount(of, np.maximum(np.minimum(last, cut[of]) - before, 0), count).astype(np.int64)
        behind = ends.searchsorted(ends_of_turns, side="right")
        lost_end |= np.bincount(behind[ends_of_turns > cut[behind]], minlength=count) > 0
        if splits:
            here, (before, last) = firsts[of], (before - starts[of], last - starts[of])
            has_target |= _covered(here + before // T, here + (last - 1) // T, len(has_target))
            # A window begins inside a run if its first token, which is none of its targets, is in it.
            opened |= _covered(here + before // T + 1, here + np.minimum(last // T, windows[of] - 1), len(opened))
    if not splits:
        has_target = left > 0
    is_cut = (ends - starts > T + 1) & (not splits)
    is_dropped = is_cut & drop if drop else np.zeros(len(has_target), dtype=np.bool_)
    is_left_out = ~has_target & ~is_dropped & require_targets
    is_row = ~(is_dropped | is_left_out)
    counts = {
        "examples": count,
        "rows": is_row.sum(),
        "rows_cut": 0 if splits else (is_row & is_cut).sum(),
        "rows_dropped": is_dropped.sum(),
        "rows_without_last_eot": 0 if splits else (is_row & lost_end).sum(),
        "rows_without_target": (is_row & ~has_target).sum(),
        "rows_left_out_without_target": is_left_out.sum(),
        "supervised_tokens": targets.sum(),
        "supervised_tokens_lost": 0 if splits else targets.sum() - left[is_row].sum(),
        "examples_split": (windows > 1).sum(),
    }
    return {name: int(value) for name, value in counts.items()}, is_row, windows, opened


def _covered(first: Numbers, last: Numbers, count: int) -> NDArray[np.bool_]:
    """Return which of 0 to count - 1 are in any of the ranges first[k] to last[k], both included, or empty."""
    changes = np.bincount(first, minlength=count + 1) - np.bincount(last + 1, minlength=count + 1)
    return np.cumsum(changes)[:-1] > 0


def _kept_by_t(split: SFTSplit, drop: bool) -> Numbers:
    """Return how many supervised tokens each T from 0 on keeps: int64 [T]. drop: of whole examples only."""
    size = _BLOCK_TOKENS
    needed = np.zeros(size, dtype=np.int64)
    for first, stop in _blocks(split):
        starts, ends = split.bounds(np.arange(first, stop))
        ends = np.minimum(ends, starts + size)  # of a block of one example
        for before, last, _ in _replies(split, first, starts, ends):
            of = ends.searchsorted(last, side="right")
            needed += _needed(before - starts[of], last - starts[of], (ends - starts)[of], size, drop)
    return np.cumsum(needed)


def _needed(before: Numbers, last: Numbers, lengths: Numbers, size: int, drop: bool) -> Numbers:
    """Return how many supervised tokens need T = t to be in a row of T + 1 tokens, for t below `size`: int64 [size].

    before, last: of runs, from the beginnings of their examples; lengths: of these examples.
    """
    if drop:
        return np.bincount(lengths - 1, last - before, size).astype(np.int64)
    changes = np.bincount(before + 1, minlength=size + 1) - np.bincount(last + 1, minlength=size + 1)
    return np.cumsum(changes)[:size]
