"""Reading the files of a source from a position on: rows and documents; which are dropped, counted and logged.

A loader makes samples of the pieces that its SourceReader yields. local.py and upstream_rows.py decide which files a
source has, and how its samples are numbered and named.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from niels_gpt.data.files.part import FilePart, Share
from niels_gpt.data.files.rows import Columns, Reading, rows_or_columns
from niels_gpt.data.files.text import (
    MAX_DOCUMENT_BYTES,
    MISSING_FIELD,
    NOT_FETCHED,
    Problem,
    UnusableFile,
    count,
    has_other_text,
    is_empty_file,
    is_pointer,
    note,
    packed_suffix,
    read_text,
)
from niels_gpt.data.types import PretrainSample, TextBlock
from niels_gpt.documents import Partition
from niels_gpt.signals import GIT_LFS_POINTER, OTHER_TEXT_FIELD
from niels_gpt.storage.errors import SourceError

T = TypeVar("T")
TEXT_FIELDS = ("text", "content", "document")
_MOST_NAMES = 20  # in a message


@dataclass(frozen=True, slots=True)
class Piece:
    """A row of a source, a run of rows as columns, or the text of a whole file."""

    item: dict[str, Any] | Columns | str
    where: str
    """File and row, for messages."""
    name: str = ""
    """The file's name in the source; "" on the hub."""
    row: int = 0
    """The row's number in its file, from 1; 0 for columns, documents and the hub."""
    index: int | str = 0
    """The number of this row or document in the source, from 0; of the first one of columns."""
    position: dict[str, list[int]] = field(default_factory=dict)
    """The position at each row of columns: see Position.set_all."""


class SourceReader(ABC):
    """Reads the files of one source, or a partition of them. Counts what it drops, and logs examples."""

    number_name: ClassVar[str]
    """Key of the running number in a position."""
    numbers_dropped: ClassVar[bool]
    """Whether rows that are dropped have a number too."""

    def __init__(
        self,
        source: str,
        counters: Counter[str] | None = None,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        partition: Partition | None = None,
        position: dict[str, int] | None = None,
    ) -> None:
        """position: shared with the builder, which fills it before the first row is read: see Position."""
        self.source = source
        self.counters: Counter[str] = Counter() if counters is None else counters
        self.partition = partition
        self.file = 0
        """Number of the current file, from 0."""
        self._limit = max_document_bytes
        self._shared = position
        self._resumed = False
        self._number = self._kept = 0  # of the next row or document; rows and documents yielded and not dropped
        self._dropped = Counter[str]()
        self._first = self._problem = ""  # the first row that was read and dropped; the first that could not be read

    @abstractmethod
    def meta(self, piece: Piece) -> dict[str, Any]:
        """Return the meta of the sample of a row or document."""

    @abstractmethod
    def ids(self, piece: Piece, rows: Columns) -> list[str]:
        """Return the ids that `source_id` returns for the samples of a piece's rows."""

    def pieces(
        self, paths: Sequence[Path], name_of: Callable[[Path], str], is_document: Callable[[Path], bool], **how: Any
    ) -> Iterator[Piece]:
        """Yield the pieces of files in order, and record the position of each.

        is_document: whether a file is one document; any other has rows. how: fields of Reading: texts, others, columns.
        Raises: SourceError E302 for a damaged file, when it is reached.
        """
        self._position = Position(self._shared)
        self._resumed = self._position.resumed
        self._number = self._position.number(self.number_name)
        part = FilePart(self.partition, len(paths))
        for file, path in enumerate(paths):
            share = part.share(file)
            if share is None or self._position.skips_file(file):
                continue
            self.file, skip_to = file, self._position.last_skipped_row(file)
            if not is_document(path):
                yield from self._rows(path, name_of(path), skip_to, share, how)
            elif share.has(0) and not skip_to and (text := self.document(path)) is not None:
                yield Piece(text, str(path), name_of(path), index=self._next(1))

    def _rows(self, path: Path, name: str, skip_to: int, share: Share, how: dict[str, Any]) -> Iterator[Piece]:
        reading = Reading(
            counters=self.counters,
            unreadable=partial(self._reject, kind=str(path)),
            max_document_bytes=self._limit,
            skip_to=skip_to,
            share=share,
            **how,
        )
        for item in rows_or_columns(path, reading):
            first = self._number
            if isinstance(item, Columns):
                self._number += len(item.texts)
                self._kept += len(item.texts)
                numbers = {self.number_name: range(first + 1, self._number + 1)}
                places = self._position.set_all(self.file, item.numbers, **numbers)
                yield Piece(item, str(path), name, index=first, position=places)
            else:
                number, row = item
                yield Piece(row, f"{path}, row {number}", name, number, self._next(number))

    def _next(self, row: int) -> int:
        """Number a row or document, and record its position before the caller yields it. row: number in its file."""
        self._number += 1
        self._kept += 1
        self._position.set(self.file, row, **{self.number_name: self._number})
        return self._number - 1

    def document(self, path: Path) -> str | None:
        """Return the text of a file; None if it is too large, compressed and empty, or a pointer of git-lfs."""
        if packed_suffix(path.name) and is_empty_file(path, self.counters):
            return None
        try:
            return read_text(path, counters=self.counters, max_document_bytes=self._limit)
        except UnusableFile as error:
            problem = Problem(error)
            problem.reason = error.reason
            self._reject(problem)
            return None

    def documents(
        self, pieces: Iterable[Piece], fields: Sequence[str] = TEXT_FIELDS, *, remedy: str = ""
    ) -> Iterator[PretrainSample | TextBlock]:
        """Yield documents, blank ones included: a TextBlock for columns, else a PretrainSample.

        fields: may hold a row's text. remedy: follows the error below.
        Raises: SourceError E303 at the end if rows were dropped and none was kept.
        """
        for piece in pieces:
            if isinstance(piece.item, Columns):
                yield TextBlock(self.source, piece.item.texts, self.ids(piece, piece.item), piece.position)
            elif (text := self.text_of(piece, fields)) is not None:
                yield PretrainSample(text, self.source, self.meta(piece))
        self.check_any("not one text", f"a string in the field {' or '.join(fields)}{remedy}")

    def text_of(self, piece: Piece, fields: Sequence[str] = TEXT_FIELDS) -> str | None:
        """Return the text of a row, the first of `fields` that is a string, or of a document; None: it is dropped."""
        if not isinstance(piece.item, dict):
            assert isinstance(piece.item, str)
            return piece.item
        row = piece.item
        texts = [row[name] for name in fields if isinstance(row.get(name), str)]
        if not texts:
            types = (f"{type(row[name]).__name__} in the field {name}" for name in fields if name in row)
            self.drop(piece, MISSING_FIELD, ", ".join(types))
            return None
        if is_pointer(texts[0]):
            self.drop(piece, GIT_LFS_POINTER, NOT_FETCHED)
            return None
        if has_other_text(texts):
            count(self.counters, OTHER_TEXT_FIELD)
        return str(texts[0])

    def drop(self, piece: Piece, reason: str, found: str = "", *, expected: str = "", kind: str | None = None) -> None:
        """Count a row that was yielded as dropped.

        found, expected: for the log; found "": the row's fields. kind: see `_count`.
        """
        self._kept -= 1
        if not self.numbers_dropped:
            self._number -= 1
            self._position.set(self.file, piece.row, **{self.number_name: self._number})
        problem = f"{piece.where}: found {found or self._fields(piece)}"
        self._first = self._first or problem
        self._count(reason, kind, f"{problem}, expected {expected}" if expected else problem)

    def _reject(self, problem: Problem, *, kind: str | None = None) -> None:
        """Count rows or a document that cannot be read."""
        self._number += problem.rows if self.numbers_dropped else 0
        self._problem = self._problem or problem
        self._count(problem.reason, kind, problem, problem.rows)

    def _count(self, reason: str, kind: str | None, problem: str, number: int = 1) -> None:
        """Count dropped rows, and log the first of each reason. kind: a file or role, for readers that log more."""
        self._dropped[reason] += number
        note(self.counters, reason, problem, number)

    def check_any(self, what: str = "not one row can be used", expected: str = "") -> None:
        """Raise SourceError E303, at the end, if rows were dropped and none was kept.

        Not in a partition, as others may have rows, nor in a reading that was resumed. what, expected: for the message.
        """
        if not self._dropped or self._kept or self._resumed or self.partition is not None:
            return
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(self._dropped.items()))
        first = self._problem
        if self._first:
            first = f"{self._first}. Expected {expected}" if expected else self._first
        total = f"{self._dropped.total():,} rows"
        raise SourceError(f"{self.source}: {what} in {total} ({reasons}); the first: {first}", code="E303")

    def names(self, piece: Piece) -> list[str]:
        """Return the names of a row's fields."""
        return list(piece.item) if isinstance(piece.item, dict) else []

    def _fields(self, piece: Piece) -> str:
        names = self.names(piece)
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return f"the fields {', '.join(names[:_MOST_NAMES]) or 'none'}{more}"


class Position:
    """Where a loader is in its files, kept in a dict that it shares with the builder, as it shares its counters.

    To resume, the builder fills the dict before the first row is read, with its content when some sample was yielded:
    the loader starts with the next one. While it reads, the loader keeps in the dict `file`, the file's number from 0;
    `row`, the row's number from 1 (1 for a file that is one document); and numbers of its own.
    """

    def __init__(self, shared: dict[str, int] | None) -> None:
        """shared: None without a builder. Create this when the first row is wanted: the builder fills the dict late."""
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
        """Record the row that was read, before a sample is made from it."""
        self._shared.update(numbers, file=file, row=row)

    def set_all(self, file: int, rows: Sequence[int], **numbers: Sequence[int]) -> dict[str, list[int]]:
        """Record rows of a file that were read; return a column for each key, the position at each row.

        rows: row numbers. numbers: the loader's own numbers at each row. Returns {} without a builder.
        """
        columns = {"file": [file] * len(rows), "row": list(rows), **{name: list(own) for name, own in numbers.items()}}
        columns = {**{name: [value] * len(rows) for name, value in self._shared.items()}, **columns}
        self._shared.update({name: values[-1] for name, values in columns.items()})
        return columns if self._wanted else {}


def from_position(parts: Sequence[T], position: dict[str, int]) -> Iterator[T]:
    """Yield parts of a source from number `position["stream"]` on. Each further part starts with an empty position."""
    first = position.get("stream", 0)
    for number, part in enumerate(parts):
        if number > first or "stream" not in position:
            position.clear()
            position["stream"] = number
        if number >= first:
            yield part
