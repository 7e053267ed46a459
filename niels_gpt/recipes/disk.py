"""Bound the disk space of a build from below, and refuse a build without room.

The bound comes from the sizes of files and from token budgets. A token stands for at most eight bytes of text, and
takes two bytes, or four in a vocabulary of more than 65,536 ids. Prose takes about twice the bound. Packed files count
with their packed size.
"""

from __future__ import annotations

import shutil
import stat
from contextlib import suppress
from pathlib import Path

from niels_gpt.display.numbers import size_text
from niels_gpt.recipes.resolve import ResolvedSource
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import NoRoomError
from niels_gpt.storage.fileio import META_NAME, walked
from niels_gpt.storage.meta_json import is_sparse
from niels_gpt.storage.remedies import build_command
from niels_gpt.storage.versions import BUILDING, PARTITIONS, VERSION_DIGITS, versions_dir
from niels_gpt.tokenizers.protocol import token_dtype

_TOKEN_TEXT = 8  # bytes of text that a token stands for, at most
_ALL_TEXT = (".parquet", ".md", ".txt")  # other files have rows: names, and fields that are not read


def needed_bytes(settings: Settings, source: ResolvedSource, vocab_size: int | None) -> int:
    """Return a lower bound of the disk bytes for a build of the source's cache. Opens no file, never asks the hub.

    vocab_size: of the tokenizer; None if unknown: a token takes two bytes.
    """
    if source.stub:
        return 0
    spec = source.spec
    text = sum(map(_text_bytes, source.files)) or spec.hub_text_bytes // 2
    tokens = text // _TOKEN_TEXT
    if spec.budgets:
        budget = sum(getattr(settings, name) for name in spec.budget_settings)
        tokens = min(tokens, budget) if source.files else budget
    return token_dtype(vocab_size or 1).itemsize * tokens * source.family.id_copies


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    return shutil.disk_usage(existing).free


def unfinished_bytes(path: Path, fingerprint: str = "*") -> int:
    """Return the bytes that unfinished builds of a cache and its partitions have written.

    fingerprint: of the recipe whose partitions count; * for the partitions of all plans.
    """
    names = (f"{BUILDING}-*", f"{PARTITIONS}-{fingerprint[:VERSION_DIGITS]}")
    total = 0
    for folder in (folder for name in names for folder in versions_dir(path).glob(name)):
        with suppress(OSError):  # its builder has moved or removed it
            for _, below, about in walked(folder):
                total += about.st_size if stat.S_ISREG(about.st_mode) and below[-1] != META_NAME else 0
    return total


def refuse_without_room(settings: Settings, cache_dir: Path, needs: dict[str, int], written: int = 0) -> None:
    """Raise NoRoomError if builds do not fit on the disk.

    cache_dir: of the settings' caches. needs: least bytes of each cache to build, by key. written: bytes that
        unfinished builds of them have written already.
    """
    room, least = free_bytes(cache_dir) + written, sum(needs.values())
    if least > room:
        raise NoRoomError(
            f"{cache_dir}: {', '.join(needs)}: at least {size_text(least)} of disk are needed, {size_text(room)} are "
            "free. Make room, name another --cache-dir, ask for less text, or build without this check: "
            f"{build_command(settings, list(needs), '--no-disk-check')}"
        )


def _text_bytes(path: Path) -> int:
    """Return a lower bound of the bytes of text in a file."""
    about = path.stat()
    if is_sparse(about):  # it is refused when it is read
        return 0
    return about.st_size if path.name.lower().endswith(_ALL_TEXT) else about.st_size // 2
