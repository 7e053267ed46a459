"""The settings as flags: one for each field of Settings, with its help, type and default."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from niels_gpt.settings import Settings


def add_settings_flags(parser: argparse.ArgumentParser, *, only: Sequence[str] | None = None) -> None:
    """Give a parser one flag for each field of Settings, so that every default can be overridden; or for some."""
    group = parser.add_argument_group("settings")
    types = get_type_hints(Settings)
    for field in fields(Settings):
        if field.name.startswith("eagle3_") if only is None else field.name not in only:  # eagle3/targets: the asset's
            continue
        text = field.metadata["help"].replace("%", "%%") + f" (default: {field.default})"
        flag = "--" + field.name.replace("_", "-")
        if field.name in ("pretrain", "sft", "licence", "attribution"):
            group.add_argument(flag, action="append", metavar="LINE", help=text + "; may be given several times")
        elif types[field.name] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        else:
            kind = types[field.name] if types[field.name] in (int, float) else str
            choices = ("drop", "raise") if field.name == "on_special" else None
            metavar = None if choices else kind.__name__.upper()
            group.add_argument(flag, type=kind, default=field.default, help=text, choices=choices, metavar=metavar)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the Settings that the flags spell."""
    given: dict[str, Any] = {field.name: vars(arguments).get(field.name, field.default) for field in fields(Settings)}
    for name, value in given.items():
        given[name] = ";".join(value) if isinstance(value, list) else value  # several lines of a flag are one setting
    return Settings(**given)
