"""raw/NAME follows its source: files by fingerprint, the hub by revision, and without a hub by what is recorded.

Run: pytest tests/test_observations.py
"""

import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_runs import run

from niels_gpt.fileio import canonical_json, versions_dir
from niels_gpt.recipes.plan import observe
from niels_gpt.recipes.produce import Outcome, recorded_recipe
from niels_gpt.settings import Settings
from pipelines import assets
from pipelines.resources import SettingsResource


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A hub on loopback that answers with the commit of a dataset: {"sha": ...}; empty, it is down."""
    answers: dict[str, str] = {}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"id": "OpenAssistant/oasst1", **answers}).encode()
            self.send_response(200 if answers else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield answers
    server.shutdown()
    server.server_close()


@pytest.fixture
def of_the_hub(settings: Settings) -> Settings:
    """Settings of the hub with an oasst1 cache whose record says that it came from the hub's commit aaa."""
    with dg.instance_for_test() as instance:
        run(instance, settings, "sft/oasst1")
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


def test_a_folders_observation_is_its_fingerprint(settings: Settings) -> None:
    with dg.instance_for_test() as instance:
        run(instance, settings, "raw/oasst1")
        facts, warning = observe(settings, "sft/oasst1")
        assert data_version(instance, "raw/oasst1") == facts["fingerprint"]
        assert warning is None


def test_the_hubs_observation_is_its_newest_revision(hub: dict[str, str], of_the_hub: Settings) -> None:
    hub["sha"] = "bbb"
    with dg.instance_for_test() as instance:
        run(instance, of_the_hub, "raw/oasst1")
        assert data_version(instance, "raw/oasst1") == "OpenAssistant/oasst1@bbb"


def test_without_the_hub_the_recorded_revision_counts_with_a_warning(hub: dict[str, str], of_the_hub: Settings) -> None:
    with dg.instance_for_test() as instance:
        assert run(instance, of_the_hub, "raw/oasst1").success
        assert data_version(instance, "raw/oasst1") == "OpenAssistant/oasst1@aaa"
        (record,) = instance.fetch_observations(dg.AssetKey(["raw", "oasst1"]), limit=1).records
        assert "the revision that the cache was built from" in str(record.asset_observation.metadata["warning"].value)


def test_without_the_hub_and_without_a_cache_the_observation_fails(hub: dict[str, str], settings: Settings) -> None:
    with pytest.raises(ConnectionError, match="could not ask the Hugging Face hub"):
        observe(dataclasses.replace(settings, source_root="hub"), "sft/oasst1")


@pytest.mark.parametrize(("observed", "asks_again"), [(None, False), ("aaa", False), ("bbb", True)])
def test_the_hub_is_asked_again_only_after_an_observation_of_another_revision(
    of_the_hub: Settings, observed: str | None, asks_again: bool
) -> None:
    given: list[bool] = []

    def recipe(settings: Settings, *, refresh: bool, progress: object) -> Outcome:
        given.append(refresh)
        raise ValueError("this recipe builds nothing")

    @dg.asset(key=["sft", "oasst1"])
    def oasst1(context: dg.AssetExecutionContext, settings: SettingsResource) -> dg.MaterializeResult[None]:
        return assets._materialized(context, settings, recipe)

    with dg.instance_for_test() as instance:
        if observed:
            tags = {"dagster/data_version": f"OpenAssistant/oasst1@{observed}"}
            instance.report_runless_asset_event(dg.AssetObservation(["raw", "oasst1"], tags=tags))
        form = SettingsResource.of(of_the_hub)
        dg.materialize([oasst1], instance=instance, resources={"settings": form}, raise_on_error=False)
    assert given == [asks_again]
