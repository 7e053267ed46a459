"""One build on disk: how it starts or resumes, when a checkpoint is taken, what is compared, and how it is committed.

`run_build` makes any kind of cache from a stream of items, by the Writer of that kind. A build resumes from its last
checkpoint: later bytes are truncated, and unknown files are removed. Each consumed document is compared with the digest
recorded of it, without tokenizing it. If the files of the source are unchanged and its documents keep their order, only
the last consumed document is read again.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from niels_gpt.cache.formats import BLOCK_BYTES
from niels_gpt.encoding import DIGEST_BYTES
from niels_gpt.engine.journal import (
    Attempts,
    Checkpoint,
    HashedFile,
    Journal,
    checksums_of,
    identity_of,
    remedy_of,
    write_whole,
)
from niels_gpt.engine.meta import (
    OF_ANOTHER_VERSION,
    Source,
    build_identity,
    is_of_this_version,
    vocabulary_of,
    write_description,
)
from niels_gpt.engine.split import TextSplit, Waiting, warn_of_share
from niels_gpt.engine.stream import (
    Batch,
    Chunk,
    Encoder,
    ItemKind,
    Seek,
    Shuffled,
    SourceState,
    chunked,
    encoded,
    first_number,
)
from niels_gpt.progress import Progress
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.errors import CacheError, ForkedBuild, SourceError
from niels_gpt.storage.fileio import META_NAME, canonical_json
from niels_gpt.storage.locks import check_lease, is_leased
from niels_gpt.storage.meta_json import file_records, parse_object, path_inside, read_regular
from niels_gpt.storage.versions import JOURNAL_SUFFIX, LOCK_NAME, VERSION_DIGITS, discard, resumable
from niels_gpt.tokenizers.protocol import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHECKPOINT_SECONDS = 2.0
"""A killed build loses at most this much work and one batch. A checkpoint costs a few fsyncs."""
_SHARE_OF_RUN, _COSTS = 0.5, 10
"""A new run takes its first checkpoints sooner: after half of its time so far, but after 10 times their cost."""
_LOG_SECONDS = 10.0  # between two log lines about documents that are read again
TEXTS = "texts.bin"
"""In the journal's folder: the digest of each document that was consumed, those that were dropped included."""
CHECKSUMS = "index/crc32.bin"
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}


class NoTextError(SourceError, code="E303"):
    """A source has ended, and nothing of it can be in a cache."""


@dataclass(frozen=True)
class How:
    """How a cache is built: none of it changes a byte."""

    num_threads: int = 1
    """Threads that encode; 0: the caller's own."""
    executor: Executor | None = None
    """Encodes instead; it is left open."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    """Between two checkpoints; 0: one after each batch."""
    committed: Callable[[dict[str, Any]], None] | None = None
    """Called with the meta after the commit; if it fails, the next run finishes this build."""
    progress: Progress | None = None
    """Called with items read, tokens written, and the tokens to expect."""


class Writer(Protocol[T]):
    """What a kind of cache does with the items of its stream. A new one has the numbers of the last checkpoint."""

    @property
    def kind(self) -> ItemKind[T]:
        """How the engine reads an item."""

    @property
    def encoder(self) -> Encoder[Any] | None:
        """What encodes the texts of the items; None: items are stored as they are."""

    @property
    def expected(self) -> int | None:
        """Tokens to expect, for the progress; None: not known."""

    @property
    def read(self) -> int:
        """Items read so far."""

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""

    @property
    def full(self) -> bool:
        """Whether no further item is needed."""

    def waiting(self, item: T) -> Waiting | None:
        """Return what the split needs of an item that waits until both splits have one; None if it names its split."""

    def add(self, batch: Batch[T], encoded: Any) -> list[bytes]:
        """Append a batch to the files; returns the digests of the items that were consumed, one or more."""

    def state(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint keeps."""

    def check_kept(self) -> None:
        """Raise NoTextError if nothing that was read can be in a cache."""

    def described(self) -> dict[str, Any]:
        """Finish the files; returns their keys of meta.json, and the counts."""

    def warn(self, out_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
        """Log what is odd about a cache that was just built."""


def run_build(
    out_dir: str | os.PathLike[str],
    items: Callable[[int], Iterable[T | Chunk[T]]],
    writer_of: Callable[[Build], Writer[T]],
    how: How,
    *,
    tokenizer: Tokenizer | None,
    files: Mapping[str, str | None],
    source: Source,
    rule: TextSplit,
    settings: Mapping[str, Any],
    vocabulary: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    shuffled: Shuffled | None = None,
) -> dict[str, Any]:
    """Build a cache and commit it at `out_dir`; returns its meta. A killed build resumes.

    items: gets the number of the first item, and returns the stream from there on. files: of Build.
    rule: decides the splits by its seed; its bound is final once an item was consumed, and part of every checkpoint.
    settings: keys of meta.json that decide the bytes, `kind` too. vocabulary: the tokenizer's keys; None: read here.
    identity: what else must be equal for a build to resume. shuffled: None keeps the order.
    """
    if vocabulary is None:
        assert tokenizer is not None
        vocabulary = vocabulary_of(tokenizer)
    known = {"vocabulary": vocabulary, "source": source, "seed": rule.seed, **settings}
    identity = build_identity(source, tokenizer, seed=rule.seed, **settings, **(identity or {}))
    with open_build(out_dir, identity, files, how.checkpoint_seconds, source) as build:
        rule.halves = build.restored({"bound": rule.halves})["bound"]
        writer = writer_of(build)
        _fill(build, writer, items, how, source, rule, shuffled)
        writer.check_kept()
        build.checkpoint({**writer.state(), "bound": rule.halves}, ended=True)
        meta = build.committed_meta()
        if meta is None:
            counters = build.state.counters if writer.full else source.counters
            meta = write_description(build.work, counters=counters, **known, **writer.described())
            if "partition" not in meta:
                warn_of_share(out_dir, meta)
        build.seal(str(meta["content_sha256"]))
        versions.commit(build.work, out_dir, str(meta["content_sha256"]))
        if how.committed is not None:
            how.committed(meta)
    writer.warn(out_dir, meta)
    return meta


def _fill(
    build: Build,
    writer: Writer[T],
    items: Callable[[int], Iterable[T | Chunk[T]]],
    how: How,
    source: Source,
    rule: TextSplit,
    shuffled: Shuffled | None,
) -> None:
    """Give the writer all items that the last checkpoint does not have."""

    def report(number: int) -> None:
        if how.progress is not None:
            how.progress(number, writer.num_tokens, writer.expected)

    if shuffled is None or shuffled.in_order:
        _seek(build, source)
    stream = items(first_number(source.position))
    chunks = build.checked_for_forks(chunked(stream, source.counters, build.position, writer.kind.size))
    if shuffled is not None:
        chunks = shuffled.of(chunks, source.counters)
    if not build.last.documents:
        chunks = rule.settled(chunks, build.folder, writer.waiting)
    chunks = _compare_consumed(build, chunks, writer.kind, writer.encoder, report)
    if build.last.ended:
        if build.compares and not writer.full:
            _check_ended(build, chunks, writer.kind)
        return
    first = build.last.documents
    with encoded(
        chunks, writer.encoder, writer.kind, first=first, num_threads=how.num_threads, executor=how.executor
    ) as batches:
        while not writer.full and (found := next(batches, None)) is not None:
            batch, result = found
            build.record_consumed(writer.add(batch, result), batch.chunk)
            build.checkpoint({**writer.state(), "bound": rule.halves})
            report(writer.read)


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
        """work: folder of the cache's files. folder: of the journal and of the files that only the build needs.

        identity: everything that decides the bytes.
        files: names of the files that are still written -> their names in the cache: "train/shard_{:05d}.bin" for the
            next shard of a split, None for a file that only the build needs. All are written where they stay.
        seconds: between two checkpoints; 0: one after each batch.
        from_scratch: the command that builds from scratch, for messages.
        """
        self.work, self.folder = work, folder
        self.remedy = remedy_of(folder, from_scratch)
        """What to do if the build cannot be resumed."""
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
        """As of the last document that was consumed."""
        self.previous_state = self.state
        """As of the document before it."""
        self.source: tuple[str, dict[str, int]] | None = None
        """Fingerprint of the source's files and the loader's counters before the first document, if it can seek."""
        self.position: dict[str, int] | None = None
        """The loader's position, updated as it is read, if it can seek."""
        self.compares = True
        """Whether consumed documents are compared with the source."""
        self.sought = False
        """Whether the source begins with the last consumed document, because its files are unchanged."""
        self._counts = Counter(record["name"].partition("/")[0] for record in self.finished)
        self._journaled = len(self.finished)
        self._new_names = {folder}
        """Folders with files whose names are not durable yet."""
        self._started = self._time = time.monotonic()
        self._cost = 0.0

    @property
    def public(self) -> Path:
        """The path of the cache, for messages."""
        return self.folder.parent.parent.parent / self.folder.parent.name

    @property
    def committed(self) -> Path | None:
        """The version of this build that a killed run committed, if it did."""
        if self.last.sealed is None or self.work.is_dir():
            return None
        return self.folder.parent / self.last.sealed[:VERSION_DIGITS]

    def open(self) -> None:
        """Restore the disk to the last checkpoint and open the files. Raises: CacheError."""
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
        for name, (keep, _) in self.last.files.items():
            if keep and self.keeps(name):
                with self._remedied(self.path_of(name)):
                    path_inside(self.work, self._place(name))
                known.add(self._place(name))
        self._remove_unknown(known)
        for name in self._places:
            self.files[name] = self._opened(name)

    def path_of(self, name: str) -> Path:
        """Return the path of a file that is still written."""
        return self.work / self._place(name) if self.keeps(name) else self.folder / name

    def keeps(self, name: str) -> bool:
        """Whether a file that is still written becomes a file of the cache."""
        return self._places[name] is not None

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()
        self._journal.close()

    def check_lease(self) -> None:
        """Raise CacheError E512 if another process has taken over the lease of this cache, and its files with it."""
        check_lease(self.folder.parent / LOCK_NAME)

    def check_not_forked(self) -> None:
        """Raise RuntimeError in a forked child: it shares this build's open files and must not write to them."""
        if os.getpid() != self._process:
            raise ForkedBuild(
                f"{self.folder}: this process was forked from the one that builds (pid {self._process}). "
                "Let a forked child end by os._exit"
            )

    def checked_for_forks(self, chunks: Iterable[T]) -> Iterator[T]:
        """Yield what is read of a source; after each one and at the end, check that the source has not forked us."""
        for chunk in chunks:
            self.check_not_forked()
            yield chunk
        self.check_not_forked()

    def record_consumed(self, digests: Sequence[bytes], chunk: Chunk[Any]) -> None:
        """Record that the first documents of a chunk, one for each digest and one or more, were consumed."""
        self.files[TEXTS].write(b"".join(digests))
        last = len(digests) - 1
        self.previous_state = chunk.state(last - 1) if last else self.state
        self.state = chunk.state(last)

    def restored(self, initial: dict[str, Any]) -> dict[str, Any]:
        """Return the builder's numbers at the last checkpoint; `initial` if there is none.

        initial: gives the form, too. Raises: CacheError for numbers of another form.
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
        """Raise CacheError if the journal gives a file another size than the builder's numbers do."""
        size = self.last.files.get(name, (0, ""))[0]
        if size != num_bytes:
            raise CacheError(
                self.folder / name, f"{size} bytes by its journal", str(num_bytes), self.remedy, code="E505"
            )

    def checkpoint(self, state: Mapping[str, Any], *, ended: bool = False) -> None:
        """Take a checkpoint, if one is due: a shard was finished, the time has passed, or the source has `ended`.

        It makes the files durable before the journal names them. state: the builder's own numbers, or dicts of them.
        """
        if self.last.ended:
            return
        now = time.monotonic()
        early = max(_SHARE_OF_RUN * (now - self._started), _COSTS * self._cost)
        due = ended or len(self.finished) > self._journaled or now - self._time >= min(self._seconds, early)
        if not due:
            return
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
        """Finish a full shard; what is written next is in another one."""
        self.finished.append(record := self.finish(name))
        self.files[name].close()
        self._counts[record["name"].partition("/")[0]] += 1
        self.files[name] = HashedFile(self.path_of(name), before_open=self._before_open, lazy=True)

    def finish(self, name: str) -> dict[str, Any]:
        """Sync a file that is complete, though it may be empty; returns its name in the cache, bytes and sha256."""
        place, file = self._place(name), self.files[name]
        file.sync()
        self.checksums[place] = file.checksums()
        return file.record(place)

    def add(self, place: str, content: Iterator[Any]) -> dict[str, Any]:
        """Write a further file of the cache from buffers; returns its name, bytes and sha256."""
        crcs: list[bytes] = []
        record = write_whole(self.work, place, content, crcs, self._before_open)
        (self.checksums[place],) = crcs
        return record

    def add_checksums(self, **groups: Mapping[str, Any] | list[dict[str, Any]]) -> dict[str, Any]:
        """Write index/crc32.bin for the files of meta.json so far, by their keys there; returns its record."""
        records = file_records(groups)
        record = self.add(CHECKSUMS, (self.checksums[each["name"]] for each in records))
        return {**record, "block_bytes": BLOCK_BYTES}

    def committed_meta(self) -> dict[str, Any] | None:
        """Return the meta.json of `committed`."""
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
        if self.last.sealed is None:
            self.check_lease()
            self._journal.append(replace(self.last, finished=[], sealed=content_sha256))

    def _place(self, name: str) -> str:
        place = self._places[name]
        assert place is not None
        return place.format(self._counts[place.partition("/")[0]])

    def _opened(self, name: str) -> HashedFile:
        keep, digest = self.last.files.get(name, (0, None))
        root, place = (self.work, self._place(name)) if self.keeps(name) else (self.folder, name)
        with self._remedied(root / place):
            path = path_inside(root, place)
            # Who lost its lease may still write to the files that it has open; `resumable` has copied the journal's.
            is_kept, is_lease = self.keeps(name), is_leased(self.folder.parent / LOCK_NAME)
            before_open, copies = self._before_open, is_kept and is_lease
            # A file of the cache that stays empty may not be one: a field that is absent, a shard after the last one.
            return HashedFile(path, keep=keep, sha256=digest, before_open=before_open, copies=copies, lazy=is_kept)

    def _before_open(self, path: Path) -> None:
        """Prepare the creation of a file, or its truncation."""
        self.check_lease()
        fileio.make_dir(path.parent)
        self._new_names.add(path.parent)

    @contextmanager
    def _remedied(self, path: Path) -> Iterator[None]:
        """Raise CacheError with this build's remedy; E512 where the files are another's by now."""
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
        """Raise CacheError unless the journal's shards are those of this build, in order and not empty."""
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


@contextmanager
def open_build(
    out_dir: str | os.PathLike[str],
    identity: Mapping[str, Any],
    files: Mapping[str, str | None],
    seconds: float,
    source: Source,
) -> Iterator[Build]:
    """Hold the lock on a cache and yield its build: a new one, or an unfinished one at its last checkpoint.

    identity, files, seconds: those of Build. A build that was committed, but killed before its journal was removed, is
    finished without reading the source if the source's fingerprint is unchanged, and is otherwise discarded.
    A build that ends with NoTextError is discarded, so that the next one may read another source.
    Raises: CacheError if another process builds here, if something that is no cache is in the way, or for damage.
    """
    key = sha256(canonical_json(identity)).hexdigest()
    with resumable(out_dir, key) as (work, folder):
        _log_other_builds(folder, identity)
        build = Build(work, folder, identity, files, seconds, source.from_scratch)
        attempts = Attempts(folder.parent, key, build.last.documents)
        try:
            meta, fingerprint = build.committed_meta(), source.provenance.get("fingerprint")
            if meta is not None and fingerprint is not None:
                build.compares = meta["source"].get("fingerprint") != fingerprint
                if build.compares:
                    build.close()
                    discard(folder)
                    fileio.make_dir(folder)
                    build = Build(work, folder, identity, files, seconds, source.from_scratch)
            build.open()
            yield build
            attempts.forget()
        except NoTextError:
            build.close()
            discard(folder)
            attempts.forget()
            raise
        except KeyboardInterrupt:
            attempts.interrupted(build.last.documents)
            raise
        except Exception as error:
            attempts.forget()
            if isinstance(error, OSError) and error.errno in CANNOT_WRITE and build.last.documents:
                kept = (
                    f"{build.last.documents} documents are done and kept: the same command resumes once that is fixed"
                )
                raise OSError(error.errno, f"{error.strerror}. {kept}", error.filename) from error
            raise
        finally:
            build.close()


def _log_other_builds(folder: Path, identity: Mapping[str, Any]) -> None:
    """Log how other unfinished builds of this cache differ from the one that starts."""
    for other in sorted(folder.parent.glob(f"*{JOURNAL_SUFFIX}")):
        theirs = identity_of(other)
        if other != folder and theirs:
            keys = sorted(key for key in {*identity, *theirs} if identity.get(key) != theirs.get(key))
            which = f"that differs in {', '.join(keys)}" if is_of_this_version(theirs) else OF_ANOTHER_VERSION
            logger.info("%s: an unfinished build %s; `niels-gpt gc` would remove it", other, which)


def _seek(build: Build, source: Source) -> None:
    """Make the source begin with the last consumed document, if its files are unchanged since the last checkpoint.

    Call it before anything is read, and only if documents keep the order of the files. Without a fingerprint or a
    position it does nothing: then all consumed documents are compared.
    """
    fingerprint, counters, position = source.provenance.get("fingerprint"), source.counters, source.position
    if fingerprint is None or position is None or not isinstance(counters, dict):
        return
    build.source, build.position = (fingerprint, dict(counters)), position
    known, count = build.last.seek, build.last.documents
    if build.compares and known is not None and count > 1 and (known.fingerprint, known.before) == build.source:
        build.previous_state = known.apply(count, counters, position)
        build.sought = True


def _compare_consumed(
    build: Build,
    chunks: Iterator[Chunk[T]],
    kind: ItemKind[T],
    encoder: Encoder[Any] | None,
    report: Callable[[int], None],
) -> Iterator[Chunk[T]]:
    """Read again what was consumed at the last checkpoint, or only its last document after a seek, and compare it.

    report: called now and then with the number of documents read again. Returns what follows these documents.
    Raises: CacheError naming the first document that has changed.
    """
    if build.sought:
        return _compare_last(build, chunks, kind, encoder)
    if build.compares:
        return _compare_all(build, chunks, kind, encoder, report)
    return chunks


def _check_ended(build: Build, chunks: Iterator[Chunk[T]], kind: ItemKind[T]) -> None:
    """Raise CacheError if a source that had ended has more documents."""
    if build.last.ended and (chunk := next(chunks, None)) is not None:
        _raise_changed(build, f"had ended, and has one more document, {kind.described(chunk.items[0])}")


def _compare_last(
    build: Build, chunks: Iterator[Chunk[T]], kind: ItemKind[T], encoder: Encoder[Any] | None
) -> Iterator[Chunk[T]]:
    count, known = build.last.documents, build.last.seek
    assert known is not None
    with open(build.folder / TEXTS, "rb") as file:
        file.seek((count - 1) * DIGEST_BYTES)
        expected = file.read(DIGEST_BYTES)
    chunk = next(chunks, None)
    build.state = build.previous_state if chunk is None else chunk.state(0)
    if chunk is None or kind.digests(chunk.items[:1], encoder) != [expected] or not known.leads_to(build.state):
        raise CacheError(
            build.folder,
            f"the place in the source that its journal names is not that of document {count - 1}",
            remedy=f"If the files are changing now, run the same command when they no longer do. {build.remedy}",
            code="E306",
        )
    message = "%s: resuming after %d documents of an earlier run, which are not read again: the files are the same"
    logger.info(message, build.public, count)
    return _after(chunk, 1, chunks)


def _compare_all(
    build: Build,
    chunks: Iterator[Chunk[T]],
    kind: ItemKind[T],
    encoder: Encoder[Any] | None,
    report: Callable[[int], None],
) -> Iterator[Chunk[T]]:
    count, number = build.last.documents, 0
    if count and build.committed is None:
        message = "%s: resuming after %d documents of an earlier run, which are read again to compare them"
        logger.info(message, build.public, count)
    logged = time.monotonic()
    with open(build.folder / TEXTS, "rb") as file:
        while number < count:
            report(number)
            if time.monotonic() - logged > _LOG_SECONDS:
                logged = time.monotonic()
                logger.info("%s: re-read %s of %s documents", build.public, f"{number:,}", f"{count:,}")
            chunk = next(chunks, None)
            if chunk is None:
                _raise_changed(build, f"ends after {number} documents, and {count} had been read")
            some = chunk.items[: count - number]
            for item, digest in zip(some, kind.digests(some, encoder), strict=True):
                if digest != file.read(DIGEST_BYTES):
                    _raise_changed(build, f"has changed at {kind.described(item)}")
            number += len(some)
            build.previous_state = chunk.state(len(some) - 2) if len(some) > 1 else build.state
            build.state = chunk.state(len(some) - 1)
            chunks = _after(chunk, len(some), chunks)
    if count and build.state.generator != build.last.generator:
        _raise_changed(build, "is shuffled differently, as by another version of torch")
    return chunks


def _after(chunk: Chunk[T], number: int, chunks: Iterator[Chunk[T]]) -> Iterator[Chunk[T]]:
    """Return chunks after the first items of one of them."""
    return chunks if number == len(chunk.items) else chain([chunk.part(number, len(chunk.items))], chunks)


def _raise_changed(build: Build, change: str) -> NoReturn:
    raise CacheError(
        build.public,
        f"its source {change}, since a build of it was interrupted",
        remedy=f"Restore the source and run the same command again. {build.remedy}",
        code="E306",
    )
