"""Locks the partitions of an unfinished cache, and compares the code of the machines that build them.

    DIR/.parts/settings.json   the code of the machine that fixed the plan, and its command
    DIR/.parts/1-of-4          empty: partition 0 of 4 was started; file names count from 1
    DIR/.parts/1-of-4.lock     held by the process that builds it
    DIR/.parts/weights.lock    held by the process that writes the target's weights

A partition's lock is taken while the folder's own lock is held. So a process that holds the folder's lock, and finds no
partition locked, has the folder alone. None of these files belongs to the finished cache: the seal removes .parts.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import gcd
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.format.plan import differing_fields
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import canonical_json, write_bytes
from niels_gpt.storage.locks import file_lock, refuse_while_held
from niels_gpt.storage.locks.leases import MARKER
from niels_gpt.storage.meta_json import parse_object, read_regular, shortened
from niels_gpt.storage.versions import PROBE

Part = tuple[int, int]
"""(i, N), i from 1: partition i - 1 of N, with the shards whose index modulo N is i - 1."""
PARTS_NAME = ".parts"
_SETTINGS, _WEIGHTS_LOCK = "settings.json", "weights.lock"
_WEIGHTS_STATE = "the target's weights are being written"
_PART = re.compile(r"([1-9][0-9]{0,8})-of-([1-9][0-9]{0,8})")
_OWN = re.compile(
    rf"{_PART.pattern}|({_PART.pattern}|weights)\.lock(\.[1-9][0-9]{{0,8}})?|settings\.json"
    rf"|\.({_PART.pattern}|settings\.json)\.[0-9a-f]{{8}}\.tmp"
)
_COMMAND = ("niels-gpt", "eagle3", "precompute")
_MOST_BYTES = 1 << 16


def part_text(part: Part) -> str:
    """Return a partition's name in messages: "partition 0 of 4"."""
    return f"partition {part[0] - 1} of {part[1]}"


def has_parts(folder: Path) -> bool:
    """Return whether a folder has partitions and is not sealed."""
    return (folder / PARTS_NAME).is_dir() and not os.path.lexists(folder / fileio.META_NAME)


def known_parts(folder: Path) -> list[Part]:
    """Return the partitions that were ever started in a folder, by N and i.

    Raises: CacheError if .parts is not a folder.
    """
    found = (_PART.fullmatch(name) for name in _names(folder))
    parts = [(int(match[1]), int(match[2])) for match in found if match]
    return sorted((part for part in parts if part[0] <= part[1]), key=lambda part: part[::-1])


def refuse_running(folder: Path, part: Part | None = None) -> None:
    """Raise CacheError E503 if a process builds a partition that shares a shard with `part`; None: any partition.

    Call this while the folder's lock is held, so that no partition starts after the check.
    """
    for other in known_parts(folder):
        if part is None or (other[0] - part[0]) % gcd(other[1], part[1]) == 0:
            refuse_while_held(_lock_path(folder, other), folder, _state(other))
    if part is None:
        refuse_while_held(_checked(folder) / _WEIGHTS_LOCK, folder, _WEIGHTS_STATE)


@contextmanager
def part_lock(folder: Path, part: Part) -> Iterator[Path]:
    """Lock a partition and note that it was started; yield the lock.

    Raises: CacheError E503 if another process holds it.
    """
    note = _checked(folder) / f"{part[0]}-of-{part[1]}"
    fileio.make_dir(note.parent)
    if not os.path.lexists(note):
        write_bytes(note, b"")
    lock = _lock_path(folder, part)
    with file_lock(lock, folder, _state(part), wait=False):
        yield lock


@contextmanager
def weights_claim(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield a lock, and whether this process holds it: only then it writes the target's weights."""
    lock = _checked(folder) / _WEIGHTS_LOCK
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(lock, folder, _WEIGHTS_STATE, wait=False))
            is_ours = True
        except CacheError as error:
            if error.code != "E503":
                raise
            is_ours = False
        yield lock, is_ours


# --- what all machines have in common ---------------------------------------------------------------------------------


def fix_settings(folder: Path, code: Mapping[str, Any], command: Sequence[str]) -> None:
    """Record code and command of the first machine; on every other machine compare the code. The folder's lock is held.

    command: words of the precompute command without --partitions and --partition, for messages; () if unknown.
    Raises: CacheError E712 for other code, naming the differences.
    """
    if (settings := _settings(folder)) is None:
        fileio.make_dir(_checked(folder))
        words = list(command) if all(word.isprintable() for word in command) else []
        write_bytes(folder / PARTS_NAME / _SETTINGS, canonical_json({"code": dict(code), "command": words}))
    else:
        _refuse_other_code(folder, settings["code"], code)


def refuse_other_code(folder: Path, code: Mapping[str, Any]) -> None:
    """Raise CacheError E712 if other code started a folder's partitions, naming the differences."""
    if (settings := _settings(folder)) is not None:
        _refuse_other_code(folder, settings["code"], code)


def _refuse_other_code(folder: Path, recorded: Mapping[str, Any], code: Mapping[str, Any]) -> None:
    if names := differing_fields(recorded, code):
        values = (
            f"{name}: {shortened(value_of(recorded, name))}, here {shortened(value_of(code, name))}" for name in names
        )
        raise CacheError(
            folder,
            f"its partitions were built by other code: {'; '.join(values)}",
            remedy="Install the same version on all machines, or name another folder",
            code="E712",
        )


def value_of(record: Any, name: str) -> Any:
    """Return the value of a dotted name; None if it is missing."""
    for key in name.split("."):
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def part_command(folder: Path, part: Part | None) -> str:
    """Return the command that builds a partition of a folder, as far as is known; for None, all missing shards."""
    flags = ["--resume"] if part is None else ["--partitions", str(part[1]), "--partition", str(part[0] - 1)]
    words = (_settings(folder) or {"command": []})["command"]
    if words[: len(_COMMAND)] != [*_COMMAND]:  # another's words are not printed as a command
        command = shlex.join([*_COMMAND, "--output-dir", str(folder), *flags])
        return f"{command} with the options of the other partitions"
    if "--output-dir" in words[:-1]:  # another machine may have another path to it
        words[words.index("--output-dir") + 1] = str(folder)
    return shlex.join([*words, *flags])


def part_of(shard: int, parts: Sequence[Part]) -> Part | None:
    """Return a partition that has the shard: a started one, the smallest; else one of the most frequent N.

    Returns None if no partition was ever started.
    """
    if not parts:
        return None
    own = [part for part in parts if shard % part[1] == part[0] - 1]
    total = max(part[1] for part in own) if own else Counter(part[1] for part in parts).most_common(1)[0][0]
    return shard % total + 1, total


def _settings(folder: Path) -> dict[str, Any] | None:
    """Return settings.json; None if there is none. Raises: CacheError for one that no partition wrote."""
    path = _checked(folder) / _SETTINGS
    try:
        settings = parse_object(read_regular(path, _MOST_BYTES))
        command = settings["command"]
        if not isinstance(settings["code"], dict) or not isinstance(command, list):
            raise ValueError("code is no object, or command no list")
        if not all(isinstance(word, str) and word.isprintable() for word in command):
            raise ValueError("command is not a list of printable words")
        return settings
    except FileNotFoundError:
        return None
    except (ValueError, LookupError) as error:
        raise CacheError(
            path,
            f"no settings of a partition ({error!r:.200})",
            remedy=f"Build a partition again, after this command: rm {shlex.quote(str(path))}",
            code="E712",
        ) from error


# --- the folder itself ------------------------------------------------------------------------------------------------


def foreign_files(folder: Path) -> list[Path]:
    """Return the files in `.parts` that no partition wrote."""
    return [folder / PARTS_NAME / name for name in _names(folder) if not _OWN.fullmatch(name)]


def remove_parts(folder: Path) -> None:
    """Remove `.parts`, the `.locks.json` of --lock, and leftovers of killed checks from a finished cache.

    The folder's lock is held, and no partition is running.
    Raises: CacheError for a file in `.parts` that no partition wrote; then nothing is removed.
    """
    for path in foreign_files(folder):
        raise CacheError(path, "no file of a partition", remedy="Move it away, and seal again", code="E712")
    probes = [name for name in os.listdir(folder) if PROBE.fullmatch(name) and not (folder / name).is_symlink()]
    for name in (MARKER, PARTS_NAME, *probes):  # how the folder is locked was written by --lock: no file of a cache
        if os.path.lexists(folder / name):
            fileio.remove(folder / name)
            fileio.fsync_dir(folder)


def _state(part: Part) -> str:
    return f"{part_text(part)} is being written"


def _lock_path(folder: Path, part: Part) -> Path:
    return _checked(folder) / f"{part[0]}-of-{part[1]}.lock"


def _names(folder: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return sorted(os.listdir(_checked(folder)))
    return []


def _checked(folder: Path) -> Path:
    """Return `.parts`, which may be absent. Raises: CacheError for a link or a file, as nothing is written there."""
    path = folder / PARTS_NAME
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
        raise CacheError(path, "a link or a file", "a folder, or nothing", "Move it away", code="E205")
    return path
