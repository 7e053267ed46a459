"""The processes that make the shards of a plan, this one or several: which process makes which shard, and its end.

Each worker process loads the target and asks the parent for one shard after the other; the bytes do not depend on how
many there are. A worker that fails stops all of them, and finished shards stay. A worker ends with its parent.
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
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

import torch

from niels_gpt.eagle3.format.layout import SIDECAR
from niels_gpt.eagle3.format.plan import Plan
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.format.weights import write_embeddings, write_weights
from niels_gpt.eagle3.produce.forward import PlannedForward
from niels_gpt.eagle3.produce.native_forward import NativeForward
from niels_gpt.eagle3.produce.shards import Check, Written, make_shards
from niels_gpt.eagle3.produce.trial import Found, try_target
from niels_gpt.interrupts import sigint_blocked
from niels_gpt.storage.errors import WorkerDied

logger = logging.getLogger(__name__)

Load = Callable[[torch.device], Any]
"""Returns the target on a device, as `functools.partial(load_target, ...)` does; pickled for worker processes."""
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Job:
    """What a worker is started with."""

    cache_dir: str
    plan: Plan
    load: Load
    weights: bool
    """Whether this worker writes the target's embeddings, and in the native form its head."""


def run_here(job: Job, samples: Samples, shards: Sequence[int], written: Written, check: Check) -> None:
    """Make shards in this process. Raises: as `make_shards`, and what `job.load` raises."""
    with torch_threads(job.plan.run["threads"]):
        _run(job, samples, iter(shards), written, check, _device(job.plan, 0))


def load_and_try(plan: Plan, samples: Samples, load: Load) -> tuple[Load, Found]:
    """Load a target in this process and run it over a few tokens.

    Returns a function that returns it, and what `try_target` found.

    Raises: what `load` raises; ValueError where the target does not run, or its sizes are not the plan's.
    """
    device = _device(plan, 0)
    with torch_threads(plan.run["threads"]):
        model = load(device)
        found = try_target(plan, samples, model, device)
    return lambda _: model, found


def try_in_subprocess(plan: Plan, samples: Samples, load: Load, *, start: str) -> Found:
    """Do the same in a process that then ends, as the workers need the memory. Raises: as `load_and_try`; RuntimeError.

    start: how the process is started, spawn or fork.
    """
    context = multiprocessing.get_context(start)
    ours, theirs = context.Pipe()
    process = context.Process(target=_try_for_parent, args=(plan, samples, load, theirs), daemon=True)  # type: ignore[attr-defined]
    with sigint_blocked():
        process.start()
    theirs.close()
    try:
        error, found = ours.recv()
    except (EOFError, OSError):
        raise _death_of(process) from None
    finally:
        process.terminate()
        process.join()
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]


def _try_for_parent(plan: Plan, samples: Samples, load: Load, parent: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        parent.send((None, load_and_try(plan, samples, load)[1]))
    except BaseException as error:
        parent.send((_sendable(error), None))


def run_workers(job: Job, shards: Sequence[int], workers: int, written: Written, check: Check, *, start: str) -> None:
    """Make shards in several processes, which read the samples from the sidecar.

    check: called in this process, which has the lease; the workers wait for it.
    start: how processes are started, spawn or fork.
    Raises: as `check`; a worker's error; RuntimeError where one died.
    """
    context = multiprocessing.get_context(start)
    running: dict[Connection, Any] = {}
    try:
        for number in range(workers):
            ours, theirs = context.Pipe()
            arguments = (Job(job.cache_dir, job.plan, job.load, job.weights and not number), number, theirs)
            process = context.Process(target=_work, args=arguments, daemon=True)  # type: ignore[attr-defined]
            with sigint_blocked():
                process.start()
            theirs.close()
            running[ours] = process
        _serve(running, iter(shards), written, check)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join(_PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(running: dict[Connection, Any], shards: Iterator[int], written: Written, check: Check) -> None:
    """Hand out shards, and look at the lease for the workers, until all of them have ended."""
    open_ends = list(running)
    while open_ends:
        for end in connection.wait(open_ends):
            assert isinstance(end, Connection)
            with _noticing_death(running[end]):
                what, *about = end.recv()
            if what == "check":
                check()
            elif what == "written":
                written(*about)
            elif what == "failed":
                raise about[0]
            elif what == "ended":
                open_ends.remove(end)
                continue
            with _noticing_death(running[end]):
                end.send(next(shards, None) if what == "next" else None)


@contextmanager
def _noticing_death(process: Any) -> Iterator[None]:
    """Raise RuntimeError where a worker died within a message, or before it read the answer."""
    try:
        yield
    except (EOFError, OSError):
        raise _death_of(process) from None


def _death_of(process: Any) -> RuntimeError:
    process.join(_PATIENCE_S)
    code = process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name}" + ("; is there too little memory?" if code == -9 else "")
    return WorkerDied(
        f"worker process {process.pid} died ({how}). Finished shards stay: run the same command with --resume"
    )


# --- in a worker process ----------------------------------------------------------------------------------------------


def _work(job: Job, number: int, parent: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    ask = _asking(parent)
    try:
        samples = Samples.open(os.path.join(job.cache_dir, SIDECAR))
        torch.set_num_threads(job.plan.run["threads"])
        _run(
            job,
            samples,
            iter(partial(ask, "next"), None),
            lambda *written: ask("written", *written),
            partial(ask, "check"),
            _device(job.plan, number),
        )
        parent.send(("ended",))
    except BaseException as error:
        logger.debug("worker %d failed", number, exc_info=True)
        parent.send(("failed", _sendable(error)))


def _asking(parent: Connection) -> Callable[..., Any]:
    """Return what sends a message to the parent, and returns its answer; of two threads one after the other."""
    lock = threading.Lock()

    def ask(*message: Any) -> Any:
        with lock:
            parent.send(message)
            return parent.recv()

    return ask


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkerDied(f"{type(error).__name__}: {error}")
    return error


# --- both -------------------------------------------------------------------------------------------------------------


def _run(
    job: Job, samples: Samples, shards: Iterator[int], written: Written, check: Check, device: torch.device
) -> None:
    model = job.load(device)
    native = NativeForward(job.plan, samples, model, device) if job.plan.is_native else None
    if job.weights:
        check()
    if job.weights and native is not None:
        write_weights(job.cache_dir, native.head.weights())
    elif job.weights:
        write_embeddings(job.cache_dir, model.get_input_embeddings().weight)
    forward = native or PlannedForward(job.plan, samples, model, device)
    make_shards(job.cache_dir, job.plan, forward, shards, written, check)


def _device(plan: Plan, number: int) -> torch.device:
    if plan.run["device"] != "cuda":
        return torch.device(plan.run["device"])
    return torch.device("cuda", number % torch.cuda.device_count())


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch compute with this number of threads in the block, and with the previous number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
