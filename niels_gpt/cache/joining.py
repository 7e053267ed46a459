"""Join units into one cache: add up receipts of any kind; link pretrain shards, and stream index, ids and checksums.

Also mends damaged files of a pretrain cache from a unit that was built again.
Memory grows with the number of shards, whose records meta.json holds. Duplicates are counted range by range of their
digests. Where texts name their split, memory also holds the digests of all of val. The cache holds nothing of host,
time, plan or code, so that any split into units on any machine gives the same bytes.
"""

from __future__ import annotations

import logging
import shlex
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from niels_gpt.cache.build_pretrain import IN_PARTITIONS
from niels_gpt.cache.checksums import CRC_DTYPE, stored_checksums
from niels_gpt.cache.formats import (
    BLOCK_BYTES,
    OFFSET_DTYPE,
    PARTITIONED_VERSION,
    SPLITS,
    check_partitions,
    npy_header,
    num_blocks,
)
from niels_gpt.cache.shards import TEXTS_OF, warn_of_unmet_budgets
from niels_gpt.chat_template import few_names
from niels_gpt.encoding import DIGEST_BYTES
from niels_gpt.engine.build import NoTextError
from niels_gpt.engine.checkpoints import CHECKSUMS
from niels_gpt.engine.journal import BlockHashes, write_whole
from niels_gpt.engine.losses import warn_of_losses
from niels_gpt.engine.meta import Source, write_description
from niels_gpt.engine.split import asked_share, count_duplicates, count_in_both, count_repeated_lines, warn_of_share
from niels_gpt.engine.units import Mended, PartitionPlan
from niels_gpt.signals import IN_BOTH, REPEATED_ID
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.locks import check_lease
from niels_gpt.storage.meta_json import (
    checked_count,
    file_records,
    open_regular,
    path_inside,
    shortened,
    wrong_value,
)
from niels_gpt.storage.versions import LOCK_NAME
from niels_gpt.tokenizers.document_tokens import end_of_documents, start_of_documents
from niels_gpt.tokenizers.engine import compared_keys

logger = logging.getLogger(__name__)

SAME = (
    "tokenizer_sha256",
    "vocab_size",
    "token_dtype",
    "special_token_ids",
    "seed",
    "built",
    "split_rule",
    "shard_bytes",
    "document_start",
    "document_end",
    "on_special",
    "val_frac",
    "shuffle",
)
"""Keys of meta.json that are equal in all units of a pretrain cache; document_start only if there is one."""
MAX_DIGESTS = 1 << 20
"""Digests in memory at once: 8 MiB, and four times that while they are sorted. More are counted by ranges."""
_READ_BYTES = 1 << 20
_SHARD = "{}/shard_{:05d}.bin"
_CRC_BYTES = CRC_DTYPE.itemsize
_NEW = "mended"  # in a unit's folder: a file that is not in its place yet
_OF_SPLITS = dict.fromkeys(SPLITS, 0)
_ZEROS: dict[str, Any] = {
    "totals": {f"{split}_tokens": 0 for split in SPLITS},
    "docs": _OF_SPLITS,
    "utf8_bytes": _OF_SPLITS,
    "cut": {"documents": 0, "tokens": 0},
    "compared": {"pieces": 0},
    "roundtrip": {"texts": 0, "differ": 0},
    "documents_read": 0,
    "unknown_ids": 0,
    "dropped": {},
    "noticed": {},
}
"""Counts that are summed."""
_OPEN = ("dropped", "noticed", "counters")
"""Counts whose names differ between receipts; the others have the names in _ZEROS."""
_LATER: dict[str, Any] = {"compared": {"pieces": 0}}
"""Counts that receipts of earlier releases lack."""

Meta = dict[str, Any]


class _Part(NamedTuple):
    """Counts of a unit, kept while the files of all units are streamed."""

    folder: Path | None
    """None: its bytes come from the cache's own file."""
    docs: dict[str, int]
    tokens: dict[str, int]
    blocks: dict[str, int]
    """Blocks with a checksum in the shards of each split."""


class Sums(NamedTuple):
    """The receipts of all units, added up."""

    known: Meta
    """Keys with one value in all units."""
    counts: Meta
    """Sums, in the form of the zeros."""
    counters: dict[str, int]
    """Counters of the loaders."""
    examples: dict[str, str]
    """`first_noticed`: an example of each counter, from the first unit that has one."""
    accepted: dict[str, Any]
    """Versions that differed between builds of units: recipes/units.py."""
    of_each: list[Meta]


def summed_up(
    units: Iterator[tuple[Path, Meta]],
    same: Sequence[str],
    zeros: Meta,
    of_unit: Callable[[Meta], Meta],
    take: Callable[[Path, Meta], None],
) -> Sums:
    """Add up the receipts of all units.

    of_unit: returns the `partitions.of_each` of a receipt. take: called with the folder and receipt of each unit, in
        order.
    Raises: CacheError E202 for anything but a count.
    """
    counts, counters, examples = zeros, dict[str, int](), dict[str, str]()
    accepted, of_each, meta = dict[str, Any](), list[Meta](), Meta()
    for folder, meta in units:
        take(folder, meta)
        counts, counters = _added("", counts, _LATER | meta), _added("counters", counters, meta["source"]["counters"])
        examples = {**meta.get("first_noticed", {}), **examples}
        accepted |= meta["source"].get("accepted_code", {})
        of_each.append(of_unit(meta))
    known = {key: meta[key] for key in same if key in meta}
    return Sums(known, counts, few_names(counters), examples, accepted, of_each)


def no_train(
    plan: PartitionPlan, sums: Sums, read: str, remedies: Mapping[str, str] = MappingProxyType({})
) -> NoTextError:
    """Return the error for a cache without a token for train. read: key of the count of read items.

    remedies: by the reason for dropping an item; used where more of the same text would not help.
    """
    dropped = {reason: number for reason, number in sums.counts["dropped"].items() if number}
    lost = shortened({**dropped, **sums.counters})
    helps = next((helps for reason, helps in remedies.items() if reason in dropped), "")
    remedy = f". {helps}" if helps else "" if dropped else ". Give it more text"
    number, what = sums.counts[read], read.removesuffix("_read")
    return NoTextError(f"{plan.path}: no token for the train split: {number} {what} read: {lost}{remedy}")


def written(work: Path, plan: PartitionPlan, source: Source, sums: Sums, kind: str, **keys: Any) -> Meta:
    """Write the meta.json of a cache after its other files. Returns the meta. keys: further keys, which are no sums."""
    accepted = source.provenance.get("accepted_code", {}) | sums.accepted
    if accepted:
        source = replace(source, provenance={**source.provenance, "accepted_code": accepted})
    counts: Meta = dict(sums.counts)
    if examples := {name: sums.examples[name] for name in sorted(sums.examples) if counts["noticed"].get(name)}:
        counts["first_noticed"] = examples
    for name in ("dropped", "noticed"):
        counts[name] = {key: number for key, number in sorted(few_names(counts[name]).items()) if number}
    if trip := counts.get("roundtrip"):
        counts["lossless"] = trip["differ"] == 0 if trip["texts"] else None
    if compared := counts.get("compared"):
        counts["compared"] = compared_keys(compared["pieces"])
    return write_description(
        work,
        vocabulary={},
        source=source,
        counters=sums.counters,
        partitions={"total": plan.total, "rule": plan.content["rule"], "of_each": sums.of_each},
        kind=kind,
        **sums.known,
        **counts,
        **keys,
    )


def join(work: Path, plan: PartitionPlan, source: Source, units: Iterator[tuple[Path, Meta]]) -> Meta:
    """Write all files of a pretrain cache to `work`, meta.json last. Returns the meta. See `UnitKind.join`.

    Raises: NoTextError without a token for train; CacheError E510 for an index or ids of another unit.
    """
    for name in (*SPLITS, "index"):
        fileio.make_dir(work / name)
    parts, shards = list[_Part](), {split: list[Meta]() for split in SPLITS}
    limits = dict[str, int | None]({f"max_{split}_tokens": 0 for split in SPLITS})

    def take(folder: Path, meta: Meta) -> None:
        parts.append(_linked(work, folder, meta, shards))
        for key, limit in limits.items():
            limits[key] = None if limit is None or meta[key] is None else limit + meta[key]

    sums = summed_up(units, SAME, _ZEROS, _of_unit, take)
    counts = sums.counts
    if not counts["totals"]["train_tokens"] and sums.known["built"] is True:
        raise no_train(plan, sums, "documents_read")
    files = _streamed(work, parts, counts["docs"])
    duplicates = _count_duplicates(work, parts, counts, by_text=sums.known["split_rule"] in IN_PARTITIONS.values())
    reached = {
        split: None
        if (limit := limits[f"max_{split}_tokens"]) is None
        else counts["totals"][f"{split}_tokens"] == limit
        for split in SPLITS
    }
    keys = {"shards": shards, **files, "duplicates": duplicates, **limits, "budget_reached": reached}
    return written(work, plan, source, sums, "pretrain", format_version=PARTITIONED_VERSION, **keys)


def check_receipt(meta: Meta) -> None:
    """Raise an error for a receipt that `join` cannot take: it reads files by the names of our builder."""
    shards = [_SHARD.format(split, number) for split in SPLITS for number in range(len(meta["shards"][split]))]
    index = [f"index/{split}_{name}" for name in ("docs.npy", "ids.txt") for split in SPLITS]
    check_form(meta, SAME, _ZEROS, [*shards, *index, CHECKSUMS, *TEXTS_OF.values()], optional={"document_start"})
    for split in SPLITS:
        if (limit := meta[f"max_{split}_tokens"]) is not None:
            checked_count(limit, f"max_{split}_tokens", META_NAME)
        check_entries(meta, split, split, meta["docs"][split] + 1)
    if [record["bytes"] for record in meta["files"]] != [DIGEST_BYTES * meta["docs"][split] for split in SPLITS]:
        raise CacheError(META_NAME, "its digests of texts are not one for each document", code="E202")
    start_of_documents(meta, META_NAME)
    end_of_documents(meta, META_NAME)


def check_form(
    meta: Meta, same: Sequence[str], zeros: Meta, names: Sequence[str], optional: Collection[str] = ()
) -> None:
    """Raise CacheError E202 for a receipt of any kind that `summed_up` and `written` cannot take.

    names: of all its files, in the order of `file_records`. optional: keys of `same` that may be absent.
    """
    _added("", zeros, _LATER | meta)
    _added("counters", {}, meta["source"]["counters"])
    if [record["name"] for record in file_records(meta)] != list(names):
        raise CacheError(META_NAME, "it names other files than a partition has", code="E202")
    if meta["checksums"]["block_bytes"] != BLOCK_BYTES:
        raise wrong_value(META_NAME, "checksums.block_bytes", meta["checksums"]["block_bytes"], str(BLOCK_BYTES))
    if any(key not in meta for key in same if key not in optional) or meta["built"] not in (True, "partial"):
        raise CacheError(META_NAME, "a key of a built partition is missing", code="E202")
    asked_share(meta)
    accepted = meta["source"].get("accepted_code", {})
    for texts in (meta.get("first_noticed", {}), accepted):
        if not isinstance(texts, dict):
            raise CacheError(META_NAME, f"{texts!r:.40} is no object", code="E202")
    for versions in accepted.values():
        if not isinstance(versions, list) or len(versions) != 2:
            raise CacheError(META_NAME, f"{versions!r:.40} in accepted_code is no pair of versions", code="E202")


def check_entries(meta: Meta, split: str, index: str, entries: int) -> None:
    """Raise CacheError E202 unless the record of an offsets file has this number of entries. index: its key."""
    if (found := meta["index"][index]["entries"]) != entries:
        raise wrong_value(META_NAME, f"index.{index}.entries", found, f"{entries}, by what {split} holds")


def _of_unit(meta: Meta) -> dict[str, int]:
    """Return tokens, documents and shards of a unit for `partitions.of_each`."""
    tokens = {f"{split}_tokens": meta["totals"][f"{split}_tokens"] for split in SPLITS}
    docs = {f"{split}_docs": meta["docs"][split] for split in SPLITS}
    return tokens | docs | {f"{split}_shards": len(meta["shards"][split]) for split in SPLITS}


def _added(name: str, total: Any, value: Any) -> Any:
    """Return the sum of two counts, or of two objects of counts. Raises: CacheError E202 for anything but a count."""
    if not isinstance(total, dict):
        return total + checked_count(value, name, META_NAME)
    if name in _OPEN:
        return total | {str(key): _added(f"{name}.{key}", total.get(key, 0), value[key]) for key in value}
    return {key: _added(key, number, value[key]) for key, number in total.items()}


def _linked(work: Path, folder: Path, meta: Meta, shards: dict[str, list[Meta]]) -> _Part:
    """Link a unit's shards after the earlier ones, and append their records."""
    blocks = {}
    for split in SPLITS:
        for record in meta["shards"][split]:
            name = _SHARD.format(split, len(shards[split]))
            fileio.link_or_copy(folder / record["name"], work / name)  # a cache of many units needs no second disk
            shards[split].append({key: record[key] for key in ("bytes", "sha256", "tokens")} | {"name": name})
        blocks[split] = _num_blocks(meta["shards"][split])
    return _part(folder, _of_unit(meta), blocks)


def _part(folder: Path | None, each: Mapping[str, int], blocks: dict[str, int]) -> _Part:
    """Return a unit by its entry of `partitions.of_each`."""
    docs, tokens = ({split: int(each[f"{split}_{name}"]) for split in SPLITS} for name in ("docs", "tokens"))
    return _Part(folder, docs, tokens, blocks)


def _streamed(work: Path, parts: Sequence[_Part], docs: Mapping[str, int]) -> Meta:
    """Write index, ids and block checksums of all units. Returns their keys of meta.json."""
    # In the order of `file_records`, with the shards of all units first: readers find a file's blocks by counting.
    crcs: list[bytes] = []
    index, ids = {}, {}
    for split in SPLITS:
        record = write_whole(work, f"index/{split}_docs.npy", _starts(parts, split), crcs)
        index[split] = {**record, "entries": docs[split] + 1}
    for split in SPLITS:
        record = write_whole(work, f"index/{split}_ids.txt", _lines(parts, split), crcs)
        ids[split] = {**record, "entries": docs[split]}
    checksums = write_whole(work, CHECKSUMS, (block for some in (_checksums(parts), crcs) for block in some))
    return {"index": index, "ids": ids, "checksums": {**checksums, "block_bytes": BLOCK_BYTES}}


def _count_duplicates(work: Path, parts: Sequence[_Part], counts: Meta, *, by_text: bool) -> dict[str, int]:
    """Return the duplicates of each split. Sets the counts in `noticed` that no unit knows.

    by_text: the text decides the split, so that no text is in both.
    """
    texts = {split: [part.folder / TEXTS_OF[split] for part in parts if part.folder] for split in SPLITS}
    if not by_text:
        counts["noticed"][IN_BOTH] = count_in_both(texts["train"], texts["val"])
    docs = counts["docs"]
    if sum(docs.values()) <= 16 * MAX_DIGESTS:  # of more the sum of the units stays: that many passes
        counts["noticed"][REPEATED_ID] = sum(
            count_repeated_lines(work / f"index/{split}_ids.txt", docs[split], max_digests=MAX_DIGESTS)
            for split in SPLITS
        )
    return {split: count_duplicates(*paths, folder=work, max_digests=MAX_DIGESTS) for split, paths in texts.items()}


def _starts(parts: Sequence[_Part], split: str, old: BinaryIO | None = None) -> Iterator[bytes]:
    """Yield the document index of all units. old: the cache's own file, for units that were not built again.

    Raises: CacheError E510 for an index of another unit.
    """
    yield npy_header(sum(part.docs[split] for part in parts) + 1)
    before, at = 0, len(npy_header(0))
    for part in parts:
        size = OFFSET_DTYPE.itemsize * part.docs[split]
        if part.folder is None:
            yield from _span(old, at, size)
        else:
            path = part.folder / f"index/{split}_docs.npy"
            yield from shifted(path, part.docs[split], part.tokens[split], before, has_end=True)
        before, at = before + part.tokens[split], at + size
    yield before.to_bytes(OFFSET_DTYPE.itemsize, "little")


def shifted(path: Path, count: int, tokens: int, before: int, *, has_end: bool) -> Iterator[bytes]:
    """Yield the starts of a unit's `count` documents, behind `before` tokens of other units. tokens: of the unit.

    has_end: the file has the end of the last document too. Raises: CacheError E510 for another file.
    """
    left, last = count, -1
    with open(open_regular(path), "rb") as file:
        header = npy_header(left + has_end)
        is_good = file.read(len(header)) == header
        while is_good and (block := file.read(_READ_BYTES)):
            starts = np.frombuffer(block, dtype=OFFSET_DTYPE)
            is_good = (last >= 0 or int(starts[0]) == 0) and bool((np.diff(starts, prepend=last) > 0).all())
            last = int(starts[-1])
            yield (starts[:left] + before).astype(OFFSET_DTYPE).tobytes()
            left -= min(left, len(starts))
    if not is_good or left or not (last == tokens if has_end else last < max(tokens, 1)):
        raise CacheError(path, "not the index of its partition's documents", code="E510")


def _lines(parts: Sequence[_Part], split: str, old: BinaryIO | None = None) -> Iterator[bytes]:
    """Yield the source ids of all units. old: the cache's own file, for units that were not built again.

    Raises: CacheError E510 if a unit has another number of ids than documents.
    """
    at = 0
    for part in parts:
        some = lines_of(part.folder, split, part.docs[split]) if part.folder else _kept_lines(old, at, part.docs[split])
        for block in some:
            at += len(block)
            yield block


def lines_of(folder: Path, split: str, count: int) -> Iterator[bytes]:
    """Yield the source ids of a split of a unit. Raises: CacheError E510 unless there are `count`."""
    path, lines, last = folder / f"index/{split}_ids.txt", 0, b"\n"
    with open(open_regular(path), "rb") as file:
        while block := file.read(_READ_BYTES):
            lines, last = lines + block.count(b"\n"), block[-1:]
            yield block
    if lines != count or last != b"\n":
        raise CacheError(path, f"{lines} lines", f"{count}, one for each document", code="E510")


def whole(path: Path, num_bytes: int) -> Iterator[bytes]:
    """Yield a file of a unit in blocks. Raises: CacheError E510 unless it has `num_bytes` bytes."""
    found = 0
    with open(open_regular(path), "rb") as file:
        while block := file.read(_READ_BYTES):
            found += len(block)
            yield block
    if found != num_bytes:
        raise CacheError(path, f"{found} bytes", f"{num_bytes} by its receipt", code="E510")


def _kept_lines(old: BinaryIO | None, at: int, count: int) -> Iterator[bytes]:
    """Yield `count` lines of a file from byte `at` on; fewer if it ends before."""
    while old is not None and count and (block := _read(old, at, BLOCK_BYTES)):
        ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
        block = block[: int(ends[count - 1]) + 1] if len(ends) >= count else block
        count, at = count - min(count, len(ends)), at + len(block)
        yield block


def _checksums(parts: Sequence[_Part], old: BinaryIO | None = None) -> Iterator[bytes]:
    """Yield the block checksums of the shards of all units. old: the cache's own file, for units not built again."""
    at = 0
    for split in SPLITS:
        for part in parts:
            size = _CRC_BYTES * part.blocks[split]
            if part.folder is None:
                yield from _span(old, at, size)
            else:
                first = _CRC_BYTES * part.blocks["train"] if split == "val" else 0
                with open(open_regular(part.folder / CHECKSUMS), "rb") as file:
                    yield from _span(file, first, size)
            at += size


def _span(file: BinaryIO | None, at: int, size: int) -> Iterator[bytes]:
    """Yield `size` bytes of a file from byte `at` on; fewer if it ends before."""
    while file is not None and size > 0 and (block := _read(file, at, min(_READ_BYTES, size))):
        at, size = at + len(block), size - len(block)
        yield block


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _num_blocks(records: Sequence[Meta]) -> int:
    return sum(num_blocks(record["bytes"]) for record in records)


def warn_of_whole(path: Path, meta: Meta) -> None:
    """Log what shows only in the whole cache: an unexpected share of val, losses, unmet budgets, an empty val."""
    warn_of_share(path, meta)
    warn_of_losses(path, meta)
    by_share = bool(asked_share(meta)) and meta["split_rule"] in IN_PARTITIONS.values()
    is_empty = by_share and not meta["totals"]["val_tokens"]
    reached = {**meta["budget_reached"], "val": None} if is_empty else meta["budget_reached"]  # no budget emptied it
    warn_of_unmet_budgets(path, {**meta, "budget_reached": reached})
    if by_share:
        warn_of_empty_val(path, meta, meta["docs"]["train"] - meta["duplicates"]["train"])


def warn_of_empty_val(path: Path, meta: Mapping[str, Any], distinct: int, what: str = "texts") -> None:
    """Log an empty val, though a share of it was asked for (W308). distinct: number of different texts, or `what`."""
    if asked_share(meta) and not meta["totals"]["val_tokens"]:
        why = "too few distinct %s (%d)"
        if distinct > 1 and "partitions" in meta:
            why = "of the distinct %s (%d) none fell to it by its share, and partitions move none there. With "
            why += "--partitions 1 the nearest one goes to val"
        logger.warning(f"%s: val is empty: {why}", path, what, distinct, extra={"code": "W308"})


# --- mending a sealed cache -------------------------------------------------------------------------------------------


def mend(folder: Path, meta: Meta, units: Mapping[int, tuple[Path, Meta]]) -> Mended:
    """Restore damaged files of a sealed cache. See `UnitKind.mend`.

    Reads the shards of `units`, and index, ids and checksums of all. Replaces a file by a rename, and only by one with
    the recorded sha256: the old file may be a hard link that an export shares, and readers may have it open.
    Raises: CacheError E306, before anything is changed, for a unit whose files differ from the records; E510 for a unit
        that was damaged since it was built.
    """
    shards, parts = _recorded(meta, units)
    done = Mended([], [], None)
    for number, (unit, receipt) in units.items():
        for split in SPLITS:
            for record, own in zip(shards[number][split], receipt["shards"][split], strict=True):
                if _sums_if_good(folder, record) is None:
                    _put_shard(folder, record, unit / own["name"], unit)
                    done.files.append(record["name"])
    beside, crcs = next(iter(units.values()))[0], list[tuple[Meta, bytes | None]]()
    for name, stream in (("index", _starts), ("ids", _lines)):
        for split in SPLITS:
            record = meta[name][split]
            done, sums = _mended(folder, meta, record, beside, partial(stream, parts, split), done, units)
            crcs.append((record, sums))
    return _mended(folder, meta, meta["checksums"], beside, partial(_all_checksums, parts, crcs), done, units)[0]


def units_at(folder: Path, meta: Meta, name: str, begin: int, end: int) -> list[int]:
    """Return the units of bytes begin to end - 1 of a file. See `UnitKind.units_at`.

    For index, ids and checksums nothing tells if the file has another size: the bytes of several units are lost.
    """
    shards, parts = _recorded(meta, {})
    counts, first, last = list[int](), 0, 0
    for split in SPLITS:
        if name in (names := [record["name"] for record in meta["shards"][split]]):
            counts, first = [len(each[split]) for each in shards], names.index(name)
            last = first
        elif name in (meta["index"][split]["name"], meta["ids"][split]["name"]):
            counts = [part.docs[split] for part in parts]
            is_index = name == meta["index"][split]["name"]
            record = meta["index" if is_index else "ids"][split]
            if not _has_size(folder, record):
                return []
            header = len(npy_header(0))
            at = [max(0, byte - header) // OFFSET_DTYPE.itemsize for byte in (begin, max(begin, end - 1))]
            first, last = at if is_index else _lines_before(folder / name, begin, max(begin, end - 1))
    if name == meta["checksums"]["name"] and _has_size(folder, meta["checksums"]):
        counts = [part.blocks[split] for split in SPLITS for part in parts]
        first, last = begin // _CRC_BYTES, max(begin, end - 1) // _CRC_BYTES
    ends = list(accumulate(counts))
    some = range(bisect_right(ends, first), min(bisect_right(ends, last) + 1, len(ends)))
    found = {at % len(parts) for at in some if counts[at]}
    return sorted(found) or ([0] if counts else [])  # what no unit has, such as a header, any of them mends


def _recorded(meta: Meta, units: Mapping[int, tuple[Path, Meta]]) -> tuple[list[dict[str, list[Meta]]], list[_Part]]:
    """Return the records of each unit's shards, and all units. Raises: CacheError E306 for a unit with other shards."""
    check_partitions(meta, META_NAME)
    at, shards, parts = dict(_OF_SPLITS), list[dict[str, list[Meta]]](), list[_Part]()
    for number, each in enumerate(meta["partitions"]["of_each"]):
        own = {}
        for split in SPLITS:
            first, at[split] = at[split], at[split] + each[f"{split}_shards"]
            own[split] = meta["shards"][split][first : at[split]]
        unit, receipt = units.get(number, (None, None))
        if unit is not None and receipt is not None:
            sums = [
                [(record["bytes"], record["sha256"]) for split in SPLITS for record in some[split]]
                for some in (own, receipt["shards"])
            ]
            if each != _of_unit(receipt) or sums[0] != sums[1]:
                found = f"partition {number} was built again, and its shards differ from the recorded ones"
                why = f"Its source, or a library, gives other bytes now. {REBUILD}"
                raise CacheError(unit, found, remedy=why, code="E306")
        shards.append(own)
        parts.append(_part(unit, each, {split: _num_blocks(own[split]) for split in SPLITS}))
    return shards, parts


def _mended(
    folder: Path,
    meta: Meta,
    record: Meta,
    beside: Path,
    stream: Callable[[BinaryIO | None], Iterator[bytes]],
    done: Mended,
    units: Collection[int],
) -> tuple[Mended, bytes | None]:
    """Write a file again if it is damaged. Returns the work done so far, and the file's block checksums, None if it
    stays damaged.

    beside: folder for the new file. stream: takes the old file, and yields the new bytes.
    """
    if (sums := _sums_if_good(folder, record)) is not None:
        return done, sums
    name, crcs, new = record["name"], list[bytes](), beside / _NEW
    path = path_inside(folder, name)
    fileio.remove(new)
    with ExitStack() as stack:
        old = None  # a missing file has its bytes again once all units are there
        with suppress(FileNotFoundError):
            old = stack.enter_context(open(open_regular(path), "rb"))
        sha256 = write_whole(beside, _NEW, stream(old), crcs)["sha256"]
    if sha256 == record["sha256"]:
        _check_lease(folder)  # to stream the file may have taken longer than the lease
        fileio.rename(new, path)
        return done._replace(files=[*done.files, name]), crcs[0]
    fileio.remove(new)
    more = _next_unit(folder, meta, record, crcs, units) if done.unit is None else done.unit
    return done._replace(left=[*done.left, name], unit=more), None


def _next_unit(folder: Path, meta: Meta, record: Meta, crcs: Sequence[bytes], units: Collection[int]) -> int | None:
    """Return a further unit that may mend a new file that is still wrong: it has bytes of the first wrong block, or of
    the blocks up to the last wrong one. None if unknown."""
    name = record["name"]
    stored, found = stored_checksums(folder, meta).get(name), np.frombuffer(b"".join(crcs), dtype=CRC_DTYPE)
    if stored is None or len(stored) != len(found) or not (stored != found).any():
        return None
    wrong = BLOCK_BYTES * np.flatnonzero(stored != found)
    for last in (int(wrong[0]), int(wrong[-1])):
        some = units_at(folder, meta, name, int(wrong[0]), min(last + BLOCK_BYTES, record["bytes"]))
        if more := [number for number in some if number not in units]:
            return more[0]
    return None


def _all_checksums(
    parts: Sequence[_Part], crcs: Sequence[tuple[Meta, bytes | None]], old: BinaryIO | None
) -> Iterator[bytes]:
    """Yield the block checksums of all files. crcs: record and checksums of index and ids; None: as in `old`."""
    yield from _checksums(parts, old)
    at = _CRC_BYTES * sum(sum(part.blocks.values()) for part in parts)
    for record, sums in crcs:
        size = _CRC_BYTES * num_blocks(record["bytes"])
        yield from _span(old, at, size) if sums is None else [sums]
        at += size


def _put_shard(folder: Path, record: Meta, own: Path, beside: Path) -> None:
    """Replace a damaged shard by a unit's. Raises: CacheError E510 if that is damaged too."""
    path, new = path_inside(folder, record["name"]), beside / _NEW
    if path.is_dir():  # `path_inside` has refused links
        remedy = f"Remove it: {shlex.join(['rm', '-r', str(path)])}"
        raise CacheError(path, "a folder", "a file of the cache", remedy, code="E205")
    fileio.remove(new)
    fileio.link_or_copy(own, new)
    if _sums_if_good(beside, {**record, "name": _NEW}) is None:
        raise CacheError(own, "damaged since it was built", remedy="Run the same command again", code="E510")
    fileio.fsync_file(new)
    _check_lease(folder)
    fileio.make_dir(path.parent)
    fileio.rename(new, path)


def _check_lease(folder: Path) -> None:
    """Raise CacheError E512 if another process has taken over the cache of a version."""
    check_lease(folder.parent / LOCK_NAME)


def _sums_if_good(folder: Path, record: Meta) -> bytes | None:
    """Return the block checksums of a file with the recorded sha256; None for a damaged one."""
    hashes = BlockHashes()
    try:
        with open(open_regular(path_inside(folder, record["name"])), "rb") as file:
            while block := file.read(_READ_BYTES):
                hashes.update(block)
    except (OSError, CacheError):
        return None
    return hashes.checksums() if hashes.sha256 == record["sha256"] else None


def _has_size(folder: Path, record: Meta) -> bool:
    try:
        return bool(path_inside(folder, record["name"]).lstat().st_size == record["bytes"])
    except (OSError, CacheError):
        return False


def _lines_before(path: Path, *places: int) -> list[int]:
    """Return how many lines of a file end before each of some bytes, which ascend."""
    lines, at, found = 0, 0, []
    with open(open_regular(path), "rb") as file:
        for place in places:
            lines += sum(block.count(b"\n") for block in _span(file, at, place - at))
            at = place
            found.append(lines)
    return found
