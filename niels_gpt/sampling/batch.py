"""Batch: what a stream yields; and its segments, the runs of tokens that belong together.

    x           A A A A B B   C C C C C p        two rows of T = 6: pieces A and B; piece C and padding
    cu_seqlens  0       4     6         11 12    where segments begin in x.view(-1), and where the last one ends
    piece_ids   A       B     C         -1       of each segment; -1: padding, or not known
    positions   0 1 2 3 0 1   0 1 2 3 4 0        of each token in its segment
    y           A A A - B -   C C C C - -        -: -100; the target of a piece's last token is in another piece

Tokens of different segments must not attend to each other: `block_causal_mask`, or FlashAttention's varlen functions,
which take cu_seqlens and max_seqlen.

y is shifted: y[b, t] is the target of x[b, t]. A model of transformers shifts its `labels` itself, so y as `labels`
would train it on the token after the next one. `Batch.for_transformers` gives it what it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.formats import IGNORE_INDEX
from niels_gpt.cache.pretrain_dataset import as_int64
from niels_gpt.display.tables import html_table
from niels_gpt.storage.errors import StreamUseError

_LONG = 128  # tokens of segments, on average, from which on their places are copied one segment after the other


class Segments(NamedTuple):
    """Which tokens of rows [B, T], read row by row, belong together. A row begins a segment; K: their number."""

    starts: NDArray[np.int32]
    """int32 [K + 1]: the first token of each segment, and B * T."""
    pieces: NDArray[np.int64]
    """int64 [K]: the piece that each segment is, by its number in the split; -1: padding, or not known."""
    documents: NDArray[np.int64]
    """int64 [K]: number of its document, or example, in the split; -1: as `pieces`."""
    longest: int
    """Tokens of the longest segment; 0 where there is none."""

    @classmethod
    def whole_rows(cls, count: int, T: int) -> Segments:
        """Return a segment for each of `count` rows, whose piece and document are not known."""
        unknown = np.full(count, -1, dtype=np.int64)
        return cls(np.arange(0, (count + 1) * T, T, dtype=np.int32), unknown, unknown.copy(), T if count else 0)

    @classmethod
    def interleaved(cls, parts: Sequence[tuple[NDArray[np.int64], Segments]], T: int) -> Segments:
        """Return the segments of a batch. parts: the numbers of some of its rows, ascending, and their segments."""
        starts = [rows[part.starts[:-1] // T] * T + part.starts[:-1] % T for rows, part in parts]
        order = np.concatenate(starts).argsort()
        count = sum(len(rows) for rows, _ in parts)
        ends = np.array([count * T], dtype=np.int32)
        return cls(
            np.concatenate((np.concatenate(starts)[order].astype(np.int32), ends)),
            np.concatenate([part.pieces for _, part in parts])[order],
            np.concatenate([part.documents for _, part in parts])[order],
            max(part.longest for _, part in parts),
        )


class Rows(NamedTuple):
    """Rows of a batch on the stream's device."""

    x: torch.Tensor
    """int64 [B, T]."""
    y: torch.Tensor
    """int64 [B, T]: the targets; -100 where there is none."""
    segments: Segments | None = None
    """None: each row is one segment; its piece and document are not known."""

    @classmethod
    def interleaved(cls, parts: Sequence[tuple[NDArray[np.int64], Rows]], has_segments: bool) -> Rows:
        """Return the rows of a batch. parts: the numbers of some of its rows, ascending, and these rows.

        has_segments: name segments, also where no part does, so that a batch of any rows has the same form.
        """
        inverse = torch.from_numpy(np.concatenate([numbers for numbers, _ in parts]).argsort()).to(parts[0][1].x.device)
        x, y = (torch.cat([getattr(rows, name) for _, rows in parts])[inverse] for name in "xy")
        if not has_segments:
            return cls(x, y)
        T = x.shape[1]
        known = [(numbers, rows.segments or Segments.whole_rows(len(numbers), T)) for numbers, rows in parts]
        return cls(x, y, Segments.interleaved(known, T))

    def batch(self, state: dict[str, Any], source: torch.Tensor | None = None) -> Batch:
        """Return these rows as a batch. state, source: see `Batch`."""
        if self.segments is None:
            return Batch(self.x, self.y, state, source)
        starts, pieces, documents, longest = self.segments
        cu_seqlens = torch.from_numpy(starts)
        if not self.x.is_cpu:
            cu_seqlens = cu_seqlens.to(self.x.device)
        of_segments = cu_seqlens, torch.from_numpy(pieces), torch.from_numpy(documents)
        return Batch(self.x, self.y, state, source, *of_segments, longest)


class _NotARow:
    """A value of a batch that cannot become a tensor: transformers' Trainer makes one of each value of its rows."""

    def __len__(self) -> int:
        raise StreamUseError(
            "a batch of this stream was collated as if it were a row. For transformers' Trainer pass as_rows(stream, "
            "args) of niels_gpt.trainers.transformers as train_dataset; for a DataLoader pass batch_size=None"
        )

    def __getitem__(self, index: int) -> None:  # with both, torch takes it for a sequence
        self.__len__()


@dataclass(eq=False, repr=False)
class Batch:
    """x, y: int64 [B, T]; y is shifted: the token after each of x, -100 where there is no loss.

    state: of the stream after this batch, as `state_dict`, the same on every rank.
    source: in a mixture, the index of the stream of each row: int64 [B], on the CPU; else None.
    cu_seqlens: where the K segments of x.view(-1) begin, and B * T: int32 [K + 1], on the device of x. None, like the
        three below, where the stream does not know them.
    piece_ids, documents: of each segment, by number in its source's split: int64 [K], on the CPU; -1: padding, or not
        known. A document of more than T tokens is several pieces.
    max_seqlen: the tokens of the longest segment.
    Unpacks as `x, y = batch`. It is not a tuple: DataLoader(batch_size=None) rebuilds tuples and would lose the state.
    """

    x: torch.Tensor
    y: torch.Tensor
    _not_a_row: _NotARow = field(init=False, default_factory=_NotARow)  # before the values that no tensor is made of
    state: dict[str, Any]
    source: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    piece_ids: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    max_seqlen: int | None = None

    @property
    def position_ids(self) -> torch.Tensor | None:
        """Return the place of each token in its segment, from 0: int64 [B, T], on the device of x. Made on each use."""
        if self.cu_seqlens is None:
            return None
        if self.x.is_cpu:
            starts = self.cu_seqlens.numpy()
            return torch.from_numpy(_positions(starts[1:] - starts[:-1], self.x.shape[1]))
        return positions_on_device(self.cu_seqlens, self.x.numel()).view(self.x.shape)

    @property
    def is_padding(self) -> torch.Tensor | None:
        """Return whether each segment is the padding of its row: bool [K], on the CPU. Made on each use.

        A row that begins with piece -1 is a window whose piece is not known, and no padding.
        """
        if self.cu_seqlens is None or self.piece_ids is None:
            return None
        return (self.piece_ids < 0) & (self.cu_seqlens[:-1].cpu() % self.x.shape[1] > 0)

    def for_transformers(self, *, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Return the arguments of a model of transformers, which then returns the loss of y: T + 1 columns.

        input_ids: int64 [B, T + 1]: x, and the last target of each row; where that is -100, its last token once more.
        labels: int64 [B, T + 1], unshifted, as transformers wants them: labels[:, 1:] is y, labels[:, 0] is -100.
        position_ids: int64 [B, T + 1]; attention_mask: `dtype` [B, 1, T + 1, T + 1], see `block_causal_mask`: both only
            where the stream knows the segments. For a model of `dtype`, with attention "sdpa" or "eager".
        All are on the device of x.
        """
        last = torch.where(self.y[:, -1:] == IGNORE_INDEX, self.x[:, -1:], self.y[:, -1:])
        inputs = {"input_ids": torch.cat((self.x, last), 1)}
        inputs["labels"] = torch.cat((torch.full_like(last, IGNORE_INDEX), self.y), 1)
        if self.cu_seqlens is not None:
            from niels_gpt.sampling.packing.masks import block_causal_mask

            rows, T = self.x.shape
            starts = self.cu_seqlens.to(torch.int64)
            starts = starts + starts // T  # each row is a token longer
            inputs["position_ids"] = positions_on_device(starts, rows * (T + 1)).view(rows, T + 1)
            inputs["attention_mask"] = block_causal_mask(starts, (rows, T + 1), dtype=dtype)
        return inputs

    def _tensors(self) -> dict[str, torch.Tensor]:
        names = ("x", "y", "source", "cu_seqlens", "piece_ids", "documents")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def __repr__(self) -> str:
        """Return shape, dtype and device: `Batch(x, y: int64 [8, 256] on cpu, consumed_samples=48)`."""
        dtype, shape = str(self.x.dtype).removeprefix("torch."), list(self.x.shape)
        source = "" if self.source is None else f"source: int64 {list(self.source.shape)}, "
        segments = "" if self.cu_seqlens is None else f"{len(self.cu_seqlens) - 1} segments, "
        consumed = self.state.get("consumed_samples")
        return f"Batch(x, y: {dtype} {shape} on {self.x.device}, {source}{segments}consumed_samples={consumed})"

    def _repr_html_(self) -> str:
        tensors = self._tensors().items()
        forms = {name: f"{str(each.dtype)[6:]} {list(each.shape)} on {each.device}" for name, each in tensors}
        return html_table("Batch", [*forms.items(), ("consumed samples", self.state.get("consumed_samples"))])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.x, self.y))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.x, self.y)[index]

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; DataLoader(pin_memory=True) calls this."""
        pinned = {name: tensor.pin_memory() for name, tensor in self._tensors().items()}
        return Batch(state=self.state, max_seqlen=self.max_seqlen, **pinned)

    def to(self, device: str | torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch with x, y and cu_seqlens on another device."""
        moved = self._tensors()
        for name in ("x", "y", "cu_seqlens"):
            if name in moved:
                moved[name] = moved[name].to(device, non_blocking=non_blocking)
        return Batch(state=self.state, max_seqlen=self.max_seqlen, **moved)


def _positions(lengths: NDArray[np.int32], T: int) -> NDArray[np.int64]:
    """Return the place of each token in its segment, int64 [B, T], in half the time of torch, or less."""
    ends = lengths.cumsum()
    if len(lengths) and ends[-1] >= _LONG * len(lengths):  # copies of memory, in half the time of what follows
        places = _first_places(T)
        joined = bytearray().join([places[:length] for length in lengths.tolist()])
        return np.frombuffer(joined, dtype=np.int64).reshape(-1, T)
    dtype = np.int16 if T <= 1 << 15 else np.int64  # in 16 bits as far as they go
    firsts: NDArray[Any] = ((ends - lengths) % T).astype(dtype).repeat(lengths).reshape(-1, T)
    return as_int64(np.subtract(np.arange(T, dtype=dtype), firsts, out=firsts))


@functools.lru_cache(maxsize=4)
def _first_places(T: int) -> memoryview:
    """Return 0 .. T - 1 as int64. Kept: small batches take as long to prepare as to read."""
    return np.arange(T, dtype=np.int64).data


def positions_on_device(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return `Batch.position_ids` of all tokens, int64 [B * T], by torch, which does not wait for the device."""
    begins, places = cu_seqlens.to(torch.int64), torch.arange(tokens, device=cu_seqlens.device)
    places -= torch.repeat_interleave(begins[:-1], begins.diff(), output_size=tokens)
    return places
