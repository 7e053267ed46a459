"""The native form: which rows are stored, a sample, hidden states in eight bits, and the layout of a shard.

A target row is the target's output at a position: last hidden state, log-normalizer, argmax. The cache's `targets`
says where rows are stored, by the raw loss mask m:

    loss    each position t >= 1 with m[t] = 1, for trainers that shift the mask with the ids, or m[t - 1] = 1, for
            trainers that do not
    reply   these, position 0 if m[0] = 1, and each position t with m[t + 1] = 1
    all     each position

Auxiliary states are stored at the positions before the last target row: a draft is causal, so later ones reach no loss.
With `all` they are stored at each position.

fp8 states are float8_e4m3fn with one float32 scale for each token and layer; a state is the stored number times its
scale. The scale maps the row's largest magnitude to 448, the largest float8_e4m3fn. The error is at most 1/16 of the
value, or, far below the row's largest, 2**-18 of the largest.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.eagle3.format.drafters import targets_of
from niels_gpt.eagle3.format.layout import (
    AUX_DTYPES,
    DTYPES,
    MAX_ROWS,
    WITHOUT_HOLES,
    Tensors,
    form_text,
    in_file_order,
    read_tensors_header,
    row_bytes_of,
    tensors_header,
)
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import shortened

Counts = NDArray[np.int64]
"""Tokens, auxiliary rows and target rows of each sample: int64 [n, 3], from `row_counts`."""
STARTS = ("token_starts", "aux_starts", "row_starts")
DEFAULT_SHARD_BYTES = 1 << 30
_HEADER_ROOM = 2048  # a header of at most 10 tensors takes less
_LARGEST = 448.0  # torch.finfo(torch.float8_e4m3fn).max
_CHUNK = 1 << 19  # values: 2 MiB as float32
_kept = threading.local()


def target_positions(loss_mask: NDArray[Any], targets: str = "loss") -> NDArray[np.int64]:
    """Return the positions of a sample's target rows, ascending: int64 [R].

    loss_mask: [L], raw; 0 or False without loss. targets: one of TARGETS.
    """
    length = len(loss_mask)
    return np.flatnonzero(has_target_row(np.array([0, length] if length else [0]), loss_mask, targets))


def stored_rows(loss_mask: NDArray[Any], targets: str = "loss") -> tuple[int, NDArray[np.int64]]:
    """Return the number of a sample's auxiliary rows, and the positions of its target rows; see `target_positions`."""
    positions = target_positions(loss_mask, targets)
    return len(loss_mask) if targets == "all" else int(positions.max(initial=0)), positions


def row_counts(starts: NDArray[np.int64], loss_mask: NDArray[Any], targets: str = "loss") -> NDArray[np.int64]:
    """Count the stored rows of each sample: int64 [n, 3], tokens, auxiliary rows, target rows.

    starts: int64 [n + 1], from 0 to T: first token of each sample; no sample is empty. loss_mask: [T], raw. targets:
    one of TARGETS.
    """
    begins, ends = starts[:-1], starts[1:]
    if targets == "all":
        return np.repeat((ends - begins)[:, None], 3, axis=1)
    positions = np.flatnonzero(has_target_row(starts, loss_mask, targets))
    first, behind = np.searchsorted(positions, begins), np.searchsorted(positions, ends)
    target_rows = behind - first
    last = np.zeros(len(begins), np.int64)
    some = target_rows > 0
    last[some] = positions[behind[some] - 1] - begins[some]
    return np.stack([ends - begins, last, target_rows], axis=1)


def has_target_row(starts: NDArray[np.int64], loss_mask: NDArray[Any], targets: str = "loss") -> NDArray[np.bool_]:
    """Return which tokens of concatenated samples have a target row: bool [T]. Arguments: see `row_counts`."""
    loss: NDArray[np.bool_] = np.asarray(loss_mask) != 0
    if targets == "all":
        return np.ones_like(loss)
    stored = loss.copy()
    stored[1:] |= loss[:-1]
    stored[starts[:-1]] = False  # position 0 of each sample
    if targets == "reply":
        ahead = np.zeros_like(loss)
        ahead[:-1] = loss[1:]
        ahead[starts[1:] - 1] = False  # the last position: the next token is of another sample
        stored |= loss | ahead
    return stored


def with_loss(starts: NDArray[np.int64], loss_mask: NDArray[Any], targets: str = "loss") -> NDArray[np.bool_]:
    """Return which target rows belong to a supervised token, one with loss from position 1 on: bool [R].

    Arguments: see `row_counts`.
    """
    supervised: NDArray[np.bool_] = np.asarray(loss_mask) != 0
    supervised[starts[:-1]] = False
    return supervised[has_target_row(starts, loss_mask, targets)]


@dataclass(frozen=True, eq=False)
class NativeSample:
    """L tokens, the auxiliary states of the first A positions, and R target rows at `positions`."""

    input_ids: NDArray[np.uint32]
    """[L]"""
    loss_mask: NDArray[np.bool_]
    """[L]"""
    aux_hidden_states: torch.Tensor
    """[A, K, H] of the stored dtype: outputs of K blocks at the positions 0 to A - 1; A is the last target row's
    position, or 0 without any; L for targets `all`."""
    aux_scales: torch.Tensor | None
    """float32 [A, K] where the auxiliary states are float8_e4m3fn: a value times its scale; None elsewhere."""
    last_hidden_states: torch.Tensor
    """[R, H] of the stored dtype"""
    log_normalizers: torch.Tensor
    """float32 [R]: logsumexp over all logits of the target"""
    argmax_ids: torch.Tensor
    """int64 [R]: the target's most probable token"""
    targets: str = "loss"
    """Which target rows are stored: one of TARGETS."""

    def __getstate__(self) -> dict[str, Any]:
        # A view of a map cannot be sent: torch would send its file, which is closed, and pickle the whole shard.
        return {name: value.clone() if torch.is_tensor(value) else value for name, value in vars(self).items()}

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions of the target rows, ascending: int64 [R]."""
        return target_positions(self.loss_mask, self.targets)

    @property
    def with_loss(self) -> NDArray[np.bool_]:
        """Which target rows belong to a supervised token: bool [R]; see the function `with_loss`."""
        return with_loss(np.array([0, len(self.loss_mask)]), self.loss_mask, self.targets)


# --- auxiliary states in eight bits -----------------------------------------------------------------------------------


def quantized(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states as float8_e4m3fn [..., H], and their scales, float32 [...].

    states: [..., H] of any float dtype and device. A row of zeros has the scale 0.
    Raises: ValueError for NaN or infinity.
    """
    values = states.float()
    scales = values.abs().amax(dim=-1) / _LARGEST
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("hidden states with values that are not finite: expected finite ones, to be stored as fp8")
    # One scale a row, not one a tensor: above its subnormals e4m3 has a range of 448 * 64 to 1, and the rows of a
    # tensor may have a larger one. Rows of zeros are divided by 1.
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    scaled = (values / divisors.unsqueeze(-1)).clamp_(-_LARGEST, _LARGEST)  # casts of earlier torch give NaN above
    return scaled.to(torch.float8_e4m3fn), scales


def dequantized(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return the states [..., H] in a dtype: the float32 product, rounded once.

    values: float8_e4m3fn [..., H], on any device. scales: float32 [...].
    """
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    dequantize_into(out.view(-1, values.shape[-1]), values, scales)
    return out


def dequantize_into(out: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Write dequantized states into `out`, [N, H] of any float dtype, in chunks that fit the CPU's cache.

    values: float8_e4m3fn [..., H] of N rows, contiguous. scales: float32 [...].
    """
    rows, factors = values.view(-1, values.shape[-1]), scales.reshape(-1, 1)
    chunk = min(len(rows), max(1, _CHUNK // max(1, rows.shape[1])))
    if not rows.numel():
        return
    if not rows.is_cpu or _has_nan(rows):  # the shift below would make a number of NaN
        parts = (torch.split(each, chunk) for each in (out, rows, factors))
        for to, some, factor in zip(*parts, strict=True):
            to.copy_(some.float().mul_(factor))
        return
    bits, products = _chunk_memory(chunk * rows.shape[1])
    bits, products = bits.view(chunk, -1), products.view(chunk, -1)
    parts = (torch.split(each, chunk) for each in (out, rows.view(torch.int8), factors * 256))
    for to, some, factor in zip(*parts, strict=True):
        if len(some) < chunk:
            bits, products = bits[: len(some)], products[: len(some)]
        # Faster than torch's cast: the values divided by 256, exactly, as float16. Both formats have sign, exponent and
        # fraction in this order, so a shift by 7 moves them into place; the exponent biases differ by 8. Masking bit 14
        # keeps the sign in bit 15 only. The product with 128 is a shift.
        half = bits.copy_(some).mul_(128).bitwise_and_(~0x4000).view(torch.float16)
        to.copy_(products.copy_(half).mul_(factor))


def _chunk_memory(values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int16 and float32 memory for a chunk. A thread keeps it: its first touch takes as long as the chunk.

    It is kept by numpy: a tensor that is first made in inference mode cannot be written to outside of it.
    """
    kept: tuple[NDArray[np.int16], NDArray[np.float32]] | None = getattr(_kept, "memory", None)
    if kept is None or len(kept[0]) < values:
        kept = _kept.memory = np.empty(values, np.int16), np.empty(values, np.float32)
    return torch.from_numpy(kept[0][:values]), torch.from_numpy(kept[1][:values])


def _has_nan(values: torch.Tensor) -> bool:
    """Return whether a float8_e4m3fn value is NaN: the bytes 0x7F and 0xFF, the largest with and without sign."""
    return any(int(values.view(kind).max()) == nan for kind, nan in ((torch.int8, 0x7F), (torch.uint8, 0xFF)))


# --- the layout of a shard --------------------------------------------------------------------------------------------


def room_bits(limit: int) -> int:
    """Return how many bits of samples fit into a file of `limit` bytes; the rest is kept for the header."""
    return 8 * (limit - _HEADER_ROOM)


@dataclass(frozen=True)
class NativeLayout:
    """The sizes of a native shard's tensors, as the manifest states them."""

    hidden_size: int
    """H."""
    layers: int
    """Auxiliary layers, K."""
    dtype: str
    """Dtype of the last hidden states: a key of DTYPES."""
    aux_dtype: str
    """Dtype of the auxiliary states: a key of AUX_DTYPES."""
    targets: str = "loss"
    """Which target rows are stored: one of TARGETS."""

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> NativeLayout:
        """Return the layout of a native manifest, from `read_manifest` or from a plan."""
        layers = len(manifest["aux_layer_ids"])
        sizes = manifest["hidden_size"], layers
        return cls(*sizes, manifest["dtype"], manifest["aux_dtype"], targets_of(manifest))

    def tensors(self, samples: int, tokens: int, aux_rows: int, target_rows: int) -> Tensors:
        """Return the tensors of a shard with these numbers of rows: whole shapes, in file order."""
        tensors: Tensors = {name: (torch.int64, (samples + 1,)) for name in STARTS}
        tensors["input_ids"] = (torch.uint32, (tokens,))
        tensors["loss_bits"] = (torch.uint8, (-(-tokens // 8),))
        tensors["aux_hidden_states"] = (AUX_DTYPES[self.aux_dtype], (aux_rows, self.layers, self.hidden_size))
        if self.aux_dtype == "fp8":
            tensors["aux_scales"] = (torch.float32, (aux_rows, self.layers))
        tensors["last_hidden_states"] = (DTYPES[self.dtype], (target_rows, self.hidden_size))
        tensors["log_normalizers"] = (torch.float32, (target_rows,))
        tensors["argmax_ids"] = (torch.uint32, (target_rows,))
        return in_file_order(tensors)

    def fields(self, counts: Counts) -> Tensors:
        """Return the tensors of a shard of these samples: whole shapes, in file order."""
        return self.tensors(len(counts), *map(int, counts.sum(0)))

    def shard_bytes(self, counts: Counts) -> int:
        """Return the file size of a shard of these samples."""
        tensors = self.fields(counts)
        return len(tensors_header(tensors)) + sum(map(row_bytes_of, tensors.values()))

    def sample_bytes(self, counts: Counts) -> NDArray[np.int64]:
        """Return the bytes that each sample adds to its shard, loss bits rounded up: int64 [n]."""
        return -(-self.sample_bits(counts) // 8)

    def cut(self, counts: Counts, limit: int = DEFAULT_SHARD_BYTES) -> list[int]:
        """Cut samples into shards: return the first sample of each shard, and n at the end.

        A shard ends before the sample that would take its file over `limit` bytes, 2,048 of them kept for the header,
        and after MAX_ROWS samples; it has at least one sample.
        """
        ends = np.cumsum(self.sample_bits(counts))
        room, first, cuts = room_bits(limit), 0, [0]
        while first < len(counts):
            before = int(ends[first - 1]) if first else 0
            behind = int(np.searchsorted(ends, before + room, side="right"))
            first = min(max(behind, first + 1), first + MAX_ROWS, len(counts))
            cuts.append(first)
        return cuts

    def token_bytes(self, counts: Counts) -> dict[str, float]:
        """Return the mean bytes of each tensor by token, over these samples; headers are not counted."""
        tokens = int(counts[:, 0].sum()) or 1
        return {name: row_bytes_of(tensor) / tokens for name, tensor in self.fields(counts).items()}

    def sample_bits(self, counts: Counts) -> NDArray[np.int64]:
        """Return the bits of each sample: int64 [n]."""
        token, aux, row = 32 + 1, *(8 * size for size in self._row_sizes())
        return counts @ np.array([token, aux, row], np.int64) + 8 * 8 * len(STARTS)

    def _row_sizes(self) -> tuple[int, int]:
        """Return the bytes of an auxiliary row and of a target row."""
        one = self.tensors(0, 0, 1, 1)
        aux = sum(row_bytes_of(tensor) for name, tensor in one.items() if name in ("aux_hidden_states", "aux_scales"))
        return aux, sum(row_bytes_of(one[name]) for name in ("last_hidden_states", "log_normalizers", "argmax_ids"))


# --- a shard's file ---------------------------------------------------------------------------------------------------

ROW_TENSORS = {
    "input_ids": 0,
    "aux_hidden_states": 1,
    "aux_scales": 1,
    "last_hidden_states": 2,
    "log_normalizers": 2,
    "argmax_ids": 2,
}
"""Tensor of a native shard -> which of a sample's counts is its number of rows."""
ENDS = ("input_ids", "aux_hidden_states", "argmax_ids")
"""Tensors with one row for each unit that `STARTS` count, in that order."""
_AGAIN = "Remove the shard and produce it again: precompute --resume"


@dataclass(frozen=True, eq=False)
class MappedShard:
    """A mapped shard: its tensors by name, as views of the map, and its starts, int64 [n + 1, 3]."""

    tensors: dict[str, torch.Tensor]
    starts: NDArray[np.int64]
    targets: str = "loss"
    """Which target rows are stored: one of TARGETS."""

    @classmethod
    def of(cls, path: str, layout: NativeLayout, *, follow_links: bool = False) -> tuple[MappedShard, bytes]:
        """Map a shard; return it and its header bytes. The starts are not checked yet: see `check`.

        Raises: FileNotFoundError; CacheError E701 unless the header is exactly the layout's.
        """
        tensors, header = read_tensors_header(path, sparse=WITHOUT_HOLES, follow_links=follow_links)
        _check_header(path, layout, tensors, header)
        size = len(header) + sum(map(row_bytes_of, tensors.values()))
        whole = torch.from_file(path, False, size, dtype=torch.uint8)  # private: a change stays in this process
        views, begin = {}, len(header)
        for name, (dtype, shape) in tensors.items():
            end = begin + row_bytes_of((dtype, shape))
            views[name] = whole[begin:end].view(dtype).view(shape)
            begin = end
        starts = np.stack([views[name].numpy() for name in STARTS], axis=1)
        return cls(views, starts, layout.targets), header

    @classmethod
    def of_ends(
        cls, path: str, layout: NativeLayout, tensors: Tensors, header: bytes, read: Callable[[int, int], bytes]
    ) -> MappedShard:
        """Return a shard whose starts and loss bits alone were read; its other tensors have no memory.

        read: returns bytes begin to end of the file. Raises: CacheError E701 unless the header is the layout's.
        """
        _check_header(path, layout, tensors, header)
        views, begins = _without_memory(tensors), _begins(tensors)
        for name in (*STARTS, "loss_bits"):
            begin, size = begins[name], row_bytes_of(tensors[name])
            content = np.frombuffer(bytearray(read(begin, begin + size)), np.uint8)
            views[name] = torch.from_numpy(content).view(tensors[name][0])
        return cls(views, np.stack([views[name].numpy() for name in STARTS], axis=1), layout.targets)

    @classmethod
    def of_counts(cls, layout: NativeLayout, counts: Counts) -> MappedShard:
        """Return a shard of known samples whose tensors have no memory."""
        starts = np.zeros((len(counts) + 1, 3), np.int64)
        np.cumsum(counts, axis=0, out=starts[1:])
        return cls(_without_memory(layout.fields(counts)), starts, layout.targets)

    @cached_property
    def _layout(self) -> tuple[Tensors, dict[str, int]]:
        """The forms of the tensors, and their first bytes in the file."""
        forms: Tensors = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        return forms, _begins(forms)

    def placed(self, row: int) -> tuple[dict[str, tuple[int, int]], Tensors]:
        """Return the bytes [begin, end) of a sample's tensors in the file, and their forms; of loss_bits all bytes that
        have one of its bits."""
        firsts, lasts = self.starts[row : row + 2].tolist()
        (forms, begins), spans, some = self._layout, dict[str, tuple[int, int]](), Tensors()
        for name, (dtype, (_, *width)) in forms.items():
            if name in STARTS:
                continue
            which = ROW_TENSORS.get(name)
            first, last = (firsts[0] // 8, -(-lasts[0] // 8)) if which is None else (firsts[which], lasts[which])
            size = row_bytes_of((dtype, tuple(width)))
            spans[name] = begins[name] + first * size, begins[name] + last * size
            some[name] = dtype, (last - first, *width)
        return spans, some

    def one(self, row: int, tensors: dict[str, torch.Tensor]) -> MappedShard:
        """Return a sample as a shard of its own. tensors: its bytes by `placed`."""
        begin, end = self.starts[row : row + 2]
        skipped = int(begin[0]) % 8
        bits = np.unpackbits(tensors["loss_bits"].numpy(), bitorder="little")[skipped:][: end[0] - begin[0]]
        own = {**tensors, "loss_bits": torch.from_numpy(np.packbits(bits, bitorder="little"))}
        return MappedShard(own, np.stack([begin - begin, end - begin]), self.targets)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def loss_mask(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Return the raw loss mask of the shard's tokens begin to end: bool [end - begin]."""
        first = begin // 8
        raw = self.tensors["loss_bits"][first : -(-end // 8)].numpy()
        return np.unpackbits(raw, bitorder="little")[begin - 8 * first : end - 8 * first].view(np.bool_)

    def sample(self, row: int) -> NativeSample:
        """Return a sample. Its tensors are views of the map; loss_mask and argmax_ids are copies."""
        (token, aux, target), (token_end, aux_end, target_end) = self.starts[row : row + 2].tolist()
        tensors, scales = self.tensors, self.tensors.get("aux_scales")
        return NativeSample(
            input_ids=tensors["input_ids"][token:token_end].numpy(),
            loss_mask=self.loss_mask(token, token_end),
            aux_hidden_states=tensors["aux_hidden_states"][aux:aux_end],
            aux_scales=None if scales is None else scales[aux:aux_end],
            last_hidden_states=tensors["last_hidden_states"][target:target_end],
            log_normalizers=tensors["log_normalizers"][target:target_end],
            argmax_ids=tensors["argmax_ids"][target:target_end].to(torch.int64),
            targets=self.targets,
        )

    @property
    def with_loss(self) -> NDArray[np.bool_]:
        """Which target rows belong to a supervised token: bool [R]; see the function `with_loss`."""
        return with_loss(self.starts[:, 0], self.loss_mask(0, int(self.starts[-1, 0])), self.targets)

    @property
    def has_odd_bits(self) -> bool:
        """Whether loss bits are set after the last token."""
        tokens = len(self.tensors["input_ids"])
        return bool(self.loss_mask(tokens, -(-tokens // 8) * 8).any())

    @property
    def counts(self) -> Counts:
        """Tokens, auxiliary rows and target rows of each sample, from the starts: int64 [n, 3]."""
        return np.diff(self.starts, axis=0)

    def check(self, path: str, seq_length: int) -> None:
        """Raise CacheError naming the first sample whose starts contradict tensors, seq_length or loss bits."""
        starts, counts = self.starts, self.counts
        ends = [len(self.tensors[name]) for name in ENDS]
        if starts[0].any() or starts[-1].tolist() != ends or bool((starts[1:] < starts[:-1]).any()):
            found = f"starts that are from {starts[0].tolist()} to {starts[-1].tolist()}"
            expected = f"them to rise from 0 to {ends}, the rows of its tensors"
            raise CacheError(path, found, expected, _AGAIN, code="E701")
        wrong = np.flatnonzero((counts[:, 0] < 1) | (counts[:, 0] > seq_length))
        if len(wrong):
            found = f"sample {wrong[0]} of the shard has {counts[wrong[0], 0]:,} tokens"
            raise CacheError(path, found, f"1 to the manifest's seq_length, {seq_length:,}", _AGAIN, code="E701")
        if self.has_odd_bits:
            raise CacheError(path, "loss_bits has bits set after the last token", "zeros", _AGAIN, code="E701")
        stated = row_counts(starts[:, 0], self.loss_mask(0, ends[0]), self.targets)
        wrong = np.flatnonzero((stated != counts).any(axis=1))
        if len(wrong):
            row = int(wrong[0])
            found = f"sample {row} of the shard has (tokens, auxiliary rows, target rows) {counts[row].tolist()}"
            raise CacheError(path, found, f"{stated[row].tolist()} by its loss bits", _AGAIN, code="E701")


def _check_header(path: str, layout: NativeLayout, tensors: Tensors, header: bytes) -> None:
    expected = layout.tensors(*_sizes_of(path, tensors))
    if tensors != expected or header != tensors_header(expected):
        names = f"{_described(expected)}, in safetensors' order and without metadata"
        raise CacheError(path, f"its header has {_described(tensors)}", names, _AGAIN, code="E701")


def _without_memory(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in tensors.items()}


def _begins(tensors: Tensors) -> dict[str, int]:
    """Return the first byte of each tensor in a file of them."""
    ends = itertools.accumulate(map(row_bytes_of, tensors.values()), initial=len(tensors_header(tensors)))
    return dict(zip(tensors, ends, strict=False))


def _sizes_of(path: str, tensors: Tensors) -> tuple[int, int, int, int]:
    """Return the numbers of samples, tokens, auxiliary rows and target rows that a header states."""
    named = (STARTS[0], *ENDS)
    missing = [name for name in named if not tensors.get(name, (None, ()))[1]]
    if missing:
        raise CacheError(path, f"has no {missing[0]}, but {_described(tensors)}", "a native shard", _AGAIN, code="E701")
    starts, tokens, aux_rows, target_rows = (tensors[name][1][0] for name in named)
    if not 2 <= starts <= MAX_ROWS + 1:
        raise CacheError(path, f"{starts - 1:,} samples", f"1 to {MAX_ROWS:,}", _AGAIN, code="E701")
    return starts - 1, tokens, aux_rows, target_rows


def _described(tensors: Tensors) -> str:
    return ", ".join(f"{shortened(name)} {form_text(form)}" for name, form in tensors.items())
