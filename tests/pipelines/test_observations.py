"""raw/NAME follows its source: files by fingerprint, the hub by revision, and without a hub by what is recorded."""

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.dagster_runs import run
from support.hub_content import Repository
from support.loopback_hub import LoopbackHub

from niels_gpt.recipes.plan import observe
from niels_gpt.recipes.run_recipe import Outcome, recorded_recipe
from niels_gpt.recipes.token_caches import build_token_cache
from niels_gpt.settings import Settings
from niels_gpt.storage.fileio import canonical_json
from niels_gpt.storage.versions import versions_dir
from pipelines import assets


@pytest.fixture
def hub(loopback_hub: LoopbackHub) -> LoopbackHub:
    """A hub that is down until its faults are cleared."""
    loopback_hub.fail(times=math.inf)
    return loopback_hub


@pytest.fixture
def of_the_hub(settings: Settings) -> Settings:
    """Settings of the hub with an oasst1 cache whose record says that it came from the hub's commit aaa."""
    build_token_cache(settings, "oasst1")
    cache = Path(settings.cache_dir, "sft", "oasst1")
    facts = {"kind": "hub", "licence": "apache-2.0", "revision": "aaa", "fingerprint": "OpenAssistant/oasst1@aaa"}
    record = versions_dir(cache) / "recipe.json"
    record.write_bytes(canonical_json({**recorded_recipe(cache), "source": facts}))
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


def test_without_the_hub_and_without_a_cache_the_observation_fails(hub: LoopbackHub, settings: Settings) -> None:
    with pytest.raises(ConnectionError, match="could not ask the Hugging Face hub"):
        observe(dataclasses.replace(settings, source_root="hub"), "sft/oasst1")


def test_an_observation_counts_until_the_cache_is_built_again(
    instance: dg.DagsterInstance, of_the_hub: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str | None] = []

    def recipe(settings: Settings, name: str, *, observed: str | None, progress: object) -> Outcome:
        given.append(observed)
        raise ValueError("this recipe builds nothing")

    def given_to_the_recipe(instance: dg.DagsterInstance, settings: Settings) -> str | None:
        run(instance, settings, "sft/oasst1", raise_on_error=False)
        return given.pop()

    monkeypatch.setattr(assets, "build_token_cache", recipe)
    assert given_to_the_recipe(instance, of_the_hub) is None
    tags = {"dagster/data_version": "OpenAssistant/oasst1@bbb"}
    instance.report_runless_asset_event(dg.AssetObservation(["raw", "oasst1"], tags=tags))
    assert given_to_the_recipe(instance, of_the_hub) == "OpenAssistant/oasst1@bbb"
    # Built after it, at whatever revision, as by the command line's own refresh.
    record = versions_dir(Path(of_the_hub.cache_dir, "sft", "oasst1")) / "recipe.json"
    os.utime(record, (time.time() + 1, time.time() + 1))
    assert given_to_the_recipe(instance, of_the_hub) is None


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
def test_what_is_built_is_the_observed_revision_and_the_hub_is_not_asked(
    of_the_hub: Settings, monkeypatch: pytest.MonkeyPatch, observed: str | None, built: str
) -> None:
    def chats(settings: Settings, origin: object, revision: str | None, *_: object) -> Iterator[Any]:
        yield [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"revision {revision}"}]

    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    monkeypatch.setattr("niels_gpt.recipes.sources.chats", chats)
    changed = dataclasses.replace(of_the_hub, oasst1_max_messages=7)  # a reason to build
    meta = build_token_cache(changed, "oasst1", observed=observed).meta
    assert meta["source"]["revision"] == built
    assert build_token_cache(changed, "oasst1", observed=observed).reused
