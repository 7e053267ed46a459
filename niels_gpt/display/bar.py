"""Progress of long work: a bar on a terminal or in a notebook; `progress_lines` for log files.

with progress_bar("notes") as progress:
    build_pretrain_cache(..., progress=progress)
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from niels_gpt.work import Progress

LINE_EVERY_S = 10.0
_drawing: list[int] = []
"""For each bar of this program on the terminal, the process that draws it; forked workers inherit the list."""
_BYTES = ("B", "bytes")


@contextmanager
def progress_bar(title: str, unit: str = "tok", items: str = "") -> Iterator[Progress]:
    """Yield a progress callback that draws a bar with speed and time left on a terminal or in a notebook.

    unit: counted by the bar; "B" for bytes. items: counted beside it; "" for none, "B" to show bytes per second.
    A notebook without ipywidgets shows a line of text.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm warns if ipywidgets is missing
        from tqdm.auto import tqdm

    is_notebook = "ipykernel" in sys.modules
    disable = False if is_notebook else None  # None: only on a terminal; a notebook's stderr is none
    named = unit if unit == "B" else f" {unit}"
    with tqdm(desc=title, unit=named, unit_scale=unit in ("B", "tok"), leave=is_notebook, disable=disable) as bar:
        speed = _Speed()
        if not bar.disable:
            _drawing.append(os.getpid())

        def show(finished: int, done: int, total: int | None) -> None:
            if total != bar.total:
                bar.reset(total)  # only this tells a widget its maximum
                bar.total = total  # reset() keeps the old total for None
            if not speed.update(finished, done):  # the bar measures its own speed from here
                bar.initial = bar.n = bar.last_print_n = done
                bar.start_t = bar.last_print_t = time.time()
                bar.refresh()
            if items in _BYTES:
                bar.set_postfix_str(_rate(speed.items, items), refresh=False)
            elif items:
                bar.set_postfix({items: finished}, refresh=False)
            bar.update(done - bar.n)

        try:
            yield show
        finally:
            if not bar.disable:
                _drawing.pop()


@contextmanager
def above_bars() -> Iterator[None]:
    """Clear the bars on the terminal while a line is printed, so that it stands above them."""
    if os.getpid() not in _drawing:
        yield
        return
    from tqdm import tqdm

    with tqdm.external_write_mode(file=sys.stderr):  # it holds the lock of all bars
        yield


def progress_lines(write: Callable[[str], object], unit: str = "tok", items: str = "") -> Progress:
    """Return a progress callback that writes a line every ten seconds. unit, items: see `progress_bar`."""
    last, speed = time.monotonic(), _Speed()

    def show(finished: int, done: int, total: int | None) -> None:
        nonlocal last
        is_measured, now = speed.update(finished, done), time.monotonic()
        if now - last < LINE_EVERY_S:
            return
        last = now
        parts = [_amount(done, unit)] if not total else [f"{_amount(done, unit)} of {total:,}", f"{done / total:.0%}"]
        if items and items not in _BYTES:
            parts.append(f"{finished:,} {items}")
        if is_measured:
            parts.append(_rate(speed.units, unit))
            if items in _BYTES:
                parts.append(_rate(speed.items, items))
            if total is not None and speed.units > 0:
                parts.append(f"{(total - done) / speed.units:,.0f} s left")
        write(", ".join(parts))

    return show


class _Speed:
    """Units and items per second since the first reported work.

    Work of an earlier run and preparations, such as loading a model, do not count.
    """

    units = items = 0.0

    def __init__(self) -> None:
        self._begin: tuple[float, int, int] | None = None
        self._before: int | None = None

    def update(self, finished: int, done: int) -> bool:
        """Take a report. Returns False until a speed can be measured."""
        now, before = time.monotonic(), self._before
        self._before = done
        if before is None or done < before:  # the first report, or the count starts again: a seal after a build
            self._begin = None
            return False
        if self._begin is None:
            if done > before:
                self._begin = now, finished, done
            return False
        then, finished_then, done_then = self._begin
        seconds = max(now - then, 1e-9)
        self.units, self.items = (done - done_then) / seconds, (finished - finished_then) / seconds
        return True


def _amount(count: int, unit: str) -> str:
    return f"{count:,} {'bytes' if unit in _BYTES else unit}"


def _rate(speed: float, unit: str) -> str:
    return f"{speed / 1e6:,.1f} MB/s" if unit in _BYTES else f"{speed:,.0f} {unit}/s"
