"""The state of every partition of a plan: which are finished, and what is wrong with the others. Nothing is trusted.

A partition's meta.json is its receipt. A quick look compares links, receipts and sizes; a deep one reads every file.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.builders.partitions.plan import LISTINGS_NAME, Plan
from niels_gpt.builders.partitions.sums import Sums
from niels_gpt.cache.formats import BLOCK_BYTES, FORMAT_VERSION, OFFSET_DTYPE, SPLITS, npy_header, num_blocks
from niels_gpt.cache.shards import TEXTS_OF
from niels_gpt.engine.checkpoints import CHECKSUMS
from niels_gpt.engine.meta import BUILDER_VERSIONS, content_sha256
from niels_gpt.progress import Progress
from niels_gpt.settings import usable_cores
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import (
    checked_count,
    file_records,
    meta_crc32,
    open_regular,
    parse_object,
    path_inside,
    printable,
    read_regular,
)
from niels_gpt.storage.versions import BUILDING, PLAN_NAME, VERSIONS_DIR, versions_dir
from niels_gpt.tokenizers.protocol import token_dtype_name
from niels_gpt.tokenizers.vocabulary import token_dtype_of

SAME = (
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
"""Keys of meta.json that all partitions of a cache have in common, and the cache too; document_start only if there is
one."""
_TARGET = re.compile(r"\.versions/([0-9]{5})/([0-9a-f]{12})")
_HALF_WRITTEN = re.compile(r"\.plan\.json\.[0-9a-f]{8}\.tmp")
_READ_BYTES = 1 << 20
_WAITING = 4  # files for each thread that wait to be read
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


class PartitionState(NamedTuple):
    """What was found of one partition."""

    number: int
    """From 0; -1 of an entry of the plan's folder that is no partition of it."""
    state: str
    """finished; missing: no receipt; started: an unfinished build is there; doubled: its receipt claims another number;
    foreign: not made by a build of ours, or a link out; stale: of another plan or version of the builder; damaged: its
    files differ from its receipt."""
    documents: int
    """In both splits, by its receipt; 0 without a good one."""
    tokens: int
    """In both splits, by its receipt; 0 without a good one."""
    found: str
    """What is wrong, for a message; "" where it is finished. Of number -1: the entry's name, then what is wrong."""
    entry: Path | None = None
    """Of number -1: the entry, by its name as it is."""


class Receipt(NamedTuple):
    """A partition whose receipt is that of the plan, and whose files have the sizes in it."""

    number: int
    folder: Path
    """Of its version, without links."""
    meta: dict[str, Any]


class NotFinishedError(ValueError):
    """A partition is in another state than finished."""

    def __init__(self, state: str, found: str) -> None:
        super().__init__(state, found)
        self.state, self.found = state, found


def partition_states(plan: Plan, *, deep: bool = False, progress: Progress | None = None) -> list[PartitionState]:
    """Return the state of each partition, by number, and of foreign entries of the plan's folder, which have number -1.

    deep: compare the sha256 and the block checksums of every file too; else links, receipts and sizes only.
    progress: called with files, bytes read, and bytes to read in all.
    """
    states, common, num_bytes = list[PartitionState](), dict[str, Any](), 0
    for number in range(plan.total):
        try:
            receipt = read_receipt(plan, number)
            _compare_common(receipt, common)
        except NotFinishedError as error:
            states.append(PartitionState(number, error.state, 0, 0, error.found))
            continue
        totals, docs = receipt.meta["totals"], receipt.meta["docs"]
        tokens = sum(totals[f"{split}_tokens"] for split in SPLITS)
        states.append(PartitionState(number, "finished", sum(docs[split] for split in SPLITS), tokens, ""))
        num_bytes += sum(record["bytes"] for record in file_records(receipt.meta)) if deep else 0
    for number, found in _damages(plan, states, num_bytes, progress) if deep else ():
        if states[number].state == "finished":
            states[number] = PartitionState(number, "damaged", 0, 0, found)
    return states + [PartitionState(-1, "foreign", 0, 0, found, entry) for entry, found in _foreign(plan)]


def read_receipt(plan: Plan, number: int) -> Receipt:
    """Return a partition's receipt, after a quick look. Raises: NotFinishedError."""
    path = plan.partition_path(number)
    if not os.path.lexists(path):
        is_started = any(versions_dir(path).glob(f"{BUILDING}-*"))
        raise NotFinishedError(*(("started", "an unfinished build") if is_started else ("missing", "no receipt")))
    target = _TARGET.fullmatch(os.readlink(path)) if path.is_symlink() else None
    if target is None or target[1] != path.name:
        raise NotFinishedError("foreign", f"no link to a version below {VERSIONS_DIR}/{path.name}")
    try:
        path_inside(plan.folder, f"{target[0]}/{META_NAME}")
        folder = plan.folder / target[0]
        raw = read_regular(folder / META_NAME)
        meta = parse_object(raw)
    except FileNotFoundError:
        raise NotFinishedError("damaged", f"{target[0]} has no {META_NAME}") from None
    except CacheError as error:
        raise NotFinishedError("foreign", error.problem) from error
    except (OSError, ValueError) as error:
        raise NotFinishedError("damaged", f"{META_NAME}: {error}") from error
    receipt = Receipt(number, folder, meta)
    _check_claim(plan, receipt)
    try:
        stored, actual = meta_crc32(raw)
        if stored != actual:
            raise ValueError(f"{META_NAME} has another meta_crc32 than its bytes")
        _check_keys(plan, receipt, target[2])
        _check_files(receipt)
        Sums().add(meta)
    except (OSError, *_MALFORMED) as error:
        problem = error.problem if isinstance(error, CacheError) else str(error) or repr(error)
        raise NotFinishedError("damaged", printable(problem)) from error
    return receipt


def _check_claim(plan: Plan, receipt: Receipt) -> None:
    """Raise NotFinishedError unless the receipt is one, of this plan and version, and of its folder's number."""
    meta, claim = receipt.meta, receipt.meta.get("partition")
    if meta.get("kind") != "pretrain" or not isinstance(claim, dict):
        raise NotFinishedError("foreign", f"its {META_NAME} is no receipt of a partition")
    if claim.get("plan") != plan.sha256 or claim.get("total") != plan.total:
        raise NotFinishedError("stale", "its receipt is of another plan")
    versions, builder = (meta.get("format_version"), meta.get("builder_version")), BUILDER_VERSIONS["pretrain"]
    if versions != (FORMAT_VERSION, builder):
        raise NotFinishedError("stale", f"made by version {versions[1]!r:.20} of the builder, not {builder}")
    if meta.get("tokenizer_sha256") != plan.content["tokenizer_sha256"]:
        raise NotFinishedError("stale", "its ids are of another tokenizer than the plan's")
    if claim.get("number") != receipt.number or type(claim["number"]) is not int:
        raise NotFinishedError("doubled", f"its receipt claims number {claim.get('number')!r:.20}")


def _compare_common(receipt: Receipt, common: dict[str, Any]) -> None:
    """Compare what all partitions have in common with the first finished one's, which `common` is filled with."""
    found = {key: receipt.meta.get(key) for key in SAME}
    common.update(found if not common else {})
    differing = [key for key in SAME if found[key] != common[key]]
    if differing:
        raise NotFinishedError("stale", f"it differs from other partitions in {', '.join(differing)}")


def _check_keys(plan: Plan, receipt: Receipt, version: str) -> None:
    """Raise an error where the keys that a seal reads do not agree."""
    meta, where = receipt.meta, f"{receipt.folder}/{META_NAME}"
    records = file_records(meta, where)
    content = content_sha256(records)
    if content != meta["content_sha256"] or content[:12] != version:
        raise ValueError("content_sha256 is not that of its files")
    itemsize = token_dtype_of(meta, where).itemsize
    if meta["token_dtype"] != token_dtype_name(meta["vocab_size"]):
        raise ValueError("token_dtype is not that of vocab_size")
    full = meta["shard_bytes"] // itemsize * itemsize
    for split in SPLITS:
        shards, docs = meta["shards"][split], checked_count(meta["docs"][split], f"docs.{split}", where)
        sizes = [record["bytes"] for record in shards]
        if any(size != full for size in sizes[:-1]) or not all(0 < size <= full for size in sizes):
            raise ValueError(f"its shards of {split} do not have {full} bytes each, but for the last")
        if [record["tokens"] * itemsize for record in shards] != sizes:
            raise ValueError(f"the tokens of its shards of {split} do not have {itemsize} bytes each")
        tokens = checked_count(meta["totals"][f"{split}_tokens"], "totals", where)
        if sum(sizes) != tokens * itemsize or docs > tokens:
            raise ValueError(f"its shards of {split} do not add up to its {tokens} tokens")
        index, ids = meta["index"][split], meta["ids"][split]
        if index["entries"] != docs + 1 or ids["entries"] != docs:
            raise ValueError(f"its index of {split} is not of {docs} documents")
        if index["bytes"] != len(npy_header(docs + 1)) + OFFSET_DTYPE.itemsize * (docs + 1):
            raise ValueError(f"its index of {split} has another size than that of {docs} documents")
    texts = [meta["docs"][split] * 8 for split in SPLITS]
    if [record["bytes"] for record in meta["files"]] != texts:
        raise ValueError("its digests of texts are not those of its documents")
    if [record["name"] for record in records] != _names(meta):
        raise ValueError("it names other files than those of a partition")
    blocks = sum(num_blocks(record["bytes"]) for record in records if record is not meta["checksums"])
    if (meta["checksums"]["bytes"], meta["checksums"]["block_bytes"]) != (4 * blocks, BLOCK_BYTES):
        raise ValueError("its block checksums are not those of its files")


def _names(meta: Mapping[str, Any]) -> list[str]:
    """Return the names of the files of a partition with as many shards, as `file_records` orders them."""
    shards = [f"{split}/shard_{n:05d}.bin" for split in SPLITS for n in range(len(meta["shards"][split]))]
    index = [f"index/{split}_docs.npy" for split in SPLITS]
    ids = [f"index/{split}_ids.txt" for split in SPLITS]
    return [*shards, *index, *ids, CHECKSUMS, *TEXTS_OF.values()]


def _check_files(receipt: Receipt) -> None:
    """Raise an error for a file that is missing, no regular file, or of another size."""
    for record in file_records(receipt.meta):
        try:
            with open(open_regular(path_inside(receipt.folder, record["name"])), "rb") as file:
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            raise ValueError(f"{record['name']} is missing") from None
        if size != record["bytes"]:
            raise ValueError(f"{record['name']} has {size} bytes, expected {record['bytes']}")


def _foreign(plan: Plan) -> Iterator[tuple[Path, str]]:
    """Yield what is in the plan's folder, or among the versions of its partitions, and was not put there by a build."""
    names = {plan.partition_path(number).name for number in range(plan.total)}
    for folder, known in (
        (plan.folder, {*names, PLAN_NAME, LISTINGS_NAME, VERSIONS_DIR}),
        (plan.folder / VERSIONS_DIR, names),
    ):
        if folder.is_symlink():
            yield folder, f"{folder.name}: a symbolic link"
            continue
        for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
            if name not in known and not _HALF_WRITTEN.fullmatch(name):
                below = "" if folder == plan.folder else f"{VERSIONS_DIR}/"
                yield folder / name, f"{below}{printable(name)}: no partition of the {plan.total} of this plan"


def _damages(
    plan: Plan, states: list[PartitionState], num_bytes: int, progress: Progress | None
) -> Iterator[tuple[int, str]]:
    """Read every file of the finished partitions, several at once; yield the number of one, and what is wrong."""
    threads = min(16, usable_cores())
    waiting: deque[tuple[int, int, Future[str]]] = deque()
    files = read = 0
    with ThreadPoolExecutor(threads) as executor:
        try:
            for number, folder, record, crcs in _jobs(plan, states):
                waiting.append((number, record["bytes"], executor.submit(_damage, folder, record, crcs)))
                if len(waiting) < _WAITING * threads:
                    continue
                files, read = files + 1, read + waiting[0][1]
                yield from _ended(waiting)
                if progress is not None:
                    progress(files, read, num_bytes)
            while waiting:
                files, read = files + 1, read + waiting[0][1]
                yield from _ended(waiting)
                if progress is not None:
                    progress(files, read, num_bytes)
        finally:
            for *_, future in waiting:
                future.cancel()


def _ended(waiting: deque[tuple[int, int, Future[str]]]) -> Iterator[tuple[int, str]]:
    number, _, future = waiting.popleft()
    if found := future.result():
        yield number, found


def _jobs(plan: Plan, states: list[PartitionState]) -> Iterator[tuple[int, Path, dict[str, Any], bytes | None]]:
    """Yield each file of the finished partitions: number, folder, record, block checksums; None: of a file without."""
    for state in states:
        if state.state != "finished":
            continue
        with suppress(NotFinishedError):  # it was good a moment ago; the seal reads it once more
            receipt, start = read_receipt(plan, state.number), 0
            checksums = receipt.meta["checksums"]
            stored = read_regular(receipt.folder / checksums["name"], checksums["bytes"])
            for record in file_records(receipt.meta):
                if record["name"] == checksums["name"]:
                    yield state.number, receipt.folder, record, None
                    continue
                end = start + 4 * num_blocks(record["bytes"])
                yield state.number, receipt.folder, record, stored[start:end]
                start = end


def _damage(folder: Path, record: dict[str, Any], crcs: bytes | None) -> str:
    """Read a file; return what is wrong with it, "" where its sha256 and its block checksums are right."""
    digest, found = hashlib.sha256(), bytearray()
    try:
        with open(open_regular(path_inside(folder, record["name"])), "rb", buffering=0) as file:
            buffer = memoryview(bytearray(_READ_BYTES))
            while count := _filled(file, buffer):
                digest.update(buffer[:count])
                for start in range(0, count, BLOCK_BYTES):
                    found += zlib.crc32(buffer[start : min(start + BLOCK_BYTES, count)]).to_bytes(4, "little")
    except (OSError, CacheError) as error:
        return f"{record['name']}: {error}"
    if digest.hexdigest() != record["sha256"]:
        return f"{record['name']} has another sha256 than its receipt says"
    return f"{CHECKSUMS} has other checksums of {record['name']}" if crcs not in (None, bytes(found)) else ""


def _filled(file: Any, buffer: memoryview) -> int:
    """Read until the buffer is full or the file has ended; return the bytes read."""
    count = 0
    while count < len(buffer) and (some := file.readinto(buffer[count:])):
        count += some
    return count
