"""Fix the plan of a partitioned cache, build one of its partitions, seal them: in any process, on any machine.

All take settings, a source's name and numbers alone, so a call can be sent to another machine. Every call looks at the
folder of caches first: what is there already is not made again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from niels_gpt.builders.partitions.plan import Plan
from niels_gpt.documents import Partition
from niels_gpt.progress import Progress
from niels_gpt.recipes.partitions.documents import budget_of
from niels_gpt.recipes.partitions.prepared import prepared
from niels_gpt.recipes.resolve import ResolvedSource
from niels_gpt.recipes.run_recipe import Measurement, Outcome
from niels_gpt.settings import Settings
from niels_gpt.storage.versions import (
    BUILDING,
    build_lock,
    discard,
    discard_unfinished,
    refuse_foreign,
    refuse_if_building,
    versions_dir,
)


class MadePartition(NamedTuple):
    """What a call for one partition did."""

    key: str
    """Of the cache: pretrain/NAME."""
    partition: Partition
    meta: dict[str, Any]
    """The partition's receipt; the meta.json of the sealed cache where that is current, and no partition is needed."""
    reused: bool
    """True where the partition was finished before, or the sealed cache is current."""
    seconds: float
    """Wall time of the call."""


def prepare(settings: Settings, name: str, *, refresh: bool = False, observed: str | None = None) -> Plan | None:
    """Return the plan of a partitioned cache, which is fixed first if there is none; None: the cache is current.

    It makes the tokenizer, resolves the source, and checks the folder, the program and the disk. Any machine may call
    it, any number of times; a plan of the same settings is kept, and its revision of the hub with it.
    refresh: ask the hub for its newest revision, even where a plan is there. observed: see `run_recipe`.
    Raises: UsageError for settings without partitions, or for a cache that is never partitioned; CacheError E511 where
        the plan was fixed by other code; as `stage_tokenizer`, `resolve_source` and `refuse_without_room`.
    """
    return prepared(settings, name, refresh=refresh, observed=observed).plan


def build_partition(
    settings: Settings,
    name: str,
    number: int,
    *,
    wait: bool = False,
    fixes: bool = True,
    progress: Progress | None = None,
) -> MadePartition:
    """Prepare, and build partition `number`, from 0, unless it is finished or the cache is current.

    A killed build of the partition is resumed. wait: wait for another builder of it, instead of E503.
    fixes: fix a plan where there is none; else that is the error NoPlan.
    progress: receives documents, tokens, and the tokens of both of its budgets (None without budgets).
    Raises: as `prepare` and `build_pretrain`; ValueError for a number that there is not.
    """
    partition = Partition.checked(number, settings.partitions)
    with Measurement() as measurement:
        made = prepared(settings, name, fixes=fixes)
        if made.plan is None:
            meta, reused = made.current_meta(), True
        else:
            meta, reused = made.build(made.plan, partition, wait, progress)
    return MadePartition(made.asked.key, partition, meta, reused, measurement.seconds)


def restart_partition(settings: Settings, name: str, number: int) -> bool:
    """Make the next build of a partition start from scratch; the other partitions stay.

    Returns False, and does nothing, where the cache is current: it has no partitions any more.
    Raises: as `prepare`; CacheError E503 if it is being built, or the cache sealed.
    """
    plan = prepare(settings, name)
    if plan is None:
        return False
    path = plan.partition_path(number)
    refuse_foreign(path)
    with build_lock(path) as folder:
        if (versions_dir(plan.path) / BUILDING).is_dir():
            refuse_if_building(plan.path)  # a seal, which reads this partition
        discard_unfinished(folder)
        if path.is_symlink():
            discard(path)
    return True


def seal_cache(
    settings: Settings,
    name: str,
    *,
    deep: bool = True,
    observed: str | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Check all partitions and commit the cache that they make; a current cache is reused.

    deep: compute the sha256 of every file; else links, receipts and sizes alone are looked at.
    progress: receives files, bytes read, and bytes to read in all.
    Raises: CacheError E510 naming the partitions that are not finished, each with its command, and where there is no
        plan; E511 where another plan is there, naming the settings that differ; as `prepare`.
    """
    with Measurement() as measurement:
        made = prepared(settings, name, observed=observed, fixes=False)
        if made.plan is None:
            meta, reused = made.current_meta(), True
        else:
            meta, reused = made.seal(made.plan, deep, progress)
    return made.asked.finish(meta, reused, measurement)


def build_all_partitions(
    settings: Settings,
    name: str,
    *,
    refresh: bool = False,
    observed: str | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Build the partitions that are missing here, one after the other, and seal them; arguments as `run_recipe`.

    Other processes that build a partition, or seal, are waited for. Files of partitions that were there before are read
    again; for `progress`, the tokens of those that were read count from 0.
    Raises: as `build_partition` and `seal_cache`; CacheError E306 where the text changes while partitions are built.
    """
    with Measurement() as measurement:
        made = prepared(settings, name, refresh=refresh, observed=observed)
        if made.plan is None:
            meta, reused = made.current_meta(), True
        else:
            total, deep = _Total(settings, made.asked.source, progress), False
            for number in range(made.plan.total):
                receipt, was_there = made.build(made.plan, made.plan.partition(number), True, total)
                total.add(receipt)
                deep = deep or was_there
            meta, reused = made.seal(made.plan, deep, total.checked, wait=True)
    return made.asked.finish(meta, reused, measurement)


class _Total:
    """The progress of all partitions that are built here, as that of one cache."""

    def __init__(self, settings: Settings, source: ResolvedSource, progress: Progress | None) -> None:
        self._progress, self._documents, self._tokens = progress, 0, 0
        self._budget = budget_of(settings, source)

    def __call__(self, documents: int, tokens: int, _: int | None) -> None:
        if self._progress is not None:
            self._progress(self._documents + documents, self._tokens + tokens, self._budget)

    def add(self, receipt: dict[str, Any]) -> None:
        """Count a finished partition."""
        self._documents += receipt["documents_read"]
        self._tokens += sum(receipt["totals"].values())

    def checked(self, _: int, read: int, num_bytes: int | None) -> None:
        """Show how much of them the seal has read: the bar begins again."""
        if self._progress is not None and num_bytes:
            self._progress(self._documents, self._tokens * read // num_bytes, self._tokens)
