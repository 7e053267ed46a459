"""Decides which item goes to val (D5), how many tokens still fit in a split, and what counts as a duplicate."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.encoding import split_keys
from niels_gpt.engine.stream import Chunk
from niels_gpt.storage.meta_json import open_regular

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEYS = 1 << 64  # values of a split key
_HELD_BYTES = 1 << 30  # documents that wait until both splits have one: on disk above _HELD_IN_MEMORY
_HELD_IN_MEMORY = 8 << 20
_HELD_DOCUMENTS = 100_000
_HELD_CHANCES = 20  # one stream in e**20 has no val document among its first 20 / share documents
_DIGEST_DTYPE: np.dtype[np.uint64] = np.dtype("<u8")
MAX_DIGESTS = 1 << 24
"""Distinct digests in one pass over a file: 128 MiB, and as much again to sort them."""
_READ_LINES = 1 << 12  # at once
_READ_DIGESTS = 1 << 20  # at once
_MAX_PASSES = 4  # over files of digests


class Waiting(NamedTuple):
    """An item as the split sees it while it waits until both splits have one."""

    text: bytes | None
    """The text that decides its split; None if the item enters no split."""
    num_bytes: int
    """Approximate bytes to hold the item."""
    is_kept: Callable[[], bool] = lambda: True
    """Whether the item enters a split. Costly, so called only for an item that could move the bound."""


class TextSplit:
    """Splits documents, chats and groups by text and seed, independent of order, of other items and of the tokenizer.

    The text of a chat is its roles and contents (`chat_text`), the text of a group its id. An item goes to val if its
    text's key (`split_keys`) is below `bound`, which is share * 2**64. So equal texts are always in the same split. If
    all items of a stream would go to one split, `bound` becomes the nearest number that gives each split an item, train
    first.
    """

    def __init__(self, share: Fraction | None, seed: int, *, moves: bool = True) -> None:
        """share: part of the items that goes to val, 0 to 1; None if every item names its split.

        moves: whether the bound may move; False for a partition, which does not know the other documents.
        """
        self.share, self.seed = share, seed
        self.bound = math.ceil((share or 0) * _KEYS)
        """Keys below it go to val. Final once `settled` has yielded its first chunk."""
        self._moves = moves and share is not None and 0 < self.bound < _KEYS

    @property
    def halves(self) -> dict[str, int]:
        """The bound in two halves, for a checkpoint: it may be 2**64, and a journal's numbers are below 2**63."""
        return dict(zip(("high", "low"), divmod(self.bound, 1 << 32), strict=True))

    @halves.setter
    def halves(self, value: Mapping[str, int]) -> None:
        """Set the bound from a checkpoint."""
        self.bound = (value["high"] << 32) + value["low"]

    def in_val(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return bool [keys]: whether the text with each key goes to val."""
        return keys < np.uint64(self.bound) if self.bound < _KEYS else np.ones(len(keys), dtype=np.bool_)

    def settled(
        self, chunks: Iterator[Chunk[T]], folder: Path, waiting: Callable[[T], Waiting | None]
    ) -> Iterator[Chunk[T]]:
        """Yield the chunks once `bound` is final: when both splits have an item, or the stream has ended.

        Until then items wait in an unnamed file in `folder`: at most 1 GiB, 100,000 items, and 20 times the number that
        gives each split one on average. Beyond that, or at an item that names its split, `bound` stays unchanged.
        waiting: returns an item as the split sees it, None if the item names its split.
        """
        if not self._moves:
            yield from chunks
            return
        with tempfile.SpooledTemporaryFile(_HELD_IN_MEMORY, mode="w+b", dir=os.fspath(folder)) as held:
            count = self._hold(chunks, held, waiting)
            held.seek(0)
            for _ in range(count):
                yield pickle.load(held)
        yield from chunks

    @property
    def _most_held(self) -> int:
        assert self.share is not None
        return min(math.ceil(_HELD_CHANCES / min(self.share, 1 - self.share)), _HELD_DOCUMENTS)

    def _hold(
        self,
        chunks: Iterator[Chunk[T]],
        held: tempfile.SpooledTemporaryFile[bytes],
        waiting: Callable[[T], Waiting | None],
    ) -> int:
        """Write chunks to `held` until the bound is known, and set it; return the number of chunks."""
        limit, count, items, num_bytes, lowest, highest = self._most_held, 0, 0, 0, _KEYS, -1
        for count, chunk in enumerate(chunks, 1):
            pickle.dump(chunk, held)
            for each in map(waiting, chunk.items):
                items += 1
                if each is None:
                    return count
                if each.text is not None:
                    key = int(split_keys([each.text], self.seed)[0])
                    if not lowest <= key <= highest and each.is_kept():
                        lowest, highest = min(lowest, key), max(highest, key)
                num_bytes += each.num_bytes
                if lowest < self.bound <= highest or items == limit or num_bytes >= _HELD_BYTES:
                    return count
        if highest >= 0:
            self._move(lowest, highest)
        return count

    def _move(self, lowest: int, highest: int) -> None:
        """Move the bound so that each split has an item. lowest, highest: keys."""
        # min last: a single text has lowest == highest, and goes to train.
        self.bound = min(max(self.bound, lowest + 1), highest)


_AS_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def chat_text(turns: Sequence[tuple[str, Any]]) -> bytes:
    """Return the text that decides a chat's split: its turns as JSON in utf-8, see docs/formats.md.

    turns: role and content of each message; content is None if the message has none.
    """
    return _AS_JSON.encode(turns).encode(errors="surrogatepass")


def asked_share(meta: Mapping[str, Any]) -> Fraction | None:
    """Return the share of val that the settings asked for; None if upstream made the splits, or if it is unknown."""
    if meta.get("val_frac") is not None:
        return Fraction(float(meta["val_frac"]))
    train, val = (meta.get(f"max_{split}_tokens") for split in SPLITS)
    if train is None or val is None:
        return None
    return Fraction(val, train + val) if train + val else Fraction(0)


def warn_of_share(out_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
    """Log W307 if val's share of the tokens is below half of the share that was asked for, or above twice of it.

    A difference of one document of average length is allowed, because a cache of few documents cannot avoid it. The
    bundled sample gets no warning: it is small on purpose.
    """
    asked, tokens = asked_share(meta), [int(meta["totals"][f"{split}_tokens"]) for split in SPLITS]
    if meta["kind"] == "rollouts":
        num = sum(int(meta["totals"][f"{split}_groups"]) for split in SPLITS)
    else:
        num = sum(int(meta["index"][split]["entries"]) - (meta["kind"] == "pretrain") for split in SPLITS)
    if not asked or num < 2 or meta["source"].get("kind") == "sample":
        return
    share, one = Fraction(tokens[1], sum(tokens)), Fraction(1, num)
    if not asked / 2 - one <= share <= 2 * asked + one:
        logger.warning(
            "%s: val has %s of %s tokens, %.1f %%, and %.1f %% were asked for. Documents are split whole, so a few "
            "long ones decide the share: cut them into parts, or use another seed",
            os.fspath(out_dir),
            f"{tokens[1]:,}",
            f"{sum(tokens):,}",
            100 * share,
            100 * asked,
            extra={"code": "W307"},
        )


@dataclass
class TokenBudget:
    """The tokens of each split, and their limits."""

    limits: dict[str, int | None]
    """At most this many tokens in each split; None: no limit."""
    used: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Tokens of each split so far."""

    def __post_init__(self) -> None:
        for split, limit in self.limits.items():
            if limit is not None and limit < 0:
                raise ValueError(f"max_{split}_tokens={limit}: expected 0 or more tokens")

    def room(self, split: str) -> int | None:
        """Return the number of tokens that still fit; None without a limit."""
        limit = self.limits[split]
        return None if limit is None else limit - self.used[split]

    def full(self, split: str) -> bool:
        """Return whether no further token fits."""
        return self.room(split) == 0


def count_duplicates(*paths: Path, folder: Path | None = None, max_digests: int = MAX_DIGESTS) -> int:
    """Return how many of the 8-byte digests in `paths` equal an earlier one there.

    max_digests: most digests in memory, about. The files are read once for each range of that many digests.
    folder: with more than 4 ranges, the digests are instead written once, sorted by range, to an unnamed file here.
    """
    count = sum(path.stat().st_size // _DIGEST_DTYPE.itemsize for path in paths)
    passes = max(1, -(-count // max_digests))
    if folder is None or passes <= _MAX_PASSES:
        ranges = (_of_range(paths, number, passes) for number in range(passes))
        return count - sum(_num_distinct(digests, max_digests) for digests in ranges)
    with tempfile.TemporaryFile(dir=folder) as file:
        stops = _write_by_range(paths, passes, file)
        parts = (_part(file, start, stop) for start, stop in pairwise(stops))
        return count - sum(_num_distinct(digests, max_digests) for digests in parts)


def count_repeated_lines(path: Path, count: int, *, max_digests: int = MAX_DIGESTS) -> int:
    """Return how many lines of a file equal an earlier one, by 8 bytes of their hash.

    count: number of lines. max_digests: as in `count_duplicates`; the file is read and hashed once for each range.
    """
    passes = max(1, -(-count // max_digests))
    ranges = (
        (some[_ranges(some, passes) == number] if passes > 1 else some for some in _line_digests(path))
        for number in range(passes)
    )
    return count - sum(_num_distinct(digests, max_digests) for digests in ranges)


def _line_digests(path: Path) -> Iterator[NDArray[np.uint64]]:
    with open(path, "rb") as lines:
        while some := list(islice(lines, _READ_LINES)):
            hashes = b"".join([blake2b(line, digest_size=8).digest() for line in some])
            yield np.frombuffer(hashes, dtype=_DIGEST_DTYPE)


def count_in_both(train: Sequence[Path], val: Sequence[Path]) -> int:
    """Return how many digests in the files of val are also in the files of train. Holds val's digests in memory."""
    of_val = np.concatenate([np.empty(0, dtype=_DIGEST_DTYPE), *_digests(val)])
    distinct, place = np.unique(of_val, return_inverse=True)
    is_there = np.zeros(len(distinct), dtype=np.bool_)
    for some in _digests(train):
        is_there |= np.isin(distinct, some)
    return int(np.count_nonzero(is_there[place]))


def _num_distinct(digests: Iterable[NDArray[np.uint64]], max_digests: int) -> int:
    """Count distinct digests. Equal ones are removed on the way, to bound memory."""
    distinct = np.empty(0, dtype=_DIGEST_DTYPE)
    parts, held = [distinct], 0
    for some in digests:
        parts.append(some)
        held += len(some)
        if held > 2 * max(max_digests, len(distinct)):
            distinct = np.unique(np.concatenate(parts))
            parts, held = [distinct], len(distinct)
    return len(np.unique(np.concatenate(parts)))


def _ranges(digests: NDArray[np.uint64], passes: int) -> NDArray[np.uint64]:
    """Return the range of each digest, 0 to passes - 1. Ascending digests have ascending ranges."""
    return (digests >> np.uint64(32)) * np.uint64(passes) >> np.uint64(32)


def _of_range(paths: Sequence[Path], number: int, passes: int) -> Iterator[NDArray[np.uint64]]:
    for some in _digests(paths):
        yield some if passes == 1 else some[_ranges(some, passes) == number]


def _write_by_range(paths: Sequence[Path], passes: int, file: IO[bytes]) -> list[int]:
    """Write all digests to `file`, grouped by range; return the start of each range and the end, in digests."""
    counts = np.zeros(passes, dtype=np.int64)
    for some in _digests(paths):
        counts += np.bincount(_ranges(some, passes).astype(np.int64), minlength=passes)
    stops = [0, *np.cumsum(counts).tolist()]
    places = np.array(stops[:-1])
    for some in _digests(paths):
        some.sort()
        sizes = np.bincount(_ranges(some, passes).astype(np.int64), minlength=passes)
        ends = np.cumsum(sizes)
        for number in np.flatnonzero(sizes).tolist():
            file.seek(_DIGEST_DTYPE.itemsize * int(places[number]))
            file.write(some[ends[number] - sizes[number] : ends[number]].data)
        places += sizes
    file.flush()
    return stops


def _part(file: IO[bytes], start: int, stop: int) -> Iterator[NDArray[np.uint64]]:
    file.seek(_DIGEST_DTYPE.itemsize * start)
    for first in range(start, stop, _READ_DIGESTS):
        yield np.frombuffer(file.read(_DIGEST_DTYPE.itemsize * min(_READ_DIGESTS, stop - first)), dtype=_DIGEST_DTYPE)


def _digests(paths: Sequence[Path]) -> Iterator[NDArray[np.uint64]]:
    for path in paths:
        with open(open_regular(path), "rb") as file:
            while len(some := np.fromfile(file, dtype=_DIGEST_DTYPE, count=_READ_DIGESTS)):
                yield some
