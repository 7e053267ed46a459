"""Make a command line option of each field of Settings, and complete names of sources.

Decides which options --help shows; --help-all shows all of them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import click
from click.shell_completion import CompletionItem

from niels_gpt.commands.console import Option
from niels_gpt.data.sources import SOURCES
from niels_gpt.kinds.homes import home_keys
from niels_gpt.recipes.eagle3.options import Options
from niels_gpt.settings import Settings

COMMON = {
    "Where text comes from": ("source_root", "pretrain", "sft", "rollouts", "exclude", "revision"),
    "Size": (
        "fineweb_edu_train_tokens",
        "fineweb_edu_val_tokens",
        "gutenberg_train_tokens",
        "gutenberg_val_tokens",
        "own_val_frac",
    ),
    "Tokenizer": ("tokenizer", "vocab_size", "document_end", "chat_template"),
    "EAGLE-3": ("eagle3_target", "eagle3_source"),
    "Build": ("cache_dir", "seed", "partitions", "threads"),
}
"""The settings that --help shows, by panel. Only --help-all shows the others."""
_ORDER = [name for names in COMMON.values() for name in names]
_EAGLE3 = "eagle3_"
_LINES = ("pretrain", "sft", "rollouts", "licence", "attribution")
"""Settings of several entries, one for each use of the flag."""
_CHOICES = {
    "on_special": ["drop", "raise", "text"],
    "loss_on": ["assistant", "assistant,tool_calls", "tool_calls", "last"],
    "lock": ["auto", "flock", "lease"],
    "engine": ["auto", "gigatoken", "reference"],
    "tokenizer_kind": ["sentencepiece", "bpe"],
    **{
        str(each.metadata["setting"]): list(each.metadata["flag"]["choices"])
        for each in fields(Options)
        if each.metadata["setting"] and "choices" in each.metadata["flag"]
    },
}


def settings_options(
    command: click.Command, *, only: Collection[str] | None = None, with_eagle3: bool = False
) -> click.Command:
    """Give a command an option for each field of Settings, and --help-all if its help hides some.

    The callback gets them as keywords; `settings_of` makes Settings of these. only: the fields to take. with_eagle3:
    take the fields of eagle3 too, if `only` is not given.
    """
    options = [
        option
        for name, option in _options(may_hide=only is None).items()
        if (with_eagle3 or not name.startswith(_EAGLE3) if only is None else name in only)
    ]
    options.sort(key=lambda option: _ORDER.index(str(option.name)) if option.name in _ORDER else len(_ORDER))
    command.params[:0] = [*(each for each in command.params if isinstance(each, click.Argument)), *options]
    command.params[:] = list(dict.fromkeys(command.params))
    command.context_settings = {**command.context_settings, "token_normalize_func": _current_name}
    if any(option.hidden for option in options):
        text = "show all options"
        callback: Callable[..., Any] = _show_all
        flag: dict[str, Any] = {
            "is_flag": True,
            "is_eager": True,
            "expose_value": False,
            "callback": callback,
            "panel": "Options",
        }
        command.params.append(Option(["--help-all"], help=text, **flag))
    return command


@functools.cache
def _options(*, may_hide: bool) -> dict[str, Option]:
    """Return the option of each field of Settings by its name. Commands share them. may_hide: all but COMMON."""
    panels = {name: panel for panel, names in COMMON.items() for name in names}
    types = get_type_hints(Settings)
    return {
        field.name: _option(
            field, types[field.name], panels.get(field.name), is_hidden=may_hide and field.name not in panels
        )
        for field in fields(Settings)
    }


def _current_name(name: str) -> str:
    """Return the present name of an option; --tokenizer-model is --tokenizer.

    Raises: click.UsageError for --append-eot, which took no value.
    """
    if name in ("append-eot", "no-append-eot"):
        now = "--document-end none" if name.startswith("no-") else "--document-end auto, the default"
        raise click.UsageError(f"--{name}: there is no such option any more. Pass {now}")
    return "tokenizer" if name == "tokenizer-model" else name


def _option(field: Any, kind: Any, panel: str | None, *, is_hidden: bool) -> Option:
    flag, text = "--" + field.name.replace("_", "-"), re.sub(r" \(PR-\d\d[^)]*\)", "", field.metadata["help"])
    how: dict[str, Any] = {
        "help": text,
        "default": field.default,
        "hidden": is_hidden,
        "panel": panel or ("EAGLE-3" if field.name.startswith(_EAGLE3) else "More settings"),
    }
    if field.name in _LINES:
        how.update(
            multiple=True,
            default=None,
            metavar="LINE",
            help=text.partition("; several")[0] + "; repeatable",
        )
    elif kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    elif field.name in _CHOICES:
        how["type"] = click.Choice(_CHOICES[field.name])
    else:
        how["type"] = kind if kind in (int, float) else str
        how["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
    return Option([flag], **how)


def _show_all(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        hidden = [param for param in ctx.command.params if isinstance(param, click.Option) and param.hidden]
        for param in hidden:
            param.hidden = False
        click.echo(ctx.get_help())
        for param in hidden:
            param.hidden = True
        ctx.exit()


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Return the Settings of a command's options. Raises: ValueError for a value out of range."""
    values: dict[str, Any] = {field.name: given.get(field.name, field.default) for field in fields(Settings)}
    for name, value in values.items():
        if isinstance(value, tuple):  # several lines of an option are one setting
            values[name] = ";".join(value) or None
    return Settings(**values)


def source_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a built-in or user-defined source."""
    from niels_gpt.recipes.user_sources import user_sources

    names = {name: spec.family for name, spec in SOURCES.items()} | {key: key.split("/")[0] for key in home_keys()}
    with contextlib.suppress(ValueError, OSError):  # a sources.toml that cannot be read adds no names
        names |= {name: user.family for name, user in user_sources(settings_of(ctx.params)).items()}
    return [CompletionItem(name, help=family) for name, family in names.items() if name.startswith(incomplete)]
