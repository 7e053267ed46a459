"""Jobs and sensors: what they are of, when they ask for a run, and that nothing is on by itself."""

import json
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.dagster_runs import run
from support.pipeline_seams import CACHES, SOURCES, sensor_times

from niels_gpt.settings import Settings
from pipelines.definitions import defs, niels_definitions

ALL = {f"raw/{name}" for name in SOURCES}


@pytest.fixture
def changing(settings, mirror, tmp_path):
    """Settings of a mirror that a test may change."""
    return replace(settings, source_root=str(shutil.copytree(mirror, tmp_path / "mirror")))


def add_a_note(settings):
    notes = Path(settings.source_root, "roam")
    (notes / f"new{len(list(notes.iterdir()))}.md").write_text("- a heron stands in the river\n" * 20)


def statuses(ours: dg.Definitions) -> dict[str, str]:
    """Return what is on and off: name -> RUNNING or STOPPED."""
    repository = ours.get_repository_def()
    return {each.name: each.default_status.value for each in (*repository.schedule_defs, *repository.sensor_defs)}


def test_everything_is_off_unless_it_is_named():
    assert statuses(defs) == {"observe": "STOPPED", "files": "STOPPED", "rebuild": "STOPPED"}  # no sensor of Dagster's
    assert set(statuses(niels_definitions(automation=True)).values()) == {"RUNNING"}
    chosen = statuses(niels_definitions("my-team/llm", automation=["files", "observe"]))
    assert chosen == {
        "my_team__llm__observe": "RUNNING",
        "my_team__llm__files": "RUNNING",
        "my_team__llm__rebuild": "STOPPED",
    }
    with pytest.raises(ValueError, match=r"'hourly'.*observe, files, rebuild"):
        niels_definitions(automation=["hourly"])


def test_freshness_is_of_what_is_built_and_by_default_of_nothing():
    def policies(**given):
        specs = niels_definitions(settings=Settings(source_root="sample"), **given).resolve_all_asset_specs()
        return {spec.key.to_user_string(): spec.freshness_policy for spec in specs if spec.freshness_policy}

    daily = dg.FreshnessPolicy.cron(deadline_cron="0 6 * * *", lower_bound_delta=timedelta(hours=6))
    assert policies() == {}
    assert policies(freshness=daily) == dict.fromkeys(
        ["tokenizer", "eagle3/draft_vocab", "eagle3/targets", *CACHES], daily
    )


def test_a_job_has_the_assets_of_its_deployment_alone():
    neighbour = dg.Definitions(assets=[dg.AssetSpec("theirs"), dg.asset(lambda: None, name="mine")])
    repository = dg.Definitions.merge(niels_definitions("llm"), neighbour).get_repository_def()
    selected = {
        name: {key.to_user_string() for key in repository.get_job(f"llm__{name}").asset_layer.selected_asset_keys}
        for name in ("everything", "sft", "pretrain", "observe")
    }
    made = {f"llm/{path}" for path in ("tokenizer", "eagle3/draft_vocab", "eagle3/targets", *CACHES)}
    assert selected["everything"] == made
    for family in ("sft", "pretrain"):
        assert selected[family] == {key for key in made if key.startswith(f"llm/{family}/")}
    assert selected["observe"] == {"llm/sft/", *(f"llm/{key}" for key in ALL)}


@pytest.mark.parametrize("partitions", [1, 2])
def test_all_caches_and_sources_have_a_condition_and_the_tokenizer_and_the_root_have_none(partitions):
    graph = niels_definitions(settings=Settings(source_root="sample", partitions=partitions)).resolve_asset_graph()
    automated = {key.to_user_string() for key in graph.get_all_asset_keys() if graph.get(key).automation_condition}
    assert automated == {"eagle3/draft_vocab", "eagle3/targets", *CACHES, *ALL}


def requested(
    ours: dg.Definitions, instance: dg.DagsterInstance, cursor: Any, sensor: str = "rebuild", at: datetime | None = None
) -> tuple[set[str], Any]:
    """Return what the conditions of a sensor ask for since `cursor`, and the next cursor."""
    target = ours.get_repository_def().get_sensor_def(sensor).asset_selection
    found = dg.evaluate_automation_conditions(ours, instance, target, cursor=cursor, evaluation_time=at)
    return {each.key.to_user_string() for each in found.results if not each.true_subset.is_empty}, found.cursor


def test_sources_are_observed_once_at_each_tick_of_the_cron_and_not_at_the_first_look(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    def asked(ours, *minutes):
        cursor, half_past = None, datetime(2026, 11, 29, 17, 30, tzinfo=UTC)
        for minute in minutes:
            wanted, cursor = requested(ours, instance, cursor, "observe", half_past + timedelta(minutes=minute))
            yield wanted

    assert [*asked(niels_definitions(settings=settings), 0, 29, 31, 32, 91, 92, 300)] == [
        *(set(), set(), ALL, set(), ALL, set(), ALL)  # 17:30, 17:59, 18:01, 18:02, 19:01, 19:02, and once after hours
    ]
    often = niels_definitions(settings=settings, observe_cron="*/15 * * * *")
    assert [*asked(often, 1, 14, 16, 17, 31)] == [set(), set(), ALL, set(), ALL]


@pytest.mark.slow
def test_a_cache_is_asked_for_once_for_each_change_of_what_it_is_made_of(
    instance: dg.DagsterInstance, changing: Settings
) -> None:
    ours = niels_definitions(settings=changing)
    wanted, cursor = requested(ours, instance, None)
    assert not wanted
    sources = ("raw/roam", "raw/dolly15k", "sft/")
    run(instance, changing, *sources, "pretrain/roam", "sft/dolly15k")

    def step(*observed):
        nonlocal cursor
        if observed:
            run(instance, changing, *observed)
        wanted, cursor = requested(ours, instance, cursor)
        return wanted

    assert step() == set()
    assert step(*sources) == set()  # as it was
    add_a_note(changing)
    assert step(*sources) == {"pretrain/roam"}
    assert step() == step(*sources) == set()  # asked for already, and still as it was
    add_a_note(changing)
    assert step("pretrain/roam") == set()  # built before anybody observed it
    new = dg.AssetMaterialization("tokenizer", tags={"dagster/data_version": "another"})
    instance.report_runless_asset_event(new)
    assert step() == {"pretrain/roam", "sft/dolly15k"}  # never a cache that was never built
    assert step() == set()


class Ticks:
    """The sensor of files, tick by tick."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance) -> None:
        self.definitions = niels_definitions(settings=settings)
        self.instance = instance
        self.cursor = None
        self.said = ""
        self.tags: dict[str, str] = {}

    def tick(self, *, launched=True):
        """Return the key of the run that a tick asks for, and what it observes; None: no run."""
        repository = self.definitions.get_repository_def()
        context = dg.build_sensor_context(self.instance, cursor=self.cursor, repository_def=repository)
        found = repository.get_sensor_def("files").evaluate_tick(context)
        self.cursor, self.said = found.cursor, found.skip_message or ""
        if not found.run_requests:
            return None
        (request,) = found.run_requests
        keys, self.tags = list(request.asset_selection or ()), dict(request.tags)
        if launched:
            job = repository.get_job("observe").get_subset(asset_selection=set(keys))
            assert job.execute_in_process(instance=self.instance).success
        return str(request.run_key), {key.to_user_string() for key in keys}


def test_a_source_whose_files_change_is_observed_once_two_ticks_find_the_same(
    instance: dg.DagsterInstance, changing: Settings
) -> None:
    (Path(changing.source_root).parent / "own.txt").write_text("A text of my own.\n" * 9)
    changing = replace(changing, pretrain="own=own.txt")
    run(instance, changing, "raw/roam")
    ticks = Ticks(changing, instance)
    assert ticks.tick() is None
    first = ticks.tick()
    assert first is not None
    assert first[1] == {*ALL, "raw/own"} - {"raw/roam"}, "observed already, and has the same files"
    assert ticks.tick() is None and "nothing has changed" in ticks.said

    add_a_note(changing)
    (Path(changing.source_root).parent / "own.txt").write_text("Another text of my own.\n")
    assert ticks.tick() is None and "raw/roam: new or changed" in ticks.said
    before = ticks.cursor
    second = ticks.tick(launched=False)
    assert second is not None and second[1] == {"raw/roam", "raw/own"}
    ticks.cursor = before
    assert ticks.tick() == second  # by its key, Dagster starts no second run of a tick that is repeated
    assert ticks.tick() is None and "nothing has changed" in ticks.said


def test_what_was_asked_for_and_not_observed_is_said_and_dagster_retries_its_run(
    instance: dg.DagsterInstance, changing: Settings
) -> None:
    ticks = Ticks(changing, instance)
    assert ticks.tick() is None
    lost = ticks.tick(launched=False)
    assert lost is not None and lost[1] == ALL and ticks.tags["dagster/max_retries"] == "2"
    assert ticks.tick() is None and "raw/roam: asked for, and not observed yet" in ticks.said
    run(instance, changing, "raw/roam")  # by hand
    assert ticks.tick() is None and "raw/roam" not in ticks.said and "raw/oasst1: asked for" in ticks.said


@pytest.mark.slow
def test_a_build_that_has_read_the_observed_text_needs_no_other_observation(
    instance: dg.DagsterInstance, changing: Settings
) -> None:
    run(instance, changing, *sorted(ALL))
    ticks = Ticks(changing, instance)
    assert ticks.tick() is None and "nothing has changed" in ticks.said
    run(instance, changing, "pretrain/roam")
    assert ticks.tick() is None and "nothing has changed" in ticks.said
    add_a_note(changing)
    run(instance, changing, "pretrain/roam")  # observes the new text, and no digest of the files
    assert ticks.tick() is None and "raw/roam: new or changed" in ticks.said
    found = ticks.tick()
    assert found is not None and found[1] == {"raw/roam"}


def test_a_cursor_of_another_form_starts_afresh(instance: dg.DagsterInstance, changing: Settings) -> None:
    ticks = Ticks(changing, instance)
    earlier = {"requests": 7, "next": "roam", "sources": {"roam": ["0" * 16, "", 0.0]}}
    for cursor in (json.dumps(earlier), json.dumps([1]), "{", ""):
        ticks.cursor = cursor
        assert ticks.tick() is None
        found = ticks.tick(launched=False)
        assert found is not None and found[1] == ALL


def test_a_change_that_is_taken_back_and_made_once_more_is_another_run(
    instance: dg.DagsterInstance, changing: Settings
) -> None:
    ticks, note = Ticks(changing, instance), Path(changing.source_root, "roam", "n.md")
    keys = []
    for text in ("first", "second", "first"):
        note.write_text(text)
        os.utime(note, (1, 1 + len(text)))
        assert ticks.tick() is None
        found = ticks.tick()
        assert found is not None
        keys.append(found[0])
    assert len(set(keys)) == 3


def test_a_source_that_cannot_be_read_and_one_that_is_not_loaded_are_named_and_hide_no_other(
    instance: dg.DagsterInstance, changing: Settings
) -> None:
    ticks = Ticks(changing, instance)
    assert ticks.tick() is None and ticks.tick() is not None
    shutil.rmtree(Path(changing.source_root, "databricks"))
    Path("sources.toml").write_text('[pretrain]\nnotes = "notes/*.md"\n')
    add_a_note(changing)
    assert ticks.tick() is None
    assert "raw/dolly15k: " in ticks.said and "pretrain/notes" in ticks.said and "reload" in ticks.said
    found = ticks.tick()
    assert found is not None and found[1] == {"raw/roam"}
    Path("sources.toml").write_text("[pretrain\n")
    assert ticks.tick() is None and "not TOML" in ticks.said


def test_a_tick_that_runs_out_of_time_leaves_the_rest_to_the_next_one(
    instance: dg.DagsterInstance, changing: Settings
) -> None:
    ticks, observed = Ticks(changing, instance), set[str]()
    for _ in range(2 * len(SOURCES)):
        with sensor_times(files=0.0):  # one source a tick
            found = ticks.tick()
        observed |= found[1] if found else set()
        assert found or ticks.said
    assert observed == ALL
