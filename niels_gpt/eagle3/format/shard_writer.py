"""One shard: its writer, its receipt, which is written after it, and the damage that a receipt reveals.

A shard is written row by row into a file of its final size, so memory does not grow with it. The slots after a sample's
last token are never written: they are zeros, and holes where the file system has them. The bytes equal those of
safetensors' save_file for the same tensors.

The receipt is sidecar/shard-000000.json. It has an XXH3-128 of each sample, over the sample's row of each tensor in the
order of the file: all slots of the ids and masks, the first `slots` slots of the others.
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
    header_bytes,
    in_file_order,
    read_file,
    refuse_links,
    row_bytes_of,
    shard_path,
)
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import SizedFile, canonical_json, write_bytes
from niels_gpt.storage.meta_json import checked_count, checked_sha256, parse_object, shortened

_RECEIPT_VERSION = 1
_DIGEST = re.compile("[0-9a-f]{32}")


def receipt_path(cache_dir: PathLike, shard_index: int) -> Path:
    """Return the path of a shard's receipt."""
    return Path(cache_dir) / SIDECAR / f"shard-{shard_index:06d}.json"


class ShardWriter:
    """Writes one shard: `write` the rows in any order, each once, then `commit`. On failure `discard`.

    With two writers of one shard at a time, one's receipt may end up beside the other's shard; a producer therefore
    holds the lock of its folder.
    """

    def __init__(self, cache_dir: PathLike, shard_index: int, fields: Fields, rows: int) -> None:
        """fields: as in `Layout.fields`. rows: samples of the shard. The folder is created if needed.

        Raises: ValueError for more than `MAX_ROWS` rows; CacheError where a file of the cache is a link.
        """
        if rows > MAX_ROWS:
            raise ValueError(f"a shard of {rows:,} samples, expected {MAX_ROWS:,} at most")
        refuse_links(cache_dir)
        self._cache_dir, self._index, self._fields = cache_dir, shard_index, in_file_order(fields)
        self._path = Path(shard_path(cache_dir, shard_index))
        self._header = header_bytes(fields, rows)
        self._begins: dict[str, int] = {}
        self._size = len(self._header)
        for name, field in self._fields.items():
            self._begins[name] = self._size
            self._size += rows * row_bytes_of(field)
        self._slots, self._digests = [0] * rows, [""] * rows
        fileio.make_dir(receipt_path(cache_dir, shard_index).parent)
        self._temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.tmp")
        self._file = SizedFile(self._temporary, self._size)

    def write(self, rows: Sequence[int], slots: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the rows `rows` of the shard.

        slots: of each row, the number of slots with content; the others stay zero.
        tensors: [b, w, ...] of the stored dtype on the CPU, w >= max(slots); ids and masks [b, S].
        Raises: ValueError for other names, dtypes or shapes, and for a row written twice; OSError on a full disk.
        """
        flat = {name: self._flat(name, tensors, len(rows), max(slots, default=0)) for name in self._fields}
        for row in rows:
            if not 0 <= row < len(self._digests):
                raise ValueError(f"{self._path}: row {row}, expected 0 <= row < {len(self._digests)}")
            if self._digests[row] or len(set(rows)) != len(rows):
                raise ValueError(f"{self._path}: row {row} was written already")
        if list(rows) == list(range(rows[0], rows[0] + len(rows))) and set(slots) == {self._all_slots}:
            for name, part in flat.items():
                self._file.write(self._offset(name, rows[0]), part)
        else:
            for row, pieces in zip(rows, _pieces(self._fields, flat, slots), strict=True):
                for name, piece in zip(self._fields, pieces, strict=True):
                    self._file.write(self._offset(name, row), piece)
        for row, used, pieces in zip(rows, slots, _pieces(self._fields, flat, slots), strict=True):
            self._slots[row], self._digests[row] = used, digest_of(pieces)

    def commit(
        self, facts: Mapping[str, Any] | None = None, check: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        """Rename the shard to its final name, durably, write its receipt, and return the receipt.

        facts: stored in the receipt. check: called before the shard is renamed; what it raises prevents that.
        Raises: ValueError if a row was not written.
        """
        if "" in self._digests:
            raise ValueError(f"{self._path}: row {self._digests.index('')} was not written")
        self._file.write(0, self._header)
        return commit_shard(
            self._file, self._cache_dir, self._index, self._size, self._header, self._slots, self._digests, facts, check
        )

    def discard(self) -> None:
        """Remove the temporary file. After `commit` this does nothing."""
        self._file.close()
        fileio.remove(self._temporary)

    @property
    def _all_slots(self) -> int:
        return self._fields["input_ids"][1][0]

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
        flat: NDArray[np.uint8] = tensor.detach().contiguous().view(torch.uint8).numpy()
        return flat.reshape(rows, -1)


def commit_shard(
    file: SizedFile,
    cache_dir: PathLike,
    shard_index: int,
    size: int,
    header: bytes,
    slots: Sequence[int],
    digests: Sequence[str],
    facts: Mapping[str, Any] | None,
    check: Callable[[], object] | None,
) -> dict[str, Any]:
    """Close a written temporary file, make it the shard, durably, write its receipt, and return the receipt."""
    file.sync()
    file.close()
    if check is not None:  # after the sync, which may take long
        check()
    receipt = {
        "receipt_version": _RECEIPT_VERSION,
        "shard": shard_index,
        "samples": len(slots),
        "bytes": size,
        "header_sha256": hashlib.sha256(header).hexdigest(),
        "slots": list(slots),
        "xxh3_128": list(digests),
        "facts": dict(facts or {}),
    }
    path = receipt_path(cache_dir, shard_index)
    if path.exists():  # of the replaced shard: no receipt is better than a wrong one
        fileio.remove(path)
        fileio.fsync_dir(path.parent)
    fileio.rename(file.path, shard_path(cache_dir, shard_index))
    write_bytes(path, canonical_json(receipt))
    return receipt


def _pieces(
    fields: Fields, flat: Mapping[str, NDArray[np.uint8]], slots: Sequence[int]
) -> Iterator[list[NDArray[np.uint8]]]:
    """Yield, for each row, the part of each field that is hashed and written."""
    sizes = {name: row_bytes_of(field) // (field[1][0] or 1) for name, field in fields.items()}
    for row, used in enumerate(slots):
        yield [part[row] if name in INT_FIELDS else part[row, : used * sizes[name]] for name, part in flat.items()]


def digest_of(pieces: Sequence[NDArray[Any]]) -> str:
    """Return the XXH3-128 of a row's contiguous pieces.

    It detects damage; sha256 would take as long as writing the row.
    """
    try:
        import xxhash  # here, because readers do without
    except ImportError as error:
        raise ImportError("checksums of shards need xxhash: pip install xxhash") from error
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece.data)
    return digest.hexdigest()


# --- receipts ---------------------------------------------------------------------------------------------------------


def read_receipt(cache_dir: PathLike, shard_index: int, *, follow_links: bool = False) -> dict[str, Any] | None:
    """Return a shard's receipt; None where there is none. Raises: CacheError for one that no writer made."""
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
            raise ValueError("xxh3_128 is no list of 32 lower-case hex digits each")
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


def row_damage(fields: Fields, parts: Mapping[str, NDArray[np.uint8]], slots: int, digest: str) -> str:
    """Return the damaged fields of a row, by its slots and checksum in the receipt; "" if there are none.

    fields: in the order of the file.
    """
    (pieces,) = _pieces(fields, {name: part[None] for name, part in parts.items()}, [slots])
    if digest_of(pieces) != digest:
        return "its bytes do not give the checksum in its receipt"
    for (name, part), piece in zip(parts.items(), pieces, strict=True):
        if part[piece.size :].any():
            return f"{name} is not zero after its {slots} slots"
    return ""
