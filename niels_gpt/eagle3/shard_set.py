"""All shards of a cache: checked against the manifest when the cache is opened, mapped when they are first read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from niels_gpt.eagle3.layout import (
    DENSE_FIELDS,
    DTYPES,
    INT_FIELDS,
    TOPK_FIELDS,
    Fields,
    PathLike,
    read_header,
    shard_path,
)
from niels_gpt.eagle3.manifest import (
    existing_shard_indices,
    is_compressed,
    load_safetensors,
    manifest_path,
    number_in,
    read_manifest,
)
from niels_gpt.fileio import CacheError
from niels_gpt.records import shortened

COMMON_FIELDS = ("aux_hidden_states", *INT_FIELDS, "position_mask")
Opened = tuple[Any, dict[str, torch.Tensor]]
"""A shard: safetensors' handle, and its tensors [n, S, ...] as views of the map."""


class ShardSet:
    """The shards of one cache. May be pickled; every process maps them for itself, and threads may share it."""

    def __init__(self, cache_dir: PathLike, max_open: int, *, follow_links: bool = False) -> None:
        """max_open: shards that are mapped at a time. follow_links: as `open_file`.

        Raises: as CachedEagle3Dataset; ValueError for max_open < 1.
        """
        if max_open < 1:
            raise ValueError(f"max_open_shards={max_open}: expected 1 or more")
        self.cache_dir = os.fspath(cache_dir)
        self._follow_links = follow_links
        self.manifest = read_manifest(cache_dir, follow_links=follow_links)
        self.shard_size = number_in(self.manifest, "shard_size", cache_dir, 1)
        self.num_samples = number_in(self.manifest, "num_samples", cache_dir)
        self.num_shards = -(-self.num_samples // self.shard_size)
        topk = self.manifest.get("target_probs_topk") if self.manifest["format_version"] == 2 else None
        self.compressed = bool(topk) and is_compressed(topk, number_in(self.manifest, "draft_vocab_size", cache_dir))
        if self.compressed:  # an item has as many numbers a slot as the manifest says
            self._check_vocabulary()
        self._keys = COMMON_FIELDS + (TOPK_FIELDS if self.compressed else DENSE_FIELDS)
        self._fields: Fields = {}
        self._check()
        self._max_open = max_open
        self._open: dict[int, Opened] = {}
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def opened(self, shard_index: int) -> Opened:
        """Return a shard, mapped in this process. Raises: CacheError if it is no longer what it was."""
        if self._pid != os.getpid():  # a forked worker
            self._open, self._pid = {}, os.getpid()
        found = self._open.get(shard_index)
        if found is None:
            found = self._open[shard_index] = self._map(shard_index)
            while len(self._open) > self._max_open:
                with suppress(KeyError, RuntimeError, StopIteration):  # another thread was faster
                    del self._open[next(iter(self._open))]  # views that are still in use keep their map
        return found

    def _map(self, shard_index: int) -> Opened:
        from safetensors import SafetensorError

        path = shard_path(self.cache_dir, shard_index)
        self._check_shard(shard_index)  # again: it may have been replaced since
        try:
            handle = load_safetensors()[1](path, framework="pt")
            return handle, {key: handle.get_tensor(key) for key in self._keys}
        except SafetensorError as error:
            raise CacheError(f"{path}: safetensors cannot read it: {error}") from error

    def _check_vocabulary(self) -> None:
        size, selected = self.manifest["draft_vocab_size"], self.manifest.get("selected_token_ids")
        if selected is not None and len(selected) != size:
            raise CacheError(
                f"{manifest_path(self.cache_dir)}: draft_vocab_size is {size}, expected {len(selected)} as "
                "selected_token_ids has"
            )

    def _check(self) -> None:
        found = existing_shard_indices(self.cache_dir)
        if len(found) != self.num_shards or max(found, default=-1) >= self.num_shards:
            first = ", ".join(map(str, sorted(found)[:20]))
            more = f" and {len(found) - 20:,} more" if len(found) > 20 else ""
            raise CacheError(
                f"EAGLE-3 cache at {self.cache_dir} declares {self.num_samples} samples ({self.num_shards} shards) but "
                f"found {len(found)} shard files (shard indices [{first}]{more}). Produce the rest: precompute --resume"
            )
        for index in range(self.num_shards):
            self._check_shard(index)

    def _check_shard(self, shard_index: int) -> None:
        path = shard_path(self.cache_dir, shard_index)
        fields, rows, _ = read_header(path, follow_links=self._follow_links)
        expected = min(self.shard_size, self.num_samples - shard_index * self.shard_size)
        if rows != expected:
            raise CacheError(f"{path}: {rows} samples, expected {expected} of the manifest's {self.num_samples}")
        if not self._fields:
            self._check_fields(path, fields)
            self._fields = fields
        elif fields != self._fields:
            raise CacheError(f"{path}: {_shown(fields)}, expected {_shown(self._fields)} as in shard 0")

    def _check_fields(self, path: str, fields: Fields) -> None:
        """Compare the first shard with the manifest; of a key that the manifest lacks any value is good."""
        said = self.manifest
        slots, vocab = said.get("seq_length"), said.get("draft_vocab_size")
        number = DTYPES.get(said["dtype"]) if "dtype" in said else fields.get("aux_hidden_states", (None,))[0]
        width = said.get("target_probs_topk") if self.compressed else vocab
        probs = TOPK_FIELDS if self.compressed else DENSE_FIELDS
        expected: dict[str, tuple[torch.dtype | None, Sequence[Any]]] = {
            **{key: (torch.int64, (slots,)) for key in INT_FIELDS},
            "aux_hidden_states": (number, (slots, said.get("aux_hidden_dim"))),
            "position_mask": (torch.bool, (slots, 1)),
            **{key: (torch.int32 if key == TOPK_FIELDS[1] else number, (slots, width)) for key in probs},
        }
        for key, (dtype, shape) in expected.items():
            if key not in fields:
                raise CacheError(
                    f"{path}: has no {key}, but {', '.join(map(shortened, fields))}, expected it by "
                    f"{manifest_path(self.cache_dir)}"
                )
            its_dtype, its_shape = fields[key]
            same = len(shape) == len(its_shape) and all(a in (None, b) for a, b in zip(shape, its_shape, strict=True))
            if its_dtype != dtype or its_dtype is None or not same:
                wanted = ["any" if part is None else part for part in shape]
                raise CacheError(
                    f"{path}: {key} is {its_dtype} of shape {list(its_shape)} a sample, expected {dtype} of {wanted} "
                    f"by {manifest_path(self.cache_dir)} (dtype {shortened(said.get('dtype'))})"
                )


def _shown(fields: Fields) -> str:
    return ", ".join(f"{shortened(name)} {str(dtype)[6:]} {list(shape)}" for name, (dtype, shape) in fields.items())
