"""Seconds of the Dagster commands that people wait for, with everything up to date, against `import dagster` alone.

Run: make bench. Each command is a process of its own, the commands in turn, the best of several rounds of each. The
last row is the same work with the processes that Dagster starts by default (spawn), which import everything again.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 3
MATERIALIZE = ["-m", "dagster", "asset", "materialize", "--select", "sft/*", "-m"]
SPAWN = """
import dagster as dg
from pipelines.definitions import niels_definitions
defs = dg.Definitions.merge(niels_definitions(), dg.Definitions(executor=dg.multiprocess_executor))
"""


def main() -> None:
    """Print one line for each command."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("dagster.yaml", "workspace.yaml"):
            Path(folder, name).write_bytes((ROOT / name).read_bytes())
        Path(folder, "with_spawn.py").write_text(SPAWN)
        commands = {
            "import dagster": ["-c", "import dagster"],
            "dagster definitions validate": ["-m", "dagster", "definitions", "validate"],
            "dagster asset materialize --select sft/*": [*MATERIALIZE, "pipelines.definitions"],
            "the same with spawn": [*MATERIALIZE, "with_spawn"],
        }
        seconds(folder, commands["dagster asset materialize --select sft/*"])  # the first one builds
        best = dict.fromkeys(commands, float("inf"))
        for _ in range(ROUNDS):
            for name, command in commands.items():
                best[name] = min(best[name], seconds(folder, command))
    unit = best["import dagster"]
    print(f"{'command':<42}  seconds  import dagster = 1")
    for name, found in best.items():
        print(f"{name:<42}  {found:7.2f}  {found / unit:18.1f}")


def seconds(folder: str, command: list[str]) -> float:
    """Run python with `command` in `folder`; returns the wall time."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DAGSTER_", "NIELS_GPT_"))}
    environment = {**clean, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "PYTHONWARNINGS": "ignore"}
    begin = time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, check=True)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
