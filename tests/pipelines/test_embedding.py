"""The assets in another deployment: several in one code location, and every snippet of the docs as a module of one."""

import re
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.workspace.autodiscovery import loadable_targets_from_python_file
from support import ROOT
from support.dagster_runs import metadata
from support.documents import blocks_of

from niels_gpt.cache.meta import read_meta
from niels_gpt.settings import Settings
from pipelines.definitions import niels_definitions

PAGES = [ROOT / "docs" / name for name in ("dagster.md", "deployment.md", "scale.md", "tutorials/dagster.md")]


def code_locations():
    """Return the blocks of the pages that define `defs`."""
    found = []
    for page in PAGES:
        blocks = [block for block in blocks_of(page.read_text()) if block.language == "python"]
        of_defs = [block for block in blocks if re.search("^defs = ", block.body, re.MULTILINE)]
        found += [pytest.param(block, id=f"{page.stem}{number}") for number, block in enumerate(of_defs)]
    return found


@pytest.mark.parametrize("block", code_locations())
def test_a_snippet_of_the_docs_is_a_code_location(block, tmp_path):
    file = tmp_path / f"location_{block.start}.py"
    # test_k8s_yaml.py has the executor, where dagster-k8s is.
    file.write_text(re.sub("from dagster_k8s import", "from dagster import in_process_executor as", block.body))
    (found,) = loadable_targets_from_python_file(str(file), str(tmp_path))  # as `dagster dev -f` does
    assert isinstance(found.target_definition, dg.Definitions)
    dg.Definitions.validate_loadable(found.target_definition)


def test_another_deployment_embeds_the_assets_below_a_prefix_of_its_own(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    class Epochs(dg.Config):
        epochs: int = 1

    @dg.asset(deps=[["team", "lm", "sft", "oasst1"]])
    def model(config: Epochs) -> None: ...

    ours = niels_definitions(key_prefix=["team", "lm"], settings=settings)
    merged = dg.Definitions.merge(dg.Definitions(assets=[model]), ours)
    graph = merged.resolve_asset_graph()
    assert dg.AssetKey(["team", "lm", "sft", ""]) in graph.observable_asset_keys
    keys = [["team", "lm", "tokenizer"], ["team", "lm", "raw", "oasst1"], ["team", "lm", "sft", "oasst1"], ["model"]]
    job = merged.resolve_implicit_global_asset_job_def().get_subset(asset_selection={dg.AssetKey(key) for key in keys})
    result = job.execute_in_process(instance=instance, run_config={"ops": {"model": {"config": {"epochs": 2}}}})
    assert result.success
    assert Path(settings.cache_dir, "sft", "oasst1", "meta.json").is_file()
    assert set(metadata(result)) == {"team/lm/tokenizer", "team/lm/sft/oasst1", "model"}


def test_two_deployments_in_one_code_location_build_in_one_run(
    instance: dg.DagsterInstance, settings: Settings, tmp_path: Path
) -> None:
    other = replace(settings, cache_dir=str(tmp_path / "other"), sft_val_frac=0.5)
    merged = dg.Definitions.merge(niels_definitions(settings=settings), niels_definitions("my-team/llm", other))
    keys = [["sft", "dolly15k"], ["my-team", "llm", "sft", "dolly15k"]]
    job = merged.resolve_implicit_global_asset_job_def().get_subset(asset_selection={dg.AssetKey(key) for key in keys})
    given = {"resources": {"my_team__llm__settings": {"config": {"seed": 7}}}}
    result = job.execute_in_process(instance=instance, run_config=given)
    assert {"sft/dolly15k", "my-team/llm/sft/dolly15k"} <= metadata(result).keys()
    metas = [read_meta(str(Path(each.cache_dir, "sft", "dolly15k", "meta.json"))) for each in (settings, other)]
    assert [meta["seed"] for meta in metas] == [42, 7]
    assert metas[0]["val_examples"] < metas[1]["val_examples"]


def test_no_name_of_a_deployment_is_one_of_its_neighbour():
    each = [niels_definitions(), niels_definitions("llm"), niels_definitions("my-team", Settings(partitions=2))]
    together = dg.Definitions.merge(*each).get_repository_def()
    alone = [one.get_repository_def() for one in each]
    for names in (
        lambda one: [job.name for job in one.get_all_jobs()],
        lambda one: [schedule.name for schedule in one.schedule_defs],
        lambda one: [sensor.name for sensor in one.sensor_defs],
        lambda one: list(one.asset_graph.asset_check_keys),
        lambda one: list(one.asset_graph.get_all_asset_keys()),
        lambda one: [node.name for node in one.get_implicit_global_asset_job_def().all_node_defs],
    ):
        given = sorted(str(name) for one in alone for name in names(one) if name != "__ASSET_JOB")
        found = sorted(str(name) for name in names(together) if name != "__ASSET_JOB")
        assert found == given == sorted(set(given))


def test_prefixes_that_would_give_one_name_are_refused_and_so_is_one_that_no_key_can_have():
    with pytest.raises(dg.DagsterInvariantViolationError, match="a_b__settings"):
        dg.Definitions.merge(niels_definitions("a-b"), niels_definitions("a_b"))
    for prefix in ("a b", "team/", ["a/b"], ""):
        with pytest.raises(ValueError, match="key_prefix"):
            niels_definitions(prefix)


def test_owners_tags_groups_and_the_tags_of_steps_arrive():
    pod = {"container_config": {"resources": {"limits": {"memory": "8Gi"}}}}
    ours = niels_definitions(
        "llm",
        Settings(source_root="hub", partitions=2),
        owners=["team:data", "ada@example.org"],
        tags={"tier": "gold"},
        op_tags={"dagster-k8s/config": pod},
        group_prefix="llm/",
    )
    graph = ours.resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        assert graph.get(key).owners == ["team:data", "ada@example.org"]
        assert graph.get(key).tags["tier"] == "gold"
        assert str(graph.get(key).group_name).startswith("llm/")
    nodes = ours.get_repository_def().get_job("llm__everything").all_node_defs
    steps = {node.name: node.tags for node in nodes if isinstance(node, dg.OpDefinition)}
    building = {name: tags for name, tags in steps.items() if name.startswith("llm__")}
    assert {"llm__tokenizer", "llm__build_partition", "llm__seal_cache", "llm__eagle3__targets"} <= building.keys()
    assert {name for name, tags in building.items() if "8Gi" not in str(tags.get("dagster-k8s/config"))} == set()
