"""The tokenized input of a cache is taken as it is meant, and refused where its files say something else."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.eagle3_runs import Row

from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.storage.errors import CacheError

IDS, MASK, STARTS = np.array([1, 2, 3], np.int32), np.array([0, 1, 1], np.uint8), np.array([0, 2, 3], np.int64)


ODD = [Row("a\nb", [1, 2, 3], [0, 1, 1]), Row("", [4], [0]), Row("é\\n\ud800", [5, 6], [1, 0])]


def put(folder: Path, names: bytes = b"a\nb\n", **changed: Any) -> None:
    tensors = {"ids": IDS, "loss_mask": MASK, "starts": STARTS, **changed}
    save_file(tensors, folder / "samples.safetensors")
    (folder / "ids.txt").write_bytes(names)


def test_samples_come_back_as_they_were_written_and_only_equal_ones_have_an_equal_sha256(tmp_path: Path) -> None:
    written = Samples.of_rows(ODD)
    written.write(tmp_path)
    read = Samples.open(tmp_path)
    assert list(read.source_ids) == [sample.id for sample in ODD]
    for number, sample in enumerate(ODD):
        ids, mask = read.row(number)
        assert (ids.tolist(), mask.tolist()) == (sample.input_ids, sample.loss_mask)
    assert (len(read), read.lengths.tolist(), read.supervised) == (3, [3, 1, 2], 3)
    assert (read.ids.dtype, read.loss_mask.dtype, read.starts.dtype) == (np.int32, np.uint8, np.int64)
    assert read.checksums == written.checksums
    assert (tmp_path / "ids.txt").read_bytes().count(b"\n") == 3
    sums = [Samples.of_rows(rows).checksums for rows in (ODD, ODD[:2], [Row("x", [1, 2, 3], [0, 1, 1]), *ODD[1:]])]
    assert len({tuple(found.values()) for found in sums}) == 3
    for name in ("ids.txt", "samples.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for wrong in (whole[:-1], b"", whole + b"x\n"):
            (tmp_path / name).write_bytes(wrong)
            with pytest.raises(CacheError, match=r"samples.safetensors: .*not the samples of a cache"):
                Samples.open(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError):
            Samples.open(tmp_path)
        (tmp_path / name).write_bytes(whole)


@pytest.mark.parametrize(
    ("ids", "mask", "said"),
    [
        ([1, 2], [1], r"'x': \[.*\] input_ids and \[.*\] loss_mask"),
        ([], [], "'x': "),
        ([[1]], [[1]], "'x': "),
        ([-1, 2], [0, 1], "ids from 0 and loss_mask of 0 and 1"),
        ([1, 2], [0, 2], "ids from 0 and loss_mask of 0 and 1"),
    ],
)
def test_a_row_of_other_forms_or_values_is_refused(ids: Any, mask: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Samples.of_rows([Row("x", ids, mask)])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ids": IDS.astype(np.int64) + 2**40}, r"ids of int64 \[3\], expected int32 in one dimension"),
        ({"ids": IDS.astype(np.float32)}, "ids of float32"),
        ({"ids": IDS.view(np.uint32)}, "ids of uint32"),
        ({"ids": IDS[None]}, r"ids of int32 \[1, 3\]"),
        ({"ids": IDS - 2}, "ids from -1 and .*, expected ids from 0"),
        ({"ids": IDS[:2]}, "expected them to rise from 0 to 2"),
        ({"loss_mask": MASK + 7}, r"loss_mask up to 8, expected .* loss_mask of 0 and 1"),
        ({"loss_mask": MASK.astype(bool)}, "loss_mask of bool"),
        ({"loss_mask": MASK[:2]}, "2 samples of 3 ids, 2 loss_mask, 2 names"),
        ({"starts": STARTS.astype(np.float64)}, "starts of float64"),
        ({"starts": STARTS.astype(np.int32)}, "starts of int32"),
        ({"starts": np.array(3)}, r"starts of int64 \[\]"),
        ({"starts": STARTS[:0]}, "starts of 0 numbers"),
        ({"starts": STARTS + 1}, "starts of 3 numbers, expected them to rise from 0 to 3"),
        ({"starts": np.array([0, 4, 3])}, "expected them to rise"),
        ({"starts": np.array([0, 3, 3])}, "expected them to rise"),
        ({"starts": np.array([0, 1, 2])}, "expected them to rise"),
        ({"starts": np.array([0, 1, 2, 3])}, "3 samples of 3 ids, 3 loss_mask, 2 names"),
        ({"names": b"a\nb"}, "the last name has no line end"),
        ({"names": b"a\n"}, "2 samples of 3 ids, 3 loss_mask, 1 names"),
    ],
)
def test_files_of_something_else_are_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    put(tmp_path, **changed)
    with pytest.raises(CacheError, match=rf"samples.safetensors: .*not the samples of a cache \(.*{said}"):
        Samples.open(tmp_path)


def test_rows_take_little_more_memory_than_their_bytes() -> None:
    count, length = 20_000, 40
    ids, mask = np.arange(length, dtype=np.int32), np.ones(length, np.uint8)

    def rows() -> Iterator[Row]:
        for _ in range(count):
            yield Row("one name", ids.copy(), mask.copy())  # type: ignore[arg-type]

    tracemalloc.start()
    try:
        samples = Samples.of_rows(rows())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(samples) == count and samples.row(count - 1)[0].tolist() == ids.tolist()
    assert peak < 2 * 5 * count * length  # ids and mask; lists of small arrays take 3.4 times as much
