"""What a process imports to read a cache: no builder, no tokenizer's library, and torch only for a batch."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import small_builds

_ROOT = Path(__file__).resolve().parents[2]
MOST_MODULES = 26


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    for name in ("pretrain", "sft", "templated", "rollouts"):
        small_builds.BUILDERS[name](folder / name)
    return folder


def imported(code, folder):
    """Return the names of the modules that a fresh process has after it ran `code` in a folder."""
    script = f"import sys; sys.path.insert(0, {str(_ROOT)!r})\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_process_that_reads_a_pretrain_cache_imports_few_modules_and_no_builder(caches):
    code = """
import torch
from niels_gpt.cache import PretrainTokenStreamDataset
dataset = PretrainTokenStreamDataset("pretrain/train", T=8, device="cpu")
dataset.get_batch(B=2, generator=torch.Generator())
repr(dataset), dataset.fingerprint(), dataset[0].ids
"""
    own = {name for name in imported(code, caches) if name.split(".")[0] == "niels_gpt"}
    assert "niels_gpt.cache.pretrain_dataset" in own
    assert not {name for name in own if name.startswith("niels_gpt.engine")}
    assert len(own) <= MOST_MODULES, sorted(own)


@pytest.mark.parametrize(
    "code",
    [
        'from niels_gpt.cache import PretrainTokenStreamDataset as P; P("pretrain/train", T=8, device="cpu")',
        'from niels_gpt.cache.pretrain_dataset import PretrainSplit; PretrainSplit("pretrain/train").stream(0, 9)',
        'from niels_gpt.cache.sft_split import SFTSplit; SFTSplit("sft", "train").starts',
        'from niels_gpt.cache.sft_split import SFTSplit; SFTSplit("templated", "val").starts',
    ],
)
def test_a_split_is_opened_and_read_without_torch(caches, code):
    assert not {"torch", "niels_gpt.engine", "sentencepiece", "tokenizers"} & imported(code, caches)
