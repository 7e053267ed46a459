"""The command line builds what Dagster can materialize, and nothing else."""

import dataclasses

import dagster as dg
import pytest
from support.data_files import write
from support.pipeline_seams import chosen_keys

from niels_gpt.recipes.plan import every_key, plan
from pipelines.definitions import niels_definitions


@pytest.mark.parametrize("target", [None, "someones/model"])
def test_a_build_of_all_has_the_list_of_dagster_in_an_order_that_its_graph_allows(settings, tmp_path, target):
    write(tmp_path / "notes.md", "a note")
    write(tmp_path / "sources.toml", '[rollouts]\nmaths = "maths/*.jsonl"\n[sft]\ntalks = "talks.jsonl"\n')
    lines = {"pretrain": f"notes={tmp_path / 'notes.md'}", "rollouts": f"games={tmp_path / 'games.jsonl'}"}
    chosen = dataclasses.replace(
        settings, sources_file=str(tmp_path / "sources.toml"), eagle3_target=target, eagle3_source="talks", **lines
    )
    graph = niels_definitions(settings=chosen).resolve_asset_graph()
    keys = every_key(chosen)
    assert {"rollouts/maths", "rollouts/games", "sft/talks", "pretrain/notes", "trees/oasst1"} < {*keys}
    assert sorted(keys) == sorted(key.to_user_string() for key in graph.materializable_asset_keys)
    for key in keys:
        above = {each.to_user_string() for each in graph.get(dg.AssetKey(key.split("/"))).parent_keys} & {*keys}
        assert above <= {*keys[: keys.index(key)]}, key
    assert ["tokenizer", *chosen_keys(chosen)] == keys
    assert [item.key for item in plan(chosen, chosen_keys(chosen))] == keys
