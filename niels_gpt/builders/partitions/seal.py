"""Makes the one cache of all partitions of a plan, and commits it. A seal that was killed is repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from niels_gpt.builders.meta_keys import Source
from niels_gpt.builders.partitions.plan import Plan
from niels_gpt.builders.partitions.receipts import PartitionState
from niels_gpt.progress import Progress
from niels_gpt.storage.errors import CacheError


def seal(
    plan: Plan,
    *,
    source: Source,
    deep: bool = True,
    remedy: Callable[[PartitionState], str] | None = None,
    committed: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Commit the cache of all partitions at `plan.path`, remove the plan's folder, and return the cache's meta.json.

    The caller does not hold `build_lock(plan.path)`: it is held in here.
    source: name, config, streaming and from_scratch as for `build_pretrain`; provenance: the key `source` of the meta,
        without `counters`, which are the sums of the receipts'. Its position and counters are not looked at.
    deep: compare the sha256 of every file of every partition; else sizes.
    remedy: returns the command that mends a partition that is not finished; None: one with `source.from_scratch`.
    committed: called with the meta after the commit, before the plan's folder is removed.
    progress: called with files, bytes read, and bytes to read in all.
    Raises: CacheError E510 naming each partition that is not finished; E503 while a partition is being built or another
        process seals; ValueError E303 where no partition has a token for the train split; OSError.
    """
    raise CacheError(plan.path, "not made yet", code="E510")
