"""How units of a pretrain cache become one cache: shards linked; index, ids and checksums streamed together.

Memory depends on the number of shards alone, whose records meta.json has. Duplicates are counted range by range of
their digests. Nothing of host, time, plan or code is in the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.cache.build_pretrain import IN_PARTITIONS
from niels_gpt.cache.formats import BLOCK_BYTES, OFFSET_DTYPE, PARTITIONED_VERSION, SPLITS, npy_header, num_blocks
from niels_gpt.cache.shards import TEXTS_OF, warn_of_unmet_budgets
from niels_gpt.engine.build import NoTextError
from niels_gpt.engine.checkpoints import CHECKSUMS
from niels_gpt.engine.journal import write_whole
from niels_gpt.engine.losses import warn_of_losses
from niels_gpt.engine.meta import Source, write_description
from niels_gpt.engine.split import asked_share, count_duplicates, count_in_both, count_repeated_lines, warn_of_share
from niels_gpt.engine.units import Plan
from niels_gpt.signals import IN_BOTH, REPEATED_ID
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import checked_count, open_regular

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
"""Keys of meta.json that all units of a pretrain cache have in common; document_start only if there is one."""
MAX_DIGESTS = 1 << 20
"""Digests in memory at once: 8 MiB, and four times that while they are sorted. More are counted by ranges."""
_READ_BYTES = 1 << 20
_SHARD = "{}/shard_{:05d}.bin"
_OF_SPLITS = dict.fromkeys(SPLITS, 0)
_ZEROS: dict[str, Any] = {
    "totals": {f"{split}_tokens": 0 for split in SPLITS},
    "docs": _OF_SPLITS,
    "utf8_bytes": _OF_SPLITS,
    "cut": {"documents": 0, "tokens": 0},
    "roundtrip": {"texts": 0, "differ": 0},
    "documents_read": 0,
    "unknown_ids": 0,
    "dropped": {},
    "noticed": {},
}
"""The counts that are summed."""
_OPEN = ("dropped", "noticed", "counters")
"""Counts whose names differ between receipts; the others have the names in _ZEROS."""

Meta = dict[str, Any]


class _Part(NamedTuple):
    """What is kept of a unit while the files of all are streamed."""

    folder: Path
    docs: dict[str, int]
    tokens: dict[str, int]
    blocks: dict[str, int]
    """Blocks with a checksum in the shards of each split."""


def join(work: Path, plan: Plan, source: Source, units: Iterator[tuple[Path, Meta]]) -> Meta:
    """Write all files of the cache and meta.json to `work`; returns the meta. See `UnitKind.join`.

    Raises: NoTextError without a token for train; CacheError E510 for an index or ids that are not of their unit.
    """
    for name in (*SPLITS, "index"):
        fileio.make_dir(work / name)
    parts, shards = list[_Part](), {split: list[Meta]() for split in SPLITS}
    of_each, limits = list[Meta](), dict[str, int | None]({f"max_{split}_tokens": 0 for split in SPLITS})
    counts, counters, examples = _ZEROS, dict[str, int](), dict[str, str]()
    accepted, meta = dict[str, Any](source.provenance.get("accepted_code", {})), Meta()
    for folder, meta in units:
        parts.append(_linked(work, folder, meta, shards))
        counts, counters = _added("", counts, meta), _added("counters", counters, meta["source"]["counters"])
        for key, limit in limits.items():
            limits[key] = None if limit is None or meta[key] is None else limit + meta[key]
        examples = {**meta.get("first_noticed", {}), **examples}
        accepted |= meta["source"].get("accepted_code", {})
        of_each.append(_of_unit(meta))
    known = {key: meta[key] for key in SAME if key in meta}
    if not counts["totals"]["train_tokens"] and known["built"] is True:
        read = counts["documents_read"]
        raise NoTextError(f"{plan.path}: no token for the train split: {read} documents read. Give it more text")
    if accepted:  # versions that differed while units were built: recipes/units.py
        source = replace(source, provenance={**source.provenance, "accepted_code": accepted})
    files = _streamed(work, parts, counts["docs"])
    duplicates = _count_duplicates(work, parts, counts, by_text=known["split_rule"] in IN_PARTITIONS.values())
    return write_description(
        work,
        vocabulary={},
        source=source,
        counters=counters,
        shards=shards,
        **files,
        duplicates=duplicates,
        format_version=PARTITIONED_VERSION,
        partitions={"total": plan.total, "rule": plan.content["rule"], "of_each": of_each},
        kind="pretrain",
        **known,
        **_described(counts, limits, examples),
    )


def check_counts(meta: Meta) -> None:
    """Raise an error where the counts of a receipt cannot be summed."""
    _added("", _ZEROS, meta)
    _added("counters", {}, meta["source"]["counters"])
    dict(meta["source"].get("accepted_code", {}))
    for split in SPLITS:
        if (limit := meta[f"max_{split}_tokens"]) is not None:
            checked_count(limit, f"max_{split}_tokens", META_NAME)


def _of_unit(meta: Meta) -> dict[str, int]:
    """Return tokens, documents and shards of a unit, for `partitions.of_each` of meta.json."""
    tokens = {f"{split}_tokens": meta["totals"][f"{split}_tokens"] for split in SPLITS}
    docs = {f"{split}_docs": meta["docs"][split] for split in SPLITS}
    return tokens | docs | {f"{split}_shards": len(meta["shards"][split]) for split in SPLITS}


def _added(name: str, total: Any, value: Any) -> Any:
    """Return the sum of two counts, or of two objects of counts. Raises: CacheError for anything but a count."""
    if not isinstance(total, dict):
        return total + checked_count(value, name, META_NAME)
    if name in _OPEN:
        return total | {str(key): _added(f"{name}.{key}", total.get(key, 0), value[key]) for key in value}
    return {key: _added(key, number, value[key]) for key, number in total.items()}


def _described(counts: Meta, limits: Mapping[str, int | None], examples: Mapping[str, str]) -> Meta:
    """Return the sums of the receipts as keys of meta.json."""
    totals, trip = counts["totals"], counts["roundtrip"]
    return {
        **counts,
        **limits,
        **{
            key: {name: number for name, number in sorted(counts[key].items()) if number}
            for key in ("dropped", "noticed")
        },
        "budget_reached": {
            split: None if (limit := limits[f"max_{split}_tokens"]) is None else totals[f"{split}_tokens"] == limit
            for split in SPLITS
        },
        **({"first_noticed": dict(sorted(examples.items()))} if examples else {}),
        "lossless": trip["differ"] == 0 if trip["texts"] else None,
    }


def _linked(work: Path, folder: Path, meta: Meta, shards: dict[str, list[Meta]]) -> _Part:
    """Link a unit's shards behind those that are there, and append their records."""
    blocks = {}
    for split in SPLITS:
        for record in meta["shards"][split]:
            name = _SHARD.format(split, len(shards[split]))
            fileio.link_or_copy(folder / record["name"], work / name)
            shards[split].append({key: record[key] for key in ("bytes", "sha256", "tokens")} | {"name": name})
        blocks[split] = sum(num_blocks(record["bytes"]) for record in meta["shards"][split])
    docs, totals = meta["docs"], meta["totals"]
    tokens = {split: int(totals[f"{split}_tokens"]) for split in SPLITS}
    return _Part(folder, {split: int(docs[split]) for split in SPLITS}, tokens, blocks)


def _streamed(work: Path, parts: Sequence[_Part], docs: Mapping[str, int]) -> Meta:
    """Write index, ids and block checksums of all units; returns their keys of meta.json."""
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
    """Return the duplicates of each split, and set the counts in `noticed` that no unit knows.

    by_text: the text decides the split, so that no text can be in both.
    """
    texts = {split: [part.folder / TEXTS_OF[split] for part in parts] for split in SPLITS}
    if not by_text:
        counts["noticed"][IN_BOTH] = count_in_both(texts["train"], texts["val"])
    docs = counts["docs"]
    if sum(docs.values()) <= 16 * MAX_DIGESTS:  # of more the sum of the units stays: that many passes
        counts["noticed"][REPEATED_ID] = sum(
            count_repeated_lines(work / f"index/{split}_ids.txt", docs[split], max_digests=MAX_DIGESTS)
            for split in SPLITS
        )
    return {split: count_duplicates(*paths, folder=work, max_digests=MAX_DIGESTS) for split, paths in texts.items()}


def _starts(parts: Sequence[_Part], split: str) -> Iterator[bytes]:
    """Yield the document index of all units. Raises: CacheError for one that is not of its unit."""
    yield npy_header(sum(part.docs[split] for part in parts) + 1)
    before = 0
    for part in parts:
        path, left, last = part.folder / f"index/{split}_docs.npy", part.docs[split], -1
        with open(open_regular(path), "rb") as file:
            header = npy_header(left + 1)
            is_good = file.read(len(header)) == header
            while is_good and (block := file.read(_READ_BYTES)):
                starts = np.frombuffer(block, dtype=OFFSET_DTYPE)
                is_good = (last >= 0 or int(starts[0]) == 0) and bool((np.diff(starts, prepend=last) > 0).all())
                last = int(starts[-1])
                yield (starts[:left] + before).astype(OFFSET_DTYPE).tobytes()
                left -= min(left, len(starts))
        if not is_good or left or last != part.tokens[split]:
            raise CacheError(path, "not the index of its partition's documents", code="E510")
        before += part.tokens[split]
    yield before.to_bytes(OFFSET_DTYPE.itemsize, "little")


def _lines(parts: Sequence[_Part], split: str) -> Iterator[bytes]:
    """Yield the source ids of all units. Raises: CacheError for another number of them than the unit has documents."""
    for part in parts:
        path, lines, last = part.folder / f"index/{split}_ids.txt", 0, b"\n"
        with open(open_regular(path), "rb") as file:
            while block := file.read(_READ_BYTES):
                lines, last = lines + block.count(b"\n"), block[-1:]
                yield block
        if lines != part.docs[split] or last != b"\n":
            raise CacheError(path, f"{lines} lines", f"{part.docs[split]}, one for each document", code="E510")


def _checksums(parts: Sequence[_Part]) -> Iterator[bytes]:
    """Yield the block checksums of the shards of all units."""
    for split in SPLITS:
        for part in parts:
            first, count = part.blocks["train"] if split == "val" else 0, part.blocks[split]
            with open(open_regular(part.folder / CHECKSUMS), "rb") as file:
                file.seek(4 * first)
                left = 4 * count
                while left and (block := file.read(min(_READ_BYTES, left))):
                    left -= len(block)
                    yield block


def warn_of_whole(path: Path, meta: Meta) -> None:
    """Log what no unit can know: a share of val far from the one asked for, losses, unmet budgets, an empty val."""
    warn_of_share(path, meta)
    warn_of_losses(path, meta)
    by_share = bool(asked_share(meta)) and meta["split_rule"] in IN_PARTITIONS.values()
    is_empty = by_share and not meta["totals"]["val_tokens"]
    reached = {**meta["budget_reached"], "val": None} if is_empty else meta["budget_reached"]  # no budget emptied it
    warn_of_unmet_budgets(path, {**meta, "budget_reached": reached})
    if is_empty:
        distinct = meta["docs"]["train"] - meta["duplicates"]["train"]
        logger.warning(
            "%s: val is empty: none of %d distinct texts fell to it by its share, and partitions move none there. With "
            "--partitions 1 the nearest one goes to val",
            path,
            distinct,
            extra={"code": "W308"},
        )
