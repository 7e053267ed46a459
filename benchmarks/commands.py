"""CPU time of the commands that people wait for, as multiples of `python -c "import numpy"`.

Run: python benchmarks/commands.py [--only WORD ...] [--before CHECKOUT] [--rounds N]. A command's time counts its
process and all that it starts: Dagster's steps, the server that forks them, and what copies their output. The commands
take turns, and the median of the rounds counts; the first round writes bytecode and builds the caches, and is left out.
Then the bundled sample's caches are up to date, but for `demo` and the runs of all assets: they build in an empty
folder. --before: another checkout, whose commands take turns with ours.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUBREAPER = 36  # prctl: processes whose parent has ended become ours, and are waited for
UNIT = "import numpy"
NIELS_GPT = ["-c", "import sys; from niels_gpt.commands import start; sys.exit(start())"]
SAMPLE = ["--source-root", "sample", "--cache-dir", "eight"]
SOURCES = ["fineweb_edu", "wikitext", "roam", "gutenberg", "dolly15k", "oasst1", "trees/oasst1"]
IN_PROCESS = ["--config-json", json.dumps({"execution": {"config": {"in_process": True}}})]
EMPTY = """
import dagster as dg
specs = [[dg.AssetCheckSpec(f"c{n}", asset=f"a{a}") for n in range(6)] for a in range(10)]
def asset(a):
    @dg.asset(name=f"a{a}")
    def made() -> None: ...
    return made
def check(a):
    @dg.multi_asset_check(name=f"check_a{a}", specs=specs[a])
    def checked():
        yield from (dg.AssetCheckResult(passed=True, asset_key=s.asset_key, check_name=s.name) for s in specs[a])
    return checked
executor = dg.multiprocess_executor.configured({"start_method": {"forkserver": {}}})
made, checked = [[*map(each, range(10))] for each in (asset, check)]
defs = dg.Definitions(assets=made, asset_checks=checked, executor=executor)
"""


def materialize(selection: str, module: str = "pipelines.definitions") -> list[str]:
    """Return the arguments of python for a run."""
    return ["-m", "dagster", "asset", "materialize", "--select", selection, "-m", module]


FIXED = {
    UNIT: ["-c", UNIT],
    "from transformers import LlamaForCausalLM": ["-c", "from transformers import LlamaForCausalLM"],
    "dagster: import": ["-c", "import dagster"],
    "dagster: ten empty assets with 60 checks": materialize("*", "empty"),
}
"""What others take, whatever the checkout."""
COMMANDS = {
    "niels-gpt --version": [*NIELS_GPT, "--version"],
    "niels-gpt --help": [*NIELS_GPT, "--help"],
    "niels-gpt list, 8 caches": [*NIELS_GPT, "list", "eight/sample"],
    "niels-gpt show, one cache": [*NIELS_GPT, "show", "eight/sample/sft/oasst1"],
    "niels-gpt verify, one cache": [*NIELS_GPT, "verify", "eight/sample/sft/oasst1"],
    "niels-gpt verify, 8 caches": [*NIELS_GPT, "verify", "eight/sample"],
    "niels-gpt build, 8 caches up to date": [*NIELS_GPT, "build", *SOURCES, *SAMPLE],
    "niels-gpt demo": [*NIELS_GPT, "demo", "ten"],
    "dagster: definitions validate": ["-m", "dagster", "definitions", "validate"],
    "dagster: sft/*, up to date": materialize("sft/*"),
    "dagster: all assets of the sample": materialize("*"),
}
NEW = {
    "dagster: sft/*, up to date, one process": [*materialize("sft/*"), *IN_PROCESS],
    "dagster: all assets, one process, as make run": [*materialize("*"), *IN_PROCESS],
}
"""Not asked of --before."""


def main() -> None:
    """Print one line for each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="commands with one of these in the name"
    )
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    trees = {"now": ROOT} | ({"before": args.before.resolve()} if args.before else {})
    chosen = [(name, "now") for name in _chosen({**FIXED, **COMMANDS, **NEW}, args.only)]
    chosen += [(name, "before") for name in _chosen(COMMANDS, args.only) if args.before]
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as work:
        for number in range(args.rounds + 1):
            for name, tree in random.Random(number).sample(chosen, len(chosen)):
                folder = _folder(Path(work, tree), trees[tree], name)
                taken = cpu_seconds(folder, trees[tree], {**FIXED, **COMMANDS, **NEW}[name])
                seconds[name, tree] += [taken] * bool(number)
    unit = statistics.median(seconds[UNIT, "now"])
    print(f"{'command':<48}  CPU seconds  import numpy = 1  before")
    for name, _ in filter(lambda each: each[1] == "now", chosen):
        now, before = (seconds[name, tree] for tree in ("now", "before"))
        multiple = f"{statistics.median(before) / unit:8.1f}" if before else ""
        print(f"{name:<48}  {statistics.median(now):11.2f}  {statistics.median(now) / unit:16.1f}{multiple}")


def _chosen(commands: Iterable[str], words: list[str]) -> list[str]:
    missing = {name for name in ("transformers", "dagster") if importlib.util.find_spec(name) is None}
    return [
        name
        for name in commands
        if name == UNIT or (any(word in name for word in words) and not any(each in name for each in missing))
    ]


def _folder(work: Path, tree: Path, name: str) -> Path:
    """Return the folder that a command runs in: a new one for a build of everything, else one with caches."""
    if name == "niels-gpt demo":
        shutil.rmtree(work / "ten", ignore_errors=True)
    is_new = "all assets" in name or "empty assets" in name
    folder = work / "fresh" if is_new else work
    if is_new:
        shutil.rmtree(folder, ignore_errors=True)
    if not (folder / "dagster.yaml").exists():  # as a fresh clone
        folder.mkdir(parents=True, exist_ok=True)
        for each in ("dagster.yaml", "workspace.yaml"):
            shutil.copyfile(tree / each, folder / each)
        (folder / "empty.py").write_text(EMPTY)
    if name.startswith("niels-gpt") and not (work / "eight").exists():
        cpu_seconds(work, tree, COMMANDS["niels-gpt build, 8 caches up to date"])
    return folder


def cpu_seconds(folder: Path, tree: Path, command: list[str]) -> float:
    """Run python with `command` in a folder, the code from `tree`; returns the CPU time of all its processes."""
    how = {"cwd": folder, "env": environment(tree, folder), "capture_output": True}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, **how)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def environment(tree: Path, folder: Path) -> dict[str, str]:
    """Return the environment of a command that runs the code of a checkout, and modules in a folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NIELS_GPT_", "DAGSTER_"))}
    clean.pop("PYTHONDONTWRITEBYTECODE", None)
    path = f"{tree}{os.pathsep}{folder}"
    return {**clean, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
