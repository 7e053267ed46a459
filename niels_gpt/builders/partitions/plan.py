"""plan.json: what all partitions of a cache share. Decides where a partition lies, and which folders are plans of ours.

The plan is fixed once, by the machine that comes first, and never changed: a partition's receipt names its sha256.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.documents import MAX_PARTITIONS, Partition
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import canonical_json, write_bytes
from niels_gpt.storage.meta_json import checked_sha256, parse_object, read_regular, wrong_value
from niels_gpt.storage.versions import (
    MAX_PLAN_BYTES,
    PARTITIONS,
    PLAN_KIND,
    PLAN_NAME,
    VERSION_DIGITS,
    versions_dir,
)

PLAN_VERSION = 1
LISTINGS_NAME = "listings"
"""Beside plan.json: more listings of the same text, one a line; none of it is in the plan's sha256."""
_OBJECTS = ("recipe", "source", "code")
_TEXTS = ("cache", "rule")
_DIGITS = 5  # of a partition's folder


@dataclass(frozen=True)
class Plan:
    """The plan of the partitions of one cache."""

    path: Path
    """The cache's public path, absolute."""
    content: Mapping[str, Any]
    """What plan.json holds: see `fix_plan`."""

    @property
    def folder(self) -> Path:
        """The folder of plan.json and of all partitions."""
        return versions_dir(self.path) / f"{PARTITIONS}-{self.fingerprint[:VERSION_DIGITS]}"

    @property
    def total(self) -> int:
        """Number of partitions."""
        return int(self.content["partitions"])

    @property
    def fingerprint(self) -> str:
        """The recipe's: 64 hex digits."""
        return str(self.content["fingerprint"])

    @property
    def sha256(self) -> str:
        """Of plan.json's bytes, in hex; each receipt names it."""
        return hashlib.sha256(canonical_json(self.content)).hexdigest()

    def partition(self, number: int) -> Partition:
        """Return a partition by its number, from 0. Raises: ValueError for one that there is not."""
        return Partition.checked(number, self.total)

    def partition_path(self, number: int) -> Path:
        """Return the public path of a partition: that of a cache, which may not be there yet. Raises: ValueError."""
        return self.folder / f"{self.partition(number).number:0{_DIGITS}d}"


def fix_plan(path: str | os.PathLike[str], content: Mapping[str, Any]) -> Plan:
    """Write plan.json unless it is there; return the plan. The caller holds `build_lock(path)`.

    content: plan_version 1, kind "partition_plan", cache (such as "pretrain/roam"), partitions (2 or more), rule,
        fingerprint (of the recipe, 64 hex digits), recipe, source and code (objects), tokenizer_sha256,
        tokenizer_content_sha256; listing and exclude_sha256 (both may be null).
    Raises: CacheError E511 for another content under the same fingerprint, naming the keys that differ; CacheError for
        a content in another form, and for what is no plan.json at its place.
    """
    plan = Plan(Path(os.path.abspath(path)), parse_object(canonical_json(content)))
    where = plan.folder / PLAN_NAME if _has_fingerprint(plan.content) else Path(path)
    _check(plan.content, str(where))
    if plan.folder.is_symlink():
        raise CacheError(plan.folder, "a symbolic link", "the folder of a plan", "Remove it", code="E205")
    if not os.path.lexists(where):
        fileio.make_dir(plan.folder)
        write_bytes(where, canonical_json(plan.content))
        return plan
    found = parse_object(read_regular(where, MAX_PLAN_BYTES))
    if found != plan.content:
        keys = sorted(key for key in {*found, *plan.content} if found.get(key) != plan.content.get(key))
        raise CacheError(
            where,
            f"another plan of the same cache, which differs in {', '.join(keys)}",
            "the plan that this machine makes",
            "Use the same program and source on all machines, or build from scratch with --restart",
            code="E511",
        )
    return plan


def plans_of(path: str | os.PathLike[str]) -> list[Plan]:
    """Return the plans of the cache at `path`, the most recently written first; what is no plan of ours is left out."""
    dated: list[tuple[int, str, Plan]] = []
    for folder in versions_dir(path).glob(f"{PARTITIONS}-*"):
        with suppress(OSError, ValueError):
            plan = _read(Path(os.path.abspath(path)), folder)
            dated.append(((folder / PLAN_NAME).lstat().st_mtime_ns, folder.name, plan))
    return [plan for *_, plan in sorted(dated, key=lambda entry: entry[:2], reverse=True)]


def _read(path: Path, folder: Path) -> Plan:
    """Return the plan in a folder. Raises: OSError, ValueError (CacheError too) for anything else."""
    if folder.is_symlink():
        raise CacheError(folder, "a symbolic link", "the folder of a plan", code="E205")
    raw = read_regular(folder / PLAN_NAME, MAX_PLAN_BYTES)
    plan = Plan(path, parse_object(raw))
    _check(plan.content, str(folder / PLAN_NAME))
    if plan.folder.name != folder.name or canonical_json(plan.content) != raw:
        raise wrong_value(str(folder / PLAN_NAME), "fingerprint", plan.fingerprint, f"that of {folder.name}")
    return plan


def _has_fingerprint(content: Mapping[str, Any]) -> bool:
    with suppress(CacheError):
        return bool(checked_sha256(content.get("fingerprint"), "fingerprint", PLAN_NAME))
    return False


def _check(content: Mapping[str, Any], where: str) -> None:
    """Raise CacheError for a plan in another form; nothing in it is trusted."""
    for key, expected in (("plan_version", PLAN_VERSION), ("kind", PLAN_KIND)):
        if content.get(key) != expected or type(content[key]) is not type(expected):
            raise wrong_value(where, key, content.get(key), repr(expected))
    total = content.get("partitions")
    if type(total) is not int or not 2 <= total <= MAX_PARTITIONS:
        raise wrong_value(where, "partitions", total, f"2 to {MAX_PARTITIONS:,}")
    for key in ("fingerprint", "tokenizer_sha256", "tokenizer_content_sha256"):
        checked_sha256(content.get(key), key, where)
    for key in ("listing", "exclude_sha256"):
        if content.get(key) is not None:
            checked_sha256(content[key], key, where)
    for key in _TEXTS:
        if not isinstance(content.get(key), str):
            raise wrong_value(where, key, content.get(key), "a text")
    for key in _OBJECTS:
        if not isinstance(content.get(key), dict):
            raise wrong_value(where, key, content.get(key), "an object")
