"""One run over everything, which several test files look at: its metadata, and copies of its history and caches."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.dagster_runs import dagster_instance, metadata, run, typed_metadata
from support.small_builds import quick_folder

from niels_gpt.settings import Settings


@dataclass(frozen=True)
class FirstRun:
    """What a run over the tokenizer and its caches has left."""

    folder: Path
    """The caches in cache/, a copy in built/, and the home of the Dagster instance that knows of them in home/."""
    metadata: dict[str, dict[str, Any]]
    """Of each asset."""
    typed: dict[str, dict[str, dg.MetadataValue[Any]]]
    """The same, as Dagster keeps it."""


@pytest.fixture(scope="session")
def first_run(mirror, tiny_model_path):
    """A run over everything from the mirror with the tiny tokenizer."""
    with quick_folder() as folder, contextlib.chdir(folder):  # not in the checkout, where a sources.toml may be
        (folder / "home").mkdir()
        settings = Settings(source_root=str(mirror), cache_dir=str(folder / "cache"), tokenizer=str(tiny_model_path))
        with dagster_instance(folder / "home") as instance:
            result = run(instance, settings)
        shutil.copytree(folder / "cache", folder / "built", symlinks=True)
        yield FirstRun(folder, metadata(result), typed_metadata(result))


@pytest.fixture
def settings(settings, request):
    """The settings of a test; after a run over everything with the folder of that run, which code versions have."""
    if "after_a_run" not in request.fixturenames:
        return settings
    return replace(settings, cache_dir=str(request.getfixturevalue("first_run").folder / "cache"))


@pytest.fixture
def after_a_run(first_run: FirstRun, settings: Settings) -> Iterator[dg.DagsterInstance]:
    """A real Dagster instance after a run over everything with `settings`: a copy of its history, and its caches, which
    a test may change."""
    with (
        quick_folder() as folder,
        dagster_instance(shutil.copytree(first_run.folder / "home", folder / "home")) as instance,
    ):
        yield instance
    shutil.rmtree(settings.cache_dir)
    shutil.copytree(first_run.folder / "built", settings.cache_dir, symlinks=True)
