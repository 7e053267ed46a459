"""target_embeddings.safetensors, from which a draft's embeddings start, and its receipt sidecar/embeddings.json."""

from __future__ import annotations

import os

import torch

from niels_gpt.eagle3.format.layout import EMBEDDINGS_NAME, PathLike, header_bytes, read_header
from niels_gpt.eagle3.format.manifest import PRODUCE_AGAIN, atomic_write, load_safetensors
from niels_gpt.eagle3.format.native.weights import WEIGHTS_NAME, fits_receipt, read_weights, write_with_receipt
from niels_gpt.storage.errors import CacheError, NotFound
from niels_gpt.storage.fileio import SizedFile
from niels_gpt.storage.meta_json import shortened

EMBEDDINGS_RECEIPT = "embeddings.json"
"""In the sidecar, written after the embeddings: their size in bytes and their sha256."""


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
    """Return the target's input embeddings: [V, H] float32, of a cache of any version.

    follow_links: as `open_file`.
    Raises: FileNotFoundError; CacheError unless the file is a whole safetensors file of the tensor `weight`.
    """
    path = os.path.join(cache_dir, EMBEDDINGS_NAME)
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
    _, safe_open = load_safetensors()
    with safe_open(path, framework="pt") as handle:
        table: torch.Tensor = handle.get_tensor("weight")
    return table


def write_embeddings(cache_dir: PathLike, weight: torch.Tensor) -> None:
    """Write the target's input embeddings [V, H], and then their receipt."""
    path = os.path.join(cache_dir, EMBEDDINGS_NAME)
    write_with_receipt(path, EMBEDDINGS_RECEIPT, lambda: write_target_embeddings(cache_dir, weight))


def has_embeddings(cache_dir: PathLike) -> bool:
    """Return whether the embeddings have the size and sha256 that their receipt states: reads the whole file."""
    return fits_receipt(os.path.join(cache_dir, EMBEDDINGS_NAME), EMBEDDINGS_RECEIPT)
