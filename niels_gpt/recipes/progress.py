"""Progress of a command, for whoever watches it on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Callable[[int, int | None], None] | None]:
    """Yield a progress callback of done and total, None if that is not known: a bar on a terminal, None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=what, unit=unit, unit_scale=unit == "B", leave=False) as bar:

        def told(done: int, total: int | None) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield told
