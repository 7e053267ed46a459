"""Runs that are lost with their machine: `dagster dev` and all that it started killed at once, and restarted."""

import contextlib
import shutil

import dagster as dg
import pytest
from support import ROOT
from support.dagster_dev import dagster_dev, until
from support.dagster_runs import shell
from support.data_files import write
from support.pipeline_seams import building, turn_taken

from niels_gpt.cache import PretrainTokenStreamDataset
from niels_gpt.cache.meta import read_meta
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import Settings

pytestmark = pytest.mark.faults
POOL = "niels_gpt/pretrain_build"
AN_HOUR = {"dagster/max_runtime": "3600"}
QUICK = {
    "max_runtime_seconds: 86400": "max_runtime_seconds: 1\n  poll_interval_seconds: 1",
    "free_slots_after_run_end_seconds: 60": "free_slots_after_run_end_seconds: 1",
}
"""Lines of the checkout's dagster.yaml, and those with which the daemon does at once what it does after a day."""


@pytest.fixture
def home(tmp_path, tiny_model_path):
    """A folder as a fresh clone is for Dagster, with notes that were built once, and since then have grown to 40 MB."""
    for name in ("dagster.yaml", "workspace.yaml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    notes = tmp_path / "mirror" / "roam"
    write(notes / "a.md", "- a thought\n" * 9)
    write(notes / "b.md", "- another one\n")
    folder = {"source_root": str(tmp_path / "mirror"), "cache_dir": str(tmp_path / "cache")}
    build_token_cache(Settings(**folder, tokenizer=str(tiny_model_path), threads=1), "roam")
    for number in range(40):  # seconds of one thread
        write(notes / f"long{number}.md", "- the heron walks to the river and finds pebbles\n" * 20_000)
    return tmp_path


def given(home, model):
    named = {"SOURCE_ROOT": home / "mirror", "CACHE_DIR": home / "cache", "TOKENIZER": model, "THREADS": 1}
    return {f"NIELS_GPT_{name}": str(value) for name, value in named.items()}


def status(home, run):
    """Return what Dagster's storage says while no process of Dagster runs."""
    with contextlib.chdir(home), dg.DagsterInstance.from_config(str(home)) as instance:  # its paths are relative
        found = instance.get_run_by_id(run)
    assert found
    return found.status.value


def lost(dev, home):
    """Launch two builds of one cache, kill everything at once when one has a checkpoint, and return the runs' ids.

    The other one waits for its turn then. The daemon is to leave it alone for an hour.
    """
    journals = "cache/pretrain/.versions/roam/building-*.journal/journal.jsonl"
    with turn_taken(home / "cache"):
        runs = [dev.launch("pretrain/roam"), dev.launch("pretrain/roam", tags=AN_HOUR)]
        until(lambda: [*dev.statuses().values()] == ["STARTED"] * 2, "two runs at once")
    until(lambda: list(home.glob(journals)), "a checkpoint")
    dev.kill()
    assert list(home.glob(journals)), "it was killed before it could commit"
    return runs


def test_lost_runs_are_ended_and_the_next_run_completes(home, tiny_model_path):
    limited = shell(home, f"dagster instance concurrency set {POOL} 2", DAGSTER_HOME=str(home))
    assert limited.returncode == 0, limited.stderr
    cache = home / "cache" / "pretrain" / "roam"
    before = read_meta(str(cache / "meta.json"))
    environment = given(home, tiny_model_path)
    with dagster_dev(home, **environment) as dev:
        ended, other = lost(dev, home)

    assert read_meta(str(cache / "meta.json")) == before
    assert PretrainTokenStreamDataset(cache / "train", T=8, device="cpu").num_windows > 0
    with building(cache):
        assert status(home, ended) == status(home, other) == "STARTED"  # nobody is left who could report more

    yaml = (home / "dagster.yaml").read_text()
    for line, quick in QUICK.items():
        assert line in yaml
        yaml = yaml.replace(line, quick)
    (home / "dagster.yaml").write_text(yaml)
    with dagster_dev(home, **environment) as dev:
        again = dev.launch("pretrain/roam", tags=AN_HOUR)  # both places in the pool are taken
        assert dev.finished(ended, again) == ["FAILURE", "SUCCESS"]
        assert dev.statuses()[other] == "STARTED"  # by its tag; it does not stand in the way
        assert dev.terminate(other, "MARK_AS_CANCELED_IMMEDIATELY") == "TerminateRunSuccess"
        assert dev.finished(other) == ["CANCELED"]
    assert read_meta(str(cache / "meta.json"))["documents_read"] == 42
    assert not list(home.glob("cache/pretrain/.versions/roam/building-*"))
