"""A build that may be killed at any moment: its open files, its journal, and the replay of its source.

What counts is the last checkpoint. What came behind it is cut off or removed; the source is read again up to it, and
each document is compared with what it was, but not tokenized. Of files that are what they were, and whose documents
come in their order, only the last one is: those before it are passed over.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from niels_gpt import fileio
from niels_gpt.build.journal import Checkpoint, Journal, remedy_of
from niels_gpt.build.seek import Seek, set_out
from niels_gpt.build.stream import DIGEST_BYTES, Mark
from niels_gpt.build.writer import BLOCK_BYTES, HashedFile, checksums_of
from niels_gpt.fileio import META_NAME, CacheError
from niels_gpt.records import file_records, parse_object, path_inside, read_regular
from niels_gpt.versions import VERSION_DIGITS

logger = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 2.0
"""A killed build loses the work of so many seconds and of a batch, at most; a checkpoint costs a few fsyncs."""
TEXTS = "texts.bin"
"""In the journal's folder: the first bytes of the sha256 of each document that was taken from the source."""
CHECKSUMS = "index/crc32.bin"
_TOLD_SECONDS = 10.0  # between two lines of a replay
_REPORTED = 1024  # documents of a replay
_SHARE_OF_RUN, _COSTS = 0.5, 10  # a young build has its checkpoints sooner: none may lose more than half of a run

T = TypeVar("T")


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
        """work: folder of the files that are finished. folder: of the journal and the files that are appended to.

        identity: everything that decides the bytes.
        files: the names of the latter, each with its place in the cache: "train/shard_{:05d}.bin" for the next shard of
            a split, None for what serves the build only.
        seconds: between two checkpoints; 0 for one after each batch.
        from_scratch: the command that starts the build from scratch, for messages.
        """
        self.work, self.folder = work, folder
        self.remedy = remedy_of(folder, from_scratch)
        """What to do where a build cannot be resumed."""
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
        self.mark = Mark({}, None)
        """Of the last document that was taken."""
        self.replays = True
        """Whether what was taken from the source before is compared with what it is now."""
        self.sought = False
        """Whether the source begins with the last document that was taken, since its files are what they were."""
        self.position: dict[str, int] | None = None
        """Where the source is while it is read; None where nobody knows it."""
        self._before = self.mark  # of the document before the last one
        self._source: tuple[str, dict[str, int]] | None = None  # fingerprint of its files, counters before the first
        self._counts = Counter(record["name"].partition("/")[0] for record in self.finished)
        self._journaled = len(self.finished)
        self._new_names = True
        self._begun = self._time = time.monotonic()
        self._cost = 0.0

    @property
    def public(self) -> Path:
        """Where the cache stands, for messages."""
        return self.folder.parent.parent.parent / self.folder.parent.name

    @property
    def committed(self) -> Path | None:
        """The version that a killed run had made of this build, where nothing is left to do but to say so."""
        if self.last.sealed is None or self.work.is_dir():
            return None
        return self.folder.parent / self.last.sealed[:VERSION_DIGITS]

    def open(self) -> None:
        """Bring the disk back to the last checkpoint and open the files there. Raises: CacheError."""
        if self.committed is not None:
            self._opened(TEXTS).close()
            return
        self._check_names()
        fileio.make_dir(self.work)
        fileio.fsync_dir(self.work)  # a killed run may have made folders in it
        if self.last.documents:
            if set(self.last.files) != set(self._places):
                raise CacheError(f"{self.folder}: its journal names other files than this build has. {self.remedy}")
            self.expect(TEXTS, self.last.documents * DIGEST_BYTES)
            self._bring_back()
        self._clear({record["name"] for record in self.finished})
        for record in self.finished:
            self.checksums[record["name"]] = self._checksums_of(record)
        for name in self._places:
            self.files[name] = self._opened(name)
        fileio.fsync_dir(self.folder)

    def _opened(self, name: str) -> HashedFile:
        keep, digest = self.last.files.get(name, (0, None))
        with self._advised():
            return HashedFile(path_inside(self.folder, name), keep=keep, sha256=digest)

    def _checksums_of(self, record: Mapping[str, Any]) -> bytes:
        with self._advised():
            return checksums_of(path_inside(self.work, record["name"]), record["bytes"], record["sha256"])

    @contextmanager
    def _advised(self) -> Iterator[None]:
        try:
            yield
        except (CacheError, FileNotFoundError) as error:
            raise CacheError(f"{error}. {self.remedy}") from error

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()
        self._journal.close()

    def seek(self, fingerprint: str | None, counters: Mapping[str, int], position: dict[str, int] | None) -> None:
        """Let a source begin with the last document that was taken, if its files are what they were.

        To be called before anything is read, and only where documents come in the order of the files.
        fingerprint: of the files' names and bytes; counters, position: the loader's. Without one of them, or where the
            checkpoint does not know them, nothing is done: then all documents are compared.
        """
        if fingerprint is None or position is None or not isinstance(counters, dict):
            return
        self._source, self.position = (fingerprint, dict(counters)), position
        known, count = self.last.seek, self.last.documents
        if self.replays and known is not None and count > 1 and (known.fingerprint, known.before) == self._source:
            self._before = set_out(known, count, counters, position)
            self.sought = True

    def take_last_again(self, documents: Iterator[tuple[T, Mark]], digest_of: Callable[[T], bytes]) -> None:
        """Take the last document of the last checkpoint from a source that begins with it, and compare it.

        Raises: CacheError if it is not what it was.
        """
        count, known = self.last.documents, self.last.seek
        assert known is not None
        with open(self.folder / TEXTS, "rb") as file:
            file.seek((count - 1) * DIGEST_BYTES)
            expected = file.read(DIGEST_BYTES)
        document, self.mark = next(documents, (None, self._before))
        if document is None or digest_of(document) != expected or not known.leads_to(self.mark):
            raise CacheError(
                f"{self.folder}: the place in the source that its journal names is not that of document {count - 1}. "
                f"If its files change now, run the same again when they no longer do. {self.remedy}"
            )
        said = "%s: resuming after %d documents of an earlier run, which are not read again: the files are the same"
        logger.info(said, self.public, count)

    def replay(
        self,
        documents: Iterator[tuple[T, Mark]],
        digest_of: Callable[[T], bytes],
        named: Callable[[T], str],
        report: Callable[[int], None],
    ) -> None:
        """Take from the source what had been taken at the last checkpoint, and compare it.

        named: tells a document, for messages.
        report: is told the number of documents now and then.
        Raises: CacheError naming the first document that is not what it was.
        """
        count = self.last.documents
        if count and self.committed is None:
            said = "%s: resuming after %d documents of an earlier run, which are read again to compare them"
            logger.info(said, self.public, count)
        told = time.monotonic()
        with open(self.folder / TEXTS, "rb") as file:
            for number in range(count):
                self._before = self.mark
                document, self.mark = next(documents, (None, self.mark))
                if document is None:
                    self._changed(f"ends after {number} documents, and {count} had been read")
                elif digest_of(document) != file.read(DIGEST_BYTES):
                    self._changed(f"has changed at {named(document)}")
                if number % _REPORTED == 0:
                    report(number)
                    if time.monotonic() - told > _TOLD_SECONDS:
                        told = time.monotonic()
                        logger.info("%s: re-read %s of %s documents", self.public, f"{number:,}", f"{count:,}")
        if count and self.mark.generator != self.last.generator:
            self._changed("is shuffled otherwise, as by another version of torch")

    def refuse_more(self, documents: Iterator[tuple[T, Mark]], named: Callable[[T], str]) -> None:
        """Raise CacheError if a source that had ended has more documents."""
        if self.last.ended and (found := next(documents, None)) is not None:
            self._changed(f"had ended, and has one more document, {named(found[0])}")

    def own(self) -> None:
        """Raise RuntimeError in a forked child, which has this build's files, and must not write to them."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{self.folder}: this process was forked from the one that builds (pid {self._process}). "
                "Let a forked child end by os._exit"
            )

    def take(self, digests: Sequence[bytes], marks: Sequence[Mark]) -> None:
        """Note that documents, one or more, were taken from the source."""
        self.files[TEXTS].write(b"".join(digests))
        self._before, self.mark = [self.mark, *marks][-2:]

    def finish_shard(self, name: str) -> None:
        """Give a shard its place in the cache, and begin the next one."""
        self.finished.append(self.finish(name))
        self._counts[self.finished[-1]["name"].partition("/")[0]] += 1

    def finish(self, name: str) -> dict[str, Any]:
        """Give a file its place in the cache and begin another one; returns its name, bytes and sha256."""
        place = self._place(name)
        record = self.files[name].moved(self.work, place)
        self.checksums[place] = self.files[name].checksums()
        self.files[name] = HashedFile(self.folder / name)
        self._new_names = True
        return record

    def add(self, place: str, content: Iterator[Any]) -> dict[str, Any]:
        """Write a further file of the cache from buffers; returns its name, bytes and sha256."""
        path = self.folder / place.replace("/", "_")
        fileio.remove(path)
        file = HashedFile(path)
        try:
            for part in content:
                file.write(part)
            self.checksums[place] = file.checksums()
            return file.moved(self.work, place)
        finally:
            file.close()

    def restored(self, fresh: dict[str, Any]) -> dict[str, Any]:
        """Return the builder's numbers of the last checkpoint; `fresh`, which shows their form, where there is none.

        Raises: CacheError for numbers of another form.
        """
        if not self.last.documents:
            return fresh
        state = self.last.state
        for key, form in fresh.items():
            same = isinstance(state.get(key), dict) == isinstance(form, dict) and key in state
            if not same or (isinstance(form, dict) and form and set(form) != set(state[key])):
                raise CacheError(f"{self.folder}: its journal has no good {key!r}. {self.remedy}")
        return state

    def expect(self, name: str, num_bytes: int) -> None:
        """Raise CacheError if a file was not as long at the last checkpoint as the numbers there say."""
        found = self.last.files.get(name, (0, ""))[0]
        if found != num_bytes:
            raise CacheError(f"{self.folder / name}: {found} bytes by its journal, expected {num_bytes}. {self.remedy}")

    def checkpoint(self, state: Mapping[str, Any], *, ended: bool = False) -> None:
        """Make durable what was written, and say so in the journal: if it is time, a shard is finished, or at the end.

        state: the builder's own numbers, or numbers by name.
        """
        if self.last.ended:
            return
        now = time.monotonic()
        early = max(_SHARE_OF_RUN * (now - self._begun), _COSTS * self._cost)
        due = ended or len(self.finished) > self._journaled or now - self._time >= min(self._seconds, early)
        if not due:
            return
        for file in self.files.values():
            file.sync()
        if self._new_names:
            fileio.fsync_dir(self.folder)
            self._new_names = False
        checkpoint = Checkpoint(
            documents=self.files[TEXTS].num_bytes // DIGEST_BYTES,
            generator=self.mark.generator,
            files={name: (file.num_bytes, file.sha256) for name, file in self.files.items()},
            finished=self.finished[self._journaled :],
            state=dict(state),
            ended=ended,
            seek=self._source and Seek.between(*self._source, self._before, self.mark),
        )
        self._journal.append(checkpoint)
        self.last, self._journaled, self._time = checkpoint, len(self.finished), time.monotonic()
        self._cost = self._time - now

    def add_checksums(self, *groups: Mapping[str, Any]) -> dict[str, Any]:
        """Write index/crc32.bin for all files that meta.json names so far, in its order; returns its record."""
        named = file_records(dict(zip(("shards", "index", "ids"), groups, strict=False)))
        record = self.add(CHECKSUMS, (self.checksums[found["name"]] for found in named))
        return {**record, "block_bytes": BLOCK_BYTES}

    def committed_meta(self) -> dict[str, Any] | None:
        """Return the meta.json of `committed`."""
        if self.committed is None:
            return None
        path = self.committed / META_NAME
        try:
            meta = parse_object(read_regular(path))
        except FileNotFoundError as error:
            raise CacheError(
                f"{path}: no such file, expected a finished version by the journal. {self.remedy}"
            ) from error
        except ValueError as error:
            raise CacheError(f"{path}: {error}. {self.remedy}") from error
        if meta.get("content_sha256") != self.last.sealed or not isinstance(meta.get("source"), dict):
            raise CacheError(f"{path}: another content_sha256 than its build had. {self.remedy}")
        return meta

    def seal(self, content_sha256: str) -> None:
        """Say in the journal that the folder is complete, so that a commit which is killed can be finished."""
        if self.last.sealed is None:
            self._journal.append(replace(self.last, finished=[], sealed=content_sha256))

    def _place(self, name: str) -> str:
        place = self._places[name]
        assert place is not None
        return place.format(self._counts[place.partition("/")[0]])

    def _check_names(self) -> None:
        seen = Counter[str]()
        for record in self.finished:
            place = next((p for p in self._places.values() if p and record["name"] == p.format(seen[p])), None)
            if place is None or not record["bytes"]:
                raise CacheError(f"{self.folder}: its journal names {record['name']!r} out of turn. {self.remedy}")
            seen[place] += 1

    def _bring_back(self) -> None:
        """Undo the finishing of files since the last checkpoint: they are behind it."""
        for name, (keep, _) in self.last.files.items():
            if keep and self._places[name] is not None:
                with self._advised():
                    finished = path_inside(self.work, self._place(name))
                if finished.is_file():
                    fileio.rename(finished, self.folder / name)

    def _clear(self, known: set[str]) -> None:
        for _, names, about in fileio.walked(self.work):
            if not stat.S_ISDIR(about.st_mode) and "/".join(names) not in known:
                fileio.remove(self.work.joinpath(*names))

    def _changed(self, what: str) -> None:
        raise CacheError(
            f"{self.public}: its source {what}, since a build of it was "
            f"interrupted. Restore the source and run the same command again. {self.remedy}"
        )
