"""speculators: `DraftRows`, the dataset of its loaders, over a native cache, without an export.

speculators' own dataset reads one file a sample. This one has the class, rows and lengths of that one over an export of
the same cache, bit for bit, so speculators' batch sampler, shift, collate function, model and trainer work as they are,
and resume as they do: the sampler skips the batches that a checkpoint counts. Nothing in such a checkpoint names the
data: keep `fingerprint` beside it, and pass it as `expect`.

States that a cache lacks are zeros here, as in an export. A cache is refused unless it has every state that the loss of
the kind of draft reads (format/drafters.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from speculators.models.eagle3.data import shift_batch
from speculators.models.mtp.data import shift_batch_mtp
from speculators.train.data import BaseDataset
from speculators.train.dataloader import _setup_dataloader
from torch import Tensor
from torch.utils.data import DataLoader

from niels_gpt.eagle3.exchange.export import refuse_for, whole_sample
from niels_gpt.eagle3.native import NativeEagle3Dataset
from niels_gpt.storage.errors import UsageError

_SHIFTS = {"eagle3": shift_batch, "peagle": shift_batch, "mtp": shift_batch_mtp}
"""Kind of draft -> the shift of its samples, as in speculators.train.cli; dflash and dspark have none."""


class DraftRows(BaseDataset):
    """The samples of a native cache as speculators reads them. May be pickled, for workers of any start method.

    A row of L tokens, K layers and hidden size H is a dict, not shifted: `hidden_states` [L, K * H] and
    `verifier_last_hidden_states` [L, H] in the wider of the cache's two dtypes (float8 becomes the dtype of the
    last hidden states); `input_ids` and `loss_mask`, int64 [L]; `lengths`, int64 [1]: L; `position_ids`, int64 [L]:
    from 0.
    """

    def __init__(
        self,
        cache_dir: str | Path,
        max_len: int,
        *,
        split: str = "train",
        train_ratio: float = 1.0,
        made_for: str | None = None,
        hidden_states_dtype: torch.dtype = torch.bfloat16,
        **opening: Any,
    ) -> None:
        """Open a cache.

        max_len, hidden_states_dtype: as speculators' datasets have them: tokens of a batch, dtype of its states.
        made_for: the kind of draft: eagle3, peagle, dflash, dspark or mtp; None: the one that the cache was made for,
            else eagle3. It decides the shift of `loader`.
        split, train_ratio: "train" has the first int(samples * train_ratio) samples, "val" the others.
        opening: of NativeEagle3Dataset, such as expect, check, and local for a URL.
        Raises: UsageError for an empty or unknown split; CacheError E710 for a cache that lacks states for such a
            draft, and for last hidden states after the final norm, which speculators' model would apply again; what
            NativeEagle3Dataset raises.
        """
        self.cache = NativeEagle3Dataset(cache_dir, **opening)
        manifest = self.cache.manifest
        self.made_for: str = made_for or manifest.get("made_for", "eagle3")
        refuse_for("speculators", Path(self.cache.cache_dir), manifest, self.made_for)
        total = len(self.cache)
        middle = int(total * train_ratio)
        self._numbers = {"train": range(middle), "val": range(middle, total)}.get(split, range(0))
        if not 0 < train_ratio <= 1 or not self._numbers:
            found = f"split={split!r} of train_ratio={train_ratio} has none of {total:,} samples"
            raise UsageError(f"{found}: expected train or val, and a ratio above 0, at most 1")
        super().__init__(max_len, hidden_states_dtype)

    @property
    def hidden_size(self) -> int:
        """H, for speculators' CollateFn."""
        return int(self.cache.manifest["hidden_size"])

    @property
    def target_layer_ids(self) -> list[int]:
        """The K layers as speculators counts them: 0 is the embedding, i + 1 the output of block i."""
        return [block + 1 for block in self.cache.manifest["aux_layer_ids"]]

    def loader(self, **how: Any) -> DataLoader[dict[str, Any]]:
        """Return the DataLoader that speculators makes of its own datasets, for this rank and kind of draft.

        how: num_workers (12), prefetch_factor (4), seed (0) and max_batches, as in speculators. Batches have `max_len`
        tokens: a longer sample is cut there, with a warning; samples at the end of an epoch may be left out.
        """
        layers = len(self.target_layer_ids)
        how |= {"num_target_layers": layers, "preprocess": _SHIFTS.get(self.made_for)}
        loader: DataLoader[dict[str, Any]] = _setup_dataloader(self, self.max_len, self.hidden_size, **how)
        return loader

    def vocab_mappings(self) -> tuple[Tensor, Tensor]:
        """Return t2d, bool [V], and d2t, int64 [D], of the cache's draft vocabulary, for speculators' model.

        speculators numbers a draft's tokens in the order of their ids: token d is the target's d + d2t[d].
        """
        ids = self.cache.selected_token_ids.sort().values
        t2d = torch.zeros(self.cache.manifest["target_vocab_size"], dtype=torch.bool)
        t2d[ids] = True
        return t2d, ids - torch.arange(len(ids))

    def fingerprint(self) -> dict[str, Any]:
        """Return the cache's identity, for `expect` of a run that resumes."""
        return self.cache.fingerprint()

    def __len__(self) -> int:
        """Return the samples of the split."""
        return len(self._numbers)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return the rows of a batch, for a DataLoader; at a URL they are fetched together."""
        self.cache.will_read([self._numbers[index] for index in indices], len(indices))
        return [self[index] for index in indices]

    def _compute_approx_lengths(self) -> list[int]:
        lengths: list[int] = self.cache.counts[self._numbers.start : self._numbers.stop, 0].tolist()
        return lengths

    def _get_raw_data(self, index: int) -> dict[str, Tensor]:
        """Return a row without lengths and positions, which the base class adds. Raises: IndexError; CacheError."""
        sample = whole_sample(self.cache[self._numbers[index]], self.cache.manifest, one_dtype=True)
        return {
            "hidden_states": sample.aux.flatten(1),
            "input_ids": sample.input_ids,
            "verifier_last_hidden_states": sample.last,
            "loss_mask": sample.loss_mask.to(torch.int64),
        }


Eagle3Rows = DraftRows
"""Its earlier name."""
