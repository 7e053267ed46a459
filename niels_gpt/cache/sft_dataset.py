"""Reader of an sft cache: one example per row, with loss on the assistant's replies only.

B: rows of a batch, T: tokens of a row.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.formats import (
    NARROW,
    SPLITS,
    Ids,
    TokenDtype,
    example_targets,
    masked_targets,
    reply_runs,
    target_mask,
    targets_by_t,
    targets_of_pieces,
    token_dtype_of,
)
from niels_gpt.cache.meta import (
    check_expected,
    check_pair,
    check_tokenizer,
    existing_cache,
    fingerprint,
    open_version,
    reader_meta,
    recorded_bytes,
    role_ids,
    sentinel_names,
    special_id,
    tokenizer_of,
)
from niels_gpt.cache.mmap import IO, TokenFiles, check_starts, load_idx, mmap_tokens, public_file
from niels_gpt.cache.pretrain_dataset import as_int64, chosen_targets, id_limit, outside_vocabulary, split_rows
from niels_gpt.display.decoded import Decoded, DecodedItems
from niels_gpt.display.tables import html_table
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import checked_int, printable, resolved
from niels_gpt.storage.versions import public_path, version_name
from niels_gpt.tokenizers.protocol import MAX_IDS

OverLength = Literal["truncate", "drop", "error"]
"""An example of more than T + 1 tokens is truncated (PR-03), dropped, or an error when the dataset is opened."""

_BLOCK_TOKENS = 1 << 20  # counted at once
_WARN_SHARE = 0.05  # of the supervised tokens


@dataclass(frozen=True)
class SFTCounts:
    """How T and the settings of a dataset change a split; a row is an example in a batch, truncated and padded."""

    examples: int  # of the split
    rows: int  # that batches are drawn from: examples without the two kinds left out
    rows_cut: int  # truncated: of examples of more than T + 1 tokens
    rows_dropped: int  # by over_length="drop"
    rows_without_last_eot: int  # truncated before the example's last EOT
    rows_without_target: int  # y_masked is -100 everywhere
    rows_left_out_without_target: int  # by require_targets
    supervised_tokens: int  # of all whole examples, as in meta.json
    supervised_tokens_lost: int  # those in no row: truncated, dropped or left out


class SFTExampleDataset(DecodedItems):
    """Draws examples, truncated or padded to T + 1 tokens (PR-03).

    dataset[i] is the whole example i, to look at: its ids, its mask and its text.
    The files' folder is resolved to a version once, here: a rebuild does not change an open dataset, and gc keeps its
    version. Safe to fork and to pickle: a copy maps the files again, does not count again, and raises CacheError if the
    files were replaced. Never writes, and opens no file outside that version but the meta.json of the tokenizer beside
    the cache, and for a text its model.
    """

    _dtype: np.dtype[Any] = NARROW  # of the class: readers pickled by earlier releases have none

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
        over_length: OverLength = "truncate",
        require_targets: bool = False,
        expect: Mapping[str, Any] | None = None,
        io: IO = "mmap",
        dtype: TokenDtype | None = None,
    ) -> None:
        """tokens_path, idx_path: a split's token file and offsets, such as train_tokens.bin and train_idx.npy.

        asst_id: id of the assistant sentinel; by default from meta.json beside the tokens, else from the cache's
            tokenizer/meta.json (D1).
        tokenizer_sha256: raise CacheError unless the cache was built with this model.
        over_length: see `OverLength`.
        require_targets: leave out examples without a target in their first T + 1 tokens.
        expect: an earlier `fingerprint`; raise CacheError unless the split still has it.
        io: "mmap", or "pread" for network file systems: each example is one positioned read, only offsets are mapped.
        dtype: as for `PretrainSplit`.

        All tokens are read once, here, for `counts`. Warns of rows without a target and of lost supervised tokens.
        Tokens and offsets of two splits, caches or versions are refused: by meta.json, and, if the ids of the roles'
        sentinels are known, by an example that does not begin with one.
        Raises: FileNotFoundError; CacheError (each names the file; also if no example is left); ValueError for a T that
            is not an integer of 1 or more, another over_length, io or dtype, and an id outside the vocabulary.
        """
        if over_length not in get_args(OverLength):
            raise ValueError(f"over_length={over_length!r}: expected one of {', '.join(get_args(OverLength))}")
        self.T, self.device, self.eot_id, self.io = checked_int("T", T, 1), device, eot_id, io
        self.tokens_path, self.idx_path = _resolved_together(Path(tokens_path), Path(idx_path))
        folder = self.tokens_path.parent
        self.meta: dict[str, Any] | None
        self._hold, self.meta, self.vocab_size = open_version(folder, "sft", None)
        check_pair(self.tokens_path, self.idx_path, self.meta)
        check_tokenizer(folder, self.meta, tokenizer_sha256)
        self._dtype = token_dtype_of(self.meta, folder / META_NAME, dtype)
        self.asst_id, self._roles = self._sentinels(asst_id), role_ids(folder, self.meta)
        self._open()
        check_expected(self.fingerprint(), expect, str(self.tokens_path))
        self.counts, self._kept = self._count(over_length == "drop", require_targets)
        if over_length == "error":  # after counting, which refuses offsets of other tokens
            self._refuse_over_length()
        self._warn(over_length == "drop")

    @classmethod
    def open(
        cls,
        cache_dir: str | os.PathLike[str],
        split: str,
        *,
        T: int,
        device: str = "cpu",
        tokenizer_sha256: str | None = None,
        over_length: OverLength = "truncate",
        require_targets: bool = False,
        expect: Mapping[str, Any] | None = None,
        io: IO = "mmap",
        dtype: TokenDtype | None = None,
    ) -> SFTExampleDataset:
        """Open a split, "train" or "val", of an sft cache such as cache/sft/oasst1; its meta.json has the sentinels.

        Other arguments: as for `SFTExampleDataset`. Raises: as there; CacheError for a cache of another kind, and if no
            meta.json has the id of the eot sentinel; ValueError for another split.
        """
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: expected one of {', '.join(SPLITS)}")
        folder = existing_cache(resolved(Path(os.path.expanduser(cache_dir))), cache_dir)
        meta = reader_meta(folder, "sft")
        return cls(
            folder / f"{split}_tokens.bin",
            folder / f"{split}_idx.npy",
            T=T,
            device=device,
            eot_id=special_id(folder, meta, "eot"),
            tokenizer_sha256=tokenizer_sha256,
            over_length=over_length,
            require_targets=require_targets,
            expect=expect,
            io=io,
            dtype=dtype,
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
        folder, ids = self.tokens_path.parent, self.example(number)
        mask = target_mask(ids[None], np.array([len(ids)]), asst_id=self.asst_id, eot_id=self.eot_id)[0]
        tokenizer = partial(tokenizer_of, folder, self.fingerprint()["tokenizer_sha256"])
        split = self.tokens_path.name.removesuffix("_tokens.bin")
        name = f"example {number:,} of {(public_path(folder) or folder).name}, {split}"
        return Decoded(name, ids, mask, sentinel_names(folder, self.meta), tokenizer)

    def _warn(self, drop: bool) -> None:
        """Warn the caller of rows without a target, and of more than 5 % of the supervised tokens lost."""
        counts, messages = self.counts, []
        lost, total = counts.supervised_tokens_lost, counts.supervised_tokens
        if counts.rows_without_target:
            messages.append(
                f"{counts.rows_without_target} of {counts.rows} rows have no target in T + 1 = {self.T + 1} tokens, "
                f"and the cross entropy of a batch of such rows is nan; {lost} of {total} supervised tokens are lost. "
                "Pass a larger T, or require_targets=True"
            )
        if lost > _WARN_SHARE * total:
            kept = self._kept_by_t(drop)
            needed = [int(kept.searchsorted(math.ceil(share * total))) for share in (0.99, 1)]
            most, every = (str(T) if len(kept) > T else f"{T} or more" for T in needed)
            messages.append(
                f"T={self.T} loses {lost} of {total} supervised tokens ({lost / total:.1%}). T={most} keeps 99 % of "
                f"them, T={every} all"
            )
        if messages:
            said = CodedWarning("W203", f"{printable(str(public_file(self.tokens_path)))}: {'. '.join(messages)}")
            warnings.warn(said, stacklevel=_levels_to_caller())

    def _kept_by_t(self, drop: bool) -> NDArray[np.int64]:
        """Return how many supervised tokens each T from 0 on keeps: int64 [T]. drop: of whole examples only."""
        needed = np.zeros(_BLOCK_TOKENS, dtype=np.int64)
        for first, stop in self._blocks():
            starts, ends = self._bounds(np.arange(first, stop))
            ends = np.minimum(ends, starts + _BLOCK_TOKENS)  # of a block of one example
            ids, sentinels = self._read(int(starts[0]), int(ends[-1])), {"asst_id": self.asst_id, "eot_id": self.eot_id}
            needed += targets_by_t(ids, ends - starts[0], len(needed), drop=drop, **sentinels)
        return np.cumsum(needed)

    def _sentinels(self, asst_id: int | None) -> int:
        """Return the id of the assistant sentinel; both ids are checked."""
        folder, end = self.tokens_path.parent, self.vocab_size or min(1 << 8 * self._dtype.itemsize, MAX_IDS)
        for name, given in (("eot", self.eot_id), ("asst", asst_id)):
            if given is not None and not 0 <= given < end:
                raise ValueError(f"{name}_id={given}: expected an id of the vocabulary, 0 to {end - 1}")
        assistant = special_id(folder, self.meta, "asst") if asst_id is None else asst_id
        known = (self.meta or {}).get("special_token_ids") or {}
        for name, given in (("eot", self.eot_id), ("asst", assistant)):
            if known.get(name, given) != given:
                found = f"the {name} sentinel has id {known[name]}, but {name}_id={given} was given"
                raise CacheError(folder / META_NAME, found, code="E404")
        return assistant

    def _open(self) -> None:
        folder, paths = self.tokens_path.parent, (self.tokens_path, self.idx_path)
        size, idx_size = (recorded_bytes(folder, self.meta, path) for path in paths)
        self._map: memoryview | None = None
        self._padding = np.full(self.T + 1, self.eot_id, dtype=self._dtype).data
        if self.io == "mmap":
            self._map = mmap_tokens(self.tokens_path, expected_bytes=size, dtype=self._dtype).data
            self._num_tokens = len(self._map)
        else:
            self._file = TokenFiles([(self.tokens_path, size)], io=self.io, dtype=self._dtype)
            self._num_tokens = int(self._file.lengths[0])
        self._starts = load_idx(self.idx_path, num_tokens=self._num_tokens, expected_bytes=idx_size)

    def __len__(self) -> int:
        """Number of examples, including those that batches leave out."""
        return len(self._starts)

    def __getstate__(self) -> dict[str, Any]:
        return {
            key: value for key, value in self.__dict__.items() if key not in ("_file", "_map", "_padding", "_starts")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        before = {**self.fingerprint(), "examples": self.counts.examples}
        self._open()
        if self.meta is not None:  # a real folder may have been replaced since
            self.meta = reader_meta(self.tokens_path.parent, "sft")
        check_expected({**self.fingerprint(), "examples": len(self)}, before, str(self.tokens_path))

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of these tokens for a checkpoint: see `niels_gpt.cache.meta.fingerprint`."""
        split = self.tokens_path.name.removesuffix("_tokens.bin")
        return fingerprint(self.tokens_path.parent, self.meta, split=split, tokens=self._num_tokens)

    def example(self, row: int) -> Ids:
        """Return the ids of one whole example: ids [tokens], a read-only view of the file (io="pread": a copy).

        Raises: IndexError; CacheError, naming file and place, for an id outside the vocabulary.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"example {row}: there are {len(self)}")
        starts, ends = self._bounds(np.array([row]))
        ids = self._read(int(starts[0]), int(ends[0]))
        self._check(ids[None], starts)
        return ids

    def get_batch(
        self, *, B: int, generator: torch.Generator
    ) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
        """Return x, y, y_masked: int64 [B, T], contiguous, on `device`; y_masked is y with -100 where there is no loss.

        An example longer than T + 1 tokens is truncated; a shorter one is padded with eot_id, which is never a target.
        One draw from `generator` per batch, on the generator's device, over `counts.rows`.
        Raises: CacheError as `example`.
        """
        drawn = torch.randint(self.counts.rows, (B,), generator=generator, device=generator.device).cpu().numpy()
        starts, ends = self._bounds(drawn if self._kept is None else self._kept[drawn])
        ends = np.minimum(ends, starts + (self.T + 1))
        rows = self._padded(starts, ends)
        self._check(rows, starts)
        has_loss, runs = reply_runs(rows, ends - starts, asst_id=self.asst_id, eot_id=self.eot_id)
        x, y = split_rows(rows, self.device)
        if not y.is_cpu:
            return x, y, chosen_targets(y, has_loss, runs)
        return x, y, cast(Any, torch.from_numpy(as_int64(masked_targets(rows, has_loss, runs))))

    def _padded(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Ids:
        """Return the tokens from starts[b] to ends[b] - 1, padded with eot_id: ids [B, T + 1]."""
        tokens, padding, width = self._map, self._padding, self.T + 1
        parts: list[Any] = []
        for at, end in zip(starts.tolist(), ends.tolist(), strict=True):
            parts.append(self._read(at, end) if tokens is None else tokens[at:end])
            if end - at < width:
                parts.append(padding[end - at :])
        ids = np.frombuffer(bytearray().join(parts), dtype=self._dtype)  # half the time of numpy assignments
        return ids.reshape(len(starts), width)

    def _bounds(self, examples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first token of each example, and the one after its last."""
        ends = self._starts.take(examples + 1, mode="clip")
        ends[examples == len(self._starts) - 1] = self._num_tokens
        return self._starts[examples], ends

    def _read(self, start: int, end: int) -> Ids:
        if self._map is not None:
            return np.frombuffer(self._map[start:end], dtype=self._dtype)
        ids: Ids = self._file.gather(np.zeros(1, np.int64), np.array([start]), end - start)[0]
        return ids

    def _check(self, rows: Ids, starts: NDArray[np.int64]) -> None:
        """Raise unless all ids of rows, which begin at token `starts` of the file, are of the vocabulary."""
        limit = id_limit(self.vocab_size, rows)
        if limit is not None and rows.size and rows.item(rows.argmax()) >= limit:  # in half the time of numpy's max
            row, column = np.argwhere(rows >= limit)[0].tolist()
            token, id = int(starts[row]) + column, int(rows[row, column])
            raise outside_vocabulary(self.tokens_path, token, rows.itemsize, id, self.vocab_size)

    def _check_starts(self, firsts: Ids, starts: NDArray[np.int64], first: int) -> None:
        paths = {"tokens_path": self.tokens_path, "idx_path": self.idx_path}
        check_starts(firsts, starts, self._roles, first=first, **paths)

    def _refuse_over_length(self) -> None:
        lengths = np.diff(self._starts, append=self._num_tokens)
        too_long, longest = np.count_nonzero(lengths > self.T + 1), int(lengths.argmax())
        if too_long:
            found = f"{too_long} of {len(self)} examples are longer than T + 1 = {self.T + 1} tokens, the longest is"
            remedy = f'Pass T={lengths[longest] - 1}, or over_length="truncate" or "drop"'
            raise CacheError(
                public_file(self.tokens_path),
                f"{found} example {longest} with {lengths[longest]}",
                remedy=remedy,
                code="E107",
            )

    def _count(self, drop: bool, require_targets: bool) -> tuple[SFTCounts, NDArray[np.int64] | None]:
        """Return the counts, and the numbers of the examples that become rows; None: all of them."""
        totals: Counter[str] = Counter()
        kept = []
        for first, stop in self._blocks():
            block, is_row = self._count_block(first, stop, drop, require_targets)
            totals.update(block)
            kept.append(is_row)
        counts = SFTCounts(**totals)
        if counts.rows == 0:
            found = (
                f"no row is left: of {counts.examples} examples {counts.rows_dropped} are longer than T + 1 = "
                f"{self.T + 1} tokens (over_length), and {counts.rows_left_out_without_target} have no target in them "
                "(require_targets)"
            )
            remedy = "Pass a larger T, or other settings"
            raise CacheError(public_file(self.tokens_path), found, remedy=remedy, code="E107")
        return counts, None if counts.rows == counts.examples else np.concatenate(kept).nonzero()[0]

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the first example of a block, and the one after its last: at most _BLOCK_TOKENS, or one example."""
        first = 0
        while first < len(self):
            stop = max(first + 1, int(self._starts.searchsorted(self._starts[first] + _BLOCK_TOKENS, side="right")) - 1)
            yield first, stop
            first = stop

    def _count_block(self, first: int, stop: int, drop: bool, require_targets: bool) -> tuple[Any, NDArray[np.bool_]]:
        """Return the counts of examples first to stop - 1, as a dict, and which of them are rows."""
        starts, ends = self._bounds(np.arange(first, stop))
        start, end, sentinels = int(starts[0]), int(ends[-1]), {"asst_id": self.asst_id, "eot_id": self.eot_id}
        if end - start <= _BLOCK_TOKENS:
            ids = self._read(start, end)
            self._check_starts(ids[starts - start], starts, first)
            targets, left, lost_eot = example_targets(ids, ends - start, self.T + 1, **sentinels)
        else:  # one example
            if self._roles:
                self._check_starts(self._read(start, start + 1), starts, first)
            pieces = (self._read(at, min(at + _BLOCK_TOKENS, end)) for at in range(start, end, _BLOCK_TOKENS))
            targets, left, lost_eot = targets_of_pieces(pieces, self.T + 1, **sentinels)
        is_cut = ends - starts > self.T + 1
        is_dropped = is_cut & drop
        is_left_out = (left == 0) & ~is_dropped & require_targets
        is_row = ~(is_dropped | is_left_out)
        counts = {
            "examples": stop - first,
            "rows": is_row.sum(),
            "rows_cut": (is_row & is_cut).sum(),
            "rows_dropped": is_dropped.sum(),
            "rows_without_last_eot": (is_row & lost_eot).sum(),
            "rows_without_target": (is_row & (left == 0)).sum(),
            "rows_left_out_without_target": is_left_out.sum(),
            "supervised_tokens": targets.sum(),
            "supervised_tokens_lost": targets.sum() - left[is_row].sum(),
        }
        return {name: int(value) for name, value in counts.items()}, is_row


def _levels_to_caller() -> int:
    """Return the stacklevel of a warning issued by the caller of this for the first function outside this file."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        level, frame = level + 1, frame.f_back
    return level - 1


def _resolved_together(tokens_path: Path, idx_path: Path) -> tuple[Path, Path]:
    """Resolve the folder of two files once, so that a commit in between cannot mix two versions.

    The files are not resolved: a link is refused when it is opened. ~ is the home folder.
    """
    tokens_path, idx_path = (Path(os.path.expanduser(path)) for path in (tokens_path, idx_path))
    folder = resolved(tokens_path.parent)
    beside = folder if tokens_path.parent == idx_path.parent else resolved(idx_path.parent)
    return folder / tokens_path.name, beside / idx_path.name
