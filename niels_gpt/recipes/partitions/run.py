"""The earlier functions for partitions, for one release: importing them warns. Use `niels_gpt.recipes.units.Units`."""

from __future__ import annotations

import warnings
from typing import Any

from niels_gpt.engine.units import PartitionPlan
from niels_gpt.recipes.records import Outcome
from niels_gpt.recipes.units import MadeUnit, Units
from niels_gpt.settings import Settings
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.work import Progress

_SAID = "niels_gpt.recipes.partitions.run is niels_gpt.recipes.units now: Units(settings, name).build(number), .seal()"
warnings.warn(CodedWarning("W104", _SAID), stacklevel=2)
MadePartition = MadeUnit


def prepare(settings: Settings, name: str, **how: Any) -> PartitionPlan | None:
    """Return `Units(...).plan`."""
    return Units(settings, name, **how).plan


def build_partition(
    settings: Settings,
    name: str,
    number: int,
    *,
    wait: bool = False,
    fixes: bool = True,
    progress: Progress | None = None,
) -> MadeUnit:
    """Build one unit."""
    return Units(settings, name, fixes=fixes).build(number, wait=wait, progress=progress)


def restart_partition(settings: Settings, name: str, number: int) -> bool:
    """Make the next build of a unit start from scratch."""
    return Units(settings, name).restart(number)


def seal_cache(
    settings: Settings, name: str, *, deep: bool = True, observed: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Seal all units."""
    return Units(settings, name, observed=observed, fixes=False).seal(deep=deep, progress=progress)
