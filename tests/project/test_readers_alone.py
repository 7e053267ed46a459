"""Caches are read, sampled and folded where nothing but numpy and torch is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support import ROOT
from support.power_loss import put
from support.small_caches import built_caches

PROGRAM = """
import sys
from pathlib import Path
import torch
from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset
from niels_gpt.prefix_tree.attention import dense_mask
from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.verify import verify_fold
from niels_gpt.sampling import EpochStream, MixtureStream, iter_eval

root = Path(sys.argv[1])
train, generator = root / "pretrain/notes/train", torch.Generator().manual_seed(0)
data = PretrainTokenStreamDataset(train, T=4, device="cpu")
x, y = data.get_batch(B=2, generator=generator)
assert x.shape == y.shape == (2, 4)
chats = SFTExampleDataset.open(root / "sft/chats", "train", T=8)
x, y, masked = chats.get_batch(B=2, generator=generator)
assert (masked != -100).sum() == 4
stream = EpochStream(train, T=3, global_batch_size=2, seed=0)
assert next(iter(MixtureStream([stream], weights=[1], seed=0))).x.shape == (2, 3)
assert sum(int((y != -100).sum()) for _, y in iter_eval(train, B=2, T=4)) == 29
assert data[0].ids.size == 30 and chats[0].mask.sum() == 2 and "ids" not in repr(chats) and repr(data[0])
try:
    chats[0].text
except ImportError as error:
    print(error)
forest = PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]])
assert forest.num_tokens == 4 and int(dense_mask(forest).sum()) == 9 and LossEdges.from_forest(forest)
print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2:])))
"""
MISSING = ["click", "dagster", "datasets", "pyarrow", "rich", "safetensors", "sentencepiece", "tqdm", "xxhash"]


def requirements(*names: str) -> dict[str, metadata.Distribution]:
    """Return distributions and all that they require, as they are installed here."""
    found: dict[str, metadata.Distribution] = {}
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another system
            continue
        texts = [text for text in found[name].requires or () if "extra ==" not in text]
        left += [part for text in texts if (part := re.split(r"[^\w.-]", text)[0]) and part not in found]
    return found


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages that has numpy and torch with what they require, as links, and nothing else."""
    site = tmp_path / "site"
    site.mkdir()
    for found in requirements("numpy", "torch").values():
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(found.locate_file(name))))
    return site


def test_readers_samplers_and_folds_need_only_numpy_and_torch(tmp_path: Path, site: Path) -> None:
    put(built_caches(), tmp_path / "cache")
    command = [sys.executable, "-S", "-c", PROGRAM, tmp_path / "cache", *MISSING]  # -S: no site-packages
    environment = {"PYTHONPATH": f"{site}:{ROOT}", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    message, loaded = done.stdout.splitlines()
    assert "pip install sentencepiece" in message and loaded == "[]"
