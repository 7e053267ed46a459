"""CPU time of the Dagster commands that people wait for, against `import dagster` alone.

Run: make bench. A command's time counts its process and all that it starts: steps, the server that forks them,
and what copies their output. The commands take turns, and the median of the rounds counts. `sft/*` is up to date; all
assets of the sample are built in an empty folder each time. "a step imports all" is what the steps did before they were
forked from a server with the modules loaded (docs/decisions/0028).
"""

import ctypes
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 3
SUBREAPER = 36  # prctl: processes whose parent has ended become ours, and are waited for
OTHERS = """
import dagster as dg
from pipelines.definitions import niels_definitions
executor = dg.multiprocess_executor.configured({"start_method": {"forkserver": {"preload_modules": ["dagster"]}}})
defs = dg.Definitions.merge(niels_definitions(), dg.Definitions(executor=executor))
"""
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
IN_PROCESS = ["--config-json", '{"execution": {"config": {"in_process": true}}}']


def materialize(selection: str, module: str = "pipelines.definitions") -> list[str]:
    """Return the arguments of python for a run."""
    return ["-m", "dagster", "asset", "materialize", "--select", selection, "-m", module]


COMMANDS = {
    "import dagster": ["-c", "import dagster"],
    "dagster definitions validate": ["-m", "dagster", "definitions", "validate"],
    "materialize --select sft/*": materialize("sft/*"),
    "the same, a step imports all": materialize("sft/*", "imports_all"),
    "the same in one process": [*materialize("sft/*"), *IN_PROCESS],
}
BUILDS = {
    "ten empty assets with 60 checks": materialize("*", "empty"),
    "all assets of the sample": materialize("*"),
    "all, a step imports all": materialize("*", "imports_all"),
    "all in one process, as make run does": [*materialize("*"), *IN_PROCESS],
}


def main() -> None:
    """Print one line for each command."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    found: dict[str, list[float]] = {name: [] for name in (*COMMANDS, *BUILDS)}
    with tempfile.TemporaryDirectory() as work:
        modules, home = Path(work, "modules"), fresh(Path(work, "home"))
        modules.mkdir()
        (modules / "imports_all.py").write_text(OTHERS)
        (modules / "empty.py").write_text(EMPTY)
        seconds(home, modules, materialize("sft/*"))  # the first one builds
        for _ in range(ROUNDS):
            for name, command in COMMANDS.items():
                found[name].append(seconds(home, modules, command))
            for name, command in BUILDS.items():
                found[name].append(seconds(fresh(Path(work, "fresh")), modules, command))
    units = found["import dagster"]
    print(f"{'command':<40}  CPU seconds  import dagster = 1")
    for name, each in found.items():
        ratio = statistics.median(a / b for a, b in zip(each, units, strict=True))
        print(f"{name:<40}  {statistics.median(each):11.2f}  {ratio:18.1f}")


def fresh(folder: Path) -> Path:
    """Make a folder as a new clone is for Dagster, instead of the one that is there."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.mkdir()
    for name in ("dagster.yaml", "workspace.yaml"):
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def seconds(folder: Path, modules: Path, command: list[str]) -> float:
    """Run python with `command` in `folder`; returns the CPU time of all its processes."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DAGSTER_", "NIELS_GPT_"))}
    environment = {**clean, "PYTHONPATH": f"{ROOT}{os.pathsep}{modules}", "PYTHONWARNINGS": "ignore"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, check=True)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
