"""What a home adds to the recipes: the form of what its place in the table of homes (kinds/homes.py) holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from niels_gpt.recipes.records import Outcome
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
