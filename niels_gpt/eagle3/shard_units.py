"""Shards as units of `niels_gpt.engine.units`: their receipts, their damage, and what blocks building one.

Methods import torch on demand: the table of kinds holds an object of this class.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from niels_gpt.engine.units import Looks, Unit
from niels_gpt.storage.errors import CacheError
from niels_gpt.work import Progress

if TYPE_CHECKING:
    from niels_gpt.eagle3.format.plan import TargetPlan


class PlannedFolder(NamedTuple):
    """A cache's plan, and the folder in which its shards are built."""

    path: Path
    """Public path of the cache, for errors."""
    folder: Path
    plan: TargetPlan

    @property
    def total(self) -> int:
        """Number of shards."""
        return self.plan.num_shards


class ShardUnits(Looks[PlannedFolder]):
    """Looks at the shards of one folder, by their receipts in its sidecar."""

    word = "shard"

    def look(self, plan: PlannedFolder, number: int) -> Unit:
        """Return a shard's state by its receipt and its size."""
        from niels_gpt.eagle3.resume import look_at

        return look_at(plan.folder, plan.plan, number)

    def size(self, plan: PlannedFolder, unit: Unit) -> int:
        """Return a shard's bytes."""
        return plan.plan.bytes_of(unit.number)

    def damage(self, plan: PlannedFolder, unit: Unit, progress: Progress | None) -> str:
        """Compare each sample with its checksum in the receipt."""
        from niels_gpt.eagle3.format.layout import shard_path
        from niels_gpt.eagle3.format.shards import shards_of

        read = 0

        def add(size: int) -> None:
            nonlocal read
            read += size
            if progress is not None:
                progress(1, read, None)

        damage = shards_of(plan.folder, plan.plan.manifest).damage(unit.number, add)
        return damage[0][1].removeprefix(f"{shard_path(plan.folder, unit.number)}: ") if damage else ""

    def foreign(self, plan: PlannedFolder) -> Iterator[tuple[Path, str]]:
        """Yield shards beyond the plan's, and files in `.parts` that no partition wrote."""
        from niels_gpt.eagle3.format.layout import shard_path
        from niels_gpt.eagle3.format.manifest import existing_shard_indices
        from niels_gpt.eagle3.partitions import foreign_files

        for shard in sorted(existing_shard_indices(plan.folder)):
            if shard >= plan.total:
                path = Path(shard_path(plan.folder, shard))
                yield path, f"{path.name}: the plan has {plan.total:,} shards"
        for path in foreign_files(plan.folder):
            yield path, f"{os.path.relpath(path, plan.folder)}: no file of a partition"

    def in_the_way(self, plan: PlannedFolder, unit: Unit) -> list[Path]:
        """Return the shard's file: a run would take it for a finished one, or for another cache's."""
        from niels_gpt.eagle3.format.layout import shard_path

        return [Path(shard_path(plan.folder, unit.number))]

    def refusal(self, path: Path, found: str, remedy: str) -> CacheError:
        """Return the error E712 about unfinished shards."""
        return CacheError(path, found, remedy=remedy, code="E712")


SHARDS = ShardUnits()
