"""CPU time and peak memory of the caches in Dagster, as multiples of an empty Dagster project's.

Run: python benchmarks/dagster_runs.py [--only WORD ...] [--rounds N]. The empty project's assets and checks return at
once: one asset, or ten with 60 checks for the rows of all assets. Both sides take turns, and the median of the rounds
counts; the first round writes bytecode and builds the caches, and is left out. CPU time is of all processes of a
command; the peak is of its largest process. "from scratch" builds the bundled sample in an empty folder.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from commands import EMPTY, IN_PROCESS, ROOT, SUBREAPER, environment, materialize

OURS, ONE, TEN = "pipelines.definitions", "one", "empty"
ONE_ASSET = "import dagster as dg\n@dg.asset\ndef a0() -> None: ...\ndefs = dg.Definitions([a0])\n"
Cost = tuple[float, float]
"""CPU seconds, and the peak in MiB."""
MIB = 1024  # of ru_maxrss, in KiB


def load(module: str) -> list[str]:
    """Return the arguments of python that load definitions and resolve their graph."""
    return ["-c", f"from {module} import defs; defs.resolve_asset_graph()"]


def validate(module: str) -> list[str]:
    """Return the arguments of `dagster definitions validate`."""
    return ["-m", "dagster", "definitions", "validate", "-m", module]


ROWS = {
    "loading the definitions": (load(OURS), load(ONE)),
    "definitions validate": (validate(OURS), validate(ONE)),
    "code server, until it answers": (OURS, ONE),
    "one step, up to date": (materialize("sft/oasst1"), materialize("a0", ONE)),
    "all assets, up to date, one process": (
        [*materialize("*"), *IN_PROCESS],
        [*materialize("*", TEN), *IN_PROCESS],
    ),
    "all assets, up to date, a process a step": (materialize("*"), materialize("*", TEN)),
    "all assets, from scratch, one process": (
        [*materialize("*"), *IN_PROCESS],
        [*materialize("*", TEN), *IN_PROCESS],
    ),
    "all assets, from scratch, a process a step": (materialize("*"), materialize("*", TEN)),
}
"""Of each row what ours runs, and the empty project: arguments of python, or the module of a code server."""


def main() -> None:
    """Print one line for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="rows with one of these in the name")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    rows = [(name, side) for name in ROWS if any(word in name for word in args.only) for side in (0, 1)]
    found: dict[tuple[str, int], list[Cost]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as work:
        for number in range(args.rounds + 1):
            for name, side in random.Random(number).sample(rows, len(rows)):
                cost = _cost(Path(work), name, side)
                found[name, side] += [cost] * bool(number)
    print(f"{'':<44}  CPU s  empty = 1  peak MiB  empty = 1")
    for name in dict.fromkeys(name for name, _ in rows):
        (cpu, peak), (cpu_empty, peak_empty) = (
            [statistics.median(each) for each in zip(*found[name, side], strict=True)] for side in (0, 1)
        )
        print(f"{name:<44}  {cpu:5.1f}  {cpu / cpu_empty:9.1f}  {peak:8.0f}  {peak / peak_empty:9.2f}")


def _cost(work: Path, name: str, side: int) -> Cost:
    """Return what a row costs on one side, in a folder of its own that has the caches unless it is from scratch."""
    folder = work / ("fresh" if "scratch" in name else "built")
    if "scratch" in name:
        shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        folder.mkdir()
        shutil.copyfile(ROOT / "dagster.yaml", folder / "dagster.yaml")
        (folder / f"{ONE}.py").write_text(ONE_ASSET)
        (folder / f"{TEN}.py").write_text(EMPTY)
        if "scratch" not in name:
            cost(folder, [*materialize("*"), *IN_PROCESS])
    what = ROWS[name][side]
    return server_cost(folder, what) if isinstance(what, str) else cost(folder, what)


def cost(folder: Path, command: list[str], until: Callable[[], object] | None = None) -> Cost:
    """Run python with `command` in a folder; return what all its processes take. until: then it is killed.

    Raises: subprocess.CalledProcessError for a command that fails.
    """
    with open(os.devnull, "wb") as nothing:
        how = {"stdout": nothing, "stderr": nothing}
        started = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment(ROOT, folder), **how)
    if until is not None:
        until()
        started.kill()
    seconds, peak = 0.0, 0
    with suppress(ChildProcessError):
        while True:
            pid, status, used = os.wait4(-1, 0)
            if pid == started.pid and status and until is None:
                raise subprocess.CalledProcessError(status, command)
            seconds, peak = seconds + used.ru_utime + used.ru_stime, max(peak, used.ru_maxrss)
    return seconds, peak / MIB


def server_cost(folder: Path, module: str) -> Cost:
    """Return what a code server takes until it accepts a connection."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def answers() -> None:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)

    return cost(folder, ["-m", "dagster", "api", "grpc", "-m", module, "--port", str(port)], answers)


if __name__ == "__main__":
    main()
