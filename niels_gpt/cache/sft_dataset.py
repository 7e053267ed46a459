"""One chat a row, with the loss on the assistant's words only. B: rows of a batch, T: tokens of a row."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.formats import IGNORE_INDEX, TOKEN_NUMPY_DTYPE, target_mask
from niels_gpt.cache.meta import check_tokenizer, reader_meta, special_id
from niels_gpt.cache.mmap import load_idx, mmap_tokens
from niels_gpt.cache.pretrain_dataset import outside_vocabulary, split_rows
from niels_gpt.fileio import META_NAME, CacheError
from niels_gpt.records import file_records, path_inside, resolved


class SFTExampleDataset:
    """Draws whole examples, cut or padded to T + 1 tokens (PR-03).

    The version that the files' folder stands for is resolved once, here: a rebuild does not disturb an open dataset.
    Safe to fork and to pickle (a copy maps the files anew); never writes, and opens no file outside that version but
    the meta.json of the tokenizer beside the cache.
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
        tokenizer_sha256: str | None = None,
    ) -> None:
        """tokens_path, idx_path: a split's token file and offsets, such as train_tokens.bin and train_idx.npy.

        asst_id: id of the assistant sentinel; by default from meta.json beside the tokens, else from the cache's
            tokenizer/meta.json (D1).
        tokenizer_sha256: raise CacheError unless the cache was built with this model.
        Raises: FileNotFoundError, CacheError (each names the file), ValueError for T < 1, and for an eot_id or asst_id
            outside the vocabulary.
        """
        if T < 1:
            raise ValueError(f"T={T}: expected at least 1 token")
        self.T, self.device, self.eot_id = T, device, eot_id
        self.tokens_path, self.idx_path = _resolved_together(Path(tokens_path), Path(idx_path))
        folder = self.tokens_path.parent
        self.meta: dict[str, Any] | None = reader_meta(folder)
        self.vocab_size: int | None = (self.meta or {}).get("vocab_size")
        for name, given in (("eot", eot_id), ("asst", asst_id)):
            if given is not None and not 0 <= given < (self.vocab_size or 1 << 16):
                raise ValueError(
                    f"{name}_id={given}: expected an id of the vocabulary, 0 to {(self.vocab_size or 1 << 16) - 1}"
                )
        check_tokenizer(folder, self.meta, tokenizer_sha256)
        self.asst_id = special_id(folder, self.meta, "asst") if asst_id is None else asst_id
        known = (self.meta or {}).get("special_token_ids") or {}
        for name, given in (("eot", eot_id), ("asst", self.asst_id)):
            if known.get(name, given) != given:
                raise CacheError(
                    f"{folder / META_NAME}: the {name} sentinel has id {known[name]}, but {name}_id={given} was given"
                )
        self._open()

    def _open(self) -> None:
        sizes = [self._recorded_bytes(path) for path in (self.tokens_path, self.idx_path)]
        self._tokens = mmap_tokens(self.tokens_path, expected_bytes=sizes[0])
        self._starts = load_idx(self.idx_path, num_tokens=len(self._tokens), expected_bytes=sizes[1])

    def _recorded_bytes(self, path: Path) -> int | None:
        """Return the size that meta.json gives a file; None where there is no meta.json, or one without records."""
        folder = self.tokens_path.parent
        records = file_records(self.meta or {})
        if not records or path.parent != folder:
            return None
        path_inside(folder, path.name)
        for record in records:
            if record["name"] == path.name:
                return int(record["bytes"])
        raise CacheError(f"{folder / META_NAME}: does not name {path.name}, which lies beside it")

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._starts)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_tokens", "_starts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def example(self, row: int) -> NDArray[np.uint16]:
        """Return the ids of one whole example: uint16 [tokens], a read-only view of the file.

        Raises: IndexError; CacheError, naming file and place, for an id that is not below meta.json's vocab_size.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"example {row}: there are {len(self)}")
        ids = self._example(row)
        self._check(ids, int(self._starts[row]))
        return ids

    def _example(self, row: int) -> NDArray[np.uint16]:
        end = int(self._starts[row + 1]) if row + 1 < len(self._starts) else len(self._tokens)
        return self._tokens[int(self._starts[row]) : end]

    def _check(self, ids: NDArray[np.uint16], first: int) -> None:
        """Raise unless all ids, the first of which is token number `first`, are of the vocabulary."""
        if self.vocab_size is not None and ids.item(ids.argmax()) >= self.vocab_size:
            place = int(np.argmax(ids >= self.vocab_size))
            raise outside_vocabulary(self.tokens_path, first + place, int(ids[place]), self.vocab_size)

    def get_batch(
        self, *, B: int, generator: torch.Generator
    ) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
        """Return x, y, y_masked: int64 [B, T], contiguous, on `device`; y_masked is y with -100 where there is no loss.

        An example longer than T + 1 tokens is cut; a shorter one is padded with eot_id, and padding is never a target.
        Raises: CacheError, naming file and place, where a row has an id that is not below meta.json's vocab_size.
        """
        drawn = torch.randint(len(self), (B,), generator=generator, device=generator.device).cpu()
        rows = np.full((B, self.T + 1), self.eot_id, dtype=TOKEN_NUMPY_DTYPE)
        lengths = np.empty(B, dtype=np.int64)
        for row, example in enumerate(drawn.tolist()):
            ids = self._example(example)[: self.T + 1]
            rows[row, : len(ids)] = ids
            lengths[row] = len(ids)
        if self.vocab_size is not None and B and rows.item(rows.argmax()) >= self.vocab_size:
            for row, example in enumerate(drawn.tolist()):
                self._check(rows[row], int(self._starts[example]))
        is_target = target_mask(rows, lengths, asst_id=self.asst_id, eot_id=self.eot_id)
        x, y = split_rows(rows, self.device)
        targets = torch.from_numpy(is_target[:, 1:]).to(self.device)
        masked: Any = torch.where(targets, y, IGNORE_INDEX)
        return x, y, masked


def _resolved_together(tokens_path: Path, idx_path: Path) -> tuple[Path, Path]:
    """Resolve the folder of two files once, so that a commit in between cannot give files of two versions.

    A file itself is not resolved: one that is a link is refused when it is opened.
    """
    folder = resolved(tokens_path.parent)
    beside = folder if tokens_path.parent == idx_path.parent else resolved(idx_path.parent)
    return folder / tokens_path.name, beside / idx_path.name
