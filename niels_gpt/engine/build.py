"""Builds a cache of any kind from a stream of items, with the Writer of that kind: starts, resumes and commits it.

A resumed build reads the consumed documents again and compares their recorded digests, without tokenizing. If the
source's files are unchanged and its documents keep their order, it reads only the last consumed document again.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from niels_gpt.documents import Partition
from niels_gpt.encoding import DIGEST_BYTES
from niels_gpt.engine.checkpoints import CHECKPOINT_SECONDS, TEXTS, Build
from niels_gpt.engine.journal import (
    Attempts,
    identity_of,
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
    Shuffled,
    chunked,
    encoded,
    first_number,
)
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.errors import CacheError, SourceError
from niels_gpt.storage.fileio import canonical_json
from niels_gpt.storage.meta_json import checked_sha256
from niels_gpt.storage.versions import JOURNAL_SUFFIX, discard, resumable
from niels_gpt.tokenizers.protocol import Tokenizer
from niels_gpt.work import Progress

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOG_SECONDS = 10.0  # between two log lines about documents that are read again
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}


class NoTextError(SourceError, code="E303"):
    """A source has ended, and nothing of it can be in a cache."""


@dataclass(frozen=True)
class How:
    """How a cache is built. Nothing here changes a byte of it."""

    num_threads: int = 1
    """Threads that encode; 0 encodes in the caller's thread."""
    executor: Executor | None = None
    """Encodes instead of threads; left open."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    """Seconds between two checkpoints; 0: one after each batch."""
    committed: Callable[[dict[str, Any]], None] | None = None
    """Called with the meta after the commit. If it fails, the next run finishes this build, and calls it again."""
    progress: Progress | None = None
    """Called with items read, tokens written, and the tokens to expect."""


class Writer(Protocol[T]):
    """Writes the files of one kind of cache from its items. A new one continues from the last checkpoint's numbers."""

    @property
    def kind(self) -> ItemKind[T]:
        """How the engine reads an item."""

    @property
    def encoder(self) -> Encoder[Any] | None:
        """Encodes the texts of the items; None stores items as they are."""

    @property
    def expected(self) -> int | None:
        """Tokens to expect, for the progress; None if unknown."""

    @property
    def full(self) -> bool:
        """Whether no further item is needed."""

    def done(self) -> tuple[int, int]:
        """Return the numbers of items read and tokens written."""

    def waiting(self, item: T) -> Waiting | None:
        """Return the parts of an item that the split needs while it waits; None if the item names its split."""

    def add(self, batch: Batch[T], encoded: Any) -> list[bytes]:
        """Append a batch to the files; return the digests of the consumed items, one or more."""

    def state(self) -> dict[str, Any]:
        """Return the numbers for a checkpoint."""

    def check_kept(self) -> None:
        """Raise NoTextError E303 if no item can be in the cache."""

    def described(self) -> dict[str, Any]:
        """Finish the files; return their keys of meta.json, and the counts."""

    def warn(self, out_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
        """Log warnings about a cache that was just built."""


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
    """Build a cache, commit it at `out_dir` and return its meta. Resumes a killed build.

    items: takes the number of the first item; returns the stream from there on.
    files: the files to write, as for `Build`.
    rule: decides the splits by its seed. Its bound is final once an item was consumed, and is in every checkpoint.
    settings: keys of meta.json that decide the bytes, with `kind`, and with the `claim_of` a partition.
    vocabulary: the tokenizer's keys; None reads them from `tokenizer`.
    identity: further values that must be equal for a build to resume.
    shuffled: None keeps the order.
    Raises: NoTextError E303 if no item can be in the cache; the errors of `open_build`.
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
        if "partition" not in settings:  # other partitions may have text
            writer.check_kept()
        build.checkpoint({**writer.state(), "bound": rule.halves}, ended=True)
        meta = build.committed_meta()
        if meta is None:
            counters = build.state.counters if writer.full else source.counters
            if "partition" in settings and build.state.position:  # tells units of equal text from two files apart
                known["partition"] = {**settings["partition"], "end": dict(build.state.position)}
            meta = write_description(build.work, counters=counters, **known, **writer.described())
            if "partition" not in settings:
                warn_of_share(out_dir, meta)
        # The journal says "sealed" before the commit. After a kill in between, only the commit is left to do.
        build.seal(str(meta["content_sha256"]))
        versions.commit(build.work, out_dir, str(meta["content_sha256"]))
        if how.committed is not None:
            how.committed(meta)
    if "partition" not in settings:  # the seal warns of all units together
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
    """Give the writer all items after the last checkpoint."""

    def report(number: int) -> None:
        if how.progress is not None:
            how.progress(number, writer.done()[1], writer.expected)

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
            report(writer.done()[0])


def claim_of(
    partition: Partition | None, plan: str | None, split_rule: str, rules: Mapping[str, str]
) -> dict[str, Any]:
    """Return the keys of meta.json that differ in a partition; {} for a whole cache.

    plan: sha256 of plan.json. split_rule: of the whole cache. rules: rule of the whole -> rule of a partition.
    Raises: ValueError if only one of partition and plan is given, or if the partition's numbers are impossible.
    """
    if partition is None and plan is None:
        return {}
    if partition is None or plan is None:
        raise ValueError("expected both a partition and the sha256 of its plan, or neither")
    claim = {**Partition.checked(*partition)._asdict(), "plan": checked_sha256(plan, "plan", "a build")}
    return {"partition": claim, "split_rule": rules.get(split_rule, split_rule)}


@contextmanager
def open_build(
    out_dir: str | os.PathLike[str],
    identity: Mapping[str, Any],
    files: Mapping[str, str | None],
    seconds: float,
    source: Source,
) -> Iterator[Build]:
    """Lock a cache and yield its build: a new one, or an unfinished one at its last checkpoint.

    identity, files, seconds: see `Build`.
    A build that was committed, and killed before its journal was removed, is finished without reading the source if the
    source's fingerprint is unchanged; otherwise it is discarded. A build that ends with NoTextError is discarded, so
    that the next one may read another source.
    Raises: CacheError E503 if another process builds here; CacheError E504 if other files are in the way; CacheError
        E505 for a damaged journal or file of the unfinished build; OSError.
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
    """Let the source begin with the last consumed document, if its files are unchanged since the last checkpoint.

    Call it before the source is read, and only if documents keep the order of the files. It does nothing without a
    fingerprint or a position: all consumed documents are compared then.
    """
    fingerprint, counters, position = source.provenance.get("fingerprint"), source.counters, source.position
    if fingerprint is None or position is None or not isinstance(counters, dict):
        return
    build.source, build.position = (fingerprint, dict(counters)), position
    known, count = build.last.seek, build.last.documents
    if build.compares and known is not None and count > 1 and (known.fingerprint, known.before) == build.source:
        build.previous_state = known.apply(count, counters, position)
        build.sought = True


def _check_ended(build: Build, chunks: Iterator[Chunk[T]], kind: ItemKind[T]) -> None:
    """Raise CacheError E306 if a source that had ended has more documents."""
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
            f"its journal names a place in the source where document {count - 1} is not",
            remedy=f"If the files are changing now, run the same command when they no longer do. {build.remedy}",
            code="E306",
        )
    message = "%s: resuming after %d documents of an earlier run, which are not read again: the files are the same"
    logger.info(message, build.public, count)
    return _after(chunk, 1, chunks)


def _compare_consumed(
    build: Build,
    chunks: Iterator[Chunk[T]],
    kind: ItemKind[T],
    encoder: Encoder[Any] | None,
    report: Callable[[int], None],
) -> Iterator[Chunk[T]]:
    """Read the consumed documents again, after a seek only the last one, and compare them. Return the further chunks.

    report: called now and then with the number of documents read again.
    Raises: CacheError E306 with the first document that has changed.
    """
    if build.sought:
        return _compare_last(build, chunks, kind, encoder)
    if not build.compares:
        return chunks
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
    """Return `chunks` with the items of `chunk` from `number` on before them."""
    return chunks if number == len(chunk.items) else chain([chunk.part(number, len(chunk.items))], chunks)


def _raise_changed(build: Build, change: str) -> NoReturn:
    raise CacheError(
        build.public,
        f"its source {change}, since a build of it was interrupted",
        remedy=f"Restore the source and run the same command again. {build.remedy}",
        code="E306",
    )
