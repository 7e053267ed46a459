"""Equal input gives equal bytes: in any folder, process, hash seed and number of threads."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from niels_gpt.cache import build_pretrain_cache, build_sft_cache
from niels_gpt.tokenizer import load_tokenizer

TEXTS = [f"Note {number}: " + "the water rises " * (number % 5 + 1) for number in range(60)]
CHATS = [
    [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": "One more. " * (number % 4)}]
    for number in range(40)
]


def digests(folder):
    """Return the sha256 of every file of a cache, by its path in the cache."""
    files = sorted(path for path in folder.resolve().rglob("*") if path.is_file())
    return {str(path.relative_to(folder.resolve())): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def build_both(folder, tokenizer, seed=42, num_threads=1):
    """Build a small cache of each kind in a folder and return the sha256 of every file."""
    how = {"tokenizer": tokenizer, "seed": seed, "num_threads": num_threads}
    sizes = {"max_train_tokens": 600, "max_val_tokens": 100, "shard_bytes": 256}
    build_pretrain_cache(iter(TEXTS), str(folder / "pretrain" / "notes"), shuffle_buffer=16, **sizes, **how)
    build_sft_cache(iter(CHATS), str(folder / "sft" / "chats"), val_frac=0.1, **how)
    return {
        f"{kind}/{name}": digest
        for kind, cache in (("pretrain", "notes"), ("sft", "chats"))
        for name, digest in digests(folder / kind / cache).items()
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_tokenizer):
    return build_both(tmp_path_factory.mktemp("first"), tiny_tokenizer)


def test_the_caches_have_the_files_of_the_spec(built):
    expected = {f"sft/{split}_{name}" for split in ("train", "val") for name in ("tokens.bin", "idx.npy")}
    expected |= {"pretrain/train/shard_00000.bin", "pretrain/train/shard_00004.bin", "pretrain/val/shard_00000.bin"}
    assert expected | {"pretrain/meta.json", "sft/meta.json"} <= built.keys()


def test_another_folder_two_threads_and_a_second_build_in_the_same_place_give_the_same_bytes(
    built, tmp_path, tiny_tokenizer
):
    build_both(tmp_path, tiny_tokenizer, seed=7)
    assert build_both(tmp_path, tiny_tokenizer) == built
    assert build_both(tmp_path / "elsewhere", tiny_tokenizer, num_threads=2) == built


def test_another_process_with_another_hash_seed_gives_the_same_bytes(built, tmp_path, tiny_model_path):
    command = [sys.executable, __file__, str(tmp_path), str(tiny_model_path)]
    environment = {**os.environ, "PYTHONHASHSEED": "0" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == built


def test_another_seed_gives_another_order_and_another_split(built, tmp_path, tiny_tokenizer):
    other = build_both(tmp_path, tiny_tokenizer, seed=43)
    changed = {name for name in built if other.get(name) != built[name]}
    assert changed >= {"pretrain/train/shard_00000.bin", "sft/train_tokens.bin", "sft/val_tokens.bin"}


def test_another_order_of_the_stream_gives_other_bytes(tmp_path, tiny_tokenizer):
    for name, chats in (("forward", CHATS), ("backward", CHATS[::-1])):
        build_sft_cache(chats, str(tmp_path / name), tokenizer=tiny_tokenizer, val_frac=0.1, seed=42)
    assert digests(tmp_path / "forward") != digests(tmp_path / "backward")


def test_the_global_random_state_neither_matters_nor_changes(built, tmp_path, tiny_tokenizer):
    before = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        inside = torch.get_rng_state()
        assert build_both(tmp_path, tiny_tokenizer) == built
        assert torch.equal(torch.get_rng_state(), inside)
    assert torch.equal(torch.get_rng_state(), before)


if __name__ == "__main__":  # the other process of a test above
    print(json.dumps(build_both(Path(sys.argv[1]), load_tokenizer(sys.argv[2]))))
