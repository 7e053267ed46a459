"""The target's weights that a cache keeps: one file, and a receipt with its size and sha256 that is written last.

Versions 1 and 2 have target_embeddings.safetensors, the input embeddings as float32, with the receipt
sidecar/embeddings.json. The native form has target_weights.safetensors: embeddings, lm_head and final norm, each in the
smallest of bf16, fp16 and fp32 that holds the loaded values exactly, with the receipt sidecar/weights.json.
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
    EMBEDDINGS_NAME,
    SIDECAR,
    SPARSE,
    WEIGHTS_NAME,
    PathLike,
    open_file,
    read_header,
    refuse_sparse,
)
from niels_gpt.eagle3.format.manifest import PRODUCE_AGAIN, atomic_write, load_safetensors
from niels_gpt.eagle3.format.shard_writer import write_tensors
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError, NotFound
from niels_gpt.storage.fileio import canonical_json, sha256_file, write_bytes
from niels_gpt.storage.meta_json import parse_object, read_regular, shortened
from niels_gpt.storage.mounted import MOUNTED

EMBEDDINGS_RECEIPT, WEIGHTS_RECEIPT = "embeddings.json", "weights.json"
"""File names in the sidecar."""
WEIGHTS = {"embeddings": 2, "lm_head": 2, "norm": 1, "norm_bias": 1, "lm_head_bias": 1}
"""The tensors and their dimensions: [V, H], [V, H] (absent where tied to the embeddings), [H], [H], [V]."""
_RECEIPT_BYTES = 4096
_CHUNK = 1 << 24  # values compared at a time


def write_target_embeddings(cache_dir: PathLike, weight: Tensor) -> str:
    """Write the target's input embeddings without a receipt; return the file's path.

    A draft initializes its embeddings from this table, since training from a cache never loads the target.

    weight: [V, H] of any float dtype and device; stored as float32, so a bf16 table takes twice its size.
    """
    table = weight.detach().to(torch.float32).cpu().contiguous()
    return _write(os.path.join(cache_dir, EMBEDDINGS_NAME), {"weight": table})


def write_embeddings(cache_dir: PathLike, weight: Tensor) -> None:
    """Write the target's input embeddings [V, H], and then their receipt."""
    path = Path(cache_dir, EMBEDDINGS_NAME)
    _write_with_receipt(path, EMBEDDINGS_RECEIPT, lambda: write_target_embeddings(cache_dir, weight))


def write_weights(cache_dir: PathLike, weights: Mapping[str, Tensor]) -> None:
    """Write the target's weights for a native cache, and then their receipt.

    weights: from `TargetHead.weights`: tensors named in `WEIGHTS`, of any float dtype and device; embeddings are
        required.
    Raises: ValueError for another name or number of dimensions.
    """
    wrong = {name: tuple(tensor.shape) for name, tensor in weights.items() if WEIGHTS.get(name) != tensor.dim()}
    if wrong or "embeddings" not in weights:
        raise ValueError(f"weights of {list(weights)}, of which {wrong} do not fit: expected {WEIGHTS}")
    stored = {name: _smallest(tensor.detach()).cpu().contiguous() for name, tensor in weights.items()}
    path = Path(cache_dir, WEIGHTS_NAME)
    _write_with_receipt(path, WEIGHTS_RECEIPT, lambda: _write(os.fspath(path), stored))


def read_weights(
    cache_dir: PathLike, names: Collection[str] = tuple(WEIGHTS), *, follow_links: bool = False
) -> dict[str, Tensor]:
    """Return the weights `names` of a native cache, those that it has, as views of a map in their stored dtypes.

    follow_links: see `open_file`.
    Raises: FileNotFoundError; CacheError E701 for a file of other tensors.
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


def read_target_embeddings(cache_dir: PathLike, *, follow_links: bool = False) -> Tensor:
    """Return the target's input embeddings from a cache of any form: [V, H] float32.

    follow_links: see `open_file`.
    Raises: FileNotFoundError; CacheError E701 unless the file is whole and has the embeddings.
    """
    path = os.path.join(cache_dir, EMBEDDINGS_NAME)
    mount = MOUNTED.get(os.fspath(cache_dir))
    if mount is not None:
        mount.arrive(EMBEDDINGS_NAME if EMBEDDINGS_NAME in mount.records else WEIGHTS_NAME)
    if not os.path.lexists(path) and os.path.lexists(os.path.join(cache_dir, WEIGHTS_NAME)):
        weights = read_weights(cache_dir, ["embeddings"], follow_links=follow_links)
        if "embeddings" not in weights:
            raise CacheError(path, f"{WEIGHTS_NAME} has no embeddings", remedy=PRODUCE_AGAIN, code="E701")
        return weights["embeddings"].to(torch.float32)
    if not os.path.lexists(path):
        raise NotFound(
            f"{path} not found. The EAGLE-3 offline cache must include the target embeddings so the draft can "
            "initialize from them; regenerate the cache with the current precompute_eagle3.",
            code="E702",
        )
    fields, _, _ = read_header(path, follow_links=follow_links)
    dtype, shape = fields.get("weight", (None, ()))
    if dtype != torch.float32 or len(shape) != 1:
        tensors = ", ".join(f"{shortened(name)} {each[0]}" for name, each in fields.items())
        raise CacheError(path, f"holds {tensors}", "weight [V, H] of torch.float32", PRODUCE_AGAIN, code="E701")
    with load_safetensors()[1](path, framework="pt") as handle:
        table: Tensor = handle.get_tensor("weight")
    return table


def has_weights(cache_dir: PathLike, *, native: bool) -> bool:
    """Return whether the weights file has the size and sha256 that its receipt states. Reads the whole file.

    native: of a native cache, else of a dense one.
    """
    name, receipt = (WEIGHTS_NAME, WEIGHTS_RECEIPT) if native else (EMBEDDINGS_NAME, EMBEDDINGS_RECEIPT)
    file = Path(cache_dir, name)
    try:
        stated = read_regular(file.parent / SIDECAR / receipt, _RECEIPT_BYTES)
        if file.is_symlink() or file.lstat().st_size != parse_object(stated).get("bytes"):
            return False
        return canonical_json(_checksums(file)) == stated
    except (FileNotFoundError, ValueError):
        return False


def _write_with_receipt(path: Path, receipt_name: str, write: Callable[[], object]) -> None:
    receipt = path.parent / SIDECAR / receipt_name
    if receipt.is_file():  # as for shards: no receipt is better than the old file's
        fileio.remove(receipt)
        fileio.fsync_dir(receipt.parent)
    write()
    fileio.make_dir(receipt.parent)
    write_bytes(receipt, canonical_json(_checksums(path)))


def _checksums(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _write(path: str, weights: Mapping[str, Tensor]) -> str:
    return atomic_write(path, lambda temporary: write_tensors(temporary, weights))


def _smallest(tensor: Tensor) -> Tensor:
    """Return a tensor in the smallest of bf16, fp16 and fp32 that changes none of its values."""
    for dtype in DTYPES.values():
        if tensor.dtype == dtype or all(
            torch.equal(chunk.to(dtype).to(chunk.dtype), chunk) for chunk in _chunks(tensor)
        ):
            return tensor.to(dtype)
    raise ValueError(f"a weight of {tensor.dtype}: expected values that {', '.join(DTYPES)} hold exactly")


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor, max(1, _CHUNK // max(1, tensor[:1].numel())))
