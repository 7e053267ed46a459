"""Loss of chats of another template than the project's: a bit for each token, beside the tokens (docs/formats.md).

Decides how a batch's bits are taken from them: whole bytes are copied, then shifted. Which meta.json has such bits:
formats.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from niels_gpt.cache.checksums import BlockSums
from niels_gpt.cache.formats import IGNORE_INDEX, num_bytes
from niels_gpt.cache.mmap import IO, joined, mmap_tokens, token_files
from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import path_inside, printable

Numbers = NDArray[np.int64]
_BYTE, _WORD = np.dtype(np.uint8), np.dtype("<u8")
_WORD_BITS = np.uint64(64)
# int64 [256, 8]: of the bits of a byte, what the target of each is limited to; -100 where it carries no loss.
_LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 2**31, IGNORE_INDEX
)


def bits_path(folder: Path, meta: Mapping[str, Any], tokens_name: str) -> Path:
    """Return the file of the bits of a token file.

    Raises: CacheError if meta.json does not name both for one split, and for a link.
    """
    for split, shards in meta.get("shards", {}).items():
        if split in meta["loss_bits"] and any(record["name"] == tokens_name for record in shards):
            return path_inside(folder, str(meta["loss_bits"][split]["name"]))
    raise CacheError(folder / META_NAME, f"no loss_bits of {printable(tokens_name)}", remedy=REBUILD, code="E202")


class LossBits:
    """The bits of a split, by memory map or by positioned reads. It is not pickled: its owner opens it again."""

    def __init__(
        self,
        path: Path,
        num_tokens: int,
        *,
        io: IO = "mmap",
        recorded: int | None = None,
        sums: BlockSums | None = None,
    ) -> None:
        """num_tokens: of the split's token file, more than 0; recorded: the bytes by meta.json; sums: its checksums.

        Raises: FileNotFoundError; CacheError for another size, unused bits that are not 0, and anything that is not a
            regular file: links are not followed.
        """
        self.path, self._num_tokens = path, num_tokens
        self._map: memoryview | None = None
        self._views: tuple[int, NDArray[np.uint8] | None, NDArray[np.uint64]] | None = None
        if io == "mmap" and not (sums and sums.in_blocks):
            self._map = mmap_tokens(path, expected_bytes=recorded, dtype=_BYTE, sums=sums).data
            size = len(self._map)
        else:
            self._file = token_files([(path, recorded)], sums or BlockSums(path.parent, None), io=io, dtype=_BYTE)
            size = int(self._file.lengths[0])
        if size != num_bytes(num_tokens):
            expected = f"{num_bytes(num_tokens)}, a bit for each of {num_tokens} tokens"
            raise CacheError(path, f"{size} bytes", expected, REBUILD, code="E203")
        unused = self._bytes(size - 1, size)[0] >> ((num_tokens - 1) % 8 + 1)
        if unused:
            found = f"byte {size - 1} has bits of tokens after the last one, {num_tokens - 1}"
            raise CacheError(path, found, "zeros", REBUILD, code="E201")

    def will_read(self, begins: Numbers, ends: Numbers) -> None:
        """Say which tokens' bits will be read next, in this order, of a cache at a URL."""
        self._file.will_read(np.zeros(len(begins), dtype=np.int64), begins >> 3, num_bytes_of(ends))

    def check_starts(self, starts: Numbers, first: int, idx_name: str) -> None:
        """Raise CacheError if the first token of an example carries loss, which bits of other tokens show.

        starts: the first token of examples first, first + 1, ..., ascending, not far apart. idx_name: their file.
        """
        begin = int(starts[0]) >> 3
        some = np.frombuffer(self._bytes(begin, (int(starts[-1]) >> 3) + 1), dtype=np.uint8)
        wrong = np.flatnonzero(some[(starts >> 3) - begin] >> (starts & 7).astype(np.uint8) & 1)
        if len(wrong):
            token = int(starts[wrong[0]])
            begins = f"with which example {first + wrong[0]} begins by {idx_name}"
            found = f"token {token} carries loss (byte {token >> 3}), {begins}"
            why = "Nothing predicts it: the bits or the offsets belong to other tokens, or are damaged"
            raise CacheError(self.path, found, remedy=f"{why}. {REBUILD}", code="E201")

    def flat(self, begins: Numbers, ends: Numbers, pads: Numbers | None = None) -> NDArray[np.bool_]:
        """Return whether tokens begins[k] to ends[k] - 1 carry loss, end to end: bool [sum]. No range is empty.

        pads: int64 [n], tokens of padding after each range, without loss; None: none.
        """
        if not len(begins):
            return np.zeros(0, dtype=np.bool_)
        firsts, lasts = begins >> 3, num_bytes_of(ends)
        spans, content = zip(firsts.tolist(), lasts.tolist(), strict=True), self._map
        if content is None:
            parts = [self._bytes(at, end) for at, end in spans]
        else:
            parts = [content[at:end] for at, end in spans]  # a call for each would take half of the time
        bits = np.unpackbits(np.frombuffer(bytearray().join(parts), dtype=np.uint8), bitorder="little")
        places = 8 * (np.cumsum(lasts - firsts) - lasts) + begins  # of each range among the bits
        if len(begins) == 1 and pads is None:
            return bits[int(places[0]) : int(places[0] + ends[0] - begins[0])].view(np.bool_)
        every = bits.data
        chosen = [every[at:end] for at, end in zip(places.tolist(), (places + ends - begins).tolist(), strict=True)]
        return joined(chosen, pads, 0, np.dtype(np.bool_))

    def padded(self, begins: Numbers, ends: Numbers, width: int) -> NDArray[np.uint8]:
        """Return the bits of rows of `width` tokens without their first: uint8 [B, ceil((width - 1) / 8)].

        The bit of token begins[b] + 1 is the lowest of byte 0 of row b. From ends[b] on they are 0.
        """
        firsts, count = begins >> 3, ends - begins - 1
        windows, kept = self._tables(-(-(width - 1) // 64))
        if windows is None or firsts.max(initial=0) >= len(windows):  # near the end of the file
            raw = self._joined(firsts, num_bytes_of(ends), 8 * kept.shape[2] + 8)
        else:
            raw = windows[firsts]
        words = raw.view(_WORD)  # an eighth of the operations that bytes would take
        shift = ((begins & 7) + 1).astype(_WORD)[:, None]
        aligned = words[:, :-1] >> shift
        aligned |= words[:, 1:] << (_WORD_BITS - shift)
        aligned &= kept[count & 63, kept.shape[2] - (count >> 6)]
        return aligned.view(np.uint8)[:, : num_bytes(width - 1)]

    def _tables(self, columns: int) -> tuple[NDArray[np.uint8] | None, NDArray[np.uint64]]:
        """Return two views, which are kept for the next batch.

        All windows of columns + 1 words of 8 bytes of the map, by their first byte; None without a map and of a shorter
        file. And by (n % 64, columns - n // 64) `columns` words whose first n bits are 1.
        """
        views = self._views
        if views is None or views[0] != columns:
            content = np.zeros(0, np.uint8) if self._map is None else np.frombuffer(self._map, dtype=np.uint8)
            size, ones = 8 * columns + 8, np.zeros((64, 2 * columns + 1), dtype=_WORD)
            ones[:, :columns] = ~np.uint64(0)
            ones[:, columns] = (np.uint64(1) << np.arange(64, dtype=np.uint64)) - np.uint64(1)
            windows = None if len(content) < size else sliding_window_view(content, size)
            # Returned as it is here: another thread may ask for another width.
            self._views = views = (columns, windows, sliding_window_view(ones, columns, axis=1))
        return views[1:]

    def _joined(self, firsts: Numbers, lasts: Numbers, size: int) -> NDArray[np.uint8]:
        """Return bytes firsts[b] to lasts[b] - 1 of the file, each row filled up with zeros: uint8 [B, size]."""
        zeros, parts = bytes(size), []
        for at, end in zip(firsts.tolist(), lasts.tolist(), strict=True):
            parts += [self._bytes(at, end), zeros[end - at :]]
        return np.frombuffer(bytearray().join(parts), dtype=np.uint8).reshape(len(firsts), size)

    def _bytes(self, first: int, end: int) -> Any:
        if self._map is not None:
            return self._map[first:end]
        return self._file.gather(np.zeros(1, np.int64), np.array([first]), end - first)[0].data


def num_bytes_of(tokens: Numbers) -> Numbers:
    """Return the bytes that hold the loss bits of each number of tokens."""
    return (tokens + 7) >> 3


def unpacked(bits: NDArray[np.uint8], width: int) -> NDArray[np.bool_]:
    """Return the bits of `LossBits.padded` as bool [B, width]."""
    return np.unpackbits(bits, axis=1, count=width, bitorder="little").view(np.bool_)


def limited_by_bits(y: NDArray[Any], bits: NDArray[np.uint8], out: Numbers) -> Numbers:
    """Write y, ids [B, T], into out, int64 [B, T], with -100 where bits are 0; returns out. bits: of `padded`."""
    rows, width = y.shape
    if width % 8:
        limits = _LIMITS.take(bits, axis=0).reshape(rows, 8 * bits.shape[1])[:, :width]
    else:  # without a copy
        limits = _LIMITS.take(bits, axis=0, out=out.reshape(rows, width // 8, 8), mode="clip").reshape(rows, width)
    np.minimum(y, limits, out=out)
    return out
