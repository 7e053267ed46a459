"""Away from Linux: without its maps, its flock, /proc and the names that os lacks there, caches have equal bytes.

The programs below run in processes of their own, where these are taken away before niels_gpt is imported.
"""

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from support import ROOT
from support.byte_tokenizer import build
from support.errors import refused
from support.power_loss import tree_of
from support.small_builds import locked_file, look_at_lock
from support.small_caches import built_caches

from niels_gpt.cache import PretrainTokenStreamDataset
from niels_gpt.recipes.gc import collect

ELSEWHERE = """
import concurrent.futures.process, ctypes, errno, fcntl, multiprocessing.spawn, os, platform, runpy, sys
import datasets, pyarrow.parquet, sentencepiece, torch.utils.data, tqdm, xxhash
platform.system()  # libraries ask once

def refused(*arguments, **options):
    raise OSError(errno.ENOTSUP, "not offered here")

def audit(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(errno.ENOENT, "no such file", arguments[0])

for name in ("sched_getaffinity", "SEEK_HOLE", "SEEK_DATA", "posix_fadvise", "posix_fallocate", "copy_file_range"):
    delattr(os, name)
if sys.argv[1] == "record locks":
    fcntl.flock = refused
ctypes.CDLL = refused
sys.addaudithook(audit)
sys.platform = "darwin"
multiprocessing.set_start_method("spawn")  # as there: what was imported above has Linux's
sys.argv = sys.argv[1:]
"""
SMALL = """
import json
import logging
from pathlib import Path
import numpy as np
from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset
from niels_gpt.sampling import EpochStream
from niels_gpt.storage.filemaps import HAS_FILE_MAPS
from support.small_caches import build_caches

root = Path(sys.argv[1])
assert HAS_FILE_MAPS is (sys.platform == "linux")
build_caches(root)
train = root / "pretrain/notes/train"
data, generator = PretrainTokenStreamDataset(train, T=4, device="cpu"), torch.Generator().manual_seed(0)
chats = SFTExampleDataset.open(root / "sft/chats", "train", T=8)
stream = EpochStream(train, T=3, global_batch_size=2, seed=0, epochs=1)
in_worker = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=1)
batches = [*data.get_batch(B=9, generator=generator), *chats.get_batch(B=5, generator=generator)]
batches += [tensor for batch in in_worker for tensor in batch]
print(json.dumps([[batch.tolist() for batch in batches], data[0].ids.tolist(), chats[-1].mask.tolist()]))
"""


def output(program, *arguments):
    """Run a program in a process of its own; returns what it printed."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("locks", ["flock", "record locks"])
def test_small_caches_have_equal_bytes_and_batches(tmp_path, locks):
    here = output("import sys, torch" + SMALL, tmp_path / "here")
    there = output(ELSEWHERE + SMALL, locks, tmp_path / "there")
    assert json.loads(there) == json.loads(here)
    assert tree_of(tmp_path / "there") == tree_of(tmp_path / "here") == built_caches()


@pytest.mark.slow
def test_commands_build_verify_and_clean_up_equal_caches(tmp_path):
    run = "\nimport runpy\nrunpy.run_module('niels_gpt.cache.cli', run_name='__main__', alter_sys=True)"
    for place, prelude, *first in (("here", ""), ("there", ELSEWHERE, "record locks")):
        caches = tmp_path / place
        for source in ("roam", "oasst1"):
            small = ["--source-root", "sample", "--vocab-size", "600", "--cache-dir", caches]
            output(prelude + run, *first, "build", source, *small)
        output(prelude + run, *first, "verify", caches / "sample/sft/oasst1")
        output(prelude + run, *first, "gc", caches / "sample")
    here, there = (
        {name: content for name, content in tree_of(tmp_path / place).items() if "/.runs/" not in name}
        for place in ("here", "there")
    )
    assert there == here and len(here) > 20


class NoFlock:
    """Take flock away in this process."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(fcntl, "flock", self.refused)

    def refused(self, *_):
        """Refuse as a system without flock."""
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


HOLD = """
import sys, pathlib
from niels_gpt.storage.locks import file_lock
with file_lock(pathlib.Path(sys.argv[2]), "c", "is being built", wait=False):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_record_lock_keeps_another_process_out_until_it_ends(tmp_path, monkeypatch):
    NoFlock(monkeypatch)
    path = tmp_path / "lock"
    command = [sys.executable, "-c", ELSEWHERE.replace("sys.argv = sys.argv[1:]", "") + HOLD, "record locks", path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        for attempt in (lambda: look_at_lock(path), lambda: locked_file(path).__enter__()):
            with refused("E503", f"pid {holder.pid}"):
                attempt()
        holder.kill()
    with locked_file(path):
        assert str(os.getpid()) in path.read_text()


def test_a_record_lock_is_one_within_a_process_and_survives_a_look(tmp_path, monkeypatch):
    NoFlock(monkeypatch)
    path, order = tmp_path / "lock", []

    def second():
        with locked_file(path, wait=True):
            order.append("second")

    with locked_file(path):
        for attempt in (lambda: look_at_lock(path), lambda: locked_file(path).__enter__()):
            with refused("E503", f"pid {os.getpid()}"):
                attempt()
        waiting = threading.Thread(target=second)
        waiting.start()
        other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        tried = subprocess.run([sys.executable, "-c", other, path], capture_output=True, text=True, check=False)
        assert "BlockingIOError" in tried.stderr, "looking at the lock has dropped it"
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
    look_at_lock(path)


def test_two_threads_that_wait_get_a_record_lock_one_after_the_other(tmp_path, monkeypatch, caplog):
    NoFlock(monkeypatch)
    path = tmp_path / "lock"
    caplog.set_level(logging.INFO, "niels_gpt")
    inside, most, errors = [], [], []

    def work(name):
        with locked_file(path, wait=True):
            inside.append(name)
            other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
            tried = subprocess.run([sys.executable, "-c", other, path], capture_output=True, text=True, check=False)
            errors.append(tried.stderr)
            most.append(len(inside))
            inside.remove(name)

    command = [sys.executable, "-c", ELSEWHERE.replace("sys.argv = sys.argv[1:]", "") + HOLD, "record locks", path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
        for thread in threads:
            thread.start()
        while len(caplog.messages) < 2:
            time.sleep(0.01)
        time.sleep(0.2)  # some more looks, which are not logged
        holder.kill()
    for thread in threads:
        thread.join()
    assert most == [1, 1] and all("BlockingIOError" in error for error in errors)
    said = caplog.messages
    assert len(said) == 2 and all(f"pid {holder.pid}; waiting" in line for line in said)


def test_without_flock_gc_keeps_versions_and_removes_unfinished_builds(tmp_path, monkeypatch):
    NoFlock(monkeypatch)
    first = tmp_path / ".versions" / "c" / build(tmp_path / "c", ["old text, " * 9])["content_sha256"][:12]
    data = PretrainTokenStreamDataset(first / "train", T=4, device="cpu")
    for text in ("a second", "a third"):
        build(tmp_path / "c", [text])
    unfinished = first.with_name("building-0123456789ab")
    unfinished.mkdir()
    for dry_run in (True, False):
        lines = "\n".join(collect(tmp_path, dry_run=dry_run))
        assert "this file system has no locks, so nobody can know whether a reader has it open" in lines
        assert f"When no reader runs: rm -r {first}" in lines and "left alone" not in lines
        assert first.is_dir() and unfinished.is_dir() == dry_run
    x, _ = data.get_batch(B=2, generator=torch.Generator().manual_seed(0))
    assert x.shape == (2, 4)
