"""The source id of each document: line i of a split's file of ids is `id.encode("unicode_escape")` of document i."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from niels_gpt.fileio import CacheError
from niels_gpt.records import open_regular, path_inside
from niels_gpt.records import printable as printable  # what prints asks for it here

_READ_BYTES = 1 << 20
_MAX_ID_BYTES = 1 << 24
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0, DEL and C1


def source_id(cache: Path, meta: dict[str, Any], split: str, number: int) -> str | None:
    """Return the source id of document `number` of a split; None for a cache whose builder recorded none.

    cache: the folder of one version, resolved. Raises: FileNotFoundError; CacheError where the file has no such line.
    """
    if split not in meta.get("ids", {}):
        return None
    line = next(itertools.islice(id_lines(cache, meta, split), number, None), None)
    if line is None:
        name = meta["ids"][split]["name"]
        raise CacheError(f"{cache / name}: has no line {number}, expected one for each document. Rebuild the cache")
    with warnings.catch_warnings():  # of a damaged line
        warnings.simplefilter("ignore")
        return line.decode("unicode_escape", errors="replace")


def id_lines(cache: Path, meta: dict[str, Any], split: str) -> Iterator[bytes]:
    """Yield the source ids of a split in the order of its documents, as they stand in the file, without line ends.

    Raises: FileNotFoundError; CacheError also for an id of more than 16 MiB.
    """
    rest, path = b"", path_inside(cache, meta["ids"][split]["name"])
    with open(open_regular(path), "rb") as file:
        while content := file.read(_READ_BYTES):
            *lines, rest = (rest + content).split(b"\n")
            yield from lines
            if len(rest) > _MAX_ID_BYTES:
                raise CacheError(f"{path}: a line of more than {_MAX_ID_BYTES:,} bytes, expected a source id")
    if rest:
        yield rest


def shown(text: str) -> str:
    """Return a text for a terminal: control characters but for line ends and tabs, which could command it, escaped."""
    return _CONTROLS.sub(lambda found: ascii(found.group())[1:-1], text)
