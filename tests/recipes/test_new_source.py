"""A seventh built-in source is a loader and one row of the table: nothing else is edited for its cache and asset."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.errors import refused

from niels_gpt.data import LocalFiles
from niels_gpt.data.spec import Credit, SourceSpec

MODULE = """
from niels_gpt.data import LocalFiles
from niels_gpt.data.sources import SOURCES
from niels_gpt.data.spec import Credit, SourceSpec
from niels_gpt.data.types import PretrainSample


def files(settings, root):
    return LocalFiles(root / "poems", tuple(sorted((root / "poems").glob("*.txt"))), 0)


def load(request):
    return [(None, (PretrainSample(path.read_text(), "poems", {"path": path.name}) for path in request.found.files))]


SOURCES["poems"] = SourceSpec(
    name="poems",
    family="pretrain",
    description="Token cache of poems.",
    credit=Credit("CC0", "nobody"),
    load=load,
    files=files,
    val_frac="own_val_frac",
)
"""
SCRIPT = """
import dataclasses, json, sys
import poems
import dagster as dg
from niels_gpt.commands import cache
from niels_gpt.settings import Settings
from support.dagster_runs import metadata, run

settings = Settings(**json.loads(sys.argv[1]))
flags = [f"--{name.replace('_', '-')}={value}" for name, value in json.loads(sys.argv[1]).items()]
assert cache.main(["build", "poems", *flags]) == 0
cache.main(["build-all", "--dry-run", *flags])  # 1: the mirror has no other source
with dg.DagsterInstance.ephemeral() as instance:
    elsewhere = dataclasses.replace(settings, cache_dir=sys.argv[2])
    result = run(instance, elsewhere, "raw/poems", "pretrain/poems")
    shown = metadata(result)["pretrain/poems"]
    print(json.dumps([shown["run/state"], shown["content_sha256"]]))
"""


@pytest.mark.slow
def test_a_row_of_the_table_is_a_cache_of_the_command_line_and_an_asset(tmp_path, tiny_model_path, settings):
    (tmp_path / "m" / "poems").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "m" / "poems" / f"{number:02}.txt").write_text(f"Poem {number}: the heron and the river.\n" * 9)
    (tmp_path / "poems.py").write_text(MODULE)
    given = {"source_root": f"{tmp_path}/m", "tokenizer": str(tiny_model_path), "cache_dir": f"{tmp_path}/c"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(given), str(tmp_path / "d")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    meta = json.loads((tmp_path / "c" / "pretrain" / "poems" / "meta.json").read_bytes())
    assert (meta["documents_read"], meta["val_frac"], meta["document_end"]["id"]) == (
        20,
        0.1,
        meta["special_token_ids"]["eot"],
    )
    assert (meta["source"]["licence"], meta["source"]["attribution"]) == ("CC0", "nobody")
    assert json.loads(done.stdout.strip().rpartition("\n")[2]) == ["built", meta["content_sha256"]]
    assert re.search(r"^pretrain/poems +up to date", done.stdout, re.M)  # in the plan of build-all


def test_a_row_that_says_nothing_of_the_split_is_refused():
    named = {"name": "poems", "family": "pretrain", "description": "", "credit": Credit("CC0", "nobody")}
    with refused("E102", "split_rule"):
        SourceSpec(**named, load=lambda _: [], files=lambda *_: LocalFiles(Path(), (), 0))
