"""The target's planned batches, one after the other, and their outputs on the disk: what one worker does.

The forward of a batch runs while a thread writes the one before, the last ones of a shard while the next one begins.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from niels_gpt.eagle3.layout import DTYPES, INT_FIELDS, PathLike, row_bytes_of
from niels_gpt.eagle3.plan import Batch, Plan
from niels_gpt.eagle3.positions import ENOUGH, Counts
from niels_gpt.eagle3.samples import Samples
from niels_gpt.eagle3.shards import ShardWriter
from niels_gpt.eagle3.supervision import cache_fields, check_finite
from niels_gpt.eagle3.target import HFEagle3TargetModel, _shift_left_with_zero
from niels_gpt.fileio import CacheError

_AHEAD = 2  # batches: one that is being written, and one that waits for it
_TRIED = 8  # tokens of the trial
_COUNTS = ("tokens", "supervised", "positions")
Report = Callable[[int, int], None]
"""Is told tokens and bytes that were written since the last call."""


class PlannedForward:
    """Runs planned batches through a target: the same batch, the same bytes."""

    def __init__(self, plan: Plan, samples: Samples, model: Any, device: torch.device | str = "cpu") -> None:
        """model: the plan's target, on `device` and of the plan's compute dtype."""
        self._plan, self._samples, self._device = plan, samples, torch.device(device)
        self.target = HFEagle3TargetModel(model, plan.manifest["aux_layer_ids"])
        self._selected = torch.tensor(plan.manifest["selected_token_ids"], device=self._device)
        self._mask = torch.zeros(plan.manifest["target_vocab_size"], dtype=torch.bool, device=self._device)
        self._mask[self._selected] = True

    def lengths(self, shard: int, batch: Batch) -> list[int]:
        """Return the tokens of each row of a batch."""
        return [len(self._samples.row(index)[0]) for index in self._indices(shard, batch)]

    def __call__(self, shard: int, batch: Batch) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return what `ShardWriter.write` takes for the rows of a batch, and the facts of `cache_fields`.

        Raises: NonFiniteError naming sample and layer.
        """
        width, _ = batch
        lengths, names = self.lengths(shard, batch), [self._name(index) for index in self._indices(shard, batch)]
        manifest, layout = self._plan.manifest, self._plan.layout
        dtype = DTYPES[layout.dtype]
        raw = self._inputs(shard, batch)
        with torch.no_grad():
            outputs = self.target.generate_batch(**{name: raw[name][:, :width].to(self._device) for name in raw})
            check_finite(outputs, names, lengths, manifest["aux_layer_ids"], dtype)
            tensors, facts = cache_fields(outputs, lengths, self._selected, self._mask, topk=layout.topk, dtype=dtype)
        # At their full width, with the pad id behind a sample, as if the target had run on all of it.
        tensors |= {name: raw[name] if name == "attention_mask" else _shift_left_with_zero(raw[name]) for name in raw}
        return tensors, facts

    def _indices(self, shard: int, batch: Batch) -> list[int]:
        return [shard * int(self._plan.manifest["shard_size"]) + row for row in batch[1]]

    def _name(self, index: int) -> str:
        return self._samples.source_ids[index]

    def _inputs(self, shard: int, batch: Batch) -> dict[str, torch.Tensor]:
        """Return what the target is run on, not shifted, padded to the rows' full width S: int64 [rows, S] each."""
        _, rows = batch
        ids = torch.full((len(rows), self._plan.layout.seq_length), int(self._plan.tokenizer["pad_id"]))
        present, loss = torch.zeros_like(ids), torch.zeros_like(ids)
        for place, index in enumerate(self._indices(shard, batch)):
            raw, mask = self._samples.row(index)
            ids[place, : len(raw)] = torch.from_numpy(raw)
            present[place, : len(raw)] = 1
            loss[place, : len(raw)] = torch.from_numpy(mask)
        return {"input_ids": ids, "attention_mask": present, "loss_mask": loss}


def try_target(plan: Plan, samples: Samples, model: Any, device: torch.device) -> None:
    """Run a target over a few tokens of the first sample, before anything is written.

    Raises: ValueError where it does not run, or gives tensors of other sizes than the plan has.
    """
    ids = torch.from_numpy(samples.row(0)[0][:_TRIED].astype("int64"))[None].to(device)
    try:
        found = HFEagle3TargetModel(model, plan.manifest["aux_layer_ids"])
        outputs = found.generate_batch(ids, torch.ones_like(ids), torch.zeros_like(ids))
    except OSError:
        raise
    except Exception as error:  # of the model's own code, of torch, of a library that it needs
        advice = "" if plan.run.get("attention") == "eager" else ". If its attention is why: --attention eager"
        raise ValueError(
            f"{plan.target.get('name')}: the target was loaded, and could not be run over {ids.shape[1]} tokens "
            f"({type(error).__name__}: {error}){advice}. Nothing was written"
        ) from error
    sizes = outputs.aux_hidden_states.shape[-1], outputs.logits.shape[-1]
    wanted = plan.manifest["aux_hidden_dim"], plan.manifest["target_vocab_size"]
    if sizes != wanted:
        raise ValueError(
            f"{plan.target.get('name')}: it gives {sizes[0]} hidden states and {sizes[1]} logits a token, expected "
            f"{wanted[0]} and {wanted[1]} by its config. Nothing was written"
        )


def make_shards(
    cache_dir: PathLike, plan: Plan, forward: PlannedForward, shards: Iterable[int], report: Report
) -> None:
    """Make shards, one after the other.

    Raises: NonFiniteError, OSError; CacheError as soon as `ENOUGH` slots with loss have no position. The shard in work
        is left out then.
    """
    supervised = positions = 0
    with _writing(cache_dir, plan) as tail:
        for shard in shards:
            facts = _Facts()
            for batch in plan.batches[shard]:
                tensors, found = forward(shard, batch)
                lengths = forward.lengths(shard, batch)
                facts.add({"tokens": lengths, **found})
                supervised, positions = supervised + sum(found["supervised"]), positions + sum(found["positions"])
                if not positions and supervised >= ENOUGH:
                    raise CacheError(f"{os.fspath(cache_dir)}: {Counts(supervised, supervised, 0).problem}")
                tail.write(shard, batch[1], lengths, tensors)
                report(*tail.written())
            tail.commit({"plan": plan.sha256, **facts.sums(compressed=plan.layout.topk > 0)})
    report(*tail.written())


class _Facts:
    """The sums over a shard, in the order of its batches, which the plan fixes: so are the roundings."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = dict.fromkeys((*_COUNTS, "kept_mass", "draft_mass"), 0.0)

    def add(self, facts: Mapping[str, Any]) -> None:
        for name in self._sums:
            if facts.get(name) is not None:
                self._sums[name] += sum(torch.as_tensor(facts[name], dtype=torch.float64).tolist())

    def sums(self, *, compressed: bool) -> dict[str, Any]:
        counts = {name: int(self._sums[name]) for name in _COUNTS}
        kept = self._sums["kept_mass"] if compressed else None
        return {**counts, "kept_mass": kept, "draft_mass": self._sums["draft_mass"]}


class _Tail:
    """Writes batches and ends shards in a thread, in the order in which they are given."""

    def __init__(self, cache_dir: PathLike, plan: Plan) -> None:
        self._cache_dir, self._plan = cache_dir, plan
        fields, slots = plan.layout.fields, plan.layout.seq_length
        self._int_bytes = sum(row_bytes_of(field) for name, field in fields.items() if name in INT_FIELDS)
        self._slot_bytes = sum(row_bytes_of(field) for field in fields.values()) - self._int_bytes
        self._slot_bytes //= slots
        self._pool = ThreadPoolExecutor(1)
        self._given: deque[Future[None]] = deque()
        self._writer: ShardWriter | None = None
        self._tokens = self._bytes = 0  # written by the thread
        self._told = (0, 0)
        self._failed = False

    def write(self, shard: int, rows: list[int], slots: list[int], tensors: dict[str, torch.Tensor]) -> None:
        self._give(self._write, shard, rows, slots, tensors)

    def commit(self, facts: dict[str, Any]) -> None:
        self._give(self._commit, facts)

    def written(self) -> tuple[int, int]:
        """Return tokens and bytes since the last call."""
        (tokens, size), (tokens_before, before) = (self._tokens, self._bytes), self._told
        self._told = tokens, size
        return tokens - tokens_before, size - before

    def end(self) -> None:
        """Wait for what was given. Raises what the thread raised."""
        while self._given:
            self._given.popleft().result()

    def close(self) -> None:
        """Stop; a shard that was not committed is removed."""
        self._pool.shutdown(cancel_futures=True)
        if self._writer is not None:
            self._writer.discard()

    def _give(self, work: Callable[..., None], *arguments: Any) -> None:
        while self._given and (len(self._given) >= _AHEAD or self._given[0].done()):
            self._given.popleft().result()
        self._given.append(self._pool.submit(self._do, work, *arguments))

    def _do(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._failed:
            return  # its error is told by the call that failed
        try:
            work(*arguments)
        except BaseException:
            self._failed = True
            raise

    def _write(self, shard: int, rows: list[int], slots: list[int], tensors: dict[str, torch.Tensor]) -> None:
        if self._writer is None:
            self._writer = ShardWriter(self._cache_dir, shard, self._plan.layout.fields, self._plan.rows_of(shard))
        self._writer.write(rows, slots, tensors)
        self._tokens += sum(slots)
        self._bytes += len(rows) * self._int_bytes + sum(slots) * self._slot_bytes

    def _commit(self, facts: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.commit(facts)
        self._writer = None


@contextmanager
def _writing(cache_dir: PathLike, plan: Plan) -> Iterator[_Tail]:
    tail = _Tail(cache_dir, plan)
    try:
        yield tail
        tail.end()
    finally:
        tail.close()
