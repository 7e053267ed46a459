"""The plan of an EAGLE-3 cache: everything that decides its bytes, fixed before the target's first forward pass.

sidecar/plan.json holds the plan, sidecar/batches.jsonl the batches. This module cuts samples into shards and batches
(`plan_batches`), and decides which values of plan.json are valid. A run continues a cache only if the plans are equal.
The number of processes is not in the plan; nor are the keys `FREE` of a native manifest, which decide no byte of a
shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import version as version_of
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.eagle3.format.drafters import manifest_keys, targets_of
from niels_gpt.eagle3.format.layout import DTYPES, SIDECAR, Layout, PathLike, read_file, row_bytes_of
from niels_gpt.eagle3.format.manifest import is_good, is_native, layout_of, read_manifest
from niels_gpt.eagle3.format.native import NativeLayout, row_counts
from niels_gpt.eagle3.format.samples import IDS_NAME, Samples
from niels_gpt.eagle3.placement import METHOD, SCHEMES, STORED
from niels_gpt.storage.errors import CacheError, NotFound
from niels_gpt.storage.fileio import canonical_json
from niels_gpt.storage.meta_json import checked_count, parse_object, shortened

BUILDER_VERSION = 1
"""Increased when an equal plan gives other bytes."""
SIDECAR_VERSION = 1
PLAN_NAME = "plan.json"
BATCHES_NAME = "batches.jsonl"
CONVERTED = ("manifest.format_version", "manifest.target_probs_topk")
"""Manifest fields that `convert` may have changed after the cache was finished."""
FREE = ("draft_vocab_size", "selected_token_ids", "head", "conventions")
"""Keys of a native manifest that plan.json leaves out: the draft's vocabulary, and facts known only after loading the
target."""
_WIDTH_STEP = 8
_MAX_BATCHES_BYTES = 1 << 27  # limit of batches.jsonl, which takes about seven bytes a sample
_MAX_THREADS = 4096
_MAX_RANKS = 1024
_FRESH = "Use a fresh folder"
_ROW_BYTES = 64  # limit of batches.jsonl, for a row and a batch that has only this row

CONVERTED_FROM = "converted_from"
"""Key of the plan's `run` in a dense cache that was converted from a native one: the dtype of its auxiliary states."""
Batch = tuple[int, list[int]]
"""Padded width in tokens, and the rows of the shard in one forward pass."""


@dataclass(frozen=True)
class Run:
    """How the target is run: everything that may change a bit of its outputs.

    The plan's `run` has `placement.FORM` beside these fields, each key only where it is not the default.
    """

    device: str
    """cpu or cuda."""
    processor: str
    """Name of the GPU, or the CPU's instruction set, such as AVX512."""
    compute_dtype: str
    """bf16 or fp32."""
    attention: str
    """sdpa or eager."""
    threads: int
    """torch threads of each worker process."""
    torch: str
    """Version."""
    transformers: str
    """Version."""

    @classmethod
    def here(cls, device: str | None, *, attention: str, threads: int) -> Run:
        """Return how a target runs on this machine. device: cpu or cuda; None: cuda if available.

        Raises: ValueError if cuda is asked for but not usable.
        """
        cuda = torch.cuda.is_available()
        if device == "cuda" and not cuda:
            raise ValueError("--device cuda: torch finds no usable GPU here. Use --device cpu")
        chosen = device or ("cuda" if cuda else "cpu")
        return cls(
            device=chosen,
            processor=torch.cuda.get_device_name() if chosen == "cuda" else torch.backends.cpu.get_cpu_capability(),
            compute_dtype="bf16" if chosen == "cuda" else "fp32",
            attention=attention,
            threads=threads,
            torch=str(torch.__version__),
            transformers=version_of("transformers"),
        )


@dataclass(frozen=True)
class TargetPlan:
    """Everything that decides the bytes of a target cache."""

    manifest: dict[str, Any]
    """Content of manifest.json, with format_version and selected_token_ids. A native one gets `head` and `conventions`
    only after the target was tried: `with_head`."""
    target: dict[str, Any]
    """The facts of the target: name, revision, sha256 of weights and config, sizes."""
    tokenizer: dict[str, Any]
    """sha256, template_sha256, mask_by, pad_id; document_start: id and token that begin each chat, if any."""
    source: dict[str, Any]
    """The facts of the input, `limit` among them."""
    dropped: dict[str, int]
    """Dropped inputs, counted by reason."""
    altered: dict[str, int]
    """Altered samples, counted by reason, such as truncated: chat.rows.NOT_DROPPED."""
    samples: dict[str, Any]
    """count, tokens, supervised_tokens, sha256, ids_sha256."""
    run: dict[str, Any]
    """The fields of `Run`; tensor_parallel: number of ranks of a copy of the target, if not 1."""
    batch_size: int
    """Most rows of a batch."""
    max_batch_tokens: int
    """Most rows times width of a batch; a single row may have more."""
    batches: list[list[Batch]] = field(repr=False)
    """Batches of each shard, in running order."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64), repr=False, compare=False)
    """Native only: tokens, auxiliary rows and target rows of each sample, int64 [n, 3]."""

    @property
    def is_native(self) -> bool:
        """Whether the cache is native."""
        return is_native(self.manifest)

    @cached_property
    def layout(self) -> Layout:
        """Layout of a dense cache's shards."""
        return layout_of(self.manifest, "the plan")

    @cached_property
    def native_layout(self) -> NativeLayout:
        """Layout of a native cache's shards; known before the manifest is complete."""
        return NativeLayout.of(self.manifest)

    @property
    def num_shards(self) -> int:
        """Number of shards; the last one may be short."""
        return len(self.batches)

    @cached_property
    def firsts(self) -> list[int]:
        """First sample of each shard, and the number of samples at the end."""
        rows = [sum(len(rows) for _, rows in shard) for shard in self.batches]
        return [0, *np.cumsum(rows, dtype=np.int64).tolist()]

    def first_of(self, shard: int) -> int:
        """Return the number of a shard's first sample."""
        return self.firsts[shard]

    def rows_of(self, shard: int) -> int:
        """Return the number of samples in a shard."""
        return self.firsts[shard + 1] - self.firsts[shard]

    def bytes_of(self, shard: int) -> int:
        """Return the size of a shard's file."""
        if self.is_native:
            return self.native_layout.shard_bytes(self.counts[self.firsts[shard] : self.firsts[shard + 1]])
        return self.layout.shard_bytes(self.rows_of(shard))

    @property
    def token_bytes(self) -> dict[str, float]:
        """Bytes of each tensor by token (native: mean over the samples' tokens) or by slot (dense)."""
        if self.is_native:
            return self.native_layout.token_bytes(self.counts)
        layout = self.layout
        return {name: row_bytes_of(each) / layout.seq_length for name, each in layout.fields.items()}

    def with_head(self, head: Mapping[str, Any], last_hidden: str) -> TargetPlan:
        """Return a native plan with a complete manifest.

        head: from `TargetHead.facts`. last_hidden: pre_norm or post_norm.
        """
        conventions = {"layer_index": "block_output_0based", "last_hidden": last_hidden}
        conventions |= {"shift": "none", "loss_mask": "raw"}
        return replace(self, manifest={**self.manifest, "conventions": conventions, "head": dict(head)})

    @cached_property
    def record(self) -> dict[str, Any]:
        """Content of plan.json; long lists are replaced by their sha256."""
        free = FREE if self.is_native else ("selected_token_ids",)
        manifest = {name: value for name, value in self.manifest.items() if name not in free}
        if not self.is_native:
            selected = canonical_json(self.manifest["selected_token_ids"])
            manifest["selected_token_ids_sha256"] = hashlib.sha256(selected).hexdigest()
        return {
            "kind": "eagle3",
            "format_version": SIDECAR_VERSION,
            "builder_version": BUILDER_VERSION,
            "manifest": manifest,
            "target": self.target,
            "tokenizer": self.tokenizer,
            "source": self.source,
            "dropped": self.dropped,
            "altered": self.altered,
            "samples": self.samples,
            "run": self.run,
            "batches": {
                "batch_size": self.batch_size,
                "max_batch_tokens": self.max_batch_tokens,
                "sha256": hashlib.sha256(self.batches_bytes()).hexdigest(),
            },
        }

    @cached_property
    def sha256(self) -> str:
        """sha256 of plan.json."""
        return hashlib.sha256(canonical_json(self.record)).hexdigest()

    def batches_bytes(self) -> bytes:
        """Return the content of batches.jsonl: one line for each shard."""
        return b"".join(json.dumps(shard, separators=(",", ":")).encode() + b"\n" for shard in self.batches)

    def sidecar_files(self) -> dict[str, bytes]:
        """Return the content of plan.json and batches.jsonl by name."""
        return {PLAN_NAME: canonical_json(self.record), BATCHES_NAME: self.batches_bytes()}


def make_plan(
    manifest: Mapping[str, Any],
    samples: Samples,
    *,
    target: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    source: Mapping[str, Any],
    dropped: Mapping[str, int],
    altered: Mapping[str, int] | None = None,
    run: Mapping[str, Any],
    batch_size: int,
    max_batch_tokens: int,
) -> TargetPlan:
    """Return the plan of a cache of these samples, with its batches.

    manifest: without num_samples; a native one also without num_shards, `head` and `conventions`; `enough_for` follows
        from `targets`, "loss" if it is absent, and aux_layer_ids.
    Raises: ValueError for a sample longer than seq_length, and for states from which no draft, or not made_for, learns.
    """
    if is_native(manifest):
        rows = targets_of(manifest), manifest["aux_layer_ids"], manifest.get("made_for")
        manifest = {key: manifest[key] for key in manifest if key not in ("targets", "enough_for", "made_for")}
        manifest |= manifest_keys(*rows)
    length, lengths, counts = int(manifest["seq_length"]), samples.lengths.tolist(), _counts_of(manifest, samples)
    cuts = _cuts(manifest, len(samples), counts)
    shards = [lengths[begin:end] for begin, end in pairwise(cuts)]
    sizes = {"num_samples": len(samples)} | ({"num_shards": len(shards)} if is_native(manifest) else {})
    return TargetPlan(
        manifest={**manifest, **sizes},
        target=dict(target),
        tokenizer=dict(tokenizer),
        source=dict(source),
        dropped=_counted(dropped),
        altered=_counted(altered or {}),
        samples={
            "count": len(samples),
            "tokens": len(samples.ids),
            "supervised_tokens": samples.supervised,
            "sha256": samples.sha256,
            "ids_sha256": samples.checksums[IDS_NAME],
        },
        run=dict(run),
        batch_size=batch_size,
        max_batch_tokens=max_batch_tokens,
        batches=[plan_batches(shard, batch_size, max_batch_tokens, seq_length=length) for shard in shards],
        counts=counts,
    )


def _counts_of(manifest: Mapping[str, Any], samples: Samples) -> NDArray[np.int64]:
    if not is_native(manifest):
        return np.zeros((0, 3), np.int64)
    return row_counts(samples.starts, samples.loss_mask, NativeLayout.of(manifest).targets)


def _cuts(manifest: Mapping[str, Any], samples: int, counts: NDArray[np.int64]) -> list[int]:
    """Return the first sample of each shard, and the number of samples at the end."""
    if is_native(manifest):
        return NativeLayout.of(manifest).cut(counts, manifest["shard_bytes"])
    return [*range(0, samples, int(manifest["shard_size"])), samples]


def shards_of_part(num_shards: int, part: tuple[int, int] | None) -> list[int]:
    """Return the shards of a partition. part: (i, N), i from 1 to N; None: all shards."""
    number, parts = part or (1, 1)
    return list(range(number - 1, num_shards, parts))


def _counted(numbers: Mapping[str, int]) -> dict[str, int]:
    return {name: number for name, number in sorted(numbers.items()) if number}


def plan_batches(lengths: Sequence[int], batch_size: int, max_batch_tokens: int, *, seq_length: int) -> list[Batch]:
    """Cut a shard whose rows have these lengths into batches: each row in one batch, the longest rows first.

        >>> plan_batches([5, 20, 9], batch_size=2, max_batch_tokens=64, seq_length=32)
        [(24, [1, 2]), (8, [0])]

    A batch is as wide as its longest row, rounded up to a multiple of 8 and at most seq_length. It has at most
    `batch_size` rows and `max_batch_tokens` tokens, padding included; a single row may have more.

    Raises: ValueError for a row longer than seq_length.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if order and lengths[order[0]] > seq_length:
        raise ValueError(f"row {order[0]} has {lengths[order[0]]} tokens, expected at most seq_length, {seq_length}")
    batches: list[Batch] = []
    for row in order:
        if batches:
            width, rows = batches[-1]
            if len(rows) < batch_size and (len(rows) + 1) * width <= max_batch_tokens:
                rows.append(row)
                continue
        batches.append((min(seq_length, -(-lengths[row] // _WIDTH_STEP) * _WIDTH_STEP), [row]))
    return batches


# --- the plan of a folder ---------------------------------------------------------------------------------------------


def open_plan(cache_dir: PathLike, *, follow_links: bool = False) -> TargetPlan:
    """Read the plan of a cache in its folder, finished or not. A converted cache keeps its plan.

    Raises: FileNotFoundError if one of its files is missing; CacheError E701 if they do not fit together.
    """
    record = read_record(cache_dir, follow_links=follow_links)
    if record is None:
        raise NotFound(f"{_sidecar(cache_dir) / PLAN_NAME} not found: this cache has no plan", code="E702")
    path, on_disk = _sidecar(cache_dir) / BATCHES_NAME, read_manifest(cache_dir, follow_links=follow_links)
    parts = ("target", "tokenizer", "source", "dropped", "altered", "samples", "run")
    try:
        free = FREE if is_native(on_disk) else ("selected_token_ids",)
        manifest = {**record["manifest"], **{name: on_disk[name] for name in free}}
        manifest.pop("selected_token_ids_sha256", None)
        counts = np.zeros((0, 3), np.int64)
        if is_native(on_disk):
            counts = _counts_of(on_disk, Samples.open(_sidecar(cache_dir), follow_links=follow_links))
            if len(counts) != on_disk["num_samples"]:
                raise ValueError(f"{len(counts)} samples, and the manifest has {on_disk['num_samples']}")
        plan = TargetPlan(
            manifest=manifest,
            batch_size=record["batches"]["batch_size"],
            max_batch_tokens=record["batches"]["max_batch_tokens"],
            batches=_read_batches(path, on_disk, _cuts(on_disk, on_disk["num_samples"], counts), follow_links),
            counts=counts,
            **{name: record[name] for name in parts},
        )
        wrong = differing_fields(record, plan.record) + differing_fields(on_disk, manifest, "manifest.")
    except FileNotFoundError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        raise CacheError(
            path, f"together with {PLAN_NAME} not the plan of a cache ({error!r:.300})", code="E701"
        ) from error
    if wrong := [name for name in wrong if name not in CONVERTED]:
        raise CacheError(
            _sidecar(cache_dir), f"{PLAN_NAME} does not fit the files beside it: {', '.join(wrong)}", code="E701"
        )
    return plan


def _read_batches(
    path: Path, manifest: Mapping[str, Any], cuts: Sequence[int], follow_links: bool
) -> list[list[Batch]]:
    """Return the batches of each shard. Raises: ValueError unless each row of each shard is in exactly one batch."""
    lines = read_file(path, _MAX_BATCHES_BYTES, follow_links=follow_links).splitlines()
    if len(lines) != len(cuts) - 1:
        raise ValueError(f"{len(lines)} lines, expected one for each of {len(cuts) - 1} shards")
    slots = manifest["seq_length"]
    return [_batches_of(line, end - begin, slots) for line, (begin, end) in zip(lines, pairwise(cuts), strict=True)]


def _batches_of(line: bytes, rows: int, slots: int) -> list[Batch]:
    """Return the batches of a shard of `rows` rows. Raises: ValueError unless each row is in exactly one batch."""
    if len(line) > _ROW_BYTES * (rows + 1):
        raise ValueError(f"a line of {len(line):,} bytes for {rows} rows, expected {_ROW_BYTES} a row at most")
    batches = [(checked_count(width, "width", BATCHES_NAME), list(batch)) for width, batch in json.loads(line)]
    numbers = [row for _, batch in batches for row in batch]
    whole = all(type(row) is int for row in numbers) and len(numbers) == rows and {*numbers} == {*range(rows)}
    if not whole or any(not batch or not 0 < width <= slots for width, batch in batches):
        raise ValueError(f"batches of {len(numbers)} rows, expected each of {rows} rows once, {slots} slots at most")
    return batches


def read_record(cache_dir: PathLike, *, follow_links: bool = False) -> dict[str, Any] | None:
    """Return the content of plan.json; None if there is no such file.

    Raises: CacheError E208 for another version; CacheError E701 for a missing or wrong value.
    """
    path = _sidecar(cache_dir) / PLAN_NAME
    try:
        record = parse_object(read_file(path, follow_links=follow_links))
    except FileNotFoundError:
        return None
    except CacheError:
        raise
    except ValueError as error:
        raise CacheError(path, f"not the plan of a cache ({error})", remedy=_FRESH, code="E701") from error
    if record.get("kind") != "eagle3" or record.get("format_version") != SIDECAR_VERSION:
        found = f"kind {shortened(record.get('kind'))}, format_version {shortened(record.get('format_version'))}"
        raise CacheError(path, found, f"'eagle3' and {SIDECAR_VERSION}", _FRESH, code="E208")
    for name, is_valid in _VALID.items():
        outer, _, inner = name.partition(".")
        above = record.get(outer) if inner else record
        value = above.get(inner or outer) if isinstance(above, dict) else None
        if not (is_valid(value) or (value is None and inner and inner not in _NEEDED)):
            found = f"{name} is {shortened(value)}, not as a producer writes it"
            raise CacheError(path, found, remedy=_FRESH, code="E701")
    return record


_object, _text = (partial(is_good, kind, ()) for kind in ("an object", "a text"))
_size, _count = (partial(is_good, "an integer", (least, 2**63 - 1)) for least in (1, 0))
_NEEDED = ("pad_id", "batch_size", "max_batch_tokens", "count", "sha256")
"""Fields of plan.json that must exist if their object does."""
_VALID: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("manifest", "target", "tokenizer", "source", "samples", "run", "batches"), _object),
    **dict.fromkeys(("dropped", "altered"), lambda value: _object(value) and all(map(_count, value.values()))),
    **dict.fromkeys((f"target.{key}" for key in ("name", "revision", "weights_sha256", "config_sha256")), _text),
    **dict.fromkeys(("target.vocab_size", "target.hidden_size"), _size),
    **dict.fromkeys((f"tokenizer.{key}" for key in ("sha256", "template_sha256", "mask_by")), _text),
    "tokenizer.pad_id": _count,
    "tokenizer.document_start": lambda value: (
        _object(value) and type(value.get("id")) is int and value["id"] >= 0 and _text(value.get("token"))
    ),
    "tokenizer.special_token_ids": lambda value: (
        isinstance(value, list) and all(each is None or type(each) is int for each in value)
    ),
    **dict.fromkeys((f"samples.{key}" for key in ("count", "tokens", "supervised_tokens")), _count),
    **dict.fromkeys(("samples.sha256", "samples.ids_sha256", "batches.sha256"), _text),
    **dict.fromkeys(("batches.batch_size", "batches.max_batch_tokens"), _size),
    "run.device": partial(is_good, "a text", ("cpu", "cuda")),
    "run.compute_dtype": partial(is_good, "a text", ("bf16", "fp32")),
    "run.threads": partial(is_good, "an integer", (1, _MAX_THREADS)),
    **dict.fromkeys((f"run.{key}" for key in ("processor", "attention", "torch", "transformers", "quantizer")), _text),
    "run.quantization": lambda value: (
        _text(value)
        and (
            value in SCHEMES or (value.startswith(STORED) and METHOD.fullmatch(value.removeprefix(STORED)) is not None)
        )
    ),
    "run.load_dtype": partial(is_good, "a text", tuple(DTYPES)),
    "run.tensor_parallel": partial(is_good, "an integer", (2, _MAX_RANKS)),
}
"""Dotted name of a plan.json field -> whether a value is valid."""


def differing_fields(left: Mapping[str, Any], right: Mapping[str, Any], above: str = "") -> list[str]:
    """Return the dotted names of the fields in which two records differ, sorted.

    >>> differing_fields({"run": {"threads": 1}, "limit": 5}, {"run": {"threads": 2}})
    ['limit', 'run.threads']
    """
    names: list[str] = []
    for name in sorted({*left, *right}):
        ours, theirs = left.get(name), right.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            names += differing_fields(ours, theirs, f"{above}{name}.")
        elif ours != theirs or (name in left) != (name in right):
            names.append(f"{above}{name}")
    return names


def _sidecar(cache_dir: PathLike) -> Path:
    return Path(cache_dir) / SIDECAR
