"""An opened cache: one class for both forms; forms.py has the subclasses.

Checks, comparisons and tables are written once for both forms: they ask a sample for its `Field`s, and the cache for
the words in which the forms differ (`label`, `at`, `within`, `unit`).

A cache is this project's if it has a sidecar/ or a meta.json of kind eagle3. The producer's caches have a plan; those
of only `write_shard` and `write_manifest` have receipts and no plan. A folder with none of these is another tool's. A
check that needs a sidecar or a plan raises `NotChecked` for a cache that never had one. Errors say how to repair the
cache.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niels_gpt.eagle3.format.layout import (
    SIDECAR,
    open_file,
    read_meta_bytes,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import existing_shard_indices, number_in
from niels_gpt.eagle3.format.meta import KIND, file_sha256
from niels_gpt.eagle3.format.native import (
    dequantized,
)
from niels_gpt.eagle3.format.plan import BATCHES_NAME, PLAN_NAME, read_record
from niels_gpt.eagle3.format.samples import IDS_NAME, SAMPLES_NAME, Samples
from niels_gpt.eagle3.format.shard_writer import read_receipt, receipt_path
from niels_gpt.eagle3.format.shards import DenseShards, NativeShards
from niels_gpt.eagle3.totals import Counts
from niels_gpt.kinds.kind import Cache, kind_named
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.locks import VersionHold
from niels_gpt.storage.meta_json import file_records, meta_crc32, parse_object, shortened

AUX, PROBS = "aux_hidden_states", "target_probs"
VALUES, INDICES = "target_probs_values", "target_probs_indices"
OF_THE_PLAN = (PLAN_NAME, SAMPLES_NAME, IDS_NAME, BATCHES_NAME)
"""The plan, its batches and its samples, in sidecar/."""
_OF_TARGET_ROWS = ("last_hidden_states", "log_normalizers", "argmax_ids")
BY_SOURCE = "by sidecar/samples.safetensors"
FOREIGN = "cannot be checked: no sidecar, as in caches that other tools wrote"
_WITHOUT_PLAN = "cannot be checked: no plan, as precompute did not make this cache"
_P = ParamSpec("_P")
_R = TypeVar("_R")


class NotChecked(Exception):
    """A check does not apply to this cache, which is no damage; the text says why."""


class Field(NamedTuple):
    """Named numbers of one sample."""

    name: str
    values: Tensor
    """[rows, ...]"""
    places: Sequence[int] | NDArray[np.int64]
    """The slot or token of each row."""


Pairs = Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]
"""Ids or a mask: name, stored numbers and expected numbers, [rows] each."""

# --- what all forms share ---------------------------------------------------------------------------------------------


class Eagle3Cache(Cache, ABC):
    """A cache of either form, in one version, held against gc; plan and samples are read on first use.

    Opening reads only manifest and meta.json. Every attribute raises CacheError if its file is damaged.
    """

    WEIGHTS: ClassVar[str]
    """Name of the file with the target's weights."""
    WEIGHTS_RECEIPT: ClassVar[str]
    """Name of its receipt in sidecar/."""
    WHAT_WEIGHTS: ClassVar[str]
    """The content of that file, for messages."""
    PROOFS: ClassVar[tuple[str, ...]] = OF_THE_PLAN
    """Names in sidecar/ that only the producer writes; any of them proves a plan."""
    READER: ClassVar[Callable[..., Any]]
    """Dataset class that training uses."""
    unit: ClassVar[str]
    """Name of a sample's row: "slot" or "token"."""
    IN: ClassVar[str]
    """The word before a number of units: "in" or "at"."""

    def __init__(
        self,
        path: Path,
        folder: Path,
        manifest: dict[str, Any],
        hold: VersionHold,
        *,
        follow_links: bool = False,
        tick: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """path: the public folder. folder: the same without links, so that all checks read one version.

        hold: keeps gc from that version. follow_links: read files that are links, as in a snapshot of the Hugging Face
            hub.
        tick: called with the bytes of shards that were read.
        """
        kind, meta = kind_named(KIND), _meta_of(folder, follow_links)
        assert kind is not None  # this package has it
        super().__init__(path, folder, meta or {}, kind, hold)
        self.has_meta = meta is not None
        """Whether there is a meta.json of this project, or one that cannot be read; then `meta` is empty."""
        self.manifest, self.follow_links, self.tick = manifest, follow_links, tick
        self._kept = dict[str, Any]()

    # --- the words in which the forms differ ---

    def label(self, name: str, column: int) -> str:
        """Return a column's name in messages: a block's hidden states, or the field."""
        width, blocks = {AUX: self.hidden_size, "aux_scales": 1}.get(name, 0), self.aux_layer_ids
        return f"{name} of block {blocks[column // width]}" if width and blocks else name

    def at(self, place: int, column: int) -> str:
        """Return the place of a number in a sample, as text."""
        return f"{self.unit} {place}"

    def units(self, count: int) -> str:
        """Return "1 slot", "2 slots"."""
        return f"{count:,} {self.unit}{'' if count == 1 else 's'}"

    def within(self, count: int) -> str:
        """Return "in 2 slots" or "at 2 tokens"."""
        return f"{self.IN} {self.units(count)}"

    # --- shards and samples, which each form has in its own way ---

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Width of one block's hidden states."""

    @property
    @abstractmethod
    def num_shards(self) -> int:
        """Number of shards that the manifest declares."""

    @property
    @abstractmethod
    def files(self) -> DenseShards | NativeShards:
        """The files of the shards, one of them mapped at a time."""

    @abstractmethod
    def place(self, number: int) -> tuple[int, int]:
        """Return the shard of a sample, and its row in it."""

    @abstractmethod
    def row(self, shard: int, opened: Any, row: int) -> StoredSample:
        """Return a sample by its row in an opened shard."""

    @abstractmethod
    def beside(self, row: StoredSample) -> Pairs:
        """Yield ids and masks of a sample, stored and expected by the source's row.

        Raises: CacheError if the row has another number of tokens; NotChecked for a cache without a plan.
        """

    @abstractmethod
    def counted(self, opened: Any) -> NDArray[np.int64]:
        """Count each sample of an opened shard: int64 [n, 3], tokens, slots with loss, positions.

        A native cache adds auxiliary rows and target rows: [n, 5].
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the target's weights by name, as views of a map: `embeddings` [V, H]; a native cache adds the head's.

        Raises: CacheError if the file is missing or damaged.
        """

    @abstractmethod
    def wrong_weights(self) -> Iterator[CacheError]:
        """Yield the deviations of the weights' form from the manifest.

        Raises: CacheError if the file is missing or damaged.
        """

    def opened(self, shard: int) -> Any:
        """Map a shard, after reading its header (native: also starts and loss bits).

        Raises: CacheError if it is missing or deviates from the manifest.
        """
        with self.repairable(shard):
            return self.files.opened(shard)

    def wrong_form(self, shard: int) -> Iterator[CacheError]:
        """Yield the deviations of a shard from the manifest."""
        _ = self.files.layout  # an error of the manifest is none of the shard
        try:
            with self.repairable(shard):
                wrong = list(self.files.wrong_form(shard))
        except CacheError as error:
            wrong = [error]
        yield from map(self.with_remedy, wrong)

    def stored(self, shard: int) -> Iterator[StoredSample]:
        """Return the samples of a shard.

        Raises: CacheError, at once, if the shard is missing or deviates from the manifest.
        """
        opened = self.opened(shard)
        return (self.row(shard, opened, row) for row in range(self.files.rows_of(shard)))

    def sample(self, number: int) -> StoredSample:
        """Return a sample by its number in the cache.

        Raises: CacheError if its shard is missing or deviates from the manifest.
        """
        shard, row = self.place(number)
        return self.row(shard, self.opened(shard), row)

    def read_each_shard(self) -> None:
        """Open the cache with its training reader, and read a sample of every shard. Raises: the reader's errors."""
        data = self.READER(self.folder, follow_links=self.follow_links)
        for shard in range(self.num_shards):
            data[self.files.first_of(shard)]

    @cached_property
    def counts(self) -> Counts:
        """Tokens, slots with loss and positions of all shards. Raises: CacheError for a missing or deviating shard."""
        sums = (self.counted(self.opened(shard)).sum(0)[:3].tolist() for shard in range(self.num_shards))
        return Counts(*map(sum, zip(*sums, strict=True))) if self.num_shards else Counts(0, 0, 0)

    @cached_property
    def num_samples(self) -> int:
        """Samples of the cache, by the manifest."""
        return number_in(self.manifest, "num_samples", self.folder)

    @cached_property
    def draft_vocab_size(self) -> int:
        """Size of the draft's vocabulary, by the manifest."""
        return number_in(self.manifest, "draft_vocab_size", self.folder, 1)

    @cached_property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary, by the manifest."""
        return number_in(self.manifest, "target_vocab_size", self.folder, 1)

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Captured blocks, in their order in aux_hidden_states; () if the manifest does not say."""
        return tuple(self.manifest.get("aux_layer_ids") or ())

    @cached_property
    def shards(self) -> list[int]:
        """Declared shards that exist."""
        return sorted(index for index in existing_shard_indices(self.folder) if index < self.num_shards)

    # --- whose cache it is ---

    @property
    def planned(self) -> tuple[str, ...]:
        """Names in sidecar/ that the producer writes besides the receipts of shards."""
        return (*OF_THE_PLAN, self.WEIGHTS_RECEIPT)

    @cached_property
    def is_ours(self) -> bool:
        """Whether this project wrote the cache: its shards have receipts."""
        return os.path.lexists(self.folder / SIDECAR) or self.has_meta

    @cached_property
    def is_planned(self) -> bool:
        """Whether this project's producer built the cache. A receipt proves it if everything else is gone."""
        if self.has_meta and self.meta.get("plan_sha256", "") is not None:  # null: an import
            return True
        if any(os.path.lexists(self.folder / SIDECAR / name) for name in self.PROOFS):
            return True
        return any(self._names_a_plan(shard) for shard in self.shards)

    @property
    def imported_revision(self) -> str | None:
        """Commit of the target on the hub that meta.json of an import states; None for another cache."""
        made_from = self.meta.get("target")
        revision = made_from.get("revision") if isinstance(made_from, dict) else None
        return revision if isinstance(revision, str) else None

    def _names_a_plan(self, shard: int) -> bool:
        try:
            return "plan" in self.facts(shard)
        except (CacheError, OSError):
            return False  # the check `checksums` reports it

    # --- files of the sidecar ---

    @property
    def plan(self) -> dict[str, Any]:
        """Content of plan.json. Raises: NotChecked for a cache without a plan; CacheError if it is gone or damaged."""
        plan: dict[str, Any] = self._read_once("plan", self._read_plan)
        return plan

    @property
    def samples(self) -> Samples:
        """The source's rows. Raises: NotChecked for a cache without a plan; CacheError if they are gone or damaged."""
        samples: Samples = self._read_once("samples", self._read_samples)
        return samples

    def _read_once(self, name: str, read: Callable[[], Any]) -> Any:
        """Return the result of `read`. Keeps its error too, since each of a million rows may ask."""
        if name not in self._kept:
            try:
                if not self.is_planned:
                    raise NotChecked(_WITHOUT_PLAN if self.is_ours else FOREIGN)
                self._kept[name] = read()
            except (NotChecked, CacheError, OSError) as error:
                self._kept[name] = error
        found = self._kept[name]
        if isinstance(found, Exception):
            raise found.with_traceback(None)  # else each raise would add to the same traceback
        return found

    def _read_plan(self) -> dict[str, Any]:
        path = self.folder / SIDECAR / PLAN_NAME
        try:
            os.close(open_file(path, follow_links=self.follow_links))  # a link has a remedy of its own
        except FileNotFoundError as error:
            raise self.missing(path, "the plan that the cache was made by") from error
        try:
            record = read_record(self.folder, follow_links=self.follow_links)
        except CacheError as error:  # its remedy is for a run that is about to start
            remedy = self.remedy(PLAN_NAME)
            raise CacheError(error.path, error.found, error.expected, remedy, code=error.code) from error
        assert record is not None
        expected = self._plan_sha256()  # a number of a changed plan would blame good shards
        if expected is not None and (computed := file_sha256(path, follow_links=self.follow_links)) != expected:
            found, wanted = f"sha256 {computed[:12]}", f"{expected[:12]} by {META_NAME}"
            raise CacheError(path, found, wanted, self.remedy(PLAN_NAME), code="E701")
        return record

    def _plan_sha256(self) -> str | None:
        """Return plan.json's sha256 as recorded by an undamaged meta.json; else None."""
        try:
            raw = read_meta_bytes(self.folder, follow_links=self.follow_links)
            recorded, computed = meta_crc32(raw)
            records = file_records(parse_object(raw)) if recorded == computed else []
        except (ValueError, OSError):
            return None
        return next((record["sha256"] for record in records if record["name"] == f"{SIDECAR}/{PLAN_NAME}"), None)

    def _read_samples(self) -> Samples:
        try:
            with warnings.catch_warnings():  # about ids that are not UTF-8: the checksum of ids.txt reports them
                warnings.simplefilter("ignore", DeprecationWarning)
                return Samples.open(self.folder / SIDECAR, follow_links=self.follow_links)
        except FileNotFoundError as error:
            path = Path(error.filename or self.folder / SIDECAR / SAMPLES_NAME)
            raise self.missing(path, "the rows that the target was run on") from error

    def receipt(self, shard: int) -> dict[str, Any] | None:
        """Return a shard's receipt; None if there is none. Raises: CacheError for one that no writer wrote."""
        return read_receipt(self.folder, shard, follow_links=self.follow_links)

    def facts(self, shard: int) -> dict[str, Any]:
        """Return the counts in a shard's receipt; {} without one.

        Raises: CacheError for a receipt that no writer wrote.
        """
        facts: dict[str, Any] = (self.receipt(shard) or {"facts": {}})["facts"]
        return facts

    # --- what to do about a file ---

    @contextmanager
    def repairable(self, shard: int) -> Iterator[None]:
        """Add this cache's remedy to errors about a shard's file."""
        try:
            yield
        except FileNotFoundError as error:
            path = shard_path(self.folder, shard)
            raise self.missing(path, f"shard {shard} of {self.num_shards:,}") from error
        except CacheError as error:
            raise self.with_remedy(error) from error

    def with_remedy(self, error: CacheError) -> CacheError:
        """Return the error with this cache's remedy, unless it has its own."""
        if error.own_remedy:
            return error
        remedy = self.remedy(is_file=error.code != "E205")
        return CacheError(error.path, error.found, error.expected, remedy, code=error.code)

    def remedy(self, name: str = "", *, is_file: bool = True) -> str:
        """Return what to do about a wrong file. name: of the file, if the remedy depends on it."""
        if not self.is_planned:
            return "Write it again as it was written, or produce the cache again"
        return f"{'Remove the file' if is_file else 'Move it away'}. {self._resume(name)}"

    def missing(self, path: str | Path, expected: str) -> CacheError:
        """Return the error for a missing file, with the command that writes it."""
        again = self._resume(Path(path).name) if self.is_planned else "Write it again, or produce the cache again"
        return CacheError(path, "no such file", expected, again, code="E702")

    @staticmethod
    def _resume(name: str) -> str:
        how = ", which writes it again" if name == PLAN_NAME else ""
        return f"Run the same precompute command with --resume{how}, or materialize eagle3/targets again"

    def receipt_missing(self, shard: int) -> CacheError:
        """Return the error for a shard without a receipt."""
        return self.missing(
            receipt_path(self.folder, shard), f"the checksums of {os.path.basename(shard_path('', shard))}"
        )

    def refuse_missing_weights(self) -> None:
        """Raise CacheError if the target's weights are missing."""
        path = self.folder / self.WEIGHTS
        if not os.path.lexists(path):
            raise self.missing(path, self.WHAT_WEIGHTS)

    def name(self, number: int) -> str:
        """Return a sample's name: its number in the cache, and its source id if known."""
        try:
            return f"sample {number} ({shortened(self.samples.source_ids[number])})"
        except (NotChecked, CacheError, OSError, IndexError):
            return f"sample {number}"


def _meta_of(folder: Path, follow_links: bool) -> dict[str, Any] | None:
    """Return an EAGLE-3 cache's meta.json; {} if it cannot be read; None if there is none."""
    try:
        meta = parse_object(read_meta_bytes(folder, follow_links=follow_links))
    except FileNotFoundError:
        return None
    except (ValueError, OSError):
        return {}
    return meta if meta.get("kind") == KIND else None


@dataclass(frozen=True)
class StoredSample:
    """One stored sample."""

    cache: Any
    """A DenseCache or NativeCache."""
    shard: int
    number: int
    """Number of the sample in the cache."""
    tensors: Mapping[str, Tensor]
    """Name -> [rows, ...], views of the mapped shard. Dense: one row for each slot, padding included. Native: for each
    token, each token before the last target row, or each target row."""
    nbytes: int
    """Bytes of the sample in its shard."""
    positions: Any = None
    """Native: tokens that have a target row, int64 [R]; dense: None."""

    def problem(self, found: str, expected: str = "") -> CacheError:
        """Return an error that names the shard's file, the sample's number and its id."""
        path = shard_path(self.cache.folder, self.shard)
        return CacheError(path, f"{self.cache.name(self.number)}: {found}", expected, code="E701")

    @cached_property
    def length(self) -> int:
        """Number of tokens; in a dense cache the slots up to the last set bit of attention_mask."""
        if "attention_mask" not in self.tensors:
            return len(self.tensors["input_ids"])
        attended = self.tensors["attention_mask"].nonzero()
        return int(attended[-1]) + 1 if len(attended) else 0

    def fields(self) -> Iterator[Field]:
        """Yield all stored fields."""
        for name, values in self.tensors.items():
            of_targets = self.positions is not None and name in _OF_TARGET_ROWS
            yield Field(name, values, self.positions if of_targets else range(len(values)))

    def ids_and_loss(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ids and loss mask of the tokens, as stored: int64 [length] each."""
        whole = (self.tensors[name].numpy() for name in ("input_ids", "loss_mask"))
        ids, loss = (each[: self.length].astype(np.int64) for each in whole)
        return ids, loss

    def states(self, part: int | slice | NDArray[np.int64], dtype: torch.dtype | None = None) -> Tensor:
        """Return auxiliary states of one slot or token, or of several: [..., blocks, H].

        Only these are converted from fp8. dtype: None: as stored; bfloat16 for fp8.
        """
        states, scales = self.tensors[AUX][part], self.tensors.get("aux_scales")
        blocks = len(self.cache.aux_layer_ids), self.cache.hidden_size
        states = states.view(*(() if isinstance(part, int) else (len(states),)), *blocks)
        if scales is None:
            return states if dtype is None else states.to(dtype)
        return dequantized(states, scales[part], dtype or torch.bfloat16)


def weight_row(name: str, row: int) -> str:
    """Return the name of a row of one of the target's weights, for messages."""
    of_tokens = {"embeddings": "the embedding", "lm_head": "lm_head"}
    return f"{of_tokens[name]} of token {row}" if name in of_tokens else f"row {row} of {name}"


def refuse_malformed(look: Callable[Concatenate[Path, _P], _R]) -> Callable[Concatenate[Path, _P], _R]:
    """Decorate a function of a cache's folder: errors about a malformed manifest, plan or receipt become CacheError."""

    @wraps(look)
    def refusing(cache: Path, /, *arguments: _P.args, **named: _P.kwargs) -> _R:
        try:
            return look(cache, *arguments, **named)
        except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:  # RuntimeError: torch
            found, remedy = f"not as docs/formats.md describes it ({error!r})", f"niels-gpt eagle3 verify {cache}"
            raise CacheError(cache, found, remedy=f"Look at it: {remedy}", code="E701") from error

    return refusing
