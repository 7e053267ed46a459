"""The tokenized input of an EAGLE-3 cache, in its sidecar: ids, loss masks, and the source id of each sample.

Samples are unshifted, unpadded and truncated to seq_length. Row i of the cache comes from sample i.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from niels_gpt.eagle3.format.layout import WITHOUT_HOLES, open_file, refuse_sparse
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import PathLike, id_lines, id_of_line, write_bytes

SAMPLES_NAME = "samples.safetensors"
IDS_NAME = "ids.txt"
_MAX_HEADER = 1 << 20
_MORE_NAMES, _LINE_END = 1000, b"\n"


class RowLike(Protocol):
    """A tokenized chat."""

    @property
    def id(self) -> str:
        """Source id."""

    @property
    def input_ids(self) -> Any:
        """Integers [L]."""

    @property
    def loss_mask(self) -> Any:
        """0 or 1 for each id, [L]."""


@dataclass(frozen=True, eq=False)
class Samples:
    """All samples, concatenated."""

    ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T], 0 or 1"""
    starts: NDArray[np.int64]
    """[n + 1], from 0 to T"""
    source_ids: Sequence[str]
    """n names"""

    @classmethod
    def of_rows(cls, rows: Iterable[RowLike]) -> Samples:
        """Collect rows in memory: 5 bytes a token.

        Raises: ValueError naming the row if it is empty or its ids and mask differ in length; ValueError for ids below
            0 and masks other than 0 and 1.
        """
        ids, masks, starts, names = bytearray(), bytearray(), [0], []
        for row in rows:
            row_ids, mask = np.asarray(row.input_ids, np.int32), np.asarray(row.loss_mask, np.uint8)
            if row_ids.ndim != 1 or row_ids.shape != mask.shape or not row_ids.size:
                raise ValueError(
                    f"sample {row.id!r}: {list(row_ids.shape)} input_ids and {list(mask.shape)} loss_mask, expected "
                    "the same number of both, one or more"
                )
            ids += row_ids.tobytes()
            masks += mask.tobytes()
            starts.append(len(masks))
            names.append(row.id)
        samples = cls(np.frombuffer(ids, np.int32), np.frombuffer(masks, np.uint8), np.array(starts, np.int64), names)
        samples._check()
        return samples

    @classmethod
    def open(cls, folder: PathLike, *, follow_links: bool = False) -> Samples:
        """Read the files of `write`. Raises: FileNotFoundError; CacheError E701 if they do not fit together."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        path, names = Path(folder) / SAMPLES_NAME, Path(folder) / IDS_NAME
        try:
            tensors = load(_read(path, follow_links))
            raw = _read(names, follow_links)
            if raw.count(b"\n") > tensors["starts"].size + _MORE_NAMES:  # before each line becomes an object
                raise ValueError(f"{tensors['starts'].size} starts, and {raw.count(_LINE_END):,} names")
            lines = raw.split(b"\n")
            if lines.pop():
                raise ValueError("the last name has no line end")
            source_ids = [id_of_line(line) for line in lines]
            samples = cls(tensors["ids"], tensors["loss_mask"], tensors["starts"], source_ids)
            samples._check()
        except (SafetensorError, ValueError, LookupError) as error:
            raise CacheError(
                path, f"together with {names.name} not the samples of a cache ({error})", code="E701"
            ) from error
        return samples

    def _check(self) -> None:
        """Raise ValueError if dtypes, shapes or values break the descriptions of the fields."""
        for name, dtype in (("ids", np.int32), ("loss_mask", np.uint8), ("starts", np.int64)):
            array, expected = getattr(self, name), np.dtype(dtype).name
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"{name} of {array.dtype} {list(array.shape)}, expected {expected} in one dimension")
        starts, total = self.starts, len(self.ids)
        if not len(starts) or starts[0] != 0 or starts[-1] != total or bool((starts[1:] <= starts[:-1]).any()):
            raise ValueError(f"starts of {len(starts)} numbers, expected them to rise from 0 to {total}")
        if len(self.loss_mask) != total or len(self.source_ids) != len(self):
            raise ValueError(
                f"{len(self)} samples of {total} ids, {len(self.loss_mask)} loss_mask, {len(self.source_ids)} names"
            )
        if self.ids.min(initial=0) < 0 or self.loss_mask.max(initial=0) > 1:
            raise ValueError(
                f"ids from {self.ids.min()} and loss_mask up to {self.loss_mask.max()}, expected ids from 0 and "
                "loss_mask of 0 and 1"
            )

    def files(self) -> dict[str, bytes]:
        """Return the content of both files by name; equal samples give equal bytes."""
        from safetensors.numpy import save

        tensors: dict[str, NDArray[Any]] = {"ids": self.ids, "loss_mask": self.loss_mask, "starts": self.starts}
        return {SAMPLES_NAME: save(tensors), IDS_NAME: id_lines(self.source_ids)}

    def write(self, folder: PathLike) -> None:
        """Write both files into a folder, each atomically. Raises: OSError."""
        for name, content in self.files().items():
            write_bytes(Path(folder) / name, content)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return views of one sample's ids [L] and loss mask [L]."""
        begin, end = self.starts[index : index + 2]
        return self.ids[begin:end], self.loss_mask[begin:end]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample: int64 [n]."""
        return np.diff(self.starts)

    @property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return int(self.loss_mask.sum())

    @cached_property
    def checksums(self) -> dict[str, str]:
        """sha256 of each file by name."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in self.files().items()}

    @property
    def sha256(self) -> str:
        """sha256 of samples.safetensors: of all ids, masks and lengths."""
        return self.checksums[SAMPLES_NAME]


def _read(path: Path, follow_links: bool) -> bytes:
    """Return the bytes of a samples file. Raises: CacheError, ValueError for sizes that no producer writes."""
    with open(open_file(path, follow_links=follow_links), "rb") as file:
        refuse_sparse(file.fileno(), str(path), *WITHOUT_HOLES)
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        if path.name == SAMPLES_NAME and int.from_bytes(head, "little") > _MAX_HEADER:
            raise ValueError(f"a header of {int.from_bytes(head, 'little'):,} bytes, expected {_MAX_HEADER:,} at most")
        return head + file.read(max(0, size - len(head)))
