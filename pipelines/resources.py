"""niels_gpt.settings as a Dagster resource: the form in the Launchpad, the run's config, and the environment."""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import dagster as dg
from pydantic import Field, ValidationError, create_model

from niels_gpt.settings import RENAMED, Settings

ENVIRONMENT_PREFIX = "NIELS_GPT_"
# Where the tests find real text, real tokenizers and other tools.
_NOT_SETTINGS = {"NIELS_GPT_TEST_DATA", "NIELS_GPT_TEST_MODELS", "NIELS_GPT_PEERS"}
_CORE = {field.name: field for field in fields(Settings)}
_TYPES = get_type_hints(Settings)


class SettingsResource(dg.ConfigurableResource[None]):
    """All settings of all caches. A cache is built again only if one that it reads has changed."""

    @classmethod
    def of(cls, settings: Settings) -> "SettingsResource":
        """Return a form with a field for each setting: its type, its value as the default, its help as description.

        The values are the defaults of a class of their own, because a run's config that names one setting resets the
        others to the defaults of the class.
        """
        form: Any = {
            name: (_TYPES[name], Field(default=getattr(settings, name), description=field.metadata["help"]))
            for name, field in _CORE.items()
        }
        for old, new in RENAMED.items():  # Dagster refuses an unknown field before any of our code runs
            form[old] = (Any, Field(default=None, description=f"of earlier versions: now {new}"))
        return create_model(cls.__name__, __base__=cls, __doc__=cls.__doc__, **form)()

    def to_core(self) -> Settings:
        """Return what the recipes take. Raises: dagster.Failure for a setting of an earlier version."""
        for old, new in RENAMED.items():
            if getattr(self, old) is not None:
                raise dg.Failure(f"resources.settings.config.{old}: this setting is now {new}", allow_retries=False)
        return Settings(**{name: getattr(self, name) for name in _CORE})

    def __init__(self, **given: Any) -> None:
        if type(self) is SettingsResource:
            raise TypeError(f"{type(self).__name__} has its fields from Settings: SettingsResource.of(Settings(...))")
        super().__init__(**given)

    def of_run(self, context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext) -> Settings:
        """Return the settings of a run. Its config may hold no key that is ignored.

        Dagster refuses an unknown field of this form, but silently ignores an unknown op or resource.
        Raises: dagster.Failure naming the keys that exist; it is not retried.
        """
        try:
            config, job = context.run.run_config, context.job_def
        except dg.DagsterError:  # an asset called as a function has no run
            return self.to_core()
        readers = {"ops": {node.name for node in job.nodes if _reads_config(node.definition)}}
        readers["resources"] = set(job.resource_defs)
        for part, known in readers.items():
            given: Any = config.get(part) or {}
            for name in sorted(set(given) - known):
                raise dg.Failure(
                    f"run config: {part}.{name} is read by nobody in this run, expected "
                    f"{' or '.join(f'{part}.{key}' for key in sorted(known)) or f'nothing in {part}'}. The settings of "
                    f"niels_gpt are all in resources.settings.config: {', '.join(_CORE)}",
                    allow_retries=False,
                )
        return self.to_core()


def _reads_config(node: object) -> bool:
    # An op without a config class takes anything and reads nothing: all of ours. Another deployment's may read some.
    if isinstance(node, dg.GraphDefinition) and node.config_mapping is None:
        return any(_reads_config(inner.definition) for inner in node.nodes)
    field = node.config_field if isinstance(node, dg.OpDefinition) else None
    return field is None or field.config_type.given_name != "Any"


def settings_from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of a deployment: NIELS_GPT_<FIELD> where it is set, else the defaults.

    Here source_root is `sample` by default, so that a fresh checkout works offline (D21). An empty text is no text.
    Raises: ValueError for a variable that names no setting, or whose text is no value for it.
    """
    given = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): text
        for name, text in environ.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name not in _NOT_SETTINGS and text
    }
    for name in sorted(given.keys() - _CORE.keys()):
        if name in RENAMED:
            old, new = (ENVIRONMENT_PREFIX + each.upper() for each in (name, RENAMED[name]))
            raise ValueError(f"{old}: this setting is now {new}")
        raise ValueError(
            f"{ENVIRONMENT_PREFIX}{name.upper()}: there is no setting of this name. There are "
            + ", ".join(ENVIRONMENT_PREFIX + field.upper() for field in _CORE)
        )
    try:
        form = type(SettingsResource.of(Settings(source_root="sample")))
        return form(**given).to_core()  # pydantic turns text into numbers
    except ValidationError as error:
        problems = [f"{ENVIRONMENT_PREFIX}{item['loc'][0]}".upper() + f": {item['msg']}" for item in error.errors()]
        raise ValueError("; ".join(problems)) from error
