"""What has changed is built, nothing else, and the UI shows as stale what a run would build."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support import chat_tokenizers
from support.dagster_runs import built, metadata, run, stale
from support.pipeline_seams import CACHES, recipe_is

from niels_gpt.recipes.plan import plan
from niels_gpt.settings import Settings
from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer

EVERYTHING = {"tokenizer", *CACHES}
OBSERVED = [f"raw/{key.split('/')[1]}" for key in CACHES] + ["sft/"]


@pytest.fixture
def own(settings, mirror, tmp_path):
    """The settings of a mirror that the test may change."""
    return dataclasses.replace(settings, source_root=str(shutil.copytree(mirror, tmp_path / "own")))


def observed(instance: dg.DagsterInstance, key: str) -> str | None:
    """Return the newest observed data version."""
    for record in instance.fetch_observations(dg.AssetKey(key.split("/")), limit=1).records:
        assert record.asset_observation is not None
        return record.asset_observation.data_version
    return None


def unobserved(instance: dg.DagsterInstance) -> set[str]:
    """Return what has never been observed."""
    return {key for key in OBSERVED if observed(instance, key) is None}


def with_another_tokenizer(settings, folder):
    other = write_tokenizer(train_tokenizer(["another text " * 50, "ein anderer Text"], vocab_size=300), folder / "t")
    return dataclasses.replace(settings, tokenizer=str(other.model_path))


def test_everything_twice_builds_nothing_the_second_time(
    first_run: Any, after_a_run: dg.DagsterInstance, settings: Settings
) -> None:
    assert {key for key, shown in first_run.metadata.items() if shown["run/state"] == "built"} == EVERYTHING
    result = run(after_a_run, settings)
    assert built(result) == set()
    assert stale(after_a_run, settings) == {}
    second = metadata(result)
    assert set(second) == EVERYTHING
    for key in CACHES:  # what a page shows of a run, and of one that has built nothing
        before, after = first_run.metadata[key], second[key]
        assert after["run/state"].startswith("reused")
        assert before["run/seconds"] > 0
        assert before["run/tokens_per_second"] > 0 and "run/tokens_per_second" not in after
        assert before["run/recipe_fingerprint"] == after["run/recipe_fingerprint"]
        assert before["picture"] == after["picture"]


@pytest.mark.parametrize("in_launchpad", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_changed_setting_rebuilds_the_assets_that_read_it_alone(
    after_a_run: dg.DagsterInstance, settings: Settings, in_launchpad: bool
) -> None:
    changed = dataclasses.replace(settings, oasst1_max_messages=2)
    of_source = {"sft/oasst1", "trees/oasst1"}
    assert stale(after_a_run, changed) == dict.fromkeys(of_source, "has a new code version")
    how = {"config": {"oasst1_max_messages": 2}} if in_launchpad else {}
    assert built(run(after_a_run, settings if in_launchpad else changed, **how)) == of_source
    assert stale(after_a_run, changed) == {}
    assert stale(after_a_run, settings) == dict.fromkeys(of_source, "has a new code version"), "a run would build them"


@pytest.mark.slow
def test_a_new_tokenizer_makes_every_cache_stale_and_rebuilds_it(
    after_a_run: dg.DagsterInstance, settings: Settings, tmp_path: Path
) -> None:
    new = with_another_tokenizer(settings, tmp_path)
    assert stale(after_a_run, new) == dict.fromkeys(EVERYTHING, "has a new code version")
    run(after_a_run, settings, "tokenizer", config={"tokenizer": new.tokenizer})
    causes = dict.fromkeys(CACHES, "has a new dependency data version")
    assert stale(after_a_run, settings) == {**causes, "tokenizer": "has a new code version"}
    assert built(run(after_a_run, new)) == set(CACHES)
    assert stale(after_a_run, new) == {}


@pytest.mark.slow
def test_another_chat_template_rebuilds_the_chats_alone(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(chat_tokenizers.CHATML)
    settings = Settings(
        source_root="sample",
        cache_dir=str(tmp_path / "cache"),
        tokenizer=str(chat_tokenizers.write_tokenizer(tmp_path / "tokenizer")),
        chat_template=str(template),
    )
    keys = ("tokenizer", "pretrain/roam", "sft/dolly15k")
    shown = metadata(run(instance, settings, *keys))["sft/dolly15k"]
    assert (shown["chat_template"]["loss_on"], shown["run/state"]) == ("assistant", "built")
    assert 0 < shown["supervised_share"] < 1 and shown["pad_id"] == "0" and "[[" in str(shown["examples"])
    assert 1 <= shown["utf8_bytes_per_token"] < 8 and "bytes_per_token" not in shown
    last = dataclasses.replace(settings, loss_on="last")
    assert stale(instance, last) == {"sft/dolly15k": "has a new code version"}
    assert built(run(instance, last, *keys)) == {"sft/dolly15k"}
    template.write_text(chat_tokenizers.CHATML_MARKED)
    assert stale(instance, last) == {"sft/dolly15k": "has a new code version"}


def test_of_a_tokenizers_files_a_cache_compares_what_its_recipe_reads(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    folder = chat_tokenizers.write_tokenizer(tmp_path / "tokenizer")
    config = folder / "tokenizer_config.json"
    before = json.loads(config.read_text())
    how = {"cache_dir": str(tmp_path / "cache"), "chat_template": "tokenizer", "document_end": "eos"}
    settings, caches = Settings(source_root="sample", tokenizer=str(folder), **how), ["pretrain/roam", "sft/dolly15k"]
    run(instance, settings, "tokenizer", *caches)
    config.write_text(json.dumps(before | {"model_max_length": 2048}))
    assert stale(instance, settings) == {"tokenizer": "has a new code version"}
    planned = {item.key: item.action for item in plan(settings, caches)}
    assert planned == {"tokenizer": "copy", **dict.fromkeys(caches, "up to date")}
    run(instance, settings, "tokenizer")
    assert stale(instance, settings) == {}
    assert built(run(instance, settings, *caches)) == set()
    config.write_text(json.dumps(before | {"chat_template": chat_tokenizers.CHATML_MARKED}))
    (folder / "chat_template.jinja").unlink()
    assert set(stale(instance, settings)) == {"tokenizer", "sft/dolly15k"}
    config.write_text(json.dumps(before | {"eos_token": "<|eot|>"}))
    run(instance, settings, "tokenizer")
    assert set(stale(instance, settings)) == {*caches}


@pytest.mark.slow
def test_a_retrained_but_identical_tokenizer_makes_nothing_stale_and_rebuilds_nothing(
    instance: dg.DagsterInstance, mirror: Path, tmp_path: Path
) -> None:
    settings = Settings(source_root=str(mirror), cache_dir=str(tmp_path / "cache"), vocab_size=600)
    keys = ("tokenizer", "pretrain/roam", "sft/dolly15k")
    run(instance, settings, *keys)
    shutil.rmtree(tmp_path / "cache" / ".versions" / "tokenizer")
    (tmp_path / "cache" / "tokenizer").unlink()
    assert built(run(instance, settings, "tokenizer")) == {"tokenizer"}
    assert stale(instance, settings) == {}
    assert built(run(instance, settings, *keys)) == set()


@pytest.mark.slow
def test_a_touched_note_makes_roam_alone_stale_and_rebuilds_it_alone(
    after_a_run: dg.DagsterInstance, own: Settings
) -> None:
    instance = after_a_run
    run(instance, own, *OBSERVED)
    run(instance, own)
    note = sorted(Path(own.source_root, "roam").rglob("*.md"))[0]
    note.write_text(note.read_text(encoding="utf-8", errors="replace") + "- another thought\n", encoding="utf-8")
    run(instance, own, *OBSERVED)
    assert stale(instance, own) == {"pretrain/roam": "has a new dependency data version"}
    assert built(run(instance, own)) == {"pretrain/roam"}
    assert stale(instance, own) == {}


def test_after_a_run_all_that_was_read_is_observed_and_an_observation_makes_nothing_stale(
    after_a_run: dg.DagsterInstance, settings: Settings
) -> None:
    assert stale(after_a_run, settings) == {}
    assert unobserved(after_a_run) == set()
    run(after_a_run, settings, *OBSERVED)
    assert stale(after_a_run, settings) == {}


@pytest.mark.slow
def test_the_sft_caches_alone_leave_nothing_missing_or_unobserved_that_they_read(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    run(instance, settings, "sft/dolly15k", "sft/oasst1")
    assert stale(instance, settings) == {}
    assert unobserved(instance) == set(OBSERVED) - {"raw/dolly15k", "raw/oasst1", "sft/"}
    assert instance.get_latest_materialization_event(dg.AssetKey("tokenizer")) is not None
    run(instance, settings, "tokenizer", "trees/oasst1")
    assert stale(instance, settings) == {}
    run(instance, settings, "raw/oasst1")
    assert stale(instance, settings) == {}


@pytest.mark.slow
def test_a_run_of_other_text_says_nothing_of_the_deployments_sources(
    after_a_run: dg.DagsterInstance, settings: Settings, own: Settings
) -> None:
    chats = Path(own.source_root, settings.oasst1_dataset)
    for file in filter(Path.is_file, chats.rglob("*")):
        file.rename(file.with_name(f"other_{file.name}"))
    before = observed(after_a_run, "raw/oasst1")
    assert built(run(after_a_run, settings, "sft/oasst1", config={"source_root": own.source_root})) == {"sft/oasst1"}
    assert observed(after_a_run, "raw/oasst1") == before
    assert stale(after_a_run, settings) == {"sft/oasst1": "has a new code version"}
    assert built(run(after_a_run, settings, "sft/oasst1")) == {"sft/oasst1"}
    assert stale(after_a_run, settings) == {}


@pytest.mark.slow
def test_files_that_were_observed_while_a_step_read_older_ones_stay_the_newest(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    def build(real, *given, **how):
        outcome = real(*given, **how)
        tags = {"dagster/data_version": "of changed files"}
        instance.report_runless_asset_event(dg.AssetObservation(["raw", "dolly15k"], tags=tags))
        return outcome

    with recipe_is(build):
        run(instance, settings, "tokenizer", "sft/dolly15k")
    assert observed(instance, "raw/dolly15k") == "of changed files"
    assert stale(instance, settings) == {"sft/dolly15k": "has a new dependency data version"}
    run(instance, settings, "sft/dolly15k")
    assert stale(instance, settings) == {}


def test_a_run_in_another_folder_is_refused(instance: dg.DagsterInstance, settings: Settings) -> None:
    for deployed, asked in ((settings.source_root, "sample"), ("sample", settings.source_root)):
        deployment = dataclasses.replace(settings, source_root=deployed)
        result = run(instance, deployment, "sft/oasst1", config={"source_root": asked}, raise_on_error=False)
        (event,) = [event for event in result.all_events if event.is_step_failure]
        said = event.step_failure_data.user_failure_data.description
        assert "source_root" in said and "NIELS_GPT_SOURCE_ROOT" in said
    assert not Path(settings.cache_dir).exists() and unobserved(instance) == set(OBSERVED)
    assert instance.get_latest_materialization_event(dg.AssetKey(["sft", "oasst1"])) is None


@pytest.mark.slow
def test_the_tokenizers_asset_alone_replaces_it_and_that_makes_the_other_caches_stale(
    after_a_run: dg.DagsterInstance, settings: Settings, tmp_path: Path
) -> None:
    new = with_another_tokenizer(settings, tmp_path)
    before = os.readlink(Path(settings.cache_dir) / "tokenizer")
    assert built(run(after_a_run, new, "sft/oasst1")) == set()
    assert os.readlink(Path(settings.cache_dir) / "tokenizer") == before and "tokenizer" in stale(after_a_run, new)
    run(after_a_run, new, "tokenizer", "sft/oasst1")
    others = set(CACHES) - {"sft/oasst1"}
    assert stale(after_a_run, new) == dict.fromkeys(others, "has a new code version")
    assert built(run(after_a_run, new)) == others
    assert stale(after_a_run, new) == {}
