"""Let commands and readers meet folders that were made to harm them, in a process with limits on time and memory.

A module with a table of attacks hands its own name to the fixture `attack_server`, and has these names:

    def build(root: Path) -> None        make the good folders below root, once
    ATTACKS: dict[str, Attack]           what is done to a copy of them
    PROBES: dict[str, Probe]             what then meets the copy, in this order: those that write come last
    IMPORTS: tuple[str, ...]             large modules that are imported before the first attack; they start no threads

`python tests/support/attacks.py MODULE [PATTERN] [-v]` prints a line for each meeting, the size of the table,
and the worst time and memory. The time is the processor's, so that a busy machine fails no test; a hang is killed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import importlib
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where this file is run as a program
from support import TESTS

SECONDS = 10
HANGS = 30
MAX_BYTES = 1 << 30
_MAX_OUTPUT = 1 << 20
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Attack:
    """One way to harm who reads a folder."""

    make: Callable[[Path, Path], Any]
    """Takes the folder that is attacked, and a folder with good files beside it that nobody may look into."""
    refused_by: tuple[str, ...] = ()
    """Patterns of probes, such as "reader *", that have to refuse the folder; the others may, or may find it good."""
    message: str = ""
    """A pattern that the messages of those have."""


@dataclass(frozen=True)
class Probe:
    """One command or reader."""

    call: Callable[[Path], Any]
    """Takes the folder. Returns an exit status, or anything but an int where all is good; may print."""
    writes: bool = False
    """False: nothing in the folder may be changed."""
    errors: tuple[type[Exception], ...] = (ValueError, FileNotFoundError)
    """The documented ones; CacheError is a ValueError."""


@dataclass(frozen=True)
class Outcome:
    """What became of one probe."""

    probe: str
    refused: bool = False
    message: str = ""
    """The error, or what a command printed."""
    faults: list[str] = field(default_factory=list)
    """Why it is not as documented."""
    seconds: float = 0.0
    peak_bytes: int = 0


def is_one_of(name, patterns):
    """Whether a name fits a pattern."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class Server:
    """A process that imports what a table needs before its first attack, and forks a child for each attack."""

    def __init__(self):
        command = [sys.executable, __file__, "--serve"]
        # numpy and pyarrow start threads as they are imported, unless told otherwise; pyarrow's pool reserves a GiB.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        env["ARROW_DEFAULT_MEMORY_POOL"] = "system"
        env["CUDA_VISIBLE_DEVICES"] = ""  # what a process has of a GPU is more than an attack may take
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._outcomes = []

    def outcomes_of(self, module, attack, probes=()):
        """Let probes meet an attack of a module's table, by default all of them."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps([module, attack, probes])}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the server ended: {self._process.wait()}"
        outcomes = [Outcome(**found) for found in json.loads(line)]
        self._outcomes += [(f"{module}, {attack}", outcome) for outcome in outcomes]
        return outcomes

    def check(self, module, attack, probes=()):
        """Fail unless each probe that meets an attack ends as documented, and those refuse it that have to."""
        table = importlib.import_module(module)
        outcomes = self.outcomes_of(module, attack, probes)
        found = [f"{outcome.probe}: {fault}" for outcome in outcomes for fault in outcome.faults]
        said = table.ATTACKS[attack]
        for pattern in said.refused_by:
            assert fnmatch.filter(table.PROBES, pattern), f"no probe is called {pattern}"
            for outcome in [each for each in outcomes if fnmatch.fnmatch(each.probe, pattern)]:
                if not outcome.refused:
                    found.append(f"{outcome.probe}: does not refuse it: {outcome.message[:300]}")
                elif not re.search(said.message, outcome.message):
                    found.append(f"{outcome.probe}: {outcome.message[:300]!r} has no {said.message!r}")
        assert not found, f"{attack}:\n" + "\n".join(found)

    def close(self):
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def report(self):
        """Return the number of meetings, and their worst time and memory."""
        slowest = max(self._outcomes, key=lambda pair: pair[1].seconds)
        largest = max(self._outcomes, key=lambda pair: pair[1].peak_bytes)
        return (
            f"{len(self._outcomes)} meetings, {sum(o.refused for _, o in self._outcomes)} refused; "
            f"slowest {slowest[1].seconds:.2f} s ({slowest[0]}: {slowest[1].probe}), "
            f"largest {largest[1].peak_bytes / 2**20:,.0f} MiB ({largest[0]}: {largest[1].probe})"
        )


@contextlib.contextmanager
def serving():
    """Run a server; its report is printed at the end, for pytest -s."""
    server = Server()
    try:
        yield server
    finally:
        server.close()
        if server._outcomes:
            print(f"\n{server.report()}")


# --- in the server ----------------------------------------------------------------------------------------------------

_forbidden = None
_led_outside = []


def _note(event, arguments):
    if _forbidden is None or event not in ("open", "os.listdir", "os.scandir") or not arguments:
        return
    path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
    if path.count("/") > 100:  # of a deep folder, where this would take longer than what it looks at
        return
    refuses_links = event == "open" and bool(arguments[2] & os.O_NOFOLLOW)
    if not os.path.isabs(path) or (refuses_links and os.path.islink(path)):
        return
    if os.path.realpath(path).startswith(_forbidden):
        _led_outside.append(path)


def _serve():
    tables = {}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.addaudithook(_note)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        place = Path(name).resolve()
        for line in sys.stdin:
            module, attack, probes = json.loads(line)
            if module not in tables:
                tables[module] = _prepared(module, place / module)
            outcomes = _met(tables[module], attack, probes, place / module, place / "a")
            subprocess.run(["chmod", "-R", "u+rwx", str(place / "a")], check=False)
            subprocess.run(["rm", "-rf", str(place / "a")], check=True)  # also a folder that is too deep for shutil
            answers.write(json.dumps([asdict(outcome) for outcome in outcomes]) + "\n")
            answers.flush()


def _prepared(module, good):
    """Return a table whose good folders were built, and whose modules are imported."""
    table = importlib.import_module(module)
    _import_too(table.IMPORTS)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, "the good folders were not built"
    else:
        _end_with(lambda: table.build(good))
    return table


def _end_with(call):
    status = 1
    try:
        call()
        status = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        os._exit(status)


def _met(table, attack, probes, good, place):
    root, outside = place / "root", place / "outside"
    shutil.copytree(good, root, symlinks=True)
    shutil.copytree(good, outside, symlinks=True)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, f"{attack}: could not be made"
    else:
        _end_with(lambda: table.ATTACKS[attack].make(root, outside))
    left, outcomes = probes or list(table.PROBES), []
    while left:
        found = _until_one_fails(table.PROBES, left, root, outside)
        outcomes += found
        left = left[len(found) :]
    return outcomes


def _until_one_fails(probes, names, root, outside):
    """Let probes meet the folder in one child, until there is none left or the child has to be killed."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        os.setsid()
        _end_with(lambda: _meet_all(probes, names, root, outside, writes))
    os.close(writes)
    found = []
    for line in map(json.loads, _lines(reads)):
        if isinstance(line, dict):
            found.append(Outcome(**line))
        else:
            _import_too(line)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with whatever it has started
    os.waitpid(child, 0)
    if len(found) < len(names):
        why = f"no answer within {HANGS} s, or its process was killed"
        found.append(Outcome(names[len(found)], faults=[why], seconds=float(HANGS)))
    return found


def _import_too(modules):
    """Import what a child has imported, so that the next one finds it."""
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # a child's collections write to no page of ours
    assert len(os.listdir("/proc/self/task")) == 1, f"one of them starts threads, which a fork loses: {modules}"


def _lines(reads):
    """Yield the lines of a pipe until its end, or until there is none for too long."""
    rest = b""
    with os.fdopen(reads, "rb", buffering=0) as answers:
        while select.select([answers], [], [], HANGS)[0] and (content := answers.read(1 << 16)):
            *lines, rest = (rest + content).split(b"\n")
            yield from lines


def _meet_all(probes, names, root, outside, answers):
    warnings.simplefilter("ignore")
    limit = 1024 * _status("VmData") + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    output = os.open(root.parent / "output", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    before, trees = set(sys.modules), (_tree(root), _tree(outside))
    for name in names:
        os.ftruncate(output, 0)
        outcome = _meet(name, probes[name], root, outside, output)
        now = _tree(root), _tree(outside)
        for what, old, new in zip(("the folder", "what is outside"), trees, now, strict=True):
            if old != new and not (probes[name].writes and what == "the folder"):
                outcome.faults.append(f"changed {what}: {sorted(set(old) ^ set(new))[:5]}")
        trees = now
        os.write(answers, json.dumps(asdict(outcome)).encode() + b"\n")
    os.write(answers, json.dumps([module for module in sys.modules if module not in before]).encode() + b"\n")


def _meet(name, probe, root, outside, output):
    global _forbidden
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    _forbidden = str(outside)
    _led_outside.clear()
    start = time.process_time()
    said, refused, faults = _called(probe, root)
    seconds, peak = time.process_time() - start, 1024 * _status("VmHWM")
    _forbidden = None
    sys.stdout.flush()
    sys.stderr.flush()
    printed = os.pread(output, _MAX_OUTPUT, 0).decode(errors="replace")
    if "Traceback" in printed:
        faults.append(f"prints a traceback: {printed[-800:]}")
    if _CONTROL.search(printed):
        faults.append(f"prints control characters: {_CONTROL.findall(printed)[:5]}")
    if seconds > SECONDS:
        faults.append(f"took {seconds:.1f} s, expected at most {SECONDS}")
    if peak > MAX_BYTES:
        faults.append(f"took {peak / 2**20:,.0f} MiB of memory, expected at most {MAX_BYTES >> 20:,}")
    if _led_outside:
        faults.append(f"opened what is outside: {_led_outside[:3]}")
    return Outcome(name, refused, (said + printed)[:2000], faults, seconds, peak)


def _called(probe, root):
    """Return what a probe said, whether it refused the folder, and what is wrong with how it did."""
    try:
        found = probe.call(root)
    except probe.errors as error:
        said = f"{type(error).__name__}: {error}"
        return said, True, [f"half a message: {said[:300]!r}"] if len(str(error)) < 20 else []
    except SystemExit as error:
        return f"exit {error.code}", True, []
    except BaseException as error:
        return "", True, [f"{type(error).__name__}: {str(error)[:500]}"]
    return "", type(found) is int and found != 0, []


def _tree(root):
    """Return the name, kind, size and time of everything below a folder; of a deep one what os.walk comes to."""
    found = []
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            about = os.lstat(os.path.join(folder, name))
            found.append((os.path.join(folder, name), about.st_mode, about.st_size, about.st_mtime_ns))
        if folder.count("/") > 100:
            folders.clear()
    return sorted(found)


def _status(key):
    """Return a figure of this process, in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _main(arguments):
    sys.path[:0] = [str(TESTS), *map(str, TESTS.iterdir())]
    if arguments[0] == "--serve":
        _serve()
        return
    with serving() as server:
        pattern = next((argument for argument in arguments[1:] if argument != "-v"), "*")
        for attack in fnmatch.filter(importlib.import_module(arguments[0]).ATTACKS, pattern):
            for outcome in server.outcomes_of(arguments[0], attack):
                how = "; ".join(outcome.faults) or ("refused" if outcome.refused else "passes")
                took = f"{outcome.seconds:.2f} s, {outcome.peak_bytes >> 20} MiB"
                print(f"{attack}: {outcome.probe}: {took}: {how}", flush=True)
                if "-v" in arguments:
                    print("    " + outcome.message.strip().replace("\n", "\n    "))


if __name__ == "__main__":
    _main(sys.argv[1:])
