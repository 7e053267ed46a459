"""A bad cache stops the run, a poor one is a warning, and each check can be run by itself.

The rules themselves are tested in test_verify.py.
"""

import asyncio
import dataclasses
import logging
from pathlib import Path

import dagster as dg
import yaml
from dagster._core.definitions.asset_health.asset_check_health import AssetCheckHealthState
from dagster._core.loader import LoadingContextForTest
from support.dagster_runs import check_alone, metadata, run, verdicts
from support.pipeline_seams import CACHES, checks_of

from niels_gpt.settings import Settings
from pipelines.definitions import defs, niels_definitions


def health(instance: dg.DagsterInstance, key: str) -> str:
    """Return an asset's health by its checks, as Dagster+ shows it; the open UI shows its parts."""
    keys = {each for each in defs.resolve_asset_graph().asset_check_keys if each.asset_key.to_user_string() == key}
    found = AssetCheckHealthState.compute_for_asset_checks(keys, LoadingContextForTest(instance))
    return asyncio.run(found).health_status.value


def test_every_asset_has_the_checks_of_its_kind_and_they_say_what_they_look_at():
    graph = defs.resolve_asset_graph()
    for key in ("tokenizer", *CACHES):
        rules = checks_of(key)
        all_specs = map(graph.get_check_spec, graph.asset_check_keys)
        specs = {spec.name: spec for spec in all_specs if spec.asset_key.to_user_string() == key}
        assert specs.keys() == rules.keys()
        assert {name: spec.blocking for name, spec in specs.items()} == {n: r.blocking for n, r in rules.items()}
        assert all(spec.description for spec in specs.values())


def test_a_good_cache_passes_and_an_unmet_budget_is_a_warning_that_fails_no_run(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    result = run(instance, settings, "pretrain/fineweb_edu")
    assert result.success
    names = ("files_match_meta", "ids_below_vocab_size", "tokenizer_matches", "readers_open")
    shares = dict.fromkeys(("dropped_share", "repaired_share", "signals"), (True, "WARN"))
    assert verdicts(result) == {**dict.fromkeys(names, (True, "ERROR")), "budget_reached": (False, "WARN"), **shares}
    for found in result.get_asset_check_evaluations():  # each says what it has measured
        assert found.description and len(found.metadata) > 1, found.check_name


def test_a_share_of_drops_above_the_setting_is_a_warning(instance: dg.DagsterInstance, settings: Settings) -> None:
    result = run(instance, settings, "sft/dolly15k", config={"max_dropped_share": 0.0})
    assert result.success
    (found,) = [each for each in result.get_asset_check_evaluations() if each.check_name == "dropped_share"]
    assert not found.passed and found.severity.value == "WARN"
    assert "sentinel_in_text" in str(found.description) and "force" not in str(found.description)
    entries = {name: entry.value for name, entry in found.metadata.items()}
    assert isinstance(entries["dropped_share"], float) and 0 < entries["dropped_share"] < 1
    assert entries["limit"] == "0 %", "a limit is no figure to plot"
    assert health(instance, "sft/dolly15k") == "WARNING"
    logged = [event.user_message for event in instance.all_logs(result.run_id) if event.level == logging.WARNING]
    assert [line for line in logged if line.startswith("sft/dolly15k: dropped_share: ")], "on the console too"


def test_a_flipped_bit_fails_the_deep_check_and_with_it_the_run(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    assert run(instance, settings, "sft/oasst1").success
    tokens = Path(settings.cache_dir, "sft", "oasst1", "train_tokens.bin")
    tokens.write_bytes(bytes([tokens.read_bytes()[0] ^ 1]) + tokens.read_bytes()[1:])
    quick = check_alone(instance, settings, "sft/oasst1", "files_match_meta")
    assert quick.success and verdicts(quick) == {"files_match_meta": (True, "ERROR")}
    deep = dataclasses.replace(settings, deep_checks=True)
    result = run(instance, deep, "sft/oasst1", raise_on_error=False)
    assert not result.success
    assert verdicts(result)["files_match_meta"] == (False, "ERROR")


def test_a_cache_that_cannot_be_decoded_is_left_to_its_checks(instance: dg.DagsterInstance, settings: Settings) -> None:
    run(instance, settings, "sft/oasst1")
    tokens = Path(settings.cache_dir, "sft", "oasst1", "train_tokens.bin")
    tokens.write_bytes(b"\xff\xff" + tokens.read_bytes()[2:])
    result = run(instance, settings, "sft/oasst1", raise_on_error=False)
    assert not result.success
    assert verdicts(result)["ids_below_vocab_size"] == (False, "ERROR")
    (found,) = [each for each in result.get_asset_check_evaluations() if each.check_name == "ids_below_vocab_size"]
    wrong, remedy = str(found.description).split("\n\n")
    assert wrong.startswith(f"{tokens}: token 0 is id 65535") and "niels-gpt" not in wrong and "\n" not in remedy
    assert remedy.startswith("Materialize `sft/oasst1`, ")
    assert yaml.safe_load(remedy.split("`")[3]) == {"ops": {"sft__oasst1": {"config": {"force": True}}}}
    assert found.metadata["greatest_id"].value == 65_535
    assert health(instance, "sft/oasst1") == "DEGRADED"
    assert "cannot be read" in metadata(result)["sft/oasst1"]["picture"]


def test_a_bad_cache_stops_what_lies_downstream(instance: dg.DagsterInstance, settings: Settings) -> None:
    trained = []

    @dg.asset(deps=[["sft", "oasst1"]])
    def model() -> None:
        trained.append("yes")

    run(instance, settings, "sft/oasst1")
    Path(settings.cache_dir, "tokenizer", "spm.model").write_bytes(b"not the model of these ids")
    merged = dg.Definitions.merge(dg.Definitions(assets=[model]), niels_definitions(settings=settings))
    # The asset itself is not built again here: its check looks at what is there and stops the model's training.
    job = merged.resolve_implicit_global_asset_job_def().get_subset(
        asset_selection={dg.AssetKey("model")},
        asset_check_selection={dg.AssetCheckKey(dg.AssetKey(["sft", "oasst1"]), "tokenizer_matches")},
    )
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    assert verdicts(result) == {"tokenizer_matches": (False, "ERROR")}
    (found,) = result.get_asset_check_evaluations()
    assert "force" not in str(found.description), "a build of the cache alone does not repair it"
    assert trained == []
