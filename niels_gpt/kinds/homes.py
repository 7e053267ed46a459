"""The table of homes: packages that may be deleted, and what goes with each. The rest works without them.

A home has its commands, recipes and assets. Nothing else imports these by name: the table holds their places as text,
module:name, which is loaded at use, and skipped where the home is not installed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

MORE_CACHES, OTHER_TOOLS = "More caches", "Other tools and buckets"
"""Panels of niels-gpt --help."""


class Home(NamedTuple):
    """A package, and where the code stands that needs it. A place is "" where there is none."""

    package: str
    panel: str
    """Of niels-gpt --help, for its commands."""
    commands: str
    """A list of commands."""
    keys: tuple[str, ...] = ()
    """Of its built-in caches, in the order in which they are built."""
    recipes: str = ""
    """A `HomeRecipes`, see recipes/home_recipes.py."""
    assets: str = ""
    """A function of a Dagster deployment that returns a `HomeAssets`, see pipelines/deployment.py."""


HOMES = (
    Home(
        "niels_gpt.prefix_tree",
        MORE_CACHES,
        "niels_gpt.commands.prefix_tree:ROOT_COMMANDS",
        ("trees/oasst1",),
    ),
    Home(
        "niels_gpt.eagle3",
        MORE_CACHES,
        "niels_gpt.commands.eagle3.tools:ROOT_COMMANDS",
        ("eagle3/draft_vocab", "eagle3/targets"),
        "niels_gpt.recipes.eagle3.assets:EAGLE3_RECIPES",
        "pipelines.eagle3:assets_of",
    ),
    Home(
        "niels_gpt.exchange",
        OTHER_TOOLS,
        "niels_gpt.commands.exchange:COMMANDS",
        assets="pipelines.exchange.outputs:assets_of",
    ),
)


def loaded(place: str) -> Any:
    """Return what stands at a place, module:name."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


@functools.cache
def is_installed(package: str) -> bool:
    """Whether a package is there, and not just a folder of its name that was left behind.

    Raises: ImportError where it is there and cannot be imported.
    """
    try:
        return getattr(import_module(package), "__file__", None) is not None
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        return False


def homes() -> Iterator[Home]:
    """Yield the homes that are installed."""
    return (home for home in HOMES if is_installed(home.package))


def home_keys() -> list[str]:
    """Return the keys of the built-in caches of all homes."""
    return [key for home in homes() for key in home.keys]


def home_commands(panel: str) -> list[Any]:
    """Return the commands of all homes in a panel."""
    return [command for home in homes() if home.panel == panel for command in loaded(home.commands)]


def home_recipes() -> list[Any]:
    """Return the HomeRecipes of all homes."""
    return [loaded(home.recipes) for home in homes() if home.recipes]


def home_assets() -> list[Any]:
    """Return of all homes the function that returns the HomeAssets of a deployment."""
    return [loaded(home.assets) for home in homes() if home.assets]
