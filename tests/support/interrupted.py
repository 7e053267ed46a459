"""Small builds that are interrupted by their source, or killed at an operation on the disk, and what they leave."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from niels_gpt.storage.fileio import Operation
from niels_gpt.storage.versions import versions_dir
from support.power_loss import Disk, Tree, put, recorded_below, tree_of
from support.small_builds import BUILDERS, ITEMS, quick_folder

KINDS = pytest.mark.parametrize("kind", sorted(BUILDERS))


def cut_off(items: Iterable[Any], at: int | None) -> Iterator[Any]:
    """Yield items, and fail at item number `at` as a network does."""
    for number, item in enumerate(items):
        if number == at:
            raise ConnectionError("upstream is gone")
        yield item


def interrupt(kind: str, path: Path, at: int, items: list[Any] | None = None, **changed: Any) -> None:
    """Leave a build unfinished after `at` items of its source."""
    with pytest.raises(ConnectionError, match="upstream is gone"):
        BUILDERS[kind](path, items=cut_off(ITEMS[kind](0) if items is None else items, at), **changed)


def files_of(root: Path) -> Tree:
    """Return all that a folder holds, without locks and the counts of runs that gained nothing."""
    return {name: content for name, content in tree_of(root).items() if not name.endswith(("/lock", "/attempts.json"))}


def left(path: Path) -> Tree:
    """Return all files beside a cache, its versions and unfinished builds included."""
    return files_of(path.parent)


def uninterrupted(kind: str, folder: Path, **changed: Any) -> Tree:
    """Return what a build leaves that is not interrupted."""
    BUILDERS[kind](folder / "whole" / "c", **changed)
    return left(folder / "whole" / "c")


def unfinished(path: Path, suffix: str = "") -> Path:
    """Return the folder of the one unfinished build of a cache; suffix ".journal": the folder of its journal."""
    (entry,) = (entry for entry in versions_dir(path).glob("building-*") if entry.suffix == suffix)
    return entry


def checkpoints(path: Path) -> list[dict[str, Any]]:
    """Return the checkpoints of an unfinished build."""
    lines = (unfinished(path, ".journal") / "journal.jsonl").read_bytes().splitlines()
    return [json.loads(line[9:]) for line in lines[1:]]


def killed_after(kind: str, folder: Path, is_last: Callable[[Operation], bool], **changed: Any) -> Path:
    """Return the path of a cache whose build was killed after the first operation for which `is_last` is true."""
    (folder / "recorded").mkdir()
    trace = recorded_below(folder / "recorded", lambda: BUILDERS[kind](folder / "recorded" / "c", **changed))
    disk = Disk({})
    disk.apply(trace[: next(number for number, operation in enumerate(trace) if is_last(operation)) + 1])
    put(disk.left("kill"), folder / "killed")
    return folder / "killed" / "c"


def journals(part: str) -> Callable[[Operation], bool]:
    """Return a condition: the operation writes a line to the journal that holds `part`."""
    return lambda operation: (
        operation[0] == "write" and "journal.jsonl" in operation[1] and part.encode() in operation[3]
    )


def line(value: Any) -> bytes:
    """Return a line of a journal as docs/formats.md has it."""
    text = json.dumps(value, sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def values_of(raw: Any) -> list[Any]:
    """Return the objects of a journal, the header included."""
    return [json.loads(text[9:]) for text in raw.splitlines()]


@functools.cache
def unfinished_tree(kind: str, sealed: bool = False) -> tuple[Tree, str, str]:
    """Return what an unfinished build left, the name of its journal, and the content sha256 that it would end with.

    sealed: it has done everything but its last callback, and the version is committed. Call it with small batches.
    """

    def fail(meta: Any) -> None:
        raise ConnectionError

    with quick_folder() as path:
        with pytest.raises(ConnectionError):
            if sealed:
                BUILDERS[kind](path / "c", committed=fail)
            else:
                BUILDERS[kind](path / "c", items=cut_off(ITEMS[kind](0), 34))
        tree = files_of(path)
        content = BUILDERS[kind](path / "other" / "c")["content_sha256"]
    return tree, next(name for name in tree if name.endswith("journal.jsonl")), content
