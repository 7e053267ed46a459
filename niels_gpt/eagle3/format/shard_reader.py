"""All shards of a cache: checked against the manifest when the cache is opened, mapped when first read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from niels_gpt.cache.checksums import Check
from niels_gpt.eagle3.format.layout import (
    DENSE_FIELDS,
    DTYPES,
    INT_FIELDS,
    TOPK_FIELDS,
    Fields,
    PathLike,
    read_header,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import (
    check_shard_indices,
    is_compressed,
    load_safetensors,
    manifest_path,
    number_in,
    read_manifest,
)
from niels_gpt.eagle3.format.receipts import Receipts, version_of
from niels_gpt.eagle3.format.shard_writer import row_damage
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import shortened

COMMON_FIELDS = ("aux_hidden_states", *INT_FIELDS, "position_mask")
MappedShard = tuple[Any, dict[str, torch.Tensor]]
"""A mapped shard: safetensors' handle, and its tensors [n, S, ...] as views of the map."""


class ShardSet:
    """The shards of one cache. May be pickled; each process makes its own maps, and threads may share it."""

    def __init__(
        self, cache_dir: PathLike, max_open: int, *, follow_links: bool = False, check: Check = "ends"
    ) -> None:
        """max_open: limit of shards that are mapped at a time. follow_links: as `open_file`. check: as for `Receipts`.

        Raises: as CachedEagle3Dataset; ValueError for max_open < 1.
        """
        load_safetensors()  # ImportError here, and not at the first sample
        if max_open < 1:
            raise ValueError(f"max_open_shards={max_open}: expected 1 or more")
        self.cache_dir = cache_dir = version_of(cache_dir)
        self._follow_links = follow_links
        self._receipts = Receipts(cache_dir, check, follow_links=follow_links)
        self.manifest = read_manifest(cache_dir, follow_links=follow_links)
        self.shard_size = number_in(self.manifest, "shard_size", cache_dir, 1)
        self.num_samples = number_in(self.manifest, "num_samples", cache_dir)
        self.num_shards = -(-self.num_samples // self.shard_size)
        topk = self.manifest.get("target_probs_topk") if self.manifest["format_version"] == 2 else None
        self.compressed = bool(topk) and is_compressed(topk, number_in(self.manifest, "draft_vocab_size", cache_dir))
        if self.compressed:  # the manifest decides an item's width
            self._check_vocabulary()
        self._keys = COMMON_FIELDS + (TOPK_FIELDS if self.compressed else DENSE_FIELDS)
        self._fields: Fields = {}
        self._check()
        self._max_open = max_open
        self._open: dict[int, MappedShard] = {}
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def opened(self, shard_index: int) -> MappedShard:
        """Return a shard, mapped in this process. Raises: CacheError if it does not fit the manifest any more."""
        if self._pid != os.getpid():  # a forked worker
            self._open, self._pid = {}, os.getpid()
        mapped = self._open.get(shard_index)
        if mapped is None:
            mapped = self._open[shard_index] = self._map(shard_index)
            while len(self._open) > self._max_open:
                with suppress(KeyError, RuntimeError, StopIteration):  # another thread was faster
                    del self._open[next(iter(self._open))]  # views in use keep their map
        return mapped

    def row(self, shard_index: int, row: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a sample, views of its shard. Raises: as `opened`; CacheError for a damaged sample."""
        handle, tables = self.opened(shard_index)
        if self._receipts.every_sample:
            fields = {name: tables[name] if name in tables else handle.get_tensor(name) for name in self._fields}
            parts = {name: table[row].reshape(-1).view(torch.uint8).numpy() for name, table in fields.items()}
            self._receipts.check_sample(shard_index, row, partial(row_damage, self._fields, parts))
        return {name: table[row] for name, table in tables.items()}

    def _map(self, shard_index: int) -> MappedShard:
        from safetensors import SafetensorError

        path = shard_path(self.cache_dir, shard_index)
        header = self._check_shard(shard_index)  # again: it may have been replaced since
        self._receipts.check_header(shard_index, header)
        try:
            handle = load_safetensors()[1](path, framework="pt")
            return handle, {key: handle.get_tensor(key) for key in self._keys}
        except SafetensorError as error:
            raise CacheError(path, f"safetensors cannot read it: {error}", code="E701") from error

    def _check_vocabulary(self) -> None:
        size, selected = self.manifest["draft_vocab_size"], self.manifest.get("selected_token_ids")
        if selected is not None and len(selected) != size:
            found, expected = f"draft_vocab_size is {size}", f"{len(selected)}, the length of selected_token_ids"
            raise CacheError(manifest_path(self.cache_dir), found, expected, code="E701")

    def _check(self) -> None:
        check_shard_indices(self.cache_dir, self.num_samples, self.num_shards)
        for index in range(self.num_shards):
            self._check_shard(index)

    def _check_shard(self, shard_index: int) -> bytes:
        """Compare a shard with the manifest; returns its header."""
        path = shard_path(self.cache_dir, shard_index)
        fields, rows, header = read_header(path, follow_links=self._follow_links)
        expected = min(self.shard_size, self.num_samples - shard_index * self.shard_size)
        if rows != expected:
            raise CacheError(path, f"{rows} samples", f"{expected} of the manifest's {self.num_samples}", code="E701")
        if not self._fields:
            self._check_fields(path, fields)
            self._fields = fields
        elif fields != self._fields:
            raise CacheError(path, _described(fields), f"{_described(self._fields)} as in shard 0", code="E701")
        return header

    def _check_fields(self, path: str, fields: Fields) -> None:
        """Compare the first shard with the manifest; any value fits a key that the manifest lacks."""
        manifest = self.manifest
        slots, vocab = manifest.get("seq_length"), manifest.get("draft_vocab_size")
        number = DTYPES.get(manifest["dtype"]) if "dtype" in manifest else fields.get("aux_hidden_states", (None,))[0]
        width = manifest.get("target_probs_topk") if self.compressed else vocab
        probs, where = TOPK_FIELDS if self.compressed else DENSE_FIELDS, manifest_path(self.cache_dir)
        expected: dict[str, tuple[torch.dtype | None, Sequence[Any]]] = {
            **{key: (torch.int64, (slots,)) for key in INT_FIELDS},
            "aux_hidden_states": (number, (slots, manifest.get("aux_hidden_dim"))),
            "position_mask": (torch.bool, (slots, 1)),
            **{key: (torch.int32 if key == TOPK_FIELDS[1] else number, (slots, width)) for key in probs},
        }
        for key, (dtype, shape) in expected.items():
            if key not in fields:
                raise CacheError(
                    path, f"has no {key}, but {', '.join(map(shortened, fields))}", f"it by {where}", code="E701"
                )
            its_dtype, its_shape = fields[key]
            same = len(shape) == len(its_shape) and all(a in (None, b) for a, b in zip(shape, its_shape, strict=True))
            if its_dtype != dtype or its_dtype is None or not same:
                wanted = ["any" if part is None else part for part in shape]
                raise CacheError(
                    path,
                    f"{key} is {its_dtype} of shape {list(its_shape)} a sample",
                    f"{dtype} of {wanted} by {where} (dtype {shortened(manifest.get('dtype'))})",
                    code="E701",
                )


def _described(fields: Fields) -> str:
    return ", ".join(f"{shortened(name)} {str(dtype)[6:]} {list(shape)}" for name, (dtype, shape) in fields.items())
