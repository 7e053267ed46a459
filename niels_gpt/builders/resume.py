"""Starts or resumes a build. Decides what a resumed build reads again, and when an unfinished build is discarded.

A resumed build compares each consumed document with the digest recorded of it, without tokenizing it. If the files of
the source are unchanged and its documents keep their order, only the last consumed document is read again.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from niels_gpt.builders.build import TEXTS, Build
from niels_gpt.builders.journal import Attempts, identity_of
from niels_gpt.builders.meta_keys import OF_ANOTHER_VERSION, Source, is_of_this_version
from niels_gpt.builders.source import Chunk, Encoder, ItemKind
from niels_gpt.encoding import DIGEST_BYTES
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError, SourceError
from niels_gpt.storage.fileio import canonical_json
from niels_gpt.storage.versions import JOURNAL_SUFFIX, discard, resumable

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LOG_SECONDS = 10.0  # between two log lines about documents that are read again
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}


class NoTextError(SourceError, code="E303"):
    """A source has ended, and nothing of it can be in a cache."""


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


def seek(build: Build, source: Source) -> None:
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


def compare_consumed(
    build: Build,
    chunks: Iterator[Chunk[T]],
    kind: ItemKind[T],
    encoder: Encoder[Any],
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


def check_ended(build: Build, chunks: Iterator[Chunk[T]], kind: ItemKind[T]) -> None:
    """Raise CacheError if a source that had ended has more documents."""
    if build.last.ended and (chunk := next(chunks, None)) is not None:
        _raise_changed(build, f"had ended, and has one more document, {kind.described(chunk.items[0])}")


def _compare_last(
    build: Build, chunks: Iterator[Chunk[T]], kind: ItemKind[T], encoder: Encoder[Any]
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
    encoder: Encoder[Any],
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
