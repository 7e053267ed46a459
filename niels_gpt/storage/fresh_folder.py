"""A folder that is complete or does not exist: written beside its place under a hidden name, and renamed at the end."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks import OPEN, hold_folder, unless_held
from niels_gpt.storage.versions import refuse_among_versions

logger = logging.getLogger(__name__)


@contextmanager
def fresh_folder(out: Path, *, sources: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield a hidden folder beside `out`, which becomes `out` at the end, durably. On failure it is removed.

    sources: folders that `out` is made from.
    Warns W704 of hidden folders that stopped runs left. They stay, because no lock shows whether another machine still
    writes one.
    Raises: CacheError E704 if `out` exists and is not an empty folder, or lies in a source or in `.versions`.
    """
    refuse_among_versions(out)
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise CacheError(out, "exists already", "a folder that is empty or does not exist", "Name another", code="E704")
    out = out.absolute()
    for source in sources:
        if source.resolve() in out.resolve().parents:
            raise CacheError(out, f"lies in {source}, which it is made from", "a folder elsewhere", code="E704")
    fileio.make_dir(out.parent)
    if left := _left_by_stopped_runs(out):
        logger.warning(
            "%s: runs that were stopped left folders beside it; links in them keep files on the disk. Unless a run "
            "still writes them, remove them: %s",
            *(out, shlex.join(["rm", "-r", *map(str, left)])),
            extra={"code": "W704"},
        )
    work = out.with_name(f".{out.name}.{token_hex(4)}.tmp")
    fileio.make_dir(work)
    try:
        with hold_folder(work):
            yield work
            fileio.sync_tree(work)
            fileio.rename(work, out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _left_by_stopped_runs(out: Path) -> list[Path]:
    """Return the hidden folders of `out` that no process of this machine holds."""
    own, left = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.tmp"), []
    try:
        found = sorted(path for path in out.parent.iterdir() if own.fullmatch(path.name))
    except PermissionError:  # a folder that may be written and not listed
        return []
    for path in found:
        if path.is_dir() and not path.is_symlink():
            with unless_held(path) as why:
                left += [path] if why != OPEN else []
    return left
