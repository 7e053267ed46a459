"""niels_gpt.settings as a Dagster resource: one form in the Launchpad, one block in run config, one environment."""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import dagster as dg
from pydantic import Field, ValidationError, create_model

from niels_gpt.settings import Settings

ENVIRONMENT_PREFIX = "NIELS_GPT_"
_NOT_SETTINGS = {"NIELS_GPT_TEST_DATA", "NIELS_GPT_PEERS"}  # where the tests find real text, and other tools
_CORE = {field.name: field for field in fields(Settings)}


def _setting(name: str) -> Any:
    """Return the form field of a core setting: its default, and its meaning and unit as the description."""
    return Field(default=_CORE[name].default, description=_CORE[name].metadata["help"])


class SettingsResource(dg.ConfigurableResource[None]):
    """All settings of all caches. A cache is built again only if one that it reads has changed."""

    seed: int = _setting("seed")
    source_root: str = _setting("source_root")
    cache_dir: str = _setting("cache_dir")
    max_document_bytes: int = _setting("max_document_bytes")
    follow_links: bool = _setting("follow_links")
    exclude: str | None = _setting("exclude")
    revision: str | None = _setting("revision")
    threads: int = _setting("threads")
    tokenizer_model: str | None = _setting("tokenizer_model")
    vocab_size: int = _setting("vocab_size")
    model_type: str = _setting("model_type")
    normalization: str = _setting("normalization")
    character_coverage: float = _setting("character_coverage")
    tokenizer_max_bytes: int = _setting("tokenizer_max_bytes")
    shard_bytes: int = _setting("shard_bytes")
    shuffle_buffer: int = _setting("shuffle_buffer")
    append_eot: bool = _setting("append_eot")
    on_special: str = _setting("on_special")
    fineweb_edu_dataset: str = _setting("fineweb_edu_dataset")
    fineweb_edu_config: str = _setting("fineweb_edu_config")
    fineweb_edu_train_tokens: int = _setting("fineweb_edu_train_tokens")
    fineweb_edu_val_tokens: int = _setting("fineweb_edu_val_tokens")
    wikitext_dataset: str = _setting("wikitext_dataset")
    wikitext_config: str = _setting("wikitext_config")
    roam_dir: str = _setting("roam_dir")
    roam_val_frac: float = _setting("roam_val_frac")
    gutenberg_dataset: str = _setting("gutenberg_dataset")
    gutenberg_from_hub: bool = _setting("gutenberg_from_hub")
    gutenberg_shuffle_buffer: int = _setting("gutenberg_shuffle_buffer")
    gutenberg_train_tokens: int = _setting("gutenberg_train_tokens")
    gutenberg_val_tokens: int = _setting("gutenberg_val_tokens")
    sft_val_frac: float = _setting("sft_val_frac")
    dolly_dataset: str = _setting("dolly_dataset")
    dolly_include_system: bool = _setting("dolly_include_system")
    oasst1_dataset: str = _setting("oasst1_dataset")
    oasst1_english_only: bool = _setting("oasst1_english_only")
    oasst1_max_messages: int = _setting("oasst1_max_messages")
    pretrain: str | None = _setting("pretrain")
    sft: str | None = _setting("sft")
    as_text: str | None = _setting("as_text")
    sources_file: str = _setting("sources_file")
    licence: str | None = _setting("licence")
    attribution: str | None = _setting("attribution")
    own_val_frac: float = _setting("own_val_frac")
    eagle3_target: str | None = _setting("eagle3_target")
    eagle3_source: str = _setting("eagle3_source")
    eagle3_max_samples: int = _setting("eagle3_max_samples")
    eagle3_seq_length: int = _setting("eagle3_seq_length")
    eagle3_draft_vocab_size: int = _setting("eagle3_draft_vocab_size")
    eagle3_topk: int = _setting("eagle3_topk")
    eagle3_shard_size: int = _setting("eagle3_shard_size")
    eagle3_dtype: str = _setting("eagle3_dtype")
    eagle3_batch_size: int = _setting("eagle3_batch_size")
    eagle3_device: str | None = _setting("eagle3_device")
    eagle3_check_samples: int = _setting("eagle3_check_samples")
    disk_check: bool = _setting("disk_check")
    deep_checks: bool = _setting("deep_checks")
    max_dropped_share: float = _setting("max_dropped_share")

    @classmethod
    def of(cls, settings: Settings) -> "SettingsResource":
        """Return a form whose defaults are these settings.

        A form that was merely filled with them would lose them all where a run's config names a single one: what such a
        config leaves out falls back to the defaults of the class.
        """
        defaults: Any = {
            name: (field.annotation, Field(default=getattr(settings, name), description=field.description))
            for name, field in cls.model_fields.items()
        }
        return create_model(cls.__name__, __base__=cls, __doc__=cls.__doc__, **defaults)()

    def to_core(self) -> Settings:
        """Return what the recipes take."""
        return Settings(**{name: getattr(self, name) for name in _CORE})

    def of_run(self, context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext) -> Settings:
        """Return the settings of a run, after a look at its config for keys that nobody reads.

        Dagster refuses an unknown field of this form, but ignores an unknown op or resource in silence.
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
        raise ValueError(
            f"{ENVIRONMENT_PREFIX}{name.upper()}: there is no setting of this name. There are "
            + ", ".join(ENVIRONMENT_PREFIX + field.upper() for field in _CORE)
        )
    try:
        values: dict[str, Any] = {"source_root": "sample", **given}  # pydantic turns text into numbers
        return SettingsResource(**values).to_core()
    except ValidationError as error:
        problems = [f"{ENVIRONMENT_PREFIX}{item['loc'][0]}".upper() + f": {item['msg']}" for item in error.errors()]
        raise ValueError("; ".join(problems)) from error
