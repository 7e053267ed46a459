"""Disk space: what a build needs at least and at most, what is free, and when a build is refused for lack of it.

The bounds come from the sizes of files and from token budgets. A token takes two bytes, in a vocabulary of more than
65,536 ids four. It stands for at least one byte of text and hardly ever for more than eight, so the bounds hold for
prose, code and tables; prose takes about a quarter of the upper one. Packed files count with their unpacked size, as
far as the file states it.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from niels_gpt.data.files.text import opened_text
from niels_gpt.display.numbers import size_text
from niels_gpt.recipes.resolve import ResolvedSource
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import NoRoomError
from niels_gpt.storage.fileio import META_NAME, walked
from niels_gpt.storage.meta_json import is_sparse
from niels_gpt.storage.remedies import build_command
from niels_gpt.storage.versions import BUILDING, PARTITIONS, VERSION_DIGITS, versions_dir
from niels_gpt.tokenizers.protocol import MAX_IDS, token_dtype

logger = logging.getLogger(__name__)

_MAX_TOKEN_TEXT = 8  # bytes of text that a token stands for
_UNPACKED = 8  # bytes of text for a byte of .parquet or .zst, or of .gz in several parts, at most
_DOCUMENT_BYTES = 96  # its start, twice; its digests; its id
_PROBE_BYTES = 1 << 18  # read from a file to see how long its lines are
_LONGER_ROWS = 2  # the rows after the probe may be shorter by this factor
_INDEX_COPIES = 2  # of a partitioned cache: of each partition, and of all when they are sealed; shards are linked
_ID_BYTES = 2  # of disk for a byte of recorded ids or floats: four for "1,"
_TEMPLATE_TOKENS = 512  # that a chat template adds to a chat, at most on average
_LOSS_BITS = 9  # of a token of a cache with loss bits: a byte until the end, and the bit
_FIXED = 1 << 14  # meta.json, the journal
_MIN_HUB_DOCUMENT_TOKENS = 200  # on average; fineweb-edu has about a thousand


@dataclass(frozen=True)
class DiskNeed:
    """Bytes of disk that a build takes while it runs, an unfinished build of it included."""

    least: int = 0
    most: int = 0


def needed_bytes(settings: Settings, source: ResolvedSource, vocab_size: int | None) -> DiskNeed:
    """Return what a build of the source's cache takes. Reads the beginnings of its files; never asks the hub.

    vocab_size: of the tokenizer; None: not known, so that a token has two or four bytes.
    """
    if source.stub:
        return DiskNeed()
    spec = source.spec
    sizes = [_text_size(path) for path in source.files]
    least = sum(size[0] for size in sizes) or spec.hub_text_bytes // 2
    text = (sum(size[1] for size in sizes) or spec.hub_text_bytes) * spec.copies
    rows = (sum(size[2] for size in sizes) or spec.hub_rows) * spec.copies
    if spec.family == "rollouts":
        return DiskNeed(0, _ID_BYTES * text + _DOCUMENT_BYTES * rows + _FIXED)
    tokens, least_tokens = text + 2 * rows, least // _MAX_TOKEN_TEXT
    if spec.budgets:
        budget = sum(getattr(settings, name) for name in spec.budget_settings)
        if source.files:
            tokens, least_tokens = min(tokens, budget), min(least_tokens, budget)
        else:
            tokens, least_tokens, rows = budget, budget, budget // _MIN_HUB_DOCUMENT_TOKENS
    least_bytes, most_bytes = (token_dtype(vocab_size or ids).itemsize for ids in (1, MAX_IDS))
    most = most_bytes * tokens + _DOCUMENT_BYTES * rows * (1 if settings.partitions < 2 else _INDEX_COPIES)
    if spec.family == "sft" and settings.chat_template is not None:
        added = _TEMPLATE_TOKENS * rows
        most += most_bytes * added + _LOSS_BITS * (tokens + added) // 8
    return DiskNeed(least_bytes * least_tokens, most + most // 1000 + _FIXED)


def bytes_below(path: Path) -> int:
    """Return the bytes of a file or link, or of all files in a folder. Links are not followed."""
    if path.is_dir() and not path.is_symlink():
        return sum(about.st_size for _, _, about in walked(path) if not stat.S_ISDIR(about.st_mode))
    return path.lstat().st_size


def free_bytes(folder: Path) -> int:
    """Return the bytes that may be written to a folder, which need not exist yet."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    return shutil.disk_usage(existing).free


def unfinished_bytes(path: Path, fingerprint: str = "*") -> int:
    """Return the bytes that unfinished builds of a cache, and its partitions, have written already.

    fingerprint: of the recipe whose partitions count; * for those of all plans.
    """
    names = (f"{BUILDING}-*", f"{PARTITIONS}-{fingerprint[:VERSION_DIGITS]}")
    total = 0
    for folder in (folder for name in names for folder in versions_dir(path).glob(name)):
        with suppress(OSError):  # its builder has moved or removed it
            for _, below, about in walked(folder):
                total += about.st_size if stat.S_ISREG(about.st_mode) and below[-1] != META_NAME else 0
    return total


def refuse_without_room(settings: Settings, cache_dir: Path, needs: dict[str, DiskNeed], written: int = 0) -> None:
    """Raise NoRoomError where builds do not fit, and warn where they may not.

    cache_dir: of the settings' caches. needs: of each cache that is built. written: bytes that unfinished builds of
        them have written already.
    """
    room = free_bytes(cache_dir) + written
    least, most = (sum(getattr(need, name) for need in needs.values()) for name in ("least", "most"))
    need = f"{cache_dir}: {', '.join(needs)}: at least {size_text(least)} and at most {size_text(most)} of disk"
    if least > room:
        raise NoRoomError(
            f"{need} are needed, {size_text(room)} are free. Make room, name another --cache-dir, ask for less text, "
            f"or build without this check: {build_command(settings, list(needs), '--no-disk-check')}"
        )
    if most > room:
        logger.warning(
            "%s are needed, %s are free: the build may not fit. It can be resumed after the disk is full",
            need,
            size_text(room),
            extra={"code": "W501"},
        )


def _text_size(path: Path) -> tuple[int, int, int]:
    """Return the bytes of text in a file, at least and at most, and about how many rows it has at most."""
    about, name = path.stat(), path.name.lower()
    if is_sparse(about):  # it is refused when it is read
        return 0, 0, 0
    size = about.st_size
    if name.endswith(".parquet"):
        return size, size * _UNPACKED, _parquet_rows(path)
    if name.endswith((".md", ".txt")) and not _is_lines(path):
        return size, size, 1
    least = text = size
    if name.endswith(".gz"):
        least, text = _unpacked_size(path, size)
    elif name.endswith(".zst"):
        text = size * _UNPACKED
    return least // 2, text, _rows(path, text)  # a row has more than its text: names, and fields that are not read


def _is_lines(path: Path) -> bool:
    """Whether a .txt file is one of lines, such as wikitext's; elsewhere it is one document."""
    return path.name.lower().endswith(".txt") and any(part.startswith("wikitext") for part in path.parts)


def _unpacked_size(path: Path, size: int) -> tuple[int, int]:
    with open(path, "rb") as file:
        file.seek(max(0, size - 4))
        stated = int.from_bytes(file.read(4), "little")  # of the last part, modulo 4 GiB
    return (stated, stated) if stated >= size else (size, size * _UNPACKED)


def _rows(path: Path, text: int) -> int:
    try:
        with opened_text(path) as file:
            begin = file.read(_PROBE_BYTES)
    except (OSError, ValueError):  # the loader reports it
        return 0
    rows = begin.count(b"\n") + begin.count(b"},")
    return 1 + (rows if len(begin) < _PROBE_BYTES else _LONGER_ROWS * rows * text // len(begin))


def _parquet_rows(path: Path) -> int:
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(os.fspath(path)).num_rows)
    except (OSError, ValueError, pyarrow.ArrowException):
        return 0
