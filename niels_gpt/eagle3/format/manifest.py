"""manifest.json of an EAGLE-3 cache: reads, checks and writes it, and derives the layout of the shards from it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.format.drafters import DRAFTERS, TARGETS, drafters_of, manifest_keys, targets_of
from niels_gpt.eagle3.format.layout import (
    AUX_DTYPES,
    DTYPES,
    EMBEDDINGS_NAME,
    MANIFEST_NAME,
    SHARD_NAME,
    SIDECAR,
    Layout,
    PathLike,
    read_file,
    shard_path,
)
from niels_gpt.eagle3.format.watched import unfinished_text
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError, NotFound
from niels_gpt.storage.fileio import META_NAME, write_bytes
from niels_gpt.storage.meta_json import parse_object, shortened
from niels_gpt.storage.mounted import MOUNTED, shown

FORMAT_VERSION = 1
VERSIONS = (1, 2)
NATIVE_VERSION = "native-1"
_MAX_SHARDS = 1_000_000  # of six digits
_ANY, _SIZE, _IDS, _NUMBER = (0, 2**63 - 1), (1, 2**24), (1, 2**31), (-1e9, 1e9)
_FREE: tuple[str, ...] = ()  # any
_KEYS: dict[str, tuple[str, tuple[Any, ...] | None, tuple[Any, ...] | None]] = {
    "num_samples": ("an integer", _ANY, _ANY),
    "num_shards": ("an integer", None, (0, _MAX_SHARDS)),
    "shard_size": ("an integer", _ANY, None),
    "shard_bytes": ("an integer", None, (1, 2**63 - 1)),
    "seq_length": ("an integer", _ANY, _SIZE),
    "hidden_size": ("an integer", None, _SIZE),
    "aux_hidden_dim": ("an integer", _ANY, None),
    "target_vocab_size": ("an integer", _ANY, _IDS),
    "draft_vocab_size": ("an integer", _ANY, _IDS),
    "target_probs_topk": ("an integer or null", _ANY, None),
    "target_model": ("a text", _FREE, _FREE),
    "dtype": ("a text", _FREE, tuple(DTYPES)),
    "aux_dtype": ("a text", None, tuple(AUX_DTYPES)),
    "input_data": ("a text or null", _FREE, None),
    "split": ("a text or null", _FREE, None),
    "aux_layer_ids": ("a list of integers or null", (0, 2**31 - 1), (0, 2**31 - 1)),
    "selected_token_ids": ("a list of integers or null", (0, 2**31 - 1), (0, 2**31 - 1)),
    "conventions.layer_index": ("a text", None, ("block_output_0based",)),
    "conventions.last_hidden": ("a text", None, ("pre_norm", "post_norm")),
    "conventions.shift": ("a text", None, ("none",)),
    "conventions.loss_mask": ("a text", None, ("raw",)),
    "head.norm": ("a text", None, ("rms", "wide_rms", "gemma_rms", "layer", "none")),
    "head.eps": ("a number or null", None, _NUMBER),
    "head.logit_scale": ("a number", None, _NUMBER),
    "head.softcap": ("a number or null", None, _NUMBER),
    "head.tied": ("true or false", None, _FREE),
    "head.compute_dtype": ("a text", None, ("bf16", "fp32")),
}
"""Key -> its type; least and most of it, or of each number of a list, or the texts that it may be: in versions 1 and 2,
which may lack it, and in the native form, which has every key with such an entry."""
_OPTIONAL = {"targets": TARGETS[1:], "made_for": tuple(sorted(DRAFTERS.keys() - {"eagle3"}))}
"""Keys that only some native manifests have -> the texts that each may be."""
_OF_A_CACHE = (SIDECAR, EMBEDDINGS_NAME)
PRODUCE_AGAIN = "Produce the cache again: niels-gpt eagle3 precompute"


def load_safetensors() -> tuple[Any, Any]:
    """Return safetensors' `save_file` and `safe_open`. Raises: ImportError if it is not installed."""
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            "The EAGLE-3 offline cache requires the 'safetensors' package. Install it: pip install safetensors"
        ) from error
    return save_file, safe_open


def atomic_write(path: str, write_fn: Callable[[str], None]) -> str:
    """Let `write_fn` write a temporary sibling of `path`, sync it, rename it to `path`; return `path`.

    After a crash or power loss either the old or the new file is there. The sibling's name is unique, so two writers do
    not disturb each other; it is removed on failure.
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
    """Return the path of the manifest in `cache_dir`."""
    return os.path.join(cache_dir, MANIFEST_NAME)


def existing_shard_indices(cache_dir: PathLike) -> set[int]:
    """Return the indices of the shards in `cache_dir`, which may be absent."""
    if not os.path.isdir(cache_dir):
        return set()
    mount = MOUNTED.get(os.fspath(cache_dir))
    names = {*(os.listdir(cache_dir) if mount is None else mount.records)}
    indices = {int(match.group(1)) for name in names if (match := SHARD_NAME.match(name))}
    return {index for index in indices if shard_path("", index) in names}  # \d matches other digits too


def check_shard_indices(cache_dir: PathLike, num_samples: int, num_shards: int) -> None:
    """Raise CacheError E702 unless the shards of a folder are exactly 0 to num_shards - 1."""
    indices = existing_shard_indices(cache_dir)
    if len(indices) == num_shards and max(indices, default=-1) < num_shards:
        return
    missing = next((index for index in range(num_shards) if index not in indices), None)
    wrong = min(index for index in indices if index >= num_shards) if missing is None else missing
    which = f"{'a shard too many is' if missing is None else 'missing is'} {os.path.basename(shard_path('', wrong))}"
    first = ", ".join(map(str, sorted(indices)[:20]))
    more = f" and {len(indices) - 20:,} more" if len(indices) > 20 else ""
    raise CacheError(
        cache_dir,
        f"EAGLE-3 cache declares {num_samples} samples ({num_shards} shards) but found {len(indices)} shard files "
        f"(shard indices [{first}]{more}): {which}",
        remedy="Produce the rest: precompute --resume",
        code="E702",
    )


def is_compressed(target_probs_topk: int | None, draft_vocab_size: int) -> bool:
    """Return whether top-k drops probabilities: 0 < k < size of the draft vocabulary."""
    return target_probs_topk is not None and 0 < int(target_probs_topk) < draft_vocab_size


def version_of(manifest: dict[str, Any]) -> int:
    """Return the version to write for a manifest that states none: 2 if top-k drops probabilities, else 1 (D22)."""
    topk, vocab = manifest.get("target_probs_topk"), manifest.get("draft_vocab_size", 0)
    return 2 if is_compressed(topk, vocab) else FORMAT_VERSION


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """Return the content of manifest.json: sorted keys, an indent of 2. A missing `format_version` is added."""
    manifest = {"format_version": version_of(manifest), **manifest}
    return json.dumps(manifest, indent=2, sort_keys=True, allow_nan=False).encode()


def write_manifest(cache_dir: PathLike, manifest: dict[str, Any]) -> str:
    """Write the manifest atomically; return its path. Raises: ValueError for NaN in it."""
    path = manifest_path(cache_dir)
    fileio.make_dir(cache_dir)
    write_bytes(path, manifest_bytes(manifest))
    return path


def read_manifest(cache_dir: PathLike, *, follow_links: bool = False) -> dict[str, Any]:
    """Read and check the manifest of a cache of version 1, 2 or native-1.

    Versions 1 and 2 may lack keys that later tools added; a native manifest has all keys.

    follow_links: see `open_file`.
    Raises: FileNotFoundError; CacheError E208 for another version; CacheError E701 for a file that is not a JSON
        object, a value of a wrong type, or more shards than names.
    """
    path = manifest_path(cache_dir)
    try:
        manifest = parse_object(read_file(path, follow_links=follow_links))
    except FileNotFoundError:
        raise _no_manifest(path) from None
    except CacheError:
        raise
    except ValueError as error:
        raise CacheError(path, str(error), "the manifest of an EAGLE-3 cache", PRODUCE_AGAIN, code="E701") from error
    version = manifest.get("format_version")
    if not is_native(manifest) and (type(version) is not int or version not in VERSIONS):
        found, remedy = (
            f"has format_version={shortened(version)}",
            "Regenerate the cache with the current precompute_eagle3",
        )
        raise CacheError(path, found, f"1 or 2, or {NATIVE_VERSION}", remedy, code="E208")
    _check_keys(manifest, path)
    if is_native(manifest):
        _check_native(manifest, path)
        return manifest
    size, samples = manifest.get("shard_size"), manifest.get("num_samples")
    if size and samples and -(-samples // size) > _MAX_SHARDS:
        found = f"{samples:,} samples, {size:,} a shard, are {-(-samples // size):,} shards"
        raise CacheError(
            path, found, f"{_MAX_SHARDS:,} at most, as a shard's name has six digits", PRODUCE_AGAIN, code="E701"
        )
    return manifest


def is_native(manifest: Mapping[str, Any]) -> bool:
    """Return whether a manifest describes a native cache."""
    return manifest.get("format_version") == NATIVE_VERSION


def _refuse(path: str, key: str, value: Any, expected: str) -> CacheError:
    found = f"{key} is missing, or null" if value is None else f"{key} is {shortened(value)}"
    return CacheError(path, found, expected, PRODUCE_AGAIN, code="E701")


def _check_keys(manifest: Mapping[str, Any], path: str) -> None:
    """Raise CacheError naming the first key that breaks the rules of `_KEYS`."""
    native = is_native(manifest)
    for name, (kind, dense, own) in _KEYS.items():
        some, (outer, _, key) = own if native and own is not None else dense, name.partition(".")
        above = manifest.get(outer) if key else manifest
        held = isinstance(above, dict) and (key or outer) in above
        if some is None or not (held or (native and own is not None)):
            continue
        value = above[key or outer] if held and isinstance(above, dict) else None
        if not held or not is_good(kind, some, value):
            more = (
                f" from {some[0]:,} to {some[1]:,}"
                if some and "text" not in kind
                else f": {', '.join(some)}" * bool(some)
            )
            raise _refuse(path, name, value, f"{kind}{more}")


def is_good(kind: str, some: tuple[Any, ...], value: Any) -> bool:
    """Return whether a value has a type and lies within its limits.

    kind: as in `_KEYS`, or "an object". some: minimum and maximum, or the allowed texts; () for any.
    """
    if value is None:
        return kind.endswith("null")
    if "text" in kind:
        return isinstance(value, str) and (not some or value in some)
    if "list" in kind:
        least, most = some
        return isinstance(value, list) and all(type(each) is int and least <= each <= most for each in value)
    if kind in ("true or false", "an object"):
        return isinstance(value, bool if "true" in kind else dict)
    return type(value) in ((int,) if "integer" in kind else (int, float)) and bool(some[0] <= value <= some[1])


def _check_native(manifest: Mapping[str, Any], path: str) -> None:
    """Raise CacheError naming the first value of a native manifest that contradicts another."""
    for key, texts in _OPTIONAL.items():
        if key in manifest and manifest[key] not in texts:
            raise _refuse(path, key, manifest[key], f"one of {', '.join(texts)}, or no such key")
    for key, below in {"aux_layer_ids": 2**31, "selected_token_ids": manifest["target_vocab_size"]}.items():
        ids = manifest[key] or []
        # a draft of MTP reads no block
        may_be_empty = ids == manifest[key] and key == "aux_layer_ids" and targets_of(manifest) == "all"
        if not (ids or may_be_empty) or max(ids, default=0) >= below or len({*ids}) != len(ids):
            raise _refuse(path, key, manifest[key], f"a list of different integers from 0 to {below - 1}")
    kinds = manifest_keys(targets_of(manifest), manifest["aux_layer_ids"]).get("enough_for")
    if (stated := manifest.get("enough_for")) != kinds:
        expected = f"{kinds}, by targets and aux_layer_ids" if kinds else "no such key without targets"
        raise _refuse(path, "enough_for", stated, expected)
    if (made_for := manifest.get("made_for")) not in (None, *drafters_of(manifest)):
        raise _refuse(path, "made_for", made_for, "one that finds its states, by targets and aux_layer_ids")
    if len(manifest["selected_token_ids"]) != manifest["draft_vocab_size"]:
        raise _refuse(path, "draft_vocab_size", manifest["draft_vocab_size"], "the length of selected_token_ids")
    head = manifest["head"]
    softcap = head["softcap"]
    if (head["eps"] or 0) < 0 or not head["logit_scale"] > 0 or (softcap is not None and not softcap > 0):
        raise _refuse(path, "head", head, "eps of 0 or more, logit_scale and softcap above 0")
    if manifest["conventions"]["last_hidden"] == "post_norm" and head["norm"] != "none":
        raise _refuse(path, "head.norm", head["norm"], "none, as the stored states are after the norm")


def _no_manifest(path: str) -> FileNotFoundError:
    """Return the error for a missing manifest. A folder without any cache file is reported as a wrong argument."""
    folder = os.path.dirname(path) or "."
    parts = existing_shard_indices(folder) or any(os.path.lexists(os.path.join(folder, name)) for name in _OF_A_CACHE)
    code, more = "E702", ""
    if not parts and os.path.lexists(os.path.join(folder, META_NAME)):
        code, more = "E208", " It is a cache of another kind"
    elif not parts:
        code, more = "E105", f" There is no {'EAGLE-3 cache in this' if os.path.isdir(folder) else 'such'} folder"
    if watched := unfinished_text(folder):
        code, more = "E702", watched
    found = f"EAGLE-3 cache manifest not found at {shown(path)}. Was the cache fully written?{more}"
    return NotFound(found, code=code)


def number_in(manifest: Mapping[str, Any], key: str, where: PathLike, least: int = 0) -> int:
    """Return an integer of a manifest. Raises: CacheError E701 if it is missing, not an integer, or below `least`."""
    value = manifest.get(key)
    if type(value) is not int or not least <= value < 2**63:
        raise _refuse(manifest_path(where), key, value, f"an integer of {least} or more")
    return value


def recipe_of(cache_dir: PathLike, manifest: Mapping[str, Any]) -> str:
    """Return the recipe lines that open a cache in NeMo Automodel's trainer, as YAML on one line.

    manifest: of a version 2 cache, or of Automodel's own for DSpark. The trainer compares these options with it; an old
    or converted cache may lack them.
    """
    sizes = ("target_layer_ids", "seq_length") if "target_layer_ids" in manifest else ()
    named = [f"{key}: {json.dumps(manifest[key])}" for key in sizes]
    options = {name: bool(manifest.get(name, False)) for name in ("mask_reasoning_content", "mask_generation_prompt")}
    named += [f"{name}: {str(value).lower()}" for name, value in options.items()]
    return f"recipe_args: {{{', '.join([f'cached_target_path: {json.dumps(os.fspath(cache_dir))}', *named])}}}"


def layout_of(manifest: dict[str, Any], where: PathLike) -> Layout:
    """Return the layout of a dense cache's shards. Raises: CacheError E701 naming a key that is missing or wrong."""
    dtype = manifest.get("dtype")
    if dtype not in DTYPES:
        raise CacheError(
            manifest_path(where), f"dtype is {shortened(dtype)}", f"one of {', '.join(DTYPES)}", code="E701"
        )
    slots, aux, vocab = (
        number_in(manifest, key, where, 1) for key in ("seq_length", "aux_hidden_dim", "draft_vocab_size")
    )
    topk = manifest.get("target_probs_topk") if manifest.get("format_version", version_of(manifest)) == 2 else None
    return Layout(slots, aux, vocab, int(topk or 0) if is_compressed(topk, vocab) else 0, dtype)
