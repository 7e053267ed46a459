"""What the bytes of a cache's files must be, looked at as a stream: ids, sentinels, offsets, source ids.

A scan is fed the bytes of a file piece by piece, each piece but the last a multiple of eight bytes, and afterwards says
where the first thing stands that must not be there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from niels_gpt.build.writer import OFFSET_DTYPE, TOKEN_BYTES, TOKEN_DTYPE, npy_header

_HEADER_BYTES = len(npy_header(0))
_OFFSET_BYTES = OFFSET_DTYPE.itemsize


class Damage(NamedTuple):
    """Something in a file that must not be so."""

    file: str
    """Its name in the cache's folder."""
    offset: int
    """The first byte that is meant."""
    end: int
    """The byte after the last one that is meant."""
    problem: str
    """What was found there and what was expected."""


class Scan(Protocol):
    """Looks at the bytes of one file."""

    def feed(self, content: memoryview, /) -> None:
        """Take the next bytes."""

    def damages(self) -> Iterator[Damage]:
        """Yield what was found, after the last byte."""


def header_damage(name: str, header: bytes, entries: int) -> Damage | None:
    """Compare the beginning of an offsets file with the header of an int64 [entries] array."""
    expected = npy_header(entries)
    if header == expected:
        return None
    place = next(place for place, byte in enumerate(expected) if header[place : place + 1] != bytes([byte]))
    return Damage(name, place, _HEADER_BYTES, f"not the header of a .npy file of int64 [{entries}], from this byte on")


class OffsetsScan:
    """An offsets file: begins at 0 and ascends strictly."""

    def __init__(self, name: str, num_tokens: int, *, with_end: bool) -> None:
        """num_tokens: of the split; with_end: the last entry is that number, as in the index of a pretrain cache."""
        self._name, self._tokens, self._with_end = name, num_tokens, with_end
        self._count, self._last = 0, -1
        self._header_left = _HEADER_BYTES
        self._found: Damage | None = None

    def feed(self, content: memoryview, /) -> None:
        """Take the next bytes."""
        skipped = min(self._header_left, len(content))
        self._header_left -= skipped
        values = np.frombuffer(content[skipped:], dtype=OFFSET_DTYPE)
        if not len(values) or self._found is not None:
            return
        before = np.concatenate([[self._last], values[:-1]])
        wrong = values <= before if self._count else np.concatenate([values[:1] != 0, values[1:] <= before[1:]])
        if wrong.any():
            first = int(np.argmax(wrong))
            expected = f"more than {before[first]}" if self._count + first else "0"
            self._found = self._at(self._count + first, f"is {values[first]}, expected {expected}")
        self._count += len(values)
        self._last = int(values[-1])

    def damages(self) -> Iterator[Damage]:
        """Yield the first entry that is wrong."""
        if self._found is not None:
            yield self._found
        elif self._with_end and self._last != self._tokens:
            yield self._at(self._count - 1, f"is {self._last}, expected the split's {self._tokens} tokens")
        elif not self._with_end and self._last >= self._tokens > 0:
            yield self._at(self._count - 1, f"is {self._last}, expected less than the split's {self._tokens} tokens")

    def _at(self, entry: int, problem: str) -> Damage:
        start = _HEADER_BYTES + _OFFSET_BYTES * entry
        return Damage(self._name, start, start + _OFFSET_BYTES, f"entry {entry} {problem}")


class IdScan:
    """A token file: every id is below vocab_size."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self._name, self._vocab_size = name, vocab_size
        self._seen = self._count = self._first = self._id = 0

    def feed(self, content: memoryview | NDArray[np.uint16], /) -> None:
        """Take the next bytes, or ids."""
        tokens = np.frombuffer(content, dtype=TOKEN_DTYPE)
        if len(tokens) and int(tokens.max()) >= self._vocab_size:
            wrong = np.flatnonzero(tokens >= self._vocab_size)
            if not self._count:
                self._first, self._id = self._seen + int(wrong[0]), int(tokens[wrong[0]])
            self._count += len(wrong)
        self._seen += len(tokens)

    def damages(self) -> Iterator[Damage]:
        """Yield the first id that is not in the vocabulary, with the number of all such ids."""
        if self._count:
            problem = (
                f"token {self._first} is id {self._id}, expected ids below vocab_size {self._vocab_size}; "
                f"{self._count:,} of {self._seen:,} tokens are not"
            )
            yield Damage(self._name, TOKEN_BYTES * self._first, TOKEN_BYTES * (self._first + 1), problem)


class LinesScan:
    """A file of source ids: ASCII, one line for each document."""

    def __init__(self, name: str, documents: int) -> None:
        self._name, self._documents = name, documents
        self._lines = self._seen = 0
        self._last, self._foreign = b"\n", -1

    def feed(self, content: memoryview, /) -> None:
        """Take the next bytes."""
        piece = bytes(content)
        if self._foreign < 0 and not piece.isascii():
            self._foreign = self._seen + next(place for place, byte in enumerate(piece) if byte > 127)
        self._lines += piece.count(b"\n")
        self._seen += len(piece)
        self._last = piece[-1:] or self._last

    def damages(self) -> Iterator[Damage]:
        """Yield a byte that is not ASCII, and a wrong number of lines."""
        if self._foreign >= 0:
            yield Damage(self._name, self._foreign, self._foreign + 1, "not ASCII")
        if self._last != b"\n":
            yield Damage(self._name, self._seen - 1, self._seen, "the last line has no end")
        elif self._lines != self._documents:
            problem = f"{self._lines:,} lines, expected {self._documents:,}, one for each document"
            yield Damage(self._name, 0, self._seen, problem)


class Shape:
    """The sentinels of a split's stream of tokens, which goes on from one file to the next.

    Of a pretrain split: an end-of-text at the end of each document if the cache has them, and no other sentinel.
    Of an sft split: each example begins with a role, a role is followed by ids and an end-of-text, and the next role
    comes right after that. For examples of that shape `supervised` is the number of tokens that `target_mask` marks.
    Only the first thing that is wrong is kept.
    """

    def __init__(
        self, special_ids: Mapping[str, int], bounds: NDArray[np.int64], *, sft: bool, append_eot: bool, cut: bool
    ) -> None:
        """bounds: where each document starts, and of a pretrain split where the last one ends too.

        cut: the last document may lack its end-of-text.
        """
        self._special, self._bounds, self._sft = dict(special_ids), bounds, sft
        self._append_eot, self._cut = append_eot, cut
        self._names = {token: name for name, token in special_ids.items()}
        self._seen = self._file_start = 0
        self._name = ""
        self._role: tuple[int, int] | None = None  # place and id of the role that is open
        self._end = -1  # place of the last end-of-text
        self._found: Damage | None = None
        self.supervised = 0

    def begin(self, name: str) -> None:
        """Go on with the next file."""
        self._name, self._file_start = name, self._seen

    def feed(self, content: memoryview, /) -> None:
        """Take the next bytes."""
        tokens = np.frombuffer(content, dtype=TOKEN_DTYPE)
        if self._found is None:
            is_sentinel = np.zeros(len(tokens), dtype=np.bool_)
            for token in self._special.values():
                is_sentinel |= tokens == token
            places = np.flatnonzero(is_sentinel)
            found = (places + self._seen, tokens[places].astype(np.int64))
            (self._chats if self._sft else self._documents)(*found, self._seen + len(tokens))
        self._seen += len(tokens)

    def damages(self) -> Iterator[Damage]:
        """Yield the first thing that is wrong, after the last file."""
        if self._found is None and self._sft and self._end != self._seen - 1:
            self._keep(self._seen - 1, "ends the last example, expected an end-of-text")
        if self._found is not None:
            yield self._found

    def _documents(self, places: NDArray[np.int64], ids: NDArray[np.int64], end: int) -> None:
        first, last = np.searchsorted(self._bounds, [self._seen, end], side="right")
        ends = self._bounds[first:last] - 1 if self._append_eot else self._bounds[:0]
        if np.array_equal(places, ends) and bool(np.all(ids == self._special["eot"])):
            return
        missing = np.setdiff1d(ends, places[ids == self._special["eot"]])
        if self._cut and len(missing) and missing[-1] == self._bounds[-1] - 1:
            missing = missing[:-1]
        stray = ~np.isin(places, ends) | (ids != self._special["eot"])
        if stray.any() and not (len(missing) and missing[0] < places[np.argmax(stray)]):
            place = int(places[np.argmax(stray)])
            what = f"the sentinel {self._names[int(ids[np.argmax(stray)])]}"
            self._keep(place, f"is {what} inside document {self._document(place)}")
        elif len(missing):
            self._keep(int(missing[0]), f"ends document {self._document(int(missing[0]))}, expected an end-of-text")

    def _chats(self, places: NDArray[np.int64], ids: NDArray[np.int64], end: int) -> None:
        kept = [] if self._role is None else [self._role]
        places = np.concatenate([[place for place, _ in kept], places]).astype(np.int64)
        ids = np.concatenate([[token for _, token in kept], ids]).astype(np.int64)
        is_end = ids == self._special["eot"]
        due = np.arange(len(ids)) % 2 == 1  # role, end, role, end
        follows = np.concatenate([[self._end], places[:-1]]) + 1 == places
        first, last = np.searchsorted(self._bounds, [self._seen, end])
        starts = self._bounds[first:last]
        wrong = places[(is_end != due) | (~due & ~follows)]
        without = starts[~np.isin(starts, places[~is_end])]
        if len(wrong) and not (len(without) and without[0] < wrong[0]):
            place = int(wrong[0])
            self._keep(place, f"is a sentinel out of turn in example {self._document(place)}: a role, ids, an eot")
        elif len(without):
            number = self._document(int(without[0]))
            self._keep(int(without[0]), f"begins example {number}, expected the sentinel of a role")
        else:
            pairs = len(ids) // 2
            lengths = places[1 : 2 * pairs : 2] - places[0 : 2 * pairs : 2]
            self.supervised += int(lengths[ids[0 : 2 * pairs : 2] == self._special["asst"]].sum())
            self._end = int(places[2 * pairs - 1]) if pairs else self._end
            self._role = (int(places[-1]), int(ids[-1])) if len(ids) % 2 else None

    def _document(self, place: int) -> int:
        return int(np.searchsorted(self._bounds, place, side="right")) - 1

    def _keep(self, place: int, problem: str) -> None:
        token = place - self._file_start
        self._found = Damage(self._name, TOKEN_BYTES * token, TOKEN_BYTES * (token + 1), f"token {token} {problem}")
