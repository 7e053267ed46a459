"""A cache at a URL, mounted: a folder here that stands for it. Readers open that folder like any other cache.

Small files arrive whole when they are opened, and are compared with their sha256. Large files (tokens, loss, rollouts)
never do: they are read in blocks of 64 KiB, which arrive in pieces of 1 MiB, up to 8 of them in one request. Each block
is compared with its CRC-32 in index/crc32.bin when it arrives, and again when this process first reads it from the
folder, and once its file has changed, because another process may write it. All is what meta.json said when the cache
was mounted.

An EAGLE-3 cache has checksums of samples instead, in receipts: its readers compare each sample with them, and `forget`
what differs.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from niels_gpt.buckets import folder as folders
from niels_gpt.buckets.bucket import RANGE_BYTES, Bucket, in_order, scheme_of
from niels_gpt.buckets.folder import HALF, PIECES, BoundedFolder, BusyFolderError, opened, read_at, remove
from niels_gpt.cache.checksums import CRC_DTYPE, covered_files
from niels_gpt.cache.formats import BLOCK_BYTES, SPLITS, crc32, num_blocks
from niels_gpt.cache.meta import checked_meta
from niels_gpt.storage.errors import CacheError, CacheNotFound, NoRoomError, UsageError
from niels_gpt.storage.fileio import META_NAME, open_for_reading
from niels_gpt.storage.meta_json import (
    MAX_JSON_BYTES,
    file_records,
    meta_crc32,
    parse_object,
    path_inside,
    printable,
    wrong_value,
)
from niels_gpt.storage.mounted import MOUNTED, is_url

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
MOST_PIECES = 8
"""Neighbours that one request asks for."""
JOBS = 8
"""Requests at once that fetch ahead, of each cache in a process."""
_RANGES = 4  # of a whole file at once
_LEAST_SHARE_PADDED = 1 << 16  # of shards of EAGLE-3 on a disk: their padding is holes
MAX_BYTES = 10 << 30
MAX_AHEAD = 256 << 20
_MOST_COMPARED = 1 << 17  # pieces, of 300 bytes each, whose compared blocks a process keeps
_BLOCKS = PIECE_BYTES // BLOCK_BYTES
_LEAST_BYTES = 16 << 20
_LOOKED_AT = 512  # places of a plan among which a piece that was read is looked for
_SOON = 1024  # places of a plan
_ALONE = 32  # places of a plan, about a batch
_IDLE_S = 10.0
_MOST_THREADS = 64  # of a process; above that each cache has one that fetches ahead
_ATTEMPTS = 4  # to bring a whole file into a folder in which others make room
_MOST_STRANGE = 64  # pieces in a row that no plan has, until the plan is looked through
_OWN_FOLDER = "Name a folder that only these runs write to: local=DIR"


class Plan:
    """The pieces that one reader needs next, in its order, and how far it and the threads are."""

    def __init__(self, keys: NDArray[np.int64], owner: object, num_kept: int) -> None:
        """keys: number of the file << 32 | piece: int64 [n]. num_kept: pieces that the folder holds for certain."""
        is_new = np.ones(len(keys), dtype=np.bool_)
        is_new[1:] = keys[1:] != keys[:-1]
        keys = keys[is_new]
        order, is_first = keys.argsort(kind="stable"), np.ones(len(keys), dtype=np.bool_)
        is_first[1:] = keys[order[1:]] != keys[order[:-1]]
        is_sought = np.ones(len(keys), dtype=np.bool_)  # but for those that were needed shortly before
        is_sought[order[1:]] = is_first[1:] | (np.diff(order) > num_kept)
        self._is_sought = is_sought.tobytes()
        self._keys: list[int] = keys.tolist()
        firsts = order[is_first]
        self._place: dict[int, int] = dict(zip(keys[firsts].tolist(), firsts.tolist(), strict=True))
        self._read = self._taken = self._strange = 0
        self._ahead: deque[tuple[int, int]] = deque()  # place and bytes of what was fetched, and not read yet
        self.owner, self.ahead_bytes = weakref.ref(owner), 0

    def reach(self, key: int) -> bool:
        """Note that a piece is read now. Returns whether more may be fetched by that."""
        if self._read < len(self._keys) and self._keys[self._read] == key:
            return False
        try:
            self._read = self._keys.index(key, self._read, self._read + _LOOKED_AT)
            self._strange = 0
        except ValueError:
            self._strange += 1
            if self._strange > _MOST_STRANGE:  # the reader is elsewhere in its plan: else nothing more would be fetched
                self._read = max(self._read, self._place.get(key, 0))
        before = self.ahead_bytes
        while self._ahead and self._ahead[0][0] <= self._read:
            _, num_bytes = self._ahead.popleft()
            self.ahead_bytes -= num_bytes  # in one step: a thread may add to it meanwhile
        return self.ahead_bytes < before

    def take(self) -> int | None:
        """Return the next piece that nobody has looked for; None after the last one."""
        place = self._is_sought.find(1, max(self._taken, self._read))
        self._taken = place + 1 if place >= 0 else len(self._keys)
        return self._keys[place] if place >= 0 else None

    def most(self) -> int:
        """Return the pieces that a request may ask for: one at first: the first batch waits for no other."""
        return MOST_PIECES if self._taken > _ALONE else 1

    def is_soon(self, key: int) -> bool:
        """Return whether a piece is needed soon, so that it may come along with its neighbour."""
        place = self._place.get(key, -1)
        return bool(self._read <= place < self._taken + _SOON)

    def note(self, num_bytes: int) -> None:
        """Count bytes that are fetched for the piece that was taken last."""
        self._ahead.append((self._taken - 1, num_bytes))
        self.ahead_bytes += num_bytes


class Mount:
    """One cache at a URL, as its meta.json was. Threads share it; it may be forked and pickled.

    A copy reads meta.json neither from the URL nor from the folder: it brings the bytes along.
    """

    folder: Path
    """The folder that stands for it."""

    def __init__(
        self, url: str, local: Path, max_bytes: int, max_ahead: int, raw: bytes, bucket: Bucket | None = None
    ) -> None:
        """url: of the cache. local: absolute. raw: the bytes of its meta.json. bucket: of it, if one is open.

        Raises: CacheError for a meta.json that readers refuse, a cache without checksums, and a folder that is not
            ours; OSError.
        """
        self.url, self.raw, self.max_ahead = url.rstrip("/"), raw, min(max_ahead, max_bytes // 4)
        self.shown = printable(self.url)
        where = f"{self.shown}/{META_NAME}"
        self.meta = parsed_meta(raw, where)
        if "shards" in self.meta and self.meta.get("checksums", {}).get("block_bytes") != BLOCK_BYTES:
            found = "no checksums of blocks, as in caches of earlier builds and other tools"  # others arrive whole
            raise CacheError(where, found, remedy=f"Copy it: niels-gpt pull {shlex.quote(self.url)} DEST", code="E208")
        self.records: Mapping[str, Mapping[str, Any]] = {
            str(record["name"]): record for record in file_records(self.meta, where)
        }
        self._check_names(where)
        self._numbers = {name: number for number, name in enumerate(self.records)}
        self._names, self._sizes = list(self.records), [int(each["bytes"]) for each in self.records.values()]
        self._has_sums = bool(covered_files(self.meta))
        self.store = BoundedFolder(local, max_bytes)
        digest = hashlib.sha256(raw).hexdigest()[:12]
        last = self.url.rsplit("/", 1)[-1]
        name = "".join(each if each.isascii() and (each.isalnum() or each in "._-") else "_" for each in last)
        self.folder = local / f"{name[:80] or 'cache'}-{digest}"
        self._pieces = f"{self.folder / PIECES}{os.sep}"
        self._begin(bucket)
        self.make_folders()
        if self._has_sums:
            _ = self._sums
        self.store.trim()
        MOUNTED[str(self.folder)] = self

    def make_folders(self) -> None:
        """Make what a reader looks for when it opens the cache, unless it is there. Raises: as the class."""
        self.store.make(self.folder.name)
        parents = {os.path.dirname(name) for name in self.records} - {""}
        empty = {split for split in SPLITS if self.meta.get("shards", {}).get(split) == []}
        for parent in parents | empty:
            path_inside(self.folder, parent).mkdir(0o700, parents=True, exist_ok=True)
        self._write_meta()

    def _check_names(self, where: str) -> None:
        """Raise CacheError E202 for names that cannot all be files of one folder, beside its pieces, and huge files."""
        folders = {str(parent) for name in self.records for parent in Path(name).parents}
        for name in self.records:
            if name in folders or name.split("/")[0] == PIECES or name.endswith(HALF):
                raise wrong_value(where, "a file's name", name, "a name beside all others")
            if int(self.records[name]["bytes"]) >= PIECE_BYTES << 32:  # the numbers of pieces have 32 bits
                raise wrong_value(where, f"{name}: bytes", self.records[name]["bytes"], "below 4 PiB")

    def _begin(self, bucket: Bucket | None = None) -> None:
        """Make what no other process has."""
        self._bucket = bucket or Bucket(self.url)
        if not self._has_sums:
            self._bucket.least_share = _LEAST_SHARE_PADDED
        self._lock, self._whole_lock, self._wake = threading.RLock(), threading.RLock(), threading.Condition()
        self._compared: dict[int, tuple[tuple[int, int], int]] = {}  # of a piece: which file, and a bit for each block
        self._arriving: dict[int, Future[bytes | None]] = {}
        self._whole: dict[str, tuple[int, ...]] = {}
        self._plans: dict[int, Plan] = {}
        self._threads = self._idle = 0
        self.fetched_bytes = self.requests = 0
        self._pid = os.getpid()  # the last, because other threads look at it

    @property
    def max_bytes(self) -> int:
        """Most bytes in the local folder, of all caches."""
        return self.store.max_bytes

    def _here(self) -> None:
        if self._pid != os.getpid():
            with _FORKED:
                if self._pid != os.getpid():
                    self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.url, self.store.path, self.store.max_bytes, self.max_ahead, self.raw)

    def __repr__(self) -> str:
        return f"Mount({self.shown}, {self.folder})"

    # --- whole files --------------------------------------------------------------------------------------------------

    def _write_meta(self) -> None:
        path = self.folder / META_NAME
        if read_at(path, len(self.raw), 0, len(self.raw)) == self.raw:
            return
        remove(path)
        with self.store.arriving(path, len(self.raw), wait_s=folders.PATIENCE_S) as handle:
            if handle is not None:
                os.pwrite(handle, self.raw, 0)

    def arrive(self, name: str) -> None:
        """Bring a file whole, unless it is in the folder and has its sha256, which is compared once a process.

        Raises: CacheError E611 for damage at the URL, E610 if the cache there was replaced, E612; NoRoomError E501.
        """
        if name == META_NAME:
            self._write_meta()
        record = self.records.get(name)
        if record is None:
            return
        self._here()
        path, size = path_inside(self.folder, name), int(record["bytes"])
        with self._whole_lock:
            for attempt in range(_ATTEMPTS):
                identity = _identity(path)
                if identity is not None and (
                    self._whole.get(name) == identity or _has_sha256(path, size, record["sha256"])
                ):
                    self._whole[name] = identity
                    with suppress(OSError):  # of a file system that is read-only now
                        os.utime(path, ns=(time.time_ns(), identity[-1]), follow_symlinks=False)
                    return
                if identity is not None:
                    logger.warning("%s: damaged, so it is fetched again", path, extra={"code": "W611"})
                    remove(path)
                try:
                    with self.store.arriving(path, size, wait_s=folders.PATIENCE_S) as handle:
                        if handle is not None:
                            self._bring(record, handle)
                except BusyFolderError:
                    if attempt + 1 == _ATTEMPTS:
                        raise
                    time.sleep(1.0)
        raise CacheError(path, "changed again and again while it was opened", remedy=_OWN_FOLDER, code="E210")

    def _bring(self, record: Mapping[str, Any], handle: int) -> None:
        """Fetch a whole file, and once more if it arrives damaged."""
        name, size, found = str(record["name"]), int(record["bytes"]), ""
        for _ in range(2):
            digest, at = hashlib.sha256(), 0
            try:
                for piece in self._ranges(name, size):
                    os.pwrite(handle, piece, at)
                    digest.update(piece)
                    at += len(piece)
            except FileNotFoundError:
                found = "no such file"
                continue
            if digest.hexdigest() == record["sha256"]:
                self._count(size)
                return
            found = (
                f"arrived with the sha256 {digest.hexdigest()[:12]} ({at:,} of {size:,} bytes), in a second attempt too"
            )
        self.refuse(name, found, f"{record['sha256'][:12]} by its {META_NAME}")

    def _ranges(self, name: str, size: int) -> Iterator[bytes | memoryview]:
        """Yield a whole file, in order. Of a large one a few ranges are asked for at once."""
        begins = range(0, size, RANGE_BYTES)
        if self._bucket.is_local or len(begins) < 2:
            yield from self._bucket.pieces(name, 0, size)
            return
        parts = (partial(self._bucket.part, name, begin, min(begin + RANGE_BYTES, size)) for begin in begins)
        yield from in_order(parts, _RANGES)

    def refuse(self, name: str, found: str, expected: str = "") -> NoReturn:
        """Raise the error of a file at the URL that is not as it was when the cache was mounted: E610 or E611."""
        if all(self._bucket.read(META_NAME, MAX_JSON_BYTES) != self.raw for _ in range(2)):
            replaced = "the cache was replaced at its URL after it was opened. No row of the new one was served"
            raise CacheError(self.shown, replaced, remedy="Open it again, with allow_other_content", code="E610")
        from niels_gpt.storage.remedies import push_again  # of an error that is shown

        raise CacheError(self._bucket.at(name), found, expected, push_again(self.url), code="E611")

    # --- pieces of large files ----------------------------------------------------------------------------------------

    @cached_property
    def _sums(self) -> tuple[NDArray[np.uint32], dict[str, int]]:
        """The checksums of all blocks, and the number of each file's first one."""
        name, firsts, total = str(self.meta["checksums"]["name"]), dict[str, int](), 0
        for record in covered_files(self.meta):
            firsts[str(record["name"])] = total
            total += num_blocks(int(record["bytes"]))
        size = total * CRC_DTYPE.itemsize
        if int(self.records[name]["bytes"]) != size:
            found = f"{self.records[name]['bytes']} bytes of checksums"
            raise CacheError(f"{self.shown}/{META_NAME}", found, f"{size}, for {total} blocks", code="E202")
        self.arrive(name)
        raw = read_at(self.folder / name, size, 0, size)
        if raw is None or hashlib.sha256(raw).hexdigest() != self.records[name]["sha256"]:
            raise CacheError(self.folder / name, "changed while it was read", remedy=_OWN_FOLDER, code="E210")
        return np.frombuffer(raw, dtype=CRC_DTYPE), firsts

    def name_of(self, path: Path) -> str:
        """Return the name of a file in the folder. Raises: ValueError for another path."""
        return path.relative_to(self.folder).as_posix()

    def size(self, name: str) -> int:
        """Return the bytes of a file. Raises: CacheNotFound for a file that meta.json does not name."""
        if name not in self.records:
            raise CacheNotFound(f"{self.shown}/{printable(name)}: its {META_NAME} does not name this file")
        return int(self.records[name]["bytes"])

    def read_into(self, memory: memoryview, name: str, at: int, plan: Plan | None = None) -> None:
        """Fill memory with bytes of a file from byte `at` on, which must all be in it.

        Raises: CacheError E611 for damage at the URL, E610 if the cache there was replaced, E612; NoRoomError E501.
        """
        self._here()
        number = self._numbers[name]
        if at + len(memory) > self._sizes[number]:
            raise CacheError(self._bucket.at(name), f"ends after {self._sizes[number]} bytes", code="E203")
        while memory:
            piece, start = divmod(at, PIECE_BYTES)
            key, part = number << 32 | piece, memory[: PIECE_BYTES - start]
            if plan is not None and plan.reach(key):
                self._look_ahead()
            while not self._from_folder(key, start, part):
                whole = self._arrived(number, piece)
                if whole is not None:  # else another process brought it
                    part[:] = memoryview(whole)[start : start + len(part)]
                    break
            at, memory = at + len(part), memory[len(part) :]

    def fetch(self, name: str, begin: int, end: int) -> bytes:
        """Return a few bytes of a file from the URL. They are not compared, and do not come into the folder.

        Raises: CacheError E611 if they are not there, E610 if the cache was replaced, E612.
        """
        self._here()
        found = ""
        for _ in range(2):
            try:
                content = self._bucket.part(name, begin, end)
            except FileNotFoundError:
                found = "no such file"
                continue
            self._count(len(content))
            if len(content) == end - begin:
                return content
            found = f"{len(content):,} bytes arrived of bytes {begin} to {end}, in a second attempt too"
        self.refuse(name, found)

    def forget(self, name: str, begin: int, end: int) -> None:
        """Remove the pieces of bytes that a reader found damaged from the folder."""
        for piece in range(begin // PIECE_BYTES, -(-end // PIECE_BYTES)):
            remove(self._path(self._numbers[name], piece))

    def _path(self, number: int, piece: int) -> Path:
        return self.folder / PIECES / f"{number:x}-{piece:x}"

    def _span(self, number: int, piece: int) -> tuple[int, int]:
        return piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, self._sizes[number])

    def _from_folder(self, key: int, start: int, memory: memoryview) -> bool:
        """Fill memory from byte `start` of a piece on, if it is in the folder. Another content is removed.

        Returns whether it is filled.
        """
        number, piece = key >> 32, key & 0xFFFFFFFF
        begin, end = self._span(number, piece)
        path = f"{self._pieces}{number:x}-{piece:x}"
        found = opened(path, end - begin)
        if found is None:
            return False
        handle, identity = found
        try:
            first, last = start // BLOCK_BYTES, (start + len(memory) - 1) // BLOCK_BYTES
            before, bits = self._compared.get(key, (None, 0))
            bits, wanted = bits if before == identity else 0, (2 << last) - (1 << first)
            if not self._has_sums or (identity is not None and bits & wanted == wanted):
                return os.preadv(handle, [memory], start) == len(memory)
            content = memoryview(os.pread(handle, (last + 1 - first) * BLOCK_BYTES, first * BLOCK_BYTES))
        finally:
            os.close(handle)
        blocks = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
        if self._wrong_block(number, piece * _BLOCKS + first, blocks) is None and len(blocks) == last + 1 - first:
            memory[:] = content[start - first * BLOCK_BYTES :][: len(memory)]
            if identity is not None:
                if len(self._compared) >= _MOST_COMPARED:
                    self._compared.clear()
                self._compared[key] = identity, bits | wanted
            return True
        logger.warning("%s: damaged in this folder, so it is fetched again", path, extra={"code": "W611"})
        remove(Path(path))
        return False

    def _wrong_block(self, number: int, first: int, blocks: Iterable[Any]) -> int | None:
        """Return the number of the first block with another checksum, None if all are right. first: of blocks[0]."""
        if not self._has_sums:
            return None
        sums, firsts = self._sums
        start = firsts[self._names[number]]
        for block, content in enumerate(blocks, first):
            if crc32(content) != sums[start + block]:
                return block
        return None

    def _arrived(self, number: int, piece: int) -> bytes | None:
        """Return a piece that arrives now; None if another process brings it, and it is in the folder."""
        key = number << 32 | piece
        with self._lock:
            future = self._arriving.get(key)
            mine = future is None
            if future is None:
                future = self._arriving[key] = Future()
        if mine:
            self._fetch(number, piece, 1, folders.PATIENCE_S)
        return future.result()

    def _fetch(self, number: int, first: int, count: int, wait_s: float = 0.0) -> None:
        """Fetch pieces, whose futures this thread has made; a future gets bytes, None, or an error.

        wait_s: seconds to wait for another process that brings a piece; 0 if nobody needs it yet.
        """
        arrived, failed = list[bytes | None]([None] * count), None
        try:
            arrived = self._stored(number, first, count, wait_s)
        except Exception as error:
            failed = error
        finally:  # also of an interrupt: who waits for these pieces then fetches them
            for piece, content in zip(range(first, first + count), arrived, strict=True):
                future = self._arriving.pop(number << 32 | piece)
                if failed is None:
                    future.set_result(content)
                else:
                    future.set_exception(failed)

    def _stored(self, number: int, first: int, count: int, wait_s: float) -> list[bytes | None]:
        """Fetch and store pieces that no other process brings, and that there is room for: from the first one on."""
        with ExitStack() as stack:
            handles = list[int]()
            for piece in range(first, first + count):
                begin, stop = self._span(number, piece)
                how = {"wait_s": 0.0 if handles else wait_s}
                try:
                    handle = stack.enter_context(self.store.arriving(self._path(number, piece), stop - begin, **how))
                except BusyFolderError as error:
                    if not handles and wait_s:
                        logger.info("%s. It is fetched, and not kept", error)
                        return [self._requested(number, first, 1)]
                    break
                if handle is None:
                    break
                handles.append(handle)
            if handles:
                content = self._requested(number, first, len(handles))
                parts = [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)]
                for handle, part in zip(handles, parts, strict=True):
                    os.pwrite(handle, part, 0)
                return [*parts, *[None] * (count - len(parts))]
        return [None] * count

    def _requested(self, number: int, first: int, count: int) -> bytes:
        """Return pieces from the URL, each block compared; a damaged answer is asked for once more."""
        name, begin = self._names[number], first * PIECE_BYTES
        end = min((first + count) * PIECE_BYTES, self._sizes[number])
        found = list[str]()
        for _ in range(2):
            if found:
                logger.info("%s: %s; again", self._bucket.at(name), found[0])
            try:
                content = self._bucket.part(name, begin, end)
            except FileNotFoundError:
                found.append("no such file")
                continue
            self._count(len(content))
            if len(content) != end - begin:
                found.append(f"{len(content):,} bytes arrived of bytes {begin} to {end}")
                continue
            blocks = [memoryview(content)[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
            wrong = self._wrong_block(number, begin // BLOCK_BYTES, blocks)
            if wrong is None:
                return content
            at, came = wrong * BLOCK_BYTES, crc32(blocks[wrong - begin // BLOCK_BYTES])
            found.append(f"block {wrong}, bytes {at} to {min(at + BLOCK_BYTES, end)}, has the CRC-32 {came:08x}")
        self.refuse(name, "; then ".join(found), "the bytes that its index/crc32.bin describes")

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.fetched_bytes += num_bytes
            self.requests += 1

    # --- ahead --------------------------------------------------------------------------------------------------------

    def plan(
        self,
        owner: object,
        names: Sequence[str | None],
        files: NDArray[np.int64],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> Plan:
        """Fetch ahead what `owner` will read next, in this order, in place of its earlier plan.

        files, begins, ends: int64 [n]: bytes begins[i] to ends[i] - 1 of names[files[i]].
        """
        self._here()
        numbers = np.array([self._numbers.get(name or "", -1) for name in names], dtype=np.int64)[files] << 32
        plan = Plan(_pieces(numbers, begins, ends), owner, self.store.max_bytes // 4 // PIECE_BYTES)
        with self._wake:
            self._plans = {key: each for key, each in self._plans.items() if each.owner() is not None}
            self._plans[id(owner)] = plan
            while self._threads < JOBS and self._starts():
                pass
            self._wake.notify_all()
        return plan

    def check_room(self, files: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Raise NoRoomError E501 if `max_bytes` holds fewer pieces than one batch has.

        files: numbers that tell files apart. begins, ends: of the bytes in each. All int64 [n].
        """
        most = self.store.max_bytes // PIECE_BYTES
        if ((ends - 1) // PIECE_BYTES - begins // PIECE_BYTES + 1).sum() > most:
            pieces = len(np.unique(_pieces(files << 32, begins, ends)))
            if pieces > most:
                found = f"one batch needs {pieces:,} pieces of 1 MiB, and max_bytes={self.store.max_bytes:,}"
                raise NoRoomError(f"{self.shown}: {found} holds {most:,} in {self.store.path}. Raise max_bytes")

    def _look_ahead(self) -> None:
        """Let a thread look for what to fetch; threads that had nothing to do have ended."""
        with self._wake:
            if self._idle:
                self._wake.notify()
            elif self._threads < JOBS:
                self._starts()

    def _starts(self) -> bool:
        """Start a thread. Returns False if there are many, or none can be started, as when Python ends.

        What no thread fetches ahead a reader fetches by itself.
        """
        if self._threads and threading.active_count() >= _MOST_THREADS:
            return False
        with suppress(RuntimeError):
            threading.Thread(target=self._run_ahead, name="ahead", daemon=True).start()
            self._threads += 1
            return True
        return False

    def _run_ahead(self) -> None:
        """Fetch what the plans ask for, until there is nothing for a while. An error is left to who reads the piece."""
        while True:
            with self._wake:
                is_woken = True
                while (job := self._next()) is None:
                    if not is_woken:
                        self._threads -= 1
                        return
                    self._idle += 1
                    is_woken = self._wake.wait(_IDLE_S)
                    self._idle -= 1
            self._fetch(*job)

    def _next(self) -> tuple[int, int, int] | None:
        """Return the next run of pieces to fetch: file, first piece, how many; None if all plans are far enough."""
        plans = sorted((plan for plan in self._plans.values() if plan.owner() is not None), key=_ahead_bytes)
        if len(self._arriving) * PIECE_BYTES >= self.max_ahead:
            return None
        for plan in plans:  # a reader of several files, or of several caches, waits for the last one of them
            while plan.ahead_bytes < self.max_ahead // len(plans) and (key := plan.take()) is not None:
                if not self._claim(key):
                    continue
                last, room = key + 1, (self.max_ahead - plan.ahead_bytes) // PIECE_BYTES
                while last < key + min(plan.most(), room) and plan.is_soon(last) and self._claim(last):
                    last += 1
                number, first = key >> 32, key & 0xFFFFFFFF
                plan.note(
                    sum(
                        end - begin for begin, end in map(partial(self._span, number), range(first, first + last - key))
                    )
                )
                return number, first, last - key
        return None

    def _claim(self, key: int) -> bool:
        """Return whether a piece is neither there nor on its way; it is then this caller's."""
        number, piece = key >> 32, key & 0xFFFFFFFF
        with self._lock:
            if key in self._arriving or os.path.lexists(f"{self._pieces}{number:x}-{piece:x}"):
                return False
            self._arriving[key] = Future()
            return True


_FORKED = threading.Lock()
os.register_at_fork(after_in_child=_FORKED._at_fork_reinit)  # type: ignore[attr-defined]


def _ahead_bytes(plan: Plan) -> int:
    return plan.ahead_bytes


# --- opening ----------------------------------------------------------------------------------------------------------


def mounted(
    url: str,
    *,
    local: str | os.PathLike[str] | None,
    max_bytes: int | str | None = None,
    max_ahead: int | str | None = None,
) -> Path:
    """Return the folder that stands for a cache, or for a split of it, at a URL. docs/buckets.md describes the folder.

    local: a folder on this machine for what was fetched; runs, ranks and workers may share it.
    max_bytes: most bytes in it, such as "50 GiB"; None: 10 GiB. max_ahead: bytes that each process fetches ahead of its
        reading, at most a quarter of max_bytes; None: 256 MiB. Of a cache that this process has open, None changes
        neither.
    Raises: UsageError without `local`, or for a size that cannot be; ValueError for a URL; CacheNotFound without a
        meta.json there; CacheError for one that readers refuse, E612 if the bucket cannot be used; ImportError.
    """
    scheme_of(url)
    if not local or is_url(os.fspath(local)):  # "" would be the working folder
        needs = "a URL needs local=DIR, a folder here for what is fetched, and max_bytes"
        raise UsageError(f"{printable(url)}, local={local!r}: {needs}")
    most, ahead = byte_count("max_bytes", max_bytes, MAX_BYTES), byte_count("max_ahead", max_ahead, MAX_AHEAD)
    if most < _LEAST_BYTES:
        raise UsageError(
            f"max_bytes={max_bytes!r}: expected at least {_LEAST_BYTES >> 20} MiB, for the pieces of a batch"
        )
    folder = Path(os.path.realpath(os.path.expanduser(local)))
    cache, split, raw, bucket = _read_meta(url.rstrip("/"))
    mount = _mount_of(cache, raw, folder)
    if mount is None:
        return Mount(cache, folder, most, ahead, raw, bucket).folder / split
    most = mount.max_bytes if max_bytes is None else most
    ahead = mount.max_ahead if max_ahead is None else ahead
    mount.store.max_bytes, mount.max_ahead = most, min(ahead, most // 4)
    mount.make_folders()
    mount.store.trim()
    return mount.folder / split


def meta_at(url: str, split: str | None = None) -> tuple[str, dict[str, Any], str]:
    """Return the URL of a cache, its meta.json and the name of a split, by the URL of the cache or of a split of it.

    If the cache is mounted, it is the meta.json of then. split: None: what the URL says, else train.
    Raises: ValueError for a URL, and for a split that contradicts it; the errors of `mounted`.
    """
    scheme_of(url)
    url = url.rstrip("/")
    above, _, name = url.rpartition("/")
    known = {mount.url: mount.raw for mount in list(MOUNTED.values()) if isinstance(mount, Mount)}
    if name in SPLITS and above in known:
        cache, named, raw = above, name, known[above]
    else:
        cache, named, raw = (url, "", known[url]) if url in known else _read_meta(url)[:3]
    if split is not None and (split not in SPLITS or named not in ("", split)):
        raise ValueError(f"split={split!r} of {printable(url)}: expected {named or ' or '.join(SPLITS)}")
    return cache, parsed_meta(raw, f"{printable(cache)}/{META_NAME}"), split or named or SPLITS[0]


def _read_meta(url: str) -> tuple[str, str, bytes, Bucket]:
    """Return the URL of a cache, the split that `url` names or "", the bytes of its meta.json, and its folder."""
    above, _, name = url.rpartition("/")
    for cache, split in [(above, name), (url, "")] if name in SPLITS else [(url, "")]:
        bucket = Bucket(cache)
        raw = bucket.read(META_NAME, MAX_JSON_BYTES)
        if raw is not None:
            return cache, split, raw, bucket
    raise CacheNotFound(f"{printable(url)}: no {META_NAME}, so no cache was pushed there, or its push has not ended")


def byte_count(name: str, value: int | str | None, default: int) -> int:
    """Return a number of bytes: an integer, or a text such as "50 GiB". Raises: UsageError."""
    if value is None:
        return default
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is not None:
        return int(float(found[1]) * _UNITS[found[2].lower()])
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise UsageError(f'{name}={value!r}: expected a number of bytes, or a text such as "50 GiB"')


_UNITS = {"b": 1, "": 1} | {
    f"{letter}{end}": base**power for power, letter in enumerate("kmgt", 1) for end, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"(?i)(\d{1,15}(?:\.\d{1,6})?) ?((?:[kmgt]i?)?b|)")


def _again(url: str, local: Path, max_bytes: int, max_ahead: int, raw: bytes) -> Mount:
    """Return the mount of this process, for a copy. Reads no meta.json."""
    mount = _mount_of(url, raw, local)
    if mount is None:
        return Mount(url, local, max_bytes, max_ahead, raw)
    mount.make_folders()
    return mount


def _mount_of(url: str, raw: bytes, local: Path) -> Mount | None:
    """Return the mount that this process has."""
    mounts = [mount for mount in list(MOUNTED.values()) if isinstance(mount, Mount)]
    return next((each for each in mounts if (each.url, each.raw, each.store.path) == (url, raw, local)), None)


def _pieces(numbers: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the keys of the pieces of these bytes. numbers: of the files, shifted as in a key; all int64 [n]."""
    firsts = begins // PIECE_BYTES
    counts = (ends - 1) // PIECE_BYTES - firsts + 1
    stops = counts.cumsum()
    each = np.arange(stops[-1] if len(stops) else 0) - (stops - counts).repeat(counts)
    keys: NDArray[np.int64] = (numbers + firsts).repeat(counts) + each
    return keys


def parsed_meta(raw: bytes, where: str) -> dict[str, Any]:
    """Return a meta.json from a URL. Raises: CacheError E202 for damage; else as `checked_meta`."""
    try:
        meta = parse_object(raw)
    except ValueError as error:
        raise CacheError(where, str(error), "a cache's meta.json", code="E202") from error
    stored, computed = meta_crc32(raw)
    if stored != computed:
        raise CacheError(where, f"damaged: its bytes have the CRC-32 {computed:08x}", "its meta_crc32", code="E202")
    checked_meta(meta, where)
    if meta.get("built") is False:
        raise CacheError(where, "built is false, so there is nothing to read", code="E207")
    return meta


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        about = os.lstat(path)
    except OSError:
        return None
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _has_sha256(path: Path, size: int, sha256: str) -> bool:
    try:
        with open(open_for_reading(path), "rb") as file:
            return os.fstat(file.fileno()).st_size == size and hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except (CacheError, OSError):
        return False
