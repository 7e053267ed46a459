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
from pathlib import Path
from typing import Any, TypeVar

from niels_gpt.builders.build import TEXTS, Build
from niels_gpt.builders.journal import Attempts, identity_of
from niels_gpt.builders.meta_keys import Source
from niels_gpt.builders.source import ItemKind, SourceState
from niels_gpt.encoding import DIGEST_BYTES, TextEncoder
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import canonical_json
from niels_gpt.storage.versions import JOURNAL_SUFFIX, discard, resumable

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LOG_SECONDS = 10.0  # between two log lines about documents that are read again
_REPORT_EVERY = 1024  # documents that are read again
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}


class NoTextError(ValueError):
    """A source has ended, and nothing of it can be in a cache."""

    code = "E303"


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
            if isinstance(error, OSError) and error.errno in _CANNOT_WRITE and build.last.documents:
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
            logger.info("%s: an unfinished build that differs in %s; `cli gc` would remove it", other, ", ".join(keys))


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
    documents: Iterator[tuple[T, SourceState]],
    kind: ItemKind[T],
    encoder: TextEncoder,
    report: Callable[[int], None],
) -> None:
    """Read again what was consumed at the last checkpoint, or only its last document after a seek, and compare it.

    report: called now and then with the number of documents read again. Raises: CacheError naming the first document
    that has changed.
    """
    if build.sought:
        _compare_last(build, documents, kind, encoder)
    elif build.compares:
        _compare_all(build, documents, kind, encoder, report)


def check_ended(build: Build, documents: Iterator[tuple[T, SourceState]], kind: ItemKind[T]) -> None:
    """Raise CacheError if a source that had ended has more documents."""
    if build.last.ended and (document := next(documents, None)) is not None:
        _raise_changed(build, f"had ended, and has one more document, {kind.described(document[0])}")


def _compare_last(
    build: Build, documents: Iterator[tuple[T, SourceState]], kind: ItemKind[T], encoder: TextEncoder
) -> None:
    count, known = build.last.documents, build.last.seek
    assert known is not None
    with open(build.folder / TEXTS, "rb") as file:
        file.seek((count - 1) * DIGEST_BYTES)
        expected = file.read(DIGEST_BYTES)
    document, build.state = next(documents, (None, build.previous_state))
    if document is None or kind.digest(document, encoder) != expected or not known.leads_to(build.state):
        raise CacheError(
            build.folder,
            f"the place in the source that its journal names is not that of document {count - 1}",
            remedy=f"If the files are changing now, run the same command when they no longer do. {build.remedy}",
            code="E306",
        )
    message = "%s: resuming after %d documents of an earlier run, which are not read again: the files are the same"
    logger.info(message, build.public, count)


def _compare_all(
    build: Build,
    documents: Iterator[tuple[T, SourceState]],
    kind: ItemKind[T],
    encoder: TextEncoder,
    report: Callable[[int], None],
) -> None:
    count = build.last.documents
    if count and build.committed is None:
        message = "%s: resuming after %d documents of an earlier run, which are read again to compare them"
        logger.info(message, build.public, count)
    logged = time.monotonic()
    with open(build.folder / TEXTS, "rb") as file:
        for number in range(count):
            build.previous_state = build.state
            document, build.state = next(documents, (None, build.state))
            if document is None:
                _raise_changed(build, f"ends after {number} documents, and {count} had been read")
            elif kind.digest(document, encoder) != file.read(DIGEST_BYTES):
                _raise_changed(build, f"has changed at {kind.described(document)}")
            if number % _REPORT_EVERY == 0:
                report(number)
                if time.monotonic() - logged > _LOG_SECONDS:
                    logged = time.monotonic()
                    logger.info("%s: re-read %s of %s documents", build.public, f"{number:,}", f"{count:,}")
    if count and build.state.generator != build.last.generator:
        _raise_changed(build, "is shuffled differently, as by another version of torch")


def _raise_changed(build: Build, change: str) -> None:
    raise CacheError(
        build.public,
        f"its source {change}, since a build of it was interrupted",
        remedy=f"Restore the source and run the same command again. {build.remedy}",
        code="E306",
    )
