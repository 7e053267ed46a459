"""Is a finished cache good? Checks by name, each a function that yields what it found; shard by shard, row by row.

A cache is read in pieces of some megabytes. What needs a sidecar is not checked in caches that other tools wrote, and
what needs a plan not in those that write_shard wrote; the verdict says so. `recomputed`, which needs the target, is in
recompute.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from niels_gpt.eagle3.file_checks import incomplete, strange_files, wrong_shard_sums, wrong_sums
from niels_gpt.eagle3.layout import SIDECAR, shard_path
from niels_gpt.eagle3.manifest import EMBEDDINGS_NAME, read_target_embeddings
from niels_gpt.eagle3.opened import NotChecked, Opened, open_cache, tables_of
from niels_gpt.eagle3.row_checks import Row, not_distributions, not_finite, other_ids
from niels_gpt.eagle3.samples import IDS_NAME, SAMPLES_NAME
from niels_gpt.fileio import CacheError

_MAX_PROBLEMS = 20  # of one check
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, OSError)
_EMBEDDING_ROWS = 4096  # looked at in one piece

Progress = Callable[[int, int], None]
"""Is told the bytes looked at, and those to look at in all."""


@dataclass(frozen=True)
class Verdict:
    """What one check found."""

    problems: list[str]
    """What was found, where, and what was expected; empty where the check passed or was not made."""
    note: str | None = None
    """Why the check was not made."""
    remarks: list[str] = field(default_factory=list)
    """What was found and is no damage."""
    figures: str = field(default="", compare=False)
    """What was measured."""


@dataclass(frozen=True)
class Check:
    """One question to a cache: once, to each of its shards, or to each of its samples."""

    name: str
    once: Callable[[Opened], Iterator[str]] | None = None
    of_shard: Callable[[Opened, int], Iterator[str]] | None = None
    of_row: Callable[[Opened, Row], Iterator[str]] | None = None
    remarks: Callable[[Opened], Iterator[str]] | None = None
    """Yields what is no damage, and yet worth a line."""
    figures: Callable[[Opened], str] | None = None
    """Gives what was measured, in words."""


def verify(
    cache: Path,
    *,
    names: Collection[str] | None = None,
    progress: Progress | None = None,
    follow_links: bool = False,
) -> dict[str, Verdict]:
    """Return the verdict of each check by its name, in the order of CHECKS.

    cache: the public folder; it is resolved once, so all checks look at one version.
    names: the checks to make; None: all.
    follow_links: read files that are links, as in a snapshot of the Hugging Face hub; else they are problems.
    Raises: FileNotFoundError and CacheError where the manifest cannot be read; ValueError for a name that is no check.
        Damage to anything else is a problem of the checks that need it.
    """
    for name in names or ():
        if name not in CHECKS:
            raise ValueError(f"there is no check {name!r}, expected some of {', '.join(CHECKS)}")
    chosen = [check for check in CHECKS.values() if names is None or check.name in names]
    by_row = [check for check in chosen if check.of_row]
    passes, seen, total = sum(check.of_shard is not None for check in chosen) + bool(by_row), 0, 0

    def tick(num_bytes: int) -> None:
        nonlocal seen
        seen += num_bytes
        if progress is not None:
            progress(seen, total)

    opened = open_cache(cache, tick, follow_links=follow_links)
    found = Findings(opened, cache)
    shards = found.shards()
    total = passes * sum(_size(Path(shard_path(opened.folder, shard))) for shard in shards)
    for check in chosen:
        if check.once is not None:
            found.add(check.name, check.once, opened)
        if check.remarks is not None:
            found.remark(check.name, check.remarks, opened)
        if check.figures is not None:
            found.measure(check.name, check.figures, opened)
    for shard in shards:
        for check in chosen:
            if check.of_shard is not None:
                found.add(check.name, check.of_shard, opened, shard)
        if by_row:
            _look_at_rows(found, opened, by_row, shard)
    return {check.name: found.verdict(check.name) for check in chosen}


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0  # a link to nothing


def _look_at_rows(found: Findings, cache: Opened, checks: list[Check], shard: int) -> None:
    """Make several checks in one go over a shard, so that it is read once."""
    try:
        tables = tables_of(cache, shard)
    except (CacheError, OSError) as error:
        for check in checks:
            found.add(check.name, iter, [f"{error}"])
        return
    first = shard * cache.shard_size
    for number in range(first, first + cache.rows_of(shard)):
        row = cache.row(number, tables)
        for check in checks:
            assert check.of_row is not None
            found.add(check.name, check.of_row, cache, row)
        cache.tick(cache.layout.row_bytes)


class Findings:
    """The problems of each check, up to so many as anybody would read, and why a check was not made."""

    def __init__(self, cache: Opened, shown: Path) -> None:
        """shown: the folder that the messages name."""
        self._cache, self._shown = cache, shown
        self._problems: dict[str, list[str]] = {}
        self._notes: dict[str, str] = {}
        self._remarks: dict[str, list[str]] = {}
        self._figures: dict[str, str] = {}

    def shards(self) -> list[int]:
        """Return the shards to look at; none where the manifest does not tell, which `complete` says."""
        try:
            return self._cache.shards
        except CacheError:
            return []

    def add(self, name: str, find: Callable[..., Iterator[str]], *arguments: object) -> None:
        """Add what a function yields to the findings of the check `name`; what it raises is one of them too."""
        problems = self._problems.setdefault(name, [])
        if len(problems) > _MAX_PROBLEMS or name in self._notes:
            return
        try:
            for problem in islice(find(*arguments), _MAX_PROBLEMS + 1 - len(problems)):
                _append(problems, problem)
        except NotChecked as error:
            self._notes[name] = str(error)
        except FileNotFoundError as error:
            expected = "one of the cache's"
            missing = error.filename and self._cache.missing(Path(error.filename), expected)
            _append(problems, missing or str(error))
        except (CacheError, OSError) as error:  # both name the file
            _append(problems, str(error))
        except _MALFORMED as error:
            how = "Look at what the other checks say, or produce the cache again"
            _append(problems, f"{self._cache.folder}: not as docs/formats.md describes it ({error!r}). {how}")

    def remark(self, name: str, find: Callable[[Opened], Iterator[str]], cache: Opened) -> None:
        """Add what is no damage to the check `name`; where it cannot be told, the problems say why."""
        with suppress(NotChecked, *_MALFORMED):
            self._remarks[name] = list(islice(find(cache), _MAX_PROBLEMS + 1))

    def measure(self, name: str, find: Callable[[Opened], str], cache: Opened) -> None:
        """Add what was measured to the check `name`; where it cannot be told, the problems say why."""
        with suppress(NotChecked, *_MALFORMED):
            self._figures[name] = find(cache)

    def verdict(self, name: str) -> Verdict:
        """Return what was found so far, each sentence once."""
        problems, remarks = (self._told(found.get(name, [])) for found in (self._problems, self._remarks))
        return Verdict(problems, self._notes.get(name), remarks, self._figures.get(name, ""))

    def _told(self, found: list[str]) -> list[str]:
        said = [problem.replace(str(self._cache.folder), str(self._shown)) for problem in found]
        return said[:_MAX_PROBLEMS] + ["... and more"] * (len(said) > _MAX_PROBLEMS)


def _append(problems: list[str], problem: str) -> None:
    if problem not in problems:  # a damaged file is found once for each row that needs it
        problems.append(problem)


def _infinite_embeddings(cache: Opened) -> Iterator[str]:
    path = cache.folder / EMBEDDINGS_NAME
    if not os.path.lexists(path):
        yield cache.missing(path, "the target's input embeddings")
        return
    table = read_target_embeddings(cache.folder, follow_links=cache.follow_links)
    for start in range(0, len(table), _EMBEDDING_ROWS):
        wrong = (~torch.isfinite(table[start : start + _EMBEDDING_ROWS])).any(dim=-1).nonzero()
        if len(wrong):
            yield f"{path}: the embedding of token {start + int(wrong[0])} is not finite, expected numbers"
            return


def _other_samples(cache: Opened) -> Iterator[str]:
    found, expected = cache.samples, cache.plan["samples"]
    for name, key in ((SAMPLES_NAME, "sha256"), (IDS_NAME, "ids_sha256")):
        if found.sums[name] != expected[key]:
            yield (
                f"{cache.folder / SIDECAR / name}: sha256 {found.sums[name][:12]}, expected {str(expected[key])[:12]} "
                f"by the plan: these are not the rows that the target was run on. {cache.again(name)}"
            )


def _other_ids(cache: Opened, row: Row) -> Iterator[str]:
    ids, mask = (torch.from_numpy(part.astype("int64")) for part in cache.samples.row(row.number))
    return other_ids(row, ids, mask, int(cache.plan["tokenizer"]["pad_id"]))


def _no_positions(cache: Opened) -> Iterator[str]:
    if problem := cache.counts.problem:
        yield f"{cache.folder}: {problem}"


def _few_positions(cache: Opened) -> Iterator[str]:
    if warning := cache.counts.warning:
        yield f"{cache.folder}: {warning}"


CHECKS = {
    check.name: check
    for check in (
        Check("complete", once=incomplete, remarks=strange_files),
        Check("checksums", once=wrong_sums, of_shard=wrong_shard_sums),
        Check("finite", once=_infinite_embeddings, of_row=lambda cache, row: not_finite(row)),
        Check("ids_match", once=_other_samples, of_row=_other_ids),
        Check("distribution", of_row=lambda cache, row: not_distributions(row)),
        Check("positions", once=_no_positions, remarks=_few_positions, figures=lambda cache: str(cache.counts)),
    )
}
"""The checks that need no target, by name; checks.py says what they ask."""
