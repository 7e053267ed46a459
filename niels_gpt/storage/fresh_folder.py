"""A folder that is whole or does not exist: made beside its place under a hidden name, and renamed at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError


@contextmanager
def fresh_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `out`, which becomes `out` at the end, durably; on failure it is removed.

    So `out` is whole or does not exist. Raises: CacheError where `out` exists and is not an empty folder.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise CacheError(out, "exists already", "a folder that is empty or does not exist", "Name another", code="E704")
    out = out.absolute()
    fileio.make_dir(out.parent)
    work = out.with_name(f".{out.name}.{token_hex(4)}.tmp")
    fileio.make_dir(work)
    try:
        yield work
        fileio.sync_tree(work)
        fileio.rename(work, out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
