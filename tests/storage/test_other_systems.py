"""Away from Linux: without its maps, its flock, /proc and the names that os lacks there, caches have equal bytes.

The programs below run in processes of their own, where these are taken away before niels_gpt is imported.
"""

import errno
import fcntl
import json
import os
import subprocess
import sys

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
from niels_gpt.storage.locks import apply_lock_setting

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
if sys.argv[1] == "no flock":
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
def test_small_caches_have_equal_bytes_and_batches(tmp_path):
    here = output("import sys, torch" + SMALL, tmp_path / "here")
    there = output(ELSEWHERE + SMALL, "flock", tmp_path / "there")
    assert json.loads(there) == json.loads(here)
    assert tree_of(tmp_path / "there") == tree_of(tmp_path / "here") == built_caches()


@pytest.mark.slow
def test_commands_build_verify_and_clean_up_equal_caches(tmp_path):
    run = "\nimport runpy\nrunpy.run_module('niels_gpt.cache.cli', run_name='__main__', alter_sys=True)"
    for place, prelude, lock, *first in (("here", "", "auto"), ("there", ELSEWHERE, "lease", "no flock")):
        caches = tmp_path / place
        for source in ("roam", "oasst1"):
            small = ["--source-root", "sample", "--vocab-size", "600", "--cache-dir", caches, "--lock", lock]
            output(prelude + run, *first, "build", source, *small)
        output(prelude + run, *first, "verify", caches / "sample/sft/oasst1")
        output(prelude + run, *first, "gc", caches / "sample")
    here, there = (
        {name: data for name, data in tree_of(tmp_path / place).items() if "/.runs/" not in name}
        for place in ("here", "there")
    )
    locks = {name for name in here if name.endswith("/lock")}
    assert len(locks) == 3 and here.keys() ^ there.keys() == locks | {"sample/.locks.json"}
    both = here.keys() & there.keys()
    assert len(both) > 20 and all(here[name] == there[name] for name in both)


class NoFlock:
    """Take flock away in this process."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(fcntl, "flock", self.refused)

    def refused(self, *_):
        """Refuse as a system without flock."""
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


def test_without_flock_a_builder_names_leases_which_work(tmp_path, monkeypatch):
    NoFlock(monkeypatch)
    path = tmp_path / "lock"
    with pytest.raises(OSError, match=r"this file system has no flock\. .*--lock lease") as error:
        locked_file(path).__enter__()
    assert error.value.errno == errno.ENOTSUP
    apply_lock_setting(tmp_path, "lease")
    with locked_file(path):
        for attempt in (lambda: look_at_lock(path), lambda: locked_file(path).__enter__()):
            with refused("E503", f"pid {os.getpid()}"):
                attempt()
    look_at_lock(path)


def test_without_flock_gc_keeps_versions_and_removes_unfinished_builds(tmp_path, monkeypatch):
    NoFlock(monkeypatch)
    apply_lock_setting(tmp_path, "lease")
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
