"""One split of a pretrain cache, and random windows of it. B: rows of a batch, T: tokens of a row."""

from __future__ import annotations

import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.formats import TOKEN_BYTES
from niels_gpt.cache.meta import check_expected, check_tokenizer, fingerprint, reader_meta, split_shards
from niels_gpt.cache.mmap import IO, TokenFiles
from niels_gpt.fileio import META_NAME, CacheError
from niels_gpt.locks import hold_version
from niels_gpt.records import checked_int, path_inside, resolved
from niels_gpt.remedies import with_command
from niels_gpt.versions import shown


class PretrainSplit:
    """The shards of one split of one version of a cache.

    The version that the folder's name stands for is resolved once, here: a rebuild does not disturb an open split, and
    `gc` leaves its version alone. A shard is opened when it is first read; all sizes are compared at once. Safe to
    fork and to pickle; never writes, and opens no file outside that version but the meta.json of the tokenizer beside
    the cache.
    """

    def __init__(
        self,
        shards_dir: str | os.PathLike[str],
        *,
        tokenizer_sha256: str | None = None,
        expect: Mapping[str, Any] | None = None,
        io: IO = "mmap",
        in_order: bool = False,
    ) -> None:
        """shards_dir: a split's folder, such as cache/pretrain/fineweb_edu/train; a meta.json above it is heeded.

        tokenizer_sha256: raise CacheError unless the cache was built with this model.
        expect: what `fingerprint` returned earlier; raise CacheError unless it would now.
        io: "mmap", or "pread" for network file systems.
        in_order: windows will be asked for one after the other, not at random.
        Raises: FileNotFoundError, CacheError (each names the file), ValueError for another io.
        """
        self.folder = resolved_split(Path(shards_dir))
        if not self.folder.is_dir():
            said = f"{shards_dir}: no such folder. Build it: python -m niels_gpt.cache.cli build-all"
            raise FileNotFoundError(with_command(said))
        self._hold = hold_version(self.folder.parent)
        self.meta: dict[str, Any] | None = reader_meta(self.folder.parent, "pretrain")
        self.vocab_size: int | None = (self.meta or {}).get("vocab_size")
        check_tokenizer(self.folder.parent, self.meta, tokenizer_sha256)
        shards = split_shards(self.folder.parent, self.meta, self.folder.name)
        self.files = TokenFiles(shards, io=io, in_order=in_order)
        if not self.files.paths and (self.folder / META_NAME).exists():
            raise CacheError(f"{self.folder}: a whole cache, expected the folder of a split of a pretrain cache in it")
        if not self.files.paths:
            raise CacheError(f"{self.folder}: this split has no shard. Give its source more text, then rebuild it")
        check_expected(self.fingerprint(), expect, str(self.folder))

    def __repr__(self) -> str:
        """Name the cache: `PretrainSplit(cache/pretrain/roam (version 0123456789ab), train: 2 shards, 900 tokens)`."""
        count, tokens = len(self.lengths), int(self.lengths.sum())
        return f"PretrainSplit({shown(self.folder.parent)}, {self.folder.name}: {count} shards, {tokens:,} tokens)"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.meta is not None:  # a real folder's place may have been taken by another version since
            before, self.meta = self.fingerprint(), reader_meta(self.folder.parent, "pretrain")
            check_expected(self.fingerprint(), before, str(self.folder))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each shard: int64 [shards]."""
        return self.files.lengths

    def fingerprint(self) -> dict[str, Any]:
        """Return what tells these tokens from others, for a checkpoint: see `niels_gpt.cache.meta.fingerprint`."""
        tokens = int(self.lengths.sum())
        return fingerprint(self.folder.parent, self.meta, split=self.folder.name, tokens=tokens)

    def rows(self, shards: NDArray[np.int64], starts: NDArray[np.int64], width: int) -> NDArray[np.uint16]:
        """Return uint16 [B, width]: `width` tokens of shard shards[b] from its token starts[b] on, all inside it.

        Raises: IndexError for a window that is not inside its shard; CacheError, naming file and place, where a row has
            an id that is not below meta.json's vocab_size.
        """
        outside = np.flatnonzero((starts < 0) | (starts + width > self.lengths[shards]))
        if len(outside):
            shard, start = int(shards[outside[0]]), int(starts[outside[0]])
            path, length = self.files.paths[shard], int(self.lengths[shard])
            raise IndexError(f"{path}: no window of {width} tokens at token {start}: it has {length}")
        return gathered(self.files, self.vocab_size, shards, starts + self.files.first_tokens[shards], width)


class PretrainTokenStreamDataset:
    """Draws windows of T + 1 tokens, all windows of all shards equally likely; none crosses two shards (PR-03, D13).

    Versions, forks and pickles: as `PretrainSplit`. Every window exactly once: `niels_gpt.sampling.EpochStream`.
    """

    def __init__(
        self,
        shards_dir: str | os.PathLike[str],
        *,
        T: int,
        device: str,
        tokenizer_sha256: str | None = None,
        expect: Mapping[str, Any] | None = None,
        io: IO = "mmap",
    ) -> None:
        """shards_dir, tokenizer_sha256, expect, io: as for `PretrainSplit`.

        Raises: FileNotFoundError, CacheError (each names the file), ValueError for T < 1.
        """
        self.T, self.device = checked_int("T", T, 1), device
        self._split = PretrainSplit(shards_dir, tokenizer_sha256=tokenizer_sha256, expect=expect, io=io)
        self.shards_dir, self.meta, self.vocab_size = self._split.folder, self._split.meta, self._split.vocab_size
        lengths = self._split.lengths
        self.skipped_shards, self.skipped_tokens = int((lengths <= T).sum()), int(lengths[lengths <= T].sum())
        if self.skipped_shards == len(lengths):
            raise CacheError(
                f"{self.shards_dir}: the longest shard has {lengths.max()} tokens, expected T + 1 = {T + 1}"
            )
        # Window w of all is window w - begins[s] of shard s, where s is the first shard with w < ends[s].
        counts = np.maximum(lengths - T, 0)
        self._ends: NDArray[np.int64] = np.cumsum(counts)
        self._to_places = self._split.files.first_tokens - (self._ends - counts)
        self.num_windows = int(self._ends[-1])
        """Number of different windows that a batch is drawn from."""
        if self.skipped_shards:
            warnings.warn(
                f"{self.shards_dir}: {self.skipped_shards} shards ({self.skipped_tokens} tokens) are shorter than "
                f"T + 1 = {T + 1} tokens and are left out",
                stacklevel=2,
            )

    def __repr__(self) -> str:
        """Name the cache and what a batch is."""
        return f"PretrainTokenStreamDataset({self._split!r}, x, y: int64 [B, {self.T}] on {self.device})"

    def fingerprint(self) -> dict[str, Any]:
        """Return what tells these tokens from others, for a checkpoint; `expect` compares it at open."""
        return self._split.fingerprint()

    def get_batch(self, *, B: int, generator: torch.Generator) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Return x, y: int64 [B, T], contiguous, on `device`, with y[:, :-1] == x[:, 1:].

        One draw from `generator` a batch, on the generator's own device.
        Raises: CacheError, naming file and place, where a row has an id that is not below meta.json's vocab_size.
        """
        drawn = torch.randint(self.num_windows, (B,), generator=generator, device=generator.device)
        windows = drawn.numpy() if drawn.is_cpu else drawn.cpu().numpy()
        if len(self._ends) == 1:  # a tenth of the time of a small batch
            shards, places = np.zeros(B, dtype=np.int64), windows
        else:
            shards = self._ends.searchsorted(windows, "right")
            places = windows + self._to_places[shards]
        return split_rows(gathered(self._split.files, self.vocab_size, shards, places, self.T + 1), self.device)


def gathered(
    files: TokenFiles, vocab_size: int | None, shards: NDArray[np.int64], places: NDArray[np.int64], width: int
) -> NDArray[np.uint16]:
    """Return `files.gather(shards, places, width)`.

    Raises: CacheError, naming file and place, where a row has an id that is not below vocab_size; None: any is good.
    """
    rows = files.gather(shards, places, width)
    # The largest id by argmax, which numpy finds in half the time of max.
    if vocab_size is not None and rows.size and rows.item(rows.argmax()) >= vocab_size:
        row, column = np.argwhere(rows >= vocab_size)[0].tolist()
        token = int(places[row] - files.first_tokens[shards[row]]) + column
        raise outside_vocabulary(files.paths[shards[row]], token, int(rows[row, column]), vocab_size)
    return rows


def split_rows(rows: NDArray[np.uint16], device: str | torch.device) -> tuple[Any, Any]:
    """Return (rows[:, :-1], rows[:, 1:]) as contiguous int64 tensors on `device`; rows: uint16 [B, T + 1].

    To another device the narrow form travels, once, and the cast happens there; to CUDA through pinned memory, so that
    the call does not wait for the copy.
    """
    if str(device) == "cpu":  # numpy casts in half the time of torch
        if rows.size < _FRESH_TOKENS:
            return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))
        x, y = recycled_int64((2, rows.shape[0], rows.shape[1] - 1))
        x[...], y[...] = rows[:, :-1], rows[:, 1:]
        return torch.from_numpy(x), torch.from_numpy(y)
    narrow = torch.from_numpy(rows)
    on_cuda = torch.device(device).type == "cuda"
    moved = (narrow.pin_memory() if on_cuda else narrow).to(device, non_blocking=on_cuda)
    return moved[:, :-1].to(torch.int64).contiguous(), moved[:, 1:].to(torch.int64).contiguous()


_FRESH_TOKENS = 1 << 17  # 1 MiB as int64: below, malloc gives memory that the process has touched before
_unused: deque[NDArray[np.int64]] = deque(maxlen=2)


def recycled_int64(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return an uninitialized array, of the memory of an earlier one of that size that is gone, if there is one.

    Large arrays come fresh from the system each time, and its page faults cost several times what filling them does.
    The memory of an array is used again once the array, all its views, and all tensors made of them are gone; that of
    two arrays at most is kept for it.
    """
    memory = _taken(math.prod(shape))
    return np.asarray(_Lease(np.empty(shape, dtype=np.int64) if memory is None else memory)).reshape(shape)


def _taken(size: int) -> NDArray[np.int64] | None:
    for _ in range(len(_unused)):
        try:
            memory = _unused.popleft()  # taken out before it is looked at: no thread or signal handler finds it now
        except IndexError:
            return None
        if memory.size == size:
            return memory
        _unused.append(memory)
    return None


class _Lease:
    """Memory as an array that numpy takes; given back when nothing refers to that array any more."""

    def __init__(self, memory: NDArray[np.int64]) -> None:
        self._memory, self.__array_interface__ = memory, memory.__array_interface__

    def __del__(self, give_back: Callable[[NDArray[np.int64]], None] = _unused.append) -> None:
        give_back(self._memory)


def outside_vocabulary(path: Path, token: int, id: int, vocab_size: int) -> CacheError:
    """Return the error of token number `token` of a file, whose id a model of that vocabulary has no embedding for."""
    return CacheError(
        f"{path}: token {token} at byte {token * TOKEN_BYTES} is id {id}, expected ids below vocab_size {vocab_size}. "
        "The file is damaged or its meta.json is another's. Rebuild the cache: python -m niels_gpt.cache.cli build-all"
    )


def resolved_split(shards_dir: Path) -> Path:
    """Resolve the cache's folder, so that one version is read, but not a split's folder in it: that is no link.

    ~ is the home folder.
    """
    shards_dir = Path(os.path.expanduser(shards_dir))
    if shards_dir.name in ("", ".."):
        return resolved(shards_dir)
    cache = resolved(shards_dir.parent)
    if os.path.lexists(cache / META_NAME):
        return path_inside(cache, shards_dir.name)
    return resolved(cache / shards_dir.name)
