"""SFTSplit: the examples of one split of an sft cache, and which of their tokens carry loss.

By the sentinels of the project's own chats, or by the bits beside the tokens: see loss_bits.py. What T does to them is
decided in sft_counts.py.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import (
    IGNORE_INDEX,
    Ids,
    TokenDtype,
    flat_targets,
    has_loss_bits,
    masked_targets,
    reply_runs,
    reply_runs_of,
    signed_dtype,
    token_dtype_of,
)
from niels_gpt.cache.loss_bits import LossBits, bits_path, limited_by_bits, unpacked
from niels_gpt.cache.meta import check_pair, reader_meta, recorded_bytes, role_ids, special_id
from niels_gpt.cache.mmap import IO, check_starts, joined, load_idx, mmap_tokens, token_files
from niels_gpt.cache.pretrain_dataset import as_int64, empty_int64, id_limit, outside_vocabulary
from niels_gpt.cache.reader import OpeningTokens, Reader, local_path, named_cache
from niels_gpt.display.numbers import number_of
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import resolved
from niels_gpt.tokenizers.protocol import MAX_IDS

Numbers = NDArray[np.int64]
_LOOK_BACK = 1 << 17  # tokens read at once to find the sentinels before some ranges


class SFTSplit(Reader):
    """The tokens and offsets of one split of one version of a cache, and its loss bits, if it has them.

    Versions, forks and pickles: as `niels_gpt.cache.reader.Reader`.

    begins, ends, in the methods: int64 [B]. Range b is tokens begins[b] to ends[b] - 1 of the token file. It is not
    empty, and lies in one example, but may begin inside it.
    """

    kind = "sft"
    _not_copied = ("_file", "_map", "_starts", "_bits", "starts", "_padding")

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
        split: str | None = None,
        **opening: Unpack[OpeningTokens],
    ) -> None:
        """cache_dir: an sft cache such as cache/sft/oasst1, or the name of a split in it, such as cache/sft/oasst1/val.

        split: "train" or "val"; None: what `cache_dir` says, else "train".
        opening: see `niels_gpt.cache.reader.OpeningTokens`.
        Raises: FileNotFoundError; CacheError (each names the file), also if no meta.json has the ids of the sentinels;
            ValueError for another split, io, dtype or check.
        """
        tokens_path, idx_path, pad_id = files_of(local_path(cache_dir, opening), split)
        self._open_files(tokens_path, idx_path, pad_id=pad_id, asst_id=None, **opening)

    @classmethod
    def of_files(
        cls,
        tokens_path: str | os.PathLike[str],
        idx_path: str | os.PathLike[str],
        *,
        pad_id: int,
        asst_id: int | None = None,
        **options: Any,
    ) -> SFTSplit:
        """Open a token file and its offsets, of any names, also without a meta.json.

        pad_id: id that pads rows; without loss bits the end-of-text sentinel. asst_id: the assistant sentinel,
        by default from meta.json beside the tokens, else from the cache's tokenizer/meta.json (D1). options: as above.
        Raises: the errors of `SFTSplit`; ValueError for an id outside the vocabulary, and for an asst_id with loss
            bits.
        """
        split = cls.__new__(cls)
        split._open_files(Path(tokens_path), Path(idx_path), pad_id=pad_id, asst_id=asst_id, **options)
        return split

    def _open_files(
        self,
        tokens_path: Path,
        idx_path: Path,
        *,
        pad_id: int,
        asst_id: int | None,
        io: IO = "mmap",
        dtype: TokenDtype | None = None,
        **opening: Any,
    ) -> None:
        self.tokens_path, self.idx_path = _resolved_together(tokens_path, idx_path)
        self.pad_id, self.io, self._asked = pad_id, io, (asst_id, dtype)
        name = self.tokens_path.name.removesuffix("_tokens.bin")
        self._open_version(self.tokens_path.parent, name, **opening)

    def _prepare(self) -> None:
        asst_id, dtype = self._asked
        check_pair(self.tokens_path, self.idx_path, self.meta)
        self._dtype = token_dtype_of(self.meta, self.cache / META_NAME, dtype)
        self.asst_id, self._roles = self._checked_ids(asst_id), role_ids(self.cache, self.meta)

    def _checked_ids(self, asst_id: int | None) -> int | None:
        """Return the id of the assistant sentinel, None of a cache with loss bits; both ids are checked."""
        folder, end = self.cache, self.vocab_size or min(1 << 8 * self._dtype.itemsize, MAX_IDS)
        for name, given in (("eot", self.pad_id), ("asst", asst_id)):
            if given is not None and not 0 <= given < end:
                raise ValueError(f"{name}_id={given}: expected an id of the vocabulary, 0 to {end - 1}")
        if has_loss_bits(self.meta):
            if asst_id is not None:
                raise ValueError(f"asst_id={asst_id}: expected none, the bits beside the tokens say what carries loss")
            return None
        assistant = special_id(folder, self.meta, "asst") if asst_id is None else asst_id
        known = (self.meta or {}).get("special_token_ids") or {}
        for name, given in (("eot", self.pad_id), ("asst", assistant)):
            if known.get(name, given) != given:
                found = f"the {name} sentinel has id {known[name]}, but {name}_id={given} was given"
                raise CacheError(folder / META_NAME, found, code="E404")
        return assistant

    def _open(self) -> None:
        folder, paths, sums = self.cache, (self.tokens_path, self.idx_path), self._sums
        size, idx_size = (recorded_bytes(folder, self.meta, path) for path in paths)
        self._map: memoryview | None = None
        if self.io == "mmap" and not sums.in_blocks:
            self._map = mmap_tokens(self.tokens_path, expected_bytes=size, dtype=self._dtype, sums=sums).data
            self.num_tokens = len(self._map)
        else:
            self._file = token_files([(self.tokens_path, size)], sums, io=self.io, dtype=self._dtype)
            self.num_tokens = int(self._file.lengths[0])
        self._starts = load_idx(self.idx_path, num_tokens=self.num_tokens, expected_bytes=idx_size, sums=sums)
        self._examples = len(self._starts)
        self._padding = np.zeros(0, dtype=self._dtype).data
        self._bits: LossBits | None = None
        if self.meta is not None and has_loss_bits(self.meta):
            path = bits_path(folder, self.meta, self.tokens_path.name)
            recorded = recorded_bytes(folder, self.meta, path)
            self._bits = LossBits(path, self.num_tokens, io=self.io, recorded=recorded, sums=sums)

    def _sizes(self) -> str:
        return f"{number_of(len(self), 'example')}, {self.num_tokens:,} tokens"

    def _identity(self) -> dict[str, Any]:
        return {**self.fingerprint(), "examples": self._examples}

    @property
    def _where(self) -> Path:
        return self.tokens_path

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._starts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the token file."""
        return self.num_tokens * self._dtype.itemsize

    @functools.cached_property
    def starts(self) -> Numbers:
        """The first token of each example, and the end of the last one: int64 [N + 1]. In memory from its first use."""
        return np.append(self._starts, np.int64(self.num_tokens))

    @property
    def first_tokens(self) -> Numbers:
        """The first token of each example: int64 [N], the mapped file."""
        return self._starts

    @property
    def has_bits(self) -> bool:
        """Whether loss is in bits beside the tokens; else the sentinels decide."""
        return self._bits is not None

    def bounds(self, examples: Numbers) -> tuple[Numbers, Numbers]:
        """Return the first token of each example, and the one after its last: begins, ends of whole examples."""
        ends = self._starts.take(examples + 1, mode="clip")
        ends[examples == len(self._starts) - 1] = self.num_tokens
        return self._starts[examples], ends

    def will_read(self, begins: Numbers, ends: Numbers) -> None:
        """Say which ranges will be read next, in this order: those of a cache at a URL are fetched ahead."""
        if self.is_fetched:
            files = np.zeros(len(begins), dtype=np.int64)
            self._file.will_read(files, begins, ends)
            if self._bits is not None:
                self._bits.will_read(begins, ends)

    def will_read_all(self) -> None:
        """Say that all tokens will be read next, in order, or where there are loss bits, all of these."""
        if self.is_fetched:
            zero, end = np.zeros(1, dtype=np.int64), np.array([self.num_tokens])
            if self._bits is not None:
                self._bits.will_read(zero, end)
            else:
                self._file.will_read(zero, zero, end)

    def read(self, begins: Numbers, ends: Numbers, pads: Numbers | None = None, pad_id: int = 0) -> Ids:
        """Return the tokens of ranges, end to end: ids [sum]; one range from a map: a read-only view of the file.

        pads: int64 [B], how many pad_id follow each range; None: none.
        Raises: CacheError, naming file and place, for an id outside the vocabulary.
        """
        if len(begins) == 1 and pads is None:
            ids = self.unchecked(int(begins[0]), int(ends[0]))
        else:
            tokens, ranges = self._map, zip(begins.tolist(), ends.tolist(), strict=True)
            parts: list[Any] = [self._part(at, end) if tokens is None else tokens[at:end] for at, end in ranges]
            ids = joined(parts, pads, pad_id, self._dtype)
        wrong = self._outside(ids)
        if wrong is not None:
            stops = np.cumsum(ends - begins + (0 if pads is None else pads))
            part = int(stops.searchsorted(wrong, "right"))
            raise self._refused(int(begins[part]) + wrong - (int(stops[part - 1]) if part else 0), int(ids[wrong]))
        return ids

    def is_target(self, ids: Ids, begins: Numbers, ends: Numbers) -> NDArray[np.bool_]:
        """Return which tokens of ranges carry loss: bool [sum]. ids: from `read`."""
        if self._bits is not None:
            return self._bits.flat(begins, ends)
        opened = self.opened(begins)
        stops = np.cumsum(ends - begins)
        return flat_targets(ids, stops, np.zeros(len(begins), np.bool_) if opened is None else opened, **self.sentinels)

    def masked_ranges(
        self,
        ids: Ids,
        ranges: tuple[Numbers, Numbers, Numbers],
        opened: NDArray[np.bool_] | None,
        cut: Numbers,
    ) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return ids with -100 where they carry no loss, [N] of a signed dtype; and whether last targets carry loss.

        ids: [N] of ranges, with any padding of pad_id after each. ranges: begins and ends, and where in ids each range
        ends. opened: from `opened`. cut: int64 [C], ranges that are asked for their last target, the token after their
        last one: bool [C].
        """
        begins, ends, stops = ranges
        lasts, dtype = stops - 1, signed_dtype(ids.dtype, self.vocab_size)
        signed = ids.view(dtype) if ids.itemsize == dtype.itemsize else ids
        if self._bits is not None:
            after = ends[cut]
            pads = np.diff(stops - (ends - begins), append=len(ids)) - (ends - begins)
            has_loss = self._bits.flat(begins, ends, pads)
            return np.where(has_loss, signed, dtype.type(IGNORE_INDEX)), self._bits.flat(after, after + 1)
        loss, runs = reply_runs_of(ids, stops - (ends - begins), lasts, opened, **self.sentinels)
        masked = np.array((IGNORE_INDEX, np.iinfo(dtype).max), dtype=dtype).take(loss).repeat(runs)
        np.minimum(signed, masked, out=masked)
        last_ids, is_inside = ids[lasts[cut]], masked[lasts[cut]] != IGNORE_INDEX
        has_loss = (is_inside & (last_ids != self.pad_id)) | (last_ids == self.asst_id)
        return masked, has_loss & (self.asst_id != self.pad_id)

    def padded(self, begins: Numbers, ends: Numbers, width: int) -> Ids:
        """Return rows: ids [B, width], each a range of at most `width` tokens, padded with pad_id.

        Raises: CacheError E409, naming file and place, for an id outside the vocabulary.
        """
        tokens, padding = self._map, self._padding
        if len(padding) < width:
            padding = self._padding = np.full(width, self.pad_id, dtype=self._dtype).data
        parts: list[Any] = []
        for at, end in zip(begins.tolist(), ends.tolist(), strict=True):
            parts.append(self._part(at, end) if tokens is None else tokens[at:end])
            if end - at < width:
                parts.append(padding[: width - (end - at)])
        ids = np.frombuffer(bytearray().join(parts), dtype=self._dtype)  # half the time of numpy assignments
        wrong = self._outside(ids)
        if wrong is not None:
            raise self._refused(int(begins[wrong // width]) + wrong % width, int(ids[wrong]))
        return ids.reshape(len(begins), width)

    def masked(
        self, rows: Ids, begins: Numbers, ends: Numbers, *, whole: bool = False, opened: NDArray[np.bool_] | None = None
    ) -> Numbers:
        """Return rows[:, 1:] with -100 where there is no loss: int64 [B, width - 1]. rows: from `padded`.

        whole: every range begins its example, so that nothing before it is looked at. opened: bool [B], whether each
        range begins inside a reply, where that is known already.
        """
        if self._bits is not None:
            y = rows[:, 1:]
            return limited_by_bits(y, self._bits.padded(begins, ends, rows.shape[1]), empty_int64(y.shape))
        return as_int64(masked_targets(rows, *self._runs(rows, begins, ends, whole, opened)))

    def targets(
        self, rows: Ids, begins: Numbers, ends: Numbers, *, whole: bool = False, opened: NDArray[np.bool_] | None = None
    ) -> NDArray[np.bool_]:
        """Return which of rows[:, 1:] carry loss: bool [B, width - 1]. Arguments: see `masked`."""
        if self._bits is not None:
            return unpacked(self._bits.padded(begins, ends, rows.shape[1]), rows.shape[1] - 1)
        has_loss, runs = self._runs(rows, begins, ends, whole, opened)
        return has_loss.repeat(runs).reshape(len(rows), rows.shape[1] - 1)

    def _runs(
        self, rows: Ids, begins: Numbers, ends: Numbers, whole: bool, opened: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.bool_], Numbers]:
        if opened is None and not whole:
            opened = self.opened(begins)
        return reply_runs(rows, ends - begins, opened=opened, **self.sentinels)

    @property
    def sentinels(self) -> dict[str, Any]:
        """The ids that decide what carries loss, without bits: `asst_id` and `eot_id`."""
        assert self.asst_id is not None
        return {"asst_id": self.asst_id, "eot_id": self.pad_id}

    def check_starts(self, first: int, begins: Numbers, ids: Ids | None) -> None:
        """Raise CacheError where examples first, first + 1, ... do not begin like examples: wrong offsets.

        begins: their first tokens. ids: the tokens from begins[0] on, needed only without loss bits.
        With bits no first token carries loss; else it is the sentinel of a role, if the ids of all roles are known.
        """
        if self._bits is not None:
            self._bits.check_starts(begins, first, self.idx_path.name)
        elif self._roles and ids is not None:
            paths = {"tokens_path": self.tokens_path, "idx_path": self.idx_path}
            check_starts(ids[begins - begins[0]], begins, self._roles, first=first, **paths)

    def unchecked(self, begin: int, end: int) -> Ids:
        """Return tokens begin to end - 1, not compared with the vocabulary; of a map, as a read-only view."""
        if self._map is not None:
            return np.frombuffer(self._map[begin:end], dtype=self._dtype)
        ids: Ids = self._file.gather(np.zeros(1, np.int64), np.array([begin]), end - begin)[0]
        return ids

    def _part(self, begin: int, end: int) -> Any:
        return self.unchecked(begin, end) if self._map is None else self._map[begin:end]

    def opened(self, begins: Numbers, firsts: Numbers | None = None) -> NDArray[np.bool_] | None:
        """Return whether each range begins inside a reply, by the sentinels before it; None: no range does.

        firsts: the first token of the example of each range, if it is known: int64 [B].

        That is whether the latest sentinel before it is the assistant's. The ranges look back together, further each
        time, until each has found one or is at the beginning of its example.
        """
        if firsts is None:
            firsts = self._starts.take(self._starts.searchsorted(begins, "right") - 1)
        (left,) = (begins > firsts).nonzero()
        if not len(left):
            return None
        opened = np.zeros(len(begins), dtype=np.bool_)
        if self.asst_id == self.pad_id:  # one id for both opens nothing
            return opened
        at, firsts = begins[left], firsts[left]
        while len(left):
            width = min(1 + _LOOK_BACK // len(left), int((at - firsts).max()))
            starts = np.maximum(at - width, firsts)
            ids = self.padded(starts, at, width).reshape(-1)
            sentinels = ((ids == self.asst_id) | (ids == self.pad_id)).nonzero()[0]
            rows = np.arange(0, len(ids), width)
            latest = sentinels.searchsorted(rows + at - starts) - 1  # before the padding, which is of pad_id
            found = (latest >= 0) & (sentinels.take(latest, mode="clip") >= rows) if len(sentinels) else rows < 0
            opened[left[found]] = ids[sentinels[latest[found]]] == self.asst_id
            further = ~found & (starts > firsts)
            left, at, firsts = left[further], starts[further], firsts[further]
        return opened

    def _outside(self, ids: Ids) -> int | None:
        """Return the place of an id that is not of the vocabulary; None where all are."""
        limit = id_limit(self.vocab_size, ids)
        if limit is None or not ids.size or ids.item(ids.argmax()) < limit:  # in half the time of numpy's max
            return None
        return int((ids >= limit).argmax())

    def _refused(self, token: int, id: int) -> CacheError:
        return outside_vocabulary(self.tokens_path, token, self._dtype.itemsize, id, self.vocab_size)


def files_of(cache_dir: str | os.PathLike[str], split: str | None) -> tuple[Path, Path, int]:
    """Return the token file and the offsets of a split of an sft cache, and the id that pads its rows.

    Takes the arguments of `SFTSplit` and raises its errors.
    """
    folder, name = named_cache(cache_dir, split)
    meta = reader_meta(folder, "sft")
    pad_id = meta["pad_id"] if meta is not None and has_loss_bits(meta) else special_id(folder, meta, "eot")
    return folder / f"{name}_tokens.bin", folder / f"{name}_idx.npy", pad_id


def _resolved_together(tokens_path: Path, idx_path: Path) -> tuple[Path, Path]:
    """Resolve the folder of two files once, so that a commit in between cannot mix two versions.

    The files are not resolved: a link is refused when it is opened. ~ is the home folder.
    """
    tokens_path, idx_path = (Path(os.path.expanduser(path)) for path in (tokens_path, idx_path))
    folder = resolved(tokens_path.parent)
    beside = folder if tokens_path.parent == idx_path.parent else resolved(idx_path.parent)
    return folder / tokens_path.name, beside / idx_path.name
