"""Fixtures of all tests: a tiny real tokenizer trained once per run from the text below, a mirror, and a hub.

No test reaches the internet or the user's cache: before any library is imported, HF_ENDPOINT becomes a port on this
machine, where only the fixture `loopback_hub` listens, and HF_HOME a temporary folder. Subprocesses inherit both.
Temporary folders are in memory if there is room: builds wait for fsync more than for anything else.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest
from support import TESTS
from support.attacks import serving
from support.buckets import waiting
from support.loopback_hub import LoopbackHub
from support.s3_server import S3Server
from support.small_builds import batches_of, quick_folder
from support.tiny_texts import TINY_TEXTS

from niels_gpt.data.files import mirrors
from niels_gpt.hub import retries
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer

if TYPE_CHECKING:
    import dagster as dg

os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
)  # of subprocesses
# What is compiled is kept, also where PYTHONDONTWRITEBYTECODE is set: hundreds of processes import the package, and
# pytest's rewriting of the tests takes half of their import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Of torch's threads, one: with several, small tensors take three times the CPU time. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
HUB_PORT = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(20_000, 30_000) + _WORKER
"""Below the ports of outgoing connections, so that none of them takes it between two tests. Drawn once for a run; its
workers have consecutive ones."""
HUB_HOME = tempfile.mkdtemp(prefix="hub-")
atexit.register(shutil.rmtree, HUB_HOME, ignore_errors=True)
_SHM, _SHM_BYTES = "/dev/shm", 4 << 30  # a run takes less than 2 GiB
_has_room = os.access(_SHM, os.W_OK) and shutil.disk_usage(_SHM).free >= _SHM_BYTES
if _has_room and "PYTEST_DEBUG_TEMPROOT" not in os.environ:  # workers inherit it
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="niels_gpt-tests-", dir=_SHM)
    atexit.register(shutil.rmtree, os.environ["PYTEST_DEBUG_TEMPROOT"], ignore_errors=True)
os.environ.update(
    COLUMNS="100",  # of the terminal, for the widths of help and tables
    HF_ENDPOINT=f"http://127.0.0.1:{HUB_PORT}",
    HF_HOME=HUB_HOME,
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_UPDATE_DOWNLOAD_COUNTS="0",  # datasets would ask a host on the internet, for three seconds each time
)
for _name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
    os.environ.pop(_name, None)
hypothesis.settings.register_profile("suite", deadline=None)  # how long an example takes is the machine's
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session")
def _running_s3():
    for package, extra in {"s3fs": "s3", "moto": "buckets"}.items():
        pytest.importorskip(package, reason=f"the extra {extra} is not installed")
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_server(_running_s3, monkeypatch):
    """The S3 server without faults, at which the libraries of this process look; short waits before attempts."""
    _running_s3.clear_faults()
    for name, value in _running_s3.environment().items():
        monkeypatch.setenv(name, value)
    with waiting(0.01):
        yield _running_s3


@pytest.fixture(scope="module")
def one_thread():
    """Keep torch to one thread in a module: several are slower on small tensors, and change the sums."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory):
    """The spm.model of a lossless tokenizer of 400 ids, its meta beside it."""
    trained = train_tokenizer(TINY_TEXTS, vocab_size=400, trained_on="the tests' tiny texts")
    return write_tokenizer(trained, tmp_path_factory.mktemp("tiny_tokenizer")).model_path


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_path):
    """The tokenizer at `tiny_model_path`."""
    return load_tokenizer(tiny_model_path)


@pytest.fixture(scope="session")
def mirror(tmp_path_factory):
    """A mirror folder: a copy of the bundled sample."""
    folder = tmp_path_factory.mktemp("mirror") / "m"
    shutil.copytree(mirrors.SAMPLE_DIR, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder


@pytest.fixture(scope="session")
def attack_server():
    """The process in which probes meet attacks; see attacks.py."""
    with serving() as server:
        yield server


@pytest.fixture
def settings(mirror, tiny_model_path, tmp_path):
    """Settings that build from the mirror with the tiny tokenizer."""
    return Settings(source_root=str(mirror), cache_dir=str(tmp_path / "cache"), tokenizer=str(tiny_model_path))


@pytest.fixture(autouse=True)
def no_user_defined_sources(tmp_path, monkeypatch):
    """Run each test in its temporary folder: the checkout may have a sources.toml."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """A real Dagster instance: sqlite, in a folder in memory, for its hundreds of commits."""
    from support.dagster_runs import dagster_instance

    with quick_folder() as home, dagster_instance(home) as instance:
        yield instance


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    """Keep the retries of the hub and of its libraries, but with hardly any waiting."""
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.001)
    if "datasets" in sys.modules:
        # Up to 5 s at the end of a shuffled parquet stream, for an Arrow bug that does not occur here.
        monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)


@pytest.fixture
def loopback_hub(monkeypatch):
    """A hub at HF_ENDPOINT, empty at first; see loopback_hub.py."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)
    assert os.environ["HF_ENDPOINT"] == huggingface_hub.constants.ENDPOINT, "a library was imported before conftest.py"
    with LoopbackHub(port=HUB_PORT) as running:
        yield running


@pytest.fixture
def folder():
    """An empty folder in memory, for tests that build hundreds of times."""
    with quick_folder() as path:
        yield path


@pytest.fixture
def small_batches(monkeypatch):
    """Batches of five items, so that a small build has many."""
    batches_of(monkeypatch)
