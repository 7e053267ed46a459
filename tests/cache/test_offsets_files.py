"""A damaged or hostile file of offsets is refused, and nothing is allocated for what its header claims."""

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support.small_caches import Damage, cut, put, save

from niels_gpt.cache import CacheError
from niels_gpt.cache.mmap import load_idx

OFFSETS_DAMAGE = [
    (put(b""), "not a .npy file of plain numbers: it begins b''"),
    (put(b"not an array"), "not a .npy file"),
    (put(b"PK\x03\x04" + bytes(200)), "not a .npy file"),
    (put(b"\x80\x04]q\x00."), "not a .npy file"),  # a pickle
    (cut(100), "not a .npy file"),
    (cut(-8), "144 bytes, expected 152 by its own header, which has 3 entries"),
    (lambda path: path.write_bytes(path.read_bytes() + b"12345678"), "160 bytes, expected 152 by its own header"),
    (save([0, 6, 12], "<i4"), "<i4 of shape (3,), expected int64 [examples]"),
    (save([0, 6, 12], ">i8"), ">i8 of shape (3,), expected int64 [examples]"),
    (save([0, 6, 12], "<f8"), "<f8 of shape (3,), expected int64 [examples]"),
    (save([[0, 6, 12]]), "<i8 of shape (1, 3), expected int64 [examples]"),
    (save(0), "<i8 of shape (), expected int64 [examples]"),
    (save([]), "no example in this split"),
    (save([6, 12]), "begins at 6, expected 0"),
    (save([0, 12, 6]), "offsets do not ascend at entry 2"),
    (save([0, 6, 6]), "offsets do not ascend at entry 2"),
    (save([0, 2**63 - 1, -(2**63)]), "offsets do not ascend at entry 2"),
    (save([0, 6, 18]), "offset 18 lies beyond the 18 tokens"),
    (save([0, None], "O"), "|O of shape (2,), expected int64 [examples]"),
]


@pytest.mark.parametrize(("damage", "message"), OFFSETS_DAMAGE)
def test_a_damaged_offsets_file_is_refused(tmp_path: Path, damage: Damage, message: str) -> None:
    path = tmp_path / "train_idx.npy"
    save([0, 6, 12])(path)
    damage(path)
    with pytest.raises(CacheError, match=re.escape(f"train_idx.npy: {message}")):
        load_idx(path, num_tokens=18)


def npy(shape: str, *, descr: str = "'<i8'", version: bytes = b"\x01\x00", fortran: str = "False") -> bytes:
    """Return a .npy file of three offsets whose header says something else."""
    header = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    width = 2 if version == b"\x01\x00" else 4
    header = header.ljust(128 - 9 - width) + b"\n"
    start = b"\x93NUMPY" + version + len(header).to_bytes(width, "little")
    return start + header + np.array([0, 6, 12], dtype="<i8").tobytes()


HOSTILE_NPY = [
    (npy("(3,)", version=b"\x03\x00"), "not a .npy file"),
    (npy("(3,)", version=b"\x00\x00"), "not a .npy file"),
    (npy("(-3,)"), "not a .npy file"),
    (npy("(3, -1)"), "not a .npy file"),
    (npy("(1152921504606846976,)"), "152 bytes, expected 9223372036854775936 by its own header"),
    (npy("(18446744073709551619,)"), "<i8 of shape (18446744073709551619,), expected"),
    (npy("(3000000000000000,)"), "152 bytes, expected 24000000000000128 by its own header"),
    (npy("(4294967296, 4294967296)"), "<i8 of shape (4294967296, 4294967296), expected"),
    (npy("(1, 3)", fortran="True"), "<i8 of shape (1, 3), expected"),
    (npy("(3,)", descr="[('a', '<i8')]"), "not a .npy file"),
    (npy("(3,)", descr="__import__('os')"), "not a .npy file"),
    (npy("(3.5,)"), "not a .npy file"),
    (npy("(" * 50), "not a .npy file"),
    (b"\x93NUMPY\x01\x00\xff\xff{'descr': '<i8', ", "not a .npy file"),
    (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{'descr': '<i8', ", "not a .npy file"),
]


@pytest.mark.parametrize(("content", "message"), HOSTILE_NPY)
def test_a_hostile_npy_header_is_refused_and_nothing_is_allocated_for_it(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "train_idx.npy").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CacheError, match=re.escape(f"train_idx.npy: {message}")):
        load_idx(tmp_path / "train_idx.npy", num_tokens=18)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


@pytest.mark.parametrize("content", [npy("(3,)"), npy("(3,)", version=b"\x02\x00"), npy("(3,)", fortran="True")])
def test_other_headers_that_fit_their_file_are_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train_idx.npy").write_bytes(content)
    assert load_idx(tmp_path / "train_idx.npy", num_tokens=18).tolist() == [0, 6, 12]
