"""verify: makes the checks of a finished cache, each file and row once, and collects what they find.

`_QUESTIONS` says which functions answer which check of checks.py. A cache is read in pieces of some megabytes. A check
that needs a sidecar or a plan is not made where a cache never had one, and the verdict says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from niels_gpt.eagle3.format.embeddings import read_target_embeddings
from niels_gpt.eagle3.format.layout import EMBEDDINGS_NAME, SIDECAR, shard_path
from niels_gpt.eagle3.format.samples import IDS_NAME, SAMPLES_NAME
from niels_gpt.eagle3.inspect.file_checks import incomplete, unused_files, wrong_checksums, wrong_shard_checksums
from niels_gpt.eagle3.inspect.open_cache import NotChecked, OpenCache, Row, open_cache
from niels_gpt.eagle3.inspect.row_checks import not_distributions, not_finite, other_ids
from niels_gpt.progress import Progress
from niels_gpt.storage.checks import MOST_PROBLEMS, Verdict, first_problems
from niels_gpt.storage.errors import CacheError

_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, OSError)
_EMBEDDING_ROWS = 4096  # read at a time

Problems = Iterator[CacheError | str]


def verify(
    path: Path,
    *,
    names: Collection[str] | None = None,
    progress: Progress | None = None,
    follow_links: bool = False,
) -> dict[str, Verdict]:
    """Return the verdict of each check by its name, in the order of CHECKS; `recomputed` has its own function.

    path: the public folder; it is resolved once, so all checks read one version.
    names: the checks to make; None: all.
    progress: called with the passes over a shard that are finished, the bytes read, and the bytes of all passes.
    follow_links: read files that are links, as in a snapshot of the Hugging Face hub; else they are problems.
    Raises: FileNotFoundError and CacheError where the manifest cannot be read; ValueError for a name that is no check.
        Damage to anything else is a problem of the checks that need it.
    """
    for name in names or ():
        if name not in _QUESTIONS:
            raise ValueError(f"there is no check {name!r}, expected some of {', '.join(_QUESTIONS)}")
    passes_done, bytes_done, total = 0, 0, 0

    def tick(num_bytes: int) -> None:
        nonlocal bytes_done
        bytes_done += num_bytes
        if progress is not None:
            progress(passes_done, bytes_done, total)

    cache = open_cache(path, follow_links=follow_links, tick=tick)
    reports = {name: Report(cache) for name in _QUESTIONS if names is None or name in names}
    for name, report in reports.items():
        report.ask_once(_QUESTIONS[name])
    by_shard = [(report, ask) for name, report in reports.items() if (ask := _QUESTIONS[name].per_shard)]
    by_row = [(report, ask_row) for name, report in reports.items() if (ask_row := _QUESTIONS[name].per_row)]
    shards = _shards(cache)
    total = (len(by_shard) + bool(by_row)) * sum(_size(Path(shard_path(cache.folder, shard))) for shard in shards)
    for shard in shards:
        for report, question in by_shard:
            report.ask(question, cache, shard)
            passes_done += 1
        if by_row:
            _ask_rows(cache, shard, by_row)
            passes_done += 1
    return {name: report.verdict() for name, report in reports.items()}


def _shards(cache: OpenCache) -> list[int]:
    """Return the shards to read; none where the manifest does not say which, which `complete` reports."""
    with suppress(CacheError):
        return cache.shards
    return []


def _size(path: Path) -> int:
    with suppress(OSError):  # a dangling link
        return path.stat().st_size
    return 0


def _ask_rows(cache: OpenCache, shard: int, questions: list[tuple[Report, Callable[[Row], Problems]]]) -> None:
    """Make several checks in one pass over a shard."""
    try:
        tables = cache.tables(shard)
    except (CacheError, OSError) as error:
        for report, _ in questions:
            report.ask(iter, [str(error)])
        return
    first = shard * cache.shard_size
    for number in range(first, first + cache.rows_of(shard)):
        row = cache.row(number, tables)
        for report, question in questions:
            report.ask(question, row)
        cache.tick(cache.layout.row_bytes)


class Report:
    """What one check found: MOST_PROBLEMS problems at most, each once, or why the check was not made."""

    def __init__(self, cache: OpenCache) -> None:
        self._cache = cache
        self._problems: dict[str, None] = {}  # a damaged file is found once for each row that needs it
        self._note: str | None = None
        self._remarks: list[str] = []
        self._figures = ""

    def ask(self, question: Callable[..., Problems], *arguments: object) -> None:
        """Add what a function yields; what it raises is a problem too."""
        if len(self._problems) > MOST_PROBLEMS or self._note:
            return
        try:
            for problem in islice(question(*arguments), MOST_PROBLEMS + 1 - len(self._problems)):
                self._problems[str(problem)] = None
        except NotChecked as error:
            self._note = str(error)
        except FileNotFoundError as error:
            missing = error.filename and self._cache.missing(Path(error.filename), "one of the cache's")
            self._problems[str(missing or error)] = None
        except (CacheError, OSError) as error:  # both name the file
            self._problems[str(error)] = None
        except _MALFORMED as error:
            found = f"not as docs/formats.md describes it ({error!r})"
            remedy = "See what the other checks report, or produce the cache again"
            self._problems[str(CacheError(self._cache.folder, found, remedy=remedy, code="E701"))] = None

    def ask_once(self, questions: _Questions) -> None:
        """Ask what is asked once in a cache. Where remarks and figures cannot be told, the problems say why."""
        if questions.once:
            self.ask(questions.once, self._cache)
        with suppress(NotChecked, *_MALFORMED):
            if questions.remarks:
                self._remarks = [str(remark) for remark in islice(questions.remarks(self._cache), MOST_PROBLEMS + 1)]
            if questions.figures:
                self._figures = questions.figures(self._cache)

    def verdict(self) -> Verdict:
        """Return what was found so far. Messages name the public folder, not the version's."""
        problems, remarks = (
            first_problems(text.replace(str(self._cache.folder), str(self._cache.path)) for text in texts)
            for texts in (self._problems, self._remarks)
        )
        return Verdict(problems, self._note, remarks, self._figures)


# --- what is asked once -----------------------------------------------------------------------------------------------


def _embeddings_not_finite(cache: OpenCache) -> Problems:
    if missing := cache.embeddings_missing():
        yield missing
        return
    table = read_target_embeddings(cache.folder, follow_links=cache.follow_links)
    for start in range(0, len(table), _EMBEDDING_ROWS):
        wrong = (~torch.isfinite(table[start : start + _EMBEDDING_ROWS])).any(dim=-1).nonzero()
        if len(wrong):
            found = f"the embedding of token {start + int(wrong[0])} is not finite"
            yield CacheError(cache.folder / EMBEDDINGS_NAME, found, "numbers", code="E701")
            return


def _other_samples(cache: OpenCache) -> Problems:
    planned = cache.plan["samples"]
    for name, key in ((SAMPLES_NAME, "sha256"), (IDS_NAME, "ids_sha256")):
        if (computed := cache.samples.checksums[name]) != planned[key]:
            yield CacheError(
                cache.folder / SIDECAR / name,
                f"sha256 {computed[:12]}",
                f"{str(planned[key])[:12]} by the plan: these are not the rows that the target was run on",
                cache.remedy(name),
                code="E701",
            )


def _no_positions(cache: OpenCache) -> Problems:
    if problem := cache.counts.problem:
        yield CacheError(cache.folder, problem, code="E709")


def _few_positions(cache: OpenCache) -> Problems:
    if warning := cache.counts.warning:
        yield CacheError(cache.folder, warning, code="W703")


@dataclass(frozen=True)
class _Questions:
    """The functions that make one check."""

    once: Callable[[OpenCache], Problems] | None = None
    per_shard: Callable[[OpenCache, int], Problems] | None = None
    per_row: Callable[[Row], Problems] | None = None
    remarks: Callable[[OpenCache], Problems] | None = None
    """Yields what is no damage."""
    figures: Callable[[OpenCache], str] | None = None


_QUESTIONS = {
    "complete": _Questions(once=incomplete, remarks=unused_files),
    "checksums": _Questions(once=wrong_checksums, per_shard=wrong_shard_checksums),
    "finite": _Questions(once=_embeddings_not_finite, per_row=not_finite),
    "ids_match": _Questions(once=_other_samples, per_row=other_ids),
    "distribution": _Questions(per_row=not_distributions),
    "positions": _Questions(once=_no_positions, remarks=_few_positions, figures=lambda cache: str(cache.counts)),
}
