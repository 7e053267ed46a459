"""The EAGLE-3 target cache: its reader and its writers, under the names of NeMo Automodel's offline cache.

A cache stores the outputs of a frozen target model: three hidden states of each token, and the distribution over the
draft's vocabulary. In bf16 it takes 6 * H + 2 * D bytes a slot (H: hidden size of the target, D: size of the draft
vocabulary). An 8B target with a draft vocabulary of 32,000 gives 88,601 bytes a slot: 181 MB for a sample of 2,048
tokens, terabytes for a large dataset. Train online if the target's forward pass is cheaper than reading that. A cache
pays when a fixed dataset is trained on many times (ablations, sweeps, many epochs), or when target and draft do not fit
into memory together. Version 2 with `target_probs_topk` stores k values and indices instead of D probabilities and
loses the tail: for an 8B target, 64 of 32,000 keep about 0.92 of the mass.

    manifest.json                  how the cache was made, and `selected_token_ids`: draft id -> target id
    target_embeddings.safetensors  "weight" [V, H] float32; a draft initializes its embeddings from it
    shard-000000.safetensors       sample i is row i % shard_size of shard i // shard_size
    sidecar/                       added by this project: receipts with checksums, the plan, the raw samples

    input_ids, attention_mask, loss_mask      [n, S] int64
    aux_hidden_states                         [n, S, 3H] bf16, fp16 or fp32
    position_mask                             [n, S, 1] bool
    target_probs                              [n, S, D], same dtype as the states; or, in version 2 with top-k,
    target_probs_values, target_probs_indices [n, S, k], same dtype as the states, and int32 draft ids; largest first

Names and formats of versions 1 and 2 are NeMo Automodel's: either project reads the other's caches. docs/formats.md
describes every file. The native form of this project takes a third of the bytes: it stores the target's last hidden
states instead of distributions, without padding. This module reads it with the same six keys.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch.utils.data import DataLoader, default_collate

from niels_gpt.cache.checksums import Check
from niels_gpt.cache.reader import AtURL, local_path
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
"""Keys of an item and of a dense shard: the keyword arguments of the trainer's forward."""
DTYPE_MAP = DTYPES


def _load_safetensors() -> tuple[Any, Any]:
    """Return `(save_file, safe_open)`. Raises: ImportError if safetensors is not installed."""
    return load_safetensors()


def _atomic_write(path: str, write_fn: Callable[[str], None]) -> str:
    """Let `write_fn` write a temporary sibling of `path`, then rename it to `path`; see `manifest.atomic_write`."""
    return atomic_write(path, write_fn)


def compress_target_probs(target_probs: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `topk` largest probabilities of each distribution, renormalized to 1, and their draft ids.

    target_probs: [..., D], best in float32: it is renormalized before it is cast.
    Returns: values [..., k] of the same dtype, largest first, and int32 indices [..., k]; k = min(topk, D). The tail's
        mass is lost, as NeMo Automodel's format defines it.
    """
    values, indices = torch.topk(target_probs, min(topk, target_probs.shape[-1]), dim=-1)
    total = values.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return values / total, indices.to(torch.int32)


def reconstruct_target_probs(values: torch.Tensor, indices: torch.Tensor, draft_vocab_size: int) -> torch.Tensor:
    """Return [..., D] with `values` [..., k] at `indices` [..., k] and zeros elsewhere, in the dtype of the values."""
    full = torch.zeros(*values.shape[:-1], draft_vocab_size, dtype=values.dtype, device=values.device)
    return full.scatter_(-1, indices.long(), values)


def write_shard(cache_dir: PathLike, shard_index: int, samples: dict[str, torch.Tensor]) -> str:
    """Write one shard and then its receipt, each durably and atomically; return the shard's path. One writer at a time.

    samples: the fields of CACHE_KEYS, each [n, S, ...]; `target_probs_values` and `target_probs_indices` may replace
        `target_probs`. Other keys are ignored.
    Raises: ValueError if the distributions are missing or given twice, a field is missing, or a dtype or shape is
        wrong.
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
    """Compare every shard with its receipt; return one sentence for each damage, naming shard, sample and fault.

    `python -m niels_gpt.eagle3 verify` checks more: niels_gpt.eagle3.inspect.verify.

    follow_links: read files that are symbolic links.
    Raises: FileNotFoundError; CacheError if the cache cannot be opened, or a shard has no receipt.
    """
    dataset = CachedEagle3Dataset(cache_dir, follow_links=follow_links)
    shards = shards_of(cache_dir, dataset.manifest, follow_links=follow_links)
    return [sentence for index in range(shards.num_shards) for _, sentence in shards.damage(index)]


def convert(cache_dir: PathLike, format_version: int, *, follow_links: bool = False) -> bool:
    """Change a cache of version 1 to version 2 or back by rewriting its manifest. Returns whether anything changed.

    Version 2 gets the key `target_probs_topk`, 0; all other keys stay. A meta.json of this project is updated.

    follow_links: accept files that are symbolic links. A written file replaces its link; nothing is written through
        one.
    Raises: ValueError for another version; CacheError E710 for a native cache, for a top-k cache, which version 1
        cannot hold, and for a committed version below .versions/, which never changes; CacheError E503 while another
        process writes the cache.
    """
    if type(format_version) is not int or format_version not in VERSIONS:
        raise ValueError(f"format_version {format_version}, expected 1 or 2")
    folder = Path(cache_dir)
    if VERSIONS_DIR in folder.resolve().parts:
        copy = f"Convert a copy: {shlex.join(['cp', '-rL', str(folder), 'COPY'])}"
        raise CacheError(folder, "a committed version never changes", remedy=copy, code="E710")
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
    if is_native(manifest):
        command = f"niels-gpt eagle3 convert {shlex.quote(str(folder))} --format {format_version} --output-dir OUT"
        remedy = f"Write version {format_version} into another folder: {command}"
        raise CacheError(manifest_path(folder), "a native cache", "version 1 or 2", remedy, code="E710")
    is_other: bool = manifest["format_version"] != format_version
    if is_other:
        topk = manifest.get("target_probs_topk")
        if topk and is_compressed(topk, number_in(manifest, "draft_vocab_size", folder)):
            found = f"target_probs_topk is {topk}, and version 1 stores all probabilities"
            remedy = "Run the same precompute command with --target-probs-topk 0 and another --output-dir"
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
    """Reads an EAGLE-3 cache of any form. An item is one sample: the keyword arguments of the trainer's forward.

        dataset = CachedEagle3Dataset("targets")
        dataset[0]["target_probs"]  # [S, D]

    Opening checks the header of every shard. A shard is mapped when it is first read; at most `max_open_shards` are
    mapped at a time. The tensors of an item, [S] and [S, width], are views of the map, without a copy. Clone them
    before you change, keep, save or send them: a change stays in this process's map, and a view keeps its whole shard
    mapped. A batch is a copy. The dataset may be pickled, for workers of any start method; each worker makes its own
    maps. Threads may share it. The path is resolved to a version once: a rebuild does not change an open dataset, and
    gc keeps its version.

    Items of a native cache are copies. Their ids and masks equal version 1 of the same input, bit for bit. `TargetHead`
    computes target_probs where loss_mask is 1; elsewhere they are zeros, and so are hidden states that the cache does
    not have, after the last slot with loss. On a CPU this takes milliseconds a token: use it for tests and for tools
    that know only these keys. For training read `niels_gpt.eagle3.native` and compute target_probs on the GPU.
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
        **at_url: Unpack[AtURL],
    ) -> None:
        """max_open_shards: the kernel allows a process about 65,000 maps.

        follow_links: read files that are symbolic links, as in a snapshot of the Hugging Face hub; by default they are
            refused.
        device: computes and keeps target_probs of a native cache; None: the CPU.
        target_probs: False leaves that key out of a native cache's items.
        expect: an earlier `fingerprint`; opening fails unless the cache still has it.
        check: "ends": compare each shard's size and header with its receipt when it is first mapped; "blocks": also
            each sample with its checksum when it is first read. At a URL each is compared whenever it is read.
        at_url: local, max_bytes and max_ahead of a cache at a URL, see `niels_gpt.cache.reader.AtURL`.
        Raises: FileNotFoundError; CacheError (a ValueError) naming a file that does not fit the manifest, or another
            fingerprint; ValueError for `device` or `target_probs` with a cache that is not native; ImportError without
            safetensors.
        """
        cache_dir = version_of(local_path(cache_dir, at_url))  # once: a commit may come in between
        native = is_native(read_manifest(cache_dir, follow_links=follow_links))
        if not native and (device is not None or not target_probs):
            raise ValueError(f"{cache_dir} is not native: device and target_probs are options of native caches")
        how: dict[str, Any] = {"follow_links": follow_links, "check": check}
        self.view: NativeView | None = None
        """Makes the items of a native cache; None for a dense one."""
        if native:
            self.view = NativeView(cache_dir, max_open_shards, device=device, target_probs=target_probs, **how)
            self._open(self.view.dataset._shards, expect)
        else:
            self._open(DenseShards.of_cache(cache_dir, max_open_shards, **how), expect)
        self.compressed = self._shards.compressed
        self.shard_size = self._shards.shard_size
        """Samples in a shard; None for a native cache, whose shards are cut by bytes."""

    def _described(self) -> dict[str, str]:
        # manifests of other tools may lack some keys
        sizes = {"slots": "seq_length", "aux values": "aux_hidden_dim", "draft ids": "draft_vocab_size"}
        form = [f"{self.manifest[key]:,} {name}" for name, key in sizes.items() if self.manifest.get(key) is not None]
        form += [f"top {self.manifest['target_probs_topk']:,}"] if self.compressed else []
        form += [dtype for dtype in DTYPES if dtype == self.manifest.get("dtype")]
        target = self.manifest.get("target_model")
        rows = {"a sample": ", ".join(form), "target": shortened(target) * bool(target)}
        return super()._described() | {name: text for name, text in rows.items() if text}

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sample with the keys CACHE_KEYS; a top-k distribution is returned at full width.

        Raises: IndexError; CacheError E701 for a damaged sample.
        """
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
        """Return the safetensors handle of a dense shard, opened in this process."""
        assert isinstance(self._shards, DenseShards)
        return self._shards.opened(shard_index)[0]


def _collate_cached(features: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack samples to a batch under CACHE_KEYS, [B, S, ...]: the only copy after the page cache.

    target_probs may be left out. A worker makes the copy in shared memory.
    """
    keys = [key for key in CACHE_KEYS if key in features[0]]
    batch: dict[str, torch.Tensor] = default_collate([{key: feature[key] for key in keys} for feature in features])
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
    local: PathLike | None = None,
    max_bytes: int | str | None = None,
    max_ahead: int | str | None = None,
) -> DataLoader[dict[str, torch.Tensor]]:
    """Return a DataLoader whose batches have the keys CACHE_KEYS, each [B, S, ...].

    shuffle: over all samples of all shards, by torch's global generator; with `distributed` by the sampler's seed and
        `sampler.set_epoch`.
    distributed: each rank of the default process group reads its share; DistributedSampler repeats samples where they
        do not divide evenly. The last batch may be short.
    follow_links, device, target_probs, expect, check: see `CachedEagle3Dataset`. This process computes target_probs of
        a native cache, not its workers, so `device` may be a GPU.
    local, max_bytes, max_ahead: of a cache at a URL, see `niels_gpt.cache.reader.AtURL`.
    """
    how: dict[str, Any] = {"follow_links": follow_links, "device": device, "target_probs": target_probs}
    how |= {"local": local, "max_bytes": max_bytes, "max_ahead": max_ahead}
    dataset = CachedEagle3Dataset(cache_dir, expect=expect, check=check, **how)
    return loader_of(dataset, _collate_cached, shuffle, distributed, batch_size=batch_size, num_workers=num_workers)
