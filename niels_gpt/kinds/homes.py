"""The table of homes: packages that may be deleted, each with its commands, recipes and assets.

Nothing else imports a home by name. The table holds places as text, module:name; a place is loaded at use, and skipped
if the home is not installed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

MORE_CACHES, OTHER_TOOLS = "More caches", "Other tools and buckets"
"""Panels of niels-gpt --help."""


class Home(NamedTuple):
    """A package, and the places of the code that needs it; "" for none."""

    package: str
    panel: str
    """Panel of niels-gpt --help for its commands."""
    commands: Mapping[str, str]
    """Name of a command of niels-gpt -> its place."""
    keys: tuple[str, ...] = ()
    """Keys of its built-in caches, in build order."""
    recipes: str = ""
    """Place of a `HomeRecipes`, see recipes/home_recipes.py."""
    assets: str = ""
    """Place of a function of a Dagster deployment that returns `HomeAssets`, see pipelines/deployment.py."""


HOMES = (
    Home(
        "niels_gpt.prefix_tree",
        MORE_CACHES,
        {"tree": "niels_gpt.commands.prefix_tree:TREE"},
        ("trees/oasst1",),
    ),
    Home(
        "niels_gpt.eagle3",
        MORE_CACHES,
        {"eagle3": "niels_gpt.commands.eagle3.tools:EAGLE3"},
        ("eagle3/draft_vocab", "eagle3/targets"),
        "niels_gpt.recipes.eagle3.assets:EAGLE3_RECIPES",
        "pipelines.eagle3:assets_of",
    ),
    Home(
        "niels_gpt.exchange",
        OTHER_TOOLS,
        {
            "export": "niels_gpt.commands.exchange:export",
            "import": "niels_gpt.commands.exchange:import_",
            **{name: f"niels_gpt.commands.exchange:{name}" for name in ("push", "pull", "stage", "card")},
        },
        assets="pipelines.exchange.outputs:assets_of",
    ),
)


def loaded(place: str) -> Any:
    """Import a place, module:name, and return the object."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


@functools.cache
def is_installed(package: str) -> bool:
    """Return whether a package can be imported; a folder of its name that was left behind does not count.

    Raises: ImportError if the package exists and cannot be imported.
    """
    try:
        return getattr(import_module(package), "__file__", None) is not None
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        return False


def homes() -> Iterator[Home]:
    """Yield the installed homes."""
    return (home for home in HOMES if is_installed(home.package))


def home_keys() -> list[str]:
    """Return the keys of the built-in caches of all homes."""
    return [key for home in homes() for key in home.keys]


def home_commands(panel: str) -> dict[str, str]:
    """Return the name and place of each command of all homes in a panel."""
    return {name: place for home in homes() if home.panel == panel for name, place in home.commands.items()}


def home_recipes() -> list[Any]:
    """Return the HomeRecipes of all homes."""
    return [loaded(home.recipes) for home in homes() if home.recipes]


def home_assets() -> list[Any]:
    """Return, for each home, the function that returns the HomeAssets of a deployment."""
    return [loaded(home.assets) for home in homes() if home.assets]
