"""Compare two caches: keys of meta.json, and documents that are in one cache only or in another split.

Two documents are equal if a hash of their tokens is equal; if the tokenizers differ, a hash of their source ids. An
example of an sft cache is a document. Files are read as streams; matching takes less than 100 bytes per document.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.display.decoded import Decoder
from niels_gpt.kinds.folders import open_cache
from niels_gpt.kinds.kind import Cache
from niels_gpt.kinds.rows import FILE_KEYS
from niels_gpt.storage.fileio import id_of_line

PARTS = ("only_a", "only_b", "moved")
"""Differences between documents that `diff` counts."""
_NO_SETTINGS = FILE_KEYS | {"content_sha256", "meta_crc32", "first_noticed"}
_DIGEST_BYTES = 16
_MAX_DEPTH = 20  # of keys that are compared one by one; a deeper value is one value

Differences = dict[str, Any]


@dataclass(frozen=True)
class _Side:
    """One of the two caches."""

    cache: Cache
    tokenizer: Decoder | None
    splits: dict[str, int]  # documents; of a cache of one piece, all of them and no val

    @property
    def meta(self) -> dict[str, Any]:
        return self.cache.meta

    @property
    def names(self) -> list[str]:
        return list(self.splits)


def diff(left: Path, right: Path, *, tokenizers: Sequence[Decoder | None], limit: int) -> Differences:
    """Return the differences between caches A (`left`) and B (`right`), ready for JSON.

    settings: dotted key -> {"a": value, "b": value}, without a side that lacks the key; without the lists of files.
    compared: "tokens", "source ids" or null, and why not tokens. documents: their numbers.
    content_sha256: of both sides, if different. Another order of documents, other source ids or other loss bits show
        only here.
    only_a, only_b, moved (to the other split): count, and the first `limit` documents.
    tokenizers: of A and B, for the first words of a document; None, or a tokenizer of other ids: no words.
    Raises: FileNotFoundError; CacheError for a damaged cache; ValueError for a limit below 0.
    """
    if limit < 0:
        raise ValueError(f"limit={limit}: expected 0 or more")
    a, b = (_side(*pair) for pair in zip((left, right), tokenizers, strict=True))
    compared, reason = _comparable(a, b)
    differences: Differences = {"settings": _settings(a, b), "compared": compared, "why_not_tokens": reason}
    differences["documents"] = {"a": a.splits, "b": b.splits}
    contents = [side.meta.get("content_sha256") for side in (a, b)]
    if contents[0] != contents[1]:
        differences["content_sha256"] = dict(zip("ab", contents, strict=True))
    return differences | (_compared_documents(a, b, compared == "tokens", limit) if compared else {})


def num_moved_to_val(before: Path, after: Path) -> int:
    """Return how many documents of train in cache `before` are in val of `after`; 0 if they cannot be compared.

    Compares documents like `diff`. Raises: FileNotFoundError; CacheError for a damaged cache.
    """
    a, b = _side(before, None), _side(after, None)
    compared, _ = _comparable(a, b)
    if compared is None:
        return 0
    sizes = [*a.splits.values(), *b.splits.values()]
    return len(match(_digests((a, b), compared == "tokens"), sizes).moved[0][0])


def is_equal(differences: Differences) -> bool:
    """Return whether `diff` found no difference."""
    counts = [differences[part]["count"] for part in PARTS if part in differences]
    return not differences["settings"] and not any(counts) and "content_sha256" not in differences


def _side(path: Path, tokenizer: Decoder | None) -> _Side:
    cache = open_cache(path)
    if tokenizer is not None and tokenizer.sha256 != cache.meta.get("tokenizer_sha256"):
        tokenizer = None
    with cache.errors():
        sizes = cache.kind.sizes(cache)
    return _Side(cache, tokenizer, {**sizes, "val": 0} if len(sizes) == 1 else sizes)


# --- settings ---------------------------------------------------------------------------------------------------------


def _settings(a: _Side, b: _Side) -> dict[str, dict[str, Any]]:
    flat = [_flat(_own_settings(side.meta)) for side in (a, b)]
    for mine, theirs in (flat, flat[::-1]):
        for key in [key for key, value in mine.items() if value == {} and any(k.startswith(f"{key}.") for k in theirs)]:
            del mine[key]  # its keys are reported one by one
    return {
        key: {name: values[key] for name, values in zip("ab", flat, strict=True) if key in values}
        for key in sorted(flat[0].keys() | flat[1].keys())
        if json.dumps(flat[0].get(key, ...), default=str) != json.dumps(flat[1].get(key, ...), default=str)
    }


def _own_settings(meta: dict[str, Any]) -> dict[str, Any]:
    """Leave out the lists of files and partitions, and top-level keys that repeat `totals`."""
    totals = meta.get("totals", {})
    if isinstance(partitions := meta.get("partitions"), dict):  # what each has follows from the documents
        meta = {**meta, "partitions": {key: value for key, value in partitions.items() if key != "of_each"}}
    return {
        key: value
        for key, value in meta.items()
        if key not in _NO_SETTINGS and not (key in totals and value == totals[key])
    }


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value and prefix.count(".") < _MAX_DEPTH:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


# --- documents --------------------------------------------------------------------------------------------------------


def _comparable(a: _Side, b: _Side) -> tuple[str | None, str | None]:
    """Return how documents are compared, and why not by tokens."""
    if not a.splits or not b.splits or a.names != b.names or a.cache.kind.unit != b.cache.kind.unit:
        return None, "not both are caches of documents"
    keys = ("tokenizer_sha256", "vocab_size", "special_token_ids")
    if all(a.meta.get(key) == b.meta.get(key) for key in keys):
        return "tokens", None
    without = [name for name, side in (("A", a), ("B", b)) if any(side.splits.values()) and not _has_ids(side)]
    if without:
        names = " and ".join(without)
        return None, f"their tokenizers differ, and source ids of {names} were not recorded by the builder of that time"
    return "source ids", "their tokenizers differ"


def _compared_documents(a: _Side, b: _Side, by_tokens: bool, limit: int) -> Differences:
    sizes = [*a.splits.values(), *b.splits.values()]
    ids = _id_numbers((a, b)) if by_tokens and _has_ids(a) and _has_ids(b) else None
    matched = match(_digests((a, b), by_tokens), sizes, ids)
    differences: Differences = {}
    for part, side, numbers in (("only_a", a, matched.only_a), ("only_b", b, matched.only_b)):
        listed = [_described(side, side.names[split], int(numbers[split][at])) for split, at in _first(numbers, limit)]
        differences[part] = {"count": sum(map(len, numbers)), "first": listed}
    numbers, listed = [left for left, _ in matched.moved], []
    for split, at in _first(numbers, limit):
        left, right = (int(of_side[at]) for of_side in matched.moved[split])
        in_b: Differences = {"split": b.names[1 - split], "document": right}
        in_b["source_id"] = _source_id(b, in_b["split"], right)
        listed.append({**_described(a, a.names[split], left), "in_b": in_b})
    differences["moved"] = {"count": sum(map(len, numbers)), "first": listed}
    return differences


def _digests(sides: Sequence[_Side], by_tokens: bool) -> NDArray[np.uint64]:
    """Return a hash of each document, uint64 [documents, 2]: A's train and val, then B's."""
    digests = np.empty((sum(sum(side.splits.values()) for side in sides), _DIGEST_BYTES // 8), dtype=np.uint64)
    raw, start = digests.view(np.uint8).reshape(-1).data, 0
    for side in sides:
        for split, documents in side.splits.items():
            with side.cache.errors():
                found = (
                    side.cache.kind.digests(side.cache, split) if by_tokens else _id_digests(side, split, _DIGEST_BYTES)
                )
                for digest in found if documents else ():
                    raw[start : start + _DIGEST_BYTES] = digest
                    start += _DIGEST_BYTES
    return digests


def _id_numbers(sides: Sequence[_Side]) -> NDArray[np.uint64]:
    """Return a hash of the source id of each document, uint64 [documents]: A's train and val, then B's."""
    parts = []
    for side in sides:
        with side.cache.errors():
            for split, documents in side.splits.items():
                lines = _id_digests(side, split, 8) if documents else ()
                parts.append(np.fromiter((int.from_bytes(line) for line in lines), np.uint64))
    return np.concatenate(parts)


def _has_ids(side: _Side) -> bool:
    return side.cache.kind.source_ids(side.cache, side.names[0]) is not None


def _id_digests(side: _Side, split: str, num_bytes: int) -> Iterator[bytes]:
    """Yield a hash of each source id."""
    for line in side.cache.kind.source_ids(side.cache, split) or ():
        yield hashlib.blake2b(line, digest_size=num_bytes).digest()


def _described(side: _Side, split: str, number: int) -> Differences:
    """Return a document's split, number, source id and first words."""
    with side.cache.errors():
        words = side.cache.kind.words(side.cache, side.tokenizer, split, number)
        return {"split": split, "document": number, "source_id": _source_id(side, split, number), "words": words}


def _source_id(side: _Side, split: str, number: int) -> str | None:
    with side.cache.errors():
        lines = side.cache.kind.source_ids(side.cache, split)
        line = None if lines is None else next(itertools.islice(lines, number, None), None)
    with warnings.catch_warnings():  # about a damaged line
        warnings.simplefilter("ignore")
        return None if line is None else id_of_line(line, "replace")


# --- which documents both caches have ---------------------------------------------------------------------------------

Numbers = NDArray[np.int64]
"""Document numbers of a split, ascending; or the group number of each document: equal documents share a group."""
Pairs = tuple[Numbers, Numbers]
"""Documents of A, ascending, and the matching documents of B."""


class Match(NamedTuple):
    """Documents of train and val that differ. The k-th of several equal documents of A matches the k-th of B."""

    only_a: list[Numbers]
    only_b: list[Numbers]
    moved: list[Pairs]
    """Documents of A's train, then val, that are in B's other split, with their numbers there."""


def match(digests: NDArray[np.uint64], sizes: Sequence[int], ids: NDArray[np.uint64] | None = None) -> Match:
    """Match the documents of two caches.

    digests: a hash of each document, uint64 [documents, 2]: A's train and val, then B's.
    sizes: number of documents in each of these four splits. A document that occurs n times needs n documents in B; it
        is matched within its own split first.
    ids: a hash of each document's source id, uint64 [documents], in the same order. Equal documents with the same
        source id are matched first.
    """
    if ids is None:
        return _match_groups(_groups(digests), sizes)
    first = _match_groups(_groups(digests + ids[:, None]), sizes)
    starts = np.cumsum([0, *sizes[:-1]])
    left_over = [*first.only_a, *first.only_b]
    places = np.concatenate([part + start for part, start in zip(left_over, starts, strict=True)])
    rest = _match_groups(_groups(digests[places]), list(map(len, left_over)))  # numbered among the left over
    moved = []
    for split, (left, right) in enumerate(rest.moved):
        more = first.only_a[split][left], first.only_b[1 - split][right]
        moved.append(_by_left(*(np.concatenate(both) for both in zip(first.moved[split], more, strict=True))))
    only_a, only_b = (
        [numbers[left] for numbers, left in zip(of_first, of_rest, strict=True)]
        for of_first, of_rest in ((first.only_a, rest.only_a), (first.only_b, rest.only_b))
    )
    return Match(only_a, only_b, moved)


def _match_groups(groups: Numbers, sizes: Sequence[int]) -> Match:
    num_groups = int(groups.max(initial=-1)) + 1
    at, av, bt, bv = parts = np.split(groups, np.cumsum(sizes)[:-1])
    count_at, count_av, count_bt, count_bv = (np.bincount(part, minlength=num_groups) for part in parts)
    train, val = np.minimum(count_at, count_bt), np.minimum(count_av, count_bv)
    to_val, to_train = np.minimum(count_at - train, count_bv - val), np.minimum(count_av - val, count_bt - train)
    del count_at, count_av, count_bt, count_bv
    only_a, left = zip(_unmatched(at, train, to_val), _unmatched(av, val, to_train), strict=True)
    only_b, right = zip(_unmatched(bt, train, to_train), _unmatched(bv, val, to_val), strict=True)
    moved = [_by_left(left[split], right[1 - split]) for split in (0, 1)]
    return Match([np.sort(part) for part in only_a], [np.sort(part) for part in only_b], moved)


def _groups(digests: NDArray[np.uint64]) -> Numbers:
    """Return the group number of each document: equal digests have equal numbers."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    is_new = np.zeros(len(digests), dtype=np.bool_)
    for half in (0, 1):
        column = digests[order, half]
        is_new[1:] |= column[1:] != column[:-1]
    groups = np.empty(len(digests), dtype=np.int64)
    groups[order] = np.cumsum(is_new)
    return groups


def _unmatched(groups: Numbers, stay: Numbers, cross: Numbers) -> tuple[Numbers, Numbers]:
    """Return the documents that the other cache lacks, and the documents in its other split.

    stay, cross: how many of each group are in the same split and in the other split of the other cache. The first of
        several equal documents stay, the next cross. Both results are sorted by group, then by number, so that the two
        sides correspond.
    """
    order = np.argsort(groups, kind="stable")
    of = groups[order]
    starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(of)), dtype=np.bool_), of[1:] != of[:-1]]))
    ranks = np.arange(len(of)) - np.repeat(starts, np.diff(np.append(starts, len(of))))
    crosses = (ranks >= stay[of]) & (ranks < (stay + cross)[of])
    return order[ranks >= (stay + cross)[of]], order[crosses]


def _by_left(left: Numbers, right: Numbers) -> Pairs:
    order = np.argsort(left)
    return left[order], right[order]


def _first(numbers: Sequence[Numbers], limit: int) -> Iterator[tuple[int, int]]:
    """Yield the first `limit` documents of train and then val, as split (0, 1) and index."""
    places = ((split, index) for split, found in enumerate(numbers) for index in range(len(found)))
    yield from (place for place, _ in zip(places, range(limit), strict=False))
