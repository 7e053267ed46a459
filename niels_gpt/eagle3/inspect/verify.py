"""verify: makes the checks of a finished cache, each file and row once, and collects what they find.

`_QUESTIONS` says which functions answer which check of checks.py. A cache is read in pieces of some megabytes. A check
that needs a sidecar or a plan is not made where a cache never had one, and the verdict says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from niels_gpt.display.numbers import many, share_text
from niels_gpt.eagle3.format.layout import SIDECAR, shard_path
from niels_gpt.eagle3.format.samples import IDS_NAME, SAMPLES_NAME
from niels_gpt.eagle3.inspect.file_checks import incomplete, unused_files, wrong_checksums, wrong_shard_checksums
from niels_gpt.eagle3.inspect.native import row_checks as of_samples
from niels_gpt.eagle3.inspect.native.opened import NativeCache
from niels_gpt.eagle3.inspect.open_cache import OpenCache
from niels_gpt.eagle3.inspect.opening import open_cache, read_each_shard
from niels_gpt.eagle3.inspect.published import row_checks as of_rows
from niels_gpt.eagle3.inspect.published.opened import PublishedCache
from niels_gpt.eagle3.inspect.report import Problems, Questions, Report
from niels_gpt.eagle3.totals import FEW
from niels_gpt.progress import Progress
from niels_gpt.storage.checks import Figures, Verdict
from niels_gpt.storage.errors import CacheError


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
        if name not in _QUESTIONS[PublishedCache]:
            raise ValueError(f"there is no check {name!r}, expected some of {', '.join(_QUESTIONS[PublishedCache])}")
    passes_done, bytes_done, total = 0, 0, 0

    def tick(num_bytes: int) -> None:
        nonlocal bytes_done
        bytes_done += num_bytes
        if progress is not None:
            progress(passes_done, bytes_done, total)

    cache = open_cache(path, follow_links=follow_links, tick=tick)
    questions = _QUESTIONS[type(cache)]
    reports = {name: Report(cache) for name in questions if names is None or name in names}
    for name, report in reports.items():
        report.ask_once(questions[name])
    by_shard = [(report, ask) for name, report in reports.items() if (ask := questions[name].per_shard)]
    by_row = [(report, ask_row) for name, report in reports.items() if (ask_row := questions[name].per_row)]
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


def _ask_rows(cache: OpenCache, shard: int, questions: list[tuple[Report, Callable[[Any], Problems]]]) -> None:
    """Make several checks in one pass over a shard."""
    try:
        rows = cache.stored(shard)
    except (CacheError, OSError) as error:
        for report, _ in questions:
            report.ask(iter, [error])
        return
    for row in rows:
        for report, question in questions:
            report.ask(question, row)
        cache.tick(row.nbytes)


# --- what is asked once -----------------------------------------------------------------------------------------------


def _incomplete(cache: OpenCache) -> Problems:
    """Yield what `incomplete` finds; where that is nothing, raise what the reader raises."""
    is_complete = True
    for problem in incomplete(cache):
        is_complete = False
        yield problem
    if is_complete:
        read_each_shard(cache)


def _other_samples(cache: OpenCache) -> Problems:
    planned = cache.plan["samples"]
    for name, key in ((SAMPLES_NAME, "sha256"), (IDS_NAME, "ids_sha256")):
        if (computed := cache.samples.checksums[name]) != planned[key]:
            yield CacheError(
                cache.folder / SIDECAR / name,
                f"sha256 {computed[:12]}",
                f"{str(planned[key])[:12]} by {SIDECAR}/plan.json: these are not the rows that the target was run on",
                cache.remedy(name),
                code="E701",
            )


def _no_positions(cache: OpenCache) -> Problems:
    if problem := cache.counts.problem:
        yield CacheError(cache.folder, problem, code="E709")


def _few_positions(cache: OpenCache) -> Problems:
    if warning := cache.counts.warning:
        yield CacheError(cache.folder, warning, code="W703")


def _say_samples(cache: OpenCache, figures: Figures, what: str = "were read") -> None:
    shards, samples = cache.num_shards, cache.num_samples
    figures.say(f"{many(samples, 'sample')} in {many(shards, 'shard')} {what}.", samples=samples, shards=shards)


def _say_files(cache: OpenCache, figures: Figures) -> None:
    _say_samples(cache, figures, "are there; of each shard the header and a sample were read")


def _say_counts(cache: OpenCache, figures: Figures) -> None:
    counts = cache.counts
    figures.say(
        f"{counts}.",
        positions=counts.positions,
        supervised_share=counts.supervised_share,
        position_share=counts.position_share,
        least=f"{share_text(FEW)} of the supervised tokens are positions",
    )


def _questions(
    weights: Callable[[OpenCache], Problems],
    finite: Callable[[Any], Problems],
    ids: Callable[[Any], Problems],
    distribution: Questions,
) -> dict[str, Questions]:
    """Return which functions answer which check, in the order of CHECKS."""
    return {
        "complete": Questions(once=_incomplete, remarks=unused_files, measured=_say_files),
        "checksums": Questions(once=wrong_checksums, per_shard=wrong_shard_checksums, measured=_say_samples),
        "finite": Questions(once=weights, per_row=finite, measured=_say_samples),
        "ids_match": Questions(once=_other_samples, per_row=ids, measured=_say_samples),
        "distribution": distribution,
        "positions": Questions(
            once=_no_positions, remarks=_few_positions, figures=lambda cache: str(cache.counts), measured=_say_counts
        ),
    }


_QUESTIONS: dict[type[OpenCache], dict[str, Questions]] = {
    PublishedCache: _questions(
        of_rows.embeddings_not_finite,
        of_rows.not_finite,
        of_rows.other_ids,
        Questions(per_row=of_rows.not_distributions, measured=_say_samples),
    ),
    NativeCache: _questions(
        of_samples.weights_not_finite,
        of_samples.not_finite,
        of_samples.other_ids,
        Questions(per_shard=of_samples.not_by_the_head, per_row=of_samples.not_target_rows, measured=_say_samples),
    ),
}
