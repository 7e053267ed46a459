"""Runs that are lost with their machine: `dagster dev` and all that it started killed at once, and restarted."""

import contextlib
import os
import re
import shutil
import signal
from pathlib import Path

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
SLOTS = "dagster instance concurrency get --all"
"""The command of the first step on the page."""
_FREE = "mutation ($run: String!) { freeConcurrencySlots(runId: $run) }"


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


def test_after_the_three_steps_of_the_page_a_run_in_a_limited_pool_no_longer_waits_for_a_lost_one(
    home, tiny_model_path
):
    assert shell(home, f"dagster instance concurrency set {POOL} 1", DAGSTER_HOME=str(home)).returncode == 0
    environment = given(home, tiny_model_path)
    with dagster_dev(home, **environment) as dev:
        lost_run = dev.launch("pretrain/roam")
        until(lambda: list(home.glob("cache/pretrain/.versions/roam/building-*.journal/journal.jsonl")), "a checkpoint")
        dev.kill()
    assert status(home, lost_run) == "STARTED"
    with dagster_dev(home, **environment) as dev:
        waiting = dev.launch("pretrain/roam")
        until(lambda: f"Run {waiting} is blocked by" in (home / "dev.log").read_text(), "what the daemon says")
        assert dev.statuses() == {lost_run: "STARTED", waiting: "QUEUED"}
        assert f"`{SLOTS}`" in (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
        assert f'"{POOL}": 1 / 1 slots occupied' in shell(home, SLOTS, DAGSTER_HOME=str(home)).stdout
        assert dev.terminate(lost_run, "MARK_AS_CANCELED_IMMEDIATELY") == "TerminateRunSuccess"
        assert dev.ask(_FREE, run=lost_run) == {"freeConcurrencySlots": True}  # as the entry of the menu does
        assert dev.finished(lost_run, waiting) == ["CANCELED", "SUCCESS"]
        assert f'"{POOL}": 0 / 1 slots occupied' in shell(home, SLOTS, DAGSTER_HOME=str(home)).stdout
    assert read_meta(str(home / "cache" / "pretrain" / "roam" / "meta.json"))["documents_read"] == 42


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


def built_by(home):
    """Return the pid in the lock of the cache: of the step that builds it; None where nothing does."""
    try:
        found = re.search(r"pid (\d+)", (home / "cache/pretrain/.versions/roam/lock").read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def parent_of(pid):
    """Return the pid of the process that has started another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def files_of(cache):
    """Return the bytes of each file of a committed cache by its name."""
    version = cache.resolve()
    return {str(file.relative_to(version)): file.read_bytes() for file in version.rglob("*") if file.is_file()}


def test_a_killed_step_and_a_killed_run_amid_sensor_ticks_leave_nothing_stuck(home, tiny_model_path):
    """The sensors ask for the build of a changed source. Its step is killed, and later the process of its run."""
    location = "from pipelines.definitions import *\n\ndefs = dg.Definitions.merge(\n"
    location += '    niels_definitions(automation=["files", "rebuild"]), dg.Definitions(executor=EXECUTOR)\n)\n'
    write(home / "automated.py", location)
    write(
        home / "workspace.yaml",
        "load_from:\n  - python_file: {relative_path: automated.py, location_name: niels_gpt}\n",
    )
    yaml = (home / "dagster.yaml").read_text()
    for line, quick in QUICK.items():
        yaml = yaml.replace(line, quick.replace("max_runtime_seconds: 1", "max_runtime_seconds: 60"))
    (home / "dagster.yaml").write_text(yaml)
    environment = given(home, tiny_model_path)
    with dagster_dev(home, **environment) as dev:
        first = dev.launch("pretrain/roam", tags=AN_HOUR)
        assert dev.finished(first) == ["SUCCESS"]
        observed = until(lambda: [run for run in dev.statuses() if run != first], "the observation of a new source")
        assert dev.finished(*observed) == ["SUCCESS"]
        ticks = lambda: (home / "dev.log").read_text().count("auto-materialization tick for rebuild")  # noqa: E731
        before = ticks()
        until(lambda: ticks() > before + 1, "a whole tick of the sensor rebuild")  # it has seen the first build
        write(home / "mirror" / "roam" / "later.md", "- the heron comes back\n" * 200_000)
        builder = until(lambda: built_by(home), "a build that the sensors have asked for")
        os.kill(builder, signal.SIGKILL)
        again = until(lambda: (pid := built_by(home)) != builder and pid, "the second attempt of the step")
        (run,) = [run for run, state in dev.statuses().items() if state == "STARTED"]
        os.kill(parent_of(parent_of(again)), signal.SIGKILL)  # the run; between them is the server of its forks
        assert dev.finished(run) == ["FAILURE"], "the daemon ends it after max_runtime_seconds"
        until(lambda: len(dev.built("pretrain/roam")) > 1, "its repetition")
        until(
            lambda: not {*dev.statuses().values()} & {"QUEUED", "NOT_STARTED", "STARTING", "STARTED"}, "the end of all"
        )
    direct = Settings(source_root=str(home / "mirror"), cache_dir=str(home / "direct"), tokenizer=str(tiny_model_path))
    build_token_cache(direct, "roam")
    assert files_of(home / "cache" / "pretrain" / "roam") == files_of(home / "direct" / "pretrain" / "roam")
    assert not list(home.glob("cache/pretrain/.versions/roam/building-*"))
