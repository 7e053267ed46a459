"""SFTExampleDataset: random rows of an sft cache, one example each, with loss on the assistant's replies only.

B: rows of a batch, T: tokens of a row.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Literal, Unpack, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.formats import IGNORE_INDEX, Ids
from niels_gpt.cache.meta import sentinel_names, tokenizer_of
from niels_gpt.cache.pretrain_dataset import split_rows
from niels_gpt.cache.reader import OpeningTokens, local_path
from niels_gpt.cache.sft_counts import SFTCounts, count_rows, warn_of_counts
from niels_gpt.cache.sft_split import SFTSplit, files_of
from niels_gpt.display.decoded import Decoded, DecodedItems
from niels_gpt.display.tables import html_table
from niels_gpt.storage.errors import OutOfRange
from niels_gpt.storage.meta_json import checked_int, printable
from niels_gpt.storage.versions import public_path, version_name

__all__ = ["OverLength", "SFTCounts", "SFTExampleDataset"]

OverLength = Literal["truncate", "drop", "error"]
"""An example of more than T + 1 tokens is truncated (PR-03), dropped, or an error when the dataset is opened."""


class SFTExampleDataset(DecodedItems):
    """Draws examples, truncated or padded to T + 1 tokens (PR-03).

    dataset[i] is the whole example i, to look at: its ids, its mask and its text.
    The files' folder is resolved to a version once, here: a rebuild does not change an open dataset, and gc keeps its
    version. Safe to fork and to pickle: a copy maps the files again, does not count again, and raises CacheError if the
    files were replaced. Never writes, and opens no file outside that version but the meta.json of the tokenizer beside
    the cache, and for a text its model.
    """

    def __init__(
        self,
        tokens_path: str | os.PathLike[str],
        idx_path: str | os.PathLike[str],
        *,
        T: int,
        device: str,
        eot_id: int,
        asst_id: int | None = None,
        over_length: OverLength = "truncate",
        require_targets: bool = False,
        **opening: Unpack[OpeningTokens],
    ) -> None:
        """tokens_path, idx_path: a split's token file and offsets, such as train_tokens.bin and train_idx.npy.

        eot_id: id of the end-of-text sentinel, which also pads rows; for a cache with loss bits any id, which only
            pads.
        asst_id: id of the assistant sentinel; by default from meta.json beside the tokens, else from the cache's
            tokenizer/meta.json (D1). Refused for a cache with loss bits, which needs none.
        over_length: see `OverLength`.
        require_targets: leave out examples without a target in their first T + 1 tokens.
        opening: see `niels_gpt.cache.reader.OpeningTokens`.

        All tokens (or loss bits) are read once, here, for `counts`; of a cache at a URL they are all fetched. Warns of
        rows without a target and of lost supervised tokens.
        Tokens and offsets of two splits, caches or versions are refused: by meta.json, and, if the ids of the roles'
        sentinels are known, by an example that does not begin with one; with loss bits, by one that begins with a
        target.
        Raises: FileNotFoundError; CacheError (each names the file; also if no example is left); ValueError for a T that
            is not an integer of 1 or more, another over_length, io or dtype, and an id outside the vocabulary.
        """
        if over_length not in get_args(OverLength):
            raise ValueError(f"over_length={over_length!r}: expected one of {', '.join(get_args(OverLength))}")
        self.T, self.device = checked_int("T", T, 1), device
        self._take(SFTSplit.of_files(tokens_path, idx_path, pad_id=eot_id, asst_id=asst_id, **opening))
        self.counts, rows = count_rows(self._split, T=self.T, over_length=over_length, require_targets=require_targets)
        self._kept = rows.kept
        warn_of_counts(self._split, self.counts, self.T, over_length)

    def _take(self, split: SFTSplit) -> None:
        """Read from a split, and copy its attributes."""
        self._split, self.io, self.eot_id, self.asst_id = split, split.io, split.pad_id, split.asst_id
        self.tokens_path, self.idx_path = split.tokens_path, split.idx_path
        self.meta, self.vocab_size = split.meta, split.vocab_size

    @classmethod
    def open(
        cls,
        cache_dir: str | os.PathLike[str],
        split: str | None = None,
        *,
        T: int,
        device: str = "cpu",
        over_length: OverLength = "truncate",
        require_targets: bool = False,
        **opening: Unpack[OpeningTokens],
    ) -> SFTExampleDataset:
        """Open a split of an sft cache, whose meta.json has the sentinels. cache_dir, split: see `SFTSplit`.

        Other arguments: see `SFTExampleDataset`. Raises: its errors; CacheError for a cache of another kind, and if no
            meta.json has the id of the eot sentinel; ValueError for another split.
        """
        tokens_path, idx_path, eot_id = files_of(local_path(cache_dir, opening), split)
        return cls(
            tokens_path,
            idx_path,
            T=T,
            device=device,
            eot_id=eot_id,
            over_length=over_length,
            require_targets=require_targets,
            **opening,
        )

    def __repr__(self) -> str:
        """Name the cache and the form of a batch."""
        counts, split = self.counts, self.tokens_path.name.removesuffix("_tokens.bin")
        rows = f"{counts.rows:,} rows of {counts.examples:,} examples"
        batch = f"x, y, y_masked: int64 [B, {self.T}] on {self.device}"
        return f"SFTExampleDataset({version_name(self.tokens_path.parent)}, {printable(split)}: {rows}, {batch})"

    def _repr_html_(self) -> str:
        counts, split = self.counts, self.tokens_path.name.removesuffix("_tokens.bin")
        lost = counts.supervised_tokens_lost
        rows = {
            "cache": f"{version_name(self.tokens_path.parent)}, {split}",
            "examples": f"{counts.examples:,}",
            "rows": f"{counts.rows:,}, {counts.rows_cut:,} of them truncated to T + 1 = {self.T + 1} tokens",
            "supervised tokens": f"{counts.supervised_tokens:,}, {lost:,} of them in no row",
            "batch": f"x, y, y_masked: int64 [B, {self.T}] on {self.device}",
        }
        return html_table("SFTExampleDataset", rows.items())

    def _item(self, number: int) -> Decoded:
        folder, split, ids = self.tokens_path.parent, self._split, self.example(number)
        mask = split.is_target(ids, *split.bounds(np.array([number])))
        tokenizer = partial(tokenizer_of, folder, self.fingerprint()["tokenizer_sha256"])
        name = f"example {number:,} of {(public_path(folder) or folder).name}, {split.split}"
        return Decoded(name, ids, mask, sentinel_names(folder, self.meta), tokenizer)

    def __len__(self) -> int:
        """Number of examples, including those that batches leave out."""
        return len(self._split)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take(self._split)

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of these tokens for a checkpoint: see `niels_gpt.cache.meta.fingerprint`."""
        return self._split.fingerprint()

    def example(self, row: int) -> Ids:
        """Return the ids of one whole example: ids [tokens], a read-only view of the file (io="pread": a copy).

        Raises: IndexError; CacheError, naming file and place, for an id outside the vocabulary.
        """
        if not 0 <= row < len(self):
            raise OutOfRange(f"example {row}: there are {len(self)}")
        return self._split.read(*self._split.bounds(np.array([row])))

    def get_batch(
        self, *, B: int, generator: torch.Generator
    ) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
        """Return x, y, y_masked: int64 [B, T], contiguous, on `device`; y_masked is y with -100 where there is no loss.

        Take the loss of y_masked: y has every token. The `y` of an SFTStream's batch is masked, as y_masked is here.
        y is shifted: y[b, t] is the token after x[b, t]. Labels of a model of transformers are not, for it shifts them
        itself: `Batch.for_transformers` of an SFTStream gives them.
        An example longer than T + 1 tokens is truncated; a shorter one is padded with eot_id, which is never a target.
        One draw from `generator` per batch, on the generator's device, over `counts.rows`.
        Raises: CacheError E409 for an id outside the vocabulary.
        """
        drawn = torch.randint(self.counts.rows, (B,), generator=generator, device=generator.device).cpu().numpy()
        split = self._split
        begins, ends = split.bounds(drawn if self._kept is None else self._kept[drawn])
        ends = np.minimum(ends, begins + (self.T + 1))
        split.will_read(begins, ends)
        rows = split.padded(begins, ends, self.T + 1)
        x, y = split_rows(rows, self.device)
        if not y.is_cpu:
            return x, y, chosen_targets(y, split.targets(rows, begins, ends, whole=True))
        return x, y, cast(Any, torch.from_numpy(split.masked(rows, begins, ends, whole=True)))


def chosen_targets(y: torch.Tensor, is_target: NDArray[np.bool_]) -> Any:
    """Return y with -100 where there is no loss; y is on any device, to which the mask is copied as bool."""
    mask = torch.from_numpy(is_target)
    moved = (mask.pin_memory() if y.is_cuda else mask).to(y.device, non_blocking=y.is_cuda)
    return torch.where(moved, y, IGNORE_INDEX)
