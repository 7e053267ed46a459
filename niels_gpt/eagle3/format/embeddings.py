"""target_embeddings.safetensors, from which a draft's embeddings start, and its receipt sidecar/embeddings.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from niels_gpt.eagle3.format.layout import EMBEDDINGS_NAME, SIDECAR, PathLike, header_bytes, read_header
from niels_gpt.eagle3.format.manifest import PRODUCE_AGAIN, atomic_write, load_safetensors
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import SizedFile, canonical_json, sha256_file, write_bytes
from niels_gpt.storage.meta_json import parse_object, read_regular, shortened

EMBEDDINGS_RECEIPT = "embeddings.json"
"""In the sidecar, written after the embeddings: their size in bytes and their sha256."""
_RECEIPT_BYTES = 4096


def write_target_embeddings(cache_dir: PathLike, weight: torch.Tensor) -> str:
    """Write the target's input embeddings and return the file's path.

    weight: [V, H] of any float dtype, on any device; stored as float32, so a bf16 table takes twice its size. Training
    from a cache never loads the target, and the draft's embeddings start from this table.
    """
    table = weight.detach().to(torch.float32).cpu().contiguous()
    header = header_bytes({"weight": (table.dtype, tuple(table.shape[1:]))}, table.shape[0])

    def write(path: str) -> None:
        file = SizedFile(path, len(header) + table.nbytes)
        try:
            file.write(0, header)
            file.write(len(header), table.view(torch.uint8).numpy().reshape(-1))
        finally:
            file.close()

    return atomic_write(os.path.join(cache_dir, EMBEDDINGS_NAME), write)


def read_target_embeddings(cache_dir: PathLike, *, follow_links: bool = False) -> torch.Tensor:
    """Return the target's input embeddings: [V, H] float32.

    follow_links: as `open_file`.
    Raises: FileNotFoundError; CacheError unless the file is a whole safetensors file of the tensor `weight`.
    """
    path = os.path.join(cache_dir, EMBEDDINGS_NAME)
    if not os.path.lexists(path):
        raise FileNotFoundError(
            f"{path} not found. The EAGLE-3 offline cache must include the target embeddings so the draft can "
            "initialize from them; regenerate the cache with the current precompute_eagle3."
        )
    fields, _, _ = read_header(path, follow_links=follow_links)
    dtype, shape = fields.get("weight", (None, ()))
    if dtype != torch.float32 or len(shape) != 1:
        tensors = ", ".join(f"{shortened(name)} {each[0]}" for name, each in fields.items())
        raise CacheError(path, f"holds {tensors}", "weight [V, H] of torch.float32", PRODUCE_AGAIN, code="E701")
    _, safe_open = load_safetensors()
    with safe_open(path, framework="pt") as handle:
        table: torch.Tensor = handle.get_tensor("weight")
    return table


def write_embeddings(cache_dir: PathLike, weight: torch.Tensor) -> None:
    """Write the target's input embeddings [V, H], and then their receipt."""
    receipt = Path(cache_dir, SIDECAR, EMBEDDINGS_RECEIPT)
    if receipt.is_file():  # of the table that is replaced
        fileio.remove(receipt)
        fileio.fsync_dir(receipt.parent)
    path = Path(write_target_embeddings(cache_dir, weight))
    write_bytes(receipt, canonical_json(_checksums(path)))


def has_embeddings(cache_dir: PathLike) -> bool:
    """Return whether the embeddings have the size and sha256 that their receipt states: reads the whole file."""
    path, receipt = Path(cache_dir, EMBEDDINGS_NAME), Path(cache_dir, SIDECAR, EMBEDDINGS_RECEIPT)
    try:
        stated = read_regular(receipt, _RECEIPT_BYTES)
        if path.is_symlink() or path.lstat().st_size != parse_object(stated).get("bytes"):
            return False
        return canonical_json(_checksums(path)) == stated
    except (FileNotFoundError, ValueError):
        return False


def _checksums(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
