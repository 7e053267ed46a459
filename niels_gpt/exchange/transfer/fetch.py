"""Pull and stage: fetch a cache from a URL or path and commit it. Every file is compared with its sha256.

A fetch that was stopped leaves its files; the next one reads them again, and fetches only the missing bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.buckets.bucket import NOTE_NAME, RANGE_BYTES, Bucket, Stopped, path_of, scheme_of
from niels_gpt.cache.documents import id_lines
from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import find_meta
from niels_gpt.cache.mmap import load_idx
from niels_gpt.display.numbers import many, size_text
from niels_gpt.engine.journal import Checkpoint, Journal
from niels_gpt.engine.meta import Source
from niels_gpt.exchange.assembling import About, assemble
from niels_gpt.exchange.foreign import ForeignFile, read_pieces
from niels_gpt.exchange.output import Modes, continues_at, ends_in
from niels_gpt.exchange.transfer.described import Described, described
from niels_gpt.exchange.transfer.jobs import Tally, at_once
from niels_gpt.kinds.kind import kinds
from niels_gpt.kinds.verify import find_damage
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.errors import CacheError, NoRoomError
from niels_gpt.storage.fileio import META_NAME, OutputFile, id_of_line, write_bytes
from niels_gpt.storage.locks import hold_version
from niels_gpt.storage.meta_json import (
    MAX_JSON_BYTES,
    file_records,
    open_regular,
    path_inside,
    resolved,
    sha256_regular,
)
from niels_gpt.storage.versions import JOURNAL_NAME, VERSION_DIGITS
from niels_gpt.tokenizers.document_tokens import DocumentToken, end_of_documents
from niels_gpt.tokenizers.protocol import TOKEN_DTYPES
from niels_gpt.work import Progress

logger = logging.getLogger(__name__)

Chosen = dict[str, list[dict[str, Any]]]
"""Records of the shards to stage, by split."""
_FREE_BYTES = 1 << 24  # for meta.json and the file system
_VOCABULARY = ("tokenizer_sha256", "vocab_size", "token_dtype", "special_token_ids")
_AS_WHOLE = ("seed", "split_rule", "roundtrip", "lossless", "document_start")


@dataclass(frozen=True)
class Fetched:
    """Result of a pull or a stage."""

    path: Path
    """Public folder: readers open the cache here."""
    version: Path
    """Folder of its version."""
    files: int
    """Files of the cache, meta.json included."""
    num_bytes: int
    """Bytes of these files."""
    fetched_bytes: int
    kept_bytes: int
    """Bytes that were there already."""

    def __str__(self) -> str:
        """Return the folder, files and bytes."""
        kept = f", {size_text(self.kept_bytes)} were there already" if self.kept_bytes else ""
        return f"{self.path}: {many(self.files, 'file')}, {size_text(self.num_bytes)}{kept}"


def pull(url: str, dest: Path, *, jobs: int = 8, wait: bool = False, progress: Progress | None = None) -> Fetched:
    """Fetch a cache and commit it like a build: readers see the earlier cache or this one, never a mixture.

    A pull that was stopped resumes. Content that is there already is not fetched again.
    url: path or URL of the folder that holds the cache, without credentials. dest: public folder, such as
        cache/pretrain/wiki. jobs: files at once. wait: for another process that writes `dest`, instead of refusing.
    progress: called with files, bytes done, and bytes in all, by one thread at a time.
    Raises: ValueError for the URL; CacheError E612 if no cache is there, E611 for damage, E610 if the cache was
        replaced meanwhile, E503 if another process writes `dest`, E704 if `dest` lies in .versions; OSError, E501
        without room.
    """
    versions.refuse_among_versions(dest)
    bucket = Bucket(url)
    return _arrived(bucket, remote_cache(bucket), dest, jobs=jobs, wait=wait, progress=progress)


def stage(
    source: str,
    dest: Path,
    *,
    split: str | None = None,
    max_bytes: int | None = None,
    jobs: int = 8,
    progress: Progress | None = None,
) -> Fetched:
    """Copy a cache, or whole shards of it, to a disk nearby. Every file is compared with its sha256.

    With `split` or `max_bytes` the copy is a cache of a part, with `staged` in its meta.json; only for pretrain caches.
    source: public folder of a cache, or a URL. dest: public folder of the copy. split: train or val; None: both.
    max_bytes: most bytes of token files. Takes as many shards as fit, of train from the first on, then of val.
    jobs: files at once. progress: called with files, bytes done, and bytes in all, by one thread at a time.
    Raises: ValueError for the URL, for a part of another kind of cache, or if no shard fits; CacheError E612 if no
        cache is there, E611 for damage, E610 if the cache was replaced meanwhile, E503 if another process writes
        `dest`, E704 if `dest` lies in .versions; OSError, E501 without room.
    """
    versions.refuse_among_versions(dest)
    is_local = scheme_of(source) == "file"
    folder = resolved(path_of(source)) if is_local else None
    hold = None if folder is None else hold_version(folder)  # until the end gc leaves the version
    bucket = Bucket(source if folder is None else os.fspath(folder))
    remote = remote_cache(bucket)
    if split is None and max_bytes is None:
        fetched = _arrived(bucket, remote, dest, jobs=jobs, progress=progress)
    else:
        chosen = _chosen_shards(remote, split, max_bytes)
        version, meta, moved, kept = _stage_part(bucket, remote, dest, chosen, jobs=jobs, progress=progress)
        files = file_records(meta)
        fetched = Fetched(dest, version, len(files) + 1, sum(int(each["bytes"]) for each in files), moved, kept)
    del hold
    return fetched


def remote_cache(bucket: Bucket) -> Described:
    """Read and check the meta.json at a URL; reads it again if it arrives damaged.

    Raises: CacheError E612 if there is none, E611 if it arrives damaged in two ways, E202, E206, E207 or E208 if it is
        no usable meta.json.
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
        raise CacheError(bucket.at(META_NAME), found, remedy=_RUN_AGAIN, code="E611") from error


def _read_meta(bucket: Bucket) -> bytes:
    raw = bucket.read(META_NAME, MAX_JSON_BYTES)
    if raw is None:
        found, remedy = f"no cache is there: it has no {META_NAME}", ""
        if bucket.size(NOTE_NAME) is not None:
            found = "a cache is being pushed there, or a push was killed"
            remedy = "Wait for it, or push the cache again: that resumes"
        raise CacheError(bucket.shown, found, remedy=remedy, code="E612")
    return raw


def _arrived(
    bucket: Bucket,
    remote: Described,
    dest: Path,
    *,
    jobs: int,
    wait: bool = False,
    progress: Progress | None = None,
) -> Fetched:
    """Fetch all files of `remote` and commit them at `dest`."""
    tally, bucket.least_share = Tally(remote.num_bytes, progress), remote.kind.least_share
    key = hashlib.sha256(b"pull " + remote.raw).hexdigest()
    with versions.resumable(dest, key, wait=wait) as (work, notes):
        version = versions.versions_dir(dest) / remote.content_sha256[:VERSION_DIGITS]
        if _is_there(version, remote, jobs):
            versions.publish(version, dest)
            return Fetched(dest, version, *remote.whole, 0, remote.num_bytes)
        _keep(notes, {"pull": remote.content_sha256})
        fileio.make_dir(work)
        _Arrival(bucket, remote, work, tally).fetch(remote.records.values(), jobs)
        write_bytes(work / META_NAME, remote.raw)  # last: a folder with a meta.json is complete
        if damages := find_damage(work, deep=False):
            fileio.remove(notes / JOURNAL_NAME)  # so that the folder is removed: the next run would find the same
            first = damages[0]
            raise CacheError(bucket.at(first.file), first.problem, remedy=_push_again(bucket.shown), code="E611")
        version = versions.commit(work, dest, remote.content_sha256)
    return Fetched(dest, version, *remote.whole, tally.moved, tally.kept)


def _is_there(version: Path, remote: Described, jobs: int) -> bool:
    """Return whether the version holds this content; reads every file and compares its sha256."""
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


# --- the files of a cache -> the folder of a build --------------------------------------------------------------------


class _Arrival:
    """The files of one cache on their way from a bucket to a folder."""

    def __init__(self, bucket: Bucket, remote: Described, work: Path, tally: Tally) -> None:
        """work: folder of the build; files of an earlier run there are used."""
        self.bucket, self.remote, self.work, self.tally = bucket, remote, work, tally
        bucket.patience.pause = tally.pause

    def fetch(self, records: Iterable[dict[str, Any]], jobs: int) -> None:
        """Fetch files.

        Raises: CacheError E611 for damage, E610 if the cache at the URL was replaced, E612; OSError E501 without room.
        """
        wanted = list(records)
        _refuse_without_room(self.work, sum(int(record["bytes"]) - self._arrived(record) for record in wanted))
        for folder in sorted({str(record["name"]).rpartition("/")[0] for record in wanted}):
            fileio.make_dir(path_inside(self.work, folder) if folder else self.work)
        at_once(self._fetch, wanted, jobs, self.tally)
        self.refuse_if_replaced()

    def _arrived(self, record: dict[str, Any]) -> int:
        try:
            return min(path_inside(self.work, str(record["name"])).lstat().st_size, int(record["bytes"]))
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def _fetch(self, record: dict[str, Any]) -> None:
        """Fetch one file, from where an earlier run stopped. A file that arrives damaged is fetched once more."""
        where, size, kept = self.bucket.at(str(record["name"])), int(record["bytes"]), self._arrived(record)
        came, expected = "", f"{record['sha256'][:12]} by its {META_NAME}"
        # The kept beginning may be damaged, so a resumed file gets two more attempts, from the start.
        for keep in (kept, 0, 0) if kept else (0, 0):
            if came:
                logger.info("%s: arrived with the sha256 %s, expected %s; again", where, came[:12], expected)
            before, came = came, self._fetched(record, keep)
            if came == record["sha256"]:
                self.tally.add(files=1)
                return
            arrived = self._arrived(record)
            self.tally.add(moved=keep - arrived, kept=-keep)
        fileio.remove(path_inside(self.work, str(record["name"])))
        self.refuse_if_replaced()
        found, remedy = f"damaged: its sha256 is {came[:12]}, twice", _push_again(self.bucket.shown)
        if came != before:
            found, remedy = f"arrived with the sha256 {before[:12]}, then {came[:12]}", _RUN_AGAIN
        short = f" ({arrived:,} of {size:,} bytes)" if arrived < size else ""
        raise CacheError(where, found + short, expected, remedy, code="E611")

    def _fetched(self, record: dict[str, Any], keep: int) -> str:
        """Append the missing bytes of a file. Returns the sha256 of the whole file."""
        name, size = str(record["name"]), int(record["bytes"])
        path, digest = path_inside(self.work, name), hashlib.sha256()
        if keep:
            with open(open_regular(path, holes=True), "rb") as earlier:
                for _ in range(0, keep, RANGE_BYTES):
                    part = earlier.read(min(RANGE_BYTES, keep - earlier.tell()))
                    digest.update(part)
                    self.tally.add(kept=len(part))
        file = OutputFile(path, keep=keep)
        try:
            for piece in self.bucket.pieces(name, keep, size):
                file.write(piece)
                digest.update(piece)
                self.tally.add(moved=len(piece))
        except FileNotFoundError:
            self.refuse_if_replaced()
            remedy = _push_again(self.bucket.shown)
            raise CacheError(
                self.bucket.at(name), "no such file", f"a file that {META_NAME} names", remedy, code="E611"
            ) from None
        finally:
            file.close()
        return digest.hexdigest()

    def refuse_if_replaced(self) -> None:
        """Raise CacheError E610 if two reads of the URL's meta.json both differ from the one at the start."""
        if all(self.bucket.read(META_NAME, MAX_JSON_BYTES) != self.remote.raw for _ in range(2)):
            found = "its cache was replaced while it was read. Nothing was committed"
            raise CacheError(self.bucket.shown, found, remedy="Run it again", code="E610")


def _keep(notes: Path, identity: dict[str, Any]) -> None:
    """Let the next run resume this build of `storage.versions.resumable`. notes: folder of its journal."""
    journal = Journal(notes, identity)  # `resumable` removes a build without one
    if journal.last is None:
        journal.append(Checkpoint())
    journal.close()


_RUN_AGAIN = "The connection alters what it carries. Run it again: it resumes"


def _push_again(url: str) -> str:
    """Return the remedy for a cache that is damaged at its URL."""
    return f"Take another copy, or have it sent again from one: niels-gpt push CACHE {shlex.quote(url)} --check"


def _refuse_without_room(folder: Path, num_bytes: int) -> None:
    """Raise NoRoomError E501 if the bytes do not fit on the disk of a folder, which may not exist yet."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if num_bytes and num_bytes + _FREE_BYTES > free:
        found = f"{folder}: {num_bytes:,} bytes do not fit: {free:,} are free. Make room, or name another folder"
        raise NoRoomError(found)


# --- a part of a pretrain cache: whole shards, and their part of the index --------------------------------------------


def _chosen_shards(remote: Described, split: str | None, max_bytes: int | None) -> Chosen:
    """Return the shards to stage: of `split`, or of train and then val, as many as fit into `max_bytes`.

    Raises: ValueError for another split, a kind of cache that is staged whole, or if no shard fits.
    """
    if not remote.kind.has_parts:
        able = " or ".join(kind.name for kind in kinds() if kind.has_parts)
        why = f"a part of a cache of kind {remote.kind.name} cannot be staged, only shards of {able}"
        raise ValueError(f"{why}. Leave out --split and --max-bytes")
    if split not in (None, *SPLITS):
        raise ValueError(f"--split {split}: expected {' or '.join(SPLITS)}")
    left, found = max_bytes, Chosen({name: [] for name in SPLITS})
    wanted = [(name, record) for name in SPLITS if split in (None, name) for record in remote.meta["shards"][name]]
    for name, record in wanted:
        if left is not None:
            if record["bytes"] > left:
                break
            left -= int(record["bytes"])
        found[name].append(record)
    if not any(found.values()):
        first = f"the first shard has {wanted[0][1]['bytes']:,}" if wanted else "there is no shard"
        limit = f"--split {split}" if max_bytes is None else f"--max-bytes {max_bytes}"
        raise ValueError(f"{limit}: {first}")
    return found


def _stage_part(
    bucket: Bucket, remote: Described, dest: Path, chosen: Chosen, *, jobs: int, progress: Progress | None
) -> tuple[Path, dict[str, Any], int, int]:
    """Fetch some shards and commit them at `dest` as a cache, unless this part is there already.

    Returns its version, its meta.json, and the bytes fetched and kept.
    """
    # `staged` of meta.json: shards are always the first ones of a split, so their number says which.
    staged = {"of": remote.content_sha256, **{f"{split}_shards": len(chosen[split]) for split in SPLITS}}
    if (there := _staged_there(dest, staged)) is not None:
        return there[0], there[1], 0, sum(record["bytes"] for records in chosen.values() for record in records)
    identity = {"stage": staged}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    with versions.resumable(dest, key) as (work, notes):
        _keep(notes, identity)
        fetched, wanted = notes / "files", _part_records(remote, chosen)
        tally = Tally(sum(int(record["bytes"]) for record in wanted), progress)
        fileio.make_dir(fetched)
        _Arrival(bucket, remote, fetched, tally).fetch(wanted, jobs)
        fileio.remove(work)  # half a cache, of a run that was killed
        fileio.make_dir(work)
        files = [file for split in SPLITS for file in _part_files(fetched, remote.meta, split, chosen[split])]
        meta = assemble(work, files, _about(remote, len(files), staged), Modes())
        version = versions.commit(work, dest, str(meta["content_sha256"]))
    return version, meta, tally.moved, tally.kept


def _staged_there(dest: Path, staged: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    try:
        folder = resolved(dest)
        meta = find_meta(folder)
    except (OSError, CacheError):
        return None
    is_same = meta is not None and meta.get("staged") == staged
    return (folder, meta) if is_same and meta and not find_damage(folder, deep=False) else None


def _part_records(remote: Described, chosen: Chosen) -> list[dict[str, Any]]:
    """Return the records of the files to fetch: shards, and the whole index and ids of their splits."""
    found = []
    for split in filter(chosen.get, SPLITS):
        found += [*chosen[split], remote.meta["index"][split], *filter(None, [remote.meta.get("ids", {}).get(split)])]
    return found


def _part_files(folder: Path, meta: dict[str, Any], split: str, records: list[dict[str, Any]]) -> Iterator[ForeignFile]:
    if not records:
        return
    bounds = load_idx(path_inside(folder, meta["index"][split]["name"]), num_tokens=np.iinfo(np.int64).max)
    names = _Names(folder, meta, split) if split in meta.get("ids", {}) else None
    dtype, first = TOKEN_DTYPES[meta["token_dtype"]], 0
    for record in records:
        path, tokens = path_inside(folder, record["name"]), int(record["tokens"])
        ends = ends_in(bounds, first, tokens)
        continues = continues_at(bounds, first)
        yield ForeignFile(
            split,
            str(record["name"]),
            tokens,
            partial(read_pieces, path, dtype),
            partial(ends_in, bounds, first, tokens),
            token_file=path,
            itemsize=dtype.itemsize,
            ids=None if names is None else partial(names.next, len(ends), continues),
            continues=continues,
        )
        first += tokens


class _Names:
    """Source ids of a split, read once, shard by shard."""

    def __init__(self, folder: Path, meta: dict[str, Any], split: str) -> None:
        self._lines = id_lines(folder, meta, split)
        self._last = ""

    def next(self, count: int, continues: bool) -> Iterator[str]:
        """Yield the names of the next shard's documents. Repeats the last name if the shard continues its document."""
        if continues:
            yield self._last
        for line in islice(self._lines, count - continues):
            self._last = id_of_line(line)
            yield self._last


def _about(remote: Described, files: int, staged: dict[str, Any]) -> About:
    meta = remote.meta
    source = dict(meta.get("source") or {})
    counters = source.pop("counters", {})
    end = end_of_documents(meta, META_NAME)
    keys = {key: meta[key] for key in _AS_WHOLE if key in meta}
    return About(
        remote.kind,
        {key: meta[key] for key in _VOCABULARY if key in meta},
        Source(
            meta.get("dataset_name"), meta.get("dataset_config"), meta.get("streaming", False), source, {}, counters
        ),
        {"format": "niels_gpt", "borders": "index", "files": files, "tokenizer": None},
        None if end is None else DocumentToken(end[1], end[0]),
        keys={**keys, "staged": staged},
    )
