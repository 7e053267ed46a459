"""What a home adds to the recipes: the form of what its place in the table of homes (kinds/homes.py) holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from niels_gpt.recipes.run_recipe import AskedCache, Outcome
from niels_gpt.settings import Settings
from niels_gpt.tokenizers.protocol import FullTokenizer

Recipe = Callable[..., Outcome]
"""Called with settings, refresh, observed and progress."""


class UnitRecipe(NamedTuple):
    """How partitions of a family's caches are built."""

    build: Callable[..., dict[str, Any]]
    """Called with settings, source, BuildInputs, path, progress, partition and the sha256 of the plan; returns the
    receipt."""
    sealed: Callable[[AskedCache, Mapping[str, Any]], None]
    """Logs what is a matter of all partitions. Takes the cache that was asked for, and its meta."""


@dataclass(frozen=True)
class HomeRecipes:
    """The recipes of a home."""

    recipes: Mapping[str, Recipe]
    """Of its built-in caches, by key."""
    of_families: Mapping[str, Recipe] = field(default_factory=dict)
    """Of user-defined sources, by the family of the source; called with `key` too."""
    units: Mapping[str, UnitRecipe] = field(default_factory=dict)
    """Of its caches that have partitions, by the family of the source."""
    late: LatePlan | None = None
    """How they are planned where no source of the table is resolved. They are built after all others."""


@dataclass(frozen=True)
class LatePlan:
    """What is known of caches that are built last."""

    action: Callable[[Settings, str, FullTokenizer | None], tuple[str, str]]
    """What a build of a key would do, and from what. The tokenizer is the caches' own; None: not there yet."""
    settings_fingerprint: Callable[[Settings, str], str]
    """Twelve hex digits of the settings that decide the bytes of a key; no file is looked at."""
