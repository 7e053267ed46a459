"""Runs of a trainer in processes of their own: killed at a step, continued, and compared by what each step trained on.

A script that such a run starts makes a `Log` and calls `log.step` once a step. It gets the folder and its own arguments
in argv, and its rank as torchrun would give it. `run` starts it, `steps` reads what all ranks wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS, KILLED_AT = 40, 17
SECONDS = 300


class Log:
    """What one rank trained on, a line for each step, in the folder of a run."""

    def __init__(self, folder: str | Path) -> None:
        self.rank, self.ranks = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
        )
        self.kill_at = float(os.environ.get("KILL_AT", "inf"))
        self.file = open(Path(folder) / f"rank-{self.rank}.jsonl", "a")

    def step(self, number: int, rows: Any, loss: float, targets: int) -> None:
        """Write the sha256 of each row of this rank's batch, its mean loss, and how many targets that is a mean of.

        rows: a list of lists of tensors, such as [[x, y]] or one [x, y] for each micro-batch: int64 [B, ...] each.
        """
        hashes = [
            hashlib.sha256(b"".join(column[row].contiguous().numpy().tobytes() for column in batch)).hexdigest()
            for batch in rows
            for row in range(len(batch[0]))
        ]
        line = {"step": number, "ranks": self.ranks, "rows": hashes, "targets": targets}
        line["loss"] = loss * targets if targets else 0.0
        print(json.dumps(line), file=self.file, flush=True)
        if number > self.kill_at:  # a busy machine kills late: without this the run could save again, or end
            time.sleep(SECONDS)


def run(script: str | Path, folder: Path, *arguments: Any, ranks: int = 1, kill_at: int | None = None) -> None:
    """Run a script in a process for each rank; with kill_at, kill all between that step and the end of the next."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, str(script), str(folder), *map(str, arguments)]
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = []
    for rank in range(ranks):
        of_rank = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        of_rank["KILL_AT"] = str(kill_at or "inf")
        if ranks == 1:  # as a user starts it, without torchrun
            of_rank = {name: of_rank[name] for name in of_rank if name not in (*world, "RANK", "LOCAL_RANK")}
        with open(folder / f"output-{rank}.txt", "a") as output:
            started.append(subprocess.Popen(command, env=of_rank, stdout=output, stderr=output, start_new_session=True))
    try:
        _wait(started, folder, kill_at)
    finally:
        for process in started:
            if process.poll() is None or kill_at is not None:
                _kill(process)
            process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank, and the workers that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _wait(started: list[subprocess.Popen[bytes]], folder: Path, kill_at: int | None) -> None:
    """Return when all have ended well, or when the step to kill at is in a log; else raise, with their output."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        codes = [process.poll() for process in started]
        if kill_at is not None and max(steps(folder), default=0) >= kill_at:
            return
        if any(codes) or None not in codes:
            break
        time.sleep(0.02)
    said = "\n".join((folder / f"output-{rank}.txt").read_text() for rank in range(len(started)))
    assert codes == [0] * len(started), f"exit statuses {codes}, None: still running after {SECONDS} s\n{said}"
    assert kill_at is None, f"ended before step {kill_at}\n{said}"


def steps(folder: Path) -> dict[int, tuple[str, float]]:
    """Return for each step that all ranks logged the sha256 of its global batch, rank after rank, and the mean loss.

    A step that was run again after a kill counts as it was run last, also on another number of ranks.
    """
    ranks = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        ranks.append({line["step"]: line for line in lines})
    found = {}
    for step, line in sorted(ranks[0].items() if ranks else ()):
        world = line["ranks"]  # files of further ranks are of an earlier run of the folder
        parts = [rank[step] for rank in ranks[:world] if rank.get(step, {}).get("ranks") == world]
        if len(parts) < world:
            continue
        rows = "".join(row for part in parts for row in part["rows"])
        mean = sum(part["loss"] for part in parts) / max(1, sum(part["targets"] for part in parts))
        found[step] = hashlib.sha256(rows.encode()).hexdigest(), mean
    return found
