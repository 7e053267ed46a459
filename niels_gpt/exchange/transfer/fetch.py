"""Pull and stage: a URL or a path -> a committed cache, whose every file was compared with its sha256."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from niels_gpt.display.numbers import many, size_text
from niels_gpt.exchange.transfer import parts
from niels_gpt.exchange.transfer.arrival import RUN_AGAIN, Arrival, keep, push_again
from niels_gpt.exchange.transfer.described import MARK_NAME, Described, described
from niels_gpt.exchange.transfer.jobs import Stopped, Tally, at_once
from niels_gpt.exchange.transfer.remote import Bucket, path_of, scheme_of
from niels_gpt.kinds.verify import find_damage
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, write_bytes
from niels_gpt.storage.locks import hold_version
from niels_gpt.storage.meta_json import MAX_JSON_BYTES, file_records, path_inside, resolved, sha256_regular
from niels_gpt.storage.versions import JOURNAL_NAME, VERSION_DIGITS
from niels_gpt.work import Progress


@dataclass(frozen=True)
class Fetched:
    """What a pull or a stage did."""

    path: Path
    """Where readers open the cache."""
    version: Path
    """The folder of its version."""
    files: int
    """Of the cache, meta.json included."""
    num_bytes: int
    """Of these files."""
    fetched_bytes: int
    kept_bytes: int
    """That were there already."""

    def __str__(self) -> str:
        """Return the folder, files and bytes."""
        kept = f", {size_text(self.kept_bytes)} were there already" if self.kept_bytes else ""
        return f"{self.path}: {many(self.files, 'file')}, {size_text(self.num_bytes)}{kept}"


def pull(url: str, dest: Path, *, jobs: int = 8, wait: bool = False, progress: Progress | None = None) -> Fetched:
    """Fetch a cache and commit it, as a build does: readers see the cache before or this one, never a mixture.

    url: a path or URL without credentials: the folder that holds a cache. dest: where readers will open it, such as
    cache/pretrain/wiki. A pull that was stopped is resumed; the same content is not fetched again.
    jobs: files at once. wait: for another process that writes `dest`, instead of refusing.
    progress: called with files, bytes done, and bytes in all, by one thread at a time.
    Raises: ValueError for the URL; CacheError E612 without a cache, E611 for a damaged one, E610 where it was replaced
        meanwhile, E503 where another process writes `dest`, E704 where that lies in .versions; OSError, E501 without
        room.
    """
    versions.refuse_among_versions(dest)
    bucket = Bucket(url)
    return arrived(bucket, remote_cache(bucket), dest, jobs=jobs, wait=wait, progress=progress)


def stage(
    source: str,
    dest: Path,
    *,
    split: str | None = None,
    max_bytes: int | None = None,
    jobs: int = 8,
    progress: Progress | None = None,
) -> Fetched:
    """Copy a cache to a disk nearby, or whole shards of it. Files are copied, and compared with their sha256.

    source: the public folder of a cache, or a URL. dest: where readers will open the copy.
    split: only train, or only val. max_bytes: of token files; shards of train from the first on, then those of val, as
    many as fit. Either makes a cache of a part, of a pretrain cache alone: `staged` in its meta.json says of which.
    The rest: as `pull`.
    Raises: as `pull`; ValueError where no shard fits, and for a part of another kind of cache.
    """
    versions.refuse_among_versions(dest)
    is_local = scheme_of(source) == "file"
    folder = resolved(path_of(source)) if is_local else None
    hold = None if folder is None else hold_version(folder)  # until the end gc leaves the version
    bucket = Bucket(source if folder is None else os.fspath(folder))
    remote = remote_cache(bucket)
    if split is None and max_bytes is None:
        fetched = arrived(bucket, remote, dest, jobs=jobs, progress=progress)
    else:
        chosen = parts.chosen_shards(remote, split, max_bytes)
        version, meta, moved, kept = parts.stage_part(bucket, remote, dest, chosen, jobs=jobs, progress=progress)
        files = file_records(meta)
        fetched = Fetched(dest, version, len(files) + 1, sum(int(each["bytes"]) for each in files), moved, kept)
    del hold
    return fetched


def remote_cache(bucket: Bucket) -> Described:
    """Read and check the meta.json at a URL, once more where it arrives damaged.

    Raises: CacheError E612 where there is none, E611 where it arrives damaged in two ways; others as `described`.
    """
    raw = _read_meta(bucket)
    try:
        return described(raw, bucket.at(META_NAME))
    except CacheError:
        if (again := _read_meta(bucket)) == raw:
            raise
    try:
        return described(again, bucket.at(META_NAME))
    except CacheError as error:
        sums = [hashlib.sha256(each).hexdigest()[:12] for each in (raw, again)]
        found = f"arrived with the sha256 {sums[0]}, then {sums[1]}; of the second one: {error.problem}"
        raise CacheError(bucket.at(META_NAME), found, remedy=RUN_AGAIN, code="E611") from error


def _read_meta(bucket: Bucket) -> bytes:
    raw = bucket.read(META_NAME, MAX_JSON_BYTES)
    if raw is None:
        found, remedy = f"no cache is there: it has no {META_NAME}", ""
        if bucket.size(MARK_NAME) is not None:
            found = "a cache is being pushed there, or a push was killed"
            remedy = "Wait for it, or push the cache again: that resumes"
        raise CacheError(bucket.shown, found, remedy=remedy, code="E612")
    return raw


def arrived(
    bucket: Bucket,
    remote: Described,
    dest: Path,
    *,
    jobs: int,
    wait: bool = False,
    progress: Progress | None = None,
) -> Fetched:
    """Fetch the files of `remote` and commit them at `dest`."""
    tally, bucket.least_share = Tally(remote.num_bytes, progress), remote.kind.least_share
    key = hashlib.sha256(b"pull " + remote.raw).hexdigest()
    with versions.resumable(dest, key, wait=wait) as (work, notes):
        version = versions.versions_dir(dest) / remote.content_sha256[:VERSION_DIGITS]
        if _is_there(version, remote, jobs):
            versions.publish(version, dest)
            return Fetched(dest, version, *remote.whole, 0, remote.num_bytes)
        keep(notes, {"pull": remote.content_sha256})
        fileio.make_dir(work)
        Arrival(bucket, remote, work, tally).fetch(remote.records.values(), jobs)
        write_bytes(work / META_NAME, remote.raw)
        if damages := find_damage(work, deep=False):
            fileio.remove(notes / JOURNAL_NAME)  # so that the folder is removed: the next run would find the same
            first = damages[0]
            raise CacheError(bucket.at(first.file), first.problem, remedy=push_again(bucket.shown), code="E611")
        version = versions.commit(work, dest, remote.content_sha256)
    return Fetched(dest, version, *remote.whole, tally.moved, tally.kept)


def _is_there(version: Path, remote: Described, jobs: int) -> bool:
    """Whether a version of this content is there, whole: every file is read and compared."""
    if not (version / META_NAME).is_file():
        return False
    tally, share = Tally(0, None), remote.kind.least_share

    def compare(record: dict[str, object]) -> None:
        tally.add()
        path = path_inside(version, str(record["name"]))
        if path.lstat().st_size != record["bytes"] or sha256_regular(path, least_share=share) != record["sha256"]:
            raise Stopped

    try:
        at_once(compare, remote.records.values(), jobs, tally)
    except (Stopped, CacheError, OSError):
        return False
    return True
