"""Caches are read, sampled and folded where nothing but numpy and torch is installed."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.eagle3_native import write_native
from support.power_loss import put
from support.small_caches import built_caches
from support.small_eagle3 import write_cache

from niels_gpt.eagle3.format.weights import write_weights

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
"""
EAGLE3 = """
import sys
from pathlib import Path
from niels_gpt.eagle3.cache import CachedEagle3Dataset, build_cached_eagle3_dataloader, read_target_embeddings

try:
    data = CachedEagle3Dataset(sys.argv[1])
except ImportError as error:
    sys.exit(str(error))
batches = build_cached_eagle3_dataloader(sys.argv[1], 2, shuffle=False)
print(len(data), repr(data).count("3 samples"), [len(batch["input_ids"]) for batch in batches])
print(data[0]["target_probs"].sum(-1).round().tolist(), list(read_target_embeddings(sys.argv[1]).shape))
native = Path(sys.argv[1]).with_name("native")
print(CachedEagle3Dataset(native)[0]["target_probs"].sum(-1).round()[:4].tolist())
"""


def requirements(*names):
    """Return distributions and all that they require, as they are installed here."""
    found = {}
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


def link(site, *names):
    """Link distributions, with what they require, into a folder of packages."""
    for found in requirements(*names).values():
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(found.locate_file(name))))


@pytest.fixture
def site(tmp_path):
    """A folder of packages that has numpy and torch with what they require, as links, and nothing else."""
    site = tmp_path / "site"
    site.mkdir()
    link(site, "numpy", "torch")
    return site


def run(site, program, folder):
    """Run a program with the packages of a folder alone."""
    environment = {"PYTHONPATH": f"{site}:{ROOT}", "HOME": str(site.parent)}
    command = [sys.executable, "-S", "-c", program, folder]  # -S: no site-packages
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_readers_samplers_and_folds_need_only_numpy_and_torch(tmp_path, site):
    put(built_caches(), tmp_path / "cache")
    done = run(site, PROGRAM, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "pip install sentencepiece" in done.stdout


@pytest.mark.slow
def test_the_eagle3_reader_needs_safetensors_too_and_says_so(tmp_path, site):
    write_cache(tmp_path / "cache", samples=3, shard_size=2, topk=3)
    write_native(tmp_path / "native", [[0, 1, 0, 1]])
    shapes = {"embeddings": (50, 4), "lm_head": (50, 4), "norm": (4,)}
    write_weights(tmp_path / "native", {name: torch.ones(shape) for name, shape in shapes.items()})
    without = run(site, EAGLE3, tmp_path / "cache")
    assert "pip install safetensors" in without.stderr and "Traceback" not in without.stderr
    link(site, "safetensors")
    done = run(site, EAGLE3, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 1 [2, 1]\n[1.0, 1.0, 1.0, 1.0] [20, 2]\n[1.0, 0.0, 1.0, 0.0]\n"


def test_the_commands_say_in_one_line_that_their_packages_are_missing(tmp_path, site):
    done = run(site, "from niels_gpt.commands import start; raise SystemExit(start())", tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1)
    assert "error[E901]: No module named 'click'. " in done.stderr and "pip install niels-gpt" in done.stderr
