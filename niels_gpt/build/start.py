"""The beginning of a build: the lock, what a killed run has left, and what is to be said of it."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from niels_gpt import fileio
from niels_gpt.build.attempts import Attempts
from niels_gpt.build.journal import identity_of
from niels_gpt.build.resume import Build
from niels_gpt.fileio import canonical_json
from niels_gpt.versions import JOURNAL_SUFFIX, discard, resumable

logger = logging.getLogger(__name__)


class NoTextError(ValueError):
    """A source has ended, and nothing of it can be in a cache."""


_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}


@contextmanager
def opened(
    out_dir: str | os.PathLike[str],
    identity: Mapping[str, Any],
    files: Mapping[str, str | None],
    seconds: float,
    fingerprint: str | None,
    from_scratch: str | None = None,
) -> Iterator[Build]:
    """Hold the lock on a cache and yield its build, new or as a killed run left it.

    fingerprint: of the source as it is now, None where nobody knows it; the other arguments are those of Build. A build
        that was committed, and killed before it could say so, needs no replay where the fingerprint is the same; where
        it is another one, that build is done with, and a new one begins.
    from_scratch: the command that starts the build from scratch, for messages.
    A build that ends with NoTextError keeps nothing, so that the next one may read another source.
    Raises: CacheError where somebody else builds, something that is no cache is in the way, or the build is damaged.
    """
    key = sha256(canonical_json(identity)).hexdigest()
    with resumable(out_dir, key) as (work, folder):
        _say_others(folder, identity)
        build = Build(work, folder, identity, files, seconds, from_scratch)
        attempts = Attempts(folder.parent, key, build.last.documents)
        try:
            meta = build.committed_meta()
            if meta is not None and fingerprint is not None:
                build.replays = meta["source"].get("fingerprint") != fingerprint
                if build.replays:
                    build.close()
                    discard(folder)
                    fileio.make_dir(folder)
                    build = Build(work, folder, identity, files, seconds, from_scratch)
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
                    f"{build.last.documents} documents are done and kept: once that is mended, the same build goes on"
                )
                raise OSError(error.errno, f"{error.strerror}. {kept}", error.filename) from error
            raise
        finally:
            build.close()


def _say_others(folder: Path, identity: Mapping[str, Any]) -> None:
    """Log what tells other unfinished builds of this cache from the one that begins."""
    for other in sorted(folder.parent.glob(f"*{JOURNAL_SUFFIX}")):
        theirs = identity_of(other)
        if other != folder and theirs:
            keys = sorted(key for key in {*identity, *theirs} if identity.get(key) != theirs.get(key))
            logger.info("%s: an unfinished build that differs in %s; `cli gc` would remove it", other, ", ".join(keys))
