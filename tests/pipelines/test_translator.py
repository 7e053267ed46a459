"""A translator: another key, group, owner or one more dependency of single assets, in definitions and in a real run."""

import json
from pathlib import Path

import dagster as dg
import pytest
from support.dagster_runs import metadata, settings_with, stale, verdicts

from niels_gpt.settings import Settings
from pipelines.definitions import niels_definitions
from pipelines.deployment import CacheTranslator

REVIEW = dg.AssetKey("licence_review")


class Ours(CacheTranslator):
    """Renames the tokenizer, a source and a cache; another cache waits for a review."""

    def get_asset_spec(self, path, spec):
        if path in ("tokenizer", "raw/oasst1", "export/chats"):
            return spec.replace_attributes(key=spec.key.with_prefix("text"))
        if path == "sft/oasst1":
            return spec.replace_attributes(key=["chats", "open-assistant"], group_name="chats", owners=["team:chat"])
        if path == "sft/dolly15k":
            return spec.replace_attributes(deps=[*spec.deps, REVIEW])
        return spec


def parents(graph, key):
    return {found.to_user_string() for found in graph.get(dg.AssetKey(key)).parent_keys}


EXPORT = '[export.chats]\ncache = "sft/oasst1"\nto = "hf"\nfolder = "out"\n'


@pytest.mark.parametrize("partitions", [1, 2])
def test_each_name_follows_a_changed_key(tmp_path, tiny_model_path, partitions):
    settings = settings_with(EXPORT, tmp_path, tiny_model_path, partitions=partitions)
    made = niels_definitions("llm", settings, owners=["team:data"], translator=Ours())
    graph = made.resolve_asset_graph()
    cache = ["chats", "open-assistant"]
    assert parents(graph, cache) == {"text/llm/tokenizer", "text/llm/raw/oasst1", "llm/sft/"}
    assert parents(graph, ["llm", "trees", "oasst1"]) == {"text/llm/tokenizer", "text/llm/raw/oasst1"}
    assert parents(graph, ["text", "llm", "export", "chats"]) == {"chats/open-assistant"}
    assert parents(graph, ["llm", "sft", "dolly15k"]) >= {"licence_review", "text/llm/tokenizer"}
    assert graph.get(dg.AssetKey(cache)).owners == ["team:chat"]
    assert graph.get(dg.AssetKey(cache)).group_name == "chats"
    assert graph.get(dg.AssetKey(["llm", "sft", "dolly15k"])).owners == ["team:data"]
    old = {dg.AssetKey(["llm", *path.split("/")]) for path in ("tokenizer", "raw/oasst1", "sft/oasst1", "export/chats")}
    assert not old & graph.get_all_asset_keys()
    assert not old & {check.asset_key for check in graph.asset_check_keys}
    repository = made.get_repository_def()
    jobs = {job.name: job.asset_layer.selected_asset_keys for job in repository.get_all_jobs()}
    assert dg.AssetKey(cache) in jobs["llm__sft"] & jobs["llm__everything"]
    assert dg.AssetKey(["text", "llm", "raw", "oasst1"]) in jobs["llm__observe"]


def test_a_graph_may_depend_on_another_asset_called_tokenizer(settings):
    class Needs(CacheTranslator):
        def get_asset_spec(self, path, spec):
            return spec.merge_attributes(deps=["tokenizer"]) if path == "sft/oasst1" else spec

    parted = Settings(**{**vars(settings), "partitions": 2})
    graph = niels_definitions("llm", parted, translator=Needs()).resolve_asset_graph()
    assert parents(graph, ["llm", "sft", "oasst1"]) >= {"tokenizer", "llm/tokenizer"}


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_run_with_changed_keys_leaves_nothing_stale(instance, settings, partitions):
    settings = Settings(**{**vars(settings), "partitions": partitions})

    @dg.asset(key=REVIEW)
    def review() -> None: ...

    ours = niels_definitions(settings=settings, translator=Ours())
    merged = dg.Definitions.merge(ours, dg.Definitions(assets=[review]))
    keys = {"text/tokenizer", "text/raw/oasst1", "chats/open-assistant", "sft/dolly15k", "licence_review"}
    wanted = {dg.AssetKey(key.split("/")) for key in keys}
    job = merged.resolve_implicit_global_asset_job_def().get_subset(asset_selection=wanted)
    result = job.execute_in_process(instance=instance)
    assert metadata(result).keys() == keys - {"text/raw/oasst1"}
    assert all(passed for passed, _ in verdicts(result).values())
    assert Path(settings.cache_dir, "sft", "oasst1", "meta.json").is_file(), "the folder is the cache's, not the key's"
    assert not stale(instance, settings, translator=Ours()).keys() & keys
    changed = Settings(**{**vars(settings), "oasst1_max_messages": 3})
    assert stale(instance, changed, translator=Ours()).keys() & keys == {"chats/open-assistant"}


class Loses(CacheTranslator):
    """Drops what decides whether a cache is stale."""

    def __init__(self, **changes):
        self.changes = changes

    def get_asset_spec(self, path, spec):
        return spec.replace_attributes(**self.changes) if path == "sft/oasst1" else spec


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"deps": []}, "raw/oasst1"), ({"code_version": "2"}, "code version"), ({"key": ["raw", "oasst1"]}, "raw/oasst1")],
)
def test_a_translator_that_would_hide_what_is_stale_or_an_asset_is_refused(changes, named):
    with pytest.raises(ValueError, match=f"translator: .*sft/oasst1.*{named}"):
        niels_definitions(translator=Loses(**changes))


def test_an_asset_links_to_the_module_that_makes_it(tmp_path, tiny_model_path):
    settings = settings_with(EXPORT, tmp_path, tiny_model_path)
    place = "https://code.example/llm/blob/v1"
    graph = niels_definitions(settings=settings, repository=f"{place}/").resolve_asset_graph()
    links = {
        key.to_user_string(): graph.get(key).metadata["dagster/code_references"].code_references[0].url
        for key in graph.get_all_asset_keys()
    }
    files = {key: url.removeprefix(f"{place}/") for key, url in links.items()}
    root = Path(__file__).parents[2]
    assert all((root / file).is_file() for file in files.values()), json.dumps(files)
    assert files["raw/roam"] == "niels_gpt/data/roam.py"
    assert (
        len({files[key] for key in ("tokenizer", "pretrain/roam", "sft/oasst1", "trees/oasst1", "export/chats")}) == 5
    )
    plain = niels_definitions(settings=settings).resolve_asset_graph()
    assert not any("dagster/code_references" in plain.get(key).metadata for key in plain.get_all_asset_keys())
