"""Recipes that a home adds: the object at its place in the table of homes (kinds/homes.py) is a HomeRecipes.

Also finds the units of a cache of any kind, for commands, Dask and Dagster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from niels_gpt.kinds.homes import home_recipes
from niels_gpt.recipes.records import Outcome
from niels_gpt.recipes.units import CacheUnits, Units
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import LeftOut
from niels_gpt.tokenizers.protocol import FullTokenizer

Recipe = Callable[..., Outcome]
"""Called with settings, refresh, observed and progress."""


@dataclass(frozen=True)
class HomeRecipes:
    """Recipes of caches that no source of the table feeds. They are built after all others."""

    recipes: Mapping[str, Recipe]
    """Recipes of its built-in caches, by key."""
    action: Callable[[Settings, str, FullTokenizer | None], tuple[str, str]]
    """Returns what a build of a key would do, and its source. The tokenizer is the folder's; None if there is none yet.
    """
    settings_fingerprint: Callable[[Settings, str], str]
    """Twelve hex digits of the settings that decide the bytes of a key. Looks at no file."""
    left_out: Callable[[Settings], LeftOut | None]
    """Why none of them can be built; None if they can. A build of all caches leaves them out, with a warning."""
    takes_tokenizer: Callable[[Settings], bool]
    """Whether they are built with the folder's tokenizer, which must have the sentinels."""
    source: Callable[[Settings], str | None]
    """Name of their source; None for files that are not observed."""
    units: Mapping[str, Callable[..., CacheUnits]] = field(default_factory=dict)
    """Class of the units of a cache, by key; called like `units_of`, without a key."""


def units_of(
    settings: Settings, key: str, *, refresh: bool = False, observed: str | None = None, fixes: bool = True
) -> CacheUnits:
    """Return the units of a cache. key: of the cache, or the name of a source of text.

    refresh, observed, fixes: see `Units`. Raises its errors.
    """
    of_homes = {key: made for home in home_recipes() for key, made in home.units.items()}
    how: dict[str, Any] = {"refresh": refresh, "observed": observed, "fixes": fixes}
    return of_homes[key](settings, **how) if key in of_homes else Units(settings, key.rpartition("/")[2], **how)
