"""Where a loader is in the files of its source, and how it resumes there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class Position:
    """Where a loader is in its files, kept in a dict that it shares with the builder, as it shares its counters.

    To resume, the builder fills the dict before the first row is read, with its content when some sample was yielded:
    the loader starts with the next one. While it reads, the loader keeps in the dict `file`, the file's number from 0;
    `row`, the row's number from 1, 1 for a file that is one document; and numbers of its own.
    """

    def __init__(self, shared: dict[str, int] | None) -> None:
        """shared: None if no builder wants it. Create this when the first row is wanted, not before."""
        self._wanted = shared is not None
        self._shared = {} if shared is None else shared
        self._start = dict(self._shared)
        self.resumed = "file" in self._start
        """Whether samples are skipped."""

    def number(self, name: str) -> int:
        """Return one of the loader's own numbers at the start; 0 at the beginning of the source."""
        return self._start.get(name, 0)

    def skips_file(self, file: int) -> bool:
        """Return whether every row of a file is skipped, so that it need not be opened."""
        return file < self.number("file")

    def last_skipped_row(self, file: int) -> int:
        """Return the number of the last row of a file that is skipped; 0 if none is."""
        return self.number("row") if file == self.number("file") else 0

    def set(self, file: int, row: int, **numbers: int) -> None:
        """Record the row that was read, before a sample is made of it."""
        self._shared.update(numbers, file=file, row=row)

    def set_all(self, file: int, rows: Sequence[int], **numbers: Sequence[int]) -> dict[str, list[int]]:
        """Record rows of a file that were read; return the position at each, which `set` would have left in the dict.

        rows: their numbers. numbers: the loader's own numbers at each of them. Returns {} if no builder wants it.
        """
        columns = {"file": [file] * len(rows), "row": list(rows), **{name: list(own) for name, own in numbers.items()}}
        columns = {**{name: [value] * len(rows) for name, value in self._shared.items()}, **columns}
        self._shared.update({name: values[-1] for name, values in columns.items()})
        return columns if self._wanted else {}


def from_position(parts: Sequence[T], position: dict[str, int]) -> Iterator[T]:
    """Yield the parts from the one whose number `position` holds as "stream"; each next one clears `position`."""
    first = position.get("stream", 0)
    for number, part in enumerate(parts):
        if number > first or "stream" not in position:
            position.clear()
            position["stream"] = number
        if number >= first:
            yield part
