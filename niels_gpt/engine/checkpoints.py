"""The files and the journal of one build on disk. Decides when a checkpoint is taken, and what it makes durable.

A build resumes from its last checkpoint: `open` truncates later bytes and removes unknown files. Each file of the cache
is written at its final place.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from niels_gpt.cache.formats import BLOCK_BYTES
from niels_gpt.encoding import DIGEST_BYTES
from niels_gpt.engine.journal import Checkpoint, HashedFile, Journal, checksums_of, remedy_of, write_whole
from niels_gpt.engine.stream import Chunk, Seek, SourceState
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError, ForkedBuild
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.locks import check_lease, is_leased
from niels_gpt.storage.meta_json import file_records, parse_object, path_inside, read_regular
from niels_gpt.storage.versions import LOCK_NAME, VERSION_DIGITS

T = TypeVar("T")

CHECKPOINT_SECONDS = 2.0
"""A killed build loses at most this many seconds of work, and one batch. A checkpoint costs a few fsyncs."""
_SHARE_OF_RUN, _COSTS = 0.5, 10
"""A new run takes its first checkpoints sooner: after half of its time so far, but not before 10 times their cost."""
TEXTS = "texts.bin"
"""File in the journal's folder: the digest of each consumed document, dropped ones included."""
CHECKSUMS = "index/crc32.bin"


class Build:
    """The state of one build on disk."""

    def __init__(
        self,
        work: Path,
        folder: Path,
        identity: Mapping[str, Any],
        files: Mapping[str, str | None],
        seconds: float,
        from_scratch: str | None = None,
    ) -> None:
        """work: folder of the cache's files. folder: of the journal, and of files that only the build needs.

        identity: everything that decides the bytes.
        files: names of the growing files -> their names in the cache: "train/shard_{:05d}.bin" for the next shard of a
            split, None for a file that only the build needs.
        seconds: between two checkpoints; 0: one after each batch.
        from_scratch: the command that builds from scratch, for messages.
        Raises: CacheError E505 for a damaged journal, or the journal of another build.
        """
        self.work, self.folder = work, folder
        self.remedy = remedy_of(folder, from_scratch)
        """The remedy in messages if the build cannot be resumed."""
        self._places = {**files, TEXTS: None}
        self._seconds = seconds
        self._process = os.getpid()
        self._journal = Journal(folder, identity, self.remedy)
        self.last = self._journal.last or Checkpoint()
        """The last checkpoint."""
        self.finished = self._journal.finished
        """Records of the finished shards: name, bytes, sha256."""
        self.files: dict[str, HashedFile] = {}
        self.checksums: dict[str, bytes] = {}
        """CRC-32 of the blocks of each finished file."""
        self.state = SourceState({}, None)
        """The source's state after the last consumed document."""
        self.previous_state = self.state
        """The source's state after the document before it."""
        self.source: tuple[str, dict[str, int]] | None = None
        """Fingerprint of the source's files, and the loader's counters before the first document; None without seek."""
        self.position: dict[str, int] | None = None
        """The loader's position, which it updates while it is read; None without seek."""
        self.compares = True
        """Whether consumed documents are compared with the source."""
        self.sought = False
        """Whether the source begins with the last consumed document, because its files are unchanged."""
        self._counts = Counter(record["name"].partition("/")[0] for record in self.finished)
        self._journaled = len(self.finished)
        self._new_names = {folder}
        """Folders with new files, whose names are not durable yet."""
        self._started = self._time = time.monotonic()
        self._cost = 0.0

    @property
    def public(self) -> Path:
        """The path of the cache, for messages."""
        return self.folder.parent.parent.parent / self.folder.parent.name

    @property
    def committed(self) -> Path | None:
        """The version that a killed run of this build committed; None if there is none."""
        if self.last.sealed is None or self.work.is_dir():
            return None
        return self.folder.parent / self.last.sealed[:VERSION_DIGITS]

    def open(self) -> None:
        """Restore the disk to the last checkpoint, and open the files.

        Raises: CacheError E505 for missing or changed files; CacheError E512 if the lease was lost.
        """
        if self.committed is not None:
            self._opened(TEXTS).close()
            return
        self._check_names()
        fileio.make_dir(self.work)
        fileio.fsync_dir(self.work)  # a killed run may have made folders in it
        if self.last.documents:
            if set(self.last.files) != set(self._places):
                raise CacheError(
                    self.folder, "its journal names other files than this build has", remedy=self.remedy, code="E505"
                )
            self.expect(TEXTS, self.last.documents * DIGEST_BYTES)
        for record in self.finished:
            with self._remedied(self.work / record["name"]):
                path = path_inside(self.work, record["name"])
                self.checksums[record["name"]] = checksums_of(path, record["bytes"], record["sha256"])
        self.check_lease()  # to read all shards may have taken hours
        known = {record["name"] for record in self.finished}
        for name in filter(self.keeps, self._places):
            if self.last.files.get(name, (0, ""))[0]:
                root, place = self._where(name)
                with self._remedied(root / place):
                    path_inside(root, place)
                known.add(place)
        self._remove_unknown(known)
        for name in self._places:
            self.files[name] = self._opened(name)

    def path_of(self, name: str) -> Path:
        """Return the path of a growing file."""
        root, place = self._where(name)
        return root / place

    def has(self, name: str) -> bool:
        """Return whether this build appends to a file of this name."""
        return name in self._places

    def keeps(self, name: str) -> bool:
        """Return whether a growing file becomes a file of the cache."""
        return self._places[name] is not None

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()
        self._journal.close()

    def check_lease(self) -> None:
        """Raise CacheError E512 if another process has taken over the cache's lease, and with it the cache's files."""
        check_lease(self.folder.parent / LOCK_NAME)

    def checked_for_forks(self, chunks: Iterator[T]) -> Iterator[T]:
        """Yield the chunks of a source. Raises: ForkedBuild E508 in a forked child, which shares the open files.

        Checked for each chunk and at the end: reading a source may fork.
        """
        for chunk in chain(chunks, [None]):
            if os.getpid() != self._process:
                raise ForkedBuild(
                    f"{self.folder}: this process was forked from the one that builds (pid {self._process}). "
                    "End a forked child with os._exit"
                )
            if chunk is not None:
                yield chunk

    def record_consumed(self, digests: Sequence[bytes], chunk: Chunk[Any]) -> None:
        """Record that the first documents of a chunk were consumed: one for each digest, one or more."""
        self.files[TEXTS].write(b"".join(digests))
        last = len(digests) - 1
        self.previous_state = chunk.state(last - 1) if last else self.state
        self.state = chunk.state(last)

    def restored(self, initial: dict[str, Any]) -> dict[str, Any]:
        """Return the builder's numbers at the last checkpoint, or `initial` if there is none.

        Raises: CacheError E505 if a key of `initial` is missing or has another form.
        """
        if not self.last.documents:
            return initial
        state = self.last.state
        for key, form in initial.items():
            same = isinstance(state.get(key), dict) == isinstance(form, dict) and key in state
            if not same or (isinstance(form, dict) and form and set(form) != set(state[key])):
                raise CacheError(self.folder, f"its journal has no valid {key!r}", remedy=self.remedy, code="E505")
        return state

    def expect(self, name: str, num_bytes: int) -> None:
        """Raise CacheError E505 if the journal gives a file another size than the builder's numbers do."""
        size = self.last.files.get(name, (0, ""))[0]
        if size != num_bytes:
            raise CacheError(
                self.folder / name, f"{size} bytes by its journal", str(num_bytes), self.remedy, code="E505"
            )

    def checkpoint(self, state: Mapping[str, Any], *, ended: bool = False) -> None:
        """Take a checkpoint if one is due: a shard was finished, the time has passed, or the source has `ended`.

        state: the builder's own numbers, or dicts of them.
        """
        if self.last.ended:
            return
        now = time.monotonic()
        early = max(_SHARE_OF_RUN * (now - self._started), _COSTS * self._cost)
        due = ended or len(self.finished) > self._journaled or now - self._time >= min(self._seconds, early)
        if not due:
            return
        # The order is the protocol: bytes, then names, then the line of the journal. After a loss of power the last
        # line names only bytes that are on the disk.
        for file in self.files.values():
            if file.num_bytes:
                file.sync()
        for folder in sorted(self._new_names):
            fileio.fsync_dir(folder)
        self._new_names.clear()
        checkpoint = Checkpoint(
            documents=self.files[TEXTS].num_bytes // DIGEST_BYTES,
            generator=self.state.generator,
            files={name: (file.num_bytes, file.sha256) for name, file in self.files.items()},
            finished=self.finished[self._journaled :],
            state=dict(state),
            ended=ended,
            seek=self.source and Seek.between(*self.source, self.previous_state, self.state),
        )
        self.check_lease()  # the syncs may have taken long
        self._journal.append(checkpoint)
        self.last, self._journaled, self._time = checkpoint, len(self.finished), time.monotonic()
        self._cost = self._time - now

    def finish_shard(self, name: str) -> None:
        """Finish a full shard; later bytes go to the next one."""
        self.finished.append(record := self.finish(name))
        self.files[name].close()
        self._counts[record["name"].partition("/")[0]] += 1
        self.files[name] = HashedFile(self.path_of(name), before_open=self._before_open, lazy=True)

    def finish(self, name: str) -> dict[str, Any]:
        """Sync a complete file, which may be empty; return its record: name in the cache, bytes, sha256."""
        place, file = self._where(name)[1], self.files[name]
        file.sync()
        self.check_lease()  # the sync may have taken long
        self.checksums[place] = file.checksums()
        return file.record(place)

    def add(self, place: str, content: Iterator[Any]) -> dict[str, Any]:
        """Write a further file of the cache from buffers; return its record: name, bytes, sha256."""
        crcs: list[bytes] = []
        record = write_whole(self.work, place, content, crcs, self._before_open)
        self.check_lease()
        (self.checksums[place],) = crcs
        return record

    def add_checksums(self, **groups: Mapping[str, Any] | list[dict[str, Any]]) -> dict[str, Any]:
        """Write index/crc32.bin and return its record. groups: the records so far, by their keys of meta.json."""
        records = file_records(groups)
        record = self.add(CHECKSUMS, (self.checksums[each["name"]] for each in records))
        return {**record, "block_bytes": BLOCK_BYTES}

    def committed_meta(self) -> dict[str, Any] | None:
        """Return the meta.json of `committed`, or None. Raises: CacheError E505 if it is not the one of this build."""
        if self.committed is None:
            return None
        path = self.committed / META_NAME
        with self._remedied(path):
            meta = parse_object(read_regular(path))
        if meta.get("content_sha256") != self.last.sealed or not isinstance(meta.get("source"), dict):
            raise CacheError(path, "another content_sha256 than its build had", remedy=self.remedy, code="E505")
        return meta

    def seal(self, content_sha256: str) -> None:
        """Record in the journal that the folder is complete, so that a killed commit can be finished."""
        self.check_lease()
        # Written again even if the journal has it: that run may have been killed before the line was durable.
        self._journal.append(replace(self.last, finished=[], sealed=content_sha256))

    def _where(self, name: str) -> tuple[Path, str]:
        """Return the folder of a growing file, and the file's path below it."""
        place = self._places[name]
        return (
            (self.folder, name) if place is None else (self.work, place.format(self._counts[place.partition("/")[0]]))
        )

    def _opened(self, name: str) -> HashedFile:
        keep, digest = self.last.files.get(name, (0, None))
        root, place = self._where(name)
        with self._remedied(root / place):
            path = path_inside(root, place)
            # A process that lost its lease may still write to its open files, so a taker appends to copies. `resumable`
            # has copied the files of the journal's folder.
            is_kept, is_lease = self.keeps(name), is_leased(self.folder.parent / LOCK_NAME)
            before_open, copies = self._before_open, is_kept and is_lease
            # Lazy: a file that stays empty may not belong to the cache, such as an absent field or a shard too many.
            return HashedFile(path, keep=keep, sha256=digest, before_open=before_open, copies=copies, lazy=is_kept)

    def _before_open(self, path: Path) -> None:
        """Prepare the creation of a file, or its truncation."""
        self.check_lease()
        fileio.make_dir(path.parent)
        self._new_names.add(path.parent)

    @contextmanager
    def _remedied(self, path: Path) -> Iterator[None]:
        """Raise a problem with a file as CacheError with this build's remedy; as E512 if the lease was lost."""
        try:
            yield
        except (FileNotFoundError, ValueError) as error:
            self.check_lease()
            if isinstance(error, CacheError):
                raise CacheError(error.path, error.found, error.expected, self.remedy, code=error.code) from error
            if isinstance(error, FileNotFoundError):
                raise CacheError(path, "no such file", "one by the journal", self.remedy, code="E505") from error
            raise CacheError(path, str(error), remedy=self.remedy, code="E505") from error

    def _check_names(self) -> None:
        """Raise CacheError E505 unless the journal names this build's shards, in order and not empty."""
        seen = Counter[str]()
        for record in self.finished:
            place = next((p for p in self._places.values() if p and record["name"] == p.format(seen[p])), None)
            if place is None or not record["bytes"]:
                raise CacheError(
                    self.folder, f"its journal names {record['name']!r} out of turn", remedy=self.remedy, code="E505"
                )
            seen[place] += 1

    def _remove_unknown(self, known: set[str]) -> None:
        for _, names, about in fileio.walked(self.work):
            if not stat.S_ISDIR(about.st_mode) and "/".join(names) not in known:
                fileio.remove(self.work.joinpath(*names))
