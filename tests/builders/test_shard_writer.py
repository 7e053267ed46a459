"""Shards are one stream of ids cut at exact sizes, whatever the sizes of documents and batches."""

import hashlib
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_builds import documents, pretrain
from support.splits import IN_MEMORY

from niels_gpt.builders import source
from niels_gpt.builders.pretrain import build_pretrain
from niels_gpt.builders.writer import BLOCK_BYTES, HashedFile, npy_header, npy_parts
from niels_gpt.cache import CacheError

DOCUMENTS = st.lists(st.tuples(st.sampled_from(["train", "val"]), st.lists(st.integers(0, 65531), max_size=12)))


class Spelled:
    """A tokenizer whose text is its ids: "7 65531" is [7, 65531]; the highest four are the sentinels."""

    vocab_size = 65536

    def special_token_ids(self) -> dict[str, int]:
        return {"sys": 65532, "usr": 65533, "asst": 65534, "eot": 65535}

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def write_shards(root: Path, documents: list[Any], shard_bytes: int) -> dict[str, list[dict[str, Any]]]:
    """Build a cache of (split, ids) at root/c and return the records of its shards."""
    texts = [(split, " ".join(map(str, ids))) for split, ids in documents]
    whole: dict[str, Any] = {"max_train_tokens": None, "max_val_tokens": None, "shuffle_buffer": None, "partial": True}
    fixed: dict[str, Any] = {"tokenizer": Spelled(), "shard_bytes": shard_bytes, "seed": 0, "num_threads": 0}
    shards: dict[str, list[dict[str, Any]]] = build_pretrain(texts, root / "c", **fixed, **whole)["shards"]
    return shards


@settings(derandomize=True, max_examples=25)
@given(documents=DOCUMENTS, shard_bytes=st.integers(2, 40), batch_items=st.integers(1, 5))
def test_any_documents_and_sizes_give_full_shards(documents: list[Any], shard_bytes: int, batch_items: int) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "BATCH_ITEMS", batch_items)
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
def test_a_shard_size_below_one_token_is_refused(tmp_path: Path, shard_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"shard_bytes={shard_bytes}: expected at least 2"):
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
def test_a_document_of_no_good_form_is_named(folder: Path, document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        pretrain(folder / "c", items=[(None, "abc", "0"), document, *documents(0)], shuffle_buffer=None)
    assert not (folder / "c").exists()


def test_more_offsets_than_are_read_at_once_are_all_written(tmp_path: Path) -> None:
    starts = np.arange(300_000, dtype="<i8")  # 2.4 MB, and 1 MiB is read at once
    starts[:-1].tofile(tmp_path / "starts")
    (tmp_path / "idx.npy").write_bytes(b"".join(npy_parts(tmp_path / "starts", len(starts), int(starts[-1]))))
    assert np.array_equal(np.load(tmp_path / "idx.npy"), starts)
    assert (tmp_path / "idx.npy").read_bytes().startswith(npy_header(300_000))


CONTENT = np.random.default_rng(0).bytes(3 * BLOCK_BYTES + 1000)
EDGES = st.sampled_from([0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES])
CUTS = st.lists(st.integers(0, len(CONTENT)) | EDGES, max_size=6).map(sorted)


@settings(derandomize=True, max_examples=40)
@given(cuts=CUTS, keep=st.integers(0, len(CONTENT)) | EDGES, size=st.integers(0, len(CONTENT)) | EDGES)
def test_a_file_has_its_hashes_however_it_is_written_and_taken_up_again(cuts: list[int], keep: int, size: int) -> None:
    content = CONTENT[:size]
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        path = Path(name, "file")
        first = HashedFile(path)
        for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            first.write(content[begin:end])
        first.close()
        kept = hashlib.sha256(content[:keep]).hexdigest()
        second = HashedFile(path, keep=len(content[:keep]), sha256=kept)
        assert path.read_bytes() == content[:keep]  # what follows is cut off
        second.write(content[keep:])
        assert path.read_bytes() == content
        record, checksums = second.moved(Path(name), "at/its/place"), second.checksums()
        assert Path(name, "at/its/place").read_bytes() == content and not path.exists()
    blocks = [content[start : start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES)]
    assert checksums == b"".join(zlib.crc32(block).to_bytes(4, "little") for block in blocks) == first.checksums()
    sha256 = hashlib.sha256(content).hexdigest()
    assert record == {"name": "at/its/place", "bytes": len(content), "sha256": sha256} and first.sha256 == sha256


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_file_that_is_not_what_was_written_is_not_taken_up_again(tmp_path: Path, damage: str) -> None:
    (tmp_path / "file").write_bytes(b"abc!" if damage == "flipped" else b"abc")
    before = (tmp_path / "file").read_bytes()
    with pytest.raises(CacheError, match=r"file: \d bytes of sha256 \w{12}, expected 4 of sha256 \w{12}"):
        HashedFile(tmp_path / "file", keep=4, sha256=hashlib.sha256(b"abcd").hexdigest())
    assert (tmp_path / "file").read_bytes() == before


def test_an_array_is_written_as_its_values_and_one_with_gaps_is_refused(tmp_path: Path) -> None:
    ids = np.arange(10, dtype="<u2")
    file = HashedFile(tmp_path / "file")
    file.write(ids[2:4])
    with pytest.raises(TypeError):
        file.write(ids[::3])
    file.close()
    assert (tmp_path / "file").read_bytes() == b"\x02\x00\x03\x00" and file.num_bytes == 4
    assert file.sha256 == hashlib.sha256(b"\x02\x00\x03\x00").hexdigest()
