"""The assets in another deployment: below a prefix, several deployments in one code location."""

from pathlib import Path

import dagster as dg
from support.dagster_runs import metadata

from niels_gpt.settings import Settings
from pipelines.definitions import niels_definitions


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
