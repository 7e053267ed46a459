"""What the loaders of built-in sources share: reading a mirror or the hub, and which rows are dropped and counted."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

from niels_gpt.data.files import mirrors
from niels_gpt.data.files.part import FilePart, Share, is_first
from niels_gpt.data.files.rows import TABLE_SUFFIXES, Columns, Reading, rows_or_columns
from niels_gpt.data.files.text import (
    MAX_DOCUMENT_BYTES,
    MISSING_FIELD,
    NOT_FETCHED,
    TOO_LARGE,
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
from niels_gpt.data.reader import Position
from niels_gpt.data.types import PretrainSample, TextBlock, source_id
from niels_gpt.documents import Partition
from niels_gpt.hub import datasets as hub
from niels_gpt.signals import GIT_LFS_POINTER, OTHER_TEXT_FIELD
from niels_gpt.storage.errors import SourceError

T = TypeVar("T")
Row = dict[str, Any]
NumberedRows = Iterator[tuple[int | str, str, Row]]
"""The row's number from 0, counting dropped rows, in a partition PATH#ROW; its file and row, for messages; the row."""
TEXT_FIELDS = ("text", "content", "document")
_ID_FIELDS = ("id", "path", "row")  # what source_id reads
_MAX_META_CHARS = 1_000  # a URL fits, a second copy of the text does not
_MAX_ESCAPED_BYTES = 6  # of one character in JSON: \u0000


@dataclass(frozen=True)
class NumberedColumns:
    """Rows of a file as columns, in place of NumberedRows."""

    indexes: Sequence[int | str]
    """Of the rows, as in NumberedRows."""
    rows: Columns
    position: dict[str, list[int]]


Pieces = Iterator[tuple[int | str, str, Row] | NumberedColumns] | NumberedRows
"""NumberedRows, in which columns may stand for rows of a file."""


class UpstreamRows:
    """The rows of one built-in source. Dropped rows are counted, and the first of each reason is logged."""

    def __init__(
        self,
        source: str,
        counters: Counter[str] | None,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        partition: Partition | None = None,
    ) -> None:
        """partition: whose rows alone are read."""
        self.source = source
        self._partition = partition
        self.counters: Counter[str] = Counter() if counters is None else counters
        self._limit = max_document_bytes
        self._dropped: Counter[str] = Counter()
        self._first_problem = ""
        self._num_read = 0  # rows of files, dropped ones included
        self._resumed = False

    def read(
        self,
        source_root: str | os.PathLike[str],
        dataset_id: str,
        *,
        split: str,
        revision: str | None,
        follow_links: bool,
        all_splits: Sequence[str] = (),
        config: str | None = None,
        streaming: bool = False,
        shuffle_seed: int | None = None,
        shuffle_buffer: int | None = None,
        folder: str = "",
        inner_folders: Sequence[str] = (),
        suffixes: Sequence[str] = TABLE_SUFFIXES,
        book_suffixes: tuple[str, ...] = (),
        position: dict[str, int] | None = None,
    ) -> NumberedRows:
        """Yield the rows of a split, from a mirror's files or from the hub.

        config, streaming, revision, shuffle_seed, shuffle_buffer: for the hub alone.
        all_splits: the splits that "all" stands for on the hub.
        folder, inner_folders, suffixes, follow_links: as mirrors.split_files; folder: "" for the dataset's id.
        book_suffixes: of a mirror's files that are one row each. position: see reader.Position.
        Raises: FileNotFoundError, by the call itself, if a mirror has no such files; ValueError for a damaged file.
        """
        root = mirrors.mirror_root(source_root)
        if root is None:
            splits = all_splits if split == "all" and all_splits else (split,)
            how: dict[str, Any] = {"config": config, "revision": revision}
            how |= {"shuffle_seed": shuffle_seed, "shuffle_buffer": shuffle_buffer}
            if self._partition is not None:
                named = (hub.rows_of_partition(dataset_id, self._partition, split=name, **how) for name in splits)
                return self.of_hub(chain.from_iterable(named), dataset_id)
            rows = (hub.rows(dataset_id, split=name, streaming=streaming, **how) for name in splits)
            return self.of_hub(enumerate(chain.from_iterable(rows)), dataset_id)
        paths = mirrors.split_files(
            root,
            folder or dataset_id,
            split=split,
            suffixes=suffixes,
            folders=inner_folders,
            follow_links=follow_links,
            counters=self.counters if is_first(self._partition) else None,
        )
        within = root / (folder or dataset_id)
        return cast(NumberedRows, self.of_files(paths, folder=within, book_suffixes=book_suffixes, position=position))

    def of_files(
        self,
        paths: Sequence[Path],
        *,
        folder: Path,
        book_suffixes: tuple[str, ...] = (),
        position: dict[str, int] | None = None,
        blocks: bool = False,
    ) -> Pieces:
        """Yield the rows of files in order. blocks: usual rows with a text as columns; the rest: as `read`.

        folder: above the files. Their paths below it are the ids of books, and name the rows of a partition.
        """
        place = Position(None if book_suffixes else position)
        self._num_read += place.number("read")
        self._resumed = place.resumed
        part = FilePart(self._partition, len(paths))
        for file, path in enumerate(paths):
            share = part.share(file)
            if share is None or place.skips_file(file):
                continue
            name = path.relative_to(folder).as_posix()
            if not path.name.endswith(book_suffixes):
                yield from self._of_table(path, file, share, name, place, blocks)
            elif share.has(0):
                self._num_read += 1
                for text in self.document(path):
                    yield self._num_read - 1, str(path), {"text": text, "path": name}

    def _of_table(self, path: Path, file: int, share: Share, name: str, position: Position, blocks: bool) -> Pieces:
        def drop(problem: Problem) -> None:
            self._num_read += problem.rows
            self.drop(problem.reason, problem, problem.rows)

        reading = Reading(
            texts=TEXT_FIELDS if blocks else (),
            others=_ID_FIELDS,
            counters=self.counters,
            unreadable=drop,
            max_document_bytes=self._limit,
            skip_to=position.last_skipped_row(file),
            share=share,
        )
        in_partition = self._partition is not None
        for item in rows_or_columns(path, reading):
            first = self._num_read
            if isinstance(item, Columns):
                self._num_read += len(item.texts)
                indexes = (
                    [f"{name}#{number}" for number in item.numbers] if in_partition else range(first, self._num_read)
                )
                places = position.set_all(file, item.numbers, read=range(first + 1, self._num_read + 1))
                yield NumberedColumns(indexes, item, places)
            else:
                number, row = item
                self._num_read += 1
                position.set(file, number, read=self._num_read)
                yield f"{name}#{number}" if in_partition else first, f"{path}, row {number}", row

    def document(self, path: Path) -> Iterator[str]:
        """Yield the text of a file, or nothing if it is too large, compressed and empty, or a pointer of git-lfs."""
        if packed_suffix(path.name) and is_empty_file(path, self.counters):
            return
        try:
            yield read_text(path, counters=self.counters, max_document_bytes=self._limit)
        except UnusableFile as error:
            self.drop(error.reason, str(error))

    def of_hub(self, indexed: Iterable[tuple[int | str, Row]], dataset_id: str) -> NumberedRows:
        """Yield the hub's rows. A row's size is that of its line in a snapshot, so that both drop the same rows."""
        for index, row in indexed:
            where = f"{dataset_id}, row {index}"
            if self._is_too_large(row):
                self.drop(TOO_LARGE, Problem.too_large(where, self._limit))
            else:
                yield index, where, row

    def drop(self, reason: str, problem: str, number: int = 1) -> None:
        """Count rows that cannot be used."""
        self._dropped[reason] += number
        self._first_problem = self._first_problem or problem
        note(self.counters, reason, problem, number)

    def check_any(self, kept: int) -> None:
        """Raise ValueError, at the end of the rows, if rows were dropped and none was kept.

        Not in a partition: others may have rows that can be used.
        """
        if self._dropped and not kept and not self._resumed and self._partition is None:
            reasons = ", ".join(f"{reason} {number:,}" for reason, number in sorted(self._dropped.items()))
            raise SourceError(
                f"{self.source}: not one row can be used ({reasons}); the first: {self._first_problem}", code="E303"
            )

    def _is_too_large(self, row: Row) -> bool:
        if _num_chars(row) * _MAX_ESCAPED_BYTES < self._limit:
            return False
        return len(json.dumps(row, ensure_ascii=False, default=str).encode(errors="replace")) >= self._limit


def _num_chars(value: Any) -> int:
    """Return about how many characters a value has in JSON, before its texts are escaped."""
    if isinstance(value, str):
        return len(value) + 4
    if isinstance(value, dict):
        return sum(len(str(key)) + 4 + _num_chars(item) for key, item in value.items())
    return sum(map(_num_chars, value)) if isinstance(value, list | tuple) else 24


def samples_of_rows(numbered: NumberedRows, rows: UpstreamRows) -> Iterator[PretrainSample]:
    """Turn rows into documents, as `texts_of_rows`; meta has the row's small scalar fields and "index"."""
    return cast(Iterator[PretrainSample], documents_of_pieces(numbered, rows))


def documents_of_pieces(pieces: Pieces, rows: UpstreamRows) -> Iterator[PretrainSample | TextBlock]:
    """Turn rows into documents as `samples_of_rows`, and columns into blocks of them."""
    for piece in _with_texts(pieces, rows):
        if isinstance(piece, NumberedColumns):
            ids = list(_ids_of(piece, rows.source))
            yield TextBlock(rows.source, piece.rows.texts, ids, piece.position)
        else:
            index, row, text = piece
            yield PretrainSample(text=text, source=rows.source, meta={**_small_fields(row), "index": index})


def _small_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in row.items()
        if key not in TEXT_FIELDS
        and isinstance(value, str | int | float | bool)
        and not (isinstance(value, str) and len(value) > _MAX_META_CHARS)
    }


def _ids_of(piece: NumberedColumns, source: str) -> Iterator[str]:
    """Yield what source_id returns for the samples of these rows."""
    fields = piece.rows.fields
    for at in range(len(piece.rows.texts)):
        row = {name: values[at] for name, values in fields.items()}
        if type(own := row.get("id")) is str and len(own) <= _MAX_META_CHARS:
            yield own
        else:
            yield source_id(PretrainSample("", source, {**_small_fields(row), "index": piece.indexes[at]}))


def texts_of_rows(numbered: NumberedRows, rows: UpstreamRows) -> Iterator[tuple[int | str, Mapping[str, Any], str]]:
    """Yield each row's index as in NumberedRows, the row, and its text, blank texts included.

    A row without a text counts as "missing_field". Raises: ValueError at the end if no row has one.
    """
    return cast(Iterator[tuple[int | str, Mapping[str, Any], str]], _with_texts(numbered, rows))


def _with_texts(
    pieces: Pieces, rows: UpstreamRows
) -> Iterator[tuple[int | str, Mapping[str, Any], str] | NumberedColumns]:
    kept = 0
    for piece in pieces:
        if isinstance(piece, NumberedColumns):
            kept += len(piece.rows.texts)
            yield piece
            continue
        index, where, row = piece
        try:
            text = row_text(row)
        except ValueError as error:
            rows.drop(MISSING_FIELD, f"{where}: {error}")
            continue
        if is_pointer(text):
            rows.drop(GIT_LFS_POINTER, f"{where}: {NOT_FETCHED}")
            continue
        if has_other_text([row[name] for name in TEXT_FIELDS if isinstance(row.get(name), str)]):
            count(rows.counters, OTHER_TEXT_FIELD)
        kept += 1
        yield index, row, text
    rows.check_any(kept)


def row_text(sample: Mapping[str, Any]) -> str:
    """Return the first of text, content, document that is a string; ValueError listing the keys if none is (PR-02)."""
    for key in TEXT_FIELDS:
        if isinstance(sample.get(key), str):
            return str(sample[key])
    fields = ", ".join(f"{key} ({type(value).__name__})" for key, value in sample.items()) or "no keys"
    raise SourceError(
        f"row without a text; expected a string under one of {', '.join(TEXT_FIELDS)}, found {fields}", code="E304"
    )


def check_take(take: int | None) -> None:
    """Raise ValueError for a negative limit; None stands for no limit."""
    if take is not None and take < 0:
        raise ValueError(f"cannot take {take} samples; expected None or a number of at least 0")


def shuffled(items: Iterable[T], seed: int) -> Iterator[T]:
    """Yield all items in the order of torch.randperm; holds them in memory."""
    import torch

    held = list(items)
    for index in torch.randperm(len(held), generator=torch.Generator().manual_seed(seed)).tolist():
        yield held[index]
