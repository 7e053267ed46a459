"""The rows of a source of the project, from a mirror's files or from the hub, each with its number and its place."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from niels_gpt.data import places
from niels_gpt.data.position import Position
from niels_gpt.data.text_files import MAX_DOCUMENT_BYTES, TOO_LARGE, Problem, TooLarge, note, read_text

Row = dict[str, Any]
NumberedRows = Iterator[tuple[int, str, Row]]
"""The row's number from 0, passed-over ones included; the file and row, for messages; and the row."""
_MOST_ESCAPED = 6  # bytes of JSON that a character of a text may take: \u0000


class UpstreamRows:
    """The rows of one source, and what was passed over: counted, and the first of each reason in the log."""

    def __init__(
        self, source: str, counters: Counter[str] | None, max_document_bytes: int = MAX_DOCUMENT_BYTES
    ) -> None:
        self.counters: Counter[str] = Counter() if counters is None else counters
        self._source = source
        self._limit = max_document_bytes
        self._dropped: Counter[str] = Counter()
        self._first = ""  # problem
        self._read = 0  # rows of files, passed-over ones included
        self._resumed = False

    def of_files(self, paths: Iterable[Path], position: dict[str, int] | None = None) -> NumberedRows:
        """Yield the rows of a mirror's files. Raises: ValueError for a file that is damaged as a whole.

        position: where it is told where the rows are, and begin, by `file`, `row` and `read`: see position.Position.
        """
        place = Position(position)
        self._read += place.number("read")
        self._resumed = place.resumed

        def pass_over(problem: Problem) -> None:
            self._read += problem.rows
            self.drop(problem.reason, problem, problem.rows)

        for file, path in enumerate(paths):
            if place.passed(file):
                continue
            rows = places.numbered_rows(
                path,
                counters=self.counters,
                unreadable=pass_over,
                max_document_bytes=self._limit,
                behind=place.behind(file),
            )
            for number, row in rows:
                self._read += 1
                place.at(file, number, read=self._read)
                yield self._read - 1, f"{path}, row {number}", row

    def of_books(self, folder: Path, paths: Iterable[Path], suffixes: tuple[str, ...]) -> NumberedRows:
        """Yield as `of_files`; a file with one of `suffixes` is one row, whose text it is, with its path."""
        for path in paths:
            if not path.name.endswith(suffixes):
                yield from self.of_files([path])
                continue
            self._read += 1
            for text in self.document(path):
                yield self._read - 1, str(path), {"text": text, "path": path.relative_to(folder).as_posix()}

    def document(self, path: Path) -> Iterator[str]:
        """Yield the text of a file, or nothing where it is too large."""
        try:
            yield read_text(path, counters=self.counters, max_document_bytes=self._limit)
        except TooLarge as error:
            self.drop(TOO_LARGE, str(error))

    def of_hub(self, rows: Iterable[Row], dataset_id: str) -> NumberedRows:
        """Yield the hub's rows. One is as large as its line in a snapshot, so that both keep the same ones."""
        for index, row in enumerate(rows):
            where = f"{dataset_id}, row {index}"
            if self._is_too_large(row):
                self.drop(TOO_LARGE, Problem.too_large(where, self._limit))
            else:
                yield index, where, row

    def drop(self, reason: str, problem: str, number: int = 1) -> None:
        """Count a row, or several, that cannot be used."""
        self._dropped[reason] += number
        self._first = self._first or problem
        note(self.counters, reason, problem, number)

    def check_any(self, kept: int) -> None:
        """Raise ValueError, at the end of the rows, if some were dropped and none was kept."""
        if self._dropped and not kept and not self._resumed:
            reasons = ", ".join(f"{reason} {number:,}" for reason, number in sorted(self._dropped.items()))
            raise ValueError(f"{self._source}: not one row can be used ({reasons}); the first: {self._first}")

    def _is_too_large(self, row: Row) -> bool:
        if _length_of(row) * _MOST_ESCAPED < self._limit:
            return False
        return len(json.dumps(row, ensure_ascii=False, default=str).encode(errors="replace")) >= self._limit


def _length_of(value: Any) -> int:
    """Return about how many characters JSON has of a value, its texts unescaped."""
    if isinstance(value, str):
        return len(value) + 4
    if isinstance(value, dict):
        return sum(len(str(key)) + 4 + _length_of(item) for key, item in value.items())
    return sum(map(_length_of, value)) if isinstance(value, list | tuple) else 24
