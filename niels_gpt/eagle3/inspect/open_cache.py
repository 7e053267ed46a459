"""What caches of every form share: manifest, plan, samples, receipts; read on first use. Errors say how to repair it.

A cache is this project's if it has a sidecar/ or a meta.json of kind eagle3. The producer's has a plan; one that was
written by the writers of shards and manifests alone has receipts and no plan. A folder with none of these is another
tool's. Checks that need a sidecar or a plan raise `NotChecked` where a cache never had one.

published/opened.py has the shards of versions 1 and 2, native/opened.py those of the native form.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from niels_gpt.eagle3.format.layout import SIDECAR, open_file, read_meta_bytes, shard_path
from niels_gpt.eagle3.format.manifest import existing_shard_indices, number_in
from niels_gpt.eagle3.format.meta import file_sha256
from niels_gpt.eagle3.format.plan import BATCHES_NAME, PLAN_NAME, read_record
from niels_gpt.eagle3.format.samples import IDS_NAME, SAMPLES_NAME, Samples
from niels_gpt.eagle3.format.shard_writer import read_receipt, receipt_path
from niels_gpt.eagle3.totals import Counts
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import file_records, meta_crc32, parse_object, shortened

OF_THE_PLAN = (PLAN_NAME, SAMPLES_NAME, IDS_NAME, BATCHES_NAME)
"""The plan, its batches and its samples, in sidecar/."""
FOREIGN = "cannot be checked: no sidecar, as in caches that other tools wrote"
_WITHOUT_PLAN = "cannot be checked: no plan, as precompute did not make this cache"
Table = list[tuple[str, ...]]
"""Rows of text; the first one may be the heading."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


class NotChecked(Exception):
    """A check does not apply to this cache, which is no damage; the text says why."""


class StoredSample(Protocol):
    """One stored sample, as the checks get it."""

    @property
    def nbytes(self) -> int:
        """Bytes of a shard that it takes."""


@dataclass(frozen=True)
class OpenCache(ABC):
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

    WEIGHTS: ClassVar[str]
    """Name of the file with the target's weights."""
    WEIGHTS_RECEIPT: ClassVar[str]
    """Name of its receipt in sidecar/."""
    PROOFS: ClassVar[tuple[str, ...]] = OF_THE_PLAN
    """Names in sidecar/ of which the producer alone writes any."""
    WHAT_WEIGHTS: ClassVar[str]
    """What that file holds, for messages."""

    # --- shards, which each form has in its own way ---

    @property
    @abstractmethod
    def num_shards(self) -> int:
        """Shards that the manifest declares."""

    @abstractmethod
    def rows_of(self, shard: int) -> int:
        """Return how many samples a shard must have."""

    @abstractmethod
    def first_of(self, shard: int) -> int:
        """Return the number of a shard's first sample in the cache."""

    @abstractmethod
    def wrong_form(self, shard: int) -> Iterator[CacheError]:
        """Yield where the form of a shard differs from what the manifest says."""

    @abstractmethod
    def wrong_manifest(self) -> Iterator[CacheError]:
        """Yield where the manifest or the file of the target's weights does not fit the rest."""

    @abstractmethod
    def stored(self, shard: int) -> Iterable[StoredSample]:
        """Return the samples of a shard. Raises: CacheError if it is missing, or has another form."""

    @abstractmethod
    def damage(self, shard: int) -> list[tuple[int | None, str]]:
        """Compare a shard with its receipt; return each damage: the row within the shard, or None, and a sentence."""

    @abstractmethod
    def spans(self, shard: int, row: int) -> list[tuple[int, int]]:
        """Return where the bytes of a sample lie in its shard, [start, end) in each tensor. Raises: CacheError."""

    @property
    @abstractmethod
    def counts(self) -> Counts:
        """The tokens, supervised slots and positions of all shards. Raises: as `stored`."""

    @cached_property
    def num_samples(self) -> int:
        """Samples of the whole cache, by the manifest."""
        return number_in(self.manifest, "num_samples", self.folder)

    @cached_property
    def draft_vocab_size(self) -> int:
        """Ids in the draft's vocabulary, by the manifest."""
        return number_in(self.manifest, "draft_vocab_size", self.folder, 1)

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The captured blocks, in their order in aux_hidden_states; () where the manifest does not say."""
        return tuple(self.manifest.get("aux_layer_ids") or ())

    @cached_property
    def shards(self) -> list[int]:
        """The declared shards that exist."""
        return sorted(index for index in existing_shard_indices(self.folder) if index < self.num_shards)

    # --- whose cache it is ---

    @property
    def planned(self) -> tuple[str, ...]:
        """What the producer keeps in sidecar/ beside the receipts of the shards."""
        return (*OF_THE_PLAN, self.WEIGHTS_RECEIPT)

    @cached_property
    def is_ours(self) -> bool:
        """Whether this project wrote the cache: its shards have receipts."""
        return os.path.lexists(self.folder / SIDECAR) or self._meta is not None

    @cached_property
    def is_planned(self) -> bool:
        """Whether this project's producer made the cache. A receipt shows it where everything else is gone."""
        if self._meta is not None and self._meta.get("plan_sha256", "") is not None:  # null: an import
            return True
        if any(os.path.lexists(self.folder / SIDECAR / name) for name in self.PROOFS):
            return True
        return any(self._names_a_plan(shard) for shard in self.shards)

    @property
    def has_meta(self) -> bool:
        """Whether there is a meta.json of this project."""
        return self._meta is not None

    @cached_property
    def _meta(self) -> dict[str, Any] | None:
        """The content of a meta.json of kind eagle3; nothing of one that cannot be read; None where there is none."""
        try:
            meta = parse_object(read_meta_bytes(self.folder, follow_links=self.follow_links))
        except FileNotFoundError:
            return None
        except (ValueError, OSError):
            return {}
        return meta if meta.get("kind") == "eagle3" else None

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
        expected = self._plan_sha256()  # a number of a changed plan would blame good shards
        if expected is not None and (computed := file_sha256(path, follow_links=self.follow_links)) != expected:
            found, wanted = f"sha256 {computed[:12]}", f"{expected[:12]} by {META_NAME}"
            raise CacheError(path, found, wanted, self.remedy(PLAN_NAME), code="E701")
        return record

    def _plan_sha256(self) -> str | None:
        """Return the sha256 of plan.json; None where no undamaged meta.json has it."""
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

    def weights_missing(self) -> CacheError | None:
        """Return the error for missing weights of the target; None where they exist."""
        path = self.folder / self.WEIGHTS
        return None if os.path.lexists(path) else self.missing(path, self.WHAT_WEIGHTS)

    def name(self, number: int) -> str:
        """Return what to call a sample: its number in the cache, and its source's id where that is known."""
        try:
            return f"sample {number} ({shortened(self.samples.source_ids[number])})"
        except (NotChecked, CacheError, OSError, IndexError):
            return f"sample {number}"

    def problem(self, shard: int, number: int, found: str, expected: str = "") -> CacheError:
        """Return an error that names the shard's file, the sample's number in the cache and its id."""
        path = shard_path(self.folder, shard)
        return CacheError(path, f"{self.name(number)}: {found}", expected, code="E701")


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


class Decoder(Protocol):
    """Turns ids back into text."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of some ids."""


def token_text(token: int, tokenizer: Decoder | None) -> str:
    """Return the text of an id with all escapes written out; "-" without a tokenizer."""
    return repr(tokenizer.decode([token])) if tokenizer else "-"


def likeliest_text(tokens: Iterable[int], probs: Iterable[float], tokenizer: Decoder | None) -> str:
    """Return some tokens and their probabilities on one line, such as "7 .412, 3 .200"."""
    named = (token_text(token, tokenizer) if tokenizer else token for token in tokens)
    return ", ".join(f"{token} {f'{prob:.3f}'.removeprefix('0')}" for token, prob in zip(named, probs, strict=True))
