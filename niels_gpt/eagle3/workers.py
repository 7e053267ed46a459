"""The shards of a plan, made in this process or by several: the bytes are the same.

Each worker process loads the target and asks for one shard after the other. One that fails stops all of them; what is
finished stays. A worker ends with its parent, however that ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

import torch

from niels_gpt.eagle3.cache_folder import write_embeddings
from niels_gpt.eagle3.forward import PlannedForward, Report, make_shards, try_target
from niels_gpt.eagle3.layout import SIDECAR
from niels_gpt.eagle3.plan import Plan
from niels_gpt.eagle3.samples import Samples

logger = logging.getLogger(__name__)

Load = Callable[[torch.device], Any]
"""Gives the target on a device, as `functools.partial(load_target, ...)` does; pickled, where there are processes."""
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Job:
    """What a worker needs to know."""

    cache_dir: str
    plan: Plan
    load: Load
    embeddings: bool
    """Whether the target's embeddings have to be written."""


def run_here(job: Job, samples: Samples, shards: Sequence[int], report: Report) -> None:
    """Make shards in this process. Raises: as `make_shards`, and what `job.load` raises."""
    with torch_threads(job.plan.run["threads"]):
        _run(job, samples, iter(shards), report, _device(job.plan, 0))


def tried(plan: Plan, samples: Samples, load: Load) -> Load:
    """Load a target in this process, run it over the beginning of a sample, and return what gives it once more.

    Raises: what `load` raises; ValueError where the target does not run, or is not the one that the plan says.
    """
    device = _device(plan, 0)
    with torch_threads(plan.run["threads"]):
        model = load(device)
        try_target(plan, samples, model, device)
    return lambda _: model


def try_elsewhere(plan: Plan, samples: Samples, load: Load, *, start: str) -> None:
    """Do the same in a process that ends with it: the workers will need the memory. Raises: as `tried`; RuntimeError.

    start: how the process is started, spawn or fork.
    """
    context = multiprocessing.get_context(start)
    ours, theirs = context.Pipe()
    process = context.Process(target=_try, args=(plan, samples, load, theirs), daemon=True)  # type: ignore[attr-defined]
    with _sigint_blocked():
        process.start()
    theirs.close()
    try:
        error = ours.recv()
    except (EOFError, OSError):
        raise _death_of(process) from None
    finally:
        process.terminate()
        process.join()
    if error is not None:
        raise error


def _try(plan: Plan, samples: Samples, load: Load, parent: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        tried(plan, samples, load)
        parent.send(None)
    except BaseException as error:
        parent.send(_sendable(error))


def run_workers(job: Job, shards: Sequence[int], workers: int, report: Report, *, start: str) -> None:
    """Make shards by several processes, which read the samples from the sidecar.

    start: how processes are started, spawn or fork.
    Raises: what a worker raised; RuntimeError where one died.
    """
    context = multiprocessing.get_context(start)
    running: dict[Connection, Any] = {}
    try:
        for number in range(workers):
            ours, theirs = context.Pipe()
            arguments = (Job(job.cache_dir, job.plan, job.load, job.embeddings and not number), number, theirs)
            process = context.Process(target=_work, args=arguments, daemon=True)  # type: ignore[attr-defined]
            with _sigint_blocked():
                process.start()
            theirs.close()
            running[ours] = process
        _serve(running, iter(shards), report)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join(_PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(running: dict[Connection, Any], shards: Iterator[int], report: Report) -> None:
    """Hand out shards until all workers have ended."""
    open_ends = list(running)
    while open_ends:
        for end in connection.wait(open_ends):
            assert isinstance(end, Connection)
            try:
                what, *about = end.recv()
                if what == "next":
                    end.send(next(shards, None))
            except (EOFError, OSError):  # it may die within a message, and before it has its answer
                raise _death_of(running[end]) from None
            if what == "written":
                report(*about)
            elif what == "failed":
                raise about[0]
            elif what == "ended":
                open_ends.remove(end)


def _death_of(process: Any) -> RuntimeError:
    process.join(_PATIENCE_S)
    code = process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name}" + ("; is there too little memory?" if code == -9 else "")
    return RuntimeError(
        f"worker process {process.pid} died ({how}). Run the same again with --resume: what is done stays"
    )


# --- in a worker process ----------------------------------------------------------------------------------------------


def _work(job: Job, number: int, parent: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        samples = Samples.open(os.path.join(job.cache_dir, SIDECAR))
        torch.set_num_threads(job.plan.run["threads"])
        _run(
            job, samples, _asked(parent), lambda *written: parent.send(("written", *written)), _device(job.plan, number)
        )
        parent.send(("ended",))
    except BaseException as error:
        logger.debug("worker %d failed", number, exc_info=True)
        parent.send(("failed", _sendable(error)))


def _asked(parent: Connection) -> Iterator[int]:
    while True:
        parent.send(("next",))
        shard = parent.recv()
        if shard is None:
            return
        yield shard


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


# --- both -------------------------------------------------------------------------------------------------------------


def _run(job: Job, samples: Samples, shards: Iterator[int], report: Report, device: torch.device) -> None:
    model = job.load(device)
    if job.embeddings:
        write_embeddings(job.cache_dir, model.get_input_embeddings().weight)
    make_shards(job.cache_dir, job.plan, PlannedForward(job.plan, samples, model, device), shards, report)


def _device(plan: Plan, number: int) -> torch.device:
    if plan.run["device"] != "cuda":
        return torch.device(plan.run["device"])
    return torch.device("cuda", number % torch.cuda.device_count())


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch compute with so many threads in the block, and with its own afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Ctrl-C is the parent's to deal with: a process that is started here never gets it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
