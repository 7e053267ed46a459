"""Partitions as tasks of a Dask cluster: which worker builds which, and what happens when one dies.

A task is for one worker, and a worker has one task at a time. So it is known which worker died with which partition,
and no worker builds before it has been looked at. What runs on a worker is in worker.py.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import re
import secrets
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from niels_gpt.engine.units import Plan
from niels_gpt.interrupts import sigint_blocked
from niels_gpt.progress import Progress
from niels_gpt.recipes.partitions.documents import budget_of
from niels_gpt.recipes.partitions.shared import code_identity
from niels_gpt.recipes.partitions.worker import BUSY, Built, Said, Work, build_there, inputs_seen, obstacle
from niels_gpt.recipes.run_recipe import Outcome, cache_root
from niels_gpt.recipes.units import Units
from niels_gpt.settings import Settings, UsageError
from niels_gpt.storage.codes import code_of
from niels_gpt.storage.errors import CacheError

if TYPE_CHECKING:
    from distributed import Client, Future

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long a build waits for the scheduler, for a worker while there is none, and for the answer of a new one."""
MOST_DEATHS = 4
"""How many workers may die with a partition before it is given up."""
_LOOK_S = 1.0  # between two looks at which workers there are
_FETCH_S = 30.0  # for the result of a task, which is small
_LOCAL = re.compile(r"local:([1-9][0-9]{0,3})")
_SHOWN = 10  # workers or failures in a message


def build_on_dask(
    settings: Settings, name: str, where: str, *, refresh: bool = False, progress: Progress | None = None
) -> Outcome:
    """Build the partitions of a cache that are missing on the workers of a Dask cluster, and seal the cache here.

    name: of the source. where: the address of a scheduler, `tcp://HOST:PORT`, or `local:N` for N processes of one
        thread each on this machine; a script then needs `if __name__ == "__main__":`.
    refresh: see `prepare`. progress: receives documents, tokens, and the tokens of both budgets (None without).
    Returns: as `seal_cache`; its seconds are those of the whole call.
    Raises: ImportError without the extra `dask`; UsageError for another `where`; CacheError E513 where no worker comes
        or one cannot build; where partitions failed, after the others are finished, CacheError with the code of the
        first one; as `prepare` and `seal_cache`.
    """
    check_where(where)
    cache = Units(settings, name, refresh=refresh)
    if (plan := cache.plan) is not None:
        units = cache.states()
        if missing := [unit.number for unit in units if unit.state != "finished"]:
            done = (sum(unit.items for unit in units), sum(unit.tokens for unit in units))
            report = _Report(plan, *done, budget_of(settings, cache.source), progress)
            with work_of(settings, name, plan) as work, _client(where) as client:
                _Build(plan, work, _Workers(client, where, work), report, deque(missing)).run()
    return cache.seal()


def check_where(where: str) -> None:
    """Raise UsageError for what is no address of Dask, and ImportError without the extra `dask`."""
    if not (_LOCAL.fullmatch(where) or re.fullmatch(r"[a-z]+://\S+", where)):
        raise UsageError(f"--dask {where}: expected tcp://HOST:PORT, the address of a scheduler, or local:N")
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise ImportError(f"--dask needs distributed ({error}): pip install 'niels-gpt[dask]'") from error


@contextmanager
def work_of(settings: Settings, name: str, plan: Plan) -> Iterator[Work]:
    """Yield what is sent to a worker; the file that it looks for is there until the end of the block."""
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
    """Let Dask log nothing below a level in this process."""
    log = logging.getLogger("distributed")
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


class _Look(NamedTuple):
    """A worker that is looked at: the call, and when it was first asked."""

    call: concurrent.futures.Future[dict[str, Any]]
    since: float

    def is_late(self, now: float) -> bool:
        return now - self.since > PATIENCE_S

    def waits(self, now: float) -> bool:
        """Whether its answer may come yet."""
        return not self.call.done() and not self.is_late(now)


class _Workers:
    """The workers of a cluster: those that were looked at and can build."""

    def __init__(self, client: Client, where: str, work: Work) -> None:
        self.client, self._where, self._work = client, where, work
        self.changed = threading.Event()
        """Set where a worker has answered or a task has ended."""
        self._fit: dict[str, bool] = {}
        self._looks: dict[str, _Look] = {}
        self._busy: set[str] = set()
        self._seen_at = self._first_at = time.monotonic()

    def there(self) -> list[str]:
        """Return the addresses of those that are there and can build; new ones are asked, and not waited for.

        The first ones are: there is none before each of them has answered, or has not for too long.
        Raises: CacheError where one of the first workers cannot build, and where there is none for too long.
        """
        try:
            there = list(self.client.nthreads())
        except (OSError, RuntimeError) as error:
            raise CacheError(self._where, f"the scheduler is gone ({error})", code="E513") from error
        now = time.monotonic()
        if not (self._fit or self._looks):
            self._first_at = now
        for address in there:
            if address not in self._fit and address not in self._looks:
                self._ask(address, now)
        waited_for = {address for address, look in self._looks.items() if address in there and look.waits(now)}
        if not any(self._looks[address].since == self._first_at for address in waited_for):
            self._take_answers([address for address in self._looks if address not in waited_for], there, now)
        fit = [address for address in there if self._fit.get(address)]
        if fit or self._looks:
            self._seen_at = now
        elif now - self._seen_at > PATIENCE_S:
            remedy = f"Start some, and run the same command again: dask worker {self._where}"
            raise CacheError(self._where, f"no worker for {PATIENCE_S:.0f} s", "", remedy, code="E513")
        return fit

    def close(self) -> None:
        """Wait for no answer any more."""
        for look in self._looks.values():
            look.call.cancel()

    def _ask(self, address: str, since: float) -> None:
        # A call for each, in the client's own thread: one that hangs holds up no other, and not the build.
        how: dict[str, Any] = {"workers": [address], "on_error": "return", "asynchronous": True}
        coroutine = self.client.run(obstacle, self._work, **how)
        call = asyncio.run_coroutine_threadsafe(coroutine, self.client.loop.asyncio_loop)
        call.add_done_callback(lambda _: self.changed.set())
        self._looks[address] = _Look(call, since)

    def _take_answers(self, addresses: Sequence[str], there: Sequence[str], now: float) -> None:
        """Note which workers can build. Raises: CacheError for one that cannot, where none is known that can."""
        problems: dict[str, Said] = {}
        is_first = not any(self._fit.values())
        for address in addresses:
            look = self._looks.pop(address)
            what = _answer(look.call, address)
            if address not in there:
                continue
            if what == BUSY:
                if address not in self._busy:
                    logger.info("worker %s: %s; it is asked again until it has ended", address, BUSY[1])
                self._busy.add(address)
                self._ask(address, now)
            elif isinstance(what, OSError):  # it is going, or hangs
                if look.is_late(now):
                    self._fit[address] = False
                    self._leave_out(address, f"it has not answered for {PATIENCE_S:.0f} s")
                else:
                    self._ask(address, look.since)
            else:
                self._fit[address] = what is None
                if what is not None:
                    problems[address] = what
        if problems and is_first:
            told = [f"worker {address}: {text}" for address, (_, text) in sorted(problems.items())]
            code = next(iter(problems.values()))[0] or "E513"
            raise CacheError(self._where, _lines(told), code=code)
        for address, (_, text) in sorted(problems.items()):
            self._leave_out(address, text)

    def _leave_out(self, address: str, why: str) -> None:
        logger.warning("%s: left out: worker %s: %s", self._where, address, why, extra={"code": "W508"})


def _answer(call: concurrent.futures.Future[dict[str, Any]], address: str) -> Said | OSError | None:
    """Return what a worker has said of itself; OSError where it has not."""
    if not call.done():
        call.cancel()
        return TimeoutError()
    try:
        what = call.result()[address]
    except (OSError, RuntimeError) as error:  # of the scheduler: the next look at it says so
        return OSError(error)
    if isinstance(what, Exception) and not isinstance(what, OSError):  # as where niels-gpt is not installed
        return "E511", f"it cannot run this niels-gpt: {what}. Install the same version there"
    found: Said | OSError | None = what
    return found


@dataclass
class _Report:
    """What is printed of a build: a bar, or else a line for each partition; each warning of the workers once."""

    plan: Plan
    documents: int
    tokens: int
    budget: int | None
    progress: Progress | None
    said: set[Said] = field(default_factory=set)

    def finished(self, number: int, address: str, built: Built) -> None:
        """Tell of a finished partition."""
        self.documents, self.tokens = self.documents + built.documents, self.tokens + built.tokens
        if self.progress is not None:
            self.progress(self.documents, self.tokens, self.budget)
        else:
            message = "%s: partition %d of %d is finished: %s documents, %s tokens, by %s"
            counts = (f"{built.documents:,}", f"{built.tokens:,}")
            logger.info(message, self.plan.content["cache"], number, self.plan.total, *counts, address)

    def warn(self, said: Sequence[Said]) -> None:
        """Pass on the warnings of a worker."""
        for code, text in said:
            if (code, text) not in self.said:
                self.said.add((code, text))
                logger.warning("%s", text, extra={"code": code})


@dataclass
class _Build:
    """The tasks of one build."""

    plan: Plan
    work: Work
    workers: _Workers
    report: _Report
    waiting: deque[int]
    running: dict[int, tuple[Future, str]] = field(default_factory=dict)
    """By partition: its task, and the address of its worker."""
    deaths: Counter[int] = field(default_factory=Counter)
    """By partition: how many workers died with it."""
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By partition: the code and the text of its error."""

    def run(self) -> None:
        """Build all that wait; what ends this early cancels the tasks that run.

        Raises: as `_Workers.there`; CacheError naming the partitions that failed, after the others are finished.
        """
        changed = self.workers.changed
        try:
            while self.waiting or self.running:
                there = self.workers.there()
                self._start(there)
                changed.wait(_LOOK_S)
                changed.clear()
                for number in list(self.running):
                    self._look_after(number, there)
        finally:
            self.workers.close()
            with suppress(Exception):
                self.workers.client.cancel([task for task, _ in self.running.values()])
        if self.failures:
            raise self._failed()

    def _start(self, there: Sequence[str]) -> None:
        busy = {address for _, address in self.running.values()}
        for address in there:
            if address not in busy and self.waiting:
                number = self.waiting.popleft()
                key = f"partition {number} of {self.plan.content['cache']} {secrets.token_hex(4)}"
                task = self.workers.client.submit(build_there, self.work, number, key=key, workers=[address])
                task.add_done_callback(lambda _: self.workers.changed.set())
                self.running[number] = task, address

    def _look_after(self, number: int, there: Sequence[str]) -> None:
        """Take the result of a task; put the partition back where its worker has died."""
        task, address = self.running[number]
        if task.status == "pending" and address in there:
            return
        built = _result(task)
        del self.running[number]
        if built is None:
            task.cancel()
            self._died(number, address)
            return
        self.report.warn(built.warnings)
        if built.error is None:
            self.report.finished(number, address, built)
        else:
            self.failures[number] = built.code, f"on {address}: {_text(built.error)}"
            logger.info("%s: partition %d failed; the others are built", self.plan.content["cache"], number)

    def _died(self, number: int, address: str) -> None:
        self.deaths[number] += 1
        if self.deaths[number] == MOST_DEATHS:
            problem = f"{MOST_DEATHS} workers died while they built it, the last one {address}. Give them more memory"
            self.failures[number] = "E513", problem
            return
        self.waiting.append(number)
        logger.warning(
            "%s: worker %s died while it built partition %d; another one resumes it (death %d of at most %d)",
            self.plan.content["cache"],
            address,
            number,
            self.deaths[number],
            MOST_DEATHS - 1,
            extra={"code": "W506"},
        )

    def _failed(self) -> CacheError:
        failed = sorted(self.failures.items())
        told = [f"partition {number} {text}" for number, (_, text) in failed]
        head = f"{len(failed)} of {self.plan.total} partitions failed; the others are finished"
        (_, (code, _)), *_ = failed
        return CacheError(self.plan.path, _lines([head, *told]), code=code)


def _result(task: Future) -> Built | None:
    """Return the result of a task that has ended; None where its worker has died."""
    from distributed import KilledWorker

    try:
        if task.status == "finished":
            built: Built = task.result(timeout=_FETCH_S)
            return built
        if task.status == "error":
            error = task.exception(timeout=_FETCH_S)
            return None if isinstance(error, KilledWorker) else Built(error=error, code=code_of(error))
    except (OSError, RuntimeError):  # it died before its result was fetched
        pass
    return None


def _text(error: Exception) -> str:
    """Return an error's message; of one without a code of ours its class too."""
    return str(error) if isinstance(getattr(error, "code", None), str) else f"{type(error).__name__}: {error}"


def _lines(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
    return "\n  ".join([*lines[:_SHOWN], *more])
