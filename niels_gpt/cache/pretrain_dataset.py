"""Random windows from a pretrain cache's shards. B: rows of a batch, T: tokens of a row."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.formats import SHARD_GLOB, TOKEN_BYTES, TOKEN_NUMPY_DTYPE
from niels_gpt.cache.meta import check_tokenizer, reader_meta
from niels_gpt.cache.mmap import mmap_tokens
from niels_gpt.fileio import META_NAME, CacheError
from niels_gpt.records import path_inside, resolved


class PretrainTokenStreamDataset:
    """Draws windows of T + 1 tokens, all windows of all shards equally likely; none crosses two shards (PR-03, D13).

    The version that the folder's name stands for is resolved once, here: a rebuild does not disturb an open dataset.
    Safe to fork and to pickle (a copy maps the files anew); never writes, and opens no file outside that version but
    the meta.json of the tokenizer beside the cache.
    """

    def __init__(
        self, shards_dir: str | os.PathLike[str], *, T: int, device: str, tokenizer_sha256: str | None = None
    ) -> None:
        """shards_dir: a split's folder, such as cache/pretrain/fineweb_edu/train; a meta.json above it is heeded.

        tokenizer_sha256: raise CacheError unless the cache was built with this model.
        Raises: FileNotFoundError, CacheError (each names the file), ValueError for T < 1.
        """
        if T < 1:
            raise ValueError(f"T={T}: expected at least 1 token")
        self.T, self.device = T, device
        self.shards_dir = _resolved(Path(shards_dir))
        if not self.shards_dir.is_dir():
            raise FileNotFoundError(f"{shards_dir}: no such folder. Build it: python -m niels_gpt.cache.cli build-all")
        self.meta: dict[str, Any] | None = reader_meta(self.shards_dir.parent)
        self.vocab_size: int | None = (self.meta or {}).get("vocab_size")
        check_tokenizer(self.shards_dir.parent, self.meta, tokenizer_sha256)
        self._open()
        if self.skipped_shards:
            warnings.warn(
                f"{self.shards_dir}: {self.skipped_shards} shards ({self.skipped_tokens} tokens) are shorter than "
                f"T + 1 = {T + 1} tokens and are left out",
                stacklevel=2,
            )

    def _open(self) -> None:
        files = self._files()
        mapped = [mmap_tokens(path, expected_bytes=size) for path, size in files]
        if not mapped:
            raise CacheError(f"{self.shards_dir}: this split has no shard. Give its source more text, then rebuild it")
        long_enough = [shard for shard, tokens in enumerate(mapped) if len(tokens) > self.T]
        self.skipped_shards = len(mapped) - len(long_enough)
        self.skipped_tokens = sum(len(tokens) for tokens in mapped if len(tokens) <= self.T)
        if not long_enough:
            longest = max(len(tokens) for tokens in mapped)
            raise CacheError(
                f"{self.shards_dir}: the longest shard has {longest} tokens, expected T + 1 = {self.T + 1}"
            )
        self._shards = [mapped[shard] for shard in long_enough]
        self._paths = [files[shard][0] for shard in long_enough]
        # Window w of all is window w - ends[s - 1] of shard s, where s is the first shard with w < ends[s].
        self._ends: NDArray[np.int64] = np.cumsum([len(tokens) - self.T for tokens in self._shards], dtype=np.int64)

    def _files(self) -> list[tuple[Path, int | None]]:
        """Return the shards with their sizes: by meta.json where there is one, by name where there is none."""
        folder, split = self.shards_dir.parent, self.shards_dir.name
        if self.meta is None or "shards" not in self.meta:
            names = sorted(path.name for path in self.shards_dir.glob(SHARD_GLOB))
            return [(path_inside(folder, f"{split}/{name}"), None) for name in names]
        if split not in self.meta["shards"]:
            raise CacheError(f"{folder / META_NAME}: no list of shards for split {split}")
        records = self.meta["shards"][split]
        strange = [record["name"] for record in records if not record["name"].startswith(f"{split}/")]
        if strange:
            raise CacheError(f"{folder / META_NAME}: split {split} names {strange[0]}, expected files below {split}/")
        return [(path_inside(folder, record["name"]), record["bytes"]) for record in records]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_shards", "_paths", "_ends")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @property
    def num_windows(self) -> int:
        """Number of different windows that a batch is drawn from."""
        return int(self._ends[-1])

    def get_batch(self, *, B: int, generator: torch.Generator) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Return x, y: int64 [B, T], contiguous, on `device`, with y[:, :-1] == x[:, 1:].

        One draw from `generator` a batch, on the generator's own device.
        Raises: CacheError, naming file and place, where a row has an id that is not below meta.json's vocab_size.
        """
        drawn = torch.randint(self.num_windows, (B,), generator=generator, device=generator.device)
        windows = drawn.cpu().numpy()
        shards = np.searchsorted(self._ends, windows, side="right")
        starts = windows - np.where(shards > 0, self._ends[shards - 1], 0)
        mapped, width, vocab_size = self._shards, self.T + 1, self.vocab_size
        rows = np.empty((B, width), dtype=TOKEN_NUMPY_DTYPE)
        for row, (shard, start) in enumerate(zip(shards.tolist(), starts.tolist(), strict=True)):
            rows[row] = mapped[shard][start : start + width]
        # The largest id by argmax, which numpy finds in half the time of max.
        if vocab_size is not None and B and rows.item(rows.argmax()) >= vocab_size:
            row, column = np.argwhere(rows >= vocab_size)[0].tolist()
            place = int(starts[row]) + column
            raise outside_vocabulary(self._paths[shards[row]], place, int(rows[row, column]), vocab_size)
        return split_rows(rows, self.device)


def split_rows(rows: NDArray[np.uint16], device: str) -> tuple[Any, Any]:
    """Return (rows[:, :-1], rows[:, 1:]) as contiguous int64 tensors on `device`; rows: uint16 [B, T + 1].

    The narrow form travels to the device, the cast happens there.
    """
    moved = torch.from_numpy(rows.astype(np.uint16, copy=False)).to(device)
    return moved[:, :-1].to(torch.int64).contiguous(), moved[:, 1:].to(torch.int64).contiguous()


def outside_vocabulary(path: Path, token: int, id: int, vocab_size: int) -> CacheError:
    """Return the error of token number `token` of a file, whose id a model of that vocabulary has no embedding for."""
    return CacheError(
        f"{path}: token {token} at byte {token * TOKEN_BYTES} is id {id}, expected ids below vocab_size {vocab_size}. "
        "The file is damaged or its meta.json is another's. Rebuild the cache: python -m niels_gpt.cache.cli build-all"
    )


def _resolved(shards_dir: Path) -> Path:
    """Resolve the cache's folder, so that one version is read, but not a split's folder in it: that is no link."""
    if shards_dir.name in ("", ".."):
        return resolved(shards_dir)
    cache = resolved(shards_dir.parent)
    if os.path.lexists(cache / META_NAME):
        return path_inside(cache, shards_dir.name)
    return resolved(cache / shards_dir.name)
