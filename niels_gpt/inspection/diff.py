"""What differs between two caches: keys of their meta.json, and documents by what they hold.

A document is its tokens, hashed; caches of two tokenizers have no tokens in common, so there it is its source id. Equal
tokens may be of other source ids, which is one more difference. All files are read as streams; matching.py has what is
kept of each document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.mmap import mmap_tokens
from niels_gpt.fileio import META_NAME, CacheError
from niels_gpt.inspection import matching
from niels_gpt.inspection.matching import Pairs, first
from niels_gpt.inspection.show import Decoder, plain, short_names
from niels_gpt.inspection.source_ids import id_lines, source_id
from niels_gpt.inspection.stats import bounds, described_by, ids_at, opened
from niels_gpt.records import path_inside

_OF_FILES = {"shards", "index", "ids", "checksums", "files", "content_sha256", "meta_crc32"}
_DIGEST_BYTES = 16
_WORDS_TOKENS, _WORDS_CHARS = 24, 60  # of a document's beginning
_MAX_DEPTH = 20  # of keys that are told apart; a deeper value is one value
_CHUNK = 1 << 16  # bounds that are Python numbers at a time

Found = dict[str, Any]


@dataclass(frozen=True)
class _Side:
    """One of the two caches."""

    folder: Path
    meta: dict[str, Any]
    tokenizer: Decoder | None
    splits: dict[str, int]  # documents


def diff(left: Path, right: Path, *, tokenizers: Sequence[Decoder | None], limit: int) -> Found:
    """Return what differs between the caches A (`left`) and B (`right`), ready for JSON.

    settings: dotted key -> {"a": value, "b": value}, without the side that lacks it; the lists of files are left out.
    compared: "tokens", "source ids" or null, and why not tokens; documents: their numbers.
    content_sha256: that of each side, where they differ; then something does, even if it is none of the rest.
    only_a, only_b, moved (to the other split), reordered (in the same split: the fewest whose places explain the order
    of all), renamed (equal tokens, another source id): count, and the first `limit` documents.
    tokenizers: of A and B, for the first words of a document; None, or one of other ids: no words.
    Raises: FileNotFoundError, CacheError; ValueError for a limit below 0.
    """
    if limit < 0:
        raise ValueError(f"limit={limit}: expected 0 or more")
    a, b = (_side(*given) for given in zip((left, right), tokenizers, strict=True))
    return _differences(a, b, limit)


def _differences(a: _Side, b: _Side, limit: int) -> Found:
    flat = [_flat(_settings(side.meta)) for side in (a, b)]
    for mine, theirs in (flat, flat[::-1]):
        for key in [key for key, value in mine.items() if value == {} and any(k.startswith(f"{key}.") for k in theirs)]:
            del mine[key]  # its keys are told one by one
    settings = {
        key: {name: values[key] for name, values in zip("ab", flat, strict=True) if key in values}
        for key in sorted(flat[0].keys() | flat[1].keys())
        if json.dumps(flat[0].get(key, ...), default=str) != json.dumps(flat[1].get(key, ...), default=str)
    }
    compared, reason = _comparable(a, b)
    found: Found = {"settings": settings, "compared": compared, "why_not_tokens": reason}
    found["documents"] = {"a": a.splits, "b": b.splits}
    contents = [side.meta.get("content_sha256") for side in (a, b)]
    if contents[0] != contents[1]:
        found["content_sha256"] = dict(zip("ab", contents, strict=True))
    found |= _compared_documents(a, b, compared == "tokens", limit) if compared else {}
    return found


def is_equal(found: Found) -> bool:
    """Whether `diff` found no difference."""
    counts = [found[part]["count"] for part in PARTS if part in found]
    return not found["settings"] and not any(counts) and "content_sha256" not in found


PARTS = ("only_a", "only_b", "moved", "reordered", "renamed")
"""Of the documents that `diff` counts."""


def _side(cache: Path, tokenizer: Decoder | None) -> _Side:
    folder, meta = opened(cache, ("pretrain", "sft", "tokenizer"))
    if tokenizer is not None and tokenizer.sha256 != meta.get("tokenizer_sha256"):
        tokenizer = None
    has_documents = meta.get("kind") in ("pretrain", "sft")
    with described_by(cache):
        splits = {split: len(bounds(folder, meta, split)) - 1 for split in SPLITS} if has_documents else {}
    return _Side(folder, meta, tokenizer, splits)


def _settings(meta: dict[str, Any]) -> dict[str, Any]:
    """Leave out the lists of files, and what stands at the top level and in `totals` too."""
    totals = meta.get("totals", {})
    return {
        key: value
        for key, value in meta.items()
        if key not in _OF_FILES and not (key in totals and value == totals[key])
    }


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value and prefix.count(".") < _MAX_DEPTH:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _comparable(a: _Side, b: _Side) -> tuple[str | None, str | None]:
    if not a.splits or not b.splits:
        return None, "not both are caches of documents"
    keys = ("tokenizer_sha256", "vocab_size", "special_token_ids")
    if all(a.meta.get(key) == b.meta.get(key) for key in keys):
        return "tokens", None
    lacking = [name for name, side in (("A", a), ("B", b)) if any(side.splits.values()) and "ids" not in side.meta]
    if lacking:
        said = " and ".join(lacking)
        return None, f"their tokenizers differ, and source ids of {said} were not recorded by the builder of that time"
    return "source ids", "their tokenizers differ"


def _digests(sides: Sequence[_Side], by_tokens: bool) -> NDArray[np.uint64]:
    """Return a hash of each document of A's train and val and of B's: uint64 [documents, 2]."""
    found = np.empty((sum(sum(side.splits.values()) for side in sides), _DIGEST_BYTES // 8), dtype=np.uint64)
    raw, place = found.view(np.uint8).reshape(-1).data, 0
    for side in sides:
        for split, documents in side.splits.items():
            with described_by(side.folder):
                digests = _token_digests(side, split) if by_tokens else _id_digests(side, split, _DIGEST_BYTES)
                for digest in digests if documents else ():
                    raw[place : place + _DIGEST_BYTES] = digest
                    place += _DIGEST_BYTES
    return found


def _id_digests(side: _Side, split: str, num_bytes: int) -> Iterator[bytes]:
    """Yield a hash of each source id. Raises: CacheError unless there is one for each document."""
    number, documents = 0, side.splits[split]
    for number, line in enumerate(id_lines(side.folder, side.meta, split), 1):
        if number > documents:
            break
        yield hashlib.blake2b(line, digest_size=num_bytes).digest()
    if number != documents:
        said = f"{'more' if number > documents else number} lines, expected {documents}, one for each document"
        raise CacheError(f"{side.folder / side.meta['ids'][split]['name']}: {said}. Rebuild the cache")


def _token_digests(side: _Side, split: str) -> Iterator[bytes]:
    ends = _numbers(bounds(side.folder, side.meta, split)[1:])
    digest, end, position = hashlib.blake2b(digest_size=_DIGEST_BYTES), next(ends, None), 0
    for record in side.meta["shards"][split]:
        if not record["bytes"]:
            continue
        tokens = mmap_tokens(path_inside(side.folder, record["name"]), expected_bytes=record["bytes"])
        content, first, last = tokens.data, position, position + len(tokens)
        while end is not None and end <= last:
            digest.update(content[position - first : end - first])
            yield digest.digest()
            digest, position, end = hashlib.blake2b(digest_size=_DIGEST_BYTES), end, next(ends, None)
        digest.update(content[position - first :])  # it goes on in the next shard
        position = last
    if position != (total := side.meta["totals"][f"{split}_tokens"]):
        said = f"its shards of {split} hold {position} tokens, its totals say {total}"
        raise CacheError(f"{side.folder / META_NAME}: {said}. Rebuild the cache")


def _numbers(values: NDArray[np.int64]) -> Iterator[int]:
    for start in range(0, len(values), _CHUNK):
        yield from values[start : start + _CHUNK].tolist()


def _compared_documents(a: _Side, b: _Side, by_tokens: bool, limit: int) -> Found:
    has_ids = by_tokens and "ids" in a.meta and "ids" in b.meta
    ids = _id_numbers((a, b)) if has_ids else None
    match = matching.match(_digests((a, b), by_tokens), [*a.splits.values(), *b.splits.values()], ids)
    found: Found = {}
    for part, side, numbers in (("only_a", a, match.only_a), ("only_b", b, match.only_b)):
        listed = [_told(side, SPLITS[split], int(numbers[split][place])) for split, place in first(numbers, limit)]
        found[part] = {"count": sum(map(len, numbers)), "first": listed}
    found["moved"] = _of_both(a, b, match.moved, limit, to_other=True)
    found["reordered"] = _of_both(a, b, [match.reordered(split) for split in (0, 1)], limit)
    renamed = [] if ids is None else _renamed(ids, [*a.splits.values(), *b.splits.values()], match.common)
    found["renamed"] = _of_both(a, b, renamed, limit)
    return found


def _id_numbers(sides: Sequence[_Side]) -> NDArray[np.uint64]:
    """Return a hash of the source id of each document of A's train and val and of B's: uint64 [documents]."""
    found = []
    for side in sides:
        with described_by(side.folder):
            for split, documents in side.splits.items():
                lines = _id_digests(side, split, 8) if documents else ()
                found.append(np.fromiter((int.from_bytes(line) for line in lines), np.uint64))
    return np.concatenate(found)


def _renamed(ids: NDArray[np.uint64], sizes: Sequence[int], common: Sequence[Pairs]) -> list[Pairs]:
    """Return the pairs of documents whose source ids differ."""
    parts, found = np.split(ids, np.cumsum(sizes)[:-1]), []
    for split, (left, right) in enumerate(common):
        other = parts[split][left] != parts[len(SPLITS) + split][right]
        found.append((left[other], right[other]))
    return found


def _of_both(a: _Side, b: _Side, pairs: Sequence[Pairs], limit: int, *, to_other: bool = False) -> Found:
    """Describe documents that are in both caches. to_other: they are in B's other split."""
    numbers, listed = [left for left, _ in pairs], []
    for split, place in first(numbers, limit):
        left, right = (int(of_side[place]) for of_side in pairs[split])
        in_b: Found = {"split": SPLITS[split != to_other], "document": right}
        with described_by(b.folder):
            in_b["source_id"] = source_id(b.folder, b.meta, in_b["split"], right)
        listed.append({**_told(a, SPLITS[split], left), "in_b": in_b})
    return {"count": sum(map(len, numbers)), "first": listed}


def _told(side: _Side, split: str, number: int) -> Found:
    """Return what people know a document by."""
    with described_by(side.folder):
        known = source_id(side.folder, side.meta, split, number)
        return {"split": split, "document": number, "source_id": known, "words": _words(side, split, number)}


def _words(side: _Side, split: str, number: int) -> str | None:
    """Return the beginning of a document on one line."""
    if side.tokenizer is None:
        return None
    start, end = bounds(side.folder, side.meta, split)[number : number + 2].tolist()
    ids = ids_at(side.folder, side.meta, split, start, min(end, start + _WORDS_TOKENS))
    text = plain(ids, short_names(side.folder, side.meta), side.tokenizer)
    return " ".join(text.split())[:_WORDS_CHARS]
