"""Opens a cache: its manifest, plan, samples, shards and rows are read on first use. Errors say how to repair it.

A cache is this project's if it has a sidecar/ or a meta.json of kind eagle3. The producer's has a plan; one that was
written by `write_shard` and `write_manifest` alone has receipts and no plan. A folder with none of these is another
tool's. Checks that need a sidecar or a plan raise `NotChecked` where a cache never had one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from niels_gpt.eagle3.cache import reconstruct_target_probs
from niels_gpt.eagle3.format.embeddings import EMBEDDINGS_RECEIPT
from niels_gpt.eagle3.format.layout import (
    DENSE_FIELDS,
    EMBEDDINGS_NAME,
    MANIFEST_NAME,
    SIDECAR,
    TOPK_FIELDS,
    Layout,
    open_file,
    read_header,
    read_meta_bytes,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import (
    existing_shard_indices,
    layout_of,
    load_safetensors,
    number_in,
    read_manifest,
)
from niels_gpt.eagle3.format.plan import BATCHES_NAME, PLAN_NAME, read_record
from niels_gpt.eagle3.format.samples import IDS_NAME, SAMPLES_NAME, Samples
from niels_gpt.eagle3.format.shard_writer import read_receipt, receipt_path
from niels_gpt.eagle3.produce.positions import Counts
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import parse_object, shortened

AUX, PROBS, VALUES, INDICES = "aux_hidden_states", *DENSE_FIELDS, *TOPK_FIELDS
PLANNED = (PLAN_NAME, SAMPLES_NAME, IDS_NAME, BATCHES_NAME, EMBEDDINGS_RECEIPT)
"""What the producer keeps in sidecar/ beside the receipts."""
FOREIGN = "cannot be checked: no sidecar, as in caches that other tools wrote"
_WITHOUT_PLAN = "cannot be checked: no plan, as in caches that write_shard wrote"
_P = ParamSpec("_P")
_R = TypeVar("_R")


class NotChecked(Exception):
    """A check does not apply to this cache, which is no damage; the text says why."""


@dataclass(frozen=True)
class OpenCache:
    """A resolved cache with lazily loaded plan and samples.

    Only the manifest has been read. Every attribute raises CacheError where the file that it comes from is damaged.
    """

    path: Path
    """The public folder."""
    folder: Path
    """The same without links, so that all checks read one version."""
    manifest: dict[str, Any]
    follow_links: bool
    """Whether files may be links, as in a snapshot of the Hugging Face hub."""
    tick: Callable[[int], None]
    """Called with the bytes of shards that were read."""
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def layout(self) -> Layout:
        """The fields of a shard."""
        return layout_of(self.manifest, self.folder)

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The blocks whose outputs lie side by side in aux_hidden_states; () where the manifest does not say."""
        return tuple(self.manifest.get("aux_layer_ids") or ())

    @cached_property
    def num_samples(self) -> int:
        """Samples of the whole cache, by the manifest."""
        return number_in(self.manifest, "num_samples", self.folder)

    @cached_property
    def shard_size(self) -> int:
        """Samples of a shard; the last one may have fewer."""
        return number_in(self.manifest, "shard_size", self.folder, 1)

    @property
    def num_shards(self) -> int:
        """Shards that the manifest declares."""
        return -(-self.num_samples // self.shard_size)

    @cached_property
    def shards(self) -> list[int]:
        """The declared shards that exist."""
        return sorted(index for index in existing_shard_indices(self.folder) if index < self.num_shards)

    def rows_of(self, shard: int) -> int:
        """Return how many samples a shard has by the manifest."""
        return min(self.shard_size, self.num_samples - shard * self.shard_size)

    # --- whose cache it is ---

    @cached_property
    def is_ours(self) -> bool:
        """Whether this project wrote the cache: its shards have receipts."""
        return os.path.lexists(self.folder / SIDECAR) or self._has_meta

    @cached_property
    def is_planned(self) -> bool:
        """Whether this project's producer made the cache. A receipt shows it where everything else is gone."""
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
            return False  # the check `checksums` reports it
        return receipt is not None and "plan" in receipt["facts"]

    # --- files of the sidecar ---

    @property
    def plan(self) -> dict[str, Any]:
        """What plan.json holds. Raises: NotChecked in a cache without a plan; CacheError if it is gone or damaged."""
        plan: dict[str, Any] = self._read_once("plan", self._read_plan)
        return plan

    @property
    def samples(self) -> Samples:
        """The source's rows. Raises: as `plan`."""
        samples: Samples = self._read_once("samples", self._read_samples)
        return samples

    def _read_once(self, name: str, read: Callable[[], Any]) -> Any:
        """Return what `read` returns. Its error is kept too, since each of a million rows may ask."""
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
            raise CacheError(
                error.path, error.found, error.expected, self.remedy(PLAN_NAME), code=error.code
            ) from error
        assert record is not None
        return record

    def _read_samples(self) -> Samples:
        try:
            with warnings.catch_warnings():  # about ids that are not UTF-8: the checksum of ids.txt reports them
                warnings.simplefilter("ignore", DeprecationWarning)
                return Samples.open(self.folder / SIDECAR, follow_links=self.follow_links)
        except FileNotFoundError as error:
            path = Path(error.filename or self.folder / SIDECAR / SAMPLES_NAME)
            raise self.missing(path, "the rows that the target was run on") from error

    def receipt(self, shard: int) -> dict[str, Any] | None:
        """Return a shard's receipt; None where there is none. Raises: CacheError for one that no writer wrote."""
        return read_receipt(self.folder, shard, follow_links=self.follow_links)

    # --- what to do about a file ---

    def remedy(self, name: str = "") -> str:
        """Return what to do about a file that is wrong. name: of the file, where the remedy depends on it."""
        if not self.is_planned:
            return "Write it again as it was written, or produce the cache again"
        return f"Remove the file. {self._resume(name)}"

    def missing(self, path: Path, expected: str) -> CacheError:
        """Return the error for a file that does not exist, with what to run."""
        remedy = self._resume(path.name) if self.is_planned else "Write it again, or produce the cache again"
        return CacheError(path, "no such file", expected, remedy, code="E702")

    @staticmethod
    def _resume(name: str) -> str:
        how = ", which writes it again" if name == PLAN_NAME else ""
        return f"Run the same precompute command with --resume{how}, or materialize eagle3/targets again"

    def receipt_missing(self, shard: int) -> CacheError:
        """Return the error for a shard without a receipt."""
        path = Path(receipt_path(self.folder, shard))
        return self.missing(path, f"the checksums of {Path(shard_path('', shard)).name}")

    def embeddings_missing(self) -> CacheError | None:
        """Return the error for missing embeddings; None where they exist."""
        path = self.folder / EMBEDDINGS_NAME
        return None if os.path.lexists(path) else self.missing(path, "the target's input embeddings")

    # --- shards and rows ---

    def tables(self, shard: int) -> dict[str, Tensor]:
        """Return the tensors of a shard, [n, S, ...], as views of its map; nothing is read yet.

        Raises: CacheError if it is missing, or has another form than the manifest says.
        """
        for wrong in self.wrong_form(shard):
            raise wrong
        path = shard_path(self.folder, shard)
        _, safe_open = load_safetensors()
        try:
            with safe_open(path, framework="pt") as handle:
                return {name: handle.get_tensor(name) for name in self.layout.fields}
        except OSError:
            raise
        except Exception as error:  # safetensors raises its own error, a direct subclass of Exception
            raise CacheError(path, f"safetensors refuses it ({error})", "", self.remedy(), code="E701") from error

    def wrong_form(self, shard: int) -> Iterator[CacheError]:
        """Yield where a shard's header differs from the manifest."""
        path = shard_path(self.folder, shard)
        try:
            fields, rows, _ = read_header(path, follow_links=self.follow_links)
        except FileNotFoundError:
            yield self.missing(Path(path), f"shard {shard} of {self.num_shards:,}")
            return
        except CacheError as error:
            yield error
            return
        if rows != self.rows_of(shard):
            expected = f"{self.rows_of(shard)} of the manifest's {self.num_samples}"
            yield CacheError(path, f"{rows} samples", expected, self.remedy(), code="E701")
        declared = self.layout.fields
        for name in sorted({*fields, *declared}):
            if fields.get(name) != declared.get(name):
                found, expected = form_text(fields.get(name)), form_text(declared.get(name))
                yield CacheError(
                    path, f"{name} is {found}", f"{expected} by {MANIFEST_NAME}", self.remedy(), code="E701"
                )

    @cached_property
    def counts(self) -> Counts:
        """The slots of all shards. Raises: as `tables`."""
        counts = torch.zeros(3, dtype=torch.int64)
        for shard in range(self.num_shards):
            tables = self.tables(shard)
            inner = torch.zeros_like(tables["loss_mask"], dtype=torch.bool)  # a last token has no next one to learn
            inner[:, :-1] = tables["attention_mask"][:, 1:] == 1
            masks = (tables["attention_mask"] == 1, (tables["loss_mask"] == 1) & inner, tables["position_mask"])
            counts += torch.stack([mask.sum() for mask in masks])
        return Counts(*counts.tolist())

    def name(self, number: int) -> str:
        """Return what to call a sample: its number in the cache, and its source's id where that is known."""
        try:
            return f"sample {number} ({shortened(self.samples.source_ids[number])})"
        except (NotChecked, CacheError, OSError, IndexError):
            return f"sample {number}"

    def row(self, number: int, tables: Mapping[str, Tensor] | None = None) -> Row:
        """Return a sample by its number in the cache. tables: of its shard, where the caller has them."""
        shard, row = divmod(number, self.shard_size)
        tables = self.tables(shard) if tables is None else tables
        return Row(self, number, {name: table[row] for name, table in tables.items()})


@dataclass(frozen=True)
class Row:
    """One stored sample."""

    cache: OpenCache
    number: int
    """In the cache."""
    fields: Mapping[str, Tensor]
    """Name -> [S, ...]: a row of the mapped shard."""

    def problem(self, found: str, expected: str = "") -> CacheError:
        """Return an error that names the shard's file, the sample's number and its id."""
        path = shard_path(self.cache.folder, self.number // self.cache.shard_size)
        return CacheError(path, f"{self.cache.name(self.number)}: {found}", expected, code="E701")

    @property
    def length(self) -> int:
        """Slots up to the last one where attention_mask is set; those after it are padding."""
        attended = self.fields["attention_mask"].nonzero()
        return int(attended[-1]) + 1 if len(attended) else 0

    def layer(self, field: str, column: int) -> str:
        """Return what a column of a field is called in messages: a block's hidden states, or the field itself."""
        blocks = self.cache.aux_layer_ids
        width = self.fields[AUX].shape[-1] // max(1, len(blocks))
        return f"{AUX} of block {blocks[column // width]}" if field == AUX and blocks and width else field


def comparable_probs(fields: Mapping[str, Tensor], draft_vocab_size: int) -> Tensor:
    """Return the stored distribution as float32 [slots, draft_vocab_size], top-k ones with the k-th value elsewhere.

    Which of two tokens that are nearly as likely is the k-th may change between two runs; so the tokens that are left
    out are compared as if each had the k-th probability.
    """
    if VALUES not in fields:
        return fields[PROBS].float()
    values = fields[VALUES].float()
    whole = reconstruct_target_probs(values, fields[INDICES], draft_vocab_size)
    return torch.maximum(whole, values.amin(dim=-1, keepdim=True))


def open_cache(
    path: Path, *, follow_links: bool = False, tick: Callable[[int], None] = lambda num_bytes: None
) -> OpenCache:
    """Resolve a cache once and read its manifest. Raises: FileNotFoundError; CacheError."""
    folder = path.resolve()
    return OpenCache(path, folder, read_manifest(folder, follow_links=follow_links), follow_links, tick)


def refuse_malformed(look: Callable[Concatenate[Path, _P], _R]) -> Callable[Concatenate[Path, _P], _R]:
    """Decorate a function of a cache's folder: what a malformed manifest, plan or receipt raises becomes CacheError."""

    @wraps(look)
    def refusing(cache: Path, /, *arguments: _P.args, **named: _P.kwargs) -> _R:
        try:
            return look(cache, *arguments, **named)
        except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:  # RuntimeError: torch
            raise CacheError(
                cache,
                f"not as docs/formats.md describes it ({error!r})",
                remedy=f"Look at it: niels-gpt eagle3 verify {cache}",
                code="E701",
            ) from error

    return refusing


def form_text(form: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    """Return dtype and shape of a field as text."""
    return "absent" if form is None else f"{str(form[0]).removeprefix('torch.')} {list(form[1])}"


def slots(count: int) -> str:
    """Return "1 slot", "2 slots"."""
    return f"{count:,} slot{'' if count == 1 else 's'}"
