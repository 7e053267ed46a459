"""What one worker does with its shards: the target over each planned batch, its outputs to the shard's file.

A thread writes while the next batch is computed. Decides when a shard is finished: its last batch is written, then its
receipt, which holds sums over its batches. What differs between the forms is in forward.py and native_forward.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, Self

import torch

from niels_gpt.eagle3.format.layout import PathLike
from niels_gpt.eagle3.format.plan import Batch, Plan
from niels_gpt.eagle3.produce.positions import ENOUGH, Counts
from niels_gpt.storage.errors import CacheError

_AHEAD = 2  # batches given to the writer: one that is being written, and one that waits
Written = Callable[[int, int], None]
"""Called with the tokens and bytes that were written since the last call."""
Check = Callable[[], object]
"""Raises CacheError where this run has lost its lease, so that another one may be making the same shards."""


class Forward(Protocol):
    """`PlannedForward` and `NativeForward`: batches of one form through the target, and into a shard."""

    @property
    def sums(self) -> tuple[str, ...]:
        """What is added up over a shard, of the facts of its batches."""

    def lengths(self, shard: int, batch: Batch, /) -> list[int]:
        """Return the tokens of each row of a batch."""

    def __call__(self, shard: int, batch: Batch, /) -> tuple[Any, Any]:
        """Return what `write` takes, and the facts of a batch: a list of a number a row each, or None."""

    def open_shard(self, cache_dir: PathLike, shard: int) -> Any:
        """Return the writer of a shard."""

    def write(self, writer: Any, rows: Sequence[int], lengths: Sequence[int], made: Any, /) -> int:
        """Write what a batch gave; return its bytes."""

    def receipt_facts(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """Return a receipt's facts."""


def make_shards(
    cache_dir: PathLike, plan: Plan, forward: Forward, shards: Iterable[int], written: Written, check: Check
) -> None:
    """Make shards, one after the other.

    check: called before a shard's file is created and before it is renamed, in a thread.
    Raises: NonFiniteError, OSError; as `check`; CacheError once `ENOUGH` supervised slots have no position. A shard
        that is not finished is then removed.
    """
    supervised = positions = 0
    with _Writer(cache_dir, forward, check) as writer:
        for shard in shards:
            sums: dict[str, float] = dict.fromkeys(forward.sums, 0.0)
            for batch in plan.batches[shard]:
                made, facts = forward(shard, batch)
                _add(sums, facts)
                supervised, positions = supervised + sum(facts["supervised"]), positions + sum(facts["positions"])
                if not positions and supervised >= ENOUGH:
                    raise CacheError(cache_dir, Counts(supervised, supervised, 0).problem or "", code="E709")
                writer.write(shard, batch[1], forward.lengths(shard, batch), made)
                written(*writer.written())
            writer.commit(forward.receipt_facts(sums))
    written(*writer.written())


def _add(sums: dict[str, float], facts: Mapping[str, Any]) -> None:
    """Add the facts of a batch, in the order of the plan's batches, which fixes the rounding."""
    for name in sums:
        if facts.get(name) is not None:
            sums[name] += sum(torch.as_tensor(facts[name], dtype=torch.float64).tolist())


class _Writer:
    """Writes batches and commits shards in one thread, in the order in which they are given.

    Leaving the block waits for all of it and raises the thread's error; a shard that was not committed is removed.
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
        """Write a batch's rows. Waits while `_AHEAD` batches wait."""
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
