"""Rows of a stream for the Trainer of transformers, and its position in the checkpoints.

    rows, position = as_rows(stream, args)
    Trainer(model=model, args=args, train_dataset=rows, callbacks=[position]).train(resume_from_checkpoint=...)

Trainer reads an IterableDataset on one process and sends the rows to the others, and to resume it reads all of them
again. So `Rows` is a map dataset: row i is a sample by its number. Each process and DataLoader worker reads its own
rows alone, a resumed run reads none of those before, and no position depends on what was read ahead. Trainer keeps no
state of a dataset (transformers 5.23, accelerate 1.15; its accelerator_config has no `use_stateful_dataloader`):
`Position` writes the stream's into trainer_state.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from niels_gpt.sampling.batch import Batch
from niels_gpt.sampling.epochs import Units
from niels_gpt.sampling.stream import Located, Samples, Stream
from niels_gpt.storage.errors import StateError, StreamUseError, UsageError

_KEY = "niels_gpt stream"
_LOCATED = 4096  # rows located at once, of the next batches of a process: one takes as long as hundreds


def as_rows(
    stream: Stream[Any], args: TrainingArguments, *, dtype: torch.dtype = torch.float32
) -> tuple[Rows, Position]:
    """Return what Trainer takes as `train_dataset`, and the callback that keeps the stream's state in checkpoints.

    stream: of tokens, on the CPU, at its start, for all ranks together: rank and world_size are Trainer's. Its
        global_batch_size is the rows of one step of the optimizer: per-device batch x accumulation x processes.
    args: with train_sampling_strategy="sequential", and either max_steps or, for a stream with an end, which counts its
        own epochs, num_train_epochs=1.
    dtype: of the masks of rows that hold several documents. "sdpa" takes float32 with any model.
    A row is one of `Batch.for_transformers`: its labels are unshifted. Source and numbers of documents stay behind.
    Raises: UsageError for settings with which Trainer would repeat, drop or reorder rows.
    """
    rows = Rows(Numbered(stream, args), dtype)
    return rows, Position(rows.numbered)


class Numbered:
    """Samples of a stream by Trainer's index, and how both are related. May be pickled."""

    def __init__(self, stream: Stream[Any], args: TrainingArguments) -> None:
        """Check stream and settings. Raises: UsageError."""
        units_of(stream)
        if (stream.rank, stream.world_size, stream.device) != (0, 1, "cpu"):
            found = f"rank={stream.rank}, world_size={stream.world_size}, device={stream.device!r}"
            raise UsageError(f"{found}: Trainer shares out the rows and moves them. Open the stream without these")
        if stream.state_dict()["consumed_samples"]:
            raise UsageError(
                f"the stream is at sample {stream.consumed_samples}, expected its start: Trainer counts its steps from "
                "its checkpoint. Pass that as resume_from_checkpoint, and the callback to Trainer"
            )
        self.stream, self.shift, self.length, self._max_steps = stream, 0, 0, args.max_steps
        self.check(args)
        self.length = self._length(0, args)
        self._ahead: _Ahead | None = None
        self._last: int | None = None  # the first sample of the batch before

    def check(self, args: TrainingArguments) -> None:
        """Raise UsageError for settings with which Trainer would repeat, drop or reorder rows."""
        config: Any = args.accelerator_config
        checked = {
            "train_sampling_strategy": (args.train_sampling_strategy, "sequential"),
            "ignore_data_skip": (args.ignore_data_skip, False),
            "dataloader_in_order": (getattr(args, "dataloader_in_order", True), True),
            "auto_find_batch_size": (args.auto_find_batch_size, False),
            "accelerator_config.split_batches": (bool(config.split_batches), False),
            "accelerator_config.dispatch_batches": (bool(config.dispatch_batches), False),
        }
        for name, (found, expected) in checked.items():
            if found != expected:
                raise UsageError(f"{name}={found!r}: expected {expected!r}, or rows are served twice, or not at all")
        micro = args.train_batch_size * _data_parallel(args)
        size = self.stream.global_batch_size
        if args.max_steps != self._max_steps:
            raise UsageError(
                f"max_steps={args.max_steps}: as_rows was given settings with max_steps={self._max_steps}, and Trainer "
                "repeats rows where it has too few. Give both the same settings"
            )
        if micro * args.gradient_accumulation_steps != size:
            raise UsageError(
                f"global_batch_size={size} of the stream: a step of this Trainer takes {args.train_batch_size} rows x "
                f"{args.gradient_accumulation_steps} accumulation steps x {_data_parallel(args)} processes. Open the "
                "stream with their product, or change them"
            )
        self._check_end(args, micro)

    def _check_end(self, args: TrainingArguments, micro: int) -> None:
        """Raise UsageError where a run would not end with the stream. micro: rows of all processes in one forward."""
        size, steps, left = self.stream.global_batch_size, args.max_steps, self._samples_left(0)
        if left is None and steps <= 0:
            raise UsageError(f"max_steps={steps}: expected a number, because this {_kind(self.stream)} has no end")
        if left is not None and steps > -(-left // size):
            raise UsageError(f"max_steps={steps}: the stream ends after {-(-left // size)} steps. Open it with more")
        if steps <= 0 and args.num_train_epochs != 1:
            raise UsageError(
                f"num_train_epochs={args.num_train_epochs}: the stream counts its epochs, and Trainer would repeat all "
                "of them in one order. Open the stream with epochs=..., and pass num_train_epochs=1, or max_steps"
            )
        short = self._length(0, args) % micro
        if short and (micro > args.train_batch_size or args.dataloader_drop_last):
            raise UsageError(
                f"the last batch has {short} of {micro} rows, which Trainer fills up with rows that were served, or "
                "drops. Open the stream with drop_last=True, or pass a smaller max_steps"
            )

    def _samples_left(self, shift: int) -> int | None:
        """Return how many indices have a row, which is at most `shift` after the index; None: all."""
        end = self.stream.num_samples
        if end is None:
            return None
        size = self.stream.global_batch_size
        left = end - shift
        return left - left % size if self.stream.drop_last else left

    def _length(self, shift: int, args: TrainingArguments) -> int:
        left, wanted = self._samples_left(shift), args.max_steps * self.stream.global_batch_size
        if left is None:
            return wanted
        return min(left, wanted) if args.max_steps > 0 else left

    def begin_at_start(self) -> None:
        """Begin at sample 0. Raises: StreamUseError for a stream that begins later, in a run that was changed."""
        if first := self.stream.samples.origin.sample:
            raise StreamUseError(f"the stream begins at sample {first} of a run that was changed: open it again")
        self.shift = 0

    def begin(self, state: Mapping[str, Any], step: int, args: TrainingArguments, **how: Any) -> None:
        """Continue at a state of the stream, which step number `step` of Trainer ended with.

        how: see `load_state_dict` of the stream. Raises: its errors; StateError where Trainer counted other steps.
        """
        self.stream.load_state_dict(state, **how)
        size, served = self.stream.global_batch_size, self.stream.consumed_samples
        if served == self.stream.num_samples:
            served += -served % size  # the last batch, which may be short, is a step too
        self.shift, self._ahead = served - step * size, None
        length = self._length(self.shift, args)
        if length != self.length:
            raise StateError(
                f"state: after step {step}, {self.stream.consumed_samples} samples were served, not in batches of "
                f"{size}: this run has {length} rows, and Trainer counts {self.length}. Open "
                "the stream without an end, and pass max_steps; or resume with the batch size of the checkpoint"
            )

    def state(self, step: int) -> dict[str, Any]:
        """Return the stream's state after a step of Trainer."""
        consumed = min(step * self.stream.global_batch_size, self.length) + self.shift
        return self.stream.state_at(consumed)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return consecutive samples. Raises: StreamUseError for others: a sampler shuffled or repeated them."""
        return self._located(indices).read(indices[0] + self.shift, len(indices))

    def singly(self, indices: Sequence[int]) -> list[Batch]:
        """Return consecutive samples, each as a batch. Raises: StreamUseError for others."""
        located = self._located(indices)
        return [located.read(index + self.shift, 1) for index in indices]

    def _located(self, indices: Sequence[int]) -> _Ahead:
        first, count = indices[0] + self.shift, len(indices)
        if list(indices) != list(range(indices[0], indices[0] + count)):
            raise StreamUseError(
                f"the batch of rows {list(indices)[:4]}...: not consecutive, so a sampler has drawn them, and the "
                'stream has its own order. Pass train_sampling_strategy="sequential"'
            )
        stride = max(first - self._last, count) if self._last is not None else count
        self._last, ahead = first, self._ahead
        if ahead is None or ahead.stride != stride or not ahead.has(first, count):
            self._ahead = ahead = _Ahead(self.stream, first, count, stride)
        return ahead

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": None}


def units_of(stream: Stream[Any]) -> list[Units]:
    """Return what each source of a stream serves. Raises: UsageError unless its rows are of tokens."""
    samples = getattr(stream, "samples", None)
    units: list[Units] = [source.units for source in samples.sources] if isinstance(samples, Samples) else []
    if not units or any(each.form()["rows"] != "tokens" for each in units):
        raise UsageError(f"{_kind(stream)}: its rows are not of tokens. Expected a stream of documents or chats")
    return units


def _data_parallel(args: TrainingArguments) -> int:
    """Return how many processes, or groups of them that share a model, get rows of their own."""
    processes, shared = int(args.world_size), args.parallelism_config
    return processes // (1 if shared is None else int(shared.tp_size * shared.cp_size * shared.sp_size))


def _kind(stream: Stream[Any]) -> str:
    return type(stream).__name__


class _Ahead:
    """The next batches of one process or worker, located together: batch k begins `stride` * k samples later.

    So the rows that are read ahead are of this process too, where the rows between are of others.
    """

    def __init__(self, stream: Stream[Any], first: int, count: int, stride: int) -> None:
        batches, end = max(1, _LOCATED // count), stream.num_samples
        if end is not None:
            batches = max(1, min(batches, (end - first - count) // stride + 1))
        self._first, self._count, self.stride, self._batches = first, count, stride, batches
        numbers = first + stride * np.arange(batches)[:, None] + np.arange(count)
        self._located: Located = stream.samples.locate(numbers.reshape(-1))

    def has(self, first: int, count: int) -> bool:
        """Return whether these samples are a batch of this."""
        batch, rest = divmod(first - self._first, self.stride)
        return rest == 0 and 0 <= batch < self._batches and count == self._count

    def read(self, first: int, count: int) -> Batch:
        """Return some rows of one of these batches. first: a sample."""
        batch, row = divmod(first - self._first, self.stride)
        read: Batch = self._located.read(batch * self._count + row, count, "cpu").batch({})
        return read


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Row i: int64 [T + 1] `input_ids` and unshifted `labels`; where documents are known, `position_ids` and a mask.

    attention_mask: [1, T + 1, T + 1], see `block_causal_mask`. Row i is made when it is asked for, a batch at a time.
    """

    def __init__(self, numbered: Numbered, dtype: torch.dtype) -> None:
        self.numbered, self.dtype = numbered, dtype

    def __len__(self) -> int:
        """Return the rows that the run takes."""
        return self.numbered.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one row. Raises: IndexError."""
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """Return consecutive rows: a DataLoader asks for a batch of them. Raises: StreamUseError for others."""
        batch = self.numbered.batch(indices)
        if batch.cu_seqlens is None:
            inputs = batch.for_transformers()
            return [{name: tensor[row] for name, tensor in inputs.items()} for row in range(len(indices))]
        # A mask of one row is small enough that its memory is used again; the collator copies it into a large one.
        alone = (each.for_transformers(dtype=self.dtype) for each in self.numbered.singly(indices))
        return [{name: tensor[0] for name, tensor in inputs.items()} for inputs in alone]


class Position(TrainerCallback):
    """Writes the stream's state into each checkpoint, and on resuming compares it and continues at its sample."""

    def __init__(self, numbered: Numbered, **how: Any) -> None:
        """how: arguments of `load_state_dict` of the stream, for a run that continues with changes."""
        self._numbered, self.how = numbered, how

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Raise UsageError for settings that do not fit; StateError or CacheError for a checkpoint that does not."""
        self._numbered.check(args)
        step, written = state.global_step, cast(dict[str, Any], state.stateful_callbacks)
        if not step:
            self._numbered.begin_at_start()
            return
        saved = written.get(_KEY)
        if not isinstance(saved, dict) or saved.get("step") != step:  # Trainer copies what the checkpoint before had
            raise StateError(
                f"the checkpoint of step {step} holds no state of a stream after this step: the run that wrote it had "
                "no callback of as_rows. Resume from an earlier checkpoint; or leave the callback out: Trainer then "
                "continues at its count of steps, and compares nothing"
            )
        self._numbered.begin(saved.get("state", {}), step, args, **self.how)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Put the state where a checkpoint of this step writes it."""
        written = cast(dict[str, Any], state.stateful_callbacks)
        written[_KEY] = {"step": state.global_step, "state": self._numbered.state(state.global_step)}
