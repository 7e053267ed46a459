"""Rows of a built-in source, from a mirror's files or from the hub: how each is numbered, and which are too large."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from niels_gpt.data.files import mirrors
from niels_gpt.data.files.part import is_first
from niels_gpt.data.files.rows import TABLE_SUFFIXES, Columns
from niels_gpt.data.files.text import Problem
from niels_gpt.data.reader import TEXT_FIELDS, Piece, SourceReader
from niels_gpt.data.types import PretrainSample, source_id
from niels_gpt.hub import datasets as hub
from niels_gpt.storage.errors import SourceError

T = TypeVar("T")
_ID_FIELDS = ("id", "path", "row")  # what source_id reads
_MAX_META_CHARS = 1_000  # a URL fits, a second copy of the text does not
_MAX_ESCAPED_BYTES = 6  # of one character in JSON: \u0000


class UpstreamRows(SourceReader):
    """Rows of one built-in source. Their numbers count dropped rows; in a partition a row's name is PATH#ROW."""

    number_name = "read"
    numbers_dropped = True

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
    ) -> Iterator[Piece]:
        """Yield the rows of a split, from a mirror's files or from the hub.

        config, streaming, revision, shuffle_seed, shuffle_buffer: only for the hub.
        all_splits: the splits that "all" stands for on the hub.
        folder: in the mirror; "": the dataset's id. inner_folders, suffixes, follow_links: see mirrors.split_files.
        book_suffixes: endings of a mirror's files that are one document each.
        Raises: SourceNotFound E301, by the call itself, if a mirror has no such files; SourceError E302 for a damaged
            file.
        """
        root = mirrors.mirror_root(source_root)
        if root is None:
            splits = all_splits if split == "all" and all_splits else (split,)
            how: dict[str, Any] = {"config": config, "revision": revision}
            how |= {"shuffle_seed": shuffle_seed, "shuffle_buffer": shuffle_buffer}
            if self.partition is not None:
                named = (hub.rows_of_partition(dataset_id, self.partition, split=name, **how) for name in splits)
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
            counters=self.counters if is_first(self.partition) else None,
        )
        return self.of_files(paths, folder=root / (folder or dataset_id), book_suffixes=book_suffixes)

    def of_files(
        self, paths: Sequence[Path], *, folder: Path, book_suffixes: tuple[str, ...] = (), blocks: bool = False
    ) -> Iterator[Piece]:
        """Yield the rows of files in order; blocks: usual rows with a text as columns.

        folder: above the files. Their paths below it are the ids of books, and name the rows of a partition.
        """
        return self.pieces(
            paths,
            lambda path: path.relative_to(folder).as_posix(),
            lambda path: path.name.endswith(book_suffixes),
            texts=TEXT_FIELDS if blocks else (),
            others=_ID_FIELDS,
        )

    def of_hub(self, indexed: Iterable[tuple[int | str, dict[str, Any]]], dataset_id: str) -> Iterator[Piece]:
        """Yield the hub's rows. A row's size is the size of its line in a snapshot, so that both drop the same rows."""
        for index, row in indexed:
            where = f"{dataset_id}, row {index}"
            if self._is_too_large(row):
                self._reject(Problem.too_large(where, self._limit))
            else:
                self._kept += 1
                yield Piece(row, where, index=index)

    def _is_too_large(self, row: dict[str, Any]) -> bool:
        if _num_chars(row) * _MAX_ESCAPED_BYTES < self._limit:
            return False
        return len(json.dumps(row, ensure_ascii=False, default=str).encode(errors="replace")) >= self._limit

    def index_of(self, piece: Piece) -> int | str:
        """Return a row's number in the source from 0; in a partition its name PATH#ROW, or a book's own number."""
        return piece.index if self.partition is None or not piece.row else f"{piece.name}#{piece.row}"

    def meta(self, piece: Piece) -> dict[str, Any]:
        """Return the row's small scalar fields, or a book's path, and "index"."""
        fields = _small_fields(piece.item) if isinstance(piece.item, dict) else {"path": piece.name}
        return {**fields, "index": self.index_of(piece)}

    def ids(self, piece: Piece, rows: Columns) -> list[str]:
        """Return the ids that `source_id` returns for the samples of a piece's rows."""
        ids: list[str] = []
        for at, number in enumerate(rows.numbers):
            row = {name: values[at] for name, values in rows.fields.items()}
            if type(own := row.get("id")) is str and len(own) <= _MAX_META_CHARS:
                ids.append(own)
            else:
                index = int(piece.index) + at if self.partition is None else f"{piece.name}#{number}"
                ids.append(source_id(PretrainSample("", self.source, {**_small_fields(row), "index": index})))
        return ids


def _num_chars(value: Any) -> int:
    """Return about how many characters a value has in JSON, before its texts are escaped."""
    if isinstance(value, str):
        return len(value) + 4
    if isinstance(value, dict):
        return sum(len(str(key)) + 4 + _num_chars(item) for key, item in value.items())
    return sum(map(_num_chars, value)) if isinstance(value, list | tuple) else 24


def _small_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in row.items()
        if key not in TEXT_FIELDS
        and isinstance(value, str | int | float | bool)
        and not (isinstance(value, str) and len(value) > _MAX_META_CHARS)
    }


def row_text(sample: Mapping[str, Any]) -> str:
    """Return the first of text, content, document that is a string (PR-02).

    Raises: SourceError E304 if none is; the message lists the keys.
    """
    for key in TEXT_FIELDS:
        if isinstance(sample.get(key), str):
            return str(sample[key])
    fields = ", ".join(f"{key} ({type(value).__name__})" for key, value in sample.items()) or "no keys"
    raise SourceError(
        f"row without a text; expected a string under one of {', '.join(TEXT_FIELDS)}, found {fields}", code="E304"
    )


def check_take(take: int | None) -> None:
    """Check a limit of samples. Raises: ValueError if it is negative; None stands for no limit."""
    if take is not None and take < 0:
        raise ValueError(f"cannot take {take} samples; expected None or a number of at least 0")


def shuffled(items: Iterable[T], seed: int) -> Iterator[T]:
    """Yield all items in the order of torch.randperm; holds them in memory."""
    import torch

    held = list(items)
    for index in torch.randperm(len(held), generator=torch.Generator().manual_seed(seed)).tolist():
        yield held[index]
