"""Joins the units of a rollout cache: their files end to end, and the places in their indexes counted on.

A damaged file of a joined cache cannot be mended: the cache is built again as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.cache.formats import BLOCK_BYTES, OFFSET_DTYPE, SPLITS, npy_header, token_dtype_of
from niels_gpt.cache.joining import (
    MAX_DIGESTS,
    Sums,
    check_entries,
    check_form,
    lines_of,
    no_train,
    summed_up,
    warn_of_empty_val,
    whole,
    written,
)
from niels_gpt.engine.checkpoints import CHECKSUMS
from niels_gpt.engine.journal import write_whole
from niels_gpt.engine.meta import Source
from niels_gpt.engine.split import count_repeated_lines, warn_of_share
from niels_gpt.engine.units import PartitionPlan
from niels_gpt.prefix_tree.rollouts.build import LAST_ID, LAST_IDS
from niels_gpt.prefix_tree.rollouts.reader import check_index
from niels_gpt.prefix_tree.rollouts.records import FIELDS, GROUP_COLUMNS, KIND, SAMPLE_COLUMNS, Ints, file_of, per
from niels_gpt.signals import NO_COMMON_END, REPEATED_GROUP, WITHOUT_PROMPT, warn_of_signals
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError, SourceError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import checked_count, open_regular, wrong_value

SAME = (
    *("tokenizer_sha256", "vocab_size", "token_dtype", "special_token_ids", "seed", "built", "split_rule"),
    "val_frac",
)
"""Keys of meta.json that all units of a rollout cache have in common. So are their fields, where they have samples."""
_COUNTED = ("groups", "samples", "tokens")
_BY_SPLIT = ("tokens_after", "pairs", "pairs_after", "loss_tokens", "scores", "samples_without_target")
_ZEROS: dict[str, Any] = {
    "totals": {f"{split}_{key}": 0 for split in SPLITS for key in _COUNTED},
    **{key: dict.fromkeys(SPLITS, 0) for key in _BY_SPLIT},
    "groups_read": 0,
    "samples_read": 0,
    "dropped": {},
    "noticed": {},
}
_FLOAT_BYTES = 4
_ROWS = 1 << 14  # of the index that are counted on at a time
# The columns of GROUP_COLUMNS that are places in a file or table, by its key in `_Part.sizes`.
_PLACES = {"samples": 0, "stored": 3, "loss": 4, "scores": 5, "ids": 6}

Meta = dict[str, Any]


class _Part(NamedTuple):
    """A unit's folder, fields and sizes, for the streaming of its files."""

    folder: Path
    fields: tuple[str, ...]
    sizes: dict[str, dict[str, int]]
    """By split: numbers of groups, samples, stored tokens and scores, and bytes of loss bits and ids."""


def join(work: Path, plan: PartitionPlan, source: Source, units: Iterator[tuple[Path, Meta]]) -> Meta:
    """Write all files of the cache and meta.json to `work`; returns the meta. See `UnitKind.join`.

    Raises: NoTextError without a group for train; SourceError E304 for units with different fields; CacheError E510 for
        an index that does not belong to its unit.
    """
    parts, ranges, largest = list[_Part](), dict[str, list[float]](), 0

    def take(folder: Path, meta: Meta) -> None:
        nonlocal largest
        parts.append(_part(folder, meta))
        largest = max(largest, meta["largest_id"])
        _take_ranges(ranges, meta)

    sums = summed_up(units, SAME, _ZEROS, _of_unit, take)
    if not sums.counts["totals"]["train_groups"]:
        raise no_train(plan, sums, "groups_read")
    fields = _fields_of(parts)
    for part in parts:
        _check_index(part)
    fileio.make_dir(work / "index")
    keys = _streamed(work, parts, fields, sums.known)
    _notice(work, parts, sums)
    if ranges:
        keys["ranges"] = {
            name: {"min": least, "mean": total / count, "max": most}
            for name, (least, most, total, count) in ranges.items()
        }
    return written(work, plan, source, sums, KIND, **keys, largest_id=largest)


def check_receipt(meta: Meta) -> None:
    """Raise CacheError for a receipt that `join` cannot take: it reads files by the names that a build gives."""
    fields = tuple(name for name in FIELDS if name in meta["fields"])
    if meta["fields"] != {name: per(name) for name in fields}:
        raise wrong_value(META_NAME, "fields", meta["fields"], f"some of {', '.join(FIELDS)}, with token or sample")
    index = [f"index/{split}_{table}.npy" for split in SPLITS for table in ("groups", "samples")]
    names = [*(file_of(split, "tokens") for split in SPLITS), *index, *(f"index/{split}_ids.txt" for split in SPLITS)]
    more = [file_of(split, name) for split in SPLITS for name in ("loss", *fields)]
    check_form(meta, SAME, _ZEROS, [*names, CHECKSUMS, *more, LAST_IDS])
    checked_count(meta["largest_id"], "largest_id", META_NAME)
    _take_ranges({}, meta)
    sizes, samples = {record["name"]: record["bytes"] for record in meta["files"]}, 0
    for split in SPLITS:
        totals = {key: meta["totals"][f"{split}_{key}"] for key in _COUNTED}
        check_entries(meta, split, split, totals["groups"] * len(GROUP_COLUMNS))
        check_entries(meta, split, f"{split}_samples", totals["samples"] * len(SAMPLE_COLUMNS))
        if len(meta["shards"][split]) != 1:
            raise wrong_value(META_NAME, f"shards.{split}", meta["shards"][split], "one file")
        for name in fields:
            values = meta["scores"][split] if per(name) == "token" else totals["samples"]
            if sizes[file_of(split, name)] != _FLOAT_BYTES * values:
                raise CacheError(META_NAME, f"{file_of(split, name)} is not of {values} values", code="E202")
        samples += totals["samples"]
    if sizes[LAST_IDS] != LAST_ID.itemsize * samples:
        raise CacheError(META_NAME, "its last ids are not one for each sample", code="E202")


def warn_of_whole(path: Path, meta: Meta) -> None:
    """Log the signs of odd data in the whole cache: a wrong share of val, odd samples, an empty val."""
    warn_of_share(path, meta)
    warn_of_signals(path, meta)
    warn_of_empty_val(path, meta, meta["totals"]["train_groups"] - meta["noticed"].get(REPEATED_GROUP, 0), "groups")


def _of_unit(meta: Meta) -> dict[str, int]:
    """Return tokens, groups and samples of a unit, for `partitions.of_each` of meta.json."""
    return {f"{split}_{key}": meta["totals"][f"{split}_{key}"] for split in SPLITS for key in _COUNTED}


def _part(folder: Path, meta: Meta) -> _Part:
    recorded = {record["name"]: record["bytes"] for record in meta["files"]}
    sizes = {}
    for split in SPLITS:
        sizes[split] = {key: meta["totals"][f"{split}_{key}"] for key in ("groups", "samples")}
        sizes[split] |= {"stored": meta["shards"][split][0]["tokens"], "scores": meta["scores"][split]}
        sizes[split] |= {"loss": recorded[file_of(split, "loss")], "ids": meta["ids"][split]["bytes"]}
    return _Part(folder, tuple(name for name in FIELDS if name in meta["fields"]), sizes)


def _fields_of(parts: Sequence[_Part]) -> tuple[str, ...]:
    """Return the fields of all samples. Raises: SourceError E304 for units with different fields."""
    found: dict[tuple[str, ...], int] = {}
    for number, part in enumerate(parts):
        if any(part.sizes[split]["samples"] for split in SPLITS):
            found.setdefault(part.fields, number)
    if len(found) > 1:
        told = (f"those of partition {number} the fields ({', '.join(fields)})" for fields, number in found.items())
        raise SourceError(f"samples have different fields: {', '.join(told)}. Give every sample the same", code="E304")
    return next(iter(found), ())


def _take_ranges(ranges: dict[str, list[float]], meta: Meta) -> None:
    """Add the least, the most, the sum and the number of the values of each field. Raises for a wrong range."""
    for name, of in meta.get("ranges", {}).items():
        if name not in meta["fields"]:
            raise wrong_value(META_NAME, "ranges", name, "fields of its samples")
        is_by_token, totals = per(name) == "token", meta["totals"]
        count = sum(meta["scores"][split] if is_by_token else totals[f"{split}_samples"] for split in SPLITS)
        least, mean, most = (float(of[key]) for key in ("min", "mean", "max"))
        before = ranges.get(name, [np.inf, -np.inf, 0.0, 0])
        if count:
            ranges[name] = [min(before[0], least), max(before[1], most), before[2] + mean * count, before[3] + count]


def _table(folder: Path, name: str, columns: int, rows: int) -> Ints:
    """Map a table of the index of a unit: int64 [rows, columns]. Raises: CacheError E510 for another file."""
    path, header = folder / f"index/{name}.npy", npy_header(rows * columns)
    with open(open_regular(path), "rb") as file:
        if file.read(len(header)) != header:
            raise CacheError(path, "not the index of its partition's groups", code="E510")
        if not rows:
            return np.zeros((0, columns), dtype=OFFSET_DTYPE)
        mapped = np.memmap(file, dtype=OFFSET_DTYPE, mode="r", offset=len(header), shape=(rows, columns))
    return mapped.view(np.ndarray)


def _check_index(part: _Part) -> None:
    """Raise CacheError E510 unless the index of a unit fits itself and the sizes of its files."""
    for split in SPLITS:
        sizes = part.sizes[split]
        groups = _table(part.folder, f"{split}_groups", len(GROUP_COLUMNS), sizes["groups"])
        samples = _table(part.folder, f"{split}_samples", len(SAMPLE_COLUMNS), sizes["samples"])
        of_files = {"tokens": sizes["stored"], "loss": sizes["loss"], "ids": sizes["ids"]}
        of_files |= {name: sizes["scores"] if per(name) == "token" else sizes["samples"] for name in part.fields}
        try:
            if len(groups):
                check_index(part.folder, split, groups, samples, of_files)
                _check_lines(part.folder / f"index/{split}_ids.txt", groups[:, _PLACES["ids"]], sizes["ids"])
            elif any(of_files.values()) or len(samples):
                raise CacheError(part.folder, f"no group in {split}, and files that hold something", code="E510")
        except CacheError as error:
            raise CacheError(error.path, error.found, error.expected, code="E510") from error


def _check_lines(path: Path, starts: Ints, size: int) -> None:
    """Raise CacheError unless the lines of a file of ids, of `size` bytes, begin at `starts`."""
    ends, at = [np.zeros(1, dtype=OFFSET_DTYPE)], 0
    for block in whole(path, size):
        ends.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + (at + 1))
        at += len(block)
    if not np.array_equal(np.concatenate(ends), np.append(starts, size)):
        raise CacheError(path, "lines that begin elsewhere than the index says", code="E510")


def _streamed(work: Path, parts: Sequence[_Part], fields: Sequence[str], known: Meta) -> Meta:
    """Write all files but meta.json; returns their keys of meta.json."""
    crcs, itemsize = list[bytes](), token_dtype_of(known, META_NAME).itemsize
    keys: Meta = {"shards": {}, "index": {}, "ids": {}, "files": [], "fields": {name: per(name) for name in fields}}

    def total(split: str, key: str) -> int:
        return sum(part.sizes[split][key] for part in parts)

    def joined(split: str, name: str, of: str, size: int) -> Meta:
        """Join the files `name`, of `size` bytes for each of the `of` in a unit's sizes; skips units without any."""
        name = file_of(split, name)
        some = ((part.folder / name, size * part.sizes[split][of]) for part in parts if part.sizes[split][of])
        return write_whole(work, name, (block for each in some for block in whole(*each)), crcs)

    for split in SPLITS:
        keys["shards"][split] = [{**joined(split, "tokens", "stored", itemsize), "tokens": total(split, "stored")}]
    for split in SPLITS:
        for table, columns in (("groups", len(GROUP_COLUMNS)), ("samples", len(SAMPLE_COLUMNS))):
            entries = total(split, table) * columns
            record = write_whole(work, f"index/{split}_{table}.npy", _rows(parts, split, table, columns, entries), crcs)
            keys["index"][split if table == "groups" else f"{split}_{table}"] = {**record, "entries": entries}
    for split in SPLITS:
        lines = (line for part in parts for line in lines_of(part.folder, split, part.sizes[split]["groups"]))
        record = write_whole(work, f"index/{split}_ids.txt", lines, crcs)
        keys["ids"][split] = {**record, "entries": total(split, "groups")}
    for split in SPLITS:
        keys["files"].append(joined(split, "loss", "loss", 1))
        for name in fields:
            keys["files"].append(joined(split, name, "scores" if per(name) == "token" else "samples", _FLOAT_BYTES))
    return {**keys, "checksums": {**write_whole(work, CHECKSUMS, crcs), "block_bytes": BLOCK_BYTES}}


def _rows(parts: Sequence[_Part], split: str, table: str, columns: int, entries: int) -> Iterator[bytes]:
    """Yield a table of the index of all units. In the table of groups the places count on from unit to unit."""
    yield npy_header(entries)
    added = np.zeros(columns, dtype=OFFSET_DTYPE)
    for part in parts:
        rows = _table(part.folder, f"{split}_{table}", columns, part.sizes[split][table])
        for first in range(0, len(rows), _ROWS):
            yield (rows[first : first + _ROWS] + added).astype(OFFSET_DTYPE).tobytes()
        for key, column in _PLACES.items() if table == "groups" else ():
            added[column] += part.sizes[split][key]


def _notice(work: Path, parts: Sequence[_Part], sums: Sums) -> None:
    """Set the counts in `noticed` that need the samples of all units."""
    totals, noticed, last_ids = sums.counts["totals"], sums.counts["noticed"], Counter[int]()
    samples = sum(totals[f"{split}_samples"] for split in SPLITS)
    for part in parts:
        size = LAST_ID.itemsize * sum(part.sizes[split]["samples"] for split in SPLITS)
        for block in whole(part.folder / LAST_IDS, size):
            ids, counts = np.unique(np.frombuffer(block, dtype=LAST_ID), return_counts=True)
            last_ids.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
    noticed[NO_COMMON_END] = samples - max(last_ids.values(), default=0)
    if noticed.get(WITHOUT_PROMPT) == samples:  # as in trees
        del noticed[WITHOUT_PROMPT]
    if sum(totals[f"{split}_groups"] for split in SPLITS) <= 16 * MAX_DIGESTS:  # of more the sum of the units stays
        noticed[REPEATED_GROUP] = sum(
            count_repeated_lines(work / f"index/{split}_ids.txt", totals[f"{split}_groups"], max_digests=MAX_DIGESTS)
            for split in SPLITS
        )
