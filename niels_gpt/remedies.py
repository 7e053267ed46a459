"""Commands for messages: as they must be typed, with the settings in use, for one cache."""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from niels_gpt.settings import Settings

PROGRAM = "python -m niels_gpt.cache.cli"
GENERIC = f"{PROGRAM} build-all"
"""What messages advise that know nothing but a path; see `with_command`."""
_FAMILIES = ("pretrain", "sft")
_LINES = (*_FAMILIES, "licence", "attribution")  # several in one setting, each a flag of its own
_TOKENIZER = "tokenizer"
_VERSIONS_DIR, _RUNS_DIR, _SAMPLE = ".versions", ".runs", "sample"
_MOST_BYTES = 1 << 16  # of the end of a file of run records; a record has about 2 KiB
_MOST_TEXT = 4096  # characters of a setting


def build_command(settings: Settings, keys: str | Sequence[str], *more: str) -> str:
    """Return the command that builds one cache or several under these settings, and no other; `more`: further flags.

    Of the tokenizer, which every build makes where it is missing: that builds all.

    A setting that has its default is left out, as is what the settings say of other sources only.
    """
    names = [key.rpartition("/")[2] for key in ([keys] if isinstance(keys, str) else keys)]
    of_all = names == [_TOKENIZER]
    words = [*PROGRAM.split(), *(["build-all"] if of_all else ["build", *names]), *more]
    types = get_type_hints(Settings)
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value in (field.default, None) or field.name.startswith("eagle3_"):
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.name in _LINES:
            lines = (line.strip() for line in value.split(";"))
            words += [word for line in lines if of_all or source_of(line) in names for word in (flag, line)]
        elif types[field.name] is bool:
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return shlex.join(words)


def rebuild_command(path: str | os.PathLike[str]) -> str | None:
    """Return the command that builds a cache from scratch, of which `path` is any file or folder.

    Its settings are those of the last build that was recorded in that folder of caches, but for the tokenizer: the one
    that is there now counts. None for a path in no folder of caches, or of a cache that nobody has built.
    """
    place = _place_of(Path(os.path.abspath(path)))
    if place is None:
        return None
    root, key = place
    of_sample = root.name == _SAMPLE
    settings = recorded_settings(root, key)
    settings = replace(settings, cache_dir=str(root.parent if of_sample else root))
    if of_sample:
        settings = replace(settings, source_root=_SAMPLE)
    if key == _TOKENIZER:
        return build_command(settings, key)
    if (root / _TOKENIZER).exists():
        settings = replace(settings, tokenizer_model=None)
    return build_command(settings, key, "--restart")


def with_command(message: str) -> str:
    """Return a message that begins with the path of a cache's file, with the command for that cache as its advice."""
    if GENERIC not in message:
        return message
    path = message.partition(": ")[0]
    command = rebuild_command(path) if os.sep in path and "\n" not in path and "\0" not in path else None
    return message if command is None else message.replace(GENERIC, command)


def source_of(line: str) -> str:
    return line.partition("=")[0].strip()


def _place_of(path: Path) -> tuple[Path, str] | None:
    """Return the folder of the caches and the key of the cache that a path is in."""
    parts = path.parts
    for at in range(len(parts) - 1, 0, -1):
        if parts[at] == _TOKENIZER and os.path.lexists(Path(*parts[: at + 1])):
            root = Path(*parts[:at])
            return (root.parent if root.name == _VERSIONS_DIR else root), _TOKENIZER
        if parts[at] in _FAMILIES:
            below = [part for part in parts[at + 1 :] if part != _VERSIONS_DIR]
            root = Path(*parts[:at])
            places = (root / parts[at], root / parts[at] / _VERSIONS_DIR)
            if below and below[0].isidentifier() and any(os.path.lexists(place / below[0]) for place in places):
                return root, f"{parts[at]}/{below[0]}"
    return None


def recorded_settings(root: Path, key: str) -> Settings:
    """Return the settings of the last recorded build; the defaults where there is none. Anybody may have written it."""
    try:
        found = json.loads(_last_line(root / _RUNS_DIR / f"{key.replace('/', '.')}.jsonl"))["settings"]
        types, known = get_type_hints(Settings), asdict(Settings())
        good = {name: value for name, value in found.items() if name in known and _is_good(value, types[name])}
        return Settings(**good)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Settings()


def _is_good(value: Any, kind: Any) -> bool:
    if isinstance(value, str):
        return kind in (str, str | None) and len(value) <= _MOST_TEXT and value.isprintable()
    return value is None or type(value) is kind


def _last_line(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path}: not a regular file")
        file.seek(max(0, about.st_size - _MOST_BYTES))
        return file.read(_MOST_BYTES).rstrip(b"\n").rpartition(b"\n")[2]
