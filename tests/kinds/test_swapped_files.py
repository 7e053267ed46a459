"""Files of two versions, swapped one by one and in pairs: verify passes a cache if its readers do.

A quick look finds what readers find when they open every file; a deep look finds what they find when they read all of
it with check="blocks". Files that no reader reads, such as source ids, are judged by verify alone.
"""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from support import eagle3_runs, small_builds
from support.byte_tokenizer import ByteTokenizer
from support.disk import META_NAME
from support.errors import refused

from niels_gpt.cache import CacheError, PretrainTokenStreamDataset
from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.cache.meta import read_meta
from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.cache.sft_split import SFTSplit
from niels_gpt.eagle3.cache import CachedEagle3Dataset
from niels_gpt.eagle3.native import NativeEagle3Dataset
from niels_gpt.exchange.exporting import export_cache
from niels_gpt.kinds.verify import find_damage
from niels_gpt.prefix_tree.rollouts.build import build_rollouts
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.prefix_tree.rollouts.records import Rollout, RolloutGroup
from niels_gpt.storage.meta_json import file_records

TOKENS = 70_000  # of a document: more than two blocks of 64 KiB
NOT_READ = {"pretrain": ("_ids.txt",), "sft": ("_ids.txt",), "rollouts": ()}
OF_TARGET = ("embeddings.safetensors", "weights.safetensors", "embeddings.json", "weights.json", "plan.json")
"""Ends of the names of files that the reader of a kind does not read; of EAGLE-3: what the head of a draft and
`NativeView` read."""


def pretrain(path, letter):
    texts = [("train", letter * TOKENS, f"{letter}{number}") for number in range(2)] + [("val", letter * 999, letter)]
    how = {"tokenizer": ByteTokenizer(), "shard_bytes": 2 * TOKENS, "seed": 0, "shuffle_buffer": None}
    build_pretrain(texts, path, max_train_tokens=2 * TOKENS, max_val_tokens=999, **how)


def sft(path, letter):
    chats = [[{"role": "user", "content": letter * TOKENS}, {"role": "assistant", "content": letter * 99}]] * 2
    build_sft(chats, path, tokenizer=ByteTokenizer(), val_frac=0, seed=0)


def rollouts(path, letter):
    ids = [1, *[ord(letter)] * TOKENS]
    groups = [RolloutGroup(f"{letter}{each}", [Rollout(ids, reward=float(ord(letter)))]) for each in range(3)]
    build_rollouts(groups, path, vocab_size=300, val_frac=0)


def eagle3(form):
    def make(path, letter):
        seed, ids = ord(letter), eagle3_runs.manifest()["selected_token_ids"]
        samples = eagle3_runs.samples_of(6)
        chosen = {**form, "selected_token_ids": ids if letter == "x" else ids[::-1]}  # in a manifest of equal size
        load = lambda device: eagle3_runs.load(device, seed=seed)  # noqa: E731
        eagle3_runs.run(path, given=eagle3_runs.plan(samples, **chosen), load=load)

    return make


MAKERS = {
    "pretrain": pretrain,
    "sft": sft,
    "rollouts": rollouts,
    "version 1": eagle3({}),
    "version 2": eagle3(eagle3_runs.TOPK),
    "native": eagle3(eagle3_runs.NATIVE),
}


def open_all(kind, folder, check="ends"):
    """Open every file as the readers of a kind do; returns what reads all of it."""
    if kind == "pretrain":
        splits = [PretrainSplit(folder, split=split, check=check) for split in ("train", "val")]
        for split in splits:
            split.open_all()
        return lambda: [read_windows(folder, split, check) for split in splits]
    if kind == "sft":
        splits = [SFTSplit(folder, "train", check=check)]
        return lambda: [split.read(*split.bounds(torch.arange(len(split)).numpy())) for split in splits]
    if kind == "rollouts":
        data = RolloutDataset(folder, check=check)
        return lambda: [data.read(number) for number in range(len(data))]
    data = (NativeEagle3Dataset if kind == "native" else CachedEagle3Dataset)(folder, check=check)
    for number in range(len(data)) if check == "ends" else ():
        data[number]  # maps its shard
    return lambda: [data[number] for number in range(len(data))]


def read_windows(folder, split, check):
    data = PretrainTokenStreamDataset(folder, split=split.split, T=99, device="cpu", check=check)
    for shard, length in enumerate(split.lengths.tolist()):
        for start in range(0, length - 100, 25_000):
            split.rows(torch.tensor([shard]).numpy(), torch.tensor([start]).numpy(), 100)
        split.rows(torch.tensor([shard]).numpy(), torch.tensor([length - 100]).numpy(), 100)
    data.get_batch(B=2, generator=torch.Generator())


def is_refused(kind, folder, check):
    """Whether readers refuse a cache, which they open, and with check="blocks" read."""
    try:
        read = open_all(kind, folder, check)
        if check == "blocks":
            read()
    except (CacheError, FileNotFoundError):
        return True
    return False


@pytest.fixture(scope="module", params=MAKERS)
def pair(request):
    """The name of a kind, and two versions of it of equal sizes and different content."""
    with small_builds.quick_folder() as folder:
        for letter in "xy":
            MAKERS[request.param](folder / letter, letter)
        yield request.param, *((folder / letter).resolve() for letter in "xy")


def test_verify_passes_what_readers_take_of_two_mixed_versions(pair, tmp_path):
    kind, one, other = pair
    names = [record["name"] for record in file_records(read_meta(str(one / META_NAME)))]
    differ = [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()]
    assert len(differ) > 1
    assert not find_damage(one, deep=True) and not find_damage(other, deep=True)
    verdicts = []
    for count, swapped in enumerate([*itertools.combinations(differ, 1), *itertools.combinations(differ, 2)]):
        folder = tmp_path / f"mixed{count}"
        shutil.copytree(one, folder)
        for name in swapped:
            (folder / name).chmod(0o644)
            (folder / name).write_bytes((other / name).read_bytes())
        refused = [is_refused(kind, folder, "ends"), is_refused(kind, folder, "blocks")]
        found = [bool(find_damage(folder, deep=deep)) for deep in (False, True)]
        is_read = not all(name.endswith(NOT_READ.get(kind, OF_TARGET)) for name in swapped)
        assert found[1], (swapped, "a deep look finds every swapped file")
        assert refused[1] == is_read, (swapped, "readers of every block refuse what they read")
        assert found[0] or not refused[0], (swapped, "what readers refuse at opening, a quick look finds")
        assert refused[0] or not found[0] or not is_read or Path(swapped[0]).suffix == ".json", (swapped, found)
        verdicts.append((swapped, *found))
        shutil.rmtree(folder)
    assert len(verdicts) == len(differ) * (len(differ) + 1) // 2


@pytest.mark.parametrize("format", ["megatron", "hf"])
def test_an_export_compares_what_it_links_and_reads(tmp_path, format):
    for letter in "xy":
        pretrain(tmp_path / letter, letter)
    one, other = (tmp_path / letter for letter in "xy")
    assert export_cache(one, format, tmp_path / "good").files > 0
    shard = one.resolve() / "train" / "shard_00001.bin"
    shard.chmod(0o644)
    shard.write_bytes((other / "train" / "shard_00001.bin").read_bytes())
    with refused("E201", "shard_00001.bin", "bytes 0 to 65536"):
        export_cache(one, format, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_compares_every_block_that_it_reads(tmp_path):
    pretrain(tmp_path / "x", "x")
    shard = (tmp_path / "x").resolve() / "train" / "shard_00000.bin"
    content = bytearray(shard.read_bytes())
    content[70_000] ^= 1  # neither in the first block nor in the last
    shard.chmod(0o644)
    shard.write_bytes(content)
    with refused("E201", "shard_00000.bin", "bytes 65536 to 131072"):
        export_cache(tmp_path / "x", "hf", tmp_path / "out")
