"""Exported caches in the hands of the libraries that read such files: tokens, borders and masks, to the last bit.

Each library lies in a folder below the one that NIELS_GPT_PEERS names: .ci/run makes them; elsewhere these tests are
left out, but for nanoGPT's and modded-nanogpt's ways of reading, which are a few lines written here.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from support.byte_tokenizer import ByteTokenizer, WideByteTokenizer
from support.exchange_peers import library
from support.peer_automodel import Peer
from support.peer_exchange import Tool

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.exchange.exporting import export_cache

WIDTHS = {"uint16": 2, "uint32": 4}
SHARD_TOKENS, BLOCK, UNEVEN = 48, 16, 20
TEXTS = {
    "train": ["a" * 9, "b", "c" * 60, "d" * 3, "e" * 18, "f" * 50, "g" * 15, "h" * 7, "i" * 31, "j" * 20],
    "val": ["k" * 5, "l" * 50, "m" * 6],
}
"""With ends, multiples of BLOCK tokens. `c`, `f`, `i` and `l` lie in two shards each, and a shard ends behind `e`."""
CHATS = [
    [{"role": "user", "content": "q" * number}, {"role": "assistant", "content": "a" * (12 - number)}]
    for number in range(1, 9)
]
"""Of 16 tokens each: 2, q, 4, 3, a, 4."""


class Cache:
    """A small cache, and its documents as they were given."""

    def __init__(self, path, dtype, kind):
        self.path, self.dtype, self.width = path, dtype, WIDTHS[dtype]
        self.tokenizer = WideByteTokenizer() if dtype == "uint32" else ByteTokenizer()
        self.end = self.tokenizer.special_token_ids()["eot"]
        self.documents = {
            split: [[*self.tokenizer.encode(text), self.end] for text in texts] for split, texts in TEXTS.items()
        }
        self.loss = []
        if kind == "pretrain":
            self._build_pretrain()
        else:
            self._build_sft()

    def _build_pretrain(self):
        build_pretrain(
            ((split, text) for split, texts in TEXTS.items() for text in texts),
            self.path,
            tokenizer=self.tokenizer,
            max_train_tokens=None,
            max_val_tokens=None,
            shard_bytes=SHARD_TOKENS * self.width,
            seed=0,
            shuffle_buffer=None,
            val_frac=0.2,
            document_end="eot",
            num_threads=0,
        )

    def _build_sft(self):
        build_sft(CHATS, self.path, tokenizer=self.tokenizer, val_frac=0, seed=0, num_threads=0)
        special = self.tokenizer.special_token_ids()
        self.documents = {"train": [], "val": []}
        for asked, reply in CHATS:
            question, answer = (self.tokenizer.encode(turn["content"]) for turn in (asked, reply))
            ids = [special["usr"], *question, special["eot"], special["asst"], *answer, special["eot"]]
            self.documents["train"].append(ids)
            self.loss += [*[False] * (len(question) + 3), *[True] * (len(answer) + 1)]

    def stream(self, split):
        """All ids of a split."""
        return [id for ids in self.documents[split] for id in ids]

    def shards(self, split):
        """The ids of each shard."""
        ids = self.stream(split)
        return [ids[at : at + SHARD_TOKENS] for at in range(0, len(ids), SHARD_TOKENS)]

    def ends(self, split):
        """Where each document, or the piece of it that is in the shard, ends: by shard, in tokens of the shard."""
        bounds, first, found = np.cumsum([len(ids) for ids in self.documents[split]]).tolist(), 0, []
        for shard in self.shards(split):
            last = first + len(shard)
            found.append([*(bound - first for bound in bounds if first < bound < last), len(shard)])
            first = last
        return found

    def whole(self, split, block):
        """What a reader of blocks sees: of each shard as many whole blocks as are in it."""
        return [id for ids in self.shards(split) for id in ids[: len(ids) // block * block]]

    def export(self, name, out):
        """Export it."""
        export_cache(self.path, name, out)
        return out


def sha256(ids):
    """The sha256 of a stream of ids as int64."""
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()


@pytest.fixture(params=list(WIDTHS))
def cache(request, tmp_path):
    return Cache(tmp_path / "pretrain" / "texts", request.param, "pretrain")


def running(name):
    """Make a fixture of a library."""

    @pytest.fixture(scope="module", name=name)
    def fixture():
        with library(name) as tool:
            yield tool

    return fixture


megatron, litdata, datatrove, olmo, hf = map(running, ("megatron", "litdata", "datatrove", "olmo", "hf"))
SPLITS = pytest.mark.parametrize("split", TEXTS)


@SPLITS
def test_nanogpt_reads_an_export(cache: Cache, split: str, tmp_path: Path) -> None:
    folder = cache.export("nanogpt", tmp_path / "out")
    meta = pickle.loads((folder / "meta.pkl").read_bytes())  # as its train.py does
    assert meta == {"vocab_size": cache.tokenizer.vocab_size}
    data = np.memmap(folder / f"{split}.bin", dtype=cache.dtype, mode="r")  # uint16 in train.py
    assert sha256(data) == sha256(cache.stream(split))
    starts = torch.arange(len(data) - BLOCK)
    x = torch.stack([torch.from_numpy((data[start : start + BLOCK]).astype(np.int64)) for start in starts])
    y = torch.stack([torch.from_numpy((data[start + 1 : start + 1 + BLOCK]).astype(np.int64)) for start in starts])
    assert torch.equal(x[1:], y[:-1]) and [*x[:, 0].tolist(), *y[-1].tolist()] == cache.stream(split)


@SPLITS
def test_modded_nanogpt_reads_an_export_of_16_bits_and_refuses_32(cache: Cache, split: str, tmp_path: Path) -> None:
    files = sorted(cache.export("modded-nanogpt", tmp_path / "out").glob(f"{split}_*.bin"))
    for file, ids in zip(files, cache.shards(split), strict=True):
        header = torch.from_file(str(file), False, 256, dtype=torch.int32)
        assert (header[0] == 20240520) == (cache.width == 2) and header[1] == 1 and header[2] == len(ids)
        if cache.width == 2:
            tokens = torch.empty(int(header[2]), dtype=torch.uint16)
            with file.open("rb", buffering=0) as opened:
                opened.seek(256 * 4)
                assert opened.readinto(tokens.numpy()) == 2 * len(ids)
            assert tokens.tolist() == ids


@pytest.fixture(scope="module")
def automodel():
    peers = os.environ.get("NIELS_GPT_PEERS")
    if peers is None:
        pytest.skip("set NIELS_GPT_PEERS to a folder with nemo-automodel as 0.7.0, see .ci/run")
    peer = Peer(Path(peers) / "0.7.0")
    yield peer
    peer.close()


@SPLITS
def test_automodel_reads_an_export_of_modded_nanogpt(automodel: Peer, cache: Cache, split: str, tmp_path: Path) -> None:
    files = sorted(cache.export("modded-nanogpt", tmp_path / "out").glob(f"{split}_*.bin"))
    continues = False
    for file, (ids, ends) in zip(files, both(cache, split), strict=True):
        seen = automodel.call("", "token_file", str(file), BLOCK - 1, None)
        assert (seen["ids"], seen["dtype"]) == (ids, f"torch.{cache.dtype}")
        assert seen["rows"] == [ids[at : at + BLOCK - 1] for at in range(0, len(ids), BLOCK)]  # the labels end a block
        starts = ends[:-1] if continues else [0, *ends[:-1]]
        assert seen["index"] == [1024 + cache.width * start for start in starts]
        continues = ids[-1] != cache.end


def test_automodel_takes_the_index_for_counts_of_tokens_and_without_it_looks_for_the_id(automodel, tmp_path):
    cache = Cache(tmp_path / "pretrain" / "texts", "uint16", "pretrain")
    file = str(cache.export("modded-nanogpt", tmp_path / "out") / "train_000000.bin")
    asked = ("", "token_file", file, 8, cache.end)
    assert automodel.call(*asked)["rows"] == []  # every place is beyond the 48 tokens
    Path(file).with_suffix(".bos.idx").unlink()
    rows = automodel.call(*asked)["rows"]
    assert rows == [cache.stream("train")[9:17]]  # from the first end on; the next one in this file is at 11


@SPLITS
def test_megatron_reads_an_export(megatron: Tool, cache: Cache, split: str, tmp_path: Path) -> None:
    files = sorted(cache.export("megatron", tmp_path / "out").glob(f"{split}_*.bin"))
    seen = megatron.call("read_megatron", [str(file.with_suffix("")) for file in files])
    assert [each["ids"].tolist() for each in seen] == cache.shards(split)
    assert [each["ends"] for each in seen] == cache.ends(split)
    assert {each["dtype"] for each in seen} == {"uint16" if cache.width == 2 else "int32"}
    assert sha256(np.concatenate([each["ids"] for each in seen])) == sha256(cache.stream(split))


@SPLITS
def test_datatrove_reads_an_export(datatrove: Tool, cache: Cache, split: str, tmp_path: Path) -> None:
    folder = cache.export("datatrove", tmp_path / "out") / split
    for window in (BLOCK, UNEVEN):
        seen = datatrove.call("read_datatrove", str(folder), window, cache.width)
        assert seen["ids"].tolist() == cache.whole(split, window)
        assert seen["positions"] == positions(cache, split, window)
    assert sha256(datatrove.call("read_datatrove", str(folder), BLOCK, cache.width)["ids"]) == sha256(
        cache.stream(split)
    )


def positions(cache, split, window):
    """The place of each token in its document, counted from the beginning of the window: datatrove's rule."""
    found = []
    for ids, ends in zip(cache.shards(split), cache.ends(split), strict=True):
        for place in range(len(ids) // window * window):
            found.append(0 if place % window == 0 or place in ends else found[-1] + 1)
    return found


@SPLITS
def test_olmo_core_reads_an_export(olmo: Tool, cache: Cache, split: str, tmp_path: Path) -> None:
    files = [str(file) for file in sorted(cache.export("olmo", tmp_path / "out").glob(f"{split}_*.npy"))]
    read = (cache.dtype, cache.end, cache.tokenizer.vocab_size)
    for length in (BLOCK, UNEVEN):
        seen = olmo.call("read_olmo", files, None, length, *read)
        assert seen["ids"].tolist() == cache.whole(split, length)
    assert [[end for _, end in spans] for spans in seen["documents"]] == cache.ends(split)
    assert [[start for start, _ in spans] for spans in seen["documents"]] == [
        [0, *ends[:-1]] for ends in cache.ends(split)
    ]
    # By the id it loses the piece that ends a file without ending a document.
    ended = [[end for end in ends if ids[end - 1] == cache.end] for ids, ends in both(cache, split)]
    assert [[end for _, end in spans] for spans in seen["by_id"]] == ended
    assert sha256(olmo.call("read_olmo", files, None, BLOCK, *read)["ids"]) == sha256(cache.stream(split))


def both(cache, split):
    """The ids and the ends of each shard."""
    return zip(cache.shards(split), cache.ends(split), strict=True)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_olmo_core_reads_the_masks_of_chats(olmo, dtype, tmp_path):
    cache = Cache(tmp_path / "sft" / "chats", dtype, "sft")
    folder = cache.export("olmo", tmp_path / "out")
    files, masks = [str(folder / "train_00000.npy")], [str(folder / "label_mask" / "train_00000.npy")]
    seen = olmo.call("read_olmo", files, masks, BLOCK, dtype, cache.end, cache.tokenizer.vocab_size)
    assert seen["ids"].tolist() == cache.stream("train") and seen["labels"] == cache.loss
    assert seen["documents"] == [[(at, at + BLOCK) for at in range(0, 8 * BLOCK, BLOCK)]]


@SPLITS
def test_litdata_reads_an_export(litdata: Tool, cache: Cache, split: str, tmp_path: Path) -> None:
    folder = str(cache.export("litdata", tmp_path / "out") / split)
    for block in (BLOCK, UNEVEN):
        seen = litdata.call("read_litdata", folder, block)
        assert seen["ids"].tolist() == cache.whole(split, block)
    assert (seen["items"], seen["tokens"]) == (cache.ends(split), [len(ids) for ids in cache.shards(split)])
    assert seen["dtype"] == ("torch.uint16" if cache.width == 2 else "torch.int32")
    assert sha256(litdata.call("read_litdata", folder, BLOCK)["ids"]) == sha256(cache.stream(split))


@SPLITS
def test_datasets_reads_an_export(hf: Tool, cache: Cache, split: str, tmp_path: Path) -> None:
    folder = cache.export("hf", tmp_path / "out")
    rows = hf.call("read_hf", str(folder), {"train": "train", "val": "validation"}[split])
    assert [row["input_ids"] for row in rows] == cache.documents[split]
    assert [row["position_ids"] for row in rows] == [[*range(len(ids))] for ids in cache.documents[split]]
    assert sha256([id for row in rows for id in row["input_ids"]]) == sha256(cache.stream(split))


@pytest.mark.parametrize("dtype", WIDTHS)
def test_datasets_reads_the_labels_of_chats(hf, dtype, tmp_path):
    cache = Cache(tmp_path / "sft" / "chats", dtype, "sft")
    rows = hf.call("read_hf", str(cache.export("hf", tmp_path / "out")), "train")
    assert [row["input_ids"] for row in rows] == cache.documents["train"]
    ids, labels = cache.stream("train"), [label for row in rows for label in row["labels"]]
    assert labels == [id if has_loss else -100 for id, has_loss in zip(ids, cache.loss, strict=True)]
