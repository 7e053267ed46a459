"""target_weights.safetensors of a native cache: the target's embeddings, lm_head and final norm; and its receipt.

Each tensor has the smallest of bf16, fp16 and fp32 that holds the loaded values exactly. The receipt is
sidecar/weights.json, written last: the file's size and sha256.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.format.layout import (
    DTYPES,
    SIDECAR,
    SPARSE,
    PathLike,
    in_file_order,
    open_file,
    refuse_sparse,
    tensors_header,
)
from niels_gpt.eagle3.format.layout import WEIGHTS_NAME as WEIGHTS_NAME
from niels_gpt.eagle3.format.manifest import PRODUCE_AGAIN, atomic_write, load_safetensors
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import SizedFile, canonical_json, sha256_file, write_bytes
from niels_gpt.storage.meta_json import parse_object, read_regular, shortened

WEIGHTS_RECEIPT = "weights.json"
WEIGHTS = {"embeddings": 2, "lm_head": 2, "norm": 1, "norm_bias": 1, "lm_head_bias": 1}
"""The tensors and their dimensions: [V, H], [V, H] (absent where tied to the embeddings), [H], [H], [V]."""
_RECEIPT_BYTES = 4096
_PART = 1 << 24  # values compared at a time


def write_weights(cache_dir: PathLike, weights: Mapping[str, Tensor]) -> None:
    """Write the target's weights, as `TargetHead.weights` returns them, and then their receipt.

    weights: tensors of `WEIGHTS` of any float dtype, on any device; embeddings must be among them.
    Raises: ValueError for another name or number of dimensions.
    """
    wrong = {name: tuple(tensor.shape) for name, tensor in weights.items() if WEIGHTS.get(name) != tensor.dim()}
    if wrong or "embeddings" not in weights:
        raise ValueError(f"weights of {list(weights)}, of which {wrong} do not fit: expected {WEIGHTS}")
    stored = {name: _smallest(tensor.detach()).cpu().contiguous() for name, tensor in weights.items()}
    path = os.path.join(cache_dir, WEIGHTS_NAME)
    write_with_receipt(path, WEIGHTS_RECEIPT, lambda: atomic_write(path, lambda to: _write(to, stored)))


def read_weights(
    cache_dir: PathLike, names: Collection[str] = tuple(WEIGHTS), *, follow_links: bool = False
) -> dict[str, Tensor]:
    """Return those of the weights `names` that the file has, as views of a map, in their stored dtypes.

    follow_links: as `open_file`.
    Raises: FileNotFoundError; CacheError for a file of other tensors.
    """
    path = os.path.join(cache_dir, WEIGHTS_NAME)
    handle = open_file(path, follow_links=follow_links)
    try:
        refuse_sparse(handle, path, *SPARSE)
    finally:
        os.close(handle)
    from safetensors import SafetensorError

    try:
        with load_safetensors()[1](path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it cannot be iterated
                about = file.get_slice(name)
                if WEIGHTS.get(name) != len(about.get_shape()) or about.get_dtype() not in ("BF16", "F16", "F32"):
                    found = f"holds {shortened(name)}, {about.get_dtype()} {about.get_shape()}"
                    raise CacheError(path, found, "the weights of a target", PRODUCE_AGAIN, code="E701")
            return {name: file.get_tensor(name) for name in set(file.keys()) & set(names)}
    except SafetensorError as error:
        raise CacheError(path, f"safetensors cannot read it: {error}", remedy=PRODUCE_AGAIN, code="E701") from error


def has_weights(cache_dir: PathLike) -> bool:
    """Return whether the weights have the size and sha256 that their receipt states: reads the whole file."""
    return fits_receipt(os.path.join(cache_dir, WEIGHTS_NAME), WEIGHTS_RECEIPT)


def _write(path: str, weights: Mapping[str, Tensor]) -> None:
    """Write the bytes that safetensors' save_file writes, through `fileio`, where the tests of faults see them."""
    tensors = in_file_order({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()})
    header = tensors_header(tensors)
    end = len(header)
    file = SizedFile(path, end + sum(tensor.nbytes for tensor in weights.values()))
    try:
        file.write(0, header)
        for name in tensors:
            file.write(end, weights[name].view(torch.uint8).numpy().reshape(-1))
            end += weights[name].nbytes
    finally:
        file.close()


def _smallest(tensor: Tensor) -> Tensor:
    """Return the tensor in the smallest of bf16, fp16, fp32 that changes none of its values."""
    for dtype in DTYPES.values():
        if tensor.dtype == dtype or all(torch.equal(part.to(dtype).to(part.dtype), part) for part in _parts(tensor)):
            return tensor.to(dtype)
    raise ValueError(f"a weight of {tensor.dtype}: expected values that {', '.join(DTYPES)} hold exactly")


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor, max(1, _PART // max(1, tensor[:1].numel())))


# --- files with a receipt ---------------------------------------------------------------------------------------------


def write_with_receipt(path: PathLike, receipt_name: str, write: Callable[[], object]) -> None:
    """Let `write` write a file of a cache, and then its receipt below sidecar/: its size and sha256."""
    receipt = Path(path).parent / SIDECAR / receipt_name
    if receipt.is_file():  # of the file that is replaced
        fileio.remove(receipt)
        fileio.fsync_dir(receipt.parent)
    write()
    fileio.make_dir(receipt.parent)
    write_bytes(receipt, canonical_json(_checksums(Path(path))))


def fits_receipt(path: PathLike, receipt_name: str) -> bool:
    """Return whether a file has the size and sha256 that its receipt states: reads the whole file."""
    file = Path(path)
    try:
        stated = read_regular(file.parent / SIDECAR / receipt_name, _RECEIPT_BYTES)
        if file.is_symlink() or file.lstat().st_size != parse_object(stated).get("bytes"):
            return False
        return canonical_json(_checksums(file)) == stated
    except (FileNotFoundError, ValueError):
        return False


def _checksums(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
