"""Build partitions as tasks of a Dask cluster: assign them to workers, and handle the death of a worker.

The driver is `build_on_dask`; workers run `obstacle` and `build_there`. A task is for one worker, and a worker has one
task at a time. So it is known which worker died with which partition, no other partition is blamed for a death, and a
slow worker holds up only one partition.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.data.exclude import read_exclusion
from niels_gpt.display.numbers import many
from niels_gpt.engine.units import PartitionPlan
from niels_gpt.kinds.homes import home_recipes
from niels_gpt.kinds.kind import kind_named, kind_of_key
from niels_gpt.recipes.home_recipes import units_of
from niels_gpt.recipes.records import Outcome, cache_root
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.recipes.shared import code_identity
from niels_gpt.recipes.tokenizer import tokenizer_state
from niels_gpt.recipes.units import CacheUnits
from niels_gpt.settings import Settings
from niels_gpt.storage.codes import code_of, own_code
from niels_gpt.storage.errors import CacheError, UsageError
from niels_gpt.work import Progress, sigint_blocked

if TYPE_CHECKING:
    from distributed import Client, Future

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Seconds that a build waits for the scheduler, for a worker while there is none, and for the answers of the first
ones."""
MOST_DEATHS = 4
"""Workers that may die with a partition before it is given up. Dask's own `allowed-failures` is one less."""
_LOOK_S = 1.0  # between two looks at which workers there are
_FETCH_S = 30.0  # for the result of a task, which is small
_WAIT_S = 5.0  # of the first look at a worker, for the end of another build there
_LOCAL = re.compile(r"local:([1-9][0-9]{0,3})")
_SHOWN = 10  # workers or failures in a message
_ONE_AT_A_TIME = threading.RLock()  # on a worker: the current folder is its process's, and a build takes all threads

Said = tuple[str | None, str]
"""Code and text of a warning, an error or an obstacle."""


@dataclass(frozen=True)
class Work:
    """Facts about a cache that the driver sends to a worker."""

    settings: Settings
    name: str
    """Name of the source, or key of the cache."""
    plan: str
    """sha256 of the plan's file."""
    folder: str
    """Current folder of the command, for relative paths in the settings."""
    probe: str
    """Absolute path of a file in the folder of caches."""
    token: str
    """Content of that file."""
    code: dict[str, Any]
    """Program of the command: see `code_identity`."""
    inputs: dict[str, str]
    """See `inputs_seen`."""


@dataclass(frozen=True)
class Built:
    """Result of one partition."""

    documents: int = 0
    tokens: int = 0
    error: Said | None = None
    """Error that ended its build."""
    unfit: Said | None = None
    """Why this worker can build neither it nor any other partition."""
    warnings: list[Said] = field(default_factory=list)
    """Warnings of the build, in order."""


def build_on_dask(
    settings: Settings, name: str, where: str, *, refresh: bool = False, progress: Progress | None = None
) -> Outcome:
    """Build the missing partitions of a cache on the workers of a Dask cluster, and seal the cache here.

    name: of the source, or the key of the cache. where: address of a scheduler, `tcp://HOST:PORT`, or `local:N` for N
        processes of one thread each on this machine; a script then needs `if __name__ == "__main__":`.
    refresh: see `units_of`. progress: receives documents or samples, tokens, and the tokens of both budgets (None
        without).
    Raises: ImportError without the extra `dask`; UsageError for another `where`; CacheError E513 if no worker comes or
        one cannot build; if partitions failed, after all others are finished, CacheError with the code of the first
        failure; the errors of `units_of` and `seal`.
    """
    check_where(where)
    cache = units_of(settings, name, refresh=refresh)
    if (plan := cache.plan) is not None:
        units = cache.states()
        if missing := [unit.number for unit in units if unit.state != "finished"]:
            done = (sum(unit.items for unit in units), sum(unit.tokens for unit in units))
            with work_of(settings, name, plan) as work, _client(where) as client:
                _Build(client, where, cache, work, deque(missing), *done, cache.budget, progress).run()
    return cache.seal()


def check_where(where: str) -> None:
    """Raise UsageError for anything but an address of Dask, and ImportError without the extra `dask`."""
    if not (_LOCAL.fullmatch(where) or re.fullmatch(r"[a-z]+://\S+", where)):
        raise UsageError(f"--dask {where}: expected tcp://HOST:PORT, the address of a scheduler, or local:N")
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise ImportError(f"--dask needs distributed ({error}): pip install 'niels-gpt[dask]'") from error


@contextmanager
def work_of(settings: Settings, name: str, plan: PartitionPlan) -> Iterator[Work]:
    """Yield the Work for workers. The file that they look for exists until the end of the block."""
    token = secrets.token_hex(16)
    probe, path = tempfile.mkstemp(prefix=".probe-", dir=os.path.abspath(cache_root(settings)))
    try:
        os.write(probe, token.encode())
        os.close(probe)
        os.chmod(path, 0o644)  # a worker may be another user
        inputs = inputs_seen(settings, name)
        yield Work(settings, name, plan.sha256, os.getcwd(), path, token, code_identity(), inputs)
    finally:
        with suppress(OSError):
            os.unlink(path)


@contextmanager
def _client(where: str) -> Iterator[Client]:
    """Connect to a scheduler, or start a cluster of processes here that ends with the block."""
    from distributed import Client, LocalCluster

    if (local := _LOCAL.fullmatch(where)) is None:
        try:
            client = Client(where, timeout=PATIENCE_S, set_as_default=False)
        except (OSError, ValueError, RuntimeError) as error:
            problem = f"no scheduler answers ({error})"
            raise CacheError(where, problem, "", "Start one: dask scheduler", code="E513") from error
        with _quiet(logging.WARNING), client:
            yield client
        return
    how: dict[str, Any] = {
        "n_workers": int(local[1]),
        "threads_per_worker": 1,
        "processes": True,
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
        "scheduler_kwargs": {"dashboard": False},
        "memory_limit": 0,  # none: a build has its own bounds
        "silence_logs": logging.ERROR,
    }
    with _quiet(logging.ERROR), tempfile.TemporaryDirectory(prefix="niels-gpt-dask-") as folder:
        with sigint_blocked():  # the threads that start the processes, and those, never see Ctrl-C
            cluster = LocalCluster(local_directory=folder, **how)
        with cluster, Client(cluster, set_as_default=False) as client:
            yield client


@contextmanager
def _quiet(level: int) -> Iterator[None]:
    """Silence Dask's log below a level in this process."""
    log = logging.getLogger("distributed")
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


@dataclass
class _Build:
    """Tasks of one build, and the workers that take them."""

    client: Client
    where: str
    cache: CacheUnits
    work: Work
    waiting: deque[int]
    """Numbers of partitions without a worker."""
    documents: int
    tokens: int
    """Tokens of all finished partitions."""
    budget: int | None
    progress: Progress | None
    running: dict[int, tuple[Future, str]] = field(default_factory=dict)
    """Partition -> its task, and the address of its worker."""
    fit: dict[str, bool] = field(default_factory=dict)
    """Address -> whether this worker can build, for all workers that were examined."""
    deaths: Counter[int] = field(default_factory=Counter)
    """Partition -> workers that died with it."""
    failures: dict[int, Said] = field(default_factory=dict)
    """Partition -> code and text of its error."""
    said: set[Said] = field(default_factory=set)
    """Warnings of workers, each passed on once."""
    changed: threading.Event = field(default_factory=threading.Event)
    """Set when a task has ended."""
    seen_at: float = field(default_factory=time.monotonic)
    """When a worker that may build was last seen."""

    def run(self) -> None:
        """Build all waiting partitions. An error or Ctrl-C cancels the running tasks.

        Raises: CacheError if the scheduler is gone, one of the first workers cannot build, or no worker comes for too
            long; CacheError naming the failed partitions, after all others are finished.
        """
        try:
            while self.waiting or self.running:
                there = self._there()
                self._start(there)
                self.changed.wait(_LOOK_S)
                self.changed.clear()
                for number in list(self.running):
                    self._look_after(number, there)
        finally:
            with suppress(Exception):
                self.client.cancel([task for task, _ in self.running.values()])
        if self.failures:
            failed = sorted(self.failures.items())
            told = [f"partition {number} {text}" for number, (_, text) in failed]
            head = f"{len(failed)} of {self.work.settings.partitions} partitions failed; the others are finished"
            code = failed[0][1][0] or "E902"
            raise CacheError(self.cache.path, _lines([head, *told]), code=code)

    def _there(self) -> list[str]:
        """Return the addresses of the workers that may build. Examines the first ones here."""
        problems: dict[str, Said] = {}
        try:
            there = list(self.client.nthreads())
            if there and not (self.fit or self.running):
                problems = self.client.sync(self._look_at, there)
                self.seen_at = time.monotonic()
        except (OSError, RuntimeError) as error:
            raise CacheError(self.where, f"the scheduler is gone ({error})", code="E513") from error
        if problems:
            told = [f"worker {address}: {text}" for address, (_, text) in sorted(problems.items())]
            code = next(iter(problems.values()))[0] or "E513"
            raise CacheError(self.where, _lines(told), code=code)
        there = [address for address in there if self.fit.get(address, True)]
        if there:
            self.seen_at = time.monotonic()
        elif time.monotonic() - self.seen_at > PATIENCE_S:
            remedy = f"Start some, and run the same command again: dask worker {self.where}"
            raise CacheError(self.where, f"no worker for {PATIENCE_S:.0f} s", "", remedy, code="E513")
        return there

    async def _look_at(self, addresses: Sequence[str]) -> dict[str, Said]:
        """Ask workers, all at once, whether they can build. Returns why some cannot; leaves out who does not answer."""
        how: dict[str, Any] = {"on_error": "return", "asynchronous": True}
        calls = {
            address: asyncio.ensure_future(self.client.run(obstacle, self.work, workers=[address], **how))
            for address in addresses
        }
        await asyncio.wait(calls.values(), timeout=PATIENCE_S)
        problems: dict[str, Said] = {}
        for address, call in calls.items():
            if not call.done():
                call.cancel()
                self._leave_out(address, f"it has not answered for {PATIENCE_S:.0f} s")
                continue
            found: Said | Exception | None = call.result()[address]
            if isinstance(found, OSError):  # it is going, or builds for another command: its first task looks again
                continue
            self.fit[address] = found is None
            if found is not None:
                problems[address] = _unable(found) if isinstance(found, Exception) else found
        return problems

    def _leave_out(self, address: str, why: str) -> None:
        self.fit[address] = False
        logger.warning("%s: left out: worker %s: %s", self.where, address, why, extra={"code": "W508"})

    def _start(self, there: Sequence[str]) -> None:
        """Give a partition to each idle worker."""
        busy = {address for _, address in self.running.values()}
        for address in there:
            if address not in busy and self.waiting:
                number = self.waiting.popleft()
                key = f"partition {number} of {self.cache.key} {secrets.token_hex(4)}"
                how: dict[str, Any] = {"key": key, "workers": [address], "pure": False, "retries": 0}
                looks = address not in self.fit
                task = self.client.submit(build_there, self.work, number, looks=looks, **how)
                task.add_done_callback(lambda _: self.changed.set())
                self.running[number] = task, address

    def _look_after(self, number: int, there: Sequence[str]) -> None:
        """Take the result of a task. Put the partition back if its worker has died or cannot build."""
        task, address = self.running[number]
        if task.status == "pending" and address in there:
            return
        built = _result(task, is_new=address not in self.fit)
        del self.running[number]
        if built is None:
            task.cancel()
            self._died(number, address)
        elif built.unfit is not None:
            self.waiting.appendleft(number)
            self._leave_out(address, built.unfit[1])
        else:
            self.fit[address] = True
            self._ended(number, address, built)

    def _ended(self, number: int, address: str, built: Built) -> None:
        """Pass on a build's warnings. Count the partition, or note its error."""
        for code, text in built.warnings:
            if (code, text) not in self.said:
                self.said.add((code, text))
                logger.warning("%s", text, extra={"code": code})
        cache = self.cache.key
        if built.error is not None:
            self.failures[number] = built.error[0], f"on {address}: {built.error[1]}"
            logger.info("%s: partition %d failed; the others are built", cache, number)
            return
        self.documents, self.tokens = self.documents + built.documents, self.tokens + built.tokens
        if self.progress is not None:
            self.progress(self.documents, self.tokens, self.budget)
            return
        message, kind = "%s: partition %d of %d is finished: %s, %s, by %s", kind_of_key(cache)
        counts = many(built.documents, kind.unit if kind else "document"), many(built.tokens, "token")
        logger.info(message, cache, number, self.work.settings.partitions, *counts, address)

    def _died(self, number: int, address: str) -> None:
        self.deaths[number] += 1
        if self.deaths[number] == MOST_DEATHS:
            problem = f"{MOST_DEATHS} workers died while they built it, the last one {address}. Give them more memory"
            self.failures[number] = "E513", problem
            return
        self.waiting.append(number)
        logger.warning(
            "%s: worker %s died while it built partition %d; another one resumes it (death %d of at most %d)",
            *(self.cache.key, address, number, self.deaths[number], MOST_DEATHS - 1),
            extra={"code": "W506"},
        )


def _result(task: Future, is_new: bool) -> Built | None:
    """Return the result of an ended task; None if its worker has died. is_new: the worker was to be examined."""
    from distributed import KilledWorker

    try:
        if task.status == "finished":
            built: Built = task.result(timeout=_FETCH_S)
            return built
        if task.status == "error" and not isinstance(error := task.exception(timeout=_FETCH_S), KilledWorker):
            # Not of the build, whose errors are returned: the task could not be run.
            return Built(unfit=_unable(error)) if is_new else Built(error=_told(error))
    except (OSError, RuntimeError):  # it died before its result was fetched
        pass
    return None


def _unable(error: Exception) -> Said:
    return "E511", f"it cannot run this niels-gpt: {error}. Install the same version there"


def _told(error: Exception) -> Said:
    """Return an error's code and message, with its class if it has no code."""
    return code_of(error), str(error) if own_code(error) else f"{type(error).__name__}: {error}"


def _lines(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
    return "\n  ".join([*lines[:_SHOWN], *more])


# What follows runs on a worker.


def build_there(work: Work, number: int, looks: bool = False) -> Built:
    """Build a partition in a task of Dask. looks: first examine whether this worker can.

    Returns an error of the build as text, because its class may be unknown to the driver. A cancelled task stops its
    build, and the next build of the partition resumes it.
    """
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def check_wanted(*_: object) -> None:
        task = worker.state.tasks.get(key)
        if task is None or task.state != "executing":
            raise RuntimeError("the task was cancelled")

    settings = replace(work.settings, threads=work.settings.threads or worker.state.nthreads)
    with _ONE_AT_A_TIME, _collected_warnings() as warnings:
        try:
            check_wanted()
            if looks and (unfit := _obstacle(work)) is not None:
                return Built(unfit=unfit)
            with chdir(work.folder):
                meta = units_of(settings, work.name).build(number, wait=True, progress=check_wanted).meta
        except Exception as error:
            return Built(error=_told(error), warnings=warnings)
    receipt = meta.get("partition")
    if receipt is None:  # another command has sealed the cache
        return Built(warnings=warnings)
    if receipt["plan"] != work.plan:
        other = f"{work.probe}: the worker has built partition {number} of another plan, expected equal inputs"
        return Built(error=("E513", other), warnings=warnings)
    kind = kind_named(meta["kind"])
    assert kind is not None
    held = kind.held(meta)
    return Built(held.total(kind.unit), held.total("token"), warnings=warnings)


async def obstacle(work: Work) -> Said | None:
    """Return why this worker cannot build the partitions of a cache; None if it can.

    Raises: TimeoutError where it builds for another command.
    """
    return await asyncio.to_thread(_obstacle, work)


def _obstacle(work: Work) -> Said | None:
    if not work.settings.accept_code and (differing := _differing(code_identity(), work.code)):
        return "E511", f"it runs another niels-gpt: {differing}. Install the same version there"
    try:
        token = Path(work.probe).read_text(encoding="utf-8")
    except OSError as error:
        token = str(error.strerror)
    if token != work.token:
        return "E513", f"it does not see the folder of caches: {work.probe} is {token[:80]!r} there"
    if not os.path.isdir(work.folder):
        return "E513", f"it does not see the current folder {work.folder}. Run the command in a folder that all share"
    if not _ONE_AT_A_TIME.acquire(timeout=_WAIT_S):
        raise TimeoutError
    try:
        with chdir(work.folder), _collected_warnings():
            differing = _differing(inputs_seen(work.settings, work.name), work.inputs)
    except Exception as error:
        return code_of(error), str(error)
    finally:
        _ONE_AT_A_TIME.release()
    return ("E513", f"it sees other inputs: {differing}") if differing else None


def inputs_seen(settings: Settings, name: str) -> dict[str, str]:
    """Return the inputs of a build that this machine sees, by their role, to compare machines.

    Files of the source count only by name and size: reading them may take hours.
    Raises: the errors of `resolve_source` and `read_exclusion`.
    """
    home = next((home for home in home_recipes() if name in home.recipes), None)
    chats = name if home is None else home.source(settings)
    found = None if chats is None else resolve_source(settings, chats).found  # None: the plan compares their bytes
    names = hashlib.sha256()
    for path in () if found is None else found.files:
        names.update(f"{found.name_of(path) if found else ''}\0{path.stat().st_size}\n".encode())
    return {
        "source": f"{len(found.files) if found else 0:,} files {names.hexdigest()[:12]}",
        "exclude": "none" if settings.exclude is None else str(read_exclusion(settings.exclude).facts["sha256"]),
        "tokenizer": tokenizer_state(settings),
    }


def _differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    keys = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
    return ", ".join(f"{key} {there.get(key)!r} there and {here.get(key)!r} here" for key in keys)


@contextmanager
def _collected_warnings() -> Iterator[list[Said]]:
    """Yield a list that receives the package's warnings in the block."""
    found: list[Said] = []

    class _Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append((getattr(record, "code", None), record.getMessage()))

    handler, logger = _Keep(logging.WARNING), logging.getLogger("niels_gpt")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
