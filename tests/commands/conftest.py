"""Caches of the bundled sample, built once; each test that looks into them has a copy."""

import shutil
from pathlib import Path

import pytest
from support.commands import niels_gpt


@pytest.fixture(scope="session")
def built(tmp_path_factory, tiny_model_path):
    """A cache folder that was built from the sample: four caches and the tokenizer."""
    folder = tmp_path_factory.mktemp("built") / "c"
    flags = ["--source-root", "sample", "--cache-dir", str(folder), "--tokenizer", str(tiny_model_path)]
    assert niels_gpt("build", "roam", "wikitext", "dolly15k", "oasst1", *flags).status == 0
    return folder


@pytest.fixture
def flags(tmp_path, tiny_model_path):
    """Flags that build the sample with the tiny tokenizer below tmp_path."""
    return ["--source-root", "sample", "--cache-dir", str(tmp_path / "c"), "--tokenizer", str(tiny_model_path)]


@pytest.fixture
def sample(built, tmp_path):
    """A copy of the four caches, where `flags` would build them."""
    return shutil.copytree(built, tmp_path / "c", symlinks=True) / "sample"


@pytest.fixture
def root(built, tmp_path):
    """A copy of three of them: tokenizer/, pretrain/roam and sft/oasst1."""
    folder = shutil.copytree(built / "sample", tmp_path / "cache", symlinks=True)
    for name in ("pretrain/wikitext", "sft/dolly15k"):
        (folder / name).unlink()
        shutil.rmtree((folder / name).parent / ".versions" / Path(name).name)
    return folder
