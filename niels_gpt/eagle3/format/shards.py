"""The shards of a cache of either form: checks them, maps them when first read, compares them with receipts.

DenseShards (versions 1 and 2): sample i is row i % shard_size of shard i // shard_size; every row has seq_length slots.
NativeShards: samples of any length. Opening compares header, starts and loss bits of each shard with each other and
with the manifest, so every count is true before a state is read, whatever size a file claims.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from niels_gpt.cache.checksums import Check, checked_check
from niels_gpt.eagle3.format.fetched import Fetched, Span
from niels_gpt.eagle3.format.layout import (
    DTYPES,
    FULL_FIELDS,
    INT_FIELDS,
    MANIFEST_NAME,
    TOPK_FIELDS,
    Fields,
    Layout,
    PathLike,
    Tensors,
    form_text,
    read_header,
    row_bytes_of,
    rows_of_equal_number,
    shard_path,
    tensors_header,
)
from niels_gpt.eagle3.format.manifest import (
    PRODUCE_AGAIN,
    check_shard_indices,
    is_compressed,
    is_native,
    layout_of,
    load_safetensors,
    manifest_path,
    number_in,
    read_manifest,
)
from niels_gpt.eagle3.format.meta import compare_once, compared, key_of, version_of
from niels_gpt.eagle3.format.native import (
    ENDS,
    ROW_TENSORS,
    STARTS,
    Counts,
    MappedShard,
    NativeLayout,
    NativeSample,
)
from niels_gpt.eagle3.format.shard_writer import (
    bytes_of,
    read_receipt,
    receipt_path,
    row_damage,
    sample_digest,
)
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks import hold_version
from niels_gpt.storage.meta_json import shortened
from niels_gpt.storage.mounted import MOUNTED

COMMON_FIELDS = ("aux_hidden_states", *INT_FIELDS, "position_mask")
Damage = list[tuple[int | None, str]]
"""Each damage: row in the shard, or None, and a sentence."""
Mapped = TypeVar("Mapped")
_MOST_RECEIPTS = 16
_AGAIN = "Remove the shard and produce it again: precompute --resume"


class Shards(ABC, Generic[Mapped]):
    """The shards of one cache. May be pickled; each process makes its own maps, and threads may share it."""

    num_samples: int
    num_shards: int
    shard_size: int | None = None
    """Samples in a shard, fewer in the last one; None if shards are cut by bytes."""
    compressed = False
    """Whether distributions are stored as top-k."""

    def __init__(
        self,
        cache_dir: PathLike,
        manifest: dict[str, Any],
        *,
        max_open: int = 1024,
        follow_links: bool = False,
        exact: bool = False,
    ) -> None:
        """Take the shards of a folder without reading a file; `of_cache` opens a whole cache.

        manifest: from `read_manifest`. max_open: maximum number of mapped shards. follow_links: see `open_file`.
        exact: refuse dense manifests that lack keys, and tensors that they do not declare; caches of other tools may
            have both.
        Raises: ValueError for max_open < 1; CacheError naming a number that the manifest lacks.
        """
        if max_open < 1:
            raise ValueError(f"max_open_shards={max_open}: expected 1 or more")
        self.cache_dir, self.manifest = os.fspath(cache_dir), manifest
        self.follow_links, self.exact, self._max_open = follow_links, exact, max_open
        self._check: Check | None = None  # of an open cache
        self._hold: object = None
        self._fetched: Fetched | None = None  # of an open cache at a URL
        self._receipts: dict[int, dict[str, Any] | None] = {}  # of shards whose samples are compared
        self._seen: dict[int, bytearray] = {}  # of each shard: a byte for each sample that was compared
        self._open: dict[int, Mapped] = {}
        self._pid = os.getpid()

    @classmethod
    def of_cache(
        cls, cache_dir: PathLike, max_open: int = 1024, *, follow_links: bool = False, check: Check = "ends"
    ) -> Self:
        """Open a cache for training: all shards are there, and each fits the manifest. gc keeps an open cache.

        check: "ends": compare a shard's size and header with its receipt when this process first maps it; "blocks":
            also each sample when it is first read.
        Raises: FileNotFoundError; CacheError (a ValueError) naming a file that does not fit the manifest; ImportError
            without safetensors; ValueError for another check or max_open < 1.
        """
        checked_check(check)
        cache_dir = version_of(cache_dir)  # once: a commit may come in between
        hold = hold_version(Path(cache_dir))
        compare_once(cache_dir, MANIFEST_NAME, follow_links=follow_links)
        shards = cls(
            cache_dir, read_manifest(cache_dir, follow_links=follow_links), max_open=max_open, follow_links=follow_links
        )
        shards._check, shards._hold = check, hold
        if (mount := MOUNTED.get(os.fspath(cache_dir))) is not None:
            shards._fetched = Fetched(mount)
        check_shard_indices(cache_dir, shards.num_samples, shards.num_shards)
        shards._check_all()
        return shards

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_receipts": {}}

    def _ranged(self, shard: int) -> Fetched | None:
        """Return what reads a shard by ranges; None for one on a disk, and one without a receipt, which comes whole."""
        fetched = self._fetched
        return fetched if fetched is not None and receipt_path("", shard).as_posix() in fetched.mount.records else None

    def will_read(self, numbers: Sequence[int], least: int) -> int:
        """Say that samples are read next, in this order, so that those at a URL are fetched ahead.

        least: as many as are read now. Returns: the number of samples that are fetched ahead.
        """
        if self._fetched is None:
            return len(numbers)
        most = len(self._receipts) + _MOST_RECEIPTS  # the batch waits while they arrive
        enough = lambda: len(self._receipts) >= most  # noqa: E731
        return self._fetched.will_read(self, numbers, least, lambda number: self._spans_of(*self.place(number)), enough)

    def _spans_of(self, shard: int, row: int) -> tuple[int, list[Span]]:
        spans = self._placed(shard, row)[0].values() if self._ranged(shard) else []
        return shard, [span for span in spans if span[0] < span[1]]

    def _arrived(self, number: int) -> Mapped:
        """Return one sample of a shard at a URL, compared with its receipt. Raises: CacheError E611."""
        shard, row = self.place(number)
        fetched, (slots, digest) = self._fetched, self._stated_in_receipt(shard, row)
        assert fetched is not None
        spans, forms = self._placed(shard, row)
        return fetched.compared(
            shard,
            row,
            lambda: self._one(shard, row, fetched.tensors(number, shard, spans, forms)),
            lambda one: self._row_damage(one, 0, slots, digest)[0],
            [*spans.values()],
        )

    def _stated_in_receipt(self, shard: int, row: int) -> tuple[int, str]:
        """Return slots and checksum of a sample of a shard at a URL; its receipt arrives. Raises: CacheError."""
        receipt = self._receipts.get(shard)
        if receipt is None:
            assert self._fetched is not None
            self._fetched.twice(shard, lambda: self.opened(shard))  # compares the header
            receipt = self._receipts[shard] = self._receipt(shard) or self._receipt(shard)
        if receipt is None:  # another process needs all of the folder
            raise CacheError(receipt_path(self.cache_dir, shard), "removed again while it was read", code="E210")
        if row >= receipt["samples"]:
            where, found = receipt_path(self.cache_dir, shard), f"{receipt['samples']} samples"
            raise CacheError(where, found, f"sample {row} of the shard too", code="E701")
        return receipt["slots"][row], receipt["xxh3_128"][row]

    @abstractmethod
    def place(self, index: int) -> tuple[int, int]:
        """Return the shard of a sample, and its row in it. Raises: IndexError, also for a negative index."""

    @abstractmethod
    def _placed(self, shard: int, row: int) -> tuple[Mapping[str, Span], Tensors]:
        """Return where the tensors of a sample lie in a shard at a URL, and their forms. Zeros after a part are left
        out."""

    @abstractmethod
    def _one(self, shard: int, row: int, tensors: dict[str, torch.Tensor]) -> Mapped:
        """Return these tensors of a sample as a shard of one sample."""

    def opened(self, shard: int) -> Mapped:
        """Return a shard, mapped in this process. Raises: CacheError for its first deviation from the manifest."""
        if self._pid != os.getpid():  # a forked worker
            self._open, self._pid = {}, os.getpid()
        mapped = self._open.get(shard)
        if mapped is None:
            mapped, header = self._map(shard)  # checked again: it may have been replaced since
            if self._check is not None:
                self._check_header(shard, header)
            self._open[shard] = mapped
            while len(self._open) > self._max_open:
                with suppress(KeyError, RuntimeError, StopIteration):  # another thread was faster
                    del self._open[next(iter(self._open))]  # views in use keep their map
        return mapped

    def damage(self, shard: int, progress: Callable[[int], None] | None = None) -> Damage:
        """Compare a shard with its receipt and return its damage. Reads the whole shard, one sample at a time.

        progress: called with the bytes of each sample.
        Raises: CacheError if the receipt is missing or damaged.
        """
        path, its_receipt = shard_path(self.cache_dir, shard), receipt_path(self.cache_dir, shard)
        receipt = read_receipt(self.cache_dir, shard, follow_links=self.follow_links)
        if receipt is None:
            raise CacheError(its_receipt, "no such file: the shard has no checksums", code="E702")
        try:
            mapped, header, samples = self._unchecked(shard)
        except FileNotFoundError:
            return [(None, f"{path}: no such file")]
        except CacheError as error:
            return [(None, str(error))]
        if hashlib.sha256(header).hexdigest() != receipt["header_sha256"] or samples != receipt["samples"]:
            return [(None, f"{path}: its header is not the one that was written, by {its_receipt}")]
        damage: Damage = []
        for row in range(samples):
            what, size = self._row_damage(mapped, row, receipt["slots"][row], receipt["xxh3_128"][row])
            if what:
                damage.append((row, f"{path}: sample {row} of the shard: {what}, by {its_receipt}"))
            if progress is not None:
                progress(size)
        return damage

    def _check_header(self, shard: int, header: bytes) -> None:
        """Compare a shard's size and header with its receipt, once a process. Raises: CacheError."""
        path = shard_path(self.cache_dir, shard)
        if (fetched := self._ranged(shard)) is not None:
            size, key = fetched.size(shard), None
        else:
            about = os.stat(path)
            size, key = about.st_size, key_of(about)
        if key in compared or (receipt := self._receipt(shard)) is None:
            return
        by = f"by {receipt_path(self.cache_dir, shard)}"
        if size != receipt["bytes"]:
            raise CacheError(path, f"{size} bytes", f"{receipt['bytes']} {by}", _AGAIN, code="E701")
        if hashlib.sha256(header).hexdigest() != receipt["header_sha256"]:
            found = f"bytes 0 to {len(header)}, its header, are not those that were written, {by}"
            raise CacheError(path, found, remedy=_AGAIN, code="E701")
        if key is not None:
            compared.add(key)

    def _receipt(self, shard: int) -> dict[str, Any] | None:
        """Return a shard's receipt; None without one. Raises: CacheError if meta.json names another one."""
        receipt = read_receipt(self.cache_dir, shard, follow_links=self.follow_links)
        if receipt is not None:
            name = receipt_path("", shard).as_posix()
            compare_once(self.cache_dir, name, follow_links=self.follow_links, remedy=_AGAIN)
        return receipt

    def _compare(self, shard: int, row: int, mapped: Mapped) -> None:
        """Compare a sample with its receipt on its first read; without a receipt do nothing. Raises: CacheError."""
        if shard not in self._receipts:
            self._receipts[shard] = self._receipt(shard)
        if (receipt := self._receipts[shard]) is None:
            return
        seen = self._seen.setdefault(shard, bytearray(receipt["samples"]))
        if row < len(seen) and seen[row]:
            return
        where = receipt_path(self.cache_dir, shard)
        if row >= len(seen):
            raise CacheError(where, f"{len(seen)} samples", f"sample {row} of the shard too", _AGAIN, code="E701")
        wrong, _ = self._row_damage(mapped, row, receipt["slots"][row], receipt["xxh3_128"][row])
        if wrong:
            found = f"sample {row} of the shard: {wrong}, by {where}"
            raise CacheError(shard_path(self.cache_dir, shard), found, remedy=_AGAIN, code="E701")
        seen[row] = 1

    def stated_rows(self, shard: int) -> int:
        """Return the number of samples in a shard by its own header. Raises: FileNotFoundError; CacheError."""
        return self._unchecked(shard)[2]

    @abstractmethod
    def first_of(self, shard: int) -> int:
        """Return the number of a shard's first sample."""

    @abstractmethod
    def rows_of(self, shard: int) -> int:
        """Return how many samples a shard must have."""

    def wrong_form(self, shard: int) -> Iterator[CacheError]:
        """Yield the deviations of a shard's file from the manifest. Raises: FileNotFoundError."""
        try:
            self._map(shard)
        except CacheError as error:
            yield error

    @abstractmethod
    def spans(self, shard: int, row: int) -> list[tuple[int, int]]:
        """Return the byte ranges [start, end) of a sample in its shard, one for each tensor, starts included.

        Raises: CacheError.
        """

    @abstractmethod
    def _check_all(self) -> None:
        """Compare all shards with the manifest. Raises: CacheError."""

    @abstractmethod
    def _map(self, shard: int) -> tuple[Mapped, bytes]:
        """Map a shard that fits the manifest; return it and its header bytes. Raises: CacheError."""

    @abstractmethod
    def _unchecked(self, shard: int) -> tuple[Mapped, bytes, int]:
        """Map a shard by its own header; return it, the header bytes and its number of samples."""

    @abstractmethod
    def _row_damage(self, mapped: Mapped, row: int, slots: int, digest: str) -> tuple[str, int]:
        """Compare a sample with its receipt entries; return the damage, "" for none, and the sample's bytes."""


def shards_of(cache_dir: PathLike, manifest: dict[str, Any], **how: Any) -> DenseShards | NativeShards:
    """Return the shards of a cache of either form. how: keyword arguments of `Shards`."""
    return (NativeShards if is_native(manifest) else DenseShards)(cache_dir, manifest, **how)


# --- versions 1 and 2 -------------------------------------------------------------------------------------------------

DenseShard = tuple[Any, dict[str, torch.Tensor]]
"""A mapped shard: safetensors' handle, and its tensors [n, S, ...] as views."""
_Declared = dict[str, tuple[torch.dtype | None, tuple[int | None, ...]]]


class DenseShards(Shards[DenseShard]):
    """The shards of a cache of version 1 or 2."""

    shard_size: int

    def __init__(self, cache_dir: PathLike, manifest: dict[str, Any], **how: Any) -> None:
        """how: keyword arguments of `Shards`. Raises: ImportError without safetensors."""
        load_safetensors()  # ImportError here, and not at the first sample
        super().__init__(cache_dir, manifest, **how)
        self.shard_size = number_in(manifest, "shard_size", cache_dir, 1)
        self.num_samples = number_in(manifest, "num_samples", cache_dir)
        self.num_shards = -(-self.num_samples // self.shard_size)
        topk = manifest.get("target_probs_topk") if manifest["format_version"] == 2 else None
        self.compressed = bool(topk) and is_compressed(topk, number_in(manifest, "draft_vocab_size", cache_dir))
        self._keys = COMMON_FIELDS + (TOPK_FIELDS if self.compressed else FULL_FIELDS)
        self._fields: Fields = {}  # of the first shard, which the others must have too

    @cached_property
    def layout(self) -> Layout:
        """Layout of a shard. Raises: CacheError naming a key that the manifest lacks."""
        return layout_of(self.manifest, self.cache_dir)

    def first_of(self, shard: int) -> int:
        return shard * self.shard_size

    def rows_of(self, shard: int) -> int:
        return min(self.shard_size, self.num_samples - shard * self.shard_size)

    def place(self, index: int) -> tuple[int, int]:
        return divmod(index, self.shard_size)

    def row(self, shard: int, row: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a sample, as views of its shard; of one at a URL in memory of their own.

        Raises: CacheError for a shard that does not fit the manifest, or, with check "blocks", a damaged sample.
        """
        if self._ranged(shard):
            tables = self._arrived(self.first_of(shard) + row)[1]
            return {name: tables[name][0] for name in self._keys}
        mapped = self.opened(shard)
        if self._check == "blocks":
            handle, tables = mapped
            whole = {name: tables[name] if name in tables else handle.get_tensor(name) for name in self._fields}
            self._compare(shard, row, (handle, whole))
        return {name: table[row] for name, table in mapped[1].items()}

    def wrong_form(self, shard: int) -> Iterator[CacheError]:
        """Yield the deviations of the header; tensors are not mapped."""
        try:
            yield from self._header(shard)[1]
        except CacheError as error:
            yield error

    def _header(self, shard: int) -> tuple[bytes, list[CacheError]]:
        """Return a shard's header bytes and its deviations.

        Raises: FileNotFoundError; CacheError for a damaged header.
        """
        path, wrong = shard_path(self.cache_dir, shard), []
        fields, rows, header = self._stated(shard)
        if rows != (expected := self.rows_of(shard)):
            samples = f"{expected} of the manifest's {self.num_samples}"
            wrong.append(CacheError(path, f"{rows} samples", samples, code="E701"))
        if fields != self._fields:
            declared: _Declared = dict(self._fields) or self._declared(fields)
            by = "as in shard 0" if self._fields else f"by {MANIFEST_NAME}"
            for name in sorted({*fields, *declared} if self.exact or self._fields else declared):
                if not _fits(fields.get(name), declared.get(name)):
                    found = f"{name if name in declared else shortened(name)} is {form_text(fields.get(name))}"
                    wrong.append(CacheError(path, found, f"{form_text(declared.get(name))} {by}", code="E701"))
        if not wrong and not self.exact:
            self._fields = fields
        return header, wrong

    def _stated(self, shard: int) -> tuple[Fields, int, bytes]:
        """Return the same as `read_header`. Raises: FileNotFoundError; CacheError for a damaged header."""
        path = shard_path(self.cache_dir, shard)
        if (fetched := self._ranged(shard)) is None:
            return read_header(path, follow_links=self.follow_links)
        tensors, header = fetched.header(path, shard)
        return *rows_of_equal_number(path, tensors), header

    def _declared(self, fields: Fields) -> _Declared:
        """Return the fields that the manifest declares; None stands for a size or dtype that it lacks."""
        if self.exact:
            return dict(self.layout.fields)
        manifest = self.manifest
        slots, vocab = manifest.get("seq_length"), manifest.get("draft_vocab_size")
        number = DTYPES.get(manifest["dtype"]) if "dtype" in manifest else fields.get("aux_hidden_states", (None,))[0]
        width = manifest.get("target_probs_topk") if self.compressed else vocab
        return {
            **{key: (torch.int64, (slots,)) for key in INT_FIELDS},
            "aux_hidden_states": (number, (slots, manifest.get("aux_hidden_dim"))),
            "position_mask": (torch.bool, (slots, 1)),
            **{key: (torch.int32 if key == TOPK_FIELDS[1] else number, (slots, width)) for key in self._keys[5:]},
        }

    def spans(self, shard: int, row: int) -> list[tuple[int, int]]:
        """Compute the ranges from the header: rows have equal sizes."""
        fields, rows, header = read_header(shard_path(self.cache_dir, shard), follow_links=self.follow_links)
        sizes = [row_bytes_of(field) for field in fields.values()]
        begins = [len(header) + rows * before for before in accumulate(sizes, initial=0)]
        return [(begin + row * size, begin + (row + 1) * size) for begin, size in zip(begins, sizes, strict=False)]

    def _check_all(self) -> None:
        """Compare the headers of all shards, and the vocabulary that decides the width of items."""
        size, selected = self.manifest.get("draft_vocab_size"), self.manifest.get("selected_token_ids")
        if self.compressed and selected is not None and len(selected) != size:
            found, expected = f"draft_vocab_size is {size}", f"{len(selected)}, the length of selected_token_ids"
            raise CacheError(manifest_path(self.cache_dir), found, expected, code="E701")
        if self._fetched is None:
            for shard in range(self.num_shards):
                self._fitting(shard)
        elif self.num_shards:
            self._fetched.twice(0, lambda: self._fitting(0))  # its fields are those of all
            self._fetched.each(self.num_shards, self._fitting)

    def _fitting(self, shard: int) -> bytes:
        """Return a shard's header bytes. Raises: CacheError for its first deviation from the manifest."""
        header, wrong = self._header(shard)
        if wrong:
            raise wrong[0]
        return header

    def _map(self, shard: int) -> tuple[DenseShard, bytes]:
        header = self._fitting(shard)
        return ((None, {}) if self._ranged(shard) else self._tables(shard, self._keys)), header

    def _placed(self, shard: int, row: int) -> tuple[Mapping[str, Span], Tensors]:
        fields, rows, header = self._stated(shard)
        slots, _ = self._stated_in_receipt(shard, row)
        spans, begin = {}, len(header)
        for name, field in fields.items():
            if not any(field[1][:1]):  # of another tool
                where = shard_path(self.cache_dir, shard)
                raise CacheError(
                    where, f"{shortened(name)} has no slots", "some, as a receipt states them", code="E701"
                )
            size, all_slots = row_bytes_of(field), field[1][0]
            used = all_slots if name in INT_FIELDS else min(slots, all_slots)  # of the others only these are not zero
            spans[name] = begin + row * size, begin + row * size + size // all_slots * used
            begin += rows * size
        return spans, {name: (dtype, (1, *shape)) for name, (dtype, shape) in fields.items()}

    def _one(self, shard: int, row: int, tensors: dict[str, torch.Tensor]) -> DenseShard:
        return None, tensors

    def _unchecked(self, shard: int) -> tuple[DenseShard, bytes, int]:
        fields, rows, header = read_header(shard_path(self.cache_dir, shard), follow_links=self.follow_links)
        return self._tables(shard, fields), header, rows

    def _tables(self, shard: int, names: Iterable[str]) -> DenseShard:
        from safetensors import SafetensorError

        path = shard_path(self.cache_dir, shard)
        try:
            handle = load_safetensors()[1](path, framework="pt")
            return handle, {name: handle.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise CacheError(path, f"safetensors cannot read it: {error}", code="E701") from error

    def _row_damage(self, mapped: DenseShard, row: int, slots: int, digest: str) -> tuple[str, int]:
        tensors = {name: table[row] for name, table in mapped[1].items()}
        return row_damage(tensors, slots, digest), sum(tensor.nbytes for tensor in tensors.values())


def _fits(
    form: tuple[torch.dtype, tuple[int, ...]] | None, declared: tuple[torch.dtype | None, tuple[int | None, ...]] | None
) -> bool:
    """Return whether a field has its declared form; None fits any size."""
    if form is None or declared is None:
        return form is declared
    same = len(form[1]) == len(declared[1]) and all(b in (None, a) for a, b in zip(form[1], declared[1], strict=True))
    return same and form[0] == declared[0]


# --- the native form --------------------------------------------------------------------------------------------------


class NativeShards(Shards[MappedShard]):
    """The shards of a native cache."""

    firsts: list[int]
    """First sample of each shard, and the number of samples at the end. Set by opening the cache, or by a caller who
    knows it from the plan; every shard must then agree."""
    counts: Counts
    """Tokens, auxiliary rows and target rows of each sample of an open cache: int64 [n, 3]."""

    def __init__(self, cache_dir: PathLike, manifest: dict[str, Any], **how: Any) -> None:
        """how: keyword arguments of `Shards`. Raises: CacheError E208 for a cache of another form."""
        super().__init__(cache_dir, manifest, **how)
        if not is_native(manifest):
            found = f"format_version={manifest['format_version']}"
            remedy = "Read it with CachedEagle3Dataset, or convert it: python -m niels_gpt.eagle3 convert"
            raise CacheError(manifest_path(cache_dir), found, "a cache in the native form", remedy, code="E208")
        self.layout: NativeLayout = NativeLayout.of(manifest)
        self.num_samples, self.num_shards = manifest["num_samples"], manifest["num_shards"]
        self.firsts, self.counts = [], np.zeros((0, 3), np.int64)

    def first_of(self, shard: int) -> int:
        return self.firsts[shard]

    def rows_of(self, shard: int) -> int:
        return self.firsts[shard + 1] - self.firsts[shard]

    def place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        shard = bisect_right(self.firsts, index) - 1
        return shard, index - self.firsts[shard]

    def sample(self, index: int) -> NativeSample:
        """Return a sample; its tensors are views of the map. Raises: IndexError; CacheError."""
        shard, row = self.place(index)
        if self._ranged(shard):
            return self._arrived(index).sample(0)
        mapped = self.opened(shard)
        if self._check == "blocks":
            self._compare(shard, row, mapped)
        return mapped.sample(row)

    def positions(self, selected_token_ids: Sequence[int]) -> int:
        """Count the supervised target rows whose most probable token is in the draft's vocabulary, over all shards.

        Raises: CacheError for a shard that does not fit the manifest, or an id beyond the target's vocabulary.
        """
        vocab_size, count = self.manifest["target_vocab_size"], 0
        in_draft = np.zeros(vocab_size, np.bool_)
        in_draft[[*selected_token_ids]] = True
        for shard in range(self.num_shards):
            mapped = self.opened(shard)
            argmax = mapped.tensors["argmax_ids"].numpy()
            if int(argmax.max(initial=0)) >= vocab_size:
                found = f"argmax_ids up to {argmax.max(initial=0)}"
                raise CacheError(shard_path(self.cache_dir, shard), found, f"ids below {vocab_size}", code="E701")
            count += int((mapped.with_loss & in_draft[argmax]).sum())
        return count

    def spans(self, shard: int, row: int) -> list[tuple[int, int]]:
        """Read the ranges from the starts; tensors without rows of the sample are left out."""
        mapped = self._unchecked(shard)[0]
        begins, ends = mapped.starts[row : row + 2].tolist()
        rows = {name: slice(begins[which], ends[which]) for name, which in ROW_TENSORS.items()}
        rows |= {"loss_bits": slice(begins[0] // 8, -(-ends[0] // 8)), **dict.fromkeys(STARTS, slice(row, row + 2))}
        parts = [tensor[rows[name]] for name, tensor in mapped.tensors.items()]
        begins = [part.storage_offset() * part.element_size() for part in parts]
        return [(begin, begin + part.nbytes) for begin, part in zip(begins, parts, strict=True) if part.numel()]

    def damage(self, shard: int, progress: Callable[[int], None] | None = None) -> Damage:
        """Compare the samples, then the loss bits after the last token, which belong to no sample."""
        damage = super().damage(shard, progress)  # loss bits after the last token are in no sample
        if not damage and self._unchecked(shard)[0].has_odd_bits:
            path = shard_path(self.cache_dir, shard)
            damage.append((None, f"{path}: its loss bits after the last token are damaged"))
        return damage

    def _check_all(self) -> None:
        each = self._fetched.each if self._fetched is not None else lambda shards, read: [*map(read, range(shards))]
        counts = each(self.num_shards, lambda shard: self._map(shard)[0].counts)
        firsts = [0, *accumulate(map(len, counts))]
        if firsts[-1] != self.num_samples:
            found = f"{firsts[-1]:,} samples in {self.num_shards:,} shards"
            raise CacheError(self.cache_dir, found, f"the manifest's {self.num_samples:,}", PRODUCE_AGAIN, code="E701")
        self.firsts, self.counts = firsts, np.concatenate([self.counts, *counts])

    def _placed(self, shard: int, row: int) -> tuple[Mapping[str, Span], Tensors]:
        return self.opened(shard).placed(row)

    def _one(self, shard: int, row: int, tensors: dict[str, torch.Tensor]) -> MappedShard:
        return self.opened(shard).one(row, tensors)

    def _map(self, shard: int) -> tuple[MappedShard, bytes]:
        path = shard_path(self.cache_dir, shard)
        if (fetched := self._ranged(shard)) is not None and len(self.counts):
            first, behind = self.firsts[shard : shard + 2]
            mapped = MappedShard.of_counts(self.layout, self.counts[first:behind])  # as opening found it
            return mapped, tensors_header(self.layout.fields(self.counts[first:behind]))
        mapped, header, samples = self._unchecked(shard) if fetched is None else self._begun(shard, fetched)
        mapped.check(path, self.manifest["seq_length"])
        if self.firsts and samples != self.rows_of(shard):
            expected = f"{self.rows_of(shard)} of the manifest's {self.num_samples}"
            raise CacheError(path, f"{samples} samples", expected, code="E701")
        if len(self.counts):
            first, behind = self.firsts[shard : shard + 2]
            if not np.array_equal(mapped.counts, self.counts[first:behind]):
                raise CacheError(path, "other samples than when the cache was opened", "the same", code="E701")
        return mapped, header

    def _begun(self, shard: int, fetched: Fetched) -> tuple[MappedShard, bytes, int]:
        """Return the same as `_unchecked` of a shard at a URL, with starts and loss bits alone."""
        path, begin = shard_path(self.cache_dir, shard), fetched.begin_of(shard)
        tensors, header = fetched.header(path, shard, begin)
        read = partial(fetched.bytes_of, shard, begin)
        mapped = MappedShard.of_ends(path, self.layout, tensors, header, read)
        return mapped, header, len(mapped)

    def _unchecked(self, shard: int) -> tuple[MappedShard, bytes, int]:
        path = shard_path(self.cache_dir, shard)
        mapped, header = MappedShard.of(path, self.layout, follow_links=self.follow_links)
        return mapped, header, len(mapped)

    def _row_damage(self, mapped: MappedShard, row: int, slots: int, digest: str) -> tuple[str, int]:
        begins, ends = mapped.starts[row], mapped.starts[row + 1]
        if bool((begins < 0).any() or (ends < begins).any() or (ends > [len(mapped.tensors[n]) for n in ENDS]).any()):
            return "its starts are damaged", 0
        pieces = {
            name: bytes_of(mapped.tensors[name][begins[which] : ends[which]])
            for name, which in ROW_TENSORS.items()
            if name in mapped.tensors
        }
        loss = mapped.loss_mask(int(begins[0]), int(ends[0])).view(np.uint8)
        same = sample_digest(ends - begins, loss, pieces) == digest
        what = "" if same else "its bytes do not give the checksum in its receipt"
        return what, sum(piece.size for piece in pieces.values())
