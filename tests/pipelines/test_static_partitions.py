"""Dagster's own partitions of a cache: one asset with a run for each of them, and one that seals."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
import yaml
from support import ROOT, TESTS
from support.dagster_dev import dagster_dev
from support.dagster_runs import check_alone, metadata, run, stale, verdicts
from support.small_builds import quick_folder

from niels_gpt.recipes.home_recipes import units_of
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import Settings
from pipelines.definitions import niels_definitions

STATIC = {"static_partitions": True}
CACHE, PARTITIONS = "pretrain/wikitext", "partitions/pretrain/wikitext"


def said(result: dg.ExecuteInProcessResult) -> str:
    """Return what the step that failed says."""
    (event,) = [event for event in result.all_events if event.is_step_failure]
    return str(event.step_failure_data.user_failure_data.description)


def data_versions(instance: dg.DagsterInstance, key: str) -> dict[str | None, str]:
    """Return the data version of each materialized partition, or of the asset itself."""
    records = instance.fetch_materializations(dg.AssetKey(key.split("/")), limit=100).records
    made = [each.asset_materialization for each in reversed(records) if each.asset_materialization is not None]
    return {each.partition: (each.tags or {})["dagster/data_version"] for each in made}


def assert_same_files(one: str, other: str) -> None:
    """Compare two folders of caches, but for the record of their runs and what Dagster does not decide."""
    subprocess.run(["diff", "-r", "-x", ".runs", "-x", ".versions", one, other], check=True)


@pytest.fixture(scope="module")
def directly(mirror, tiny_model_path):
    """Settings of three partitions, and their cache as a build without Dagster makes it."""
    with quick_folder() as folder:
        where = {"source_root": str(mirror), "cache_dir": str(folder), "tokenizer": str(tiny_model_path)}
        settings = Settings(**where, partitions=3, threads=1)
        build_token_cache(settings, "wikitext")
        yield settings


@pytest.fixture
def three(directly, tmp_path):
    """The same settings with an empty cache folder."""
    return replace(directly, cache_dir=str(tmp_path / "cache"))


def one(instance, settings, number, **how):
    """Materialize one partition; return the run and what its partition says it did."""
    result = run(instance, settings, PARTITIONS, partition=f"{number:05d}", **STATIC, **how)
    return result, metadata(result)[PARTITIONS]["run/state"] if result.success else None


@pytest.mark.slow
def test_partitions_are_built_in_any_order_by_anybody_and_sealed_to_the_same_bytes(
    instance: dg.DagsterInstance, three: Settings, directly: Settings
) -> None:
    assert one(instance, three, 2)[1] == "built"
    units_of(three, CACHE).build(0)  # as `niels-gpt build wikitext --partitions 3 --partition 0`
    refused = run(instance, three, CACHE, raise_on_error=False, **STATIC)
    assert "[E510]" in said(refused) and "00001" in said(refused) and PARTITIONS in said(refused)
    assert stale(instance, three, **STATIC) == {}
    assert [one(instance, three, number)[1] for number in (0, 1)] == ["reused", "built"]
    sealed = run(instance, three, CACHE, **STATIC)
    assert metadata(sealed)[CACHE]["run/state"] == "built" and verdicts(sealed)["files_match_meta"][0]
    assert_same_files(f"{directly.cache_dir}/pretrain", f"{three.cache_dir}/pretrain")
    assert stale(instance, three, **STATIC) == {}
    before = data_versions(instance, PARTITIONS)
    assert len({*before.values()}) == len(before) == three.partitions
    assert one(instance, three, 1)[1] == "reused"
    assert one(instance, three, 2, build={"force": True})[1] == "built"
    assert data_versions(instance, PARTITIONS) == before and stale(instance, three, **STATIC) == {}
    again = run(instance, three, CACHE, **STATIC)
    assert metadata(again)[CACHE]["run/state"].startswith("reused")
    shards = sorted(Path(three.cache_dir, CACHE, "train").glob("shard_*.bin"))
    shards[1].write_bytes(b"\xff" * shards[1].stat().st_size)
    assert not check_alone(instance, three, CACHE, "ids_below_vocab_size").success
    mended = run(instance, three, CACHE, **STATIC)
    (line,) = [each.user_message for each in instance.all_logs(mended.run_id) if "its check" in str(each.user_message)]
    assert "built again, partition 1 alone:" in line
    assert_same_files(f"{directly.cache_dir}/pretrain", f"{three.cache_dir}/pretrain")

    damaged = next(Path(three.cache_dir, CACHE, "train").glob("*.bin"))
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-2])
    failed = check_alone(instance, three, CACHE, "files_match_meta", **STATIC)
    (found,) = failed.get_asset_check_evaluations()
    asset, config, last = str(found.description).split("\n\n")[1].split("`")[1::2]
    assert (asset, last) == (PARTITIONS, CACHE)
    for number in range(three.partitions):
        given = yaml.safe_load(config)
        assert run(instance, three, asset, partition=f"{number:05d}", run_config=given, **STATIC).success
    assert verdicts(run(instance, three, last, **STATIC))["files_match_meta"][0]
    assert_same_files(f"{directly.cache_dir}/pretrain", f"{three.cache_dir}/pretrain")


@pytest.mark.slow
def test_a_partition_of_another_plan_is_refused_and_a_backfill_makes_a_new_plan(
    instance: dg.DagsterInstance, three: Settings
) -> None:
    one(instance, three, 0)
    other = replace(three, seed=7)
    assert stale(instance, other, **STATIC) == {f"{PARTITIONS}/00000": "has a new code version"}
    refused, _ = one(instance, other, 1, raise_on_error=False)
    assert "[E511]" in said(refused) and f"all partitions of {PARTITIONS} in one backfill" in said(refused)
    tags = {"dagster/backfill": "one"}
    for number in range(three.partitions):
        assert one(instance, other, number, tags=tags)[1] == "built"
    run(instance, other, CACHE, **STATIC)
    assert stale(instance, other, **STATIC) == {}
    refused, _ = one(instance, other, 1, config={"partitions": 8}, raise_on_error=False)
    assert "NIELS_GPT_PARTITIONS" in said(refused)
    with pytest.raises(dg.DagsterInvalidConfigError, match="force"):
        run(instance, other, CACHE, build={"force": True}, **STATIC)


def test_no_selection_of_caches_has_an_asset_with_partitions(settings: Settings) -> None:
    parted = replace(settings, partitions=3)
    definitions = niels_definitions("llm", parted, group_prefix="llm/", **STATIC)
    graph = definitions.resolve_asset_graph()
    partitioned = {key.to_user_string() for key in graph.get_all_asset_keys() if graph.get(key).is_partitioned}
    assert partitioned == {
        f"llm/partitions/{key}"
        for key in (
            *("pretrain/fineweb_edu", "pretrain/wikitext", "pretrain/roam", "pretrain/gutenberg"),
            *("sft/dolly15k", "sft/oasst1"),
        )
    }
    for selection in ("llm/sft/*", 'key:"llm/sft/*"', 'key:"llm/pretrain/*"', "llm/pretrain/roam"):
        chosen = dg.AssetSelection.from_string(selection).resolve(graph)
        assert chosen and not {key.to_user_string() for key in chosen} & partitioned, selection
    for job in ("sft", "pretrain", "everything"):
        assert definitions.resolve_job_def(f"llm__{job}").partitions_def is None
    assert definitions.resolve_job_def("llm__partitions").partitions_def is not None
    plain = {key for key in niels_definitions("llm", parted, group_prefix="llm/").resolve_all_asset_keys()}
    assert {*graph.get_all_asset_keys()} - plain == {dg.AssetKey(key.split("/")) for key in partitioned}


def test_what_a_seal_without_partitions_says_to_do_names_the_assets_of_the_deployment(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    refused = run(
        instance, replace(settings, partitions=2), "llm/sft/oasst1", key_prefix="llm", raise_on_error=False, **STATIC
    )
    assert "[E510]" in said(refused)
    assert "all partitions of llm/partitions/sft/oasst1 in one backfill, then llm/sft/oasst1 " in said(refused)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")  # of what evaluates the conditions here
def test_of_another_text_the_sensor_rebuild_asks_for_all_partitions_and_then_for_the_seal(
    instance: dg.DagsterInstance, three: Settings, tmp_path: Path
) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"text {number}, and more of it\n" * 20)
    own = replace(three, pretrain=f"notes={tmp_path}/*.txt")
    cache, partitions = (dg.AssetKey(["pretrain", "notes"]), dg.AssetKey(["partitions", "pretrain", "notes"]))
    definitions, cursor = niels_definitions(settings=own, **STATIC), None

    def materialize(*numbers):
        for number in numbers:
            run(instance, own, partitions.to_user_string(), partition=f"{number:05d}", **STATIC)

    def asked():
        nonlocal cursor
        result = dg.evaluate_automation_conditions(definitions, instance, cursor=cursor)
        cursor = result.cursor
        return result.get_num_requested(partitions), result.get_num_requested(cache)

    materialize(0, 1, 2)
    run(instance, own, cache.to_user_string(), **STATIC)
    assert asked() == (0, 0) and stale(instance, own, **STATIC) == {}
    (tmp_path / "1.txt").write_text("another text\n" * 50)
    run(instance, own, "raw/notes", **STATIC)
    cause, numbers = "has a new dependency data version", range(own.partitions)
    assert stale(instance, own, **STATIC) == {f"partitions/pretrain/notes/{n:05d}": cause for n in numbers}
    assert asked() == (own.partitions, 0)
    materialize(0, 1, 2)
    assert stale(instance, own, **STATIC) == {"pretrain/notes": cause}
    assert asked() == (0, 1)
    run(instance, own, cache.to_user_string(), **STATIC)
    assert asked() == (0, 0) and stale(instance, own, **STATIC) == {}


@pytest.mark.slow
def test_a_backfill_goes_on_without_a_killed_partition_which_is_built_alone_and_sealed(
    three: Settings, directly: Settings, tmp_path: Path
) -> None:
    for name in ("dagster.yaml", "workspace.yaml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    workspace = (tmp_path / "workspace.yaml").read_text().replace("pipelines.definitions", "support.static_runs")
    (tmp_path / "workspace.yaml").write_text(workspace)
    (tmp_path / "kills").touch()
    names = ("source_root", "cache_dir", "tokenizer", "threads", "partitions")
    given = {f"NIELS_GPT_{name.upper()}": str(getattr(three, name)) for name in names}
    with dagster_dev(tmp_path, **given, PYTHONPATH=os.pathsep.join([str(ROOT), str(TESTS)])) as dev:
        runs = dev.backfill(PARTITIONS, three.partitions)
        failed = {number: run for number, (run, status) in runs.items() if status == "FAILURE"}
        assert {*failed} == {"00001"} and len(runs) == three.partitions
        assert dev.partitions(PARTITIONS) == (2, 1)
        (tmp_path / "kills").unlink()
        assert dev.finished(dev.again(failed["00001"])) == ["SUCCESS"]
        assert dev.partitions(PARTITIONS) == (3, 0)
        assert dev.finished(dev.launch(CACHE)) == ["SUCCESS"]
        assert len(dev.statuses()) == three.partitions + 2
    assert_same_files(f"{directly.cache_dir}/pretrain", f"{three.cache_dir}/pretrain")
