"""The dagster.yaml of docs/deployment.md over a real PostgreSQL, with several runs at once.

It wants Debian's package `postgresql` and the extra `postgres`.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT, postgres
from support.dagster_dev import dagster_dev, until
from support.documents import blocks_of

from niels_gpt.storage.versions import build_lock

pytest.importorskip("dagster_postgres", reason="the extra postgres is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(postgres.programs() is None, reason="no PostgreSQL: apt-get install postgresql"),
]
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
FILES = {block.title: block.body for block in blocks_of(PAGE) if block.title}


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    with postgres.server() as running:
        yield running


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the dagster.yaml of the page, which is DAGSTER_HOME, and the checkout's workspace.yaml."""
    (tmp_path / "dagster.yaml").write_text(FILES["dagster.yaml"])
    shutil.copyfile(ROOT / "workspace.yaml", tmp_path / "workspace.yaml")
    return tmp_path


def test_three_runs_at_once_have_their_history_in_postgresql(home: Path, server: postgres.Server) -> None:
    with dagster_dev(home, DAGSTER_HOME=str(home), **server.environment) as dev:
        with build_lock(home / "cache" / "sample" / "tokenizer"):  # all three wait for the tokenizer
            runs = [dev.launch(asset) for asset in ("sft/dolly15k", "sft/oasst1", "trees/oasst1")]
            until(lambda: [*dev.statuses().values()] == ["STARTED"] * 3, "three runs at once")
        assert dev.finished(*runs) == ["SUCCESS"] * 3
    assert sorted(server.rows("SELECT run_id, status FROM runs")) == sorted((run, "SUCCESS") for run in runs)
    materialized = "SELECT asset_key FROM event_logs WHERE dagster_event_type = 'ASSET_MATERIALIZATION'"
    keys = {"/".join(json.loads(key)) for (key,) in server.rows(materialized)}
    assert keys == {"sft/dolly15k", "sft/oasst1", "trees/oasst1"}
    assert not list(home.rglob("*.db")), "no SQLite beside it"
