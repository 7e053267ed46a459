"""CPU of the commands that people wait for, their children's included, as multiples of `python -c "import numpy"`.

Run: make bench. Each command is a process of its own, with one thread of torch; the commands take turns, and the median
of several rounds of each counts. The caches are the bundled sample's and up to date, but for `demo`, which builds them.
dagster_commands.py has the commands of Dagster.
"""

import importlib.util
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 5
UNIT = "import numpy"
NIELS_GPT = ["-c", "import sys; from niels_gpt.commands import start; sys.exit(start())"]
SAMPLE = ["--source-root", "sample", "--cache-dir", "eight"]
SOURCES = ["fineweb_edu", "wikitext", "roam", "gutenberg", "dolly15k", "oasst1", "trees/oasst1"]
OURS = {
    "--version": ["--version"],
    "--help": ["--help"],
    "list": ["list", "eight/sample"],
    "show": ["show", "eight/sample/sft/oasst1"],
    "verify": ["verify", "eight/sample/sft/oasst1"],
    "verify of all": ["verify", "eight/sample"],
    "build of nothing, 8 caches": ["build", *SOURCES, *SAMPLE],
    "demo": ["demo", "ten"],
}


def main() -> None:
    """Print one line for each command."""
    commands = {UNIT: ["-c", UNIT], "pass": ["-c", "pass"]}
    commands |= {f"niels-gpt {name}": [*NIELS_GPT, *words] for name, words in OURS.items()}
    if importlib.util.find_spec("transformers") is not None:
        commands["import the Llama of transformers"] = ["-c", "from transformers import LlamaForCausalLM"]
    found: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS + 1):  # the first round builds the caches and writes bytecode
            for name in random.Random(number).sample(list(commands), len(commands)):
                shutil.rmtree(Path(folder, "ten"), ignore_errors=True)
                if not number and name.startswith("niels-gpt "):
                    cpu_seconds(folder, [*NIELS_GPT, *OURS["build of nothing, 8 caches"]])
                seconds = cpu_seconds(folder, commands[name])
                found[name] += [seconds] * bool(number)
    unit = statistics.median(found[UNIT])
    print(f"{'command':<42}  CPU seconds  import numpy = 1")
    for name, seconds in found.items():
        print(f"{name:<42}  {statistics.median(seconds):11.2f}  {statistics.median(seconds) / unit:16.1f}")


def cpu_seconds(folder: str, command: list[str]) -> float:
    """Run python with `command` in `folder`; returns its CPU time and its children's."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NIELS_GPT_")}
    clean.pop("PYTHONDONTWRITEBYTECODE", None)
    environment = {**clean, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
