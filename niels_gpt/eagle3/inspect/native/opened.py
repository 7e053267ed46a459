"""The shards of a native cache, and their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.eagle3.format.layout import MANIFEST_NAME, shard_path
from niels_gpt.eagle3.format.manifest import number_in
from niels_gpt.eagle3.format.native.damage import native_shard_damage
from niels_gpt.eagle3.format.native.layout import STARTS, NativeLayout, native_layout_of
from niels_gpt.eagle3.format.native.rows import row_counts
from niels_gpt.eagle3.format.native.sample import NativeSample
from niels_gpt.eagle3.format.native.shard_reader import MappedShard, NativeShards, checked_counts, map_shard
from niels_gpt.eagle3.format.native.shard_writer import ROW_TENSORS
from niels_gpt.eagle3.format.native.weights import WEIGHTS_NAME, WEIGHTS_RECEIPT, read_weights
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.inspect.open_cache import NotChecked, OpenCache
from niels_gpt.eagle3.totals import Counts
from niels_gpt.storage.errors import CacheError


@dataclass(frozen=True)
class NativeCache(OpenCache):
    """A cache in the native form."""

    WEIGHTS = WEIGHTS_NAME
    WEIGHTS_RECEIPT = WEIGHTS_RECEIPT
    WHAT_WEIGHTS = "the target's embeddings, lm_head and final norm"

    @cached_property
    def layout(self) -> NativeLayout:
        """The tensors of a shard."""
        return native_layout_of(self.manifest, self.folder)

    @property
    def num_shards(self) -> int:
        """Shards that the manifest declares."""
        return number_in(self.manifest, "num_shards", self.folder)

    @cached_property
    def vocab_size(self) -> int:
        """Ids in the target's vocabulary, by the manifest."""
        return number_in(self.manifest, "target_vocab_size", self.folder, 1)

    @property
    def last_hidden(self) -> str:
        """What the last hidden states are: pre_norm or post_norm."""
        return str(self.manifest["conventions"]["last_hidden"])

    @cached_property
    def head(self) -> TargetHead:
        """The target's head, computing as the target ran. Raises: CacheError."""
        if missing := self.weights_missing():
            raise missing
        return TargetHead.of_cache(self.folder, follow_links=self.follow_links)

    # --- which samples a shard has ---

    @cached_property
    def _firsts(self) -> list[int]:
        """The first sample of each shard, and the end: by the samples of the plan, else by receipts and headers."""
        try:
            counts = row_counts(self.samples.starts, self.samples.loss_mask)
            cuts = self.layout.cut(counts, self.manifest["shard_bytes"])
            if len(cuts) == self.num_shards + 1:
                return cuts
        except (NotChecked, CacheError, OSError):
            pass
        stated = np.zeros(self.num_shards + 1, np.int64)
        for shard in self.shards:
            stated[shard + 1] = self._stated_rows(shard)
        return [int(first) for first in np.cumsum(stated)]

    def _stated_rows(self, shard: int) -> int:
        """Return the samples of a shard by its receipt, else by its header; 0 where neither can be read."""
        try:
            if receipt := self.receipt(shard):
                return int(receipt["samples"])
            return len(self._map(shard))
        except (CacheError, OSError):
            return 0

    def rows_of(self, shard: int) -> int:
        """Return how many samples a shard must have."""
        return self._firsts[shard + 1] - self._firsts[shard]

    def first_of(self, shard: int) -> int:
        """Return the number of a shard's first sample in the cache."""
        return self._firsts[shard]

    # --- shards and samples ---

    def _map(self, shard: int) -> MappedShard:
        return map_shard(shard_path(self.folder, shard), self.layout, follow_links=self.follow_links)[0]

    def mapped(self, shard: int) -> MappedShard:
        """Return a shard whose starts fit its tensors and its loss bits. Raises: CacheError where it is not one."""
        path = shard_path(self.folder, shard)
        try:
            mapped = self._map(shard)
        except FileNotFoundError as error:
            raise self.missing(Path(path), f"shard {shard} of {self.num_shards:,}") from error
        checked_counts(path, mapped, self.manifest["seq_length"])
        if len(mapped) != self.rows_of(shard):
            expected = f"{self.rows_of(shard)} of the manifest's {self.num_samples}"
            raise CacheError(path, f"{len(mapped)} samples", expected, self.remedy(), code="E701")
        return mapped

    def wrong_form(self, shard: int) -> Iterator[CacheError]:
        """Yield why a shard is none of this cache."""
        try:
            self.mapped(shard)
        except CacheError as error:
            yield error

    def wrong_manifest(self) -> Iterator[CacheError]:
        """Yield where the weights do not fit the manifest; and where the readers refuse a cache that looks whole."""
        if missing := self.weights_missing():
            yield missing
            return
        size, vocab = self.layout.hidden_size, self.vocab_size
        shapes = {"embeddings": [vocab, size], "lm_head": [vocab, size], "lm_head_bias": [vocab]}
        shapes |= {"norm": [size], "norm_bias": [size]}
        weights = read_weights(self.folder, follow_links=self.follow_links)
        needed = {"embeddings"} if self.manifest["head"]["tied"] else {"embeddings", "lm_head"}
        path = self.folder / self.WEIGHTS
        for name, shape in shapes.items():
            found = list(weights[name].shape) if name in weights else None
            if (found is None and name in needed) or (found is not None and found != shape):
                what = f"{name} is {'absent' if found is None else found}"
                yield CacheError(path, what, f"{shape} by {MANIFEST_NAME}", self.remedy(), code="E701")
                return
        if len(self.shards) == self.num_shards and not any(
            True for shard in self.shards for _ in self.wrong_form(shard)
        ):
            NativeShards(self.folder, follow_links=self.follow_links)
            _ = self.head

    def stored(self, shard: int) -> Iterable[NativeRow]:
        """Return the samples of a shard. Raises: as `mapped`."""
        mapped, first = self.mapped(shard), self.first_of(shard)
        return (NativeRow(self, shard, first + row, mapped.sample(row)) for row in range(len(mapped)))

    def row(self, number: int) -> NativeRow:
        """Return a sample by its number in the cache. Raises: as `mapped`."""
        shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
        mapped = self.mapped(shard)
        return NativeRow(self, shard, number, mapped.sample(number - self.first_of(shard)))

    def damage(self, shard: int) -> list[tuple[int | None, str]]:
        """Compare a shard with its receipt, as `native_shard_damage`."""
        return native_shard_damage(self.folder, shard, self.tick, follow_links=self.follow_links)

    def spans(self, shard: int, row: int) -> list[tuple[int, int]]:
        """Return where the bytes of a sample lie in its shard: a span for each tensor, its starts included."""
        mapped = self._map(shard)
        begins, ends = mapped.starts[row : row + 2].tolist()
        rows = {name: slice(begins[which], ends[which]) for name, which in ROW_TENSORS.items()}
        rows |= {"loss_bits": slice(begins[0] // 8, -(-ends[0] // 8)), **dict.fromkeys(STARTS, slice(row, row + 2))}
        parts = [tensor[rows[name]] for name, tensor in mapped.tensors.items()]
        begins = [part.storage_offset() * part.element_size() for part in parts]
        return [(begin, begin + part.nbytes) for begin, part in zip(begins, parts, strict=True) if part.numel()]

    @cached_property
    def counts(self) -> Counts:
        """The tokens, supervised slots and positions of all shards. Raises: as `mapped`."""
        tokens = supervised = positions = 0
        for shard in range(self.num_shards):
            mapped = self.mapped(shard)
            learnt = self.supervised_rows(mapped)
            tokens += int(mapped.starts[-1, 0])
            supervised += int(learnt.sum())
            argmax = mapped.tensors["argmax_ids"].to(torch.int64).numpy()
            positions += int((learnt & self.selected(argmax)).sum())
        return Counts(tokens, supervised, positions)

    @staticmethod
    def supervised_rows(mapped: MappedShard) -> NDArray[np.bool_]:
        """Return of each target row of a shard whether its token carries loss: bool [R].

        The others serve tools that do not shift the loss mask.
        """
        mask = mapped.loss_mask(0, int(mapped.starts[-1, 0]))
        stored = mask.copy()
        stored[1:] |= mask[:-1]
        stored[mapped.starts[:-1, 0]] = False
        return mask[stored]

    @cached_property
    def selected(self) -> Callable[[NDArray[np.int64]], NDArray[np.bool_]]:
        """Whether some ids of the target are in the draft's vocabulary."""
        chosen = np.zeros(self.vocab_size, np.bool_)
        chosen[np.array(self.manifest["selected_token_ids"], np.int64)] = True
        return lambda ids: chosen[np.minimum(ids, self.vocab_size - 1)] & (ids < self.vocab_size)


@dataclass(frozen=True)
class NativeRow:
    """One stored sample. A target row is called by the position of its token, as an auxiliary row is."""

    cache: NativeCache
    shard: int
    number: int
    """In the cache."""
    sample: NativeSample

    def problem(self, found: str, expected: str = "") -> CacheError:
        """Return an error that names the shard's file, the sample's number and its id."""
        return self.cache.problem(self.shard, self.number, found, expected)

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.sample.input_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of a shard that it takes."""
        counts = np.array([[self.length, len(self.sample.aux_hidden_states), len(self.sample.argmax_ids)]])
        return int(self.cache.layout.sample_bytes(counts)[0])

    def tensors(self) -> dict[str, tuple[torch.Tensor, NDArray[Any]]]:
        """Return the float tensors by name, [rows, ...], with the position of each row."""
        sample = self.sample
        positions, before = sample.positions, np.arange(len(sample.aux_hidden_states))
        tensors = {"aux_hidden_states": (sample.aux_hidden_states, before)}
        if sample.aux_scales is not None:
            tensors["aux_scales"] = (sample.aux_scales, before)
        tensors["last_hidden_states"] = (sample.last_hidden_states, positions)
        tensors["log_normalizers"] = (sample.log_normalizers, positions)
        return tensors
