"""Sources of one's own: a line NAME=GLOB[:FIELD] of the settings, or an entry of sources.toml.

    [pretrain]
    notes = "~/notes"                          # the same as the line notes=~/notes
    papers = "papers/**/*.jsonl.gz:abstract"   # rows, with their text in the field `abstract`

    [sft.support]                              # a table where there is more to say
    files = "chats/*.json"
    licence = "CC BY 4.0"
    attribution = "The support team"

A relative path is relative to the folder of sources.toml, or, in a line of the settings, to the current folder.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.data.credits import CREDITS
from niels_gpt.data.local import CHAT_SUFFIXES
from niels_gpt.data.text_files import open_regular
from niels_gpt.settings import Settings

FAMILIES = ("pretrain", "sft")
UNSTATED = "not stated"
_KEYS = ("files", "field", "licence", "attribution")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_FIELD = re.compile(r"(?P<files>.+):(?P<field>[^:/\\*?\[\]]+)")
MAX_TOML_BYTES = 1 << 20
_SUFFIX = re.compile(r"\.[^\s/*?\[\],]+")
_RESERVED = ("tokenizer",)  # a folder of this name beside a cache is its tokenizer


class UsageError(ValueError):
    """A flag, or a line of the settings, cannot be understood: exit status 2."""


@dataclass(frozen=True)
class OwnSource:
    """One source of one's own."""

    family: str
    """pretrain or sft."""
    name: str
    """Of the cache: FAMILY/NAME."""
    files: str
    """A file, a folder or a glob."""
    base: Path
    """What a relative `files` is relative to."""
    said_in: str
    """Where it is named, for messages."""
    field: str | None = None
    """Of a row, where its text is; None: text, content or document."""
    licence: str = UNSTATED
    """The user's line."""
    attribution: str = UNSTATED
    """The user's line: whom to name."""


def own_sources(settings: Settings) -> dict[str, OwnSource]:
    """Return the sources of one's own by name, those of sources.toml first.

    Raises: ValueError for an entry that cannot be understood, and for a name that is taken, UsageError where a line of
        the settings is the cause; FileNotFoundError for a `sources_file` other than the default that is not there.
    """
    found: dict[str, OwnSource] = {}
    for own in (*_of_file(settings), *_of_lines(settings)):
        where = f"{own.said_in}: {own.family}/{own.name}"
        if not _NAME.fullmatch(own.name):
            raise _wrong(own.said_in, f"{where}: expected a name of letters, digits and _ that starts with a letter")
        if own.name in CREDITS or own.name in _RESERVED:
            raise _wrong(own.said_in, f"{where}: {own.name} is a name of the project's own. Choose another one")
        if own.name in found:
            other = found[own.name]
            taken = f"{other.said_in} names {other.family}/{own.name} already"
            raise _wrong(own.said_in, f"{where}: {taken}. Choose another name")
        found[own.name] = own
    return found


def named_by_lines(settings: Settings) -> list[str]:
    """Return the names that the settings' lines give, without those of sources.toml."""
    return [own.name for own in _of_lines(settings)]


def text_suffixes(settings: Settings) -> tuple[str, ...]:
    """Return the suffixes that settings.as_text adds to those of text of one's own, each also with .gz.

    Raises: ValueError for what is no suffix, and for one whose files hold rows.
    """
    found: list[str] = []
    for item in (settings.as_text or "").split(","):
        suffix = item.strip().lower()
        if not suffix:
            continue
        if not _SUFFIX.fullmatch(suffix):
            raise ValueError(f"--as-text {item.strip()}: expected suffixes separated by commas, as in .py,.tex")
        if suffix.endswith(CHAT_SUFFIXES):
            raise ValueError(f"--as-text {suffix}: these files are read as rows. Copy them to files of another suffix")
        found += [suffix, f"{suffix}.gz"]
    return tuple(found)


def said_credit(settings: Settings, source: str) -> dict[str, str]:
    """Return what the settings' lines say of any source: its licence, its attribution, or nothing.

    Raises: UsageError for a line that is none, and for a name that no source has.
    """
    found: dict[str, str] = {}
    for name in ("licence", "attribution"):
        for line in filter(str.strip, (getattr(settings, name) or "").split(";")):
            about, equals, text = (part.strip() for part in line.partition("="))
            known = [*CREDITS, *own_sources(settings)]
            if not (equals and text) or about not in known:
                raise UsageError(f"--{name} {line.strip()}: expected SOURCE=TEXT, SOURCE one of {', '.join(known)}")
            if about == source:
                found[name] = text
    return found


def _of_lines(settings: Settings) -> Iterator[OwnSource]:
    for family in FAMILIES:
        for line in (getattr(settings, family) or "").split(";"):
            if line.strip():
                said_in = f"--{family} {line.strip()}"
                name, equals, files = line.partition("=")
                if not (equals and name.strip() and files.strip()):
                    raise UsageError(f"{said_in}: expected NAME=GLOB" + "[:FIELD]" * (family == "pretrain"))
                yield _own(family, name.strip(), files.strip(), Path.cwd(), said_in)


def _of_file(settings: Settings) -> Iterator[OwnSource]:
    path = Path(settings.sources_file).expanduser().absolute()
    if not path.exists():
        if settings.sources_file != Settings.sources_file:
            raise FileNotFoundError(f"{path}: no such file, expected the sources.toml that --sources-file names")
        return
    with open_regular(path) as file:
        raw = file.read(MAX_TOML_BYTES + 1)
    if len(raw) > MAX_TOML_BYTES:
        raise ValueError(f"{path}: more than {MAX_TOML_BYTES:,} bytes, expected a file that names sources")
    try:
        content = tomllib.loads(raw.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(f"{path}: not TOML that can be read: nested too deeply") from None
    except ValueError as error:  # of utf-8 and of TOML, and of an integer with too many digits
        raise ValueError(f"{path}: not TOML: {error}") from None
    for family, entries in content.items():
        if family not in FAMILIES or not isinstance(entries, Mapping):
            raise ValueError(f"{path}: found {family!r}, expected tables [pretrain] and [sft]")
        for name, entry in entries.items():
            yield _of_entry(family, name, entry, path)


def _of_entry(family: str, name: str, entry: Any, path: Path) -> OwnSource:
    if _is_text(entry):
        return _own(family, name, entry, path.parent, str(path))
    known = isinstance(entry, Mapping) and all(key in _KEYS and _is_text(entry[key]) for key in entry)
    if not known or "files" not in entry or (family == "sft" and "field" in entry):
        keys = [key for key in _KEYS if (family, key) != ("sft", "field")]
        raise ValueError(
            f'{path}, {family}.{name}: found {entry!r}, expected a text "GLOB", or a table with the texts '
            f"{', '.join(keys)}, of which `files` must be there"
        )
    return OwnSource(family, name, base=path.parent, said_in=str(path), **entry)


def _wrong(said_in: str, message: str) -> ValueError:
    return UsageError(message) if said_in.startswith("--") else ValueError(message)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _own(family: str, name: str, files: str, base: Path, said_in: str) -> OwnSource:
    split = _FIELD.fullmatch(files)
    if split is None or (base / Path(files).expanduser()).exists():  # a colon in the name of a file or folder
        return OwnSource(family, name, files, base, said_in)
    if family == "sft":
        if files.lower().endswith(CHAT_SUFFIXES):
            return OwnSource(family, name, files, base, said_in)
        raise _wrong(
            said_in,
            f"{said_in}: a source of chats takes no field, found {':' + split['field']!r}: which fields hold a chat is "
            f"known. Leave it out: {name}={split['files']}",
        )
    return OwnSource(family, name, split["files"], base, said_in, field=split["field"])
