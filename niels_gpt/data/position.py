"""Where a loader is in its files: what a killed build needs to pass over the rows that it has."""

from __future__ import annotations


class Position:
    """Keeps a dict that a builder and a loader share, as they share the loader's counters.

    Before the first row the builder may put into it what it was when a sample had left the loader: then the next one is
    the first that comes. While rows are read, the loader says in it where it is: `file`, the number of the file from 0;
    `row`, the number from 1 of the row in it, 1 for a document that is a file; and numbers of the loader's own.
    """

    def __init__(self, shared: dict[str, int] | None) -> None:
        """shared: None where nobody wants to know. To be made when the first row is wanted, not before."""
        self._shared = {} if shared is None else shared
        self._start = dict(self._shared)
        self.resumed = "file" in self._start
        """Whether there are samples before the first one that comes."""

    def number(self, name: str) -> int:
        """Return one of the loader's own numbers as it is at the beginning; 0 at that of the source."""
        return self._start.get(name, 0)

    def passed(self, file: int) -> bool:
        """Whether every row of a file is passed over, so that it need not be opened."""
        return file < self.number("file")

    def behind(self, file: int) -> int:
        """Return the number of the last row of a file that is passed over; 0 for none."""
        return self.number("row") if file == self.number("file") else 0

    def at(self, file: int, row: int, **numbers: int) -> None:
        """Say that a row is read, before a sample is made of it."""
        self._shared.update(numbers, file=file, row=row)
