"""The component NielsCaches in a folder of definitions, in this process: its schema, its paths, and what it builds."""

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta

import dagster as dg
import pytest
import yaml
from dagster.components.core.component_tree import ComponentTreeException
from dagster.components.testing import create_defs_folder_sandbox
from pydantic import ValidationError
from support import ROOT
from support.documents import blocks_of

from niels_gpt.settings import Settings
from niels_gpt.storage.codes import code_of
from pipelines import NielsCaches
from pipelines.definitions import niels_definitions

# Dagster's own code of components does both.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* is currently in beta:dagster.BetaWarning"),
]


class Ours(NielsCaches):
    """As somebody's project subclasses it."""

    def get_asset_spec(self, path, spec):
        spec = super().get_asset_spec(path, spec)
        return spec.replace_attributes(kinds={"chats"}) if path == "sft/oasst1" else spec


@contextmanager
def loaded(attributes, files=(), component=NielsCaches, **more):
    """Yield the project's folder and the definitions that a YAML file with these attributes gives."""
    with create_defs_folder_sandbox() as project:
        of_yaml = {"type": f"{component.__module__}.{component.__name__}", "attributes": attributes, **more}
        folder = project.scaffold_component(NielsCaches, "caches", defs_yaml_contents=of_yaml)
        for name, content in dict(files).items():
            (folder / name).write_text(content)
        with project.load_component_and_build_defs(folder) as (_, made):
            yield project.project_root, made


def facts(made):
    """Return what Dagster knows of definitions: specs of assets, keys of checks, names of jobs, sensors, schedules."""
    graph, repository = made.resolve_asset_graph(), made.get_repository_def()
    specs = {}
    for key in graph.get_all_asset_keys():
        node = graph.get(key)
        of_yaml = ("dagster/code_references", "dagster/component_origin")
        shown = {name: value for name, value in node.metadata.items() if name not in of_yaml}
        parts = (node.group_name, node.owners, node.tags, node.parent_keys, node.code_version, node.description, shown)
        specs[key] = (*parts, str(node.automation_condition), node.freshness_policy)
    jobs = [job.name for job in repository.get_all_jobs()]
    sensors = {sensor.name: sensor.default_status for sensor in repository.sensor_defs}
    schedules = {schedule.name: schedule.default_status for schedule in repository.schedule_defs}
    return specs, graph.asset_check_keys, sorted(jobs), sensors, schedules, repository.get_top_level_resources().keys()


def test_yaml_gives_what_the_function_gives():
    attributes = {
        "prefix": "team/llm",
        "group_prefix": "llm/",
        "settings": {"source_root": "sample", "cache_dir": "built", "sft": "mine=chats.json", "vocab_size": 400},
        "partitions": 2,
        "owners": ["team:data"],
        "tags": {"tier": "gold"},
        "op_tags": {"dagster-k8s/config": {"container_config": {}}},
        "automation": ["observe", "files"],
        "observe_cron": "30 1 * * *",
        "freshness": {"fail": 48, "warn": 24},
        "static_partitions": True,
        "repository": "https://code.example/llm/blob/v1",
    }
    with loaded(attributes) as (root, made):
        where = {
            "cache_dir": str(root / "built"),
            "sft": f"mine={root}/chats.json",
            "roam_dir": str(root / "data/roam"),
        }
        settings = Settings(source_root="sample", vocab_size=400, partitions=2, **where)
        names = ("group_prefix", "owners", "tags", "op_tags", "automation", "observe_cron", "static_partitions")
        given = {name: attributes[name] for name in names}
        days = {"fail_window": timedelta(days=2), "warn_window": timedelta(days=1)}
        given["freshness"] = dg.FreshnessPolicy.time_window(**days)
        assert facts(made) == facts(niels_definitions("team/llm", settings, **given))
        graph = made.resolve_asset_graph()
        node = graph.get(dg.AssetKey(["team", "llm", "sft", "mine"]))
        links = [str(each.source) for each in node.metadata["dagster/code_references"].code_references]
        assert any(link.startswith("https://code.example/llm/blob/v1/niels_gpt/") for link in links), links


def test_settings_come_from_the_file_alone_and_a_template_from_the_environment(monkeypatch):
    monkeypatch.setenv("NIELS_GPT_VOCAB_SIZE", "999")
    monkeypatch.setenv("CORES", "3")
    given = {"threads": "{{ env.CORES }}", "cache_dir": "{{ env.CORES }}/cache"}
    made = NielsCaches.from_attributes_dict(attributes={"settings": given})
    assert made.settings == Settings(threads=3, cache_dir="3/cache")
    with pytest.raises(Exception, match=r"settings\.threads.*found None"):
        NielsCaches.from_attributes_dict(attributes={"settings": {"threads": "{{ env.NOT_SET }}"}})


def test_a_file_of_sources_lies_beside_the_yaml_and_other_paths_start_in_the_project():
    files = {"mine.toml": '[sft.support]\nfiles = "chats.json"\n'}
    given = {"source_root": "mirror", "pretrain": "notes=notes/*.md; logs=/srv/logs:line"}
    with loaded({"sources": "mine.toml", "settings": given}, files) as (root, made):
        graph = made.resolve_asset_graph()
        shown = graph.get(dg.AssetKey(["sft", "support"]))
        assert shown.metadata["path"].path == str(root / "cache" / "sft" / "support")
        texts = {
            name: graph.get(dg.AssetKey(["raw", name])).metadata["dagster/uri"].text
            for name in ("roam", "notes", "logs")
        }
        assert texts == {"roam": str(root / "mirror"), "notes": str(root / "notes/*.md"), "logs": "/srv/logs"}


def cause_of(settings):
    """Return the error that a component with these settings ends with."""
    with pytest.raises(ComponentTreeException) as raised, loaded({"settings": settings}):
        pass
    return raised.value.__cause__


def test_a_file_of_the_current_folder_is_not_read_and_a_wrong_line_is_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('[sft.support]\nfiles = "chats.json"\n')
    missing = cause_of({"sources_file": "mine.toml"})
    assert code_of(missing) == "E104" and str(tmp_path) not in str(missing)
    assert "--pretrain notes:" in str(cause_of({"pretrain": "notes"}))


def test_single_assets_change_by_translation_by_post_processing_and_in_a_subclass():
    owner = "{{ ['team:chat'] if path == 'sft/oasst1' else spec.owners }}"
    attributes = {
        "prefix": "llm",
        "owners": ["team:data"],
        "translation": {
            "owners": owner,
            "group_name": "of_{{ family }}",
            "key": "caches/{{ name or family }}_{{ family }}",
        },
    }
    changes = {"assets": [{"target": "group:of_sft", "attributes": {"tags": {"seen": "yes"}}}]}
    with loaded(attributes, component=Ours, post_processing=changes) as (_, made):
        graph = made.resolve_asset_graph()
    cache = graph.get(dg.AssetKey(["caches", "oasst1_sft"]))
    assert (cache.owners, cache.group_name, cache.kinds) == (["team:chat"], "of_sft", {"chats"})
    assert cache.tags["seen"] == "yes" and cache.tags["family"] == "sft"
    assert dg.AssetKey(["caches", "oasst1_raw"]) in cache.parent_keys
    other = graph.get(dg.AssetKey(["caches", "oasst1_trees"]))
    assert (other.owners, "seen" in other.tags) == (["team:data"], False)


def test_the_schema_has_every_setting_with_its_help_default_and_bounds():
    schema = NielsCaches.model().model_json_schema()["properties"]
    of_settings = schema["settings"]["properties"]
    assert not schema["settings"]["additionalProperties"]
    assert {name: (each["description"], each["default"]) for name, each in of_settings.items()} == {
        each.name: (each.metadata["help"], each.default) for each in fields(Settings)
    }
    bounds = {"type": ["integer", "string"], "minimum": 1, "maximum": 100_000}
    assert of_settings["partitions"].items() >= bounds.items()
    assert of_settings["rollouts_val_frac"].items() >= {"minimum": 0, "exclusiveMaximum": 1}.items()
    assert of_settings["exclude"]["type"] == ["string", "null"]
    undescribed = [name for name, each in schema.items() if not each.get("description")]
    assert not undescribed


@pytest.mark.parametrize(
    ("attributes", "place"),
    [
        ({"settings": {"vocab_sise": 300}}, ("settings", "vocab_sise")),
        ({"settings": {"threads": "many"}}, ("settings", "threads")),
        ({"settings": {"partitions": 0}}, ("settings", "partitions")),
        ({"settings": {"lock": 3}}, ("settings", "lock")),
        ({"setings": {}}, ("setings",)),
    ],
)
def test_a_wrong_attribute_is_named_when_it_loads(attributes, place):
    with pytest.raises(ValidationError) as raised:
        NielsCaches.from_attributes_dict(attributes=attributes)
    places = [tuple(part for part in error["loc"] if part in place) for error in raised.value.errors()]
    assert place in places


@pytest.mark.parametrize("name", ["settings", "freshness"])
def test_a_text_that_is_no_template_is_quoted(name):
    with pytest.raises(Exception, match="found 'daily', expected"):
        NielsCaches.from_attributes_dict(attributes={name: "daily"})


PAGE = (ROOT / "docs" / "deployment.md").read_text()
SHOWN = [block.body for block in blocks_of(PAGE) if block.body.startswith("type: pipelines.NielsCaches")]


@pytest.mark.parametrize("block", SHOWN, ids=range(len(SHOWN)))
def test_the_yaml_of_the_page_is_a_component(block, monkeypatch):
    monkeypatch.setenv("CACHE_DIR", "/data/cache")
    given = yaml.safe_load(block)["attributes"]
    made = NielsCaches.from_attributes_dict(attributes=given)
    assert made.prefix == "llm" and made.settings.cache_dir.endswith("data/cache")
    assert made.model_fields_set == given.keys()


def test_the_package_loads_no_dagster_and_shows_the_component():
    code = "import sys, pipelines; assert 'dagster' not in sys.modules and 'NielsCaches' in dir(pipelines)"
    assert not subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode
