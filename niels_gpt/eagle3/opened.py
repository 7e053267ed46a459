"""A cache as the checks are given it: whose it is, what belongs there, and what to do about what is missing.

A cache is this project's if it has a sidecar/ or a meta.json of kind eagle3. The producer's has a plan; one that was
written by `write_shard` and `write_manifest` alone has receipts, and no plan. Only a folder with none of these is
another tool's: what needs a sidecar or a plan cannot be checked there, which `NotChecked` says.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from niels_gpt.eagle3.cache_folder import EMBEDDINGS_RECEIPT
from niels_gpt.eagle3.layout import SIDECAR, Layout, read_header, read_meta_bytes, shard_path
from niels_gpt.eagle3.manifest import (
    MANIFEST_NAME,
    existing_shard_indices,
    layout_of,
    load_safetensors,
    number_in,
    read_manifest,
)
from niels_gpt.eagle3.plan import BATCHES_NAME, PLAN_NAME, read_record
from niels_gpt.eagle3.positions import Counts
from niels_gpt.eagle3.row_checks import Row
from niels_gpt.eagle3.samples import IDS_NAME, SAMPLES_NAME, Samples
from niels_gpt.eagle3.shards import read_receipt, receipt_path
from niels_gpt.fileio import CacheError
from niels_gpt.records import parse_object, shortened

PLANNED = (PLAN_NAME, SAMPLES_NAME, IDS_NAME, BATCHES_NAME, EMBEDDINGS_RECEIPT)
"""What the producer keeps in sidecar/ beside the receipts."""
FOREIGN = "cannot be checked: no sidecar, as in caches that other tools wrote"
_WITHOUT_PLAN = "cannot be checked: no plan, as in caches that write_shard wrote"
_RESUME = "run the same precompute command with --resume"
_R = TypeVar("_R")


class NotChecked(Exception):
    """A check cannot be made of this cache, which is no damage; the text says why."""


@dataclass(frozen=True)
class Opened:
    """A cache whose manifest can be read. What is worked out from it raises CacheError where the manifest is wrong."""

    folder: Path
    """Without links, so that all checks look at one version."""
    manifest: dict[str, Any]
    tick: Callable[[int], None] = field(repr=False)
    """Is told bytes that were looked at."""
    follow_links: bool = False
    """Whether files may be links, as in a snapshot of the Hugging Face hub."""

    @cached_property
    def layout(self) -> Layout:
        """The form of the shards."""
        return layout_of(self.manifest, self.folder)

    @cached_property
    def num_samples(self) -> int:
        """Of the whole cache."""
        return number_in(self.manifest, "num_samples", self.folder)

    @cached_property
    def shard_size(self) -> int:
        """Samples of a shard; the last one may have fewer."""
        return number_in(self.manifest, "shard_size", self.folder, 1)

    @property
    def num_shards(self) -> int:
        """As there should be."""
        return -(-self.num_samples // self.shard_size)

    @cached_property
    def shards(self) -> list[int]:
        """The shards that there should be and are."""
        return sorted(index for index in existing_shard_indices(self.folder) if index < self.num_shards)

    @cached_property
    def is_ours(self) -> bool:
        """Whether this project wrote the cache: its shards have receipts."""
        return os.path.lexists(self.folder / SIDECAR) or self._has_meta

    @cached_property
    def is_planned(self) -> bool:
        """Whether this project's producer made the cache. A receipt tells it where all else is gone."""
        if self._has_meta or any(os.path.lexists(self.folder / SIDECAR / name) for name in PLANNED):
            return True
        return any(self._names_a_plan(shard) for shard in self.shards)

    @cached_property
    def _has_meta(self) -> bool:
        """Whether there is a meta.json of kind eagle3, or one that cannot be read."""
        try:
            raw = read_meta_bytes(self.folder, follow_links=self.follow_links)
            return bool(parse_object(raw).get("kind") == "eagle3")
        except FileNotFoundError:
            return False
        except (ValueError, OSError):
            return True

    def _names_a_plan(self, shard: int) -> bool:
        try:
            receipt = self.receipt(shard)
        except (CacheError, OSError):
            return False  # which is told by the check of the checksums
        return receipt is not None and "plan" in receipt["facts"]

    @property
    def plan(self) -> dict[str, Any]:
        """What plan.json says. Raises: NotChecked in a cache without a plan; CacheError where it is gone or damaged."""
        return _given(self._plan)

    @property
    def samples(self) -> Samples:
        """The source's rows. Raises: as `plan`."""
        return _given(self._samples)

    # What failed once is not tried again for each of a million rows.
    @cached_property
    def _plan(self) -> dict[str, Any] | Exception:
        return _tried(self._read_plan)

    @cached_property
    def _samples(self) -> Samples | Exception:
        return _tried(self._read_samples)

    def _read_plan(self) -> dict[str, Any]:
        self._need_plan()
        try:
            record = read_record(self.folder, follow_links=self.follow_links)
        except CacheError as error:  # whose advice is for somebody who is about to make a cache
            said = str(error).removesuffix(". Use a fresh folder")
            raise CacheError(f"{said}. {self.again(PLAN_NAME)}") from error
        if record is None:
            raise CacheError(self.missing(self.folder / SIDECAR / PLAN_NAME, "the plan that the cache was made by"))
        return record

    def _read_samples(self) -> Samples:
        self._need_plan()
        try:
            with warnings.catch_warnings():  # of names that are no names: the checksum of ids.txt tells it
                warnings.simplefilter("ignore", DeprecationWarning)
                return Samples.open(self.folder / SIDECAR, follow_links=self.follow_links)
        except FileNotFoundError as error:
            path = Path(error.filename or self.folder / SIDECAR / SAMPLES_NAME)
            raise CacheError(self.missing(path, "the rows that the target was run on")) from error

    def _need_plan(self) -> None:
        if not self.is_planned:
            raise NotChecked(_WITHOUT_PLAN if self.is_ours else FOREIGN)

    def again(self, name: str = "") -> str:
        """Return what to do about a file that is there and wrong. name: of the file, where that counts."""
        if not self.is_planned:
            return "Write it again as it was written, or produce the cache again"
        return f"Remove the file, then {self._resume(name)}"

    def missing(self, path: Path, expected: str) -> str:
        """Return the sentence for a file that is not there: what was expected, and what to run."""
        if not self.is_planned:
            return f"{path}: no such file, expected {expected}. Write it again, or produce the cache again"
        what = self._resume(path.name)
        return f"{path}: no such file, expected {expected}. {what[0].upper()}{what[1:]}"

    @staticmethod
    def _resume(name: str) -> str:
        how = ", which writes it again" if name == PLAN_NAME else ""
        return f"{_RESUME}{how}, or materialize eagle3/targets again"

    def receipt_missing(self, shard: int) -> str:
        """Return the sentence for a shard's receipt that is not there."""
        return self.missing(receipt_path(self.folder, shard), f"the checksums of {Path(shard_path('', shard)).name}")

    @cached_property
    def counts(self) -> Counts:
        """The slots of all shards. Raises: CacheError for a shard that is missing, or not as the manifest says."""
        found = torch.zeros(3, dtype=torch.int64)
        for shard in range(self.num_shards):
            tables = tables_of(self, shard)
            inner = torch.zeros_like(tables["loss_mask"], dtype=torch.bool)  # a last token has no next one to learn
            inner[:, :-1] = tables["attention_mask"][:, 1:] == 1
            masks = (tables["attention_mask"] == 1, (tables["loss_mask"] == 1) & inner, tables["position_mask"])
            found += torch.stack([mask.sum() for mask in masks])
        return Counts(*found.tolist())

    def receipt(self, shard: int) -> dict[str, Any] | None:
        """Return a shard's receipt; None where there is none. Raises: CacheError for one that no writer wrote."""
        return read_receipt(self.folder, shard, follow_links=self.follow_links)

    def rows_of(self, shard: int) -> int:
        """Return how many samples a shard has to have."""
        return min(self.shard_size, self.num_samples - shard * self.shard_size)

    def name(self, number: int) -> str:
        """Return what to call sample `number` of the cache: that, and its source's name for it where it is known."""
        try:
            return f"sample {number} ({shortened(self.samples.source_ids[number])})"
        except (NotChecked, CacheError, OSError, IndexError):
            return f"sample {number}"

    def row(self, number: int, tables: Mapping[str, torch.Tensor]) -> Row:
        """Return sample `number` of the cache, of its shard's tables."""
        shard, row = divmod(number, self.shard_size)
        return Row(
            number,
            lambda: f"{shard_path(self.folder, shard)}: {self.name(number)}",
            {name: table[row] for name, table in tables.items()},
            tuple(self.manifest.get("aux_layer_ids") or ()),
            self.layout.draft_vocab_size,
            padding_is_zero=self.is_planned,
        )


def _tried(read: Callable[[], _R]) -> _R | Exception:
    try:
        return read()
    except (NotChecked, CacheError, OSError) as error:
        return error.with_traceback(None)


def _given(found: _R | Exception) -> _R:
    if isinstance(found, Exception):
        raise found.with_traceback(None)  # else each raise would add to the same traceback
    return found


def open_cache(cache: Path, tick: Callable[[int], None] = lambda _: None, *, follow_links: bool = False) -> Opened:
    """Resolve a cache once and read its manifest. Raises: FileNotFoundError; CacheError."""
    folder = cache.resolve()
    return Opened(folder, read_manifest(folder, follow_links=follow_links), tick, follow_links)


@contextmanager
def described_by(cache: Path) -> Iterator[None]:
    """Make a CacheError of what a malformed manifest, plan or receipt leads to in the block."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:  # the last one is torch's
        raise CacheError(
            f"{cache}: not as docs/formats.md describes it ({error!r}). Look at it: python -m niels_gpt.eagle3 verify "
            f"{cache}"
        ) from error


def tables_of(cache: Opened, shard: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a shard, [n, S, ...], as views of its map; nothing is read yet.

    Raises: CacheError unless it is there, and is as the manifest says.
    """
    path = shard_path(cache.folder, shard)
    for wrong in wrong_form(cache, shard):
        raise CacheError(wrong)
    _, safe_open = load_safetensors()
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in cache.layout.fields}
    except OSError:
        raise
    except Exception as error:  # safetensors' own, which is no more than an Exception
        raise CacheError(f"{path}: safetensors refuses it ({error}). {cache.again()}") from error


def wrong_form(cache: Opened, shard: int) -> Iterator[str]:
    """Yield in what a shard's header is not as the manifest says."""
    path = shard_path(cache.folder, shard)
    try:
        fields, rows, _ = read_header(path, follow_links=cache.follow_links)
    except FileNotFoundError:
        yield cache.missing(Path(path), f"shard {shard} of {cache.num_shards:,}")
        return
    except CacheError as error:
        yield str(error)
        return
    if rows != cache.rows_of(shard):
        wanted = f"{cache.rows_of(shard)} of the manifest's {cache.num_samples}"
        yield f"{path}: {rows} samples, expected {wanted}. {cache.again()}"
    layout = cache.layout.fields
    for name in sorted({*fields, *layout}):
        if fields.get(name) != layout.get(name):
            forms = shown(fields.get(name)), shown(layout.get(name))
            yield f"{path}: {name} is {forms[0]}, expected {forms[1]} by {MANIFEST_NAME}. {cache.again()}"


def shown(form: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    """Return a field's form as text."""
    return "absent" if form is None else f"{str(form[0]).removeprefix('torch.')} {list(form[1])}"
