"""What one worker does with its shards: the target over each planned batch, its outputs to the shard's file.

A thread writes while the next batch is computed. Decides when a shard is finished: its last batch is written, then its
receipt, which holds the sums of `cache_fields` over the shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import torch

from niels_gpt.eagle3.format.layout import DTYPES, INT_FIELDS, PathLike, row_bytes_of
from niels_gpt.eagle3.format.plan import Batch, Plan
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.format.shard_writer import ShardWriter
from niels_gpt.eagle3.produce.positions import ENOUGH, Counts
from niels_gpt.eagle3.produce.supervision import cache_fields, check_finite
from niels_gpt.eagle3.target import HFEagle3TargetModel, _shift_left_with_zero
from niels_gpt.storage.codes import coded
from niels_gpt.storage.errors import CacheError

_AHEAD = 2  # batches given to the writer: one that is being written, and one that waits
_TRIAL_TOKENS = 8
_COUNTS = ("tokens", "supervised", "positions")
_SUMS = (*_COUNTS, "kept_mass", "draft_mass")
Written = Callable[[int, int], None]
"""Called with the tokens and bytes that were written since the last call."""


class PlannedForward:
    """Runs planned batches through a target; the same batch gives the same bytes."""

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
        manifest, layout = self._plan.manifest, self._plan.layout
        names = [self._samples.source_ids[index] for index in self._indices(shard, batch)]
        lengths, dtype = self.lengths(shard, batch), DTYPES[layout.dtype]
        raw = self._inputs(shard, batch)
        with torch.no_grad():
            outputs = self.target.generate_batch(**{name: raw[name][:, :width].to(self._device) for name in raw})
            check_finite(outputs, names, lengths, manifest["aux_layer_ids"], dtype)
            tensors, facts = cache_fields(outputs, lengths, self._selected, self._mask, topk=layout.topk, dtype=dtype)
        # At full width, padded with the pad id, as if the target had run on all of it.
        tensors |= {name: raw[name] if name == "attention_mask" else _shift_left_with_zero(raw[name]) for name in raw}
        return tensors, facts

    def _indices(self, shard: int, batch: Batch) -> list[int]:
        return [shard * int(self._plan.manifest["shard_size"]) + row for row in batch[1]]

    def _inputs(self, shard: int, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the target's inputs, not shifted, padded to the full width S: int64 [rows, S] each."""
        _, rows = batch
        ids = torch.full((len(rows), self._plan.layout.seq_length), int(self._plan.tokenizer["pad_id"]))
        present, loss = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, index in enumerate(self._indices(shard, batch)):
            raw, mask = self._samples.row(index)
            ids[row, : len(raw)] = torch.from_numpy(raw)
            present[row, : len(raw)] = 1
            loss[row, : len(raw)] = torch.from_numpy(mask)
        return {"input_ids": ids, "attention_mask": present, "loss_mask": loss}


def try_target(plan: Plan, samples: Samples, model: Any, device: torch.device) -> None:
    """Run a target over the first tokens of the first sample; nothing is written.

    Raises: ValueError where it does not run, or returns tensors of other sizes than the plan states.
    """
    ids = torch.from_numpy(samples.row(0)[0][:_TRIAL_TOKENS].astype("int64"))[None].to(device)
    try:
        target = HFEagle3TargetModel(model, plan.manifest["aux_layer_ids"])
        outputs = target.generate_batch(ids, torch.ones_like(ids), torch.zeros_like(ids))
    except OSError:
        raise
    except Exception as error:  # of the model's code, torch, or a library
        advice = "" if plan.run.get("attention") == "eager" else ". If its attention is why: --attention eager"
        raise coded(
            "E705",
            ValueError(
                f"{plan.target.get('name')}: the target was loaded, and could not be run over {ids.shape[1]} tokens "
                f"({type(error).__name__}: {error}){advice}. Nothing was written"
            ),
        ) from error
    sizes = outputs.aux_hidden_states.shape[-1], outputs.logits.shape[-1]
    expected = plan.manifest["aux_hidden_dim"], plan.manifest["target_vocab_size"]
    if sizes != expected:
        raise coded(
            "E705",
            ValueError(
                f"{plan.target.get('name')}: it gives {sizes[0]} hidden states and {sizes[1]} logits a token, expected "
                f"{expected[0]} and {expected[1]} by its config. Nothing was written"
            ),
        )


def make_shards(
    cache_dir: PathLike, plan: Plan, forward: PlannedForward, shards: Iterable[int], written: Written
) -> None:
    """Make shards, one after the other.

    Raises: NonFiniteError, OSError; CacheError once `ENOUGH` supervised slots have no position. A shard that is not
        finished is then removed.
    """
    supervised = positions = 0
    with _Writer(cache_dir, plan) as writer:
        for shard in shards:
            sums: dict[str, float] = dict.fromkeys(_SUMS, 0.0)
            for batch in plan.batches[shard]:
                tensors, facts = forward(shard, batch)
                lengths = forward.lengths(shard, batch)
                _add(sums, {"tokens": lengths, **facts})
                supervised, positions = supervised + sum(facts["supervised"]), positions + sum(facts["positions"])
                if not positions and supervised >= ENOUGH:
                    raise CacheError(cache_dir, Counts(supervised, supervised, 0).problem or "", code="E709")
                writer.write(shard, batch[1], lengths, tensors)
                written(*writer.written())
            counts = {name: int(sums[name]) for name in _COUNTS}
            kept = sums["kept_mass"] if plan.layout.topk > 0 else None
            writer.commit({"plan": plan.sha256, **counts, "kept_mass": kept, "draft_mass": sums["draft_mass"]})
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

    def __init__(self, cache_dir: PathLike, plan: Plan) -> None:
        self._cache_dir, self._plan = cache_dir, plan
        fields, slots = plan.layout.fields, plan.layout.seq_length
        self._int_bytes = sum(row_bytes_of(field) for name, field in fields.items() if name in INT_FIELDS)
        self._slot_bytes = (plan.layout.row_bytes - self._int_bytes) // slots
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()
        self._shard: ShardWriter | None = None
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

    def write(self, shard: int, rows: list[int], slots: list[int], tensors: dict[str, torch.Tensor]) -> None:
        """Write a batch's rows, as `ShardWriter.write`. Waits while `_AHEAD` batches wait."""
        self._submit(self._write, shard, rows, slots, tensors)

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

    def _write(self, shard: int, rows: list[int], slots: list[int], tensors: dict[str, torch.Tensor]) -> None:
        if self._shard is None:
            self._shard = ShardWriter(self._cache_dir, shard, self._plan.layout.fields, self._plan.rows_of(shard))
        self._shard.write(rows, slots, tensors)
        self._tokens += sum(slots)
        self._bytes += len(rows) * self._int_bytes + sum(slots) * self._slot_bytes

    def _commit(self, facts: dict[str, Any]) -> None:
        assert self._shard is not None
        self._shard.commit(facts)
        self._shard = None
