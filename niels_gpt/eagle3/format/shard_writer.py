"""Writes one shard of either form, and then its receipt.

A shard's file has its final size from the start and is filled sample by sample, in any order, so memory does not grow
with it (a native shard keeps its starts and one bit a token). In versions 1 and 2 the slots after a sample's last token
are never written: they read as zeros, and are holes if the file system has them. The bytes equal safetensors' save_file
for the same tensors.

The receipt is sidecar/shard-000000.json. It has one XXH3-128 a sample. Dense: over the sample's row of each tensor in
file order, all slots of ids and masks, the first `slots` slots of the others. Native: over its three counts as int64,
its ids, its loss mask as one byte a token, auxiliary states, scales, last hidden states, log-normalizers and argmax, as
stored.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.eagle3.format.layout import (
    INT_FIELDS,
    MAX_ROWS,
    SIDECAR,
    Fields,
    PathLike,
    Tensors,
    in_file_order,
    read_file,
    refuse_links,
    row_bytes_of,
    shard_path,
    tensors_header,
)
from niels_gpt.eagle3.format.native import ROW_TENSORS, STARTS, Counts, NativeLayout, NativeSample, row_counts
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import SizedFile, canonical_json, write_bytes
from niels_gpt.storage.meta_json import checked_count, checked_sha256, parse_object, shortened

_RECEIPT_VERSION = 1
_DIGEST = re.compile("[0-9a-f]{32}")


def receipt_path(cache_dir: PathLike, shard_index: int) -> Path:
    """Return the path of a shard's receipt."""
    return Path(cache_dir) / SIDECAR / f"shard-{shard_index:06d}.json"


class _Writer:
    """Writes one shard: `write` each sample once, in any order, then `commit`; on failure `discard`.

    Two writers of one shard may leave one's receipt beside the other's shard: a producer must hold the folder's lock.
    """

    def __init__(self, cache_dir: PathLike, shard_index: int, tensors: Tensors, samples: int) -> None:
        """tensors: with whole shapes. The folder is created if needed. Raises: CacheError E205 for a link in it."""
        refuse_links(cache_dir)
        self._cache_dir, self._index = cache_dir, shard_index
        self._path = Path(shard_path(cache_dir, shard_index))
        self._tensors, self._header = in_file_order(tensors), tensors_header(tensors)
        self._begins: dict[str, int] = {}
        self._size = len(self._header)
        for name, tensor in self._tensors.items():
            self._begins[name] = self._size
            self._size += row_bytes_of(tensor)
        self._slots, self._digests = [0] * samples, [""] * samples
        fileio.make_dir(receipt_path(cache_dir, shard_index).parent)
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.tmp")
        self._file = SizedFile(temporary, self._size)

    def commit(
        self, facts: Mapping[str, Any] | None = None, check: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        """Rename the shard to its final name, durably; then write and return its receipt.

        facts: stored in the receipt. check: called before the rename; an error of it prevents the rename.
        Raises: ValueError if a sample is missing.
        """
        if "" in self._digests:
            raise ValueError(f"{self._path}: row {self._digests.index('')} was not written")
        self._file.write(0, self._header)
        self._file.sync()
        self._file.close()
        if check is not None:  # after the sync: it may take so long that the lease is lost meanwhile
            check()
        receipt = {
            "receipt_version": _RECEIPT_VERSION,
            "shard": self._index,
            "samples": len(self._slots),
            "bytes": self._size,
            "header_sha256": hashlib.sha256(self._header).hexdigest(),
            "slots": self._slots,
            "xxh3_128": self._digests,
            "facts": dict(facts or {}),
        }
        path = receipt_path(self._cache_dir, self._index)
        # Order: old receipt away, shard, new receipt. A crash in between leaves a shard without a receipt, which is
        # built again; a receipt beside another shard would count as finished until a reader compares its samples.
        if path.exists():
            fileio.remove(path)
            fileio.fsync_dir(path.parent)
        fileio.rename(self._file.path, self._path)
        write_bytes(path, canonical_json(receipt))
        return receipt

    def discard(self) -> None:
        """Remove the temporary file. Does nothing after `commit`."""
        self._file.close()
        fileio.remove(self._file.path)

    def _refuse_row(self, row: int) -> None:
        """Raise ValueError for a row that is beyond the shard or already written."""
        if not 0 <= row < len(self._digests):
            raise ValueError(f"{self._path}: row {row}, expected 0 <= row < {len(self._digests)}")
        if self._digests[row]:
            raise ValueError(f"{self._path}: row {row} was written already")


class ShardWriter(_Writer):
    """Writes one dense shard: `write` each row once, in any order, then `commit`; on failure `discard`."""

    def __init__(self, cache_dir: PathLike, shard_index: int, fields: Fields, rows: int) -> None:
        """fields: from `Layout.fields`. rows: samples of the shard. The folder is created if needed.

        Raises: ValueError for more than `MAX_ROWS` rows; CacheError E205 if a file of the cache is a link.
        """
        if rows > MAX_ROWS:
            raise ValueError(f"a shard of {rows:,} samples, expected {MAX_ROWS:,} at most")
        self._fields = in_file_order(fields)
        super().__init__(
            cache_dir, shard_index, {name: (dtype, (rows, *shape)) for name, (dtype, shape) in fields.items()}, rows
        )

    def write(self, rows: Sequence[int], slots: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the rows `rows` of the shard.

        slots: number of slots with content in each row; the others stay zero.
        tensors: [b, w, ...] in the stored dtype on the CPU, w >= max(slots); ids and masks [b, S].
        Raises: ValueError for other names, dtypes or shapes, or a row written twice; OSError on a full disk.
        """
        flat = {name: self._flat(name, tensors, len(rows), max(slots, default=0)) for name in self._fields}
        for row in rows:
            self._refuse_row(row)
        if len({*rows}) != len(rows):
            raise ValueError(f"{self._path}: row {max(rows, key=[*rows].count)} twice, expected each row once")
        all_slots = self._fields["input_ids"][1][0]
        if list(rows) == list(range(rows[0], rows[0] + len(rows))) and set(slots) == {all_slots}:
            for name, part in flat.items():
                self._file.write(self._offset(name, rows[0]), part)
        else:
            for row, pieces in zip(rows, _pieces(self._fields, flat, slots), strict=True):
                for name, piece in zip(self._fields, pieces, strict=True):
                    self._file.write(self._offset(name, row), piece)
        for row, used, pieces in zip(rows, slots, _pieces(self._fields, flat, slots), strict=True):
            self._slots[row], self._digests[row] = used, digest_of(pieces)

    def _offset(self, name: str, row: int) -> int:
        return self._begins[name] + row * row_bytes_of(self._fields[name])

    def _flat(self, name: str, tensors: Mapping[str, torch.Tensor], rows: int, slots: int) -> NDArray[np.uint8]:
        """Return a tensor as bytes [rows, ...]."""
        dtype, shape = self._fields[name]
        tensor = tensors[name]
        whole = name in INT_FIELDS
        good = tensor.dtype == dtype and tensor.dim() == 1 + len(shape) and tensor.shape[0] == rows
        if (
            not good
            or tensor.shape[2:] != shape[1:]
            or not (shape[0] if whole else slots) <= tensor.shape[1] <= shape[0]
        ):
            raise ValueError(
                f"{self._path}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {[rows, *shape]}"
                + ("" if whole else f" with {slots} slots or more")
            )
        return bytes_of(tensor.detach().contiguous()).reshape(rows, -1)


class NativeShardWriter(_Writer):
    """Writes one native shard: `write` each sample once, in any order, then `commit`; on failure `discard`."""

    def __init__(self, cache_dir: PathLike, shard_index: int, layout: NativeLayout, counts: Counts) -> None:
        """counts: from `row_counts`, int64 [n, 3]. The folder is created if needed.

        Raises: ValueError for no sample or more than `MAX_ROWS`; CacheError E205 if a file of the cache is a link.
        """
        if not 0 < len(counts) <= MAX_ROWS or counts.shape[1:] != (3,) or int(counts.min()) < 0:
            raise ValueError(
                f"counts of shape {list(counts.shape)}, expected [n, 3] from 0, and n from 1 to {MAX_ROWS:,}"
            )
        super().__init__(cache_dir, shard_index, layout.fields(counts), len(counts))
        self._targets = layout.targets
        self._starts = np.zeros((len(counts) + 1, 3), np.int64)
        np.cumsum(counts, axis=0, out=self._starts[1:])
        self._bits = np.zeros(self._tensors["loss_bits"][1], np.uint8)
        self._slots = counts[:, 0].tolist()

    def write(self, row: int, sample: NativeSample) -> None:
        """Write a sample as the shard's row `row`; its tensors are on the CPU.

        Raises: ValueError for other dtypes, shapes or counts, or a row written twice; OSError on a full disk.
        """
        self._refuse_row(row)
        begins, ends = self._starts[row], self._starts[row + 1]
        pieces = self._pieces(row, sample)
        for name, piece in pieces.items():
            dtype, (_, *shape) = self._tensors[name]
            offset = int(begins[ROW_TENSORS[name]]) * row_bytes_of((dtype, tuple(shape)))
            self._file.write(self._begins[name] + offset, piece)
        loss = np.ascontiguousarray(sample.loss_mask, np.uint8)
        first, behind = int(begins[0]) // 8, -(-int(ends[0]) // 8)
        bits = np.unpackbits(self._bits[first:behind], bitorder="little")
        bits[begins[0] - 8 * first : ends[0] - 8 * first] = loss
        self._bits[first:behind] = np.packbits(bits, bitorder="little")
        self._digests[row] = sample_digest(ends - begins, loss, pieces)

    def commit(
        self, facts: Mapping[str, Any] | None = None, check: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        """Write the starts and the loss bits, then commit like a dense shard."""
        for name, starts in zip(STARTS, self._starts.T, strict=True):
            self._file.write(self._begins[name], np.ascontiguousarray(starts))
        self._file.write(self._begins["loss_bits"], self._bits)
        return super().commit(facts, check)

    def _pieces(self, row: int, sample: NativeSample) -> dict[str, NDArray[np.uint8]]:
        """Return the bytes of a sample's tensors, in the order of ROW_TENSORS. Raises: ValueError."""
        counts = self._starts[row + 1] - self._starts[row]
        length = len(sample.loss_mask)
        stated = counts * 0
        if length:
            stated = row_counts(np.array([0, length]), sample.loss_mask, self._targets)[0]
        if stated.tolist() != counts.tolist():
            raise ValueError(
                f"{self._path}: row {row} has (tokens, auxiliary rows, target rows) {stated.tolist()} by its loss "
                f"mask, expected {counts.tolist()}"
            )
        argmax = sample.argmax_ids
        if len(argmax) and not 0 <= int(argmax.min()) <= int(argmax.max()) < 1 << 32:
            raise ValueError(f"{self._path}: row {row}: argmax_ids from {int(argmax.min())} to {int(argmax.max())}")
        given = {
            "input_ids": torch.from_numpy(np.asarray(sample.input_ids)),
            "aux_hidden_states": sample.aux_hidden_states,
            "aux_scales": sample.aux_scales,
            "last_hidden_states": sample.last_hidden_states,
            "log_normalizers": sample.log_normalizers,
            "argmax_ids": argmax.to(torch.uint32),
        }
        return {
            name: self._bytes_of(row, name, tensor, int(counts[ROW_TENSORS[name]]))
            for name, tensor in given.items()
            if name in self._tensors or tensor is not None
        }

    def _bytes_of(self, row: int, name: str, tensor: torch.Tensor | None, rows: int) -> NDArray[np.uint8]:
        dtype, shape = self._tensors.get(name, (None, (0,)))
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != (rows, *shape[1:]):
            found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{self._path}: row {row}: {name} is {found}, expected {dtype} {[rows, *shape[1:]]}")
        return bytes_of(tensor.detach().contiguous())


# --- checksums and receipts -------------------------------------------------------------------------------------------


def sample_digest(counts: NDArray[np.int64], loss: NDArray[np.uint8], pieces: Mapping[str, NDArray[np.uint8]]) -> str:
    """Return a native sample's XXH3-128 for the receipt.

    counts: int64 [3]. loss: [L], 0 or 1. pieces: bytes of its tensors by name.
    """
    ids, *others = (pieces[name] for name in ROW_TENSORS if name in pieces)
    return digest_of([np.ascontiguousarray(counts, "<i8").view(np.uint8), ids, loss, *others])


def row_damage(tensors: Mapping[str, torch.Tensor], slots: int, digest: str) -> str:
    """Return the damage of a dense row by its receipt entries; "" for none.

    tensors: [S, ...] each, in file order.
    """
    fields = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    parts = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    (pieces,) = _pieces(fields, {name: part[None] for name, part in parts.items()}, [slots])
    if digest_of(pieces) != digest:
        return "its bytes do not give the checksum in its receipt"
    for (name, part), piece in zip(parts.items(), pieces, strict=True):
        if part[piece.size :].any():
            return f"{name} is not zero after its {slots} slots"
    return ""


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor as a one-dimensional view."""
    return tensor.view(torch.uint8).numpy().reshape(-1) if tensor.numel() else np.empty(0, np.uint8)


def write_tensors(path: PathLike, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write contiguous tensors on the CPU as a new file, with the bytes of safetensors' save_file.

    It is written through `fileio`, which tests of faults intercept, and with the usual permissions: save_file lets only
    its owner read a file.
    """
    forms = in_file_order({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    header = tensors_header(forms)
    end = len(header)
    file = SizedFile(path, end + sum(tensor.nbytes for tensor in tensors.values()))
    try:
        file.write(0, header)
        for name in forms:
            file.write(end, bytes_of(tensors[name]))
            end += tensors[name].nbytes
    finally:
        file.close()


def _pieces(
    fields: Fields, flat: Mapping[str, NDArray[np.uint8]], slots: Sequence[int]
) -> Iterator[list[NDArray[np.uint8]]]:
    """Yield, for each row, the bytes of each field that are hashed and written."""
    sizes = {name: row_bytes_of(field) // (field[1][0] or 1) for name, field in fields.items()}
    for row, used in enumerate(slots):
        yield [part[row] if name in INT_FIELDS else part[row, : used * sizes[name]] for name, part in flat.items()]


def digest_of(pieces: Sequence[NDArray[Any]]) -> str:
    """Return the XXH3-128 of a row's contiguous pieces.

    It detects damage, not forgery: sha256 would take as long as writing the row.
    """
    try:
        import xxhash  # here, because readers do without
    except ImportError as error:
        raise ImportError("checksums of shards need xxhash: pip install xxhash") from error
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece.data)
    return digest.hexdigest()


def read_receipt(cache_dir: PathLike, shard_index: int, *, follow_links: bool = False) -> dict[str, Any] | None:
    """Return a shard's receipt; None if there is none. Raises: CacheError E701 for one that no writer made."""
    path = receipt_path(cache_dir, shard_index)
    try:
        raw = read_file(path, follow_links=follow_links)
    except FileNotFoundError:
        return None
    try:
        receipt = parse_object(raw)
        samples = checked_count(receipt["samples"], "samples", str(path))
        checked_count(receipt["bytes"], "bytes", str(path))
        for number in (*receipt["slots"], receipt["shard"]):
            checked_count(number, "slots", str(path))
        checked_sha256(receipt["header_sha256"], "header_sha256", str(path))
        if not all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in receipt["xxh3_128"]):
            raise ValueError("xxh3_128 is not a list of 32 lower-case hex digits each")
        if not len(receipt["slots"]) == len(receipt["xxh3_128"]) == samples or receipt["shard"] != shard_index:
            raise ValueError(f"{samples} samples of shard {receipt['shard']}, without one entry for each")
        if not isinstance(receipt["facts"], dict) or receipt["receipt_version"] != _RECEIPT_VERSION:
            raise ValueError(f"receipt_version {shortened(receipt['receipt_version'])}, expected {_RECEIPT_VERSION}")
    except (ValueError, LookupError, TypeError) as error:
        remedy = "Remove it and produce the shard again: precompute --resume"
        raise CacheError(
            path, f"no receipt of shard {shard_index} ({error!r:.300})", remedy=remedy, code="E701"
        ) from error
    return receipt
