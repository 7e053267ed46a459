"""A cache says which document of its source each of its documents was, and a CRC-32 of each block of its files."""

import hashlib
import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import ByteTokenizer
from support.looking import blocks_of
from support.splits import IN_MEMORY, SPLITS, chat_key, stored

from niels_gpt.cache import build_pretrain_cache, build_sft_cache, read_meta
from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft

STRANGE = [
    "a/b.txt#7",
    "two\nlines",
    "cr\rlf\r\n",
    "back\\slash\\n",
    "naïve 漢字 🙂",
    "\x85\u2028\u2029",
    "tab\tnul\0",
    "",
]
"""Ids that would be more or fewer lines, or other text, if they were written as they are."""


def pretrain(path, documents, **arguments):
    common = {"max_train_tokens": 90, "max_val_tokens": 10, "shard_bytes": 64, "shuffle_buffer": None}
    return build_pretrain(documents, path, tokenizer=ByteTokenizer(), seed=0, **{**common, **arguments})


def sft(path, examples, val_frac=0.25):
    return build_sft(examples, path, tokenizer=ByteTokenizer(), val_frac=val_frac, seed=0)


def chat(text):
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]


def ids_of(cache):
    """Read the ids with nothing but the format's own rule, and check what meta.json says of their files."""
    meta = json.loads((cache / "meta.json").read_bytes())
    found = {}
    for split in SPLITS:
        record = meta["ids"][split]
        raw = (cache / f"index/{split}_ids.txt").read_bytes()
        lines = raw.split(b"\n")
        assert lines.pop() == b"" and raw.isascii()
        assert record == {
            "name": f"index/{split}_ids.txt",
            "entries": len(lines),
            "bytes": len(raw),
            "sha256": hashlib.sha256(raw).hexdigest(),
        }
        found[split] = [line.decode("unicode_escape") for line in lines]
    return found


def test_an_id_with_line_ends_backslashes_or_other_letters_is_one_line_of_ascii(tmp_path):
    pretrain(tmp_path / "p", [("train", "x", name) for name in STRANGE], max_train_tokens=None, max_val_tokens=None)
    sft(tmp_path / "s", [(name, chat("x")) for name in STRANGE if name], val_frac=0)
    raw = (tmp_path / "p" / "index/train_ids.txt").read_bytes()
    assert raw.startswith(
        b"a/b.txt#7\ntwo\\nlines\ncr\\rlf\\r\\n\nback\\\\slash\\\\n\nna\\xefve \\u6f22\\u5b57 \\U0001f642\n"
    )
    assert ids_of(tmp_path / "p") == {"train": STRANGE, "val": []}
    assert ids_of(tmp_path / "s") == {"train": STRANGE[:-1], "val": []}


@settings(derandomize=True, max_examples=25)
@given(names=st.lists(st.text(alphabet=st.characters(exclude_categories=[])), min_size=1, max_size=6))
def test_every_id_comes_back_lone_surrogates_included(names):
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        documents = [("train", "x", name) for name in names]
        pretrain(Path(folder, "c"), documents, max_train_tokens=None, max_val_tokens=None)
        assert ids_of(Path(folder, "c"))["train"] == names


def test_what_has_no_id_has_its_number_in_the_stream_whatever_is_dropped(tmp_path):
    documents = [("train", "a"), ("train", ""), ("val", "b"), ("train", "c<|eot|>"), ("train", "d", None)]
    pretrain(tmp_path / "p", documents, max_train_tokens=None, max_val_tokens=None)
    assert ids_of(tmp_path / "p") == {"train": ["0", "4"], "val": ["2"]}
    fixed = {"tokenizer": ByteTokenizer(), "shard_bytes": 64, "seed": 0, "shuffle_buffer": None}
    texts = ["aa", "", "bb", "cc", "dd"]
    build_pretrain_cache(texts, tmp_path / "spec", max_train_tokens=5, max_val_tokens=2, **fixed)
    assert ids_of(tmp_path / "spec") == {"train": ["0", "2", "3"], "val": ["4"]}  # "cc" is cut, and is there


def test_numbers_are_counted_before_the_shuffle(tmp_path):
    texts = [f"text {number:03d}" for number in range(300)]
    for threads in (0, 2):
        cache = tmp_path / f"c{threads}"
        documents = [(None, text) for text in texts]
        pretrain(cache, documents, max_train_tokens=1000, max_val_tokens=100, shuffle_buffer=64, num_threads=threads)
        numbers, found = ids_of(cache), {split: stored(cache, split) for split in SPLITS}
        order = [int(number) for number in numbers["train"]]
        assert order != sorted(order) and numbers["val"]
        for split in SPLITS:  # the last one of a split may be cut
            assert [texts[int(number)] for number in numbers[split]][:-1] == found[split][:-1]


def test_chats_have_their_id_or_their_number_in_the_split_that_they_went_to(tmp_path):
    examples = [("first", chat("a")), chat("b"), ("bad", [{"role": "user"}]), (None, chat("c")), chat("d")]
    meta = sft(tmp_path / "c", examples, val_frac=0.3)
    texts = {"first": "a", "1": "b", "3": "c", "4": "d"}
    in_val = [name for name, text in texts.items() if chat_key(chat(text), 0) < 0.3 * 2**64]
    expected = {"train": [name for name in texts if name not in in_val], "val": in_val}
    assert ids_of(tmp_path / "c") == expected and meta["dropped"] == {"malformed": 1}
    build_sft_cache([chat("a"), chat("b")], tmp_path / "spec", tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    assert ids_of(tmp_path / "spec")["train"] == ["0", "1"]


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_lines_stay_with_documents_over_batches(tmp_path, kind):
    texts = ["" if number % 11 == 3 else f"text {number}" for number in range(100)]
    cache = tmp_path / "c"
    if kind == "pretrain":
        shares = ("val" if number % 3 == 0 else "train" for number in range(100))
        documents = [(split, text, f"id of {text}") for split, text in zip(shares, texts, strict=True)]
        with blocks_of(batch_items=7):
            pretrain(cache, documents, max_train_tokens=None, max_val_tokens=None)
        found = {split: stored(cache, split) for split in SPLITS}
    else:
        with blocks_of(batch_items=7):
            sft(cache, [(f"id of {text}", chat(text)) for text in texts])
        found = {}
        for split in SPLITS:
            starts, ids = np.load(cache / f"{split}_idx.npy"), np.fromfile(cache / f"{split}_tokens.bin", "<u2")
            parts = [ids[a:b] for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
            found[split] = [ByteTokenizer().decode(part[: part.tolist().index(4)]) for part in parts]
    assert ids_of(cache) == {split: [f"id of {text}" for text in found[split]] for split in SPLITS}
    assert sum(map(len, found.values())) == (91 if kind == "pretrain" else 100) and all(found.values())


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_crc32_bin_has_a_number_for_each_block_of_each_file_in_metas_order(tmp_path, kind):
    texts = [f"{number} " * 2500 for number in range(40)]
    if kind == "pretrain":
        documents = [("train" if number % 3 else "val", text) for number, text in enumerate(texts)]
        # 200,000 bytes are three whole blocks and a short one
        pretrain(tmp_path / "c", documents, shard_bytes=200_000, max_train_tokens=None, max_val_tokens=None)
    else:
        sft(tmp_path / "c", [chat(text) for text in texts])
    meta = read_meta(str(tmp_path / "c" / "meta.json"))
    names = [record["name"] for split in SPLITS for record in meta["shards"][split]]
    names += [meta[group][split]["name"] for group in ("index", "ids") for split in SPLITS]
    expected = []
    for name in names:
        content = (tmp_path / "c" / name).read_bytes()
        starts = range(0, len(content), 65536)
        expected += [zlib.crc32(content[start : start + 65536]) for start in starts]
    raw = (tmp_path / "c" / "index/crc32.bin").read_bytes()
    assert np.frombuffer(raw, "<u4").tolist() == expected
    assert len(expected) > len(names) + 4
    sha256 = hashlib.sha256(raw).hexdigest()
    assert meta["checksums"] == {"name": "index/crc32.bin", "bytes": len(raw), "sha256": sha256, "block_bytes": 65536}


def test_an_empty_file_has_no_checksum_and_a_split_without_documents_no_line(tmp_path):
    pretrain(tmp_path / "c", [("train", "abc")], max_train_tokens=None, max_val_tokens=None)
    cache = tmp_path / "c"
    assert (cache / "index/val_ids.txt").read_bytes() == b"" and ids_of(cache)["val"] == []
    contents = [(cache / "train/shard_00000.bin").read_bytes()]
    contents += [(cache / f"index/{split}_docs.npy").read_bytes() for split in SPLITS]
    expected = b"".join(zlib.crc32(content).to_bytes(4, "little") for content in [*contents, b"0\n"])
    assert (cache / "index/crc32.bin").read_bytes() == expected
