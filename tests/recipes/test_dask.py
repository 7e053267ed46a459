"""Partitions on a Dask cluster: real schedulers and workers on loopback, which are killed, and refused."""

import asyncio
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import ROOT, TESTS
from support.commands import niels_gpt
from support.partition_builds import be_patient, build_on_dask

from niels_gpt.cache.meta import read_meta
from niels_gpt.recipes import dask
from niels_gpt.recipes.dask import obstacle
from niels_gpt.recipes.home_recipes import units_of
from niels_gpt.recipes.plan import every_recipe
from niels_gpt.recipes.units import Units, build_token_cache
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError, UsageError

needs_dask = pytest.mark.skipif(find_spec("distributed") is None, reason="needs the extra dask")
KEY, TARGETS = "pretrain/notes", "eagle3/targets"


def texts(folder, *, rows, words=40):
    """Write four files of rows; returns the line that names them, relative to the folder."""
    (folder / "texts").mkdir()
    for file in range(4):
        lines = [
            json.dumps({"text": " ".join(f"the {file} and {row * word % 97} of it" for word in range(words))})
            for row in range(rows)
        ]
        (folder / "texts" / f"{file}.jsonl").write_text("\n".join(lines))
    return "notes=texts/*.jsonl"


def settings_of(folder, model, *, rows=50, **more):
    return Settings(cache_dir="cache", tokenizer=str(model), pretrain=texts(folder, rows=rows), partitions=4, **more)


class Cluster:
    """A scheduler and workers of one thread, each a process; `close` ends them."""

    def __init__(self, folder):
        self.folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        address = folder / "scheduler.json"
        self._run("scheduler", "--port", "0", "--host", "127.0.0.1", "--scheduler-file", str(address))
        while not address.exists() or not address.read_text():
            time.sleep(0.05)
        self.address = json.loads(address.read_text())["address"]

    def worker(self, **environment):
        """Start a worker, whose current folder is another one than that of the command."""
        how = ("--nthreads", "1", "--no-nanny", "--local-directory", str(self.folder))
        self._run("worker", self.address, *how, **environment)

    def _run(self, what, *arguments, **environment):
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *arguments, "--no-dashboard"]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, env={**os.environ, **environment}
            )
        self._processes.append(process)

    @property
    def workers(self):
        return self._processes[1:]

    def signal_workers(self, number):
        """Send a signal to each worker that is there."""
        for process in self.workers:
            process.send_signal(number)

    def wait_for(self, workers):
        """Wait for a number of workers, and until each has imported what it runs."""
        from distributed import Client

        with Client(self.address, set_as_default=False) as client:
            client.wait_for_workers(workers, timeout=30)
            client.run(lambda: bool(__import__("niels_gpt.recipes.dask")))

    def close(self):
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A scheduler with two workers; a test that kills one starts another."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        for _ in range(2):
            made.worker()
        yield made
    finally:
        made.close()


def kill_builders(lock, cluster, times):
    """Start a thread that kills the process which builds a partition, and starts a worker instead, some times."""

    def kill():
        killed = set[int]()
        while len(killed) < times:
            found = re.search(r"pid (\d+)", lock.read_text()) if lock.exists() else None
            if found is None or int(found[1]) in killed:
                time.sleep(0.01)
                continue
            os.kill(int(found[1]), signal.SIGKILL)
            killed.add(int(found[1]))
            cluster.worker()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def files_of(cache):
    return {path.relative_to(cache).as_posix(): path.read_bytes() for path in cache.rglob("*") if path.is_file()}


def test_what_is_no_address_and_what_has_no_partitions_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="local:N"):
        dask.check_where("four")
    build = ["build", "--source-root", "sample"]
    for wrong in (["roam"], ["roam", "--partitions", "2", "--partition", "0"], ["trees/oasst1", "--partitions", "2"]):
        done = niels_gpt(*build, *wrong, "--dask", "local:2")
        assert (done.status, done.err.count("error[E101]")) == (2, 1), wrong
    assert not list(tmp_path.iterdir())


@pytest.fixture
def notes(tmp_path, tiny_model_path):
    """Settings of a small cache of four partitions, in the current folder."""
    return settings_of(tmp_path, tiny_model_path)


def test_a_worker_says_why_it_cannot_build(notes, tmp_path):
    plan = Units(notes, "notes").plan
    assert plan is not None
    with dask.work_of(notes, "notes", plan) as work:
        found = {
            what: asyncio.run(obstacle(replace(work, **changed)))
            for what, changed in {
                "nothing": {},
                "code": {"code": {**work.code, "version": "0.0.1"}},
                "folder": {"token": "written elsewhere"},
                "nowhere": {"probe": str(tmp_path / "gone")},
                "current": {"folder": str(tmp_path / "gone")},
                "inputs": {"inputs": {**work.inputs, "source": "3 files"}},
                "source": {"settings": replace(notes, pretrain="notes=gone/*.jsonl")},
            }.items()
        }
    codes = {what: said and said[0] for what, said in found.items()}
    others = dict.fromkeys(("folder", "nowhere", "current", "inputs"), "E513")
    assert codes == {"nothing": None, "code": "E511", **others, "source": "E301"}
    assert "0.0.1" in str(found["code"]) and "texts" not in str(found["source"])
    assert not list((tmp_path / "cache").glob(".probe*")), "the file for the workers is removed"


@pytest.mark.slow
@needs_dask
def test_workers_that_hang_are_left_out_and_the_others_build(notes, cluster, monkeypatch, caplog):
    be_patient(monkeypatch, seconds=3.0)
    cluster.worker()
    cluster.wait_for(3)
    try:
        cluster.signal_workers(signal.SIGSTOP)
        with pytest.raises(CacheError, match="no worker") as alone:
            build_on_dask(notes, "notes", cluster.address)
        assert alone.value.code == "E513"
    finally:
        cluster.signal_workers(signal.SIGCONT)
    hangs = cluster.workers[-1]
    hangs.send_signal(signal.SIGSTOP)
    assert not build_on_dask(notes, "notes", cluster.address).reused
    hangs.kill()
    assert [record.code for record in caplog.records if "left out" in record.message] == ["W508"] * 4


@pytest.mark.slow
@needs_dask
def test_a_worker_that_is_killed_twice_changes_no_byte(tmp_path, tiny_model_path, cluster, caplog):
    settings = settings_of(tmp_path, tiny_model_path, rows=600)
    here = build_token_cache(replace(settings, cache_dir="here"), "notes")
    plan = Units(settings, "notes").plan
    assert plan is not None
    killer = kill_builders(plan.folder / ".versions" / "00002" / "lock", cluster, times=2)
    outcome = build_on_dask(settings, "notes", cluster.address)
    killer.join(timeout=1)
    assert not killer.is_alive(), "it was killed twice"
    assert [record.code for record in caplog.records if "died" in record.message] == ["W506", "W506"]
    assert files_of(outcome.path) == files_of(here.path)
    assert outcome.meta == read_meta("here/pretrain/notes/meta.json") and not outcome.reused
    assert build_on_dask(settings, "notes", cluster.address).reused


@pytest.mark.slow
@needs_dask
def test_partitions_of_shards_survive_a_worker_that_is_killed(tmp_path, tiny_model_path, cluster, caplog):
    of_eagle3 = {"eagle3_shard_size": 1, "eagle3_batch_size": 1, "eagle3_max_samples": 40}
    settings = Settings(
        source_root="sample", cache_dir="cache", tokenizer=str(tiny_model_path), partitions=4, **of_eagle3
    )
    here = every_recipe(settings)[TARGETS](replace(settings, cache_dir="here", partitions=1))
    plan = units_of(settings, TARGETS).plan
    assert plan is not None
    killer = kill_builders(plan.folder / ".versions" / "2-of-4" / "lock", cluster, times=1)
    outcome = build_on_dask(settings, TARGETS, cluster.address)
    killer.join(timeout=1)
    assert not killer.is_alive(), "it was killed"
    assert [record.code for record in caplog.records if "died" in record.message] == ["W506"]
    assert files_of(outcome.path) == files_of(here.path) and not list(Path("cache").rglob("partitions-*"))


@pytest.mark.slow
@needs_dask
def test_a_partition_whose_workers_die_too_often_fails_alone(tmp_path, tiny_model_path, cluster, monkeypatch):
    from distributed import Client

    def no_second_try(dask_scheduler=None):
        dask_scheduler.allowed_failures = 0  # then the scheduler says KilledWorker at the first death

    with Client(cluster.address, set_as_default=False) as client:
        client.run_on_scheduler(no_second_try)
    be_patient(monkeypatch, deaths=2)
    settings = settings_of(tmp_path, tiny_model_path, rows=600)
    plan = Units(settings, "notes").plan
    assert plan is not None
    killer = kill_builders(plan.folder / ".versions" / "00001" / "lock", cluster, times=2)
    with pytest.raises(CacheError, match=r"1 of 4 .*\n +partition 1 ") as failed:
        build_on_dask(settings, "notes", cluster.address)
    assert failed.value.code == "E513"
    killer.join(timeout=1)
    assert sorted(path.name for path in plan.folder.glob("0*")) == ["00000", "00002", "00003"]
    assert build_on_dask(settings, "notes", cluster.address).meta["partitions"]["total"] == 4


@pytest.mark.slow
@needs_dask
def test_an_error_of_a_build_reaches_the_command_line_and_the_others_are_finished(notes, tiny_model_path, cluster):
    (Path("texts") / "1.jsonl.gz").write_bytes(gzip.compress(Path("texts/1.jsonl").read_bytes())[:-20])
    Path("texts/1.jsonl").unlink()
    command = ["build", "--pretrain", "notes=texts/*.jsonl*", "--partitions", "4", "--tokenizer", str(tiny_model_path)]
    done = niels_gpt(*command, "--dask", cluster.address)
    assert done.status == 1
    said = done.err
    assert re.search(r"error\[E302\]: .*1 of 4 partitions failed", said) and "1.jsonl.gz" in said
    assert len(list(Path("cache/pretrain/.versions/notes").glob("partitions-*/0*"))) == 3


def worker_with_other_code(cluster):
    """Start a worker whose program builds other bytes."""
    other = cluster.folder / "other"
    shutil.copytree(ROOT / "niels_gpt", other / "niels_gpt", ignore=shutil.ignore_patterns("__pycache__"))
    versions = other / "niels_gpt" / "engine" / "meta.py"
    versions.write_text(re.sub('"pretrain": [0-9]+', '"pretrain": 99', versions.read_text()))
    cluster.worker(PYTHONPATH=os.pathsep.join([str(other), str(TESTS)]))


@pytest.mark.slow
@needs_dask
def test_an_unfit_worker_that_comes_later_is_left_out_and_builds_nothing(notes, tmp_path, caplog):
    plan = Units(notes, "notes").plan
    cluster = Cluster(tmp_path)
    try:
        cluster.worker()
        cluster.wait_for(1)
        build = threading.Thread(target=build_on_dask, args=(notes, "notes", cluster.address))
        build.start()
        while not list(plan.folder.glob(".versions/0*/lock")):
            time.sleep(0.001)
        cluster.signal_workers(signal.SIGSTOP)  # until the other has come and was looked at
        worker_with_other_code(cluster)
        while not any("left out" in record.message for record in caplog.records):
            time.sleep(0.01)
        cluster.signal_workers(signal.SIGCONT)
        build.join()
    finally:
        cluster.close()
    (told,) = [record for record in caplog.records if "left out" in record.message]
    assert told.code == "W508" and "builder 99 there" in told.message
    assert read_meta("cache/pretrain/notes/meta.json")["partitions"]["total"] == 4


@pytest.mark.slow
@needs_dask
def test_a_worker_with_other_code_is_refused_before_anything_is_built(notes, tmp_path):
    cluster = Cluster(tmp_path)
    try:
        cluster.worker()
        worker_with_other_code(cluster)
        cluster.wait_for(2)
        with pytest.raises(CacheError, match=r"worker tcp://.*builder 99 there") as refused:
            build_on_dask(notes, "notes", cluster.address)
    finally:
        cluster.close()
    assert refused.value.code == "E511"


@pytest.mark.slow
@needs_dask
def test_a_cluster_of_processes_here_is_one_flag(notes, tmp_path, tiny_model_path):
    command = [sys.executable, "-W", "error", "-m", "niels_gpt.cache.cli", "build", "--pretrain", str(notes.pretrain)]
    command += ["--partitions", "4", "--tokenizer", str(tiny_model_path)]
    for more in (["--cache-dir", "here"], ["--dask", "local:2"]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "distributed" not in done.stderr and "partition 3 of 4" in done.stderr
    assert files_of(tmp_path / "cache" / KEY) == files_of(tmp_path / "here" / KEY)


@pytest.mark.slow
@needs_dask
def test_without_a_scheduler_a_build_ends(notes, monkeypatch):
    be_patient(monkeypatch, seconds=0.5)
    with pytest.raises(CacheError, match="no scheduler") as refused:
        build_on_dask(notes, "notes", "tcp://127.0.0.1:1")
    assert refused.value.code == "E513"
