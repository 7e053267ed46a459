"""Fix the plan of a partitioned cache, build one of its partitions, seal them: in any process, on any machine.

All take settings, a source's name and numbers alone, so a call can be sent to another machine. Every call looks at the
folder of caches first: what is there already is not made again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from niels_gpt.documents import Partition
from niels_gpt.progress import Progress
from niels_gpt.recipes.run_recipe import Outcome
from niels_gpt.settings import Settings

Plan = Any


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
    raise NotImplementedError


def build_partition(
    settings: Settings, name: str, number: int, *, wait: bool = False, progress: Progress | None = None
) -> MadePartition:
    """Prepare, and build partition `number`, from 0, unless it is finished or the cache is current.

    A killed build of the partition is resumed. wait: wait for another builder of it, instead of E503.
    progress: receives documents, tokens, and the tokens of both of its budgets (None without budgets).
    Raises: as `prepare` and `build_pretrain`; ValueError for a number that there is not.
    """
    raise NotImplementedError


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
    progress: receives bytes.
    Raises: CacheError E510 naming the partitions that are not finished, each with its command; E511 where there is no
        plan of these settings, naming the settings that differ from a plan that is there.
    """
    raise NotImplementedError
