"""niels_gpt.settings as the resource of a run, what one run changes about a step, and environment variables."""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, get_type_hints

import dagster as dg
from pydantic import Field, TypeAdapter, ValidationError, create_model

from niels_gpt.settings import RENAMED, Settings
from niels_gpt.storage.remedies import PROGRAM, did_you_mean

ENVIRONMENT_PREFIX = "NIELS_GPT_"
# Where the tests find real text, real tokenizers and other tools.
_NOT_SETTINGS = {"NIELS_GPT_TEST_DATA", "NIELS_GPT_TEST_MODELS", "NIELS_GPT_PEERS"}
_HELP = {field.name: field.metadata["help"] for field in fields(Settings)}
_TYPES: dict[str, Any] = get_type_hints(Settings)


class WaitConfig(dg.Config):
    """What one run changes about a step: `ops.OP.config`."""

    wait: bool = Field(True, description="wait for another process that builds the same cache; off: fail")


class BuildConfig(WaitConfig):
    """What one run changes about the build of a cache: `ops.OP.config`."""

    force: bool = Field(False, description="build from scratch, even if the cache is up to date")


_EARLIER = {old: f"this setting is now {new}" for old, new in RENAMED.items()} | {
    name: f"this is now ops.OP.config.{name} of each step; OP is an asset's key with __ for /, as sft__oasst1"
    for name in BuildConfig.model_fields
}
"""Fields of earlier versions: Dagster would refuse them without naming the new place."""


class RunSettings(dg.ConfigurableResource[Any]):
    """The settings of all caches in one run. A field that the run does not name is None: see `of_run`."""

    deployment: ClassVar[Settings]
    place: ClassVar[str]

    @property
    def of_run(self) -> Settings:
        """What the run's config names, null too, over the settings of the deployment.

        Raises: dagster.Failure for an earlier name, or a value of another type or out of bounds; it is not retried.
        """
        named = self.get_resource_context().resource_config  # of the fields, Dagster drops an explicit null
        try:
            for name in named.keys() & _EARLIER.keys():
                raise ValueError(f"{name}: {_EARLIER[name]}")
            return replace(self.deployment, **parsed(named))
        except ValueError as error:
            raise dg.Failure(f"{self.place}.{error}", allow_retries=False) from error


def settings_resource(settings: Settings, name: str = "settings") -> Any:
    """Return the resource `name` for a run's config. Fields that a run does not name have the values in `settings`."""
    texts = {each: f"{text}. This deployment: {getattr(settings, each)!r}" for each, text in _HELP.items()} | _EARLIER
    del texts["cache_dir"]  # one asset cannot be in two folders
    # Required and nullable: Dagster takes such a field as optional without a default, which would fill the Launchpad.
    form: Any = {each: (_TYPES.get(each, Any) | None, Field(description=text)) for each, text in texts.items()}
    made = create_model("RunSettings", __base__=RunSettings, __doc__=RunSettings.__doc__, **form)
    made.deployment, made.place = settings, f"resources.{name}.config"
    return made.configure_at_launch()


def parsed(given: Mapping[str, Any], called: Callable[[str], str] = str) -> dict[str, Any]:
    """Return the values of settings: text becomes numbers. Raises: ValueError naming each that has another type."""
    chosen, problems = dict[str, Any](), list[str]()
    for name, value in given.items():
        try:
            chosen[name] = TypeAdapter(_TYPES[name]).validate_python(value)
        except ValidationError as error:
            problems.append(f"{called(name)}: {error.errors()[0]['msg']}; found {value!r}")
    if problems:
        raise ValueError("; ".join(problems))
    return chosen


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
            raise ValueError(f"{_variable(name)}: this setting is now {_variable(RENAMED[name])}")
        meant = did_you_mean(name, _HELP, _variable)
        raise ValueError(
            f"{_variable(name)}: there is no setting of this name.{meant}\n`{PROGRAM} build --help` lists the others: "
            f"the flag --seed is {_variable('seed')}"
        )
    return Settings(**{"source_root": "sample", **parsed(given, _variable)})


def _variable(name: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{name}".upper()
