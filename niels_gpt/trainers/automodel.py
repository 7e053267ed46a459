"""NeMo Automodel: `StreamDataset`, a `_target_` for the dataset of its recipes' YAML.

Automodel gives each data-parallel rank a StatefulDataLoader, whose collate function makes a batch of local_batch_size
rows. The dataset yields the rows of one stream batch after the other, so both must agree on that size. It is sharded by
the ranks that Automodel passes to `shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from niels_gpt.sampling.batch import Batch
from niels_gpt.sampling.stream import Stream
from niels_gpt.storage.errors import StreamUseError, UsageError

FORMS = ("rows", "thd", "neat")
_PAD_IDS = "___PAD_TOKEN_IDS___"
"""A key of default_collater, which takes tokens of id 0 for padding where a row does not name another id."""


class StreamDataset(IterableDataset[dict[str, Any]]):
    """Rows of a stream, for Automodel's collate functions. A stream of some epochs is one epoch: `num_epochs: 1`."""

    def __init__(
        self, stream_fn: Callable[..., Stream[Batch]], *, local_batch_size: int, form: str = "rows", **arguments: Any
    ) -> None:
        """Keep what opens the stream.

        stream_fn: called with `arguments`, and with global_batch_size, rank and world_size. In YAML a name, such as
            niels_gpt.sampling.PackedStream or run.py:open_mixture.
        local_batch_size: as in step_scheduler; also the loader's batch_size, whose default it is.
        form: of a row. "rows": tensors, for default_collater. For streams that know the segments of a row, "thd":
            with seq_lens, for packed_sequence_thd_collater; "neat": with the number of each token's segment in
            attention_mask, for neat_packed_collater.
        Raises: ValueError for another form.
        """
        if form not in FORMS:
            raise UsageError(f"form={form!r}: expected one of {', '.join(FORMS)}")
        self._open, self._arguments, self._size, self.form = stream_fn, arguments, local_batch_size, form
        self._stream: Stream[Batch] | None = None
        self._left = 0  # rows of the last batch that were not yielded yet

    def shard(self, num_shards: int, index: int) -> StreamDataset:
        """Return the rows of one rank. Automodel calls this once. Raises: what opening the stream raises."""
        made = StreamDataset(self._open, local_batch_size=self._size, form=self.form, **self._arguments)
        ranks = {"rank": index, "world_size": num_shards, "global_batch_size": num_shards * self._size}
        made._stream = self._open(**self._arguments, **ranks)
        return made

    @property
    def stream(self) -> Stream[Batch]:
        """The stream of this rank. Raises: StreamUseError before `shard`."""
        if self._stream is None:
            raise StreamUseError("a StreamDataset without its rank: call shard(number of ranks, rank) first")
        return self._stream

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of this rank, int64 [T] each: input_ids, and labels that are shifted, as Automodel has them.

        Raises: ValueError if the stream knows the segments and the form leaves them out, or the other way round;
            StreamUseError where the iterator before stopped in the middle of a stream's batch, or the stream has ended.
        """
        self._check_whole()
        for batch in self.stream:
            rows = _rows(batch, self.form)
            for self._left in reversed(range(len(rows))):
                yield rows[len(rows) - 1 - self._left]

    def __len__(self) -> int:
        """Return the rows of a rank, the last batch counted as whole. Raises: TypeError for a stream without end."""
        return len(self.stream) * self._size

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on all ranks. Raises: StreamUseError in the middle of a stream's batch."""
        self._check_whole()
        return self.stream.state_dict()

    def _check_whole(self) -> None:
        if self._left:
            raise StreamUseError(
                f"{self._left} rows of a batch of {self._size} were not taken: the dataset's local_batch_size differs "
                "from the batch size of its loader. Give both the same"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a position. Raises: the errors of `Stream.load_state_dict`."""
        self.stream.load_state_dict(state)
        self._left = 0


def _rows(batch: Batch, form: str) -> list[dict[str, Any]]:
    """Return the rows of a batch in a form that Automodel's collate function of that name takes."""
    if (batch.cu_seqlens is None) != (form == "rows"):
        knows = "does not know" if batch.cu_seqlens is None else "knows"
        forms = "rows" if batch.cu_seqlens is None else "thd or neat, with the collate function of that form"
        raise UsageError(f"form={form}, and the stream {knows} which tokens of a row belong together: expected {forms}")
    rows: list[dict[str, Any]] = [{"input_ids": x, "labels": y} for x, y in zip(batch.x, batch.y, strict=True)]
    if batch.cu_seqlens is None or batch.position_ids is None:
        return [{**row, _PAD_IDS: {"input_ids": -1}} for row in rows]
    starts, (count, T) = batch.cu_seqlens.numpy(), batch.x.shape
    firsts = np.searchsorted(starts, np.arange(count + 1) * T)  # of each row's segments
    for row, first, end, positions in zip(rows, firsts, firsts[1:], batch.position_ids, strict=False):
        lengths = np.diff(starts[first : end + 1])
        row["position_ids"] = positions
        if form == "thd":  # its collate function copies tensors with a warning, and adds lists
            row |= {name: value.numpy() for name, value in row.items()}
            row["seq_lens"] = row["seq_lens_padded"] = lengths.tolist()
        else:
            row["attention_mask"] = np.arange(1, len(lengths) + 1).repeat(lengths)
    return rows
