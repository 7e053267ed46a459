"""Shards are one stream of ids cut at exact sizes, whatever the sizes of documents and batches."""

import hashlib
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refused
from support.small_builds import batches_of, documents, pretrain
from support.splits import IN_MEMORY

from niels_gpt.cache.build_pretrain import build_pretrain

DOCUMENTS = st.lists(st.tuples(st.sampled_from(["train", "val"]), st.lists(st.integers(0, 65531), max_size=12)))


class Spelled:
    """A tokenizer whose text is its ids: "7 65531" is [7, 65531]; the highest four are the sentinels."""

    vocab_size = 65536

    def special_token_ids(self):
        return {"sys": 65532, "usr": 65533, "asst": 65534, "eot": 65535}

    def encode(self, text):
        return [int(word) for word in text.split()]


def write_shards(root, documents, shard_bytes):
    """Build a cache of (split, ids) at root/c and return the records of its shards."""
    texts = [(split, " ".join(map(str, ids))) for split, ids in documents]
    whole = {"max_train_tokens": None, "max_val_tokens": None, "shuffle_buffer": None, "partial": True}
    fixed = {"tokenizer": Spelled(), "shard_bytes": shard_bytes, "seed": 0, "num_threads": 0}
    shards = build_pretrain(texts, root / "c", **fixed, **whole)["shards"]
    return shards


@settings(derandomize=True, max_examples=25)
@given(documents=DOCUMENTS, shard_bytes=st.integers(2, 40), batch_items=st.integers(1, 5))
def test_any_documents_and_sizes_give_full_shards(documents, shard_bytes, batch_items):
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name, pytest.MonkeyPatch.context() as patch:
        batches_of(patch, batch_items)
        shards = write_shards(Path(name), documents, shard_bytes)
        for split, records in shards.items():
            contents = [Path(name, "c", record["name"]).read_bytes() for record in records]
            assert len(list(Path(name, "c", split).iterdir())) == len(records)
            expected = [token for where, ids in documents if where == split for token in ids]
            assert np.frombuffer(b"".join(contents), dtype="<u2").tolist() == expected
            assert all(len(content) == shard_bytes // 2 * 2 for content in contents[:-1])
            assert all(0 < len(content) <= shard_bytes for content in contents)
            for number, (record, content) in enumerate(zip(records, contents, strict=True)):
                assert record == {
                    "name": f"{split}/shard_{number:05d}.bin",
                    "tokens": len(content) // 2,
                    "bytes": len(content),
                    "sha256": hashlib.sha256(content).hexdigest(),
                }


@pytest.mark.parametrize("shard_bytes", [1, 0, -4])
def test_a_shard_size_below_one_token_is_refused(tmp_path, shard_bytes):
    with refused("E102", f"shard_bytes={shard_bytes}", "at least 2"):
        write_shards(tmp_path, [("train", [1])], shard_bytes=shard_bytes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (("test", "abc", "1"), "document 1: its split is 'test', expected 'train', 'val' or None"),
        (("", "abc"), "document 1: its split is '', expected"),
        ((None, None, "1"), "document 1: its text is a NoneType, expected a str"),
        ((None, b"abc"), "document 1: its text is a bytes, expected a str"),
    ],
    ids=["test", "no split", "None", "bytes"],
)
def test_a_document_of_no_good_form_is_named(folder, document, message):
    with refused("E102", message):
        pretrain(folder / "c", items=[(None, "abc", "0"), document, *documents(0)], shuffle_buffer=None)
    assert not (folder / "c").exists()
