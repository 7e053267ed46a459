"""Rows of a stream for the SFTTrainer of TRL: chats with the loss of their replies, and packed rows with their borders.

    rows, position = as_rows(stream, args)
    SFTTrainer(model, args, train_dataset=rows, callbacks=[position], processing_class=tokenizer).train()

SFTTrainer takes datasets of `datasets` alone, so this is one: a column of numbers, whose transform reads the rows. It
drops `position_ids`, and keeps documents apart by `seq_lengths` with padding_free=True; without that, documents of a
row see each other, and nothing says so. So packed rows are refused there. Settings, positions and checkpoints are as
in trainers/transformers.py.
"""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from trl.trainer.sft_config import SFTConfig

from niels_gpt.sampling.batch import Batch
from niels_gpt.sampling.epochs import Windows
from niels_gpt.sampling.examples import Examples
from niels_gpt.sampling.stream import Stream
from niels_gpt.storage.errors import UsageError
from niels_gpt.trainers.transformers import Numbered, Position, units_of


def as_rows(stream: Stream[Any], args: SFTConfig) -> tuple[datasets.Dataset, Position]:
    """Return what SFTTrainer takes as `train_dataset`, and the callback that keeps the stream's state in checkpoints.

    stream, args: as in trainers/transformers.py; args with dataset_kwargs={"skip_prepare_dataset": True}, packing=False
        and max_length=None or at least T + 1. Where rows hold several documents also padding_free=True.
    A row has `input_ids` and unshifted `labels`, -100 where there is no loss, both without padding, and `seq_lengths`
    where rows may hold several documents.
    Raises: UsageError for settings with which Trainer would repeat, drop, reorder or cut rows, or join documents.
    """
    several = _holds_several(stream)
    _check(stream, args, several)
    numbered = Numbered(stream, args)
    # The column is called input_ids because Trainer removes columns of other names.
    rows = datasets.Dataset(pa.table({"input_ids": np.arange(numbered.length)}))
    rows.set_transform(_Transform(numbered, several))
    return rows, Position(numbered)


class _Transform:
    """Reads rows by number. May be pickled; its deep copy is itself, because the callback moves its `Numbered`."""

    def __init__(self, numbered: Numbered, several: bool) -> None:
        self._numbered, self._several = numbered, several

    def __call__(self, numbers: dict[str, list[int]]) -> dict[str, list[Any]]:
        return _unpadded(self._numbered.batch(numbers["input_ids"]), self._several)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Transform:  # `datasets` copies what it is given
        return self


def _holds_several(stream: Stream[Any]) -> bool:
    """Return whether rows may hold several documents that are to be kept apart."""
    return not all(
        isinstance(units, Examples) or (isinstance(units, Windows) and not units.documents)
        for units in units_of(stream)
    )


def _check(stream: Stream[Any], args: SFTConfig, several: bool) -> None:
    """Raise UsageError for settings with which SFTTrainer would cut or pack rows, or join their documents."""
    prepared: Any = args.dataset_kwargs or {}
    if not prepared.get("skip_prepare_dataset"):
        raise UsageError('dataset_kwargs: expected {"skip_prepare_dataset": True}, because the rows are tokens')
    if args.packing:
        raise UsageError("packing=True: it would pack the rows again. Pass packing=False, and open a PackedStream")
    if args.max_length is not None and args.max_length < stream.T + 1:
        raise UsageError(f"max_length={args.max_length}: rows have up to T + 1 = {stream.T + 1} tokens. Pass None")
    if several and not args.padding_free:
        raise UsageError(
            "padding_free=False: the documents of a row would see each other, because SFTTrainer drops position_ids "
            "and masks. Pass padding_free=True and max_length=None, or open an SFTStream"
        )


def _unpadded(batch: Batch, several: bool) -> dict[str, list[Any]]:
    """Return the rows of a batch without their padding: int64 [tokens] each; the last target is a token of its row."""
    count, T = batch.x.shape
    inputs = Batch(batch.x, batch.y, {}).for_transformers()  # without its mask
    ids, labels = inputs["input_ids"].numpy(), inputs["labels"].numpy()
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "seq_lengths": []}
    for row, lengths in enumerate(_lengths(batch) or [[T]] * count):
        if sum(lengths) == T and labels[row, T] >= 0:
            lengths = [*lengths[:-1], lengths[-1] + 1]
        for name, values in (("input_ids", ids), ("labels", labels)):
            rows[name].append(values[row, : sum(lengths)])
        rows["seq_lengths"].append(lengths)
    return rows if several else {name: rows[name] for name in ("input_ids", "labels")}


def _lengths(batch: Batch) -> list[list[int]] | None:
    """Return the tokens of each segment of each row, without padding; None: not known."""
    is_padding = batch.is_padding
    if batch.cu_seqlens is None or is_padding is None:
        return None
    (count, T), starts, is_text = batch.x.shape, batch.cu_seqlens.numpy(), ~is_padding.numpy()
    lengths, row_of = np.diff(starts)[is_text], (starts[:-1] // T)[is_text]
    return [part.tolist() for part in np.split(lengths, row_of.searchsorted(np.arange(1, count)))]
