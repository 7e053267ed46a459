"""Look at a split of a token cache: documents, lengths, ids, loss and source ids.

`cache` is the resolved folder of one version, `meta` its meta.json. A document of an sft cache is an example. The
module opens files itself instead of through a reader, so that a cache that readers refuse can still be shown.
"""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.checksums import BlockSums
from niels_gpt.cache.formats import (
    OFFSET_DTYPE,
    Ids,
    flat_targets,
    has_loss_bits,
    npy_header,
    target_mask,
    token_dtype_of,
)
from niels_gpt.cache.loss_bits import LossBits, bits_path
from niels_gpt.cache.meta import recorded_bytes, special_id
from niels_gpt.cache.mmap import FetchedItems, load_idx, mmap_tokens, token_files
from niels_gpt.display.numbers import size_text
from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.fileio import META_NAME, id_of_line
from niels_gpt.storage.meta_json import open_regular, path_inside
from niels_gpt.storage.mounted import shown

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 2**16
"""Tokens whose loss is counted at once: its masks fit a core's cache."""
_READ_BYTES = 1 << 20
_MAX_ID_BYTES = 1 << 24


def bounds(cache: Path, meta: dict[str, Any], split: str) -> NDArray[np.int64]:
    """Return starts of all documents, then the end of the last one, in tokens: int64 [documents + 1], ascending.

    For a pretrain cache it is the mapped file. A split without documents, as in a stub, gives [0].
    Raises: FileNotFoundError, or CacheError E201, E203 or E205 if a file is missing or does not match meta.json.
    """
    total = int(meta["totals"][f"{split}_tokens"])
    if total == 0:  # a stub has no file, and an empty sft split has one that cannot be mapped
        return np.zeros(1, dtype=OFFSET_DTYPE)
    if meta["kind"] == "sft":
        end = len(tokens_of(cache, meta, split))
        return np.append(load_idx(path_inside(cache, f"{split}_idx.npy"), num_tokens=end), np.int64(end))
    path = path_inside(cache, f"index/{split}_docs.npy")
    starts = load_idx(path, num_tokens=np.iinfo(OFFSET_DTYPE).max)
    if starts[-1] != total:
        raise CacheError(path, f"ends at token {starts[-1]}", f"{total} by {META_NAME}", REBUILD, code="E201")
    return starts


def example_bounds(cache: Path, meta: dict[str, Any], split: str) -> NDArray[np.int64] | FetchedBounds:
    """Return `bounds` of an sft split; at a URL in blocks, without a look at all of them."""
    sums, total, index = BlockSums(cache, meta), int(meta["totals"][f"{split}_tokens"]), meta["index"]
    if sums.mount is None or not total:
        return bounds(cache, meta, split)
    path = path_inside(cache, f"{split}_idx.npy")
    items = FetchedItems(token_files([(path, index[split]["bytes"])], sums, dtype=OFFSET_DTYPE))
    return FetchedBounds(items, len(npy_header(0)) // OFFSET_DTYPE.itemsize, total)


class FetchedBounds:
    """The bounds of a split in a .npy file at a URL: those that are asked for are fetched."""

    def __init__(self, items: FetchedItems, first: int, total: int) -> None:
        """items: of the whole file. first: item of the first start. total: tokens of the split."""
        self._items, self._first, self._total = items, first, total

    def __len__(self) -> int:
        return len(self._items) - self._first + 1

    def __getitem__(self, number: int) -> int:
        at = self._first + number
        return self._total if number == len(self) - 1 else int(self._items[at : at + 1][0])


def lengths(cache: Path, meta: dict[str, Any], split: str) -> NDArray[np.int64]:
    """Return the tokens of each document of a split: int64 [documents].

    Raises: FileNotFoundError, or CacheError if a file is missing or does not match meta.json.
    """
    return np.diff(bounds(cache, meta, split))


def tokens_of(cache: Path, meta: dict[str, Any], split: str) -> Ids | FetchedItems:
    """Map the token file of an sft split: its ids [tokens]. At a URL slices of it are fetched.

    Raises: FileNotFoundError; CacheError E203 or E205 for a file of another size or kind, and for an empty split.
    """
    path, size = path_inside(cache, f"{split}_tokens.bin"), meta["shards"][split][0]["bytes"]
    return _tokens(cache, meta, path, size)


def _tokens(cache: Path, meta: dict[str, Any], path: Path, size: int) -> Ids | FetchedItems:
    dtype, sums = token_dtype_of(meta, cache / META_NAME), BlockSums(cache, meta)
    if sums.mount is not None:
        return FetchedItems(token_files([(path, size)], sums, dtype=dtype))
    return mmap_tokens(path, expected_bytes=size, dtype=dtype)


def ids_at(cache: Path, meta: dict[str, Any], split: str, start: int, end: int) -> Ids:
    """Return tokens [start, end) of a split, which may lie in several shards, in the cache's dtype."""
    dtype = token_dtype_of(meta, cache / META_NAME)
    parts, before = [np.zeros(0, dtype=dtype)], 0
    for record in meta["shards"][split]:
        first, last = max(start - before, 0), min(end - before, record["tokens"])
        if first < last:
            path = path_inside(cache, record["name"])
            parts.append(_tokens(cache, meta, path, record["bytes"])[first:last])
        before += record["tokens"]
    return np.concatenate(parts)


def mask_of(cache: Path, meta: dict[str, Any], split: str, start: int, ids: Ids) -> NDArray[np.bool_]:
    """Return which tokens of an sft example are supervised: bool [tokens].

    start: position of its first token. ids: its tokens, or the first of them.
    """
    if has_loss_bits(meta):
        bits = open_bits(cache, meta, split, len(tokens_of(cache, meta, split)))
        return bits.flat(np.array([start]), np.array([start + len(ids)]))
    asst_id, eot_id = (special_id(cache, meta, name) for name in ("asst", "eot"))
    return target_mask(ids[None], np.array([len(ids)]), asst_id=asst_id, eot_id=eot_id).reshape(-1)


def open_bits(folder: Path, meta: dict[str, Any], split: str, num_tokens: int) -> LossBits:
    """Map the loss bits of a split that has tokens. Raises: FileNotFoundError; CacheError for a file that does not
    match."""
    path = bits_path(folder, meta, f"{split}_tokens.bin")
    sums = BlockSums(folder, meta)
    return LossBits(path, num_tokens, recorded=recorded_bytes(folder, meta, path), sums=sums if sums.mount else None)


def supervised_counts(cache: Path, meta: dict[str, Any], split: str) -> NDArray[np.int64]:
    """Return the number of supervised tokens of each example of an sft split: int64 [examples].

    Uses the loss bits or the sentinels. Memory holds about 65,536 tokens, or one longer example.
    Raises: FileNotFoundError, or CacheError if a file is missing or does not match meta.json, or the ids of the
        sentinels are unknown.
    """
    starts = bounds(cache, meta, split)
    counts = np.zeros(len(starts) - 1, dtype=np.int64)
    if len(counts) == 0:
        return counts
    mask = _loss_reader(cache, meta, split)
    first = 0
    while first < len(counts):
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + BLOCK_TOKENS, "right")) - 1)
        edges = starts[first : last + 1]
        # Of an empty example reduceat would give the next token, but the index ascends strictly.
        counts[first:last] = np.add.reduceat(mask(edges), edges[:-1] - edges[0], dtype=np.int64)
        first = last
    return counts


def _loss_reader(cache: Path, meta: dict[str, Any], split: str) -> Callable[[NDArray[np.int64]], NDArray[np.bool_]]:
    """Return a function that gives the loss mask of examples, given their edges: bool [tokens], end to end."""
    tokens = tokens_of(cache, meta, split)
    if has_loss_bits(meta):
        bits = open_bits(cache, meta, split, len(tokens))
        return lambda edges: bits.flat(edges[:1], edges[-1:])
    if isinstance(tokens, FetchedItems):
        size = size_text(meta["shards"][split][0]["bytes"])
        logger.info("%s: the loss of %s is counted, which fetches %s of tokens", shown(cache), split, size)
    asst_id, eot_id = (special_id(cache, meta, name) for name in ("asst", "eot"))

    def by_sentinels(edges: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Find the loss of whole examples by the sentinels in their tokens."""
        closed = np.zeros(len(edges) - 1, dtype=np.bool_)
        ids = tokens[edges[0] : edges[-1]]
        return flat_targets(ids, edges[1:] - edges[0], closed, asst_id=asst_id, eot_id=eot_id)

    return by_sentinels


def source_id(cache: Path, meta: dict[str, Any], split: str, number: int) -> str | None:
    """Return the source id of document `number` of a split; None if the builder recorded none.

    Raises: FileNotFoundError; CacheError E201 if the file has no such line.
    """
    if split not in meta.get("ids", {}):
        return None
    line = next(itertools.islice(id_lines(cache, meta, split), number, None), None)
    if line is None:
        path = cache / meta["ids"][split]["name"]
        raise CacheError(path, f"has no line {number}", "one for each document", REBUILD, code="E201")
    with warnings.catch_warnings():  # about a damaged line
        warnings.simplefilter("ignore")
        return id_of_line(line, "replace")


def id_lines(cache: Path, meta: dict[str, Any], split: str) -> Iterator[bytes]:
    """Yield the source ids of a split in the order of its documents, as written in the file, without line ends.

    Raises: FileNotFoundError; CacheError E203 for another size, E201 for an id of more than 16 MiB.
    """
    record = meta["ids"][split]
    rest, path = b"", path_inside(cache, record["name"])
    with open(open_regular(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) != record["bytes"]:
            raise CacheError(path, f"{size} bytes", f"{record['bytes']} by its {META_NAME}", REBUILD, code="E203")
        while content := file.read(_READ_BYTES):
            *lines, rest = (rest + content).split(b"\n")
            yield from lines
            if len(rest) > _MAX_ID_BYTES:
                raise CacheError(path, f"a line of more than {_MAX_ID_BYTES:,} bytes", "a source id", code="E201")
    if rest:
        yield rest
