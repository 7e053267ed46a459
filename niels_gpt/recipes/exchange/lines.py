"""The tables [export.NAME] and [published.NAME] of sources.toml: caches that are exported or pushed, by name.

[export.wikitext-megatron]
cache = "pretrain/wikitext"
to = "megatron"
folder = "exports/wikitext-megatron"   # relative to the folder of sources.toml

[published.wikitext]
cache = "pretrain/wikitext"
url = "s3://bucket/wikitext"           # a path is relative to the folder of sources.toml
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.exchange.names import FORMAT_NAMES
from niels_gpt.exchange.transfer.remote import scheme_of
from niels_gpt.recipes.user_sources import DELIVERIES, sources_tables
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import DefinitionError

EXPORT, PUBLISHED = DELIVERIES
_KEYS = {EXPORT: ("cache", "to", "folder"), PUBLISHED: ("cache", "url")}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_CACHES = {
    EXPORT: re.compile(r"(pretrain|sft|imported)/[A-Za-z0-9_-]+"),
    PUBLISHED: re.compile(
        r"tokenizer|eagle3/(targets|draft_vocab)|(pretrain|sft|imported|rollouts|trees)/[A-Za-z0-9_-]+"
    ),
}


@dataclass(frozen=True)
class Line:
    """One table: a cache, and where it goes."""

    kind: str
    """export or published."""
    name: str
    cache: str
    """Its key, such as pretrain/wikitext."""
    to: str | None = None
    """Of an export, the format."""
    folder: Path | None = None
    """Of an export, where it is written: absolute."""
    url: str | None = None
    """Of a published cache: a folder in a bucket."""

    @property
    def path(self) -> str:
        """Its name in Dagster: export/NAME or published/NAME."""
        return f"{self.kind}/{self.name}"

    @property
    def place(self) -> str:
        """Where the cache goes."""
        return str(self.folder or self.url)


def lines_of(settings: Settings) -> dict[str, Line]:
    """Return the lines of sources.toml by their path, in its order.

    Raises: ValueError (E104) for a table that is malformed, a second one of the same name but for - and _, and two of
        the same place; FileNotFoundError as `sources_tables`.
    """
    where, tables = sources_tables(settings)
    found: dict[str, Line] = {}
    taken: dict[str, str] = {}
    for line in _read(where, tables):
        for key in (line.path.replace("-", "_"), line.place):
            if key in taken:
                raise _error(f"{where}, {line.path}: {taken[key]} has this name or place already. Choose another one")
            taken[key] = line.path
        found[line.path] = line
    return found


def _read(where: Path, tables: Mapping[str, Any]) -> Iterator[Line]:
    for kind in DELIVERIES:
        for name, table in (tables.get(kind) or {}).items():
            yield _line(where, kind, name, table)


def _line(where: Path, kind: str, name: str, table: Any) -> Line:
    keys, at = _KEYS[kind], f"{where}, {kind}.{name}"
    if not _NAME.fullmatch(name):
        raise _error(f"{at}: expected a name of letters, digits, _ and - that starts with a letter")
    texts = isinstance(table, Mapping) and all(isinstance(value, str) and value.strip() for value in table.values())
    if not texts or set(table) != set(keys):
        # Without the values: a URL may hold credentials.
        found = f"the keys {', '.join(table)}" if isinstance(table, Mapping) else "no table"
        raise _error(f"{at}: found {found}, expected a table with the texts {', '.join(keys)}")
    if not _CACHES[kind].fullmatch(table["cache"]):
        raise _error(f"{at}: cache is {table['cache']!r}, expected the key of a cache, such as pretrain/wikitext")
    if kind == PUBLISHED:
        return Line(kind, name, table["cache"], url=_checked_url(where, at, table["url"]))
    if table["to"] not in FORMAT_NAMES:
        raise _error(f"{at}: to is {table['to']!r}, expected one of {', '.join(FORMAT_NAMES)}")
    folder = (where.parent / Path(table["folder"]).expanduser()).absolute()
    return Line(kind, name, table["cache"], to=table["to"], folder=folder)


def _checked_url(where: Path, at: str, url: str) -> str:
    """Return a URL that has no credentials, or an absolute path."""
    try:
        scheme = scheme_of(url)
    except ValueError as error:
        raise _error(f"{at}: {error}") from error
    if scheme != "file":
        return url.rstrip("/")
    return str((where.parent / Path(url.partition("://")[2] or url).expanduser()).absolute())


def _error(message: str) -> ValueError:
    return DefinitionError(message)
