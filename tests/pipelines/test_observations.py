"""raw/NAME follows its source: files by fingerprint, the hub by revision, and without a hub by what is recorded."""

import dataclasses
import math
import os
import shutil
import time
from pathlib import Path

import dagster as dg
import pytest
from support import numbered_datasets
from support.dagster_runs import run, stale
from support.hub_content import Repository
from support.loopback_hub import LoopbackHub
from support.pipeline_seams import chats_are, recipe_is, record, record_of_recipe, recorded

from niels_gpt.recipes.plan import observe
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import Settings

DOLLY = "databricks/databricks-dolly-15k"


@pytest.fixture
def hub(loopback_hub):
    """A hub that is down until its faults are cleared."""
    loopback_hub.fail(times=math.inf)
    return loopback_hub


@pytest.fixture
def of_the_hub(settings):
    """Settings of the hub with an oasst1 cache whose record says that it came from the hub's commit aaa."""
    build_token_cache(settings, "oasst1")
    cache = Path(settings.cache_dir, "sft", "oasst1")
    facts = {"kind": "hub", "licence": "apache-2.0", "revision": "aaa", "fingerprint": "OpenAssistant/oasst1@aaa"}
    record(cache, {**recorded(cache), "source": facts})
    return dataclasses.replace(settings, source_root="hub")


def data_version(instance: dg.DagsterInstance, key: str) -> str | None:
    """Return the newest observed data version."""
    (record,) = instance.fetch_observations(dg.AssetKey(key.split("/")), limit=1).records
    assert record.asset_observation is not None
    return record.asset_observation.data_version


def test_an_observation_is_a_folders_fingerprint_or_the_hubs_newest_revision(
    instance: dg.DagsterInstance, hub: LoopbackHub, of_the_hub: Settings, settings: Settings
) -> None:
    run(instance, settings, "raw/oasst1")
    facts, warning = observe(settings, "sft/oasst1")
    assert (data_version(instance, "raw/oasst1"), None) == (facts["fingerprint"], warning)
    (record,) = instance.fetch_observations(dg.AssetKey(["raw", "oasst1"]), limit=1).records
    assert record.asset_observation is not None
    shown = {name: entry.value for name, entry in record.asset_observation.metadata.items()}
    assert shown["warning"] == "none" and shown["files"] == facts["files"] and "B" in str(shown["size of the files"])
    assert 0 < float(str(shown["newest change"])) <= time.time()
    hub.faults.clear()
    hub.repositories["OpenAssistant/oasst1"] = Repository({"bbb": {}}, {"main": "bbb"})
    run(instance, of_the_hub, "raw/oasst1")
    assert data_version(instance, "raw/oasst1") == "OpenAssistant/oasst1@bbb"


def test_without_the_hub_the_recorded_revision_counts_with_a_warning(
    instance: dg.DagsterInstance, hub: LoopbackHub, of_the_hub: Settings
) -> None:
    assert run(instance, of_the_hub, "raw/oasst1").success
    assert data_version(instance, "raw/oasst1") == "OpenAssistant/oasst1@aaa"
    (record,) = instance.fetch_observations(dg.AssetKey(["raw", "oasst1"]), limit=1).records
    assert "the revision that the cache was built from" in str(record.asset_observation.metadata["warning"].value)


def test_without_the_hub_the_last_observation_of_the_dataset_is_repeated(
    instance: dg.DagsterInstance, hub: LoopbackHub, of_the_hub: Settings
) -> None:
    def observe_without_the_hub():
        assert run(instance, of_the_hub, "raw/oasst1").success
        (record,) = instance.fetch_observations(dg.AssetKey(["raw", "oasst1"]), limit=1).records
        assert record.asset_observation is not None
        assert "observed last" in str(record.asset_observation.metadata["warning"].value)
        assert (record.asset_observation.tags or {})["niels_gpt/hub_asked"] == "no"
        return record.asset_observation.data_version

    for version in ("somebody/else@ccc", "OpenAssistant/oasst1@bbb"):
        tags = {"dagster/data_version": version}
        instance.report_runless_asset_event(dg.AssetObservation(["raw", "oasst1"], tags=tags))
    instance.report_runless_asset_event(dg.AssetObservation(["raw", "oasst1"], tags={"dagster/data_version": "f00d"}))
    assert observe_without_the_hub() == observe_without_the_hub() == "OpenAssistant/oasst1@bbb"
    shutil.rmtree(of_the_hub.cache_dir)
    assert observe_without_the_hub() == "OpenAssistant/oasst1@bbb"


def test_without_the_hub_and_without_a_cache_the_observation_fails(hub, settings):
    with pytest.raises(ConnectionError, match="could not ask the Hugging Face hub"):
        observe(dataclasses.replace(settings, source_root="hub"), "sft/oasst1")


def test_an_observation_counts_until_the_cache_is_built_again(
    instance: dg.DagsterInstance, of_the_hub: Settings
) -> None:
    given = []

    def recipe(_, settings, name, *, observed, progress):
        given.append(observed)
        raise ValueError("this recipe builds nothing")

    def given_to_the_recipe(instance: dg.DagsterInstance, settings: Settings) -> str | None:
        with recipe_is(recipe):
            run(instance, settings, "sft/oasst1", raise_on_error=False)
        return given.pop()

    assert given_to_the_recipe(instance, of_the_hub) is None
    tags = {"dagster/data_version": "OpenAssistant/oasst1@bbb"}
    instance.report_runless_asset_event(dg.AssetObservation(["raw", "oasst1"], tags=tags))
    assert given_to_the_recipe(instance, of_the_hub) == "OpenAssistant/oasst1@bbb"
    # Built after it, at whatever revision, as by the command line's own refresh.
    os.utime(record_of_recipe(Path(of_the_hub.cache_dir, "sft", "oasst1")), (time.time() + 1, time.time() + 1))
    assert given_to_the_recipe(instance, of_the_hub) is None


def dolly(instance: dg.DagsterInstance, settings: Settings, **config: str) -> str:
    """Materialize sft/dolly15k and return its revision, which is also the input version that Dagster records."""
    run(instance, settings, "sft/dolly15k", config=config or None)
    event = instance.get_latest_materialization_event(dg.AssetKey(["sft", "dolly15k"]))
    assert event is not None and event.asset_materialization is not None
    made = (event.asset_materialization.tags or {})["dagster/input_data_version/raw/dolly15k"].partition("@")[2]
    cache = Path(settings.cache_dir, "sft", "dolly15k")
    assert recorded(cache)["source"]["revision"] == made
    return made


@pytest.mark.slow
def test_a_revision_named_in_the_launchpad_is_what_the_cache_was_made_from_until_a_plain_run(
    instance: dg.DagsterInstance, loopback_hub: LoopbackHub, settings: Settings
) -> None:
    of_hub = dataclasses.replace(settings, source_root="hub")
    first = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20, start=1_000))
    second = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20, start=1_100))
    run(instance, of_hub, "tokenizer", "raw/dolly15k")
    assert dolly(instance, of_hub) == second
    assert stale(instance, of_hub) == {}
    for _ in range(2):
        assert dolly(instance, of_hub, revision=f"dolly15k={first}") == first
        assert set(stale(instance, of_hub)) == {"sft/dolly15k"}
    assert dolly(instance, of_hub) == second
    assert data_version(instance, "raw/dolly15k") == f"{DOLLY}@{second}"
    assert stale(instance, of_hub) == {}


@pytest.mark.slow
def test_a_cache_that_the_command_line_has_refreshed_is_observed_and_moves_no_other_cache(
    instance: dg.DagsterInstance, loopback_hub: LoopbackHub, settings: Settings
) -> None:
    of_hub = dataclasses.replace(settings, source_root="hub")
    first = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20, start=2_000))
    run(instance, of_hub, "tokenizer", "raw/dolly15k")
    assert dolly(instance, of_hub) == first
    second = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20, start=2_100))
    build_token_cache(of_hub, "dolly15k", refresh=True)
    assert dolly(instance, of_hub) == second
    assert data_version(instance, "raw/dolly15k") == f"{DOLLY}@{second}"
    assert stale(instance, of_hub) == {}
    # Another cache of the same source, older than that observation: the hub was not asked for it.
    build_token_cache(dataclasses.replace(of_hub, revision=f"dolly15k={first}"), "dolly15k")
    cache = Path(of_hub.cache_dir, "sft", "dolly15k")
    known = recorded(cache)
    del known["source"]["asked_revision"]
    record(cache, known)
    os.utime(record_of_recipe(cache), (1, 1))
    assert dolly(instance, of_hub) == first
    assert set(stale(instance, of_hub)) == {"sft/dolly15k"}
    run(instance, of_hub, "raw/dolly15k")
    assert dolly(instance, of_hub) == second
    assert stale(instance, of_hub) == {}


@pytest.mark.parametrize(
    ("observed", "built"),
    [
        (None, "aaa"),  # nobody has looked: the recorded one
        ("OpenAssistant/oasst1@bbb", "bbb"),  # the observed one, although the hub has moved on
        ("f00d", "aaa"),  # of a folder, before source_root became the hub
        ("somebody/else@ccc", "aaa"),
        ("OpenAssistant/oasst1@None", "aaa"),  # of a stub
    ],
)
def test_what_is_built_is_the_observed_revision_and_the_hub_is_not_asked(of_the_hub, monkeypatch, observed, built):
    def chats(revision):
        yield [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"revision {revision}"}]

    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    changed = dataclasses.replace(of_the_hub, oasst1_max_messages=7)  # a reason to build
    with chats_are(chats):
        meta = build_token_cache(changed, "oasst1", observed=observed).meta
        assert meta["source"]["revision"] == built
        assert build_token_cache(changed, "oasst1", observed=observed).reused
