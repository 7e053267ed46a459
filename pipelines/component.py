"""The component NielsCaches: the caches in a Dagster project, by a few lines of YAML.

The schema of `settings` is made of the fields of niels_gpt.settings, so that `dg check yaml` names a misspelt one.
"""

from dataclasses import Field as Setting
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_type_hints

import dagster as dg
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import (
    BaseModel,
    Field,
    PlainSerializer,
    WithJsonSchema,
    WrapValidator,
    create_model,
)

from niels_gpt.recipes.tokenizer import is_id
from niels_gpt.settings import Settings
from pipelines.automation import SWITCHES
from pipelines.definitions import niels_definitions
from pipelines.deployment import HOURLY, CacheTranslator
from pipelines.resources import parsed

_TYPES: dict[str, Any] = get_type_hints(Settings)
_JSON = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_LIMITS = {"least": ("ge", "minimum"), "most": ("le", "maximum"), "below": ("lt", "exclusiveMaximum")}
"""Of a setting's metadata: what pydantic and JSON schema call them."""
_TEMPLATE = "{{"
"""A text with it is a template of Dagster, such as {{ env.THREADS }}: what it gives is checked once it is known."""
_NO_TEMPLATE = {"type": "string", "not": {"pattern": r"\{\{"}}


# --- the schema of the settings ---------------------------------------------------------------------------------------


def _of_setting(setting: Setting[Any]) -> tuple[Any, Any]:
    """Return the type and the default of a setting in a pydantic model.

    Its JSON schema is no union: so `dg check yaml` says "0 is less than the minimum of 1".
    """
    kind = _TYPES[setting.name]
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    given = {limit: setting.metadata[limit] for limit in _LIMITS if setting.metadata[limit] is not None}
    schema: dict[str, Any] = {"type": [_JSON[each] for each in kinds] if len(kinds) > 1 else _JSON[kind]}
    schema |= {_LIMITS[limit][1]: value for limit, value in given.items()}
    if str not in kinds:
        schema |= {"type": [schema["type"], "string"], "if": _NO_TEMPLATE, "then": {"type": schema["type"]}}
    schema |= {"description": setting.metadata["help"], "default": setting.default}
    strict = Field(strict=True, **{_LIMITS[limit][0]: value for limit, value in given.items()})
    typed: Any = Annotated[kind, strict, WrapValidator(_or_template), PlainSerializer(lambda value: value)]
    return Annotated[typed, WithJsonSchema(schema)], Field(default=setting.default)


def _or_template(value: Any, check: Any) -> Any:
    return value if isinstance(value, str) and _TEMPLATE in value else check(value)


_FORM: Any = {each.name: _of_setting(each) for each in fields(Settings)}
SettingsModel: type[BaseModel] = create_model("SettingsModel", __base__=dg.Model, **_FORM)
"""The settings as YAML has them."""
_SETTINGS = WithJsonSchema(
    {**SettingsModel.model_json_schema(), "type": ["object", "string"], "description": "the settings of builds"}
)
_AUTOMATION = WithJsonSchema(
    {
        "type": ["boolean", "array", "string"],
        "items": {"enum": [*SWITCHES]},
        "description": "what is on from the start: true for all, or a list of some",
    }
)
_PARTITIONS = WithJsonSchema(SettingsModel.model_json_schema()["properties"]["partitions"] | {"default": None})
"""Schemas of attributes. Dagster adds a text, for a template, by a union, and a union's error names no part of it."""


def _as_settings(context: dg.ResolutionContext, model: BaseModel | str) -> Settings:
    """Return the settings that YAML gives; the defaults for the others. Raises: ValueError that names a setting."""
    if isinstance(model, str):
        raise ValueError(f"found {model!r}, expected settings by name, or a template of such")
    given = context.resolve_value(model.model_dump(exclude_unset=True))
    return Settings(**parsed(given, "settings.{}".format))  # a template's text into numbers


class Hours(dg.Model):
    """After how many hours without a materialization an asset is not fresh."""

    fail: float = Field(gt=0)
    warn: float | None = Field(None, gt=0)


def _as_policy(_: dg.ResolutionContext, hours: Hours | str) -> dg.FreshnessPolicy:
    if isinstance(hours, str):
        raise ValueError(f"found {hours!r}, expected hours as {{fail: 48, warn: 24}}, or a template of a policy")
    warn = None if hours.warn is None else timedelta(hours=hours.warn)
    return dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=hours.fail), warn_window=warn)


# --- paths ------------------------------------------------------------------------------------------------------------


def _from(root: Path, settings: Settings) -> Settings:
    """Return the settings with their relative paths below `root`, whatever folder a process is started in."""

    def placed(text: str) -> str:
        return str(root / Path(text).expanduser())

    changed: dict[str, Any] = {name: placed(getattr(settings, name)) for name in ("cache_dir", "roam_dir")}
    for name, others in (("source_root", ("hub", "sample")), ("exclude", ()), ("chat_template", ("tokenizer",))):
        if (text := getattr(settings, name)) and text not in others:
            changed[name] = placed(text)
    for name in ("tokenizer", "eagle3_target"):
        if (text := getattr(settings, name)) and (not is_id(text) or (root / Path(text).parts[0]).exists()):
            changed[name] = placed(text)
    if settings.sources_file != Settings.sources_file or (root / settings.sources_file).exists():
        changed["sources_file"] = placed(settings.sources_file)
    if set(settings.eagle3_source) & set("/.*"):  # which no name of a source has
        changed["eagle3_source"] = placed(settings.eagle3_source)
    for name in ("pretrain", "sft", "rollouts"):
        lines = [line.partition("=") for line in (getattr(settings, name) or "").split(";") if line.strip()]
        if lines:
            changed[name] = ";".join(
                f"{left}={placed(files.strip())}" if equals else left for left, equals, files in lines
            )
    return replace(settings, **changed)


# --- the component ----------------------------------------------------------------------------------------------------


def _about(text: str) -> dg.Resolver:
    made: dg.Resolver = dg.Resolver.default(description=text)
    return made


def _words_of(path: str) -> dict[str, str]:
    """Return what a template below `translation` may name, besides `spec`."""
    family, _, name = path.partition("/")
    return {"path": path, "family": family, "name": name}


class NewCaches(BaseModel):
    """Flags of `dg scaffold defs pipelines.NielsCaches`."""

    prefix: str | None = Field(None, description="stands before the key of every asset")
    source_root: str = Field("sample", description="source of the text: hub, sample, or the folder of a mirror")
    cache_dir: str = Field("cache", description="folder for the caches")


class CachesScaffolder(dg.Scaffolder[NewCaches]):
    """Writes the YAML of a new component."""

    @classmethod
    def get_scaffold_params(cls) -> type[NewCaches]:
        """Return the flags of the command."""
        return NewCaches

    def scaffold(self, request: dg.ScaffoldRequest[NewCaches]) -> None:
        """Write defs.yaml, or component.py."""
        settings = request.params.model_dump(exclude={"prefix"})
        prefix = {"prefix": request.params.prefix} if request.params.prefix else {}
        dg.scaffold_component(request, {**prefix, "settings": settings})


@dg.scaffold_with(CachesScaffolder)
class NielsCaches(CacheTranslator, dg.Component, dg.Resolvable, dg.Model):
    """Token caches of niels_gpt: an asset for the tokenizer and for each cache, with checks, jobs and sensors.

    Relative paths start in the project's folder; `sources` starts beside the YAML file. Settings that are not given
    have the defaults of `niels_gpt.settings.Settings`: no variable NIELS_GPT_<FIELD> is read. A setting from the
    environment is written as a template, such as `"{{ env.CACHE_DIR }}"`.

    To change single assets, write `translation`, with the words `path` (sft/oasst1), `family`, `name` and `spec`; or
    subclass the component and define `get_asset_spec(path, spec)`.
    """

    settings: Annotated[Settings, dg.Resolver(_as_settings, model_field_type=SettingsModel), _SETTINGS] = Field(
        default_factory=Settings
    )
    sources: Annotated[
        str | None, _about("file of your own sources, as sources.toml: its path from the folder of this YAML file")
    ] = None
    prefix: Annotated[str | None, _about("stands before the key of every asset, such as llm or team/llm")] = None
    group_prefix: Annotated[str, _about("stands before the name of every group, such as llm/")] = ""
    partitions: Annotated[int | None, _PARTITIONS] = None
    static_partitions: Annotated[bool, _about("whether caches in partitions have Dagster's own partitions")] = False
    owners: Annotated[list[str], _about("of every asset: team:NAME, or an e-mail address")] = Field(
        default_factory=list
    )
    tags: Annotated[dict[str, str], _about("of every asset")] = Field(default_factory=dict)
    op_tags: Annotated[dict[str, Any], _about("of every step that builds, such as dagster-k8s/config")] = Field(
        default_factory=dict
    )
    automation: Annotated[bool | list[str], _AUTOMATION] = False
    observe_cron: Annotated[str, _about("when the sensor observe observes the sources, in UTC")] = HOURLY
    freshness: Annotated[
        Any,
        dg.Resolver(_as_policy, model_field_type=Hours, description="of each cache, in hours: {fail: 48, warn: 24}"),
    ] = None
    repository: Annotated[
        str | None,
        _about("where the files of this version of niels_gpt lie, such as https://HOST/ORG/REPOSITORY/blob/TAG"),
    ] = None
    translation: Annotated[
        Annotated[TranslationFn[str], TranslationFnResolver[str](template_vars_for_translation_fn=_words_of)] | None,
        _about("attributes of assets, with the words path, family, name and spec"),
    ] = None

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return the tags of the component, and the kinds of its definitions."""
        made = ("asset", "asset_check", "job", "resource", "schedule", "sensor")
        return dg.ComponentTypeSpec(tags=["llm", "training-data", "tokens"], produces=made)

    def get_asset_spec(self, path: str, spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return the spec of an asset, as `translation` changes it."""
        return self.translation(spec, path) if self.translation else spec

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return what `niels_definitions` returns for these attributes."""
        settings = self.settings
        if self.sources is not None:
            folder = context.path if context.path.is_dir() else context.path.parent
            settings = replace(settings, sources_file=str(folder / Path(self.sources).expanduser()))
        if self.partitions is not None:
            settings = replace(settings, partitions=self.partitions)
        return niels_definitions(
            self.prefix,
            _from(context.project_root, settings),
            owners=self.owners,
            tags=self.tags,
            op_tags=self.op_tags,
            group_prefix=self.group_prefix,
            automation=self.automation,
            observe_cron=self.observe_cron,
            freshness=self.freshness,
            static_partitions=self.static_partitions,
            repository=self.repository,
            translator=self,
        )
