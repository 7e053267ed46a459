"""The commands of dg as people type them: in a new project with the component, and in the checkout."""

import json
import shutil
from importlib.metadata import entry_points

import pytest
import yaml
from support import ROOT
from support.dagster_dev import dagster_dev
from support.dagster_runs import shell

from niels_gpt.cache.meta import read_meta

is_registered = any(each.value == "pipelines" for each in entry_points(group="dagster_dg_cli.registry_modules"))
pytestmark = pytest.mark.slow
CHATS = ("sft/dolly15k", "sft/oasst1")


def dg(folder, command, **more):
    """Run a command of dg, with the modules of its project; nothing goes out, and no file is left elsewhere."""
    quiet = {"HOME": str(folder), "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0", "COLUMNS": "200"}
    return shell(folder, command, PYTHONPATH=f"src:{ROOT}", **quiet, **more)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project as create-dagster makes it, with the component by one command."""
    folder = tmp_path_factory.mktemp("projects")
    made = dg(folder, "create-dagster project shop --no-uv-sync")
    assert made.returncode == 0, made.stderr
    (folder / "shop" / "dagster.yaml").write_text(
        "telemetry: {enabled: false}\nstorage: {sqlite: {base_dir: history}}\n"
    )
    done = dg(folder / "shop", "dg scaffold defs pipelines.NielsCaches caches --prefix llm --cache-dir built")
    assert done.returncode == 0, done.stderr
    return folder / "shop"


def yaml_of(project):
    return project / "src" / "shop" / "defs" / "caches" / "defs.yaml"


@pytest.mark.skipif(not is_registered, reason="niels_gpt was installed before it had the component: install it again")
def test_a_new_project_has_the_caches_by_a_few_lines_of_yaml(project):
    attributes = {"prefix": "llm", "settings": {"source_root": "sample", "cache_dir": "built"}}
    assert yaml.safe_load(yaml_of(project).read_text()) == {"type": "pipelines.NielsCaches", "attributes": attributes}
    assert "pipelines.NielsCaches" in dg(project, "dg list components").stdout
    checked = dg(project, "dg check defs")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    one_process = json.dumps({"execution": {"config": {"in_process": {}}}})
    done = dg(project, f"dg launch --assets 'key:\"llm/sft/*\"' --config-json '{one_process}'")
    assert done.returncode == 0, done.stderr
    built = {
        str(path.parent.relative_to(project / "built")) for path in (project / "built").glob("sample/*/*/meta.json")
    }
    assert built == {f"sample/{name}" for name in CHATS}


def test_check_yaml_names_file_line_and_what_is_expected(project):
    before = yaml_of(project).read_text()
    wrong = ["vocab_sise: 300", "threads: many", "partitions: 0", "lock: 3", 'seed: "{{ env.SEED }}"']
    yaml_of(project).write_text(before + "".join(f"    {line}\n" for line in wrong))
    try:
        done = dg(project, "dg check yaml --no-validate-requirements")
    finally:
        yaml_of(project).write_text(before)
    first = len(before.splitlines()) + 1
    found = {
        line.split(":")[1].split(" ")[0]: line.partition("attributes.")[2]
        for line in done.stdout.splitlines()
        if " - " in line
    }
    assert done.returncode == 1
    assert found == {
        str(first): "settings.vocab_sise Additional properties are not allowed ('vocab_sise' was unexpected)",
        str(first + 1): "settings.threads 'many' is not of type 'integer'",
        str(first + 2): "settings.partitions 0 is less than the minimum of 1",
        str(first + 3): "settings.lock 3 is not of type 'string'",
    }


@pytest.fixture
def checkout(tmp_path):
    """A folder as the checkout is for dg."""
    for name in ("dagster.yaml", "workspace.yaml", "dg.toml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    return tmp_path


def test_the_commands_of_dg_work_in_the_checkout(checkout):
    checked = dg(checkout, "dg check defs")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    listed = dg(checkout, "dg list defs --json")
    assert {*CHATS, "tokenizer"} <= {each["asset_key"] for each in json.loads(listed.stdout)["assets"]}
    one_process = json.dumps({"execution": {"config": {"in_process": True}}})
    done = dg(checkout, f"dg launch --assets 'sft/*' --config-json '{one_process}'", PYTHONWARNINGS="default")
    assert done.returncode == 0, done.stderr
    assert "Supersession" not in done.stdout + done.stderr
    for name in CHATS:
        assert read_meta(str(checkout / "cache" / "sample" / name / "meta.json"))["kind"] == "sft"
    assert (checkout / ".dagster" / "storage").is_dir(), "dagster.yaml of the folder is read"


def test_dev_serves_the_code_location(checkout):
    with dagster_dev(checkout, "dg dev --host 127.0.0.1 --port 3000", HOME=str(checkout)) as served:
        found = served.ask("{ workspaceOrError { ... on Workspace { locationEntries { name loadStatus } } } }")
    (location,) = found["workspaceOrError"]["locationEntries"]
    assert location == {"name": "niels_gpt", "loadStatus": "LOADED"}
