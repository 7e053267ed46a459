"""Runs the target in this process or in several: hands out the shards of a plan and writes them.

The first process loads the target and tries it on a few tokens before anything is written. Then each worker asks for
one shard after another: it runs the target over each planned batch, and a thread writes the outputs while the next
batch is computed. A shard is finished when its last batch is written, and then its receipt, which holds sums over its
batches. The number of workers never changes the bytes. A failed worker stops all others; finished shards stay. A worker
process ends with its parent. With tensor parallelism a worker is a group of processes, which hold one target together;
the first of them asks for shards.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import torch

from niels_gpt.eagle3.format.layout import SIDECAR, PathLike
from niels_gpt.eagle3.format.plan import TargetPlan
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.format.weights import write_embeddings, write_weights
from niels_gpt.eagle3.forward import (
    DenseForward,
    Forward,
    NativeForward,
    broken_weight,
    not_finite,
)
from niels_gpt.eagle3.head import TargetHead, embeddings_of
from niels_gpt.eagle3.target import HFEagle3TargetModel, capture
from niels_gpt.eagle3.tensor_parallel import Rank, follow, join_ranks, lead, leave, new_ranks, refuse_few_gpus
from niels_gpt.eagle3.totals import ENOUGH, Counts
from niels_gpt.storage.errors import CacheError, TargetError, WorkerDied
from niels_gpt.work import sigint_blocked

logger = logging.getLogger(__name__)

Load = Callable[[torch.device], Any]
"""Returns the target on a device, as `functools.partial(load_target, ...)` does; pickled for worker processes."""
Found = tuple[dict[str, Any], str] | None
"""The head as a native manifest states it: `head`, and last_hidden; None for dense forms."""
Written = Callable[[int, int], None]
"""Called with the tokens and bytes written since the last call."""
Check = Callable[[], object]
"""Raises CacheError if this run has lost its lease, as another one may be building the same shards."""
_AHEAD = 2  # batches given to the writer: one that is being written, and one that waits
_PATIENCE_S = 10.0
_MOMENT_S = 0.5  # in which a process that takes others along has ended
_TRIED_TOKENS = 8


class Job(NamedTuple):
    """What to build, and where."""

    cache_dir: str
    plan: TargetPlan
    """A native one has the target's head."""
    weights: bool
    """Whether to write the target's embeddings (native: also its head)."""


class Workers:
    """The target in this process or in several. Leaving the block ends the processes."""

    def __init__(self, plan: TargetPlan, samples: Samples, load: Load, number: int, *, start: str) -> None:
        """number: of copies of the target; 1: this process has it, unless the plan's run has `tensor_parallel`.

        start: how processes are started: spawn or fork.
        Raises: TargetError (E705) if the copies need more GPUs than there are.
        """
        self._plan, self._samples, self._load, self._number, self._start = plan, samples, load, number, start
        self._ranks: int = plan.run.get("tensor_parallel", 1)
        refuse_few_gpus(plan.run["device"], self._ranks, number)
        self._model: Any = None
        self._running: dict[Connection, Any] = {}
        self._leading: list[Connection] = []
        self._scratch = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.join(_PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def tried(self) -> Found:
        """Load the target, run it over the first tokens of the first sample, and return the findings of `try_target`.

        Of several processes the first one does this and then waits for its work. Nothing is written.

        Raises: the errors of the load; ValueError (E705) if the target does not run or its sizes differ from the
            plan's; NonFiniteError; RuntimeError (E506) if the process died.
        """
        name, ids = self._samples.source_ids[0], self._samples.row(0)[0][:_TRIED_TOKENS].astype("int64")
        if not self._is_alone:
            self._begin(0, Job("", self._plan, False), (name, ids))
            _, (_, found) = next(self._messages(list(self._running)))
            return found  # type: ignore[no-any-return]
        device = _device(self._plan, 0)
        with torch_threads(self._plan.run["threads"]):
            self._model = self._load(device)
            return try_target(self._plan, name, torch.from_numpy(ids)[None].to(device), self._model)

    def make(self, job: Job, shards: Sequence[int], written: Written, check: Check) -> None:
        """Build shards, and the target's weights if the job asks for them. Processes read the samples from the sidecar.

        check: called in this process, which has the lease, before a shard's file is created and before it is renamed.
        Raises: NonFiniteError; OSError; the errors of `check` and of the load; CacheError (E709) once `ENOUGH`
            supervised slots have no position; RuntimeError (E506) if a process died. An unfinished shard is removed.
        """
        if self._is_alone:
            with torch_threads(job.plan.run["threads"]):
                device = _device(job.plan, 0)
                model, self._model = self._load(device) if self._model is None else self._model, None
                _make(job, model, device, self._samples, shards, written, check)
            return
        for end in self._leading:  # the one that has tried the target
            with _noticing_death(self._running[end]):
                end.send(job)
        for number in range(len(self._leading), min(self._number, max(1, len(shards)))):
            self._begin(number, job._replace(weights=job.weights and not number), None)
        self._serve(iter(shards), written, check)

    @property
    def _is_alone(self) -> bool:
        """Whether this process runs the target."""
        return self._number == self._ranks == 1

    def _begin(self, number: int, job: Job, tried: tuple[str, Any] | None) -> None:
        """Start the process of a worker, or its processes."""
        context = multiprocessing.get_context(self._start)
        self._scratch = self._scratch or tempfile.mkdtemp(prefix="niels-gpt-")
        ranks = new_ranks(context, self._ranks) if self._ranks > 1 else [None]
        for place, rank in enumerate(ranks, number * self._ranks):
            ours, theirs = context.Pipe()
            about = job, self._load, place, rank, self._scratch, tried, theirs
            process = context.Process(target=_work, args=about, daemon=True)  # type: ignore[attr-defined]
            with sigint_blocked():
                process.start()
            self._running[ours] = process
            self._leading += [ours] if rank is None or rank.number == 0 else []
            for end in (theirs, *(rank.ends if rank else ())):
                end.close()

    def _messages(self, open_ends: list[Connection]) -> Iterator[tuple[Connection, list[Any]]]:
        """Yield the processes' messages, each with its end, until all of `open_ends` have ended, which changes it.

        Raises: the error of a process that failed; RuntimeError (E506) if one died.
        """
        while open_ends:
            for end in connection.wait(open_ends):
                assert isinstance(end, Connection)
                with _noticing_death(self._running[end]):
                    what, *about = end.recv()
                if what == "failed":
                    raise self._first_error(end, about[0], about[1], open_ends)
                if what == "ended":
                    open_ends.remove(end)
                else:
                    yield end, [what, *about]

    def _first_error(
        self, end: Connection, error: BaseException, when: float, open_ends: list[Connection]
    ) -> BaseException:
        """Return why a worker failed: the death of a rank takes the others along, and then the first error.

        error, when: of the process at `end`.
        """
        ends, errors = list(self._running), [(when, error)]
        first = ends.index(end) // self._ranks * self._ranks
        for other in {*ends[first : first + self._ranks]} & {*open_ends} - {end}:
            self._running[other].join(_MOMENT_S)
            what = ""
            with _noticing_death(self._running[other]):
                while what not in ("failed", "ended") and other.poll():
                    what, *about = other.recv()
                    errors += [(about[1], about[0])] if what == "failed" else []
        return min(errors, key=lambda each: each[0])[1]

    def _serve(self, shards: Iterator[int], written: Written, check: Check) -> None:
        """Hand out shards and check the lease for the processes until all of them have ended."""
        for end, (what, *about) in self._messages(list(self._running)):
            if what == "check":
                check()
            elif what == "written":
                written(*about)
            with _noticing_death(self._running[end]):
                end.send(next(shards, None) if what == "next" else None)


@contextmanager
def _noticing_death(process: Any) -> Iterator[None]:
    """Raise RuntimeError (E506) if a worker dies before it sent a message or read the answer."""
    try:
        yield
    except (EOFError, OSError):
        process.join(_PATIENCE_S)
        code = process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}" + ("; is there too little memory?" if code == -9 else "")
        raise WorkerDied(
            f"worker process {process.pid} died ({how}). Finished shards stay: run the same command with --resume"
        ) from None


# --- in a worker process ----------------------------------------------------------------------------------------------


def _work(
    job: Job,
    load: Load,
    place: int,
    rank: Rank | None,
    scratch: str,
    tried: tuple[str, Any] | None,
    parent: Connection,
) -> None:
    """Load the target and do a job, or follow the rank that does.

    place: number of this process among all. rank: in a group that holds one target. scratch: folder for temporary
        files, which the parent removes, as this process may be killed. tried: name and tokens of a sample to try it on
        first; then the job arrives from the parent afterwards.
    """
    tempfile.tempdir = scratch
    threading.Thread(target=_end_with_parent, args=(scratch,), daemon=True).start()
    ask, device = _asking(parent), _device(job.plan, place)
    try:
        torch.set_num_threads(job.plan.run["threads"])
        if rank is not None:
            join_ranks(rank, device)
        model = load(device)
        if rank is not None and rank.number:
            follow(model, rank, device)
            leave(rank)
            parent.send(("ended",))
            return
        if rank is not None:
            lead(model, rank)
        if tried is not None:
            name, ids = tried
            parent.send(("tried", try_target(job.plan, name, torch.from_numpy(ids)[None].to(device), model)))
            job = parent.recv()
        samples = Samples.open(os.path.join(job.cache_dir, SIDECAR))
        shards, written = iter(partial(ask, "next"), None), partial(ask, "written")
        _make(job, model, device, samples, shards, written, partial(ask, "check"))
        if rank is not None:
            leave(rank)
        parent.send(("ended",))
    except BaseException as error:
        when = time.monotonic()
        logger.debug("worker %d failed", place, exc_info=True)
        parent.send(("failed", _sendable(error), when))


def _asking(parent: Connection) -> Callable[..., Any]:
    """Return a function that sends a message to the parent and returns the answer; threads take turns."""
    lock = threading.Lock()

    def ask(*message: Any) -> Any:
        with lock:
            parent.send(message)
            return parent.recv()

    return ask


def _end_with_parent(scratch: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkerDied(f"{type(error).__name__}: {error}")
    return error


# --- both -------------------------------------------------------------------------------------------------------------


def try_target(plan: TargetPlan, name: str, ids: torch.Tensor, model: Any) -> Found:
    """Run a freshly loaded target over a few tokens; nothing is written.

    name: the sample of the tokens. ids: int64 [1, T], on the target's device.
    Returns the head as a native manifest states it, None for dense forms.

    Raises: ValueError (E705) if the target does not run, returns other sizes than planned, or its head gives other
        logits; NonFiniteError naming a weight that is not finite, and the layer, if these tokens show it.
    """
    try:
        sizes, head = _run(plan, name, ids, model)
    except OSError:
        raise
    except Exception as error:  # of the model's code, torch, or a library
        if getattr(error, "code", None) in ("E705", "E708"):  # has a text of its own
            raise
        advice = (
            "" if plan.run.get("attention") == "eager" else ". If the attention is the cause, pass --attention eager"
        )
        raise TargetError(
            f"{plan.target.get('name')}: the target was loaded, but failed on {ids.shape[1]} tokens "
            f"({type(error).__name__}: {error}){advice}. Nothing was written"
        ) from error
    manifest = plan.manifest
    aux = manifest["hidden_size"] * len(manifest["aux_layer_ids"]) if plan.is_native else manifest["aux_hidden_dim"]
    expected = aux, manifest["target_vocab_size"]
    if sizes != expected:
        raise TargetError(
            f"{plan.target.get('name')}: it gives {sizes[0]} hidden states and {sizes[1]} logits a token, expected "
            f"{expected[0]} and {expected[1]} by its config. Nothing was written"
        )
    return None if head is None else (head.facts(), head.last_hidden)


def _run(plan: TargetPlan, name: str, ids: torch.Tensor, model: Any) -> tuple[tuple[int, int], TargetHead | None]:
    """Return the number of hidden states and of logits that the target gives a token, and its head."""
    layers, present = plan.manifest["aux_layer_ids"], torch.ones_like(ids)
    if plan.is_native:
        aux, _, states = capture(model.eval(), ids, present, layers)
        with torch.no_grad():
            logits = model.get_output_embeddings()(states)
    else:
        outputs = HFEagle3TargetModel(model, layers).generate_batch(ids, present, torch.zeros_like(ids))
        aux, logits = outputs.aux_hidden_states, outputs.logits
        aux = aux.view(*aux.shape[:2], len(layers), -1)
    places = {f"block {layer}": aux[0, :, number] for number, layer in enumerate(layers)} | {"logits": logits[0]}
    found = ((where, (~values.isfinite().all(-1)).nonzero().flatten().tolist()) for where, values in places.items())
    where, bad = next((each for each in found if each[1]), ("", []))
    if bad and broken_weight(model):  # of other numbers the run says how many samples of a batch have them
        place = f"position {bad[0]}, {where}"
        raise not_finite(places[where][bad[0]], aux.dtype, place, [name], [0] * len(bad), model)
    head = TargetHead.of_model(model) if plan.is_native else None
    return (aux.shape[-2] * aux.shape[-1], logits.shape[-1]), head


def _make(
    job: Job, model: Any, device: torch.device, samples: Samples, shards: Iterable[int], written: Written, check: Check
) -> None:
    form = NativeForward if job.plan.is_native else DenseForward
    forward = form(job.plan, samples, model, device)
    if job.weights:
        check()
        if isinstance(forward, NativeForward):
            write_weights(job.cache_dir, forward.head.weights())
        else:
            write_embeddings(job.cache_dir, embeddings_of(model))
    make_shards(job, forward, shards, written, check)


def _device(plan: TargetPlan, place: int) -> torch.device:
    if plan.run["device"] != "cuda":
        return torch.device(plan.run["device"])
    return torch.device("cuda", place % torch.cuda.device_count())


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Set torch's number of threads for the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- a shard ----------------------------------------------------------------------------------------------------------


def make_shards(job: Job, forward: Forward, shards: Iterable[int], written: Written, check: Check) -> None:
    """Build shards one after another.

    check: called in a thread before a shard's file is created and before it is renamed.
    Raises: NonFiniteError; OSError; the errors of `check`; CacheError (E709) once `ENOUGH` supervised slots have no
        position. An unfinished shard is removed.
    """
    supervised = positions = 0
    with _Writer(job.cache_dir, forward, check) as writer:
        for shard in shards:
            sums: dict[str, float] = dict.fromkeys(forward.sums, 0.0)
            for batch in job.plan.batches[shard]:
                made, facts = forward(shard, batch)
                _add(sums, facts)
                supervised, positions = supervised + sum(facts["supervised"]), positions + sum(facts["positions"])
                if not positions and supervised >= ENOUGH:
                    raise CacheError(job.cache_dir, Counts(supervised, supervised, 0).problem or "", code="E709")
                writer.write(shard, batch[1], forward.lengths(shard, batch), made)
                written(*writer.written())
            writer.commit(forward.receipt_facts(sums))
    written(*writer.written())


def _add(sums: dict[str, float], facts: Mapping[str, Any]) -> None:
    """Add the facts of a batch. The plan's order of batches fixes the rounding of the sums."""
    for name in sums:
        if facts.get(name) is not None:
            sums[name] += sum(torch.as_tensor(facts[name], dtype=torch.float64).tolist())


class _Writer:
    """Writes batches and commits shards in one thread, in the given order.

    Leaving the block waits for the thread and raises its error; a shard that was not committed is removed.
    """

    def __init__(self, cache_dir: PathLike, forward: Forward, check: Check) -> None:
        self._cache_dir, self._forward, self._check = cache_dir, forward, check
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()
        self._shard: Any = None
        self._tokens = self._bytes = 0  # written by the thread
        self._reported = (0, 0)
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while kind is None and self._waiting:
                self._waiting.popleft().result()
        finally:
            # After an error of the target the complete shards are still written. Ctrl-C does not wait for them.
            self._pool.shutdown(cancel_futures=kind is not None and not issubclass(kind, Exception))
            if self._shard is not None:
                self._shard.discard()

    def write(self, shard: int, rows: list[int], lengths: list[int], made: Any) -> None:
        """Write a batch's rows. Waits while `_AHEAD` batches are queued."""
        self._submit(self._write, shard, rows, lengths, made)

    def commit(self, facts: dict[str, Any]) -> None:
        """Finish the shard of the last batch: its file, then its receipt with these facts."""
        self._submit(self._commit, facts)

    def written(self) -> tuple[int, int]:
        """Return the tokens and bytes written since the last call."""
        (tokens, size), (tokens_before, before) = (self._tokens, self._bytes), self._reported
        self._reported = tokens, size
        return tokens - tokens_before, size - before

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        while self._waiting and (len(self._waiting) >= _AHEAD or self._waiting[0].done()):
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(self._run, work, *arguments))

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._failed:
            return  # the call that failed has raised
        try:
            work(*arguments)
        except BaseException:
            self._failed = True
            raise

    def _write(self, shard: int, rows: list[int], lengths: list[int], made: Any) -> None:
        if self._shard is None:
            self._check()
            self._shard = self._forward.open_shard(self._cache_dir, shard)
        self._bytes += self._forward.write(self._shard, rows, lengths, made)
        self._tokens += sum(lengths)

    def _commit(self, facts: dict[str, Any]) -> None:
        assert self._shard is not None
        self._shard.commit(facts, self._check)
        self._shard = None
