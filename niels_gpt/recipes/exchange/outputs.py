"""Export or push caches by tables of sources.toml, [export.NAME] and [published.NAME], unless they are up to date.

    [export.wikitext-megatron]
    cache = "pretrain/wikitext"
    to = "megatron"
    folder = "exports/wikitext-megatron"   # relative to the folder of sources.toml

    [published.wikitext]
    cache = "pretrain/wikitext"
    url = "s3://bucket/wikitext"           # a path is relative to the folder of sources.toml

An export is replaced only if its folder holds nothing but the files of its manifest. A cache at a URL is replaced only
if this table pushed it or found it up to date: a note in .runs remembers that.
"""

from __future__ import annotations

import re
import shlex
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any

from niels_gpt.buckets.bucket import Bucket, scheme_of
from niels_gpt.cache.meta import find_meta
from niels_gpt.exchange.names import FORMAT_NAMES
from niels_gpt.exchange.output import MANIFEST_NAME
from niels_gpt.exchange.transfer.described import Pushed
from niels_gpt.recipes.plan import every_key
from niels_gpt.recipes.records import RUNS_DIR, cache_root
from niels_gpt.recipes.user_sources import DELIVERIES, sources_tables
from niels_gpt.settings import Settings
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError, DefinitionError
from niels_gpt.storage.locks import file_lock
from niels_gpt.storage.meta_json import checked_name, parse_object, read_regular, sha256_regular
from niels_gpt.storage.remedies import PROGRAM, build_command, did_you_mean
from niels_gpt.work import Progress

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
    """One table: a cache and its destination."""

    kind: str
    """export or published."""
    name: str
    cache: str
    """Key, such as pretrain/wikitext."""
    to: str | None = None
    """Format of an export."""
    folder: Path | None = None
    """Absolute folder of an export."""
    url: str | None = None
    """URL of a published cache, a folder in a bucket."""

    @property
    def path(self) -> str:
        """Name in Dagster: export/NAME or published/NAME."""
        return f"{self.kind}/{self.name}"

    @property
    def place(self) -> str:
        """Folder or URL of the destination."""
        return str(self.folder or self.url)


@dataclass(frozen=True)
class Delivered:
    """Result of one table."""

    line: Line
    content_sha256: str
    """Content of the delivered cache."""
    reused: bool
    """Whether it was up to date, so that nothing was done."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Files and bytes, by the manifest or the push."""


def lines_of(settings: Settings) -> dict[str, Line]:
    """Return the tables of sources.toml by their path, in order.

    Raises: ValueError E104 for a malformed table, two names that differ only in - and _, or two tables with one
        destination; FileNotFoundError for a missing `sources_file` other than the default.
    """
    where, tables = sources_tables(settings)
    found: dict[str, Line] = {}
    taken: dict[str, str] = {}
    named = [(kind, name) for kind in DELIVERIES for name in tables.get(kind) or {}]
    for line in (_line(settings, where, kind, name, tables[kind][name]) for kind, name in named):
        for key in (line.path.replace("-", "_"), line.place):
            if key in taken:
                other = f"{taken[key]} has this name or place already. Choose another one"
                raise DefinitionError(f"{where}, {line.path}: {other}")
            taken[key] = line.path
        found[line.path] = line
    return found


def _line(settings: Settings, where: Path, kind: str, name: str, table: Any) -> Line:
    keys, at = _KEYS[kind], f"{where}, {kind}.{name}"
    if not _NAME.fullmatch(name):
        raise DefinitionError(f"{at}: expected a name of letters, digits, _ and - that starts with a letter")
    texts = isinstance(table, Mapping) and all(isinstance(value, str) and value.strip() for value in table.values())
    if not texts or set(table) != set(keys):
        # Without the values: a URL may hold credentials.
        found = f"the keys {', '.join(table)}" if isinstance(table, Mapping) else "no table"
        raise DefinitionError(f"{at}: found {found}, expected a table with the texts {', '.join(keys)}")
    cache = table["cache"]
    if not _CACHES[kind].fullmatch(cache):
        meant = did_you_mean(cache, every_key(settings)) or " Expected the key of a cache, such as pretrain/wikitext"
        raise DefinitionError(f"{at}: cache is {cache!r}.{meant}")
    if kind == PUBLISHED:
        url = str(table["url"]).rstrip("/")
        try:
            if scheme_of(table["url"]) == "file":
                url = str(_absolute(where, table["url"].partition("://")[2] or table["url"]))
        except ValueError as error:
            raise DefinitionError(f"{at}: {error}") from error
        return Line(kind, name, cache, url=url)
    if table["to"] not in FORMAT_NAMES:
        raise DefinitionError(f"{at}: to is {table['to']!r}, expected one of {', '.join(FORMAT_NAMES)}")
    return Line(kind, name, cache, to=table["to"], folder=_absolute(where, table["folder"]))


def _absolute(where: Path, path: str) -> Path:
    return (where.parent / Path(path).expanduser()).absolute()


def deliver(settings: Settings, line: Line, *, wait: bool = True, progress: Progress | None = None) -> Delivered:
    """Export or push the cache of a table, unless its destination has this content and format.

    Replaces an export of another version if its folder holds nothing but the files of its manifest, by name, size and
    sha256. Replaces a pushed cache if this table pushed it or found it up to date. wait: for another process that does
    the same.
    Raises: FileNotFoundError without the cache; CacheError E704 if the folder holds other files, E610 if the bucket
        does, E220 if the format cannot hold the cache, E611 for a damaged file, E612 if the bucket cannot be used;
        OSError.
    """
    cache = cache_root(settings) / line.cache
    meta = find_meta(cache)
    if meta is None:
        known = every_key(settings)
        remedy = f" Build it: {build_command(settings, line.cache)}"
        if line.cache not in known:  # misspelt, or not imported yet
            remedy = f"{did_you_mean(line.cache, known)} `{PROGRAM} list` names the caches that are there"
        raise FileNotFoundError(f"{cache}: no cache there, and {line.path} is made from it.{remedy}")
    content = str(meta["content_sha256"])
    lock = cache_root(settings) / RUNS_DIR / f"{line.kind}.{line.name}.lock"
    with file_lock(lock, line.place, "is being written", wait=wait):
        if line.kind == PUBLISHED:
            done = publish(cache, line, content, lock.with_suffix(".json"), progress)
            facts = {"files": done.files, "bytes": done.num_bytes, "sent_bytes": done.sent_bytes}
            return Delivered(line, content, not done.sent_bytes, facts)
        return _export(cache, line, content, progress)


def _wrong_size(at: object, size: int | None, record: Mapping[str, Any]) -> list[str]:
    """Return the problem of a file of this size; None if it is right."""
    if size == record["bytes"]:
        return []
    found = "is missing" if size is None else f"has {size:,} bytes"
    return [f"{at}: {found}, expected {record['bytes']:,} bytes"]


# --- exports ----------------------------------------------------------------------------------------------------------


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of an export; None for a missing or empty folder.

    Raises: CacheError E704 for a folder with anything else.
    """
    if not folder.is_symlink() and (not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))):
        return None
    try:
        manifest = parse_object(read_regular(folder / MANIFEST_NAME))
        if manifest.get("kind") != "export" or folder.is_symlink():
            raise ValueError("not the manifest of an export")
        for record in manifest["files"]:
            checked_name(record["name"], "a file's name", str(folder / MANIFEST_NAME))
        return manifest
    except (OSError, ValueError, LookupError, TypeError) as error:
        found, remedy = f"is not an export of this project ({error})", "Name another folder in sources.toml"
        raise CacheError(folder, found, "one, or nothing", remedy, code="E704") from error


def missing_of(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Return the problems of the files in a manifest, by their sizes."""
    problems = []
    for record in manifest["files"]:
        path = folder / record["name"]
        size = path.lstat().st_size if path.is_file() and not path.is_symlink() else None
        problems += _wrong_size(path, size, record)
    return problems


def _export(cache: Path, line: Line, content: str, progress: Progress | None) -> Delivered:
    from niels_gpt.exchange.exporting import export_cache

    assert line.folder is not None and line.to is not None
    folder, manifest = line.folder, manifest_of(line.folder)
    if manifest is None:
        export_cache(cache, line.to, folder, progress=progress)
    else:
        _refuse_foreign(folder, manifest)
        is_same = manifest["format"] == line.to and manifest["cache"]["content_sha256"] == content
        if is_same and not missing_of(folder, manifest):
            return Delivered(line, content, True, _facts(manifest))
        _refuse_foreign(folder, manifest, by_digest=True)
        # To a folder beside, which takes the place of the old one: two renames, at once one after the other.
        new, old = (folder.with_name(f".{folder.name}.{token_hex(4)}.tmp") for _ in range(2))
        try:
            export_cache(cache, line.to, new, progress=progress)
            _refuse_foreign(folder, manifest)  # what was put there since
            fileio.rename(folder, old)
            try:
                fileio.rename(new, folder)
            except BaseException:
                fileio.rename(old, folder)
                raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    manifest = manifest_of(folder)
    assert manifest is not None
    return Delivered(line, str(manifest["cache"]["content_sha256"]), False, _facts(manifest))


def _refuse_foreign(folder: Path, manifest: dict[str, Any], *, by_digest: bool = False) -> None:
    """Raise CacheError E704 if a folder holds anything but the files of its manifest, because it would be removed.

    by_digest: compare sha256 too, not only names and sizes.
    """
    named = {record["name"]: record for record in manifest["files"]}
    folders = {parent.as_posix() for name in named for parent in PurePosixPath(name).parents}

    def is_of_export(path: Path, name: str) -> bool:
        state, record = path.lstat(), named.get(name)
        if record is None or not stat.S_ISREG(state.st_mode):
            return name == MANIFEST_NAME or (name in folders and stat.S_ISDIR(state.st_mode))
        is_same = state.st_size == record["bytes"]
        return is_same and (not by_digest or sha256_regular(path) == record["sha256"])

    there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    if foreign := sorted(name for name, path in there.items() if not is_of_export(path, name)):
        more = f", nor are {len(foreign) - 1:,} more" if foreign[1:] else ""
        found = f"{foreign[0]} is not as its export wrote it{more}"
        raise CacheError(folder, found, remedy="Move your own files away, then export again", code="E704")


def _facts(manifest: dict[str, Any]) -> dict[str, Any]:
    records = manifest["files"]
    return {
        "format": manifest["format"],
        "files": len(records),
        "bytes": sum(record["bytes"] for record in records),
        "linked_bytes": sum(record["bytes"] for record in records if record["made"] == "link"),
        "noted": manifest["noted"],
    }


# --- published caches -------------------------------------------------------------------------------------------------


def publish(cache: Path, line: Line, content: str, note: Path, progress: Progress | None) -> Pushed:
    """Push the cache of a table. Sends only files that are missing at the URL.

    content: content_sha256 of the cache. note: file that remembers the pushes of this table.
    Raises: CacheError E610 for a cache at the URL that this table did not push, or for other files, E611 for a damaged
        file, E612 if the bucket cannot be used; OSError.
    """
    from niels_gpt.exchange.card import card_of
    from niels_gpt.exchange.transfer.push import push
    from niels_gpt.recipes.records import made_by

    assert line.url is not None
    ours, is_pushed = _noted(note, line.url)
    # The hub's README.md is sent with each content once: what somebody changed in it since then stays.
    has_card = scheme_of(line.url) == "hf" and not (is_pushed and ours == [content])
    card = card_of(cache, command=made_by(cache), url=line.url).encode() if has_card else None
    known = {"url": line.url, "contents": sorted({*ours, content}), "is_pushed": False}
    fileio.write_bytes(note, fileio.canonical_json(known))  # first: a push may be killed
    try:
        done = push(cache, line.url, replace=ours, card=card, progress=progress)
    except CacheError as error:
        if error.code != "E610":
            raise
        command = shlex.join(["niels-gpt", "push", str(cache), line.url, "--replace"])
        remedy = f"Name another url in sources.toml. To replace a cache there: {command}"
        raise CacheError(error.path, error.problem, remedy=remedy, code="E610") from error
    fileio.write_bytes(note, fileio.canonical_json({**known, "contents": [content], "is_pushed": True}))
    return done


def _noted(note: Path, url: str) -> tuple[list[str], bool]:
    """Return the contents that this table pushed to a URL, or tried to, and whether the last push ended well."""
    try:
        found = parse_object(read_regular(note))
        return (list(map(str, found["contents"])), found["is_pushed"] is True) if found["url"] == url else ([], False)
    except (OSError, ValueError, LookupError, TypeError):
        return [], False


def missing_at(cache: Path, line: Line) -> list[str]:
    """Return the problems at the URL: another cache, missing files, files of another size.

    Raises: CacheError E612 if no cache is there or the bucket cannot be used, E611 if its meta.json arrives damaged,
        E202, E206, E207 or E208 if it is no usable meta.json.
    """
    from niels_gpt.exchange.transfer.fetch import remote_cache

    assert line.url is not None
    bucket, meta = Bucket(line.url), find_meta(cache)
    remote = remote_cache(bucket)
    problems, sizes = [], bucket.sizes()
    if meta is None or meta["content_sha256"] != remote.content_sha256:
        problems.append(f"{line.url}: is another version ({remote.content_sha256[:12]}) than {line.cache} is now")
    for name, record in remote.records.items():
        size = sizes[name] if name in sizes else bucket.size(name)  # empty files may not be listed
        problems += _wrong_size(bucket.at(name), size, record)
    return problems
