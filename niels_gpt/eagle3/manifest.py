"""manifest.json and target_embeddings.safetensors of an EAGLE-3 cache: what was run, and where the draft starts."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from niels_gpt import fileio
from niels_gpt.eagle3.layout import (
    DTYPES,
    SHARD_NAME,
    Layout,
    PathLike,
    header_bytes,
    read_file,
    read_header,
    shard_path,
)
from niels_gpt.eagle3.layout import EMBEDDINGS_NAME as EMBEDDINGS_NAME
from niels_gpt.eagle3.layout import MANIFEST_NAME as MANIFEST_NAME
from niels_gpt.fileio import CacheError, SizedFile, write_bytes
from niels_gpt.records import parse_object, shortened

FORMAT_VERSION = 1
VERSIONS = (1, 2)
_NUMBERS = (
    "num_samples",
    "shard_size",
    "seq_length",
    "aux_hidden_dim",
    "draft_vocab_size",
    "target_vocab_size",
    "target_probs_topk",
)
_TEXTS = ("target_model", "dtype", "input_data", "split")
_LISTS = ("aux_layer_ids", "selected_token_ids")
_MAX_SHARDS = 1_000_000  # of six digits
_PRODUCE = "Produce the cache again: python -m niels_gpt.eagle3.precompute"


def load_safetensors() -> tuple[Any, Any]:
    """Return safetensors' `save_file` and `safe_open`. Raises: ImportError that says what to install."""
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            "The EAGLE-3 offline cache requires the 'safetensors' package. Install it: pip install safetensors"
        ) from error
    return save_file, safe_open


def atomic_write(path: str, write_fn: Callable[[str], None]) -> str:
    """Let `write_fn` write a temporary sibling of `path`, sync it and rename it to `path`, which is returned.

    After a crash or a loss of power there is the old file or the new one. The sibling has a name of its own, so two
    writers do not disturb each other, and it is removed on failure.
    """
    target = Path(os.path.abspath(path))
    fileio.make_dir(target.parent)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_fn(str(temporary))
        fileio.fsync_file(temporary)
        fileio.rename(temporary, target)
    except BaseException:
        fileio.remove(temporary)
        raise
    return path


def manifest_path(cache_dir: PathLike) -> str:
    """Return the path of the manifest inside `cache_dir`."""
    return os.path.join(cache_dir, MANIFEST_NAME)


def existing_shard_indices(cache_dir: PathLike) -> set[int]:
    """Return the indices of the shards in `cache_dir`; none where there is no such folder."""
    if not os.path.isdir(cache_dir):
        return set()
    indices = {int(match.group(1)) for name in os.listdir(cache_dir) if (match := SHARD_NAME.match(name))}
    return {index for index in indices if os.path.lexists(shard_path(cache_dir, index))}  # \d takes other digits too


def is_compressed(target_probs_topk: int | None, draft_vocab_size: int) -> bool:
    """Whether top-k leaves anything out: k is neither None nor 0, and below the size of the draft vocabulary."""
    return target_probs_topk is not None and 0 < int(target_probs_topk) < draft_vocab_size


def version_of(manifest: dict[str, Any]) -> int:
    """Return the version that a manifest without one is written as: 2 where top-k compresses, else 1 (D22)."""
    return (
        2 if is_compressed(manifest.get("target_probs_topk"), manifest.get("draft_vocab_size", 0)) else FORMAT_VERSION
    )


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """Return manifest.json: sorted keys, an indent of 2; a `format_version` in `manifest` counts."""
    return json.dumps(
        {"format_version": version_of(manifest), **manifest}, indent=2, sort_keys=True, allow_nan=False
    ).encode()


def write_manifest(cache_dir: PathLike, manifest: dict[str, Any]) -> str:
    """Write the manifest atomically and return its path; see `manifest_bytes`. Raises: ValueError for NaN in it."""
    path = manifest_path(cache_dir)
    fileio.make_dir(cache_dir)
    write_bytes(path, manifest_bytes(manifest))
    return path


def read_manifest(cache_dir: PathLike, *, follow_links: bool = False) -> dict[str, Any]:
    """Return the manifest of a cache of version 1 or 2, with or without the keys that came later.

    follow_links: read it where it is a link, as in a snapshot of the Hugging Face hub.
    Raises: FileNotFoundError; CacheError (a ValueError) for another version, for what is no JSON object, for a value of
        a wrong type, and for more shards than can have names.
    """
    path = manifest_path(cache_dir)
    try:
        manifest = parse_object(read_file(path, follow_links=follow_links))
    except FileNotFoundError:
        raise FileNotFoundError(f"EAGLE-3 cache manifest not found at {path}. Was the cache fully written?") from None
    except CacheError:
        raise
    except ValueError as error:
        raise CacheError(f"{path}: {error}, expected the manifest of an EAGLE-3 cache. {_PRODUCE}") from error
    version = manifest.get("format_version")
    if type(version) is not int or version not in VERSIONS:
        raise CacheError(
            f"EAGLE-3 cache at {os.fspath(cache_dir)} has format_version={shortened(version)}, expected 1 or 2. "
            "Regenerate the cache with the current precompute_eagle3."
        )
    _refuse_wrong_types(manifest, cache_dir)
    size, samples = manifest.get("shard_size"), manifest.get("num_samples")
    if size and samples and -(-samples // size) > _MAX_SHARDS:
        raise CacheError(
            f"{path}: {samples:,} samples, {size:,} a shard, are {-(-samples // size):,} shards, expected "
            f"{_MAX_SHARDS:,} at most, for a shard's name has six digits. {_PRODUCE}"
        )
    return manifest


def _refuse_wrong_types(manifest: dict[str, Any], where: PathLike) -> None:
    """Raise CacheError for a value that is not of its type. Lists, and what tells the input, may be null."""
    path = manifest_path(where)
    for key in _NUMBERS:
        if manifest.get(key) is not None or (key in manifest and key != "target_probs_topk"):
            number_in(manifest, key, where)
    for key in _TEXTS:
        value = manifest.get(key, "")
        if not isinstance(value, str) and (value is not None or key in _TEXTS[:2]):
            raise CacheError(f"{path}: {key} is {shortened(value)}, expected a text. {_PRODUCE}")
    for key in _LISTS:
        value = [] if manifest.get(key) is None else manifest[key]
        if not isinstance(value, list) or not all(type(number) is int and 0 <= number < 2**31 for number in value):
            raise CacheError(f"{path}: {key} is {shortened(value)}, expected a list of ids from 0. {_PRODUCE}")


def number_in(manifest: dict[str, Any], key: str, where: PathLike, least: int = 0) -> int:
    """Return an integer of a manifest. Raises: CacheError if it is missing, no integer, or below `least`."""
    path = manifest_path(where)
    if key not in manifest:
        raise CacheError(f"{path}: {key} is missing. {_PRODUCE}")
    value = manifest[key]
    if type(value) is not int or not least <= value < 2**63:
        raise CacheError(f"{path}: {key} is {shortened(value)}, expected an integer of {least} or more. {_PRODUCE}")
    return value


def layout_of(manifest: dict[str, Any], where: PathLike) -> Layout:
    """Return the form of the shards of a manifest that has all its keys. Raises: CacheError naming the key."""
    dtype = manifest.get("dtype")
    if dtype not in DTYPES:
        raise CacheError(f"{manifest_path(where)}: dtype is {shortened(dtype)}, expected one of {', '.join(DTYPES)}")
    slots, aux, vocab = (
        number_in(manifest, key, where, 1) for key in ("seq_length", "aux_hidden_dim", "draft_vocab_size")
    )
    topk = manifest.get("target_probs_topk") if manifest.get("format_version", version_of(manifest)) == 2 else None
    return Layout(slots, aux, vocab, int(topk or 0) if is_compressed(topk, vocab) else 0, dtype)


def write_target_embeddings(cache_dir: PathLike, weight: torch.Tensor) -> str:
    """Write the target's table of input embeddings and return the file's path.

    weight: [V, H] of any float dtype, on any device; float32 on disk, so that a bf16 table of a big target takes twice
    its size. The offline path never loads the target, and the draft's embeddings start from this table.
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
    """Return the target's table of input embeddings: [V, H] float32.

    follow_links: read it where it is a link, as in a snapshot of the Hugging Face hub.
    Raises: FileNotFoundError; CacheError for a file that is no whole safetensors file with the tensor `weight`.
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
        found = ", ".join(f"{shortened(name)} {each[0]}" for name, each in fields.items())
        raise CacheError(f"{path}: holds {found}, expected weight [V, H] of torch.float32. {_PRODUCE}")
    _, safe_open = load_safetensors()
    with safe_open(path, framework="pt") as handle:
        table: torch.Tensor = handle.get_tensor("weight")
    return table
