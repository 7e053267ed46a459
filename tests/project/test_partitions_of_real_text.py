"""Eight partitions of real text, by hand with kills, by Dask and by Dagster: one cache, byte for byte.

Run: NIELS_GPT_TEST_DATA=MIRROR pytest -m real_text tests/project/test_partitions_of_real_text.py
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support import LONG, ROOT

from niels_gpt.cache import PretrainTokenStreamDataset
from niels_gpt.cache.meta import read_meta
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import Settings

pytestmark = [
    pytest.mark.real_text,
    pytest.mark.skipif(
        "NIELS_GPT_TEST_DATA" not in os.environ, reason="NIELS_GPT_TEST_DATA names no mirror of real text (README)"
    ),
]

NAME, PARTITIONS, KILLS = "fineweb_edu", 8, 20 if LONG else 6
FLAGS = {"tokenizer_max_bytes": 2_000_000, "vocab_size": 4_000, "shard_bytes": 1 << 20, "threads": 1}
JOURNALS = "pretrain/.versions/*/partitions-*/.versions/*/building-*.journal"
CLI = [sys.executable, "-m", "niels_gpt.cache.cli"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of caches that has the tokenizer alone."""
    folder = tmp_path_factory.mktemp("base") / "cache"
    ensure_tokenizer(of(folder))
    return folder


def of(cache_dir):
    """Return the settings of eight partitions in a folder of caches."""
    root = os.environ["NIELS_GPT_TEST_DATA"]
    return Settings(source_root=root, cache_dir=str(cache_dir), partitions=PARTITIONS, engine="reference", **FLAGS)


def copied(base, folder):
    """Return another folder of caches, with the same tokenizer."""
    shutil.copytree(base, folder / "cache", symlinks=True)
    return folder / "cache"


def flags(settings):
    named = {name: getattr(settings, name) for name in ("source_root", "cache_dir", "partitions", "engine", *FLAGS)}
    return [word for name, value in named.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def difference(one, other):
    """Return what `diff -r` says of two folders of caches, without .runs, which has times.

    A build that was killed while it tried the file system leaves .probe-HEX: a later one removes it after ten minutes.
    """
    command = ["diff", "-r", "-x", ".runs", "-x", ".probe-*", str(one), str(other)]
    how = {"capture_output": True, "text": True, "check": False}
    return str(subprocess.run(command, **how).stdout)


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """The folder of caches in which one process has built all partitions."""
    folder = copied(base, tmp_path_factory.mktemp("whole"))
    build_token_cache(of(folder), NAME)
    return folder


def test_by_hand_in_random_order_with_kills(base, whole, tmp_path):
    folder, draw = copied(base, tmp_path), random.Random(0)
    settings, kills, longest, made = of(folder), 0, 3.0, set[int]()
    while len(made) < PARTITIONS:
        number = draw.choice([each for each in range(PARTITIONS) if each not in made])
        command = [*CLI, "build", NAME, "--partition", str(number), *flags(settings)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if kills < KILLS:
            time.sleep(draw.uniform(0.2, longest))
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
            if process.returncode == 0:  # it was faster: the next ones are killed sooner
                made.add(number)
                longest *= 0.7
        else:
            assert process.wait() == 0
            made.add(number)
    assert kills == KILLS
    sealed = subprocess.run(
        [*CLI, "seal", NAME, *flags(settings)], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert sealed.returncode == 0, sealed.stderr
    assert difference(whole, folder) == ""


@contextmanager
def dask_cluster(folder):
    """Yield the address of a scheduler with two workers, and the workers' processes."""
    distributed = pytest.importorskip("distributed", reason="the extra dask is not installed")
    workers = []
    with distributed.LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0", scheduler_port=0) as cluster:
        for _ in range(2):
            workers.append(dask_worker(cluster.scheduler_address, folder))
        yield cluster.scheduler_address, workers
        for process in workers:
            process.kill()
            process.wait()


def dask_worker(address, folder):
    command = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--nthreads", "1", "--no-nanny"]
    how = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, "--no-dashboard", "--local-directory", str(folder)], **how)


def test_by_dask_with_a_worker_that_is_killed_twice(base, whole, tmp_path):
    folder = copied(base, tmp_path)
    with dask_cluster(tmp_path) as (address, workers):
        command = [*CLI, "build", NAME, "--dask", address, *flags(of(folder))]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(2):
            journals = set(folder.glob(JOURNALS))
            while process.poll() is None and not set(folder.glob(JOURNALS)) - journals:
                time.sleep(0.02)
            assert process.poll() is None
            workers[0].kill()
            workers[0].wait()
            workers[0] = dask_worker(address, tmp_path)
        assert process.wait() == 0
    assert difference(whole, folder) == ""


def test_by_dagsters_executor_with_a_step_that_is_killed(base, whole, tmp_path):
    folder = copied(base, tmp_path)
    shutil.copyfile(ROOT / "dagster.yaml", tmp_path / "dagster.yaml")
    names = ("source_root", "cache_dir", "partitions", "engine", *FLAGS)
    given = {f"NIELS_GPT_{name.upper()}": str(getattr(of(folder), name)) for name in names}
    given |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [str(Path(sys.executable).with_name("dagster")), "asset", "materialize", "-m", "pipelines.definitions"]
    how = {"cwd": tmp_path, "env": {**os.environ, **given}, "stdout": subprocess.DEVNULL}
    run = subprocess.Popen([*command, "--select", f"pretrain/{NAME}"], stderr=subprocess.DEVNULL, **how)
    while not (locks := list(folder.glob(JOURNALS + "/../lock"))) or not (text := locks[0].read_text()):
        assert run.poll() is None
        time.sleep(0.02)
    pid = int(text.split("pid ")[1])
    assert pid != run.pid
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 0, "the step is tried again, by its own policy"
    assert difference(whole / "pretrain", folder / "pretrain") == ""


def test_other_numbers_of_partitions_in_between_change_nothing(base, whole, tmp_path):
    folder = copied(base, tmp_path)
    metas = [build_token_cache(replace(of(folder), partitions=number), NAME).meta for number in (8, 3, 1, 8)]
    assert metas[0] == metas[3] == read_meta(str(whole / "pretrain" / NAME / "meta.json"))
    assert len({meta["content_sha256"] for meta in metas}) == 3
    assert "partitions" not in metas[2]


def documents(cache):
    """Return how often a cache has each document: its split and its tokens."""
    found = Counter[tuple[str, bytes]]()
    for split in (split for split, shards in read_meta(str(cache / "meta.json"))["shards"].items() if shards):
        dataset = PretrainTokenStreamDataset(cache / split, T=64, device="cpu")
        found.update((split, dataset[number].ids.tobytes()) for number in range(len(dataset)))
    return found


@pytest.mark.parametrize("name", [NAME, "wikitext", "roam"])
def test_eight_partitions_hold_the_documents_of_one_in_the_same_splits(base, name, tmp_path):
    folder = copied(base, tmp_path)
    found = []
    for number in (1, PARTITIONS):
        outcome = build_token_cache(replace(of(folder), partitions=number), name)
        assert outcome.meta["budget_reached"] in ({"train": False, "val": False}, {"train": None, "val": None})
        found.append((documents(outcome.path), outcome.meta["dropped"], outcome.meta["source"]["counters"]))
    assert found[0] == found[1]


def test_of_eight_books_none_is_moved_to_val(base, tmp_path, caplog):
    folder = copied(base, tmp_path)
    one, eight = (build_token_cache(replace(of(folder), partitions=number), "gutenberg").meta for number in (1, 8))
    assert (one["docs"], eight["docs"]) == ({"train": 7, "val": 1}, {"train": 8, "val": 0})
    assert sum(one["totals"].values()) == sum(eight["totals"].values())
    assert "W308" in {getattr(record, "code", None) for record in caplog.records}
