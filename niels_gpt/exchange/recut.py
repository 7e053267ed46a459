"""The shards of the cache that was exported, cut again from files that hold several of them, or whole documents.

Batches depend on where shards end: no window crosses two of them. A manifest says how many tokens each shard had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.exchange.foreign import ForeignFile, read_pieces


def recut(files: Sequence[ForeignFile], manifest: Mapping[str, Any]) -> list[ForeignFile]:
    """Return the files of a pretrain export with the shards of its cache; a split whose tokens are others, as it is.

    manifest: checked. A file that is one shard stays, so that it may be linked.
    """
    found: list[ForeignFile] = []
    for split in SPLITS:
        of_split = [file for file in files if file.split == split]
        shards = _shards(manifest, split)
        lengths = [tokens for _, tokens in shards]
        if lengths == [file.tokens for file in of_split] or sum(lengths) != sum(file.tokens for file in of_split):
            found += of_split
            continue
        first = 0
        for name, tokens in shards:
            found.append(_cut(of_split, name, first, first + tokens))
            first += tokens
    return found


def _shards(manifest: Mapping[str, Any], split: str) -> list[tuple[str, int]]:
    """Return name and tokens of each shard, in order; a shard that lies in several files counts once."""
    return list(
        {
            each["name"]: int(each["tokens"])
            for record in manifest["files"]
            if record.get("split") == split
            for each in record["of"]
            if each.get("tokens")
        }.items()
    )


def _cut(files: Sequence[ForeignFile], name: str, begin: int, end: int) -> ForeignFile:
    """Return tokens begin to end - 1 of some files end to end as one file."""
    parts, first = [], 0
    for file in files:
        low, high = max(begin - first, 0), min(end - first, file.tokens)
        if low < high:
            parts.append((file, low, high))
        first += file.tokens
    has_ends = all(file.ends is not None for file, *_ in parts)
    inside = parts[0][1]
    ends_before = _ends_of(parts[0][0]) if inside else np.zeros(0, dtype=np.int64)
    return replace(
        parts[0][0],
        name=name,
        tokens=end - begin,
        pieces=partial(_pieces, parts),
        ends=partial(_ends, parts) if has_ends else None,
        token_file=None,
        itemsize=0,
        ids=partial(_names, parts) if has_ends else None,
        continues=inside not in ends_before if inside else parts[0][0].continues,
    )


_Parts = Sequence[tuple[ForeignFile, int, int]]
"""Files, and from which token to which one each is used."""


def _ends_of(file: ForeignFile) -> NDArray[np.int64]:
    return np.array([file.tokens], dtype=np.int64) if file.ends is None else file.ends()


def _pieces(parts: _Parts) -> Iterator[NDArray[Any]]:
    for file, low, high in parts:
        if file.token_file is not None:  # what lies before the shard is not read
            dtype = np.dtype(f"<u{file.itemsize}")
            yield from read_pieces(file.token_file, dtype, offset=low * dtype.itemsize, count=high - low)
            continue
        at = 0
        for piece in file.pieces():
            some = piece[max(low - at, 0) : max(high - at, 0)]
            at += len(piece)
            if len(some):
                yield some
            if at >= high:
                break


def _ends(parts: _Parts) -> NDArray[np.int64]:
    found, before = [], 0
    for number, (file, low, high) in enumerate(parts):
        ends = _ends_of(file)
        ends = ends[(ends > low) & (ends <= high)] - low
        is_last = number == len(parts) - 1
        if is_last and (not len(ends) or ends[-1] != high - low):
            ends = np.append(ends, np.int64(high - low))
        found.append(ends + before)
        before += high - low
    return np.concatenate(found)


def _names(parts: _Parts) -> Iterator[str]:
    """Yield the name of each document of `_ends`: one that lies in two shards has its name in both."""
    for file, low, high in parts:
        ends = _ends_of(file)
        first, last = (int(place) for place in np.searchsorted(ends, (low, high - 1), side="right"))
        yield from islice(file.names(len(ends)), first, last + 1)
