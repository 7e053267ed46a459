"""The two forms of an opened cache: dense (versions 1 and 2) and native."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niels_gpt.eagle3.cache import CachedEagle3Dataset
from niels_gpt.eagle3.format.layout import (
    EMBEDDINGS_NAME,
    INT_FIELDS,
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Layout,
    form_text,
    read_header,
)
from niels_gpt.eagle3.format.manifest import is_native, number_in, read_manifest
from niels_gpt.eagle3.format.native import (
    MappedShard,
    NativeLayout,
    NativeSample,
    row_counts,
)
from niels_gpt.eagle3.format.shards import DenseShards, NativeShards
from niels_gpt.eagle3.format.weights import EMBEDDINGS_RECEIPT, WEIGHTS_RECEIPT, read_target_embeddings, read_weights
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.inspect.opened import (
    BY_SOURCE,
    OF_THE_PLAN,
    Eagle3Cache,
    NotChecked,
    Pairs,
    StoredSample,
)
from niels_gpt.eagle3.native import NativeEagle3Dataset
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks import hold_version

# --- versions 1 and 2 -------------------------------------------------------------------------------------------------


class DenseCache(Eagle3Cache):
    """A cache of version 1 or 2: sample i is row i % shard_size of shard i // shard_size, of seq_length slots."""

    WEIGHTS = EMBEDDINGS_NAME
    WEIGHTS_RECEIPT = EMBEDDINGS_RECEIPT
    WHAT_WEIGHTS = "the target's input embeddings"
    PROOFS = (*OF_THE_PLAN, EMBEDDINGS_RECEIPT)
    READER = CachedEagle3Dataset
    unit, IN = "slot", "in"

    @cached_property
    def files(self) -> DenseShards:
        return DenseShards(self.folder, self.manifest, max_open=1, follow_links=self.follow_links, exact=True)

    @property
    def layout(self) -> Layout:
        """Layout of a shard."""
        return self.files.layout

    @property
    def hidden_size(self) -> int:
        return self.layout.aux_hidden_dim // max(1, len(self.aux_layer_ids))

    @property
    def num_shards(self) -> int:
        return self.files.num_shards

    def at(self, place: int, column: int) -> str:
        return f"slot {place}, column {column}"

    def opened(self, shard: int) -> dict[str, Tensor]:
        """Map a shard; return its tensors, [n, S, ...], as views. Raises: CacheError."""
        tables: dict[str, Tensor] = super().opened(shard)[1]
        return tables

    def wrong_weights(self) -> Iterator[CacheError]:
        self.refuse_missing_weights()
        path, vocab = self.folder / EMBEDDINGS_NAME, self.manifest.get("target_vocab_size")
        fields, rows, _ = read_header(path, follow_links=self.follow_links)
        weight = (torch.float32, (self.layout.aux_hidden_dim // 3,))
        if fields != {"weight": weight} or rows != vocab:
            found = ", ".join(f"{name} {form_text(form)}" for name, form in fields.items())
            expected = f"{vocab} rows of weight {form_text(weight)}"
            yield CacheError(path, f"{rows:,} rows of {found}", expected, code="E701")

    def place(self, number: int) -> tuple[int, int]:
        return divmod(number, self.files.shard_size)

    def row(self, shard: int, opened: Mapping[str, Tensor], row: int) -> StoredSample:
        tensors = {name: table[row] for name, table in opened.items()}
        return StoredSample(self, shard, self.files.first_of(shard) + row, tensors, self.layout.row_bytes)

    def beside(self, row: StoredSample) -> Pairs:
        """Yield stored and expected ids and masks: the source's row, padded; ids and loss mask shifted."""
        ids, loss_mask = self.samples.row(row.number)
        width, length = len(row.tensors["input_ids"]), len(ids)
        if length > width:
            raise row.problem(f"{width:,} slots", f"{length:,} tokens {BY_SOURCE}")
        raw = {name: np.zeros(width + 1, np.int64) for name in INT_FIELDS}
        raw["input_ids"][:width] = int(self.plan["tokenizer"]["pad_id"])
        raw["input_ids"][:length], raw["loss_mask"][:length], raw["attention_mask"][:length] = ids, loss_mask, 1
        for name, wanted in raw.items():
            yield name, row.tensors[name].numpy(), wanted[:width] if name == "attention_mask" else wanted[1:]

    def counted(self, opened: Mapping[str, Tensor]) -> NDArray[np.int64]:
        attended, with_loss = opened["attention_mask"].sum(1), (opened["loss_mask"] == 1).sum(1)
        counts: NDArray[np.int64] = torch.stack([attended, with_loss, opened["position_mask"].sum((1, 2))], 1).numpy()
        return counts

    def weights(self) -> dict[str, Tensor]:
        self.refuse_missing_weights()
        return {"embeddings": read_target_embeddings(self.folder, follow_links=self.follow_links)}


# --- the native form --------------------------------------------------------------------------------------------------


class NativeCache(Eagle3Cache):
    """A native cache: raw samples of any length, with hidden states and the target's head."""

    WEIGHTS = WEIGHTS_NAME
    WEIGHTS_RECEIPT = WEIGHTS_RECEIPT
    WHAT_WEIGHTS = "the target's embeddings, lm_head and final norm"
    READER = NativeEagle3Dataset
    unit, IN = "token", "at"

    @cached_property
    def layout(self) -> NativeLayout:
        """Layout of a shard."""
        return NativeLayout.of(self.manifest)

    @property
    def hidden_size(self) -> int:
        return self.layout.hidden_size

    @property
    def num_shards(self) -> int:
        return number_in(self.manifest, "num_shards", self.folder)

    @property
    def last_hidden(self) -> str:
        """Side of the final norm of the last hidden states: pre_norm or post_norm."""
        return str(self.manifest["conventions"]["last_hidden"])

    @cached_property
    def head(self) -> TargetHead:
        """The target's head, computing as the target ran. Raises: CacheError."""
        self.refuse_missing_weights()
        return TargetHead.of_cache(self.folder, follow_links=self.follow_links)

    @cached_property
    def files(self) -> NativeShards:
        files = NativeShards(self.folder, self.manifest, max_open=1, follow_links=self.follow_links)
        files.firsts = self._firsts(files)
        return files

    def _firsts(self, files: NativeShards) -> list[int]:
        """Return the first sample of each shard, and the end: by the plan's samples, else by receipts and headers."""
        try:
            counts = row_counts(self.samples.starts, self.samples.loss_mask, self.layout.targets)
            cuts = self.layout.cut(counts, self.manifest["shard_bytes"])
            if len(cuts) == self.num_shards + 1:
                return cuts
        except (NotChecked, CacheError, OSError):
            pass
        stated = [0] * (self.num_shards + 1)
        for shard in self.shards:
            with suppress(CacheError, OSError):  # 0 where neither can be read
                receipt = self.receipt(shard)
                stated[shard + 1] = int(receipt["samples"]) if receipt else files.stated_rows(shard)
        return list(accumulate(stated))

    def wrong_weights(self) -> Iterator[CacheError]:
        """Yield deviations from the manifest; raise errors that prevent building a head."""
        weights = self.weights()
        size, vocab = self.hidden_size, self.vocab_size
        shapes = {"embeddings": [vocab, size], "lm_head": [vocab, size], "lm_head_bias": [vocab]}
        shapes |= {"norm": [size], "norm_bias": [size]}
        needed = {"embeddings"} if self.manifest["head"]["tied"] else {"embeddings", "lm_head"}
        for name, shape in shapes.items():
            found = list(weights[name].shape) if name in weights else None
            if (found is None and name in needed) or (found is not None and found != shape):
                what, expected = f"{name} is {'absent' if found is None else found}", f"{shape} by {MANIFEST_NAME}"
                yield CacheError(self.folder / self.WEIGHTS, what, expected, self.remedy(), code="E701")
                return
        _ = self.head

    def place(self, number: int) -> tuple[int, int]:
        return self.files.place(number)

    def row(self, shard: int, opened: MappedShard, row: int) -> StoredSample:
        return self.of(opened.sample(row), shard, self.files.first_of(shard) + row)

    def of(self, sample: NativeSample, shard: int, number: int) -> StoredSample:
        """Return a sample as checks and comparisons take it."""
        held = {name: value for name, value in vars(sample).items() if value is not None and name != "targets"}
        tensors = {name: torch.as_tensor(value) for name, value in held.items()}
        counts = np.array([[len(sample.input_ids), len(sample.aux_hidden_states), len(sample.argmax_ids)]])
        return StoredSample(self, shard, number, tensors, int(self.layout.sample_bytes(counts)[0]), sample.positions)

    def beside(self, row: StoredSample) -> Pairs:
        planned = [each.astype(np.int64) for each in self.samples.row(row.number)]
        if len(planned[0]) != row.length:
            raise row.problem(f"{row.length:,} tokens", f"{len(planned[0]):,} {BY_SOURCE}")
        yield from zip(("input_ids", "loss_bits"), row.ids_and_loss(), planned, strict=True)

    def counted(self, opened: MappedShard) -> NDArray[np.int64]:
        with_loss = opened.with_loss
        of_rows = np.stack([with_loss, with_loss & self.in_draft(opened)], axis=1)
        sums = np.concatenate([np.zeros((1, 2), np.int64), np.cumsum(of_rows, axis=0, dtype=np.int64)])
        starts = opened.starts
        return np.diff(np.concatenate([starts[:, :1], sums[starts[:, 2]], starts[:, 1:]], axis=1), axis=0)

    def in_draft(self, mapped: MappedShard, rows: Any = slice(None)) -> NDArray[np.bool_]:
        """Return whether the most probable token of each target row is in the draft's vocabulary: bool [rows]."""
        return self.selected(mapped.tensors["argmax_ids"][rows].to(torch.int64).numpy())

    @cached_property
    def selected(self) -> Callable[[NDArray[np.int64]], NDArray[np.bool_]]:
        """Function that returns whether ids of the target are in the draft's vocabulary."""
        chosen = np.zeros(self.vocab_size, np.bool_)
        chosen[np.array(self.manifest["selected_token_ids"], np.int64)] = True
        return lambda ids: chosen[np.minimum(ids, self.vocab_size - 1)] & (ids < self.vocab_size)

    def weights(self) -> dict[str, Tensor]:
        self.refuse_missing_weights()
        return read_weights(self.folder, follow_links=self.follow_links)


# --- opening ----------------------------------------------------------------------------------------------------------


def open_cache(
    path: Path, *, follow_links: bool = False, tick: Callable[[int], None] = lambda num_bytes: None
) -> DenseCache | NativeCache:
    """Resolve a cache's path once and read its manifest. follow_links, tick: see `Eagle3Cache`.

    Raises: FileNotFoundError; CacheError for a manifest that cannot be read.
    """
    folder = path.resolve()
    hold = hold_version(folder)
    manifest = read_manifest(folder, follow_links=follow_links)
    form = NativeCache if is_native(manifest) else DenseCache
    return form(path, folder, manifest, hold, follow_links=follow_links, tick=tick)
