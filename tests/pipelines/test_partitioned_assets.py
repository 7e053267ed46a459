"""A pretrain cache in partitions as an asset: the same asset to Dagster, built by a step for each partition."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.execution.api import create_execution_plan
from support import ROOT, TESTS
from support.dagster_runs import metadata, mirrors, run, shell, stale, verdicts
from support.data_files import lines, write
from support.made_tokenizers import made_tokenizer
from support.partition_runs import job_of_notes, logged
from support.pipeline_seams import building
from support.small_builds import quick_folder

from niels_gpt.cache.meta import read_meta
from niels_gpt.recipes.plan import every_recipe
from niels_gpt.recipes.units import Units, build_token_cache
from niels_gpt.settings import Settings
from pipelines.definitions import niels_definitions

KEY = dg.AssetKey(["pretrain", "wikitext"])
STEP = "pretrain__wikitext"


def steps(result, kind="STEP_SUCCESS", asset=STEP):
    """Return the steps of an asset that an event of this kind was logged of, without its name."""
    return {
        event.step_key.removeprefix(f"{asset}.")
        for event in result.all_events
        if event.event_type_value == kind and event.step_key.startswith(f"{asset}.")
    }


def partitions(*numbers):
    """Return the steps that build these partitions."""
    return {f"build_partition[p{number:05d}]" for number in numbers}


def assert_same_files(one, other):
    """Compare two folders of caches, but for the record of their runs and what Dagster does not decide."""
    subprocess.run(["diff", "-r", "-x", ".runs", "-x", ".versions", one, other], check=True)


@pytest.fixture(scope="module")
def directly(mirror, tiny_model_path):
    """Settings of three partitions, and their cache as a build without Dagster makes it."""
    with quick_folder() as folder:
        settings = Settings(
            source_root=str(mirror),
            cache_dir=str(folder),
            tokenizer=str(tiny_model_path),
            partitions=3,
            threads=1,
        )
        build_token_cache(settings, "wikitext")
        yield settings


@pytest.fixture
def three(directly, tmp_path):
    """The same settings with an empty cache folder."""
    return replace(directly, cache_dir=str(tmp_path / "cache"))


def test_each_partition_is_a_step_and_the_cache_is_that_of_a_build_without_dagster(
    instance: dg.DagsterInstance, three: Settings, directly: Settings
) -> None:
    first = run(instance, three, "pretrain/wikitext")
    assert steps(first) == {"plan_partitions", *partitions(0, 1, 2), "seal_cache"}
    assert_same_files(Path(directly.cache_dir, "pretrain"), Path(three.cache_dir, "pretrain"))
    found = verdicts(first)
    assert found.pop("signals") == (False, "WARN")  # the sample's splits share headings
    assert found and all(passed for passed, _ in found.values())

    shown, meta = metadata(first)["pretrain/wikitext"], read_meta(f"{three.cache_dir}/pretrain/wikitext/meta.json")
    listed = ("shards", "files", "partitions")
    assert mirrors(shown, {key: value for key, value in meta.items() if key not in listed})
    rows = [record.data for record in shown["partition_table"].records]
    assert [row["train_docs"] for row in rows] == [each["train_docs"] for each in meta["partitions"]["of_each"]]
    assert [row["partition"] for row in rows] == [0, 1, 2]
    tokens = [each["train_tokens"] for each in meta["partitions"]["of_each"]]
    assert shown["partitions"]["total"] == 3
    assert shown["partitions"]["of_each"]["train_tokens"] == {
        "min": min(tokens),
        "mean": round(sum(tokens) / 3, 1),
        "max": max(tokens),
    }
    event = instance.get_latest_materialization_event(KEY)
    assert event is not None and event.asset_materialization is not None
    tags = event.asset_materialization.tags or {}
    assert tags["dagster/data_version"] == meta["content_sha256"]
    assert "pretrain/wikitext" not in stale(instance, three)

    again = run(instance, three, "pretrain/wikitext")
    assert steps(again) == {"plan_partitions", "seal_cache"}
    assert metadata(again)["pretrain/wikitext"]["run/state"] == "reused: nothing it depends on has changed"


@pytest.mark.parametrize("name", ["sft/oasst1", "rollouts/maths"])
def test_chats_and_rollouts_have_a_step_for_each_partition_too(
    name: str, instance: dg.DagsterInstance, three: Settings, tmp_path: Path
) -> None:
    rows = ({"group": str(n), "prompt_ids": [1, n], "completions": [[2, n], [2, 3]]} for n in range(12))
    own = replace(three, rollouts=f"maths={write(tmp_path / 'maths.jsonl', lines(*rows))}", rollouts_val_frac=0.2)
    result = run(instance, own, name)
    assert steps(result, asset=name.replace("/", "__")) == {"plan_partitions", *partitions(0, 1, 2), "seal_cache"}
    direct = replace(own, cache_dir=str(tmp_path / "direct"))
    made = every_recipe(direct)[name](direct)
    family = name.partition("/")[0]
    assert_same_files(Path(direct.cache_dir, family), Path(own.cache_dir, family))
    shown = metadata(result)[name]
    assert shown["content_sha256"] == made.meta["content_sha256"] and shown["partitions"]["total"] == 3
    again = run(instance, own, name)
    assert metadata(again)[name]["run/state"] == "reused: nothing it depends on has changed"


def test_a_tokenizer_without_sentinels_builds_no_partition_of_chats(
    instance: dg.DagsterInstance, three: Settings
) -> None:
    bare = replace(three, tokenizer=str(made_tokenizer("t5")))
    result = run(instance, bare, "pretrain/wikitext", "sft/oasst1")
    assert steps(result, asset="sft__oasst1") == {"plan_partitions", "seal_cache"}
    assert "sft/oasst1" not in metadata(result) and "pretrain/wikitext" in metadata(result)


@pytest.mark.slow
def test_what_is_no_partition_in_the_plans_folder_is_an_error_of_the_seal(
    instance: dg.DagsterInstance, three: Settings
) -> None:
    plan = Units(three, "wikitext").plan
    assert plan is not None
    (plan.folder / ".nfs0000001").touch()
    with pytest.raises(dg.Failure, match=r"E510|nfs0000001"):
        run(instance, three, "pretrain/wikitext")


def test_to_dagster_it_is_the_same_asset(settings):
    key = dg.AssetKey(["team", "lm", *KEY.path])
    one, many = (
        niels_definitions("team/lm", replace(settings, partitions=number)).resolve_asset_graph() for number in (1, 8)
    )
    plain, graph = one.get(key), many.get(key)
    assert plain.code_version != graph.code_version  # of other settings
    for about in ("parent_keys", "group_name", "description", "kinds", "tags", "owners", "check_keys", "metadata"):
        assert getattr(plain, about) == getattr(graph, about), about
    assert "niels_gpt/partition" in graph.pools
    assert "niels_gpt/partition" not in plain.pools
    assert plain.pools <= graph.pools


def test_what_is_never_partitioned_stays_one_step():
    definitions = niels_definitions(settings=Settings(source_root="hub", partitions=8))
    graphs = {
        asset.key.to_user_string()
        for asset in definitions.assets or ()
        if isinstance(asset, dg.AssetsDefinition) and isinstance(asset.node_def, dg.GraphDefinition)
    }
    texts, chats = {"pretrain/fineweb_edu", "pretrain/wikitext", "pretrain/roam"}, {"sft/dolly15k", "sft/oasst1"}
    assert graphs == texts | chats, "gutenberg is a stub, and trees are built whole"


@pytest.mark.slow
@pytest.mark.parametrize(("deployed", "asked"), [(3, 2), (3, 1), (1, 2)])
def test_a_run_may_ask_for_another_number_of_partitions(
    instance: dg.DagsterInstance, settings: Settings, tmp_path: Path, deployed: int, asked: int
) -> None:
    deployment = replace(settings, partitions=deployed)
    result = run(instance, deployment, "pretrain/wikitext", config={"partitions": asked})
    expected = replace(settings, partitions=asked, cache_dir=str(tmp_path / "expected"))
    outcome = build_token_cache(expected, "wikitext")
    assert_same_files(Path(expected.cache_dir, "pretrain"), Path(settings.cache_dir, "pretrain"))
    assert metadata(result)["pretrain/wikitext"]["content_sha256"] == outcome.meta["content_sha256"]
    if deployed > 1:
        assert steps(result) == {"plan_partitions", *partitions(*range(asked if asked > 1 else 0)), "seal_cache"}


def test_the_config_of_a_graph_is_that_of_an_asset_and_reaches_each_of_its_steps(
    instance: dg.DagsterInstance, three: Settings
) -> None:
    for refused in ({"ops": {"build_partition": {"config": {"wait": False}}}}, {"config": {"seed": 1}}):
        with pytest.raises(dg.DagsterInvalidConfigError):
            run(instance, three, "pretrain/wikitext", run_config={"ops": {STEP: refused}})
    assert not Path(three.cache_dir).exists()
    run(instance, three, "pretrain/wikitext")
    again = run(instance, three, "pretrain/wikitext", build={"force": True})
    assert steps(again) == {"plan_partitions", *partitions(0, 1, 2), "seal_cache"}
    assert metadata(again)["pretrain/wikitext"]["run/state"] == "built"
    with building(Path(three.cache_dir, "pretrain/wikitext"), wait=True):
        refused = run(instance, three, "pretrain/wikitext", build={"wait": False}, raise_on_error=False)
    (failure,) = (event.step_failure_data for event in refused.all_events if event.is_step_failure)
    assert "[E503]" in failure.user_failure_data.description, "at once: no step is tried again"


@pytest.fixture
def given(three, tmp_path):
    """The environment of a deployment with the settings `three`, whose folder is this one."""
    shutil.copyfile(ROOT / "dagster.yaml", tmp_path / "dagster.yaml")
    names = ("source_root", "cache_dir", "tokenizer", "threads", "partitions")
    return {f"NIELS_GPT_{name.upper()}": str(getattr(three, name)) for name in names}


@pytest.mark.slow
def test_a_killed_partition_fails_its_run_and_is_alone_built_by_the_reexecution(three, directly, given, tmp_path):
    path = os.pathsep.join([str(ROOT), str(TESTS)])
    program = f"{sys.executable} -c 'from support import partition_runs; partition_runs.main()'"
    done = shell(tmp_path, program, **given, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    failed, again = json.loads(done.stdout.splitlines()[-1])
    killed, others = f"{STEP}.build_partition[p00001]", [f"{STEP}.build_partition[p0000{number}]" for number in (0, 2)]
    assert failed["STEP_FAILURE"] == [killed]
    assert failed["STEP_SUCCESS"] == [*others, f"{STEP}.plan_partitions"]
    assert failed["ASSET_MATERIALIZATION"] == []
    assert again["STEP_FAILURE"] == []
    assert [step for step in again["STEP_SUCCESS"] if step.startswith(STEP)] == [killed, f"{STEP}.seal_cache"]
    assert again["ASSET_MATERIALIZATION"] == [f"{STEP}.seal_cache"] * 2  # the tokenizer that a step made, and the cache
    assert_same_files(Path(directly.cache_dir, "pretrain"), Path(three.cache_dir, "pretrain"))


def test_a_reexecution_after_the_text_was_replaced_asks_for_a_new_run_and_builds_nothing(
    instance: dg.DagsterInstance, given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.jsonl.gz", lines(*({"id": f"{number}-{at}", "text": "words"} for at in range(9))))
    damaged = tmp_path / "1.jsonl.gz"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-20])
    for name, value in {**given, "NIELS_GPT_PRETRAIN": f"notes={tmp_path}/*.jsonl.gz"}.items():
        monkeypatch.setenv(name, value)
    job, how = dg.reconstructable(job_of_notes), {"instance": instance, "raise_on_error": False}
    with dg.execute_job(job, **how) as failed:
        assert {step[-8:] for step in logged(failed)["STEP_FAILURE"]} == {"[p00001]"}
    damaged.write_bytes(whole)
    how["reexecution_options"] = dg.ReexecutionOptions.from_failure(failed.run_id, instance)
    with dg.execute_job(job, **how) as again:
        (failure,) = (event.step_failure_data for event in again.all_events if event.is_step_failure)
    said = failure.user_failure_data.description
    assert "[E511]" in said and "the text" in said and "Materialize pretrain/notes in a new run" in said
    assert len([*(tmp_path / "cache/pretrain").rglob("plan.json")]) == 1
    del how["reexecution_options"]
    with dg.execute_job(job, **how) as new:
        assert new.success


def test_a_run_over_everything_has_the_steps_of_each_partitioned_cache(settings):
    # With its blocking checks the tokenizer is several steps upstream of each plan.
    job = niels_definitions(settings=replace(settings, partitions=3)).resolve_implicit_global_asset_job_def()
    planned = set(create_execution_plan(job).step_keys_to_execute)
    for name in ("pretrain__fineweb_edu", "pretrain__gutenberg", "pretrain__roam", "pretrain__wikitext", "sft__oasst1"):
        for step in ("plan_partitions", "build_partition[?]", "seal_cache"):
            assert f"{name}.{step}" in planned


@pytest.mark.slow
def test_the_command_line_builds_partitions_after_the_tokenizer(three, directly, given, tmp_path):
    command = "dagster asset materialize -m pipelines.definitions --select tokenizer,pretrain/wikitext"
    done = shell(tmp_path, command, **given)
    assert done.returncode == 0, done.stderr
    assert_same_files(Path(directly.cache_dir, "pretrain"), Path(three.cache_dir, "pretrain"))
