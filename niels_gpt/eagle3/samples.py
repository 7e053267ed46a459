"""The tokenized input of an EAGLE-3 cache: raw ids and loss masks, as the sidecar keeps them.

Raw means: unshifted, not padded, cut to the cache's seq_length. Sample i is what row i of the cache was made from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from niels_gpt.fileio import CacheError, PathLike, write_bytes

SAMPLES_NAME = "samples.safetensors"
IDS_NAME = "ids.txt"


class RowLike(Protocol):
    """What a tokenizer makes of one chat."""

    @property
    def id(self) -> str:
        """The name that its source has for it."""

    @property
    def input_ids(self) -> Any:
        """Integers [L]."""

    @property
    def loss_mask(self) -> Any:
        """0 or 1 for each id [L]."""


@dataclass(frozen=True, eq=False)
class Samples:
    """All samples, one behind the other."""

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
        """Take rows, which are held in memory: 5 bytes a token.

        Raises: ValueError, naming the row, where its ids and its mask are not of one length, or where it is empty.
        """
        ids, masks, names = [], [], []
        for row in rows:
            found, mask = np.asarray(row.input_ids, np.int32), np.asarray(row.loss_mask, np.uint8)
            if found.ndim != 1 or found.shape != mask.shape or not found.size:
                raise ValueError(
                    f"sample {row.id!r}: {list(found.shape)} input_ids and {list(mask.shape)} loss_mask, expected the "
                    "same number of both, one or more"
                )
            ids.append(found)
            masks.append(mask)
            names.append(row.id)
        starts = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(found) for found in ids], out=starts[1:])
        empty = np.zeros(0, np.int32)
        return cls(np.concatenate([empty, *ids]), np.concatenate([empty.astype(np.uint8), *masks]), starts, names)

    @classmethod
    def open(cls, folder: PathLike) -> Samples:
        """Read what `write` wrote. Raises: FileNotFoundError; CacheError for files that do not fit together."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        path, names = Path(folder) / SAMPLES_NAME, Path(folder) / IDS_NAME
        try:
            tensors = load(path.read_bytes())
            lines = names.read_bytes().split(b"\n")
            samples = cls(
                tensors["ids"],
                tensors["loss_mask"],
                tensors["starts"],
                [line.decode("unicode_escape") for line in lines[:-1]],
            )
            lengths = samples.lengths
            good = samples.ids.shape == samples.loss_mask.shape == (samples.starts[-1],) and samples.starts[0] == 0
            if not good or lengths.min(initial=1) < 1 or len(samples) != len(samples.source_ids) or lines[-1]:
                raise ValueError(f"{len(samples)} samples of {len(samples.ids)} ids, {len(samples.source_ids)} names")
        except (SafetensorError, ValueError, LookupError) as error:
            raise CacheError(f"{path} and {names.name}: not the samples of a cache ({error})") from error
        return samples

    def files(self) -> dict[str, bytes]:
        """Return the content of the two files by name: equal samples, equal bytes."""
        from safetensors.numpy import save

        tensors: dict[str, NDArray[Any]] = {"ids": self.ids, "loss_mask": self.loss_mask, "starts": self.starts}
        names = b"".join(name.encode("unicode_escape") + b"\n" for name in self.source_ids)
        return {SAMPLES_NAME: save(tensors), IDS_NAME: names}

    def write(self, folder: PathLike) -> None:
        """Write the two files into a folder, each atomically. Raises: OSError."""
        for name, content in self.files().items():
            write_bytes(Path(folder) / name, content)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return ids [L] and loss mask [L] of one sample, as views."""
        begin, end = self.starts[index : index + 2]
        return self.ids[begin:end], self.loss_mask[begin:end]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample [n]."""
        return np.diff(self.starts)

    @property
    def supervised(self) -> int:
        """Tokens that carry loss, of all samples."""
        return int(self.loss_mask.sum())

    @cached_property
    def sums(self) -> dict[str, str]:
        """The sha256 of each of the two files, by name."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in self.files().items()}

    @property
    def sha256(self) -> str:
        """Of samples.safetensors, that is of all ids, masks and lengths."""
        return self.sums[SAMPLES_NAME]
