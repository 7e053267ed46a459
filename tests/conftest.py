"""What several test files share: a tiny real tokenizer trained once per run from the text below, a mirror, and a hub.

No test reaches the internet or the user's cache: before any library is imported, HF_ENDPOINT becomes a port on this
machine, where only the fixture `loopback_hub` listens, and HF_HOME a temporary folder. Subprocesses inherit both.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loopback_hub import LoopbackHub
from small_builds import quick_folder

from niels_gpt.data import hub_network, places
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import SentencePieceTokenizer, load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer

if TYPE_CHECKING:
    import dagster as dg

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
HUB_PORT = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(20_000, 30_000) + _WORKER
"""Below the ports that the system gives to outgoing connections, so that none of them takes it between two tests. Drawn
once for a run; its workers have one each, side by side."""
HUB_HOME = tempfile.mkdtemp(prefix="hub-")
atexit.register(shutil.rmtree, HUB_HOME, ignore_errors=True)
os.environ.update(
    HF_ENDPOINT=f"http://127.0.0.1:{HUB_PORT}",
    HF_HOME=HUB_HOME,
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_UPDATE_DOWNLOAD_COUNTS="0",  # datasets would ask a host on the internet, for three seconds each time
)
for _name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
    os.environ.pop(_name, None)

TINY_TEXTS = tuple(
    f"Page {page}. The {animal} walks to the {place} and finds {page * 3} {things}.\n\nWhy? It was {mood} that day;\n"
    f'\tso the {animal} said: "{things.title()} are good, and the {place} isn\'t far."\n'
    for page, (animal, place, things, mood) in enumerate(
        (animal, place, things, mood)
        for animal in ("heron", "otter", "badger", "lynx")
        for place in ("river", "mill", "orchard")
        for things in ("apples", "pebbles", "letters")
        for mood in ("windy", "quiet")
    )
)
"""72 short documents of plain English with quotation marks, digits, tabs and line ends."""


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Keep torch to one thread in a module: several cost more than they bring on small tensors, and sum otherwise."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The spm.model of a lossless tokenizer of 400 ids, its meta beside it."""
    trained = train_tokenizer(TINY_TEXTS, vocab_size=400, trained_on="the tests' tiny texts")
    return write_tokenizer(trained, tmp_path_factory.mktemp("tiny_tokenizer")).model_path


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_path: Path) -> SentencePieceTokenizer:
    """The tokenizer at `tiny_model_path`."""
    return load_tokenizer(tiny_model_path)


@pytest.fixture(scope="session")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mirror folder of one's own: the bundled sample, copied."""
    folder = tmp_path_factory.mktemp("mirror") / "m"
    shutil.copytree(places.SAMPLE_DIR, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder


@pytest.fixture
def settings(mirror: Path, tiny_model_path: Path, tmp_path: Path) -> Settings:
    """Settings that build from the mirror with the tiny tokenizer."""
    return Settings(source_root=str(mirror), cache_dir=str(tmp_path / "cache"), tokenizer_model=str(tiny_model_path))


@pytest.fixture(autouse=True)
def no_sources_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder of the test's own: whoever works on the project may have a sources.toml in the checkout."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """A real Dagster instance: sqlite, in a folder where its commits, hundreds in a run, cost little."""
    import dagster as dg

    with quick_folder() as home, dg.instance_for_test(temp_dir=str(home)) as instance:
        yield instance


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the hub as often as ever, but hardly at all; the libraries' own waits too, where they are loaded."""
    monkeypatch.setattr(hub_network, "FIRST_WAIT_S", 0.001)
    if "datasets" in sys.modules:
        # Up to 5 s at the end of a shuffled parquet stream, for an Arrow bug that is not met here.
        monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


@pytest.fixture
def loopback_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A hub at HF_ENDPOINT, empty at first; see loopback_hub.py."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
    assert os.environ["HF_ENDPOINT"] == huggingface_hub.constants.ENDPOINT, "a library was imported before conftest.py"
    with LoopbackHub(port=HUB_PORT) as running:
        yield running


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder where fsync costs little, for tests that build hundreds of times."""
    with quick_folder() as path:
        yield path
