"""Pieces of pipelines/ without a run: the form of the settings, the environment, retries, code versions."""

import dataclasses
import json
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
import yaml
from support.pipeline_seams import CACHES

from niels_gpt.cache.meta import read_meta
from niels_gpt.recipes.asked import code_versions
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import RENAMED, Settings
from pipelines import assets, steps
from pipelines.definitions import defs
from pipelines.deployment import Deployment, Run
from pipelines.resources import BuildConfig, settings_from_environment, settings_resource
from pipelines.versions import forced

KEY = "sft/dolly15k"
EVERYTHING = {"tokenizer", *CACHES}


def test_the_form_has_the_settings_of_the_core_name_by_name_and_no_defaults(settings):
    form = settings_resource(settings).get_resource_definition().config_schema.config_type.fields
    names = [field.name for field in fields(Settings) if field.name != "cache_dir"]
    assert list(form) == [*names, *RENAMED, *BuildConfig.model_fields]
    assert not [name for name, field in form.items() if field.default_provided or field.is_required]
    assert all(repr(getattr(settings, name)) in str(form[name].description) for name in names)


def test_the_environment_fills_the_settings_and_the_sample_is_the_default():
    assert settings_from_environment({}) == Settings(source_root="sample")
    given = {"NIELS_GPT_SEED": "7", "NIELS_GPT_DOCUMENT_END": "none", "NIELS_GPT_SOURCE_ROOT": "hub", "HOME": "/"}
    assert settings_from_environment(given) == Settings(seed=7, document_end="none")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("NIELS_GPT_SEEED", "7", r"^NIELS_GPT_SEEED: .* Did you mean NIELS_GPT_SEED\?\n[^\n]*$"),
        ("NIELS_GPT_ROAM", "7", r"mean NIELS_GPT_ROAM_DIR\?"),
        ("NIELS_GPT_XYZ", "7", r"^NIELS_GPT_XYZ: [^?\n]*\n[^\n]*build --help[^\n]*$"),
        ("NIELS_GPT_TOKENIZER_MODEL", "m", "^NIELS_GPT_TOKENIZER_MODEL: this setting is now NIELS_GPT_TOKENIZER$"),
        ("NIELS_GPT_APPEND_EOT", "false", "^NIELS_GPT_APPEND_EOT: this setting is now NIELS_GPT_DOCUMENT_END$"),
        ("NIELS_GPT_SEED", "seven", "NIELS_GPT_SEED: Input should be a valid integer"),
        ("NIELS_GPT_DISK_CHECK", "perhaps", "NIELS_GPT_DISK_CHECK: Input should be a valid boolean"),
    ],
)
def test_a_variable_that_names_no_setting_or_no_value_is_an_error(name, text, message):
    with pytest.raises(ValueError, match=message):
        settings_from_environment({name: text})


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionError("could not ask the hub"), True),
        (TimeoutError("timed out"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (OSError(28, "No space left on device"), False),
        (FileNotFoundError("no mirror"), False),
        (ValueError("no text"), False),
        (KeyError("a mistake of ours"), False),
    ],
)
def test_only_what_time_may_mend_is_tried_again(error, again):
    with (
        pytest.raises(type(error) if again else dg.Failure) as raised,
        steps.clear_errors(Deployment(settings=Settings())),
    ):
        raise error
    if not again:
        assert raised.value.allow_retries is False
        assert str(error) in str(raised.value.description)


def test_an_asset_may_be_called_as_a_function(settings):
    made = {asset.key: asset for asset in assets.assets_of(Deployment(settings=settings))}
    context = dg.build_asset_context(resources={"settings": settings_resource(settings)})
    (result,) = made[dg.AssetKey(["sft", "dolly15k"])](context, BuildConfig())
    meta = read_meta(str(Path(settings.cache_dir, "sft/dolly15k/meta.json")))
    assert result.data_version.value == meta["content_sha256"]


def test_pretrain_builds_share_a_pool_and_whatever_asks_the_hub_is_retried():
    graph = defs.resolve_asset_graph()
    pools = {key.to_user_string(): graph.get(key).pools for key in graph.materializable_asset_keys}
    assert {key for key, pool in pools.items() if pool} == {key for key in CACHES if key.startswith("pretrain/")}
    made = [asset for asset in assets.assets_of(Deployment(settings=Settings())) if asset.is_materializable]
    assert made and all(definition.op.retry_policy == steps.NETWORK_RETRIES for definition in made)


@pytest.mark.parametrize(
    "given", [{}, {"prefix": ("my-team", "v1.2")}, {"keys": {KEY: dg.AssetKey(["chats", "dolly"])}}]
)
def test_the_run_config_that_a_remedy_prints_names_the_op_of_the_asset(given):
    deployment = Deployment(settings=Settings(), **given)
    op = steps.cache_asset(deployment, KEY, "sft", "chats").op
    assert yaml.safe_load(forced(deployment, KEY)) == {"ops": {op.name: {"config": {"force": True}}}}


@pytest.mark.parametrize(("parent", "is_again"), [(None, False), ("first", True)])
def test_a_reexecuted_run_with_force_goes_on_with_what_the_first_has_built(settings, parent, is_again):
    attempt = SimpleNamespace(retry_number=0, run=SimpleNamespace(parent_run_id=parent))
    context = SimpleNamespace(op_execution_context=attempt)
    forced = (Run(context, Deployment(settings=settings), settings, force=True), KEY)
    assert (steps.why_from_scratch(*forced) is None) == is_again, "nothing was ever committed"
    build_token_cache(settings, "dolly15k")
    assert steps.why_from_scratch(*forced) is not None, "what is finished is built once more"
    steps.restart(settings, KEY)
    assert (steps.why_from_scratch(*forced) is None) == is_again


@pytest.fixture
def own(settings, mirror, tmp_path):
    """The settings of a mirror that the test may change."""
    return dataclasses.replace(settings, source_root=str(shutil.copytree(mirror, tmp_path / "own")))


def test_a_code_version_has_what_decides_a_build_and_nothing_else(settings, own):
    named, eagle3 = str(settings.tokenizer), {"eagle3/draft_vocab", "eagle3/targets"}
    listed, renamed = Path(own.source_root, "excluded"), Path(own.source_root, "renamed.model")
    (texts,) = Path(own.source_root, own.fineweb_edu_dataset).rglob("*.jsonl")
    listed.write_text(json.loads(texts.read_text().splitlines()[0])["id"])
    shutil.copyfile(named, renamed)
    trained = {"tokenizer": None, "vocab_size": 600}
    in_partitions = {key for key in CACHES if key.startswith(("pretrain/", "sft/"))}

    def differing(before, after):
        one, other = (code_versions(dataclasses.replace(settings, **changed)) for changed in (before, after))
        return {path for path in one if one[path] != other[path]}

    everything = EVERYTHING | eagle3
    assert differing({}, {"cache_dir": "elsewhere"}) == everything
    assert differing({}, {"source_root": own.source_root}) == everything - {"tokenizer"}
    assert differing({}, {"exclude": str(listed)}) == {"pretrain/fineweb_edu"}
    assert differing({"source_root": "hub"}, {"source_root": "hub", "exclude": str(listed)}) == everything - {
        "tokenizer"
    }
    assert differing({}, {"tokenizer": str(renamed)}) == set(), "the same content"
    assert differing({}, {"vocab_size": 300}) == differing({}, {"revision": "oasst1=main"}) == set()
    assert differing(trained, {**trained, "vocab_size": 300}) == everything
    assert differing(trained, {**trained, "threads": 3, "deep_checks": True, "eagle3_device": "cpu"}) == set()
    assert differing({}, {"follow_links": True}) == everything - {"tokenizer"}
    hub = {"source_root": "hub", "partitions": 1}
    assert differing(hub, {**hub, "partitions": 2}) == in_partitions - {"pretrain/gutenberg"}, "a stub there"
    assert differing(hub, {**hub, "roam_dir": "notes"}) == {"pretrain/roam"}
    assert differing(hub, {**hub, "revision": "dolly15k=main"}) == {"sft/dolly15k", *eagle3}


def test_other_files_of_a_target_are_another_code_version(settings, tmp_path):
    (target := tmp_path / "target").mkdir()
    named = dataclasses.replace(settings, eagle3_target=str(target))
    versions = [code_versions(named)]
    for name in ("model.safetensors", "config.json"):
        (target / name).write_text("of another target")
        versions.append(code_versions(named))
    none, weights, config = versions
    assert {path for path in none if none[path] != weights[path]} == {"eagle3/targets"}
    assert {path for path in none if weights[path] != config[path]} == {"eagle3/draft_vocab", "eagle3/targets"}
