"""The EAGLE-3 target cache: its reader, its writers, and every name of the published contract.

A cache holds a frozen target model's supervision: for each token three hidden states and the distribution over the
draft's vocabulary. It takes 6 * H + 2 * D bytes a token in bf16 (H: hidden size of the target, D: draft vocabulary).
For an 8B target and a draft vocabulary of 32,000 that is 88,601 bytes, 181 MB for a sample of 2,048 tokens, terabytes
for a large dataset. If the target's forward pass is cheaper than reading that, train online. A cache pays if a fixed,
bounded dataset is trained on many times (ablations, sweeps, many epochs), or if the target does not fit in memory
beside the draft. Version 2 with `target_probs_topk` stores k values and indices in place of D probabilities, and loses
the tail: of an 8B target, 64 of 32,000 keep about 0.92 of the mass.

    manifest.json                  what was run, and `selected_token_ids`: draft id -> target id
    target_embeddings.safetensors  "weight" [V, H] float32, from which the draft's embeddings start
    shard-000000.safetensors       sample i is row i % shard_size of shard i // shard_size
    sidecar/                       added by this project: receipts with checksums, the plan, the raw samples

    input_ids, attention_mask, loss_mask      [n, S] int64
    aux_hidden_states                         [n, S, 3H] bf16, fp16 or fp32
    position_mask                             [n, S, 1] bool
    target_probs                              [n, S, D] of that float dtype; or, in version 2 with top-k,
    target_probs_values, target_probs_indices [n, S, k] of that float dtype, and int32 draft ids by falling probability

All names and formats of versions 1 and 2 are those of the published contract: caches of its other implementations are
read here, and ours there. docs/formats.md describes every file. The native form of this project holds the target's
last hidden states in place of its distributions, ragged, in a tenth of the bytes; it is read here, too, with the same
six keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from niels_gpt.cache.checksums import Check
from niels_gpt.eagle3.format.layout import (
    DTYPES,
    EMBEDDINGS_NAME,
    FULL_FIELDS,
    INT_FIELDS,
    LOCK_NAME,
    MANIFEST_NAME,
    SHARD_NAME,
    SIDECAR,
    TOPK_FIELDS,
    PathLike,
    layout_like,
    refuse_links,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import (
    FORMAT_VERSION,
    VERSIONS,
    atomic_write,
    existing_shard_indices,
    is_compressed,
    is_native,
    load_safetensors,
    manifest_path,
    number_in,
    read_manifest,
    write_manifest,
)
from niels_gpt.eagle3.format.meta import eagle3_meta, file_sha256, version_of, write_meta
from niels_gpt.eagle3.format.shard_writer import ShardWriter
from niels_gpt.eagle3.format.shards import COMMON_FIELDS, DenseShards, shards_of
from niels_gpt.eagle3.format.weights import read_target_embeddings, write_target_embeddings
from niels_gpt.eagle3.native import CacheReader, NativeView, loader_of
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import remove
from niels_gpt.storage.locks import file_lock
from niels_gpt.storage.meta_json import shortened
from niels_gpt.storage.versions import VERSIONS_DIR

__all__ = [
    "CACHE_KEYS",
    "DTYPE_MAP",
    "CachedEagle3Dataset",
    "build_cached_eagle3_dataloader",
    "compress_target_probs",
    "convert",
    "existing_shard_indices",
    "is_compressed",
    "manifest_path",
    "read_manifest",
    "read_target_embeddings",
    "reconstruct_target_probs",
    "shard_path",
    "verify",
    "write_manifest",
    "write_shard",
    "write_target_embeddings",
]

_MANIFEST_NAME = MANIFEST_NAME
_EMBEDDINGS_NAME = EMBEDDINGS_NAME
_SHARD_RE = SHARD_NAME
_FORMAT_VERSION = FORMAT_VERSION
_FLOAT_KEYS = ("aux_hidden_states", "target_probs")
_INT_KEYS = INT_FIELDS
_BOOL_KEYS = ("position_mask",)
CACHE_KEYS = _FLOAT_KEYS + _INT_KEYS + _BOOL_KEYS
"""The keys of an item, and of a dense shard: the keyword arguments of the trainer's forward."""
DTYPE_MAP = DTYPES


def _load_safetensors() -> tuple[Any, Any]:
    """Return `(save_file, safe_open)`. Raises: ImportError that says what to install."""
    return load_safetensors()


def _atomic_write(path: str, write_fn: Callable[[str], None]) -> str:
    """Let `write_fn` write a temporary sibling of `path`, then make it `path`, durably; see manifest.atomic_write."""
    return atomic_write(path, write_fn)


def compress_target_probs(target_probs: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `topk` largest of each distribution, renormalized to 1, and their draft ids.

    target_probs: [..., D], best in float32: it is renormalized before it is cast.
    Returns: values [..., k] of the same dtype by falling probability, and int32 indices [..., k]; k = min(topk, D). The
        tail's mass is lost, as the published contract defines it.
    """
    values, indices = torch.topk(target_probs, min(topk, target_probs.shape[-1]), dim=-1)
    total = values.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return values / total, indices.to(torch.int32)


def reconstruct_target_probs(values: torch.Tensor, indices: torch.Tensor, draft_vocab_size: int) -> torch.Tensor:
    """Return [..., D] with `values` [..., k] at `indices` [..., k] and zeros elsewhere, in the dtype of the values."""
    full = torch.zeros(*values.shape[:-1], draft_vocab_size, dtype=values.dtype, device=values.device)
    return full.scatter_(-1, indices.long(), values)


def write_shard(cache_dir: PathLike, shard_index: int, samples: dict[str, torch.Tensor]) -> str:
    """Write one shard durably and atomically, and its receipt; return the shard's path. One writer at a time.

    samples: the fields of CACHE_KEYS, each [n, S, ...] as in the module's docstring; in place of `target_probs` there
        may be `target_probs_values` and `target_probs_indices`. Other keys are not written.
    Raises: ValueError for none or both of the representations, a missing field, or a wrong dtype or shape.
    """
    dense, pair = FULL_FIELDS[0] in samples, [name for name in TOPK_FIELDS if name in samples]
    if dense == (len(pair) == len(TOPK_FIELDS)):
        raise ValueError(
            "write_shard needs exactly one target_probs representation: the full 'target_probs', or the top-k "
            f"'target_probs_values' and 'target_probs_indices'; found {[*FULL_FIELDS[:dense], *pair] or 'neither'}"
        )
    keys = COMMON_FIELDS + (FULL_FIELDS if dense else TOPK_FIELDS)
    missing = [key for key in keys if key not in samples]
    if missing:
        raise ValueError(f"write_shard is missing required cache fields: {missing}")
    tensors = {key: samples[key].detach().cpu() for key in keys}
    layout = layout_like(tensors)  # ValueError, as for no sample at all
    rows = len(tensors["input_ids"])
    writer = ShardWriter(cache_dir, shard_index, layout.fields, rows)
    try:
        writer.write(range(rows), [layout.seq_length] * rows, tensors)
        writer.commit()
    finally:
        writer.discard()
    return shard_path(cache_dir, shard_index)


def verify(cache_dir: PathLike, *, follow_links: bool = False) -> list[str]:
    """Compare every shard with its receipt; return a sentence for each damage: shard, sample, and what is wrong.

    `python -m niels_gpt.eagle3 verify` checks more: niels_gpt.eagle3.inspect.verify. follow_links: as the dataset.
    Raises: FileNotFoundError, CacheError as `CachedEagle3Dataset`; CacheError for a shard without a receipt.
    """
    dataset = CachedEagle3Dataset(cache_dir, follow_links=follow_links)
    shards = shards_of(cache_dir, dataset.manifest, follow_links=follow_links)
    return [sentence for index in range(shards.num_shards) for _, sentence in shards.damage(index)]


def convert(cache_dir: PathLike, format_version: int, *, follow_links: bool = False) -> bool:
    """Convert a dense cache to version 1 or 2 by changing its manifest; return whether anything changed.

    Version 2 has the key `target_probs_topk`, 0; all other keys stay. A meta.json of this project is updated.
    follow_links: as `open_file`. A file that is written replaces a link; nothing is written through one.
    Raises: ValueError for another version; CacheError for a top-k cache, whose shards version 1 cannot hold, for a
        committed version below .versions/, which never changes, and while another process writes the cache.
    """
    if type(format_version) is not int or format_version not in VERSIONS:
        raise ValueError(f"format_version {format_version}, expected 1 or 2")
    folder = Path(cache_dir)
    if VERSIONS_DIR in folder.resolve().parts:
        raise CacheError(folder, "a committed version is never changed", remedy="Convert a copy: cp -rL", code="E710")
    if not follow_links or (folder / SIDECAR).is_symlink():
        refuse_links(folder)
    if not (folder / SIDECAR).is_dir():
        return _convert(folder, format_version, follow_links)
    lock = folder / SIDECAR / LOCK_NAME
    if lock.is_symlink():  # of a snapshot: the link is removed, its file stays
        remove(lock)
    with file_lock(lock, folder, "is being written", wait=False):
        return _convert(folder, format_version, follow_links)


def _convert(folder: Path, format_version: int, follow_links: bool) -> bool:
    manifest, meta = read_manifest(folder, follow_links=follow_links), eagle3_meta(folder, follow_links)
    is_other: bool = manifest["format_version"] != format_version
    if is_other:
        topk = manifest.get("target_probs_topk")
        if topk and is_compressed(topk, number_in(manifest, "draft_vocab_size", folder)):
            found = f"target_probs_topk is {topk}, and version 1 holds all probabilities"
            remedy = "Produce the cache again with --target-probs-topk 0"
            raise CacheError(manifest_path(folder), found, remedy=remedy, code="E710")
        manifest.pop("target_probs_topk", None)
        manifest |= {"format_version": format_version} | ({"target_probs_topk": 0} if format_version == 2 else {})
        write_manifest(folder, manifest)
    if meta is None:
        return is_other
    recorded = {record["name"]: record for record in meta["files"]}
    named = recorded.pop(MANIFEST_NAME, {"sha256": ""})["sha256"]
    is_stale = named != file_sha256(folder / MANIFEST_NAME, follow_links=follow_links)
    if is_stale:  # also where an earlier call was killed before this
        write_meta(folder, meta, known=recorded.values(), follow_links=follow_links)
    return is_other or is_stale


class CachedEagle3Dataset(CacheReader[dict[str, torch.Tensor]]):
    """Reads an EAGLE-3 cache of any form; an item is one sample: the keyword arguments of the trainer's forward.

    The header of every shard is checked when the cache is opened. Shards are mapped when they are first read, at most
    `max_open_shards` of them at a time. An item's tensors are views of the map, [S] and [S, width]; nothing is copied.
    Clone them before you change, keep, save or send them: a change stays in this process's map, and a view keeps its
    whole shard mapped. A batch is a copy. May be pickled, for workers of any start method; a forked or spawned worker
    makes its own maps. Threads may share it. A public name is resolved to a version once, here: a rebuild does not
    change an open dataset, and gc keeps its version.

    Items of a native cache are copies. Their ids and masks are those of version 1 of the same input, bit for bit;
    target_probs are made by `TargetHead` and are zeros where loss_mask is 0, as are the hidden states after the last
    slot with loss. On a CPU that takes milliseconds a token: for tests and tools that know only these keys. To train,
    read `niels_gpt.eagle3.native` and make target_probs on the GPU.
    """

    def __init__(
        self,
        cache_dir: PathLike,
        *,
        max_open_shards: int = 1024,
        follow_links: bool = False,
        device: str | torch.device | None = None,
        target_probs: bool = True,
        expect: Mapping[str, Any] | None = None,
        check: Check = "ends",
    ) -> None:
        """max_open_shards: the kernel allows a process about 65,000 maps.

        follow_links: read files that are links, as in a snapshot of the Hugging Face hub; otherwise they are refused.
        device: of a native cache: on which target_probs are made, and left; None: the CPU. target_probs: False leaves
            that key out of the items of a native cache.
        expect, check: as for `niels_gpt.eagle3.native.NativeEagle3Dataset`.
        Raises: FileNotFoundError; CacheError (a ValueError) naming a file that does not fit the manifest; ImportError
            without safetensors.
        """
        cache_dir = version_of(cache_dir)  # once: a commit may come in between
        native = is_native(read_manifest(cache_dir, follow_links=follow_links))
        if not native and (device is not None or not target_probs):
            raise ValueError(f"{cache_dir} is not native: device and target_probs are options of native caches")
        how: dict[str, Any] = {"follow_links": follow_links, "check": check}
        self.view: NativeView | None = None
        """Of a native cache."""
        if native:
            self.view = NativeView(cache_dir, max_open_shards, device=device, target_probs=target_probs, **how)
            self._open(self.view.dataset._shards, expect)
        else:
            self._open(DenseShards.of_cache(cache_dir, max_open_shards, **how), expect)
        self.compressed = self._shards.compressed
        self.shard_size = self._shards.shard_size
        """Samples of a shard; None of a native cache, whose shards end by their bytes."""

    def _described(self) -> dict[str, str]:
        # manifests of other tools may lack some of it
        sizes = {"slots": "seq_length", "aux values": "aux_hidden_dim", "draft ids": "draft_vocab_size"}
        form = [f"{self.manifest[key]:,} {name}" for name, key in sizes.items() if self.manifest.get(key) is not None]
        form += [f"top {self.manifest['target_probs_topk']:,}"] * self.compressed
        form += [dtype for dtype in DTYPES if dtype == self.manifest.get("dtype")]
        target = self.manifest.get("target_model")
        rows = {"a sample": ", ".join(form), "target": shortened(target) * bool(target)}
        return super()._described() | {name: text for name, text in rows.items() if text}

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sample by CACHE_KEYS; a top-k distribution at its full width. Raises: IndexError; CacheError."""
        position = index + self.num_samples if index < 0 else index
        if not 0 <= position < self.num_samples:
            raise IndexError(index)
        if self.view is not None:
            return self.view.item(position)
        assert isinstance(self._shards, DenseShards) and self.shard_size is not None
        shard, row = divmod(position, self.shard_size)
        sample = self._shards.row(shard, row)
        if self.compressed:
            values, indices = (sample.pop(key) for key in TOPK_FIELDS)
            size = self.manifest["draft_vocab_size"]
            try:
                sample["target_probs"] = reconstruct_target_probs(values, indices, size)
            except RuntimeError as error:
                found = f"sample {row} of the shard: target_probs_indices: {error}"
                raise CacheError(shard_path(self.cache_dir, shard), found, f"0 <= id < {size}", code="E701") from error
        return sample

    def _handle(self, shard_index: int) -> Any:
        """Return safetensors' handle of a shard of version 1 or 2, opened in this process."""
        assert isinstance(self._shards, DenseShards)
        return self._shards.opened(shard_index)[0]


def _collate_cached(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack samples to a batch, CACHE_KEYS, each [B, S, ...]: the only copy after the page cache.

    In a worker the copy is made in shared memory.
    """
    batch: dict[str, torch.Tensor] = default_collate(
        [{key: feature[key] for key in CACHE_KEYS} for feature in features]
    )
    return batch


def build_cached_eagle3_dataloader(
    cache_dir: PathLike,
    batch_size: int,
    shuffle: bool,
    num_workers: int = 0,
    distributed: bool = False,
    *,
    follow_links: bool = False,
    device: str | torch.device | None = None,
    target_probs: bool = True,
    expect: Mapping[str, Any] | None = None,
    check: Check = "ends",
) -> DataLoader[dict[str, torch.Tensor]]:
    """Return a DataLoader over a cache, whose batches have the keys CACHE_KEYS.

    shuffle: over all samples of all shards, with torch's global generator; with distributed, with the sampler's seed
        and `sampler.set_epoch`.
    distributed: each rank of the default process group reads its share; samples repeat where they do not divide evenly
        (DistributedSampler). The last batch may be short.
    follow_links, device, target_probs, expect, check: as `CachedEagle3Dataset`. The target_probs of a native cache are
        made in this process, not in workers, so that `device` may be a GPU.
    """
    how: dict[str, Any] = {"follow_links": follow_links, "device": device, "target_probs": target_probs}
    dataset = CachedEagle3Dataset(cache_dir, expect=expect, check=check, **how)
    return loader_of(dataset, _collate_cached, shuffle, distributed, batch_size=batch_size, num_workers=num_workers)
