"""Makes the one cache of all partitions of a plan, and commits it. A seal that was killed is repeated.

Shards are linked, all else is streamed: memory depends on the number of shards alone, whose records meta.json has.
Duplicates are counted range by range of their digests. The bytes depend on the receipts alone: nothing of host, time,
plan or code is in the cache.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.builders.partitions.plan import Plan
from niels_gpt.builders.partitions.receipts import (
    SAME,
    NotFinishedError,
    Receipt,
    partition_states,
    read_receipt,
)
from niels_gpt.builders.partitions.refusal import Commands, not_finished
from niels_gpt.builders.partitions.sums import Sums, warn_of_whole
from niels_gpt.cache.build_pretrain import IN_PARTITIONS
from niels_gpt.cache.formats import BLOCK_BYTES, OFFSET_DTYPE, PARTITIONED_VERSION, SPLITS, npy_header, num_blocks
from niels_gpt.cache.shards import TEXTS_OF
from niels_gpt.engine.build import CANNOT_WRITE, NoTextError
from niels_gpt.engine.checkpoints import CHECKSUMS
from niels_gpt.engine.journal import write_whole
from niels_gpt.engine.meta import Source, write_description
from niels_gpt.engine.split import count_duplicates, count_in_both, count_repeated_lines
from niels_gpt.progress import Progress
from niels_gpt.signals import IN_BOTH, REPEATED_ID
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import MAX_JSON_BYTES, open_regular, sha256_regular

logger = logging.getLogger(__name__)

MAX_DIGESTS = 1 << 20
"""Digests in memory at once: 8 MiB, and four times that while they are sorted. More are counted by ranges."""
_READ_BYTES = 1 << 20
_SHARD = "{}/shard_{:05d}.bin"


class _Part(NamedTuple):
    """What the seal keeps of a partition while it streams the files of all."""

    folder: Path
    docs: dict[str, int]
    tokens: dict[str, int]
    blocks: dict[str, int]
    """Blocks with a checksum in the shards of each split."""


def seal(
    plan: Plan,
    *,
    source: Source,
    deep: bool = True,
    wait: bool = False,
    commands: Commands | None = None,
    committed: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Commit the cache of all partitions at `plan.path`, remove the plan's folder, and return the cache's meta.json.

    The caller does not hold `build_lock(plan.path)`: it is held in here.
    source: name, config, streaming and from_scratch as for `build_pretrain`; provenance: the key `source` of the meta,
        without `counters`, which are the sums of the receipts'. Its position and counters are not looked at.
    deep: compare the sha256 of every file of every partition; else sizes. wait: for the lock, as in `build_lock`.
    commands: those that the error E510 names; None: that of `source`.
    committed: called with the meta after the commit, before the plan's folder is removed.
    progress: called with files, bytes read, and bytes to read in all.
    Warns (W509) where the plan's folder stays, because a partition is being built in it.
    Raises: CacheError E510 naming each partition that is not finished, or where plan.json is gone; E503 while a
        partition is being built or, without `wait`, another process seals; ValueError E303 where no partition has a
        token for the train split; OSError.
    """
    with _saying_what_is_kept(plan.path), versions.building(plan.path, wait=wait) as work:
        if not is_there(plan):
            raise CacheError(plan.folder, f"has no {versions.PLAN_NAME} of this plan", code="E510")
        versions.refuse_if_partition_is_built(plan.folder)
        seen = [_version_named(plan, number) for number in range(plan.total)]
        states = partition_states(plan, deep=deep, progress=progress)
        if any(state.state != "finished" for state in states):
            raise not_finished(plan, states, commands, source.from_scratch)
        meta = _joined(plan, work, source, seen)
        versions.commit(work, plan.path, str(meta["content_sha256"]))
        if committed is not None:
            committed(meta)
        if not discard_plan(plan):
            logger.warning(
                "%s: not removed, because one of its partitions is being built. Later: %s",
                plan.folder,
                shlex.join(["niels-gpt", "gc", str(plan.path.parent)]),
                extra={"code": "W509"},
            )
    warn_of_whole(plan.path, meta)
    return meta


@contextmanager
def _saying_what_is_kept(path: Path) -> Iterator[None]:
    """Name a file, and what to do, where the disk takes nothing more."""
    try:
        yield
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        kept = "Its partitions are kept: the same command seals them once that is fixed"
        raise OSError(error.errno, f"{error.strerror}. {kept}", error.filename or os.fspath(path)) from error


def is_there(plan: Plan) -> bool:
    """Whether plan.json is there, and is that of the plan: a seal, `restart` and gc remove it."""
    try:
        return sha256_regular(plan.folder / versions.PLAN_NAME) == plan.sha256
    except (OSError, CacheError):
        return False


def discard_plan(plan: Plan) -> bool:
    """Remove a plan and its partitions, unless one is being built; return whether it is gone. `build_lock` is held.

    plan.json goes last, so that what a killed process leaves still says whose it is.
    """
    try:
        versions.refuse_if_partition_is_built(plan.folder)
    except CacheError as error:
        logger.info("%s is not removed: %s", plan.folder, error)
        return False
    versions.discard(plan.folder)
    return True


def _joined(plan: Plan, work: Path, source: Source, seen: Sequence[str]) -> dict[str, Any]:
    """Write all files of the cache and meta.json to a folder; returns the meta. seen: the versions checked."""
    for folder in (*SPLITS, "index"):
        fileio.make_dir(work / folder)
    parts, sums, shards = list[_Part](), Sums(), {split: list[dict[str, Any]]() for split in SPLITS}
    common: dict[str, Any] = {}
    for number in range(plan.total):
        receipt = _receipt(plan, number, seen[number])
        common = {key: receipt.meta[key] for key in (*SAME, "tokenizer_sha256") if key in receipt.meta}
        sums.add(receipt.meta)
        parts.append(_linked(work, receipt, shards))
    if not any(part.tokens["train"] for part in parts) and common["built"] is True:
        read = sums.keys()["documents_read"]
        raise NoTextError(f"{plan.path}: no token for the train split: {read} documents read. Give it more text")
    crcs: list[bytes] = []
    index, ids = {}, {}
    for split in SPLITS:
        record = write_whole(work, f"index/{split}_docs.npy", _starts(parts, split), crcs)
        index[split] = {**record, "entries": sums.of("docs", split) + 1}
    for split in SPLITS:
        record = write_whole(work, f"index/{split}_ids.txt", _lines(parts, split), crcs)
        ids[split] = {**record, "entries": sums.of("docs", split)}
    checksums = write_whole(work, CHECKSUMS, (block for of in (_checksums(parts), crcs) for block in of))
    texts = {split: [part.folder / TEXTS_OF[split] for part in parts] for split in SPLITS}
    duplicates = {
        split: count_duplicates(*paths, folder=work, max_digests=MAX_DIGESTS) for split, paths in texts.items()
    }
    if common["split_rule"] not in IN_PARTITIONS.values():  # by text, no text can be in both
        sums.noticed(IN_BOTH, count_in_both(texts["train"], texts["val"]))
    documents = {split: sums.of("docs", split) for split in SPLITS}
    if sum(documents.values()) <= 16 * MAX_DIGESTS:  # of more the sum of the partitions stays: that many passes
        counts = (
            count_repeated_lines(work / f"index/{split}_ids.txt", number, max_digests=MAX_DIGESTS)
            for split, number in documents.items()
        )
        sums.noticed(REPEATED_ID, sum(counts))
    meta = write_description(
        work,
        vocabulary={},
        source=source,
        counters=sums.counters,
        shards=shards,
        index=index,
        ids=ids,
        checksums={**checksums, "block_bytes": BLOCK_BYTES},
        duplicates=duplicates,
        format_version=PARTITIONED_VERSION,
        partitions={"total": plan.total, "rule": plan.content["rule"], "of_each": sums.of_each},
        kind="pretrain",
        **common,
        **sums.keys(),
    )
    if (size := (work / META_NAME).stat().st_size) > MAX_JSON_BYTES:
        advice = "Build with a larger --shard-bytes or with fewer --partitions"
        raise CacheError(plan.path, f"its {META_NAME} has {size:,} bytes", f"{MAX_JSON_BYTES:,}", advice, code="E206")
    return meta


def _version_named(plan: Plan, number: int) -> str:
    """Return the name of the version that a partition's link leads to, which its content decides; "" without a link."""
    with suppress(OSError):
        return os.path.basename(os.readlink(plan.partition_path(number)))
    return ""


def _receipt(plan: Plan, number: int, seen: str) -> Receipt:
    """Return the receipt of a partition whose version is still the one that was checked. Raises: CacheError E510."""
    try:
        receipt = read_receipt(plan, number)
        if receipt.folder.name != seen:
            raise NotFinishedError("replaced", f"version {receipt.folder.name}, and {seen} was checked")
        return receipt
    except NotFinishedError as error:  # it has changed since it was looked at
        path, found = plan.partition_path(number), f"{error.state}, though it was finished just now: {error.found}"
        raise CacheError(
            path, found, remedy="Let nothing change the partitions, and seal again", code="E510"
        ) from error


def _linked(work: Path, receipt: Receipt, shards: dict[str, list[dict[str, Any]]]) -> _Part:
    """Link a partition's shards behind those that are there, and append their records."""
    meta, blocks = receipt.meta, {}
    for split in SPLITS:
        for record in meta["shards"][split]:
            name = _SHARD.format(split, len(shards[split]))
            fileio.link_or_copy(receipt.folder / record["name"], work / name)
            shards[split].append({key: record[key] for key in ("bytes", "sha256", "tokens")} | {"name": name})
        blocks[split] = sum(num_blocks(record["bytes"]) for record in meta["shards"][split])
    docs, tokens = ({split: int(meta[key][name.format(split)]) for split in SPLITS} for key, name in _COUNTS)
    return _Part(receipt.folder, docs, tokens, blocks)


_COUNTS = (("docs", "{}"), ("totals", "{}_tokens"))


def _starts(parts: Sequence[_Part], split: str) -> Iterator[bytes]:
    """Yield the document index of all partitions. Raises: CacheError for one that is not of its partition."""
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
    """Yield the source ids of all partitions. Raises: CacheError for others than those of its partition."""
    for part in parts:
        path, lines, last = part.folder / f"index/{split}_ids.txt", 0, b"\n"
        with open(open_regular(path), "rb") as file:
            while block := file.read(_READ_BYTES):
                lines, last = lines + block.count(b"\n"), block[-1:]
                yield block
        if lines != part.docs[split] or last != b"\n":
            raise CacheError(path, f"{lines} lines", f"{part.docs[split]}, one for each document", code="E510")


def _checksums(parts: Sequence[_Part]) -> Iterator[bytes]:
    """Yield the block checksums of the shards of all partitions."""
    for split in SPLITS:
        for part in parts:
            first, count = part.blocks["train"] if split == "val" else 0, part.blocks[split]
            with open(open_regular(part.folder / CHECKSUMS), "rb") as file:
                file.seek(4 * first)
                left = 4 * count
                while left and (block := file.read(min(_READ_BYTES, left))):
                    left -= len(block)
                    yield block
