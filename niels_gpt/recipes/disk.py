"""The disk that a build takes, told before it starts: at least, and at most, from the sizes of its files and budgets.

A token takes two bytes, and stands for one byte of text at least where a tokenizer spells it out, and for hardly more
than eight. So the bound holds for prose, code and tables alike, and is far off for none of them but one: prose takes
about a quarter of it. Where files are packed it goes by their unpacked size as far as the file tells that.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from niels_gpt.build.writer import TOKEN_BYTES
from niels_gpt.fileio import META_NAME
from niels_gpt.recipes.origins import Origin
from niels_gpt.remedies import build_command
from niels_gpt.settings import Settings
from niels_gpt.versions import BUILDING, versions_dir

logger = logging.getLogger(__name__)

MOST_TEXT = 8  # bytes that a token stands for
_UNPACKED = 8  # .parquet, and .gz of several parts: bytes of text for one of the file, at most
_LEAST_UNPACKED = 1
_OF_A_DOCUMENT = 96  # bytes: its start, twice; its digest; its id, and twice of an example; three numbers of an example
_LOOKED_AT = 1 << 18  # bytes of a file, to see how long its lines are
_LONGER_ROWS = 2  # so much shorter the others may be
_SFT_COPIES = 2  # the ids of all examples, and of each split
_FIXED = 1 << 14  # meta.json, the journal
_THREADS = 4  # times that a message is in oasst1's threads: 2.2 in the real one, 3.0 in the sample
# utf-8 bytes of what is read where there is no file to look at, rounded up from the hub's dataset pages.
_HUB_TEXT_BYTES = {"wikitext": 550_000_000, "dolly15k": 13_000_000, "oasst1": 120_000_000}
_HUB_ROWS = {"wikitext": 1_900_000, "dolly15k": 16_000, "oasst1": 90_000}
_BUDGETED = ("fineweb_edu", "gutenberg")
_LEAST_OF_A_HUB_DOCUMENT = 200  # tokens, on average; fineweb-edu has about a thousand


class NoRoomError(OSError):
    """A build would not fit on its disk."""


@dataclass(frozen=True)
class Need:
    """Bytes of disk that a build takes while it is made; what is there already is not counted off."""

    least: int = 0
    most: int = 0


def need_of(settings: Settings, key: str, origin: Origin) -> Need:
    """Return what a build of the cache `key` from its source takes. Reads the beginnings of files; asks no hub."""
    if origin.stub:
        return Need()
    copies = _SFT_COPIES if key.startswith("sft/") else 1
    hub = _HUB_TEXT_BYTES.get(origin.source, 0)
    found = [_text_of(path) for path in origin.files]
    least = sum(each[0] for each in found) or hub // 2
    text = sum(each[1] for each in found) or hub
    rows = sum(each[2] for each in found) or _HUB_ROWS.get(origin.source, 0)
    if origin.source == "oasst1":
        text, rows = text * _THREADS, rows * _THREADS
    tokens, least_tokens = text + 2 * rows, least // MOST_TEXT
    if origin.source in _BUDGETED:
        budget = sum(getattr(settings, f"{origin.source}_{split}_tokens") for split in ("train", "val"))
        if origin.files:
            tokens, least_tokens = min(tokens, budget), min(least_tokens, budget)
        else:
            tokens, least_tokens, rows = budget, budget, budget // _LEAST_OF_A_HUB_DOCUMENT
    most = TOKEN_BYTES * tokens * copies + _OF_A_DOCUMENT * rows
    return Need(TOKEN_BYTES * least_tokens * copies, most + most // 1000 + _FIXED)


def free_bytes(folder: Path) -> int:
    """Return the bytes that may be written to a folder, which need not be there yet."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    return shutil.disk_usage(existing).free


def left_bytes(path: Path) -> int:
    """Return the bytes that unfinished builds of a cache have written already."""
    files = (file for folder in versions_dir(path).glob(f"{BUILDING}-*") for file in folder.rglob("*"))
    return sum(file.lstat().st_size for file in files if file.is_file() and file.name != META_NAME)


def refuse_without_room(settings: Settings, cache_dir: Path, needs: dict[str, Need], left: int = 0) -> None:
    """Raise NoRoomError where builds do not fit, and warn where they may not.

    cache_dir: of the settings' caches. needs: of each cache that is built. left: bytes of them that are there already.
    """
    room = free_bytes(cache_dir) + left
    least, most = (sum(getattr(need, name) for need in needs.values()) for name in ("least", "most"))
    said = f"{cache_dir}: {', '.join(needs)}: at least {least:,} and at most {most:,} bytes of disk"
    if least > room:
        raise NoRoomError(
            f"{said}, and {room:,} are there. Make room, name another --cache-dir, ask for less text, or build without "
            f"this check: {build_command(settings, list(needs), '--no-disk-check')}"
        )
    if most > room:
        logger.warning("%s, and %s are there: it may not fit. What is done then is kept", said, f"{room:,}")


def _text_of(path: Path) -> tuple[int, int, int]:
    """Return the bytes of text in a file, at least and at most, and its rows, at most about."""
    size, name = path.stat().st_size, path.name.lower()
    if name.endswith(".parquet"):
        rows = _parquet_rows(path)
        return size * _LEAST_UNPACKED, size * _UNPACKED, rows
    if name.endswith((".md", ".txt")) and not _is_lines(path):
        return size, size, 1
    least = text = size
    if name.endswith(".gz"):
        least, text = _unpacked_size(path, size)
    return least // 2, text, _rows(path, text)  # a row has more than its text: names, and fields that are not read


def _is_lines(path: Path) -> bool:
    """Whether a .txt file is one of lines, as wikitext's: elsewhere it is one document."""
    return path.name.lower().endswith(".txt") and any(part.startswith("wikitext") for part in path.parts)


def _unpacked_size(path: Path, size: int) -> tuple[int, int]:
    with open(path, "rb") as file:
        file.seek(max(0, size - 4))
        said = int.from_bytes(file.read(4), "little")  # of the last part, modulo 4 GiB
    return (said, said) if said >= size else (size * _LEAST_UNPACKED, size * _UNPACKED)


def _rows(path: Path, text: int) -> int:
    try:
        with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb") as file:
            begin = file.read(_LOOKED_AT)
    except (OSError, EOFError, zlib.error):  # whoever reads it is told
        return 0
    rows = begin.count(b"\n") + begin.count(b"},")
    return 1 + (rows if len(begin) < _LOOKED_AT else _LONGER_ROWS * rows * text // len(begin))


def _parquet_rows(path: Path) -> int:
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(os.fspath(path)).num_rows)
    except (OSError, ValueError, pyarrow.ArrowException):
        return 0
