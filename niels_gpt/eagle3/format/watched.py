"""watch.json: how far `eagle3 watch` is with a cache. It is in the folder until the cache is complete.

A folder with it and without manifest.json is an unfinished cache, which readers refuse. A shard counts once watch.json
counts it: it is written after the shard and its receipt, and before any of the shard's source files is removed.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.format.layout import WATCH_NAME, PathLike, read_file
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import canonical_json, write_bytes
from niels_gpt.storage.meta_json import parse_object, printable

_VERSION = 1
_COUNTS = ("taken", "shards", "removed_files", "removed_bytes", "kept_files")


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
        kinds: dict[str, type] = {name: int for name in _COUNTS}
        kinds |= {"command": list, "settings": dict, "dropped": dict, "first_dropped": list, "removing": list}
        wrong = [name for name, kind in kinds.items() if type(journal.get(name)) is not kind]
        wrong += [name for name in _COUNTS if name not in wrong and journal[name] < 0]
        proved, end, version = journal.get("proved"), journal.get("end"), journal.get("watch_version")
        texts = [*journal.get("command", ()), *journal.get("first_dropped", ()), *journal.get("dropped", ())]
        if wrong or version != _VERSION or not isinstance(proved, dict | None) or not isinstance(end, int | None):
            raise ValueError(f"watch_version {version!r}; of a wrong type: {', '.join(wrong) or 'none'}")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a list or an object in it has other things than texts")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        if isinstance(error, CacheError):
            raise
        remedy = "Remove the folder, and watch into a fresh one"
        raise CacheError(path, f"no journal of eagle3 watch ({error})", remedy=remedy, code="E701") from error
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
