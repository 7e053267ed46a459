"""A progress bar for builds from Python: a widget in a notebook, a line on a terminal, nothing elsewhere.

with progress_bar("notes") as progress:
    build_pretrain_cache(..., progress=progress)
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from niels_gpt.progress import Progress


@contextmanager
def progress_bar(title: str, unit: str = "tok", items: str = "") -> Iterator[Progress]:
    """Yield a progress callback that draws a bar with speed and time left.

    unit: of what the bar counts, "B" for bytes. items: the name of the items that are shown beside it, "" for none.
    A notebook without ipywidgets gets a line of text.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about ipywidgets, without which the bar is text
        from tqdm.auto import tqdm

    is_notebook = "ipykernel" in sys.modules
    disable = False if is_notebook else None  # None: drawn on a terminal alone; a notebook's stderr is none
    with tqdm(desc=title, unit=unit, unit_scale=unit in ("B", "tok"), leave=is_notebook, disable=disable) as bar:

        def show(finished: int, done: int, total: int | None) -> None:
            if total != bar.total:
                bar.reset(total)  # a widget learns its maximum from this alone
                bar.total = total  # also where it is None
            if items:
                bar.set_postfix({items: finished}, refresh=False)
            bar.update(done - bar.n)

        yield show
