"""Reads the source id of each document: line i of a split's file of ids is `id.encode("unicode_escape")`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.fileio import id_of_line
from niels_gpt.storage.meta_json import open_regular, path_inside
from niels_gpt.storage.meta_json import printable as printable  # imported from here by what prints

_READ_BYTES = 1 << 20
_MAX_ID_BYTES = 1 << 24


def source_id(cache: Path, meta: dict[str, Any], split: str, number: int) -> str | None:
    """Return the source id of document `number` of a split; None for a cache whose builder recorded none.

    cache: the folder of one version, resolved. Raises: FileNotFoundError; CacheError where the file has no such line.
    """
    if split not in meta.get("ids", {}):
        return None
    line = next(itertools.islice(id_lines(cache, meta, split), number, None), None)
    if line is None:
        path = cache / meta["ids"][split]["name"]
        raise CacheError(path, f"has no line {number}", "one for each document", REBUILD, code="E201")
    with warnings.catch_warnings():  # about a damaged line
        warnings.simplefilter("ignore")
        return id_of_line(line, "replace")


def id_lines(cache: Path, meta: dict[str, Any], split: str) -> Iterator[bytes]:
    """Yield the source ids of a split in the order of its documents, as written in the file, without line ends.

    Raises: FileNotFoundError; CacheError also for an id of more than 16 MiB.
    """
    rest, path = b"", path_inside(cache, meta["ids"][split]["name"])
    with open(open_regular(path), "rb") as file:
        while content := file.read(_READ_BYTES):
            *lines, rest = (rest + content).split(b"\n")
            yield from lines
            if len(rest) > _MAX_ID_BYTES:
                raise CacheError(path, f"a line of more than {_MAX_ID_BYTES:,} bytes", "a source id", code="E201")
    if rest:
        yield rest
