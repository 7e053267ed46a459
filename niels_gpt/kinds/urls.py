"""Look at caches at URLs: a folder stands for one while it is looked at; find caches below a URL, and verify one.

Decides how much of a cache a quick look compares: small files whole, and a sample of the blocks of all others.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.buckets.bucket import NOTE_NAME, RANGE_BYTES, Bucket, Stopped, scheme_of
from niels_gpt.cache.formats import BLOCK_BYTES, crc32, num_blocks
from niels_gpt.cache.mounts import PIECE_BYTES, Mount, mounted, parsed_meta
from niels_gpt.display.numbers import many, number_of, size_text
from niels_gpt.kinds.files import Damage, FileChecks, Record
from niels_gpt.kinds.folders import MAX_DEPTH, refuse_unless_cache
from niels_gpt.kinds.kind import Cache, Finding, Limits, MetaDamage, kind_named
from niels_gpt.kinds.verify import guarded, reader_error, sum_damages
from niels_gpt.storage.errors import CacheError, CacheNotFound, NotFound
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import MAX_JSON_BYTES, file_records, printable
from niels_gpt.storage.mounted import MOUNTED, is_url
from niels_gpt.storage.remedies import push_again, push_command
from niels_gpt.work import Progress

logger = logging.getLogger(__name__)

SAMPLED = 64
"""Blocks of large files that a quick look compares, beside the ends of each file where files are few."""
_JOBS = 8  # requests at once
_MOST_WHOLE = 1 << 26  # bytes of small files that a quick look reads whole
_MOST_META_BYTES = 1 << 28  # of all caches that one list shows
_SHOW_CACHES = (META_NAME, NOTE_NAME, "index/crc32.bin")  # files that only a cache has, or a half of one
_OF_THE_HUB = frozenset({"README.md", ".gitattributes"})
_NO_DAMAGE = frozenset({"E209", "E501", "E502", "E504", "E610", "E612"})
"""Codes of a wrong argument, of this machine, and of a bucket that does not answer."""


@contextmanager
def at_hand(cache: str | os.PathLike[str], local: Path | None = None) -> Iterator[Path]:
    """Yield the folder of a cache; for a URL a folder that stands for it while the block runs, and then is removed.

    Only what is read is fetched. local: a folder in which it is kept. Logs how much was fetched.
    Raises: NotFound without a meta.json there; the other errors of `niels_gpt.cache.mounts.mounted`.
    """
    text = os.fspath(cache)
    if not is_url(text):
        yield Path(cache)
        return
    with ExitStack() as stack:
        folder = local or stack.enter_context(_temporary_folder())
        before, place = {*MOUNTED}, os.path.realpath(os.path.expanduser(folder))
        try:
            try:
                path = mounted_whole(text, local=folder)
            except CacheNotFound as error:  # a wrong argument, not damage
                raise NotFound(str(error)) from error
            yield path
        finally:
            for name, mount in list(MOUNTED.items()):
                if name not in before and isinstance(mount, Mount) and str(mount.store.path) == place:
                    del MOUNTED[name]
                    size = sum(int(record["bytes"]) for record in mount.records.values())
                    logger.info("%s: fetched %s of %s", mount.shown, *map(size_text, (mount.fetched_bytes, size)))


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """Yield a folder that is removed afterwards, also if a signal comes meanwhile; a second one ends the process."""
    folder = TemporaryDirectory(prefix="niels_gpt-", ignore_cleanup_errors=True)
    try:
        yield folder.name
    finally:
        try:
            folder.cleanup()
        except KeyboardInterrupt:
            folder.cleanup()
            raise


def mounted_whole(url: str, **how: Any) -> Path:
    """Return `mounted`, after the files have arrived that a look at the cache opens whole: of a tokenizer, all."""
    folder = mounted(url, **how)
    mount = MOUNTED.get(str(folder))
    if isinstance(mount, Mount):  # and no split of one
        kind = kind_named(mount.meta.get("kind"))
        for name in filter(kind.is_opened_whole, mount.records) if kind is not None else ():
            mount.arrive(name)
    return folder


# --- caches below a URL -----------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A cache below a URL."""

    meta: dict[str, Any] | None
    """Its meta.json; None if there is none, or readers refuse it."""
    error: CacheError | None
    """Why readers refuse the cache; None if meta.json is good and all files are there with their sizes."""
    is_half: bool = False
    """Whether it has the note of a push in place of a meta.json."""


def caches_at(url: str) -> dict[str, Found]:
    """Return the caches below a URL by their names in it; "" for a cache at the URL itself, which holds no others.

    Reads a listing, at most 64 MiB of s3:// and gs://, and each meta.json.
    Raises: ValueError for the URL; NotFound if there is none; CacheError E612.
    """
    bucket = Bucket(url)
    sizes = bucket.sizes()
    keys: dict[str, None] = {}
    for name in sorted(sizes, key=lambda name: (name.count("/"), name)):
        key = _key_of(name)
        if key is not None and not any(key == each or key.startswith(f"{each}/") for each in keys if each):
            keys[key] = None
            if not key:
                break
    if not keys:
        raise NotFound(f"{bucket.shown}: no cache below it. Name a folder to which caches were pushed")
    total = sum(sizes.get(f"{key}/{META_NAME}", 0) for key in keys)
    if total > _MOST_META_BYTES:
        found, remedy = f"{len(keys):,} caches with {size_text(total)} of {META_NAME}", "Name a folder in it"
        raise CacheError(bucket.shown, found, f"at most {size_text(_MOST_META_BYTES)}", remedy, code="E206")
    with _requests(bucket) as executor:
        return dict(zip(keys, executor.map(partial(_found, bucket, sizes), keys), strict=True))


@contextmanager
def _requests(bucket: Bucket) -> Iterator[ThreadPoolExecutor]:
    """Yield threads for requests, which are given up when the block ends."""
    stop = threading.Event()

    def pause(seconds: float) -> None:
        if stop.wait(seconds):
            raise Stopped

    bucket.patience.pause = pause
    with ThreadPoolExecutor(_JOBS, thread_name_prefix="requests") as executor:
        try:
            yield executor
        finally:
            stop.set()
            executor.shutdown(wait=False, cancel_futures=True)


def _key_of(name: str) -> str | None:
    """Return the name of the cache that a file shows; None for other files, and in a hidden or deep folder."""
    end = next((each for each in _SHOW_CACHES if f"/{name}".endswith(f"/{each}")), None)
    parts = [] if end is None else name.removesuffix(end).split("/")[:-1]
    if end is None or len(parts) > MAX_DEPTH or any(part.startswith(".") for part in parts):
        return None
    return "/".join(parts)


def _found(bucket: Bucket, sizes: dict[str, int], key: str) -> Found:
    start = f"{key}/" if key else ""
    raw = bucket.read(start + META_NAME, MAX_JSON_BYTES) if start + META_NAME in sizes else None
    if raw is None:
        is_half = start + NOTE_NAME in sizes
        found = "a push has not ended" if is_half else "no such file, beside files of a cache"
        again = f"Push it again, which resumes: {push_command(bucket.at(key))}"
        remedy = again if is_half else "Push it to another URL"
        return Found(None, CacheError(bucket.at(start + META_NAME), found, remedy=remedy, code="E204"), is_half)
    try:
        meta = parsed_meta(raw, bucket.at(start + META_NAME))
    except CacheError as error:
        return Found(None, error)
    for record in file_records(meta):
        if (size := sizes.get(start + record["name"])) != record["bytes"]:
            found = "no such file" if size is None else f"{size} bytes"
            where, expected = bucket.at(start + record["name"]), f"{record['bytes']} bytes by its {META_NAME}"
            return Found(meta, CacheError(where, found, expected, push_again(bucket.at(key)), code="E611"))
    return Found(meta, None)


# --- verify -----------------------------------------------------------------------------------------------------------


class Verified(NamedTuple):
    """What was found out about a cache at a URL."""

    damages: list[Damage]
    compared: dict[str, int]
    """files_whole of files; blocks_compared of blocks, of the other files; files_by_size: without checksums."""
    is_mended_by_push: bool = True
    """Whether `push_command` repairs some of it: it removes no file."""

    def __str__(self) -> str:
        """Return how much was compared, as a sentence."""
        it = self.compared
        if not it:
            return "no other file was looked at"
        parts = [f"compared: {it['files_whole']:,} of {many(it['files'], 'file')} whole"]
        if it["blocks"]:
            parts.append(f"{it['blocks_compared']:,} of {number_of(it['blocks'], 'block')} of the others")
        if it["files_by_size"]:
            parts.append(f"{it['files_by_size']:,} only by size")
        return ", ".join(parts)


def find_damage_at(url: str, listed: Found | None = None, *, deep: bool, progress: Progress | None = None) -> Verified:
    """Return the damage of the cache at a URL. Keeps no token on the disk.

    listed: of `caches_at`, of a cache that may lack its meta.json.
    Compares meta.json, the sizes of all files and which others are there; indexes and files of up to 1 MiB whole, and
    of all others a sample of blocks. Then the readers open it. deep: reads every file once, and compares its sha256
    and the CRC-32 of each block; of tokens also ids and sentinels, but no counts of tokens with loss.
    progress: called with files, bytes read, and bytes to read in all.
    Raises: ValueError for the URL; NotFound without a meta.json; CacheError E208 for a cache that can only be pulled,
        E610 if it was replaced meanwhile, E612; E501 without room.
    """
    files: RemoteChecks | None = None
    if listed is not None and listed.error is not None and listed.error.code == "E204":
        return Verified([Damage(META_NAME, 0, 0, listed.error.problem)], {}, listed.is_half)
    try:
        with at_hand(url) as folder:
            refuse_unless_cache(folder)
            mount = MOUNTED[str(folder)]
            assert isinstance(mount, Mount)
            cache = Cache.trusted(folder)
            files = RemoteChecks(mount, cache, progress)
            damages = [_damage(finding, mount.shown) for finding in guarded(_findings(cache, files, deep))]
            if files.failure is not None:
                raise files.failure
            if damages and Bucket(url).read(META_NAME, MAX_JSON_BYTES) != mount.raw:
                found = "the cache was replaced while it was verified"
                raise CacheError(mount.shown, found, remedy="Verify it again", code="E610")
            named = {META_NAME, *mount.records}
            return Verified([*dict.fromkeys(damages)], files.compared, any(each.file in named for each in damages))
    except MetaDamage as error:
        return Verified([error.damage], {})
    except CacheError as error:
        if error.code in _NO_DAMAGE or error.code == "E208":  # of an earlier build: it can be pulled
            raise
        return Verified([_damage(error, printable(url.rstrip("/")))], {} if files is None else files.compared)


def _findings(cache: Cache, files: RemoteChecks, deep: bool) -> Iterator[Finding]:
    found = False
    for finding in chain(
        sum_damages(cache, files),
        files.unnamed_damages(),
        files.size_damages(),
        cache.kind.contents(files) if deep else files.sampled_damages(),
    ):
        found = True
        yield finding
    if found:  # a reader would name the same
        return
    error = reader_error(cache)
    if error is not None:
        yield error
        return
    yield from cache.kind.last_look(files, Limits())


def _damage(finding: Finding, url: str) -> Damage:
    """Return an error as damage of the file at the URL that it names, else of meta.json."""
    if isinstance(finding, Damage):
        return finding
    if isinstance(finding, CacheError):
        if finding.code in _NO_DAMAGE:
            raise finding
        if finding.path.startswith(f"{url}/"):
            return Damage(finding.path.removeprefix(f"{url}/"), 0, 0, finding.problem)
    return Damage(META_NAME, 0, 0, str(finding))


class RemoteChecks(FileChecks):
    """The files that the meta.json of a cache at a URL names."""

    def __init__(self, mount: Mount, cache: Cache, progress: Progress | None = None) -> None:
        """mount: of the cache."""
        super().__init__(cache.folder, cache.meta, cache.kind.content_sha256, progress)
        self._mount, self._bucket = mount, Bucket(mount.url)
        self._sizes = self._bucket.sizes()
        indexes = {record["name"] for record in self.meta.get("index", {}).values()}
        self._kept = indexes | set(filter(cache.kind.is_opened_whole, self._sizes))
        self.failure: CacheError | None = None
        """Why the bucket does not answer, which is no damage."""
        self.compared = {"files": len(self.records), "files_whole": 0, "files_by_size": 0}
        self.compared |= {"blocks": 0, "blocks_compared": 0}

    def size_damage(self, record: Record) -> Damage | None:
        """Compare the size of one file in the listing with its record."""
        name, size = record["name"], record["bytes"]
        actual = self._sizes.get(name)
        if actual is None:
            return Damage(name, 0, size, f"no such file, expected {size} bytes by its {META_NAME}")
        if actual != size:
            expected = f"{actual} bytes, expected {size} by its {META_NAME}"
            return Damage(name, min(actual, size), max(actual, size), expected)
        return None

    def unnamed_damages(self) -> Iterator[Damage]:
        """Yield files that meta.json does not name."""
        known = {META_NAME, NOTE_NAME, *(record["name"] for record in self.records)}
        known |= _OF_THE_HUB if scheme_of(self._mount.url) == "hf" else set()
        for name, size in self._sizes.items():
            if name not in known and not name.endswith("/"):  # tools make objects for folders
                yield Damage(printable(name), 0, size, f"a file that the cache's {META_NAME} does not name")

    def read(self, record: Record, scans: Any = ()) -> list[Damage]:
        """Compare the sha256 of a file, and feed its bytes to the scans. One that differs is read once more."""
        self.compared["files_whole"] += 1
        damages = super().read(record, scans)
        if damages and self.failure is None and record["name"] in self.readable:
            again = super().read(record)
            said = "in a second attempt too" if again else "but not in a second attempt: the connection is at fault"
            return [each._replace(problem=f"{each.problem}, {said}") for each in again or damages]
        return damages

    def pieces(self, record: Record) -> Iterator[memoryview]:
        """Yield the bytes of a file; several ranges are on their way at once."""
        try:
            if record["name"] in self._kept:
                try:
                    self._mount.arrive(record["name"])
                except CacheError as error:
                    if error.code != "E611":
                        raise
                else:
                    yield from super().pieces(record)
                    return
            yield from self._ranges(record["name"], record["bytes"])
        except CacheError as error:
            self.failure = error if error.code in _NO_DAMAGE else self.failure
            raise

    def _ranges(self, name: str, size: int) -> Iterator[memoryview]:
        starts, asked = iter(range(0, size, RANGE_BYTES)), deque[Future[bytes]]()
        with _requests(self._bucket) as executor:

            def ask(start: int) -> Future[bytes]:
                return executor.submit(self._bucket.part, name, start, min(start + RANGE_BYTES, size))

            asked.extend(map(ask, islice(starts, _JOBS)))
            while asked:
                content = asked.popleft().result()
                self._mount.fetched_bytes += len(content)
                asked.extend(map(ask, islice(starts, 1)))
                yield memoryview(content)

    # --- a sample -----------------------------------------------------------------------------------------------------

    def sampled_damages(self) -> Iterator[Damage]:
        """Compare what is small, and what readers open whole, whole; and a sample of the blocks of all other files."""
        small = {record["name"] for record in self.readable.values() if record["bytes"] <= PIECE_BYTES}
        if sum(self._sizes[name] for name in small) > _MOST_WHOLE:
            small -= self._stored.keys()
        whole = [record for record in self.readable.values() if record["name"] in self._kept | small]
        large = [record for record in self.readable.values() if record["name"] not in self._kept | small]
        summed = [record for record in large if record["name"] in self._stored and record["bytes"]]
        self.compared["files_by_size"] = len(large) - len(summed)
        self.compared["blocks"] = sum(num_blocks(record["bytes"]) for record in summed)
        chosen = _sample([num_blocks(record["bytes"]) for record in summed])
        self._total_bytes = sum(record["bytes"] for record in whole) + BLOCK_BYTES * len(chosen)
        for record in whole:
            yield from self.read(record)
        with _requests(self._bucket) as executor:
            wanted = [(summed[file], block) for file, block in chosen]
            for (record, block), right in zip(wanted, executor.map(self._is_right, wanted), strict=True):
                self.compared["blocks_compared"] += 1
                self._bytes_read += BLOCK_BYTES
                self._mount.fetched_bytes += BLOCK_BYTES
                if self._progress is not None:
                    self._progress(self._files_read, self._bytes_read, self._total_bytes)
                if not right:
                    begin = block * BLOCK_BYTES
                    end = min(begin + BLOCK_BYTES, record["bytes"])
                    problem = f"block {block}, bytes {begin} to {end}, does not match its checksum, twice"
                    yield Damage(record["name"], begin, end, problem)

    def _is_right(self, wanted: tuple[Record, int]) -> bool:
        """Compare a block with its checksum; one that differs is asked for once more."""
        record, block = wanted
        begin = block * BLOCK_BYTES
        end, crc = min(begin + BLOCK_BYTES, record["bytes"]), int(self._stored[record["name"]][1][block])
        with suppress(FileNotFoundError):  # it was listed, and went
            return any(
                len(content := self._bucket.part(record["name"], begin, end)) == end - begin and crc32(content) == crc
                for _ in range(2)
            )
        return False


def _sample(counts: list[int]) -> list[tuple[int, int]]:
    """Return file and block of a sample, ascending; the same for equal counts of blocks. counts: of each file."""
    ends = np.cumsum([0, *counts])
    total = int(ends[-1])
    places = {round(place) for place in np.linspace(0, total - 1, min(SAMPLED, total)).tolist()} if total else set()
    if 2 * len(counts) <= SAMPLED:
        places |= {*ends[:-1].tolist(), *(ends[1:] - 1).tolist()}
    numbers = np.array(sorted(places), dtype=np.int64)
    files = np.searchsorted(ends, numbers, side="right") - 1
    return list(zip(files.tolist(), (numbers - ends[files]).tolist(), strict=True))
