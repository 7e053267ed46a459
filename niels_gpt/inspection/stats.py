"""How long documents are, how many tokens of each sft example are supervised, and the table that `stats` prints.

`cache` is the folder of one version, resolved; `meta` is its meta.json. A document of an sft cache is an example.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.builders.losses import loss_table
from niels_gpt.builders.split import asked_share
from niels_gpt.cache.formats import (
    OFFSET_DTYPE,
    SPLITS,
    Ids,
    check_partitions,
    has_loss_bits,
    target_mask,
    token_dtype_of,
)
from niels_gpt.cache.loss_bits import LossBits
from niels_gpt.cache.meta import read_meta, sentinel_names, special_id, tokenizer_above
from niels_gpt.cache.mmap import load_idx, mmap_tokens
from niels_gpt.display.numbers import count_text, number_of, size_text
from niels_gpt.display.tables import html_table, table
from niels_gpt.inspection.caches import refuse_unless_cache
from niels_gpt.inspection.readers import open_bits, refusal
from niels_gpt.inspection.source_ids import printable
from niels_gpt.signals import REPAIRED_TEXTS, above, is_of_kept
from niels_gpt.storage.errors import REBUILD, CacheError, PositionError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import checked_count, file_records, path_inside, resolved, shortened, wrong_value
from niels_gpt.storage.remedies import PROGRAM
from niels_gpt.tokenizers.vocabulary import end_of_documents, start_of_documents

FILE_KEYS = frozenset({"shards", "index", "ids", "loss_bits", "checksums", "files"})
"""Keys of meta.json that list files."""
_BIT_TOKENS = 2**22  # whose bits are counted at once
_BATCH_TOKENS = 2**16  # padding included; its masks fit a core's cache: 2**21 took up to four times as long


@contextmanager
def meta_errors(cache: Path) -> Iterator[None]:
    """Turn what a malformed meta.json raises in the block into a CacheError that names it."""
    try:
        yield
    except (CacheError, PositionError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        problem, remedy = f"not as docs/formats.md describes it ({error!r})", f"Look at it: {PROGRAM} verify {cache}"
        raise CacheError(cache / META_NAME, problem, remedy=remedy, code="E202") from error


def open_version(cache: Path, kinds: Sequence[str] = ("pretrain", "sft")) -> tuple[Path, dict[str, Any]]:
    """Resolve a cache once; returns its version's folder and its meta.json.

    The records of files are checked, and `totals`, `vocab_size` and `built` where they are given; the caller looks at
    other keys inside `meta_errors`.
    Raises: FileNotFoundError for no cache; CacheError if meta.json is damaged, missing or of another kind.
    """
    refuse_unless_cache(cache)
    folder, where = resolved(cache), str(cache / META_NAME)
    if not os.path.lexists(folder / META_NAME):
        raise CacheError(where, "no such file", "the description of a cache", REBUILD, code="E204")
    meta = read_meta(str(folder / META_NAME))
    file_records(meta, where)
    if meta.get("kind") not in kinds:
        raise CacheError(where, f"kind is {shortened(meta.get('kind'))}", " or ".join(kinds), code="E208")
    check_partitions(meta, where)
    built, totals = meta.get("built", True), meta.get("totals", {})
    if not any(built is value for value in (True, False)) and built != "partial":
        raise wrong_value(where, "built", built, 'true, false or "partial"')
    if not isinstance(totals, dict):
        raise wrong_value(where, "totals", totals, "an object")
    for name, count in totals.items():
        checked_count(count, f"totals.{name}", where)
    if meta["kind"] != "rollouts" or meta.get("vocab_size") is not None:  # that of recorded ids may be unknown
        checked_count(meta.get("vocab_size", 0), "vocab_size", where)
    return folder, meta


def bounds(cache: Path, meta: dict[str, Any], split: str) -> NDArray[np.int64]:
    """Return where each document starts and where the last one ends, in tokens: int64 [documents + 1], ascending.

    In a pretrain cache it is the mapped file. A split without documents, as in a stub, gives [0].
    Raises: FileNotFoundError, CacheError where a file is missing or does not match its meta.json.
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


def lengths(cache: Path, meta: dict[str, Any], split: str) -> NDArray[np.int64]:
    """Return the tokens of each document of a split: int64 [documents]. Raises as `bounds`."""
    return np.diff(bounds(cache, meta, split))


def tokens_of(cache: Path, meta: dict[str, Any], split: str) -> Ids:
    """Map the token file of an sft split: its ids [tokens]. Raises as `mmap_tokens`; an empty split is refused."""
    path, size = path_inside(cache, f"{split}_tokens.bin"), meta["shards"][split][0]["bytes"]
    return mmap_tokens(path, expected_bytes=size, dtype=token_dtype_of(meta, cache / META_NAME))


def ids_at(cache: Path, meta: dict[str, Any], split: str, start: int, end: int) -> Ids:
    """Return tokens [start, end) of a split's stream, which may lie in several shards: the cache's dtype."""
    dtype = token_dtype_of(meta, cache / META_NAME)
    parts, before = [np.zeros(0, dtype=dtype)], 0
    for record in meta["shards"][split]:
        first, last = max(start - before, 0), min(end - before, record["tokens"])
        if first < last:
            path = path_inside(cache, record["name"])
            parts.append(mmap_tokens(path, expected_bytes=record["bytes"], dtype=dtype)[first:last])
        before += record["tokens"]
    return np.concatenate(parts)


def mask_of(cache: Path, meta: dict[str, Any], split: str, start: int, ids: Ids) -> NDArray[np.bool_]:
    """Return which tokens of an example of an sft split are supervised: bool [tokens].

    start: the first token of the example; ids: its tokens, or the first ones.
    """
    if has_loss_bits(meta):
        bits = open_bits(cache, meta, split, len(tokens_of(cache, meta, split)))
        return bits.flat(np.array([start]), np.array([start + len(ids)]))
    asst_id, eot_id = (special_id(cache, meta, name) for name in ("asst", "eot"))
    return target_mask(ids[None], np.array([len(ids)]), asst_id=asst_id, eot_id=eot_id).reshape(-1)


def _counts_by_bits(bits: LossBits, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bits of each example that are 1: int64 [examples]. starts: as `bounds`."""
    counts = np.zeros(len(starts) - 1, dtype=np.int64)
    for begin in range(0, int(starts[-1]), _BIT_TOKENS):
        end = min(begin + _BIT_TOKENS, int(starts[-1]))
        places = bits.flat(np.array([begin]), np.array([end])).nonzero()[0] + begin
        first, last = starts.searchsorted([begin, end - 1], "right") - 1
        counts[first : last + 1] += np.diff(places.searchsorted(starts[first : last + 2]))
    return counts


def supervised_counts(cache: Path, meta: dict[str, Any], split: str) -> NDArray[np.int64]:
    """Return how many tokens of each example of an sft split are supervised: int64 [examples].

    By the loss bits, or by `target_mask`. For that, examples of similar length are padded to a matrix of at most 65,536
    tokens, or of one longer example. Only that part of the file is held in memory.
    Raises: as `bounds` and `tokens_of`; CacheError where the ids of the sentinels are not known.
    """
    starts = bounds(cache, meta, split)
    counts = np.zeros(len(starts) - 1, dtype=np.int64)
    if len(counts) == 0:
        return counts
    if has_loss_bits(meta):
        return _counts_by_bits(open_bits(cache, meta, split, int(starts[-1])), starts)
    tokens, sizes = tokens_of(cache, meta, split), np.diff(starts)
    asst_id, eot_id = (special_id(cache, meta, name) for name in ("asst", "eot"))
    longest_first = np.argsort(-sizes, kind="stable")
    done = 0
    while done < len(counts):
        width = int(sizes[longest_first[done]])
        chosen = longest_first[done : done + max(1, _BATCH_TOKENS // width)]
        # A row continues with the next example, or the file's last token; target_mask ignores what is past its length.
        places = np.minimum(starts[chosen][:, None] + np.arange(width), len(tokens) - 1)
        mask = target_mask(tokens[places], sizes[chosen], asst_id=asst_id, eot_id=eot_id)
        counts[chosen] = np.count_nonzero(mask, axis=1)
        done += len(chosen)
    return counts


class Stats(list[tuple[str, str]]):
    """Pairs of a name and a value, printed as a small table, in notebooks as HTML. dict(...) looks one up."""

    def __str__(self) -> str:
        return table(self) if self else "Stats([])"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table("", self)


def stats(cache: str | os.PathLike[str]) -> Stats:
    """Return what a cache holds, and its source and licence, as pairs of a name and a printable value.

    cache: the public folder, such as cache/sft/oasst1. Raises as `bounds`; CacheError for a folder that is no cache.
    """
    path = Path(cache)
    folder, meta = open_version(path)
    with meta_errors(path):
        return Stats((name, printable(str(value))) for name, value in _rows(path, folder, meta))


def stats_data(cache: Path) -> dict[str, Any]:
    """Return what a cache holds, ready for JSON; docs/building.md has the fields. Raises: as `stats`."""
    folder, meta = open_version(cache)
    with meta_errors(cache):
        sizes = {split: spread(lengths(folder, meta, split)) for split in SPLITS}
        return {"cache": str(cache), "refused": refusal(folder), "document_tokens": sizes, **described(meta)}


def described(meta: dict[str, Any]) -> dict[str, Any]:
    """Return a meta.json without its lists of files, and with the signals that a build warns of."""
    found = [
        {"counter": each.signal.counter.rstrip(":"), "number": each.number, "of": each.total, "text": str(each)}
        for each in above(meta)
    ]
    return {key: value for key, value in meta.items() if key not in FILE_KEYS} | {"warned_of": found}


def spread(sizes: NDArray[np.int64]) -> dict[str, float] | None:
    """Return min, median, p95 and max of some sizes; None of none."""
    names = ("min", "median", "p95", "max")
    return dict(zip(names, np.percentile(sizes, [0, 50, 95, 100]).tolist(), strict=True)) if len(sizes) else None


def _rows(cache: Path, folder: Path, meta: dict[str, Any]) -> list[tuple[str, str]]:
    source, unknown, reason = meta["source"], "not stated", refusal(folder)
    rows = [
        ("cache", f"{cache} ({meta['kind']}, {_BUILT[meta['built']]})"),
        *([] if reason is None else [("refused", f"by the readers: {reason}")]),
        ("dataset", " ".join(str(meta[key]) for key in ("dataset_name", "dataset_config") if meta[key]) or unknown),
        ("source", source.get("kind") or unknown),
        ("revision", source.get("revision") or "none"),
        ("licence", source.get("licence") or unknown),
        ("attribution", source.get("attribution") or unknown),
    ]
    for split in SPLITS:
        rows.append((split, _split_line(folder, meta, split)))
    if "partitions" in meta:
        rows.append(("partitions", f"{meta['partitions']['total']:,}: {meta['partitions']['rule']}"))
    rows.append(("dropped", _dropped(meta)))
    rows.append(("duplicates", _duplicates(meta)))
    rows += [*of_loader(meta), *loss_table(meta).items()]
    rows += warned_of(meta)
    if meta["kind"] == "pretrain" and meta["built"]:
        names = sentinel_names(folder, meta)
        for name, token_of in (("document start", start_of_documents), ("document end", end_of_documents)):
            token = token_of(meta, META_NAME)
            rows.append((name, "none" if token is None else f"{names.get(*token)} (id {token[0]})"))
    if has_loss_bits(meta):
        template = meta["chat_template"]
        how = f"{str(template['sha256'])[:12]}, mask by {template['mask_by']}, loss on {template['loss_on']}"
        rows.append(("chat template", how))
    ids = f"{meta['vocab_size']:,} ids{_asked(folder, meta)}"
    return [*rows, ("tokenizer", f"{str(meta['tokenizer_sha256'])[:12]}, {ids}")]


def of_loader(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of what the loader left out, repaired and noticed."""
    kinds: dict[str, dict[str, int]] = {"left out": {}, "repaired": {}, "noticed": {}}
    for counter, number in meta["source"].get("counters", {}).items():
        is_left_out = counter not in REPAIRED_TEXTS and not is_of_kept(counter)
        kind = "left out" if is_left_out else "repaired" if counter in REPAIRED_TEXTS else "noticed"
        kinds[kind][counter] = number
    return [(f"{kind} by the loader", _counted(counts)) for kind, counts in kinds.items()]


def warned_of(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a row for the signals of a cache that a build warns of; none without."""
    found = "; ".join(map(str, above(meta)))
    return [("warned of", found)] if found else []


def _asked(folder: Path, meta: dict[str, Any]) -> str:
    """Return how many ids were asked for when the tokenizer beside a cache was trained, and on how much text."""
    about: dict[str, Any] = {}
    with suppress(CacheError, OSError):  # a damaged tokenizer is not this cache's damage
        beside = tokenizer_above(folder)
        about = {} if beside is None else read_meta(str(beside / META_NAME))
    asked, seen = about.get("requested_vocab_size"), about.get("bytes_seen")
    if about.get("tokenizer_sha256") != meta["tokenizer_sha256"] or not isinstance(asked, int):
        return ""
    less = "" if about.get("trained_on") == "sample" else f" of {count_text(asked)} asked for"
    return less + (f", trained on {size_text(seen)}" if isinstance(seen, int) else "")


_BUILT = {True: "built", False: "not built", "partial": "partial"}


def _split_line(folder: Path, meta: dict[str, Any], split: str) -> str:
    tokens, sizes = meta["totals"][f"{split}_tokens"], lengths(folder, meta, split)
    if (of := spread(sizes)) is None:
        return "empty"
    unit = "example" if meta["kind"] == "sft" else "document"
    parts = [
        f"{number_of(tokens, 'token')} in {number_of(len(sizes), unit)} "
        f"({of['min']:,.0f} to {of['max']:,.0f}, median {of['median']:,.0f}, 95% below {of['p95']:,.0f})"
    ]
    if "utf8_bytes" in meta:
        parts.append(f"{meta['utf8_bytes'][split] / tokens:.2f} bytes per token")
    if "supervised_tokens" in meta:
        parts.append(f"{meta['supervised_tokens'][split] / tokens:.0%} supervised")
    parts.append(f"{tokens / sum(meta['totals'][f'{name}_tokens'] for name in SPLITS):.1%} of all tokens")
    asked = asked_share(meta) if split == "val" else None
    return ", ".join(parts) + (f" ({float(asked):.1%} asked for)" if asked is not None else "")


def _dropped(meta: dict[str, Any]) -> str:
    counts = meta.get("dropped", {})
    read = meta.get("examples_read" if meta["kind"] == "sft" else "documents_read", 0)
    share = f" ({sum(counts.values()) / read:.1%} of {read:,} read)" if counts and read else ""
    return _counted(counts) + share


def _duplicates(meta: dict[str, Any]) -> str:
    if "duplicates" not in meta:  # as in caches of older builders
        return "not counted"
    return ", ".join(f"{split} {meta['duplicates'][split]:,}" for split in SPLITS)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {number:,}" for reason, number in sorted(counts.items())) or "none"
