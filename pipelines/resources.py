"""The settings of a run: a Dagster resource with the fields of niels_gpt.settings, and environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import UnionType
from typing import Any, get_args, get_type_hints

import dagster as dg
from pydantic import TypeAdapter, ValidationError

from niels_gpt.settings import RENAMED, Settings

ENVIRONMENT_PREFIX = "NIELS_GPT_"
# Where the tests find real text, real tokenizers and other tools.
_NOT_SETTINGS = {"NIELS_GPT_TEST_DATA", "NIELS_GPT_TEST_MODELS", "NIELS_GPT_PEERS"}
_OF_DEPLOYMENT = "cache_dir"
"""Not a field of a run: one asset cannot be in two folders."""
_HELP = {field.name: field.metadata["help"] for field in fields(Settings)}
_TYPES: dict[str, Any] = get_type_hints(Settings)
NAMES = ("force", "wait", *(name for name in _HELP if name != _OF_DEPLOYMENT))
"""The fields of a run's config."""


@dataclass(frozen=True)
class Run:
    """The settings of one run."""

    settings: Settings
    force: bool = False
    """Build from scratch, even if the cache is up to date."""
    wait: bool = True
    """Wait for another process that builds the same cache; otherwise the step fails."""


def settings_resource(settings: Settings) -> dg.ResourceDefinition:
    """Return the resource for a run's config. Fields that a run does not name have the values in `settings`.

    No setting has a default in the form: the Launchpad opens with `force` and `wait` only.
    """
    form: dict[str, Any] = {
        "force": dg.Field(bool, default_value=False, description="build from scratch, even if the cache is up to date"),
        "wait": dg.Field(
            bool, default_value=True, description="wait for another process that builds the same cache; off: fail"
        ),
    }
    for name in NAMES[len(form) :]:
        text = f"{_HELP[name]}. This deployment: {getattr(settings, name)!r}"
        form[name] = dg.Field(_config_type(_TYPES[name]), is_required=False, description=text)
    for old, new in RENAMED.items():  # Dagster refuses an unknown field before any of our code runs
        form[old] = dg.Field(dg.Noneable(dg.Any), is_required=False, description=f"earlier name of {new}")

    @dg.resource(config_schema=form, description="Settings of all caches, and `force` and `wait` for this run.")
    def given(context: dg.InitResourceContext) -> dict[str, Any]:
        return dict(context.resource_config)

    made: dg.ResourceDefinition = given
    return made


def _config_type(kind: Any) -> Any:
    """Return Dagster's type for a setting's type: `str | None` is Noneable(str)."""
    if isinstance(kind, UnionType):
        (inner,) = set(get_args(kind)) - {type(None)}
        return dg.Noneable(inner)
    return kind


def as_run(settings: Settings, given: Mapping[str, Any], resource: str) -> Run:
    """Return the settings of a run. settings: the deployment's. resource: its name in the run's config.

    Raises: dagster.Failure for a setting's earlier name, or a value out of bounds.
    """
    for old, new in RENAMED.items():
        if old in given:
            raise dg.Failure(f"resources.{resource}.config.{old}: this setting is now {new}", allow_retries=False)
    chosen = {name: value for name, value in given.items() if name in _HELP}
    try:
        return Run(replace(settings, **chosen), force=given.get("force", False), wait=given.get("wait", True))
    except ValueError as error:
        raise dg.Failure(f"resources.{resource}.config: {error}", allow_retries=False) from error


def settings_from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of a deployment: the variables NIELS_GPT_<FIELD>, and defaults for the others.

    Here source_root is `sample` by default, so that a fresh checkout works offline (D21). Empty variables are ignored.
    Raises: ValueError for a variable that names no setting, or has an invalid value.
    """
    given = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): text
        for name, text in environ.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name not in _NOT_SETTINGS and text
    }
    for name in sorted(given.keys() - _HELP.keys()):
        if name in RENAMED:
            old, new = (ENVIRONMENT_PREFIX + each.upper() for each in (name, RENAMED[name]))
            raise ValueError(f"{old}: this setting is now {new}")
        raise ValueError(
            f"{ENVIRONMENT_PREFIX}{name.upper()}: there is no setting of this name. There are "
            + ", ".join(ENVIRONMENT_PREFIX + field.upper() for field in _HELP)
        )
    chosen, problems = dict[str, Any](), list[str]()
    for name, text in given.items():
        try:
            chosen[name] = TypeAdapter(_TYPES[name]).validate_python(text)  # text into numbers
        except ValidationError as error:
            problems.append(f"{ENVIRONMENT_PREFIX}{name}".upper() + f": {error.errors()[0]['msg']}")
    if problems:
        raise ValueError("; ".join(problems))
    return Settings(**{"source_root": "sample", **chosen})
