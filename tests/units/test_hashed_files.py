"""A file of a build and its hashes, however it is written and taken up again; the parts of an .npy file and of bits."""

import hashlib
import random
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refused
from support.splits import IN_MEMORY

from niels_gpt.cache.build_sft import packed
from niels_gpt.cache.formats import BLOCK_BYTES, npy_header
from niels_gpt.engine.journal import HashedFile, npy_parts


def test_more_offsets_than_are_read_at_once_are_all_written(tmp_path):
    starts = np.arange(300_000, dtype="<i8")  # 2.4 MB, and 1 MiB is read at once
    starts[:-1].tofile(tmp_path / "starts")
    (tmp_path / "idx.npy").write_bytes(b"".join(npy_parts(tmp_path / "starts", len(starts), int(starts[-1]))))
    assert np.array_equal(np.load(tmp_path / "idx.npy"), starts)
    assert (tmp_path / "idx.npy").read_bytes().startswith(npy_header(300_000))


CONTENT = np.random.default_rng(0).bytes(3 * BLOCK_BYTES + 1000)
EDGES = st.sampled_from([0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES])
CUTS = st.lists(st.integers(0, len(CONTENT)) | EDGES, max_size=6).map(sorted)


@settings(derandomize=True, max_examples=40)
@given(
    cuts=CUTS,
    keep=st.integers(0, len(CONTENT)) | EDGES,
    size=st.integers(0, len(CONTENT)) | EDGES,
    copies=st.booleans(),
)
def test_a_file_has_its_hashes_however_it_is_written_and_taken_up_again(cuts, keep, size, copies):
    content = CONTENT[:size]
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        path = Path(name, "file")
        first = HashedFile(path)
        for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            first.write(content[begin:end])
        inode = path.stat().st_ino
        kept = hashlib.sha256(content[:keep]).hexdigest()
        second = HashedFile(path, keep=len(content[:keep]), sha256=kept, copies=copies)
        assert path.read_bytes() == content[:keep]  # what follows is cut off
        assert (path.stat().st_ino == inode) == (not copies or not content[:keep])
        second.write(content[keep:])
        assert path.read_bytes() == content and list(Path(name).iterdir()) == [path]
        record, checksums = second.record("at/its/place"), second.checksums()
        first.close()
        second.close()
    blocks = [content[start : start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES)]
    assert checksums == b"".join(zlib.crc32(block).to_bytes(4, "little") for block in blocks) == first.checksums()
    sha256 = hashlib.sha256(content).hexdigest()
    assert record == {"name": "at/its/place", "bytes": len(content), "sha256": sha256} and first.sha256 == sha256


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_file_that_is_not_what_was_written_is_not_taken_up_again(tmp_path, damage):
    (tmp_path / "file").write_bytes(b"abc!" if damage == "flipped" else b"abc")
    before = (tmp_path / "file").read_bytes()
    with refused("E505", "file", "expected 4 of sha256"):
        HashedFile(tmp_path / "file", keep=4, sha256=hashlib.sha256(b"abcd").hexdigest())
    assert (tmp_path / "file").read_bytes() == before


def test_an_array_is_written_as_its_values_and_one_with_gaps_is_refused(tmp_path):
    ids = np.arange(10, dtype="<u2")
    file = HashedFile(tmp_path / "file")
    file.write(ids[2:4])
    with refused("E102", kind=TypeError):
        file.write(ids[::3])
    file.close()
    assert (tmp_path / "file").read_bytes() == b"\x02\x00\x03\x00" and file.num_bytes == 4
    assert file.sha256 == hashlib.sha256(b"\x02\x00\x03\x00").hexdigest()


@pytest.mark.parametrize("seed", range(4))
def test_bits_do_not_depend_on_where_the_parts_of_a_file_end(seed):
    chance = random.Random(seed)
    parts = [np.array(chance.choices((0, 1), k=chance.randint(0, 20)), dtype=np.uint8) for _ in range(30)]
    found = b"".join(part.tobytes() for part in packed(parts))
    assert found == np.packbits(np.concatenate(parts), bitorder="little").tobytes()
