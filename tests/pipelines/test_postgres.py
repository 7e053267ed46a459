"""The dagster.yaml of docs/deployment.md over a real PostgreSQL, with several runs at once.

It wants Debian's package `postgresql` and the extra `postgres`.
"""

import json
from contextlib import ExitStack

import pytest
from support import ROOT, postgres
from support.dagster_dev import dagster_dev, until
from support.dagster_runs import shell
from support.documents import blocks_of
from support.pipeline_seams import building

pytest.importorskip("dagster_postgres", reason="the extra postgres is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(postgres.programs() is None, reason="no PostgreSQL: apt-get install postgresql"),
]
REPOSITORIES = """{ repositoriesOrError { ... on RepositoryConnection { nodes {
  location { name } assetNodes { assetKey { path } } jobs { name } sensors { name } } } } }"""
OF_DAGSTER = {"__ASSET_JOB", "default_automation_condition_sensor"}
"""What every code location has."""
BLOCKS = blocks_of((ROOT / "docs" / "deployment.md").read_text(encoding="utf-8"))
FILES = {block.title: block.body for block in BLOCKS}
COMMANDS = [command.text for block in BLOCKS if block.language == "console" for command in block.commands]
SERVICES = [text for text in COMMANDS if text.startswith(("dagster-webserver", "dagster-daemon"))]


@pytest.fixture
def server():
    with postgres.server() as running:
        yield running


@pytest.fixture
def home(tmp_path):
    """A folder with the dagster.yaml of the page, which is DAGSTER_HOME, and its two code locations."""
    for name in ("dagster.yaml", "workspace.yaml", "team_a.py"):
        (tmp_path / name).write_text(FILES[name])
    return tmp_path


def test_three_runs_at_once_have_their_history_in_postgresql(home, server):
    with dagster_dev(home, *SERVICES, DAGSTER_HOME=str(home), **server.environment) as dev:
        with building(home / "cache" / "sample" / "tokenizer"):  # all three wait for the tokenizer
            runs = [dev.launch(asset) for asset in ("sft/dolly15k", "sft/oasst1", "trees/oasst1")]
            until(lambda: [*dev.statuses().values()] == ["STARTED"] * 3, "three runs at once")
        assert dev.finished(*runs) == ["SUCCESS"] * 3
    assert sorted(server.rows("SELECT run_id, status FROM runs")) == sorted((run, "SUCCESS") for run in runs)
    materialized = "SELECT asset_key FROM event_logs WHERE dagster_event_type = 'ASSET_MATERIALIZATION'"
    keys = {"/".join(json.loads(key)) for (key,) in server.rows(materialized)}
    assert keys >= {"sft/dolly15k", "sft/oasst1", "trees/oasst1"}
    assert not list(home.rglob("*.db")), "no SQLite beside it"


def test_two_code_locations_share_a_database_and_nothing_else(home, server):
    assets = {"niels_gpt": "sft/dolly15k", "team_a": "team_a/sft/dolly15k"}
    with dagster_dev(home, *SERVICES, DAGSTER_HOME=str(home), **server.environment) as dev:
        found = {each["location"]["name"]: each for each in dev.ask(REPOSITORIES)["repositoriesOrError"]["nodes"]}
        assert found.keys() == assets.keys()
        keys = {
            name: {"/".join(node["assetKey"]["path"]) for node in each["assetNodes"]} for name, each in found.items()
        }
        assert keys["team_a"] == {f"team_a/{key}" for key in keys["niels_gpt"]}
        for kind in ("jobs", "sensors"):
            ours, theirs = ({node["name"] for node in each[kind]} - OF_DAGSTER for each in found.values())
            assert ours and theirs and not ours & theirs
        with ExitStack() as held:  # both wait for their tokenizer
            for folder in ("cache", "cache_of_team_a"):
                held.enter_context(building(home / folder / "sample" / "tokenizer"))
            runs = {dev.launch(asset, location=name): name for name, asset in assets.items()}
            until(lambda: [*dev.statuses().values()] == ["STARTED"] * 2, "two runs at once")
        assert dev.finished(*runs) == ["SUCCESS"] * 2
    for run, name in runs.items():
        of_run = server.rows(f"SELECT DISTINCT asset_key FROM event_logs WHERE run_id = '{run}' AND asset_key <> ''")
        touched = {"/".join(json.loads(key)) for (key,) in of_run}
        assert assets[name] in touched <= keys[name]
    for folder in ("cache", "cache_of_team_a"):
        assert [path.parent.name for path in home.glob(f"{folder}/sample/sft/*/meta.json")] == ["dolly15k"]


def test_without_the_scheme_of_the_page_the_driver_is_missing(tmp_path):
    given = FILES["dagster.yaml"].replace("      scheme: postgresql+psycopg2\n", "")
    (tmp_path / "dagster.yaml").write_text(given)
    nobody = postgres.Server(port=1, password="").environment
    done = shell(tmp_path, "dagster instance info", DAGSTER_HOME=str(tmp_path), **nobody)
    assert done.returncode != 0
    assert "No module named 'psycopg'" in done.stderr
