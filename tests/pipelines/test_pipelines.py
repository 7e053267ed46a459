"""The assets as Dagster and a reader of its pages see them: keys, metadata, settings, errors."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import dagster as dg
import pytest
from support.commands import niels_gpt
from support.dagster_runs import metadata, mirrors, run
from support.pipeline_seams import CACHES

from niels_gpt.cache.meta import read_meta
from niels_gpt.display.numbers import size_text
from niels_gpt.settings import Settings
from pipelines.definitions import defs, niels_definitions
from pipelines.resources import RunSettings


def test_the_assets_are_the_tokenizer_the_caches_and_what_is_observed():
    graph = defs.resolve_asset_graph()
    made = {key.to_user_string() for key in graph.materializable_asset_keys}
    assert made == {"tokenizer", "eagle3/draft_vocab", "eagle3/targets", *CACHES}
    observed = {key.to_user_string() for key in graph.observable_asset_keys}
    assert observed == {f"raw/{key.split('/')[1]}" for key in CACHES} | {"sft/"}
    assert all(graph.get(key).description for key in graph.get_all_asset_keys())
    # `--select sft/*` means the root sft/ and everything downstream of it.
    children = graph.get(dg.AssetKey(["sft", ""])).child_keys
    assert {key.to_user_string() for key in children} == {key for key in CACHES if key.startswith("sft/")}


def test_the_page_of_an_asset_says_who_owns_it_what_it_gives_and_where_its_files_are():
    ours = niels_definitions("llm", Settings(source_root="hub"), owners=["team:data"], tags={"tier": "gold"})
    graph = ours.resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        node = graph.get(key)
        assert node.owners == ["team:data"] and node.tags["tier"] == "gold" and node.kinds
    page = graph.get(dg.AssetKey(["llm", "sft", "oasst1"]))
    assert page.tags["family"] == "sft" and page.tags["licence"] == "Apache-2.0"
    assert graph.get(dg.AssetKey(["llm", "pretrain", "wikitext"])).tags["licence"] == "CC-BY-SA-3.0-and-GFDL"
    schema = page.metadata["dagster/column_schema"]
    assert [(column.name, column.type) for column in schema.columns][-1] == ("y_masked", "int64 [B, T]")
    assert page.metadata["look inside"] == "niels-gpt show cache/sft/oasst1"
    assert "huggingface.co/datasets/OpenAssistant/oasst1" in str(
        graph.get(dg.AssetKey(["llm", "raw", "oasst1"])).description
    )


def test_the_code_and_the_command_of_a_page_read_the_cache(first_run):
    ours = niels_definitions(settings=Settings(source_root="mirror", cache_dir=str(first_run.folder / "cache")))
    graph = ours.resolve_asset_graph()
    for key in ("tokenizer", *CACHES):
        code = str(graph.get(dg.AssetKey(key.split("/"))).description).split("```python\n")[1].split("```")[0]
        found = {}
        assert (
            niels_gpt(*str(graph.get(dg.AssetKey(key.split("/"))).metadata["look inside"]).split()[1:]).status == 0
        ), key
        exec(code.replace("T=1024, device", "T=16, device"), found)  # its shards are short
        schema = graph.get(dg.AssetKey(key.split("/"))).metadata.get("dagster/column_schema")
        first = found["samples"][0]._asdict() if "samples" in found else found
        for column in schema.columns if schema else ():
            if "int64" in column.type:
                assert "int64" in str(first[column.name].dtype), (key, column.name)


def test_metadata_mirrors_meta_json_key_by_key_and_the_data_version_is_the_content(
    first_run: Any, after_a_run: dg.DagsterInstance, settings: Settings
) -> None:
    instance = after_a_run
    for key, entries in first_run.metadata.items():
        meta = read_meta(str(Path(settings.cache_dir, key, "meta.json")))
        mirrored = {name: value for name, value in meta.items() if name not in ("shards", "files")}
        assert mirrors(entries, mirrored), key
        assert meta.keys() <= entries.keys()
        event = instance.get_latest_materialization_event(dg.AssetKey(key.split("/")))
        assert event is not None and event.asset_materialization is not None
        assert (event.asset_materialization.tags or {})["dagster/data_version"] == meta["content_sha256"]


def test_what_a_person_asks_comes_first_and_dagster_plots_results_and_no_settings(first_run):
    kinds = (dg.IntMetadataValue, dg.FloatMetadataValue)
    for key, entries in first_run.typed.items():
        plotted = {name for name, value in entries.items() if isinstance(value, kinds)}
        assert {"dagster/size_bytes", "run/seconds"} <= plotted, key
        assert plotted.isdisjoint({"format_version", "builder_version", "seed", "vocab_size", "val_frac"}), key
        words = ["holds", *(name for name in entries if " " in name)]
        assert set(words) <= set(list(entries)[: len(words) + 1]) and len(words) <= 8, key
        assert all(len(str(entries[name].value)) < 120 or name == "look inside" for name in words), key
        assert len(json.dumps([str(value.value) for value in entries.values()])) < 40_000
    chats, examples = first_run.metadata["sft/oasst1"], first_run.metadata["sft/oasst1"]["train_examples"]
    assert chats["dagster/row_count"] == examples + chats["val_examples"]
    assert chats["holds"].startswith(f"{examples} train, ") and chats["holds"].endswith(" % with loss")


def test_the_page_has_the_size_once_and_the_examples_before_the_long_list(first_run, settings):
    for key in CACHES:
        entries = first_run.metadata[key]
        size = entries["dagster/size_bytes"]
        shown = {str(size), size_text(size), str(round(size / 2**20, 3))}
        named = [name for name, value in entries.items() if str(value) in shown]
        assert [name for name in named if not name.startswith("run/")] == ["dagster/size_bytes"]
        assert list(entries).index("examples") < 5


def test_the_list_of_shards_is_mirrored_by_count_tokens_bytes_and_place(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    result = run(instance, settings, "pretrain/roam", config={"shard_bytes": 100})
    meta = read_meta(str(Path(settings.cache_dir, "pretrain", "roam", "meta.json")))
    entry, tokens, files = metadata(result)["pretrain/roam"]["shards"], meta["train_tokens"], meta["shards"]["train"]
    assert entry["train"] == {"files": len(files), "tokens": tokens, "bytes": 2 * tokens}
    assert len(files) > 50 and entry["listed_in"].endswith("pretrain/roam/meta.json")
    assert len(json.dumps(entry)) < 300


def test_a_page_has_a_small_picture_and_decoded_examples(first_run):
    for key in CACHES:
        shown = first_run.metadata[key]
        assert len(shown["picture"]) < 1000, "longer ones are a link in Dagster's table"
        picture = ElementTree.fromstring(unquote(re.search("<data:image/svg.xml,(.+)>", shown["picture"])[1]))
        panels = 1 if key.startswith("pretrain/") else 2
        assert Counter(part.tag.rpartition("}")[2] for part in picture) == {"path": 2 * panels, "text": panels}
        rows = [record.data for record in shown["examples"].records]
        assert 2 <= len(rows) <= 6
        assert {row["split"] for row in rows} == {"train", "val"}
        assert key.startswith("pretrain/") or all("[[" in row["text"] for row in rows)


def failure_of(result: dg.ExecuteInProcessResult, step: str) -> str:
    """Return what the failed step says."""
    (event,) = [event for event in result.all_events if event.is_step_failure and event.step_key == step]
    data = event.step_failure_data
    return data.user_failure_data.description if data.user_failure_data else data.error.message


@pytest.mark.parametrize(
    ("run_config", "key", "meant"),
    [
        ({"ops": {"sft__dolly15k": {"config": {"force": True}}}}, "ops.sft__dolly15k", set()),
        ({"ops": {"sft__doly15k": {}}}, "ops.sft__doly15k", {"sft/dolly15k"}),
        ({"resources": {"setings": {"config": {"seed": 2}}}}, "resources.setings", {"sft/dolly15k", "raw/dolly15k"}),
    ],
)
@pytest.mark.parametrize("asset", ["sft/dolly15k", "raw/dolly15k"])
def test_a_run_config_key_that_nobody_reads_fails_the_run_and_the_nearest_key_comes_first(
    instance: dg.DagsterInstance,
    settings: Settings,
    run_config: dict[str, Any],
    key: str,
    meant: set[str],
    asset: str,
) -> None:
    if key == f"ops.{asset.replace('/', '__')}":
        assert run(instance, settings, asset, run_config=run_config).success
        return
    result = run(instance, settings, asset, run_config=run_config, raise_on_error=False)
    assert not result.success
    first, *others = failure_of(result, asset.replace("/", "__")).splitlines()
    right = {"ops": "ops.sft__dolly15k", "resources": "resources.settings"}[key.partition(".")[0]]
    near = f" Did you mean {right}?" if asset in meant else ""
    assert first == f"run config: {key} is read by nobody in this run.{near}"
    assert len(others) <= 2 and "resources.settings.config" in others[-1]
    assert not Path(settings.cache_dir).exists()


@pytest.mark.parametrize(
    ("given", "now"),
    [
        ({"append_eot": False}, "document_end"),
        ({"tokenizer_model": "m/spm.model"}, "tokenizer"),
        ({"force": True}, "ops.OP.config.force"),
        ({"wait": None}, "ops.OP.config.wait"),
    ],
)
def test_a_run_config_of_an_earlier_field_fails_and_names_the_one_of_now(
    instance: dg.DagsterInstance, settings: Settings, given: dict[str, Any], now: str
) -> None:
    result = run(instance, settings, "sft/dolly15k", config=given, raise_on_error=False)
    (old,) = given
    message = failure_of(result, "sft__dolly15k")
    assert re.match(rf"resources\.settings\.config\.{old}: this(?: setting)? is now {re.escape(now)}\b", message)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"threads": -1}, "threads "),  # the setting's own bound
        ({"sft_val_frac": 1.5}, "sft_val_frac "),
        ({"seed": None}, "seed: "),
    ],
)
def test_a_value_out_of_bounds_fails_the_run_and_names_its_field(
    instance: dg.DagsterInstance, settings: Settings, given: dict[str, Any], field: str
) -> None:
    result = run(instance, settings, "sft/dolly15k", config=given, raise_on_error=False)
    assert failure_of(result, "sft__dolly15k").startswith(f"resources.settings.config.{field}")
    assert not Path(settings.cache_dir).exists()


def test_a_run_that_names_one_setting_keeps_the_deployments_others(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    run(instance, settings, "sft/dolly15k", config={"seed": 7})
    meta = read_meta(str(Path(settings.cache_dir, "sft", "dolly15k", "meta.json")))
    assert (meta["seed"], meta["source"]["kind"]) == (7, "mirror")
    for given in ({"config": {"sft_val_fraq": 0.2}}, {"build": {"forse": True}}):
        with pytest.raises(dg.DagsterInvalidConfigError, match=r"sft_val_fraq|forse"):
            run(instance, settings, "sft/dolly15k", **given)


def test_a_run_may_take_a_value_away_and_read_one_from_its_environment(
    instance: dg.DagsterInstance, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    @dg.asset
    def mine(settings: RunSettings) -> None:
        seen.append(settings.of_run)

    monkeypatch.setenv("SEED_OF_THE_TEAM", "7")
    deployed = replace(settings, exclude=str(tmp_path / "excluded"), threads=2)
    merged = dg.Definitions.merge(dg.Definitions(assets=[mine]), niels_definitions(settings=deployed))
    job = merged.resolve_implicit_global_asset_job_def().get_subset(asset_selection={dg.AssetKey("mine")})
    given = {"exclude": None, "tokenizer": None, "seed": {"env": "SEED_OF_THE_TEAM"}}
    for config in (given, {}):
        run_config = {"resources": {"settings": {"config": config}}}
        assert job.execute_in_process(instance=instance, run_config=run_config).success
    assert seen == [replace(deployed, exclude=None, tokenizer=None, seed=7), deployed]


def test_bad_input_fails_at_once_with_the_cores_own_words(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    settings = Settings(source_root=str(tmp_path / "no"), cache_dir=str(tmp_path / "cache"))
    result = run(instance, settings, "pretrain/roam", raise_on_error=False)
    message = failure_of(result, "pretrain__roam")
    assert message.startswith("SourceNotFound: ") and str(tmp_path / "no") in message
    assert message.endswith("(here a flag is a field of resources.settings.config, as source_root)")
