"""Every file of a cache, byte by byte, for input small enough to encode on paper: "A" is byte 0x41, so id 0x4b."""

import hashlib
import io
import json
import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import ByteTokenizer

from niels_gpt.cache import build_pretrain_cache, build_sft_cache
from niels_gpt.cache.build_pretrain import BUDGET_RULE
from niels_gpt.cache.build_sft import SPLIT_RULE
from niels_gpt.cache.formats import npy_header
from niels_gpt.special_tokens import SPECIAL_TOKENS

# Magic, version 1.0, a header of 0x76 = 118 bytes: 10 + 118 = 128. `shape` follows, then spaces and a line end.
NPY_BEGINS = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<i8', 'fortran_order': False, 'shape': "


def npy(count, offsets):
    """Spell an int64 .npy file out."""
    return (NPY_BEGINS + f"({count},), }}".encode()).ljust(127) + b"\n" + offsets


def crc32s(*contents):
    """Spell index/crc32.bin out for files that are one block each."""
    return b"".join(struct.pack("<I", zlib.crc32(content)) for content in contents)


PRETRAIN_FILES = {
    # sha256("0\nA") begins with 0x8193145edae7e5be, sha256("0\nbc") with 0xa82a2d756a285b1f. Neither of these is below
    # 2 / (3 + 2) of 2**64, so the smaller one, "A", goes to val, and "bc" to train. Each ends with eot = 4.
    "val/shard_00000.bin": b"\x4b\x00\x04\x00",
    # shard_bytes=4, so two ids a shard; the last shard has the rest.
    "train/shard_00000.bin": b"\x6c\x00\x6d\x00",
    "train/shard_00001.bin": b"\x04\x00",
    # The start of each document, and the end of the last one.
    "index/train_docs.npy": npy(2, b"\0\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0"),
    "index/val_docs.npy": npy(2, b"\0\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"),
    # Documents without an id have their number in the stream.
    "index/train_ids.txt": b"1\n",
    "index/val_ids.txt": b"0\n",
}
PRETRAIN_FILES["index/crc32.bin"] = crc32s(
    b"\x6c\x00\x6d\x00",  # shards of train
    b"\x04\x00",
    b"\x4b\x00\x04\x00",  # shards of val
    PRETRAIN_FILES["index/train_docs.npy"],
    PRETRAIN_FILES["index/val_docs.npy"],
    b"1\n",
    b"0\n",
)

SFT_FILES = {
    # Their keys are 0.55, 0.59 and 0.86 of 2**64, none below 0.1: the smallest goes to val, the first chat.
    # sys A eot usr A eot asst eot, then usr C eot asst D eot
    "train_tokens.bin": b"\x01\0\x4b\0\x04\0\x02\0\x4b\0\x04\0\x03\0\x04\0\x02\0\x4d\0\x04\0\x03\0\x4e\0\x04\0",
    # usr A eot asst B eot
    "val_tokens.bin": b"\x02\0\x4b\0\x04\0\x03\0\x4c\0\x04\0",
    "train_idx.npy": npy(2, b"\0\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0"),
    "val_idx.npy": npy(1, b"\0\0\0\0\0\0\0\0"),
    "index/train_ids.txt": b"1\n2\n",
    "index/val_ids.txt": b"0\n",
}
_IN_ORDER = ("train_tokens.bin", "val_tokens.bin", "train_idx.npy", "val_idx.npy")
SFT_FILES["index/crc32.bin"] = crc32s(*(SFT_FILES[name] for name in _IN_ORDER), b"1\n2\n", b"0\n")

COMMON_META = {
    "format_version": 1,
    "builder_version": 3,
    "built": True,
    "dataset_config": "tiny",
    "dataset_name": "by hand",
    "streaming": False,
    "source": {"counters": {}},
    "seed": 0,
    "token_dtype": "uint16-le",
    "tokenizer_sha256": None,
    "vocab_size": 300,
    "special_token_ids": {"sys": 1, "usr": 2, "asst": 3, "eot": 4},
    "on_special": "drop",
    "dropped": {},
    "duplicates": {"train": 0, "val": 0},
    "lossless": True,
    "unknown_ids": 0,
}


def files_of(cache):
    """Return the bytes of every file of a cache but its meta.json."""
    root = cache.resolve()
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    del files["meta.json"]
    return files


def entry(files, name, **count):
    """Return what meta.json says of a file; count: tokens, entries or block_bytes."""
    return {"name": name, "bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest(), **count}


def content(files):
    """Return the sha256 of what `sha256sum` prints for the files."""
    lines = [f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def crc32_of_the_rest(meta):
    """Return the CRC-32 of a meta.json whose `meta_crc32` is replaced by zeros."""
    raw, places = re.subn(rb'(?<=\n  "meta_crc32": ")[0-9a-f]{8}(?=",\n)', b"00000000", meta.read_bytes())
    assert places == 1
    return f"{zlib.crc32(raw):08x}"


@pytest.fixture(scope="module")
def pretrain(tmp_path_factory):
    cache = tmp_path_factory.mktemp("pretrain") / "cache"
    budget = {"max_train_tokens": 3, "max_val_tokens": 2, "shard_bytes": 4, "document_end": "eot"}
    fixed = {"tokenizer": ByteTokenizer(), "seed": 0, "shuffle_buffer": None}
    build_pretrain_cache(["A", "bc"], str(cache), source_name="by hand", source_config="tiny", **budget, **fixed)
    return cache


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    cache = tmp_path_factory.mktemp("sft") / "cache"
    chats = [
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}],
        [{"role": role, "content": text} for role, text in (("system", "A"), ("user", "A"), ("assistant", ""))],
        [{"role": "user", "content": "C"}, {"role": "assistant", "content": "D"}],
    ]
    build_sft_cache(
        chats, str(cache), tokenizer=ByteTokenizer(), val_frac=0.1, seed=0, source_name="by hand", source_config="tiny"
    )
    return cache


def test_a_pretrain_cache_is_these_bytes(pretrain):
    assert files_of(pretrain) == PRETRAIN_FILES


def test_a_pretrain_meta_json_says_this(pretrain):
    files = PRETRAIN_FILES
    assert json.loads((pretrain / "meta.json").read_bytes()) == {
        **COMMON_META,
        "kind": "pretrain",
        "noticed": {},
        "compared": {"pieces": 2, "finds_one_in": 1},
        "roundtrip": {"texts": 2, "differ": 0},
        "split_rule": BUDGET_RULE,
        "shard_bytes": 4,
        "max_train_tokens": 3,
        "max_val_tokens": 2,
        "val_frac": None,
        "budget_reached": {"train": True, "val": True},
        "document_end": {"id": 4, "token": SPECIAL_TOKENS[3]},
        "shuffle": {"algorithm": None, "buffer": 0},
        "docs": {"train": 1, "val": 1},
        "documents_read": 2,
        "utf8_bytes": {"train": 2, "val": 1},
        "cut": {"documents": 0, "tokens": 0},
        "totals": {"train_tokens": 3, "val_tokens": 2},
        "train_tokens": 3,
        "val_tokens": 2,
        "shards": {
            "train": [entry(files, "train/shard_00000.bin", tokens=2), entry(files, "train/shard_00001.bin", tokens=1)],
            "val": [entry(files, "val/shard_00000.bin", tokens=2)],
        },
        "index": {
            "train": entry(files, "index/train_docs.npy", entries=2),
            "val": entry(files, "index/val_docs.npy", entries=2),
        },
        "ids": {
            "train": entry(files, "index/train_ids.txt", entries=1),
            "val": entry(files, "index/val_ids.txt", entries=1),
        },
        "checksums": entry(files, "index/crc32.bin", block_bytes=65536),
        "content_sha256": content(files),
        "meta_crc32": crc32_of_the_rest(pretrain / "meta.json"),
    }


def test_an_sft_cache_is_these_bytes(sft):
    assert files_of(sft) == SFT_FILES


def test_an_sft_meta_json_says_this(sft):
    files = SFT_FILES
    assert json.loads((sft / "meta.json").read_bytes()) == {
        **COMMON_META,
        "builder_version": 5,
        "kind": "sft",
        "noticed": {"empty_replies": 1},
        "first_noticed": {"empty_replies": "1"},
        "roundtrip": {"texts": 6, "differ": 0},
        "split_rule": SPLIT_RULE,
        "val_frac": 0.1,
        "examples_read": 3,
        "supervised_tokens": {"train": 3, "val": 2},
        "utf8_bytes": {"train": 4, "val": 2},
        "totals": {"train_examples": 2, "train_tokens": 14, "val_examples": 1, "val_tokens": 6},
        "train_examples": 2,
        "train_tokens": 14,
        "val_examples": 1,
        "val_tokens": 6,
        "shards": {
            "train": [entry(files, "train_tokens.bin", tokens=14)],
            "val": [entry(files, "val_tokens.bin", tokens=6)],
        },
        "index": {"train": entry(files, "train_idx.npy", entries=2), "val": entry(files, "val_idx.npy", entries=1)},
        "ids": {
            "train": entry(files, "index/train_ids.txt", entries=2),
            "val": entry(files, "index/val_ids.txt", entries=1),
        },
        "checksums": entry(files, "index/crc32.bin", block_bytes=65536),
        "content_sha256": content(files),
        "meta_crc32": crc32_of_the_rest(sft / "meta.json"),
    }


@settings(derandomize=True, max_examples=50)
@given(count=st.one_of(st.sampled_from([0, 1, 1000, 10**9]), st.integers(0, 2**60)))
def test_the_npy_header_is_numpys_for_any_count(count):
    written = io.BytesIO()
    np.lib.format.write_array_header_1_0(written, {"descr": "<i8", "fortran_order": False, "shape": (count,)})
    assert npy_header(count) == written.getvalue()
