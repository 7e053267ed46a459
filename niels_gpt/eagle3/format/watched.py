"""watch.json: how far `eagle3 watch` is with a cache. It is in the folder until the cache is complete.

A folder with it and without manifest.json is an unfinished cache, which readers refuse. A shard counts once watch.json
counts it: it is written after the shard and its receipt, and before any of the shard's source files is removed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.format.layout import WATCH_NAME, PathLike, read_file
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import canonical_json, write_bytes
from niels_gpt.storage.meta_json import parse_object, printable

FRESH = (
    "Watch into a fresh folder. If --consume removed files, the server must write their states again, as this folder "
    "alone has them"
)
"""Remedy for a folder that cannot be continued."""
_VERSION = 1
_COUNTS = ("taken", "shards", "removed_files", "removed_bytes", "kept_files")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_removing(value: Any) -> bool:
    """Return whether a value is a list of [sample, [inode, size, time of modification, of change, lock]]."""
    pairs = isinstance(value, list) and all(isinstance(each, list) and len(each) == 2 for each in value)
    return pairs and all(
        _is_count(index) and isinstance(state, list) and len(state) == 5 and all(type(each) is int for each in state)
        for index, state in value
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_VALID: dict[str, Callable[[Any], bool]] = {
    "watch_version": lambda value: type(value) is int and value == _VERSION,
    "command": _are_texts,
    "settings": lambda value: isinstance(value, dict),
    "proved": lambda value: isinstance(value, dict | None),
    "end": lambda value: value is None or _is_count(value),
    "dropped": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
    "first_dropped": _are_texts,
    "was_fp8": lambda value: isinstance(value, bool),
    "removing": _is_removing,
    **dict.fromkeys(_COUNTS, _is_count),
}
"""Key of watch.json -> whether a value is valid."""


def new_journal(command: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the journal of a run that has taken nothing.

    command: the words after `niels-gpt eagle3 watch`. settings: what a rerun must share, ready for JSON.
    """
    return {
        "watch_version": _VERSION,
        "command": command,
        "settings": settings,
        "proved": None,
        "end": None,
        "dropped": {},
        "first_dropped": [],
        "was_fp8": False,
        "removing": [],
        **dict.fromkeys(_COUNTS, 0),
    }


def write_journal(folder: Path, journal: dict[str, Any]) -> None:
    """Write the journal atomically and durably."""
    write_bytes(folder / WATCH_NAME, canonical_json(journal))


def read_journal(folder: PathLike) -> dict[str, Any] | None:
    """Return the journal of an unfinished cache; None if there is none. Raises: CacheError E701 for a damaged one."""
    path = Path(folder, WATCH_NAME)
    try:
        journal = parse_object(read_file(path))
        if wrong := [name for name, is_good in _VALID.items() if not is_good(journal.get(name))]:
            raise ValueError(f"not valid: {', '.join(wrong)}")
        taken, end = journal["taken"], journal["end"]
        if end not in (None, taken) or any(index >= taken for index, _ in journal["removing"]):
            raise ValueError(f"{taken:,} samples were taken, and `end` or `removing` has others")
    except FileNotFoundError:
        return None
    except CacheError:
        raise
    except ValueError as error:
        raise CacheError(path, f"no journal of eagle3 watch ({error})", remedy=FRESH, code="E701") from error
    return journal


def command_of(journal: dict[str, Any]) -> str:
    """Return the command that continues a journal."""
    return printable(shlex.join(["niels-gpt", "eagle3", "watch", *journal["command"]]))


def unfinished_text(folder: PathLike) -> str:
    """Return how far a watched folder is, and the command that continues it, after a space; "" for another folder."""
    if not os.path.lexists(Path(folder, WATCH_NAME)):
        return ""
    try:
        journal = read_journal(folder)
    except (CacheError, OSError) as error:
        return f" It is being built by eagle3 watch, and its {WATCH_NAME} cannot be read: {error}"
    if journal is None:
        return ""
    done = f"{journal['shards']:,} shards of the first {journal['taken']:,} samples are there"
    return f" It is being built by eagle3 watch: {done}. Continue it: {command_of(journal)}"
