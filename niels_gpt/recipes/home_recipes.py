"""The recipes that a home adds: the class of the object at its place in the table of homes (kinds/homes.py).

Also the units of a cache of any kind, for the drivers: by hand, here, Dask, Dagster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from niels_gpt.engine.units import Mended, Plan, Unit
from niels_gpt.kinds.homes import home_recipes
from niels_gpt.progress import Progress
from niels_gpt.recipes.records import Outcome
from niels_gpt.recipes.units import MadeUnit, Units
from niels_gpt.settings import Settings
from niels_gpt.tokenizers.protocol import FullTokenizer

Recipe = Callable[..., Outcome]
"""Called with settings, refresh, observed and progress."""


@dataclass(frozen=True)
class HomeRecipes:
    """Recipes of caches that no source of the table is resolved for. They are built after all others."""

    recipes: Mapping[str, Recipe]
    """Of its built-in caches, by key."""
    action: Callable[[Settings, str, FullTokenizer | None], tuple[str, str]]
    """What a build of a key would do, and from what. The tokenizer is the caches' own; None: not there yet."""
    settings_fingerprint: Callable[[Settings, str], str]
    """Twelve hex digits of the settings that decide the bytes of a key; no file is looked at."""
    units: Mapping[str, Callable[..., CacheUnits]] = field(default_factory=dict)
    """The class of the units of a cache, by key; called as `units_of`, without a key."""


class CacheUnits(Protocol):
    """The units of one cache, which users call partitions. Making the object fixes their plan, if there is none."""

    key: str
    settings: Settings
    plan: Plan | None
    """None: the committed cache is current, and no unit is needed."""

    @property
    def path(self) -> Path:
        """The cache's public path."""

    @property
    def counted(self) -> str:
        """What progress of a build counts first; then come tokens."""

    @property
    def budget(self) -> int | None:
        """Tokens of all units, where they are known before."""

    def states(self) -> list[Unit]:
        """Return each unit by number; [] where the cache is current."""

    def unfinished(self) -> list[int]:
        """Return the numbers of the units that are not finished."""

    def build(self, number: int, *, wait: bool = False, progress: Progress | None = None) -> MadeUnit:
        """Build a unit, from 0, unless it is finished or the cache is current. wait: for another builder of it."""

    def build_all(self, progress: Progress | None = None) -> Outcome:
        """Build the units that are missing here, and seal them."""

    def seal(self, *, deep: bool = True, wait: bool = False, progress: Progress | None = None) -> Outcome:
        """Commit the cache of all units. deep: read every file. wait: for other builders."""

    def restart(self, number: int) -> bool:
        """Make the next build of a unit start from scratch; False for a current cache."""

    def mend(self, number: int, progress: Progress | None = None) -> tuple[MadeUnit, Mended] | None:
        """Build a unit of a sealed cache again for its damaged files; None where that is not done."""


def units_of(
    settings: Settings, key: str, *, refresh: bool = False, observed: str | None = None, fixes: bool = True
) -> CacheUnits:
    """Return the units of a cache. key: or, of text, the name of the source. Others, Raises: as `Units`."""
    of_homes = {key: made for home in home_recipes() for key, made in home.units.items()}
    how: dict[str, Any] = {"refresh": refresh, "observed": observed, "fixes": fixes}
    return of_homes[key](settings, **how) if key in of_homes else Units(settings, key.rpartition("/")[2], **how)
