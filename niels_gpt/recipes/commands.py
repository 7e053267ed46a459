"""Commands for messages: as they must be typed, with the settings in use, for one cache."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from niels_gpt.recipes.own import FAMILIES
from niels_gpt.settings import Settings

_LINES = (*FAMILIES, "licence", "attribution")  # several in one setting, each a flag of its own


def build_command(settings: Settings, key: str, *more: str) -> str:
    """Return the command that builds the cache `key` under these settings, and no other cache; `more`: further flags.

    A setting that has its default is left out, as is what the settings say of other sources only.
    """
    name = key.rpartition("/")[2]
    words = ["python", "-m", "niels_gpt.cache.cli", "build", name, *more]
    types = get_type_hints(Settings)
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value in (field.default, None) or field.name.startswith("eagle3_"):
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.name in _LINES:
            lines = (line.strip() for line in value.split(";"))
            words += [word for line in lines if _names(line, name) for word in (flag, line)]
        elif types[field.name] is bool:
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return shlex.join(words)


def remove_command(path: Path) -> str:
    """Return the command that removes what stands at a public path; the versions behind a link stay."""
    return shlex.join(["rm", *([] if path.is_symlink() else ["-r"]), str(path)])


def _names(line: str, source: str) -> bool:
    return line.partition("=")[0].strip() == source
