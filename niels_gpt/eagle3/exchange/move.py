"""Converts a folder of another tool to a native cache.

Import determines the conventions, checks the samples and computes what the tool does not store: the log-normalizer and
the most probable token of each target row, from the stored last hidden state by the target's own norm and lm_head.
Memory holds the samples of one unwritten shard: at most `shard_bytes` plus one sample. `Importer` makes the shards here
and in watch.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.eagle3.derive import frequent_tokens
from niels_gpt.eagle3.exchange.automodel import AutomodelFiles
from niels_gpt.eagle3.exchange.foreign import BadSample, ForeignFiles, ForeignSample
from niels_gpt.eagle3.exchange.proof import PROOF_TOKENS, Capture, Convention, prove, reach, refuse_shifted_mask
from niels_gpt.eagle3.exchange.tools import KINDS, SpecForgeFiles, SpeculatorsFiles
from niels_gpt.eagle3.format.drafters import DRAFTERS, TARGETS, enough_for, manifest_keys
from niels_gpt.eagle3.format.layout import DTYPES, MAX_ROWS
from niels_gpt.eagle3.format.manifest import NATIVE_VERSION, write_manifest
from niels_gpt.eagle3.format.meta import write_meta
from niels_gpt.eagle3.format.native import (
    DEFAULT_SHARD_BYTES,
    NativeLayout,
    NativeSample,
    quantized,
    room_bits,
    stored_rows,
)
from niels_gpt.eagle3.format.shard_writer import NativeShardWriter
from niels_gpt.eagle3.format.shards import NativeShards
from niels_gpt.eagle3.format.weights import write_weights
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.totals import Counts
from niels_gpt.storage.errors import CacheError, TargetError, UsageError
from niels_gpt.storage.fresh_folder import fresh_folder
from niels_gpt.work import Progress

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Form = tuple[int, torch.dtype, torch.dtype]
"""Auxiliary layers of a sample, their dtype, dtype of its last hidden states."""
READERS: dict[str, Any] = {"specforge": SpecForgeFiles, "speculators": SpeculatorsFiles, "automodel": AutomodelFiles}
"""Tool -> reader of its complete folders."""


def rows_of_import(tool: str, made_for: str | None, targets: str | None) -> str:
    """Return which target rows an import gets: one of TARGETS. Arguments: see `import_cache`.

    Raises: UsageError for a kind that the tool has no files for, or none with last hidden states, and for rows that
        its loss does not find.
    """
    if made_for not in (None, *KINDS[tool]):
        raise UsageError(f"--for {made_for}: {tool} has files for {', '.join(KINDS[tool])}")
    if (tool, made_for) == ("specforge", "dflash"):
        text = "--for dflash: SpecForge's files for it have no last hidden states, which a native cache stores"
        raise UsageError(f"{text}. Import its files for eagle3, or for dspark: --for dspark")
    kind = DRAFTERS[made_for or KINDS[tool][0]]
    targets = targets or kind.targets
    if made_for and TARGETS.index(targets) < TARGETS.index(kind.reads):
        found = f"--for {made_for} with --targets {targets}: its loss reads the rows of {kind.reads}"
        raise UsageError(f"{found}. Leave --targets out, for --for {made_for} has its own")
    return targets


def open_files(tool: str, source: Path, target: Target, made_for: str | None, **how: bool) -> Any:
    """Open a folder of a tool. how: of its reader. Raises: UsageError; CacheError."""
    of_kind = {"made_for": made_for} if tool == "specforge" and made_for else {}
    return READERS[tool](source, target.hidden_size, target.vocab_size, **how, **of_kind)


Read = Callable[..., ForeignSample | None]
"""`Importer.read`, or a function with its arguments that waits for the sample."""


@dataclass(frozen=True)
class Target:
    """The target that the states come from."""

    name: str
    """Its name in the manifest."""
    head: TargetHead
    """Its final norm and lm_head: TargetHead.of_model, or of_checkpoint where it does not run."""
    hidden_size: int
    vocab_size: int
    special_token_ids: Sequence[int | None] = ()
    """bos, eos, pad, unk: first in the draft's vocabulary."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Revision and checksums, for meta.json."""


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    convention: Convention
    loss_mask: str
    """raw or shifted: the reading of the tool's mask."""
    mask_checked: bool
    """Whether the drawn samples had enough replies to show a mask of the next token; False for a stated mask."""
    samples: int
    tokens: int
    target_rows: int
    dropped: dict[str, int]
    """Samples that were left out, by reason."""
    first_dropped: tuple[str, ...]
    """Some of their names, with the faults."""
    notes: tuple[str, ...]
    """Deviations from the tool's usual form, and conversions."""
    not_proved: tuple[str, ...]
    """What was taken on trust: see `not_proved`."""


def import_cache(
    tool: str,
    source: Path,
    out: Path,
    target: Target,
    *,
    capture: Capture | None = None,
    stated: Convention | None = None,
    samples: int = 8,
    seed: int = 0,
    draft_vocab_size: int | None = None,
    aux_fp8: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    drop_bad: bool = False,
    loss_mask: str | None = None,
    made_for: str | None = None,
    targets: str | None = None,
    progress: Progress | None = None,
    follow_links: bool = False,
) -> Imported:
    """Import another tool's folder as a native cache.

    tool: a key of READERS. out: absent or empty; the cache appears complete or not at all.
    capture: runs the target over a sample; the conventions are then determined on `samples` samples, drawn by `seed`.
        stated: the conventions instead of `capture`; then nothing is compared.
    draft_vocab_size: tokens that the draft knows; None: all. aux_fp8: store the auxiliary states as float8.
    drop_bad: leave out and count samples that are missing, unreadable, mismatched or not finite, instead of failing.
    loss_mask: "raw": of each token itself; "shifted": of the next token; None: raw, and an error if the drawn samples
        show a shifted mask.
    made_for: the kind of draft: a key of DRAFTERS. SpecForge has files of its own for dspark. None: the tool's usual
        kind, and in the manifest the one that the folder says.
    targets: which target rows the cache gets: one of TARGETS; None: as the kind has it.
    progress: counts samples.
    Raises: UsageError as `rows_of_import`; CacheError for a folder or sample that does not fit, or conventions that
        cannot be determined; ValueError for contradictory arguments.
    """
    if (capture is None) == (stated is None) or samples < 1:
        raise ValueError("either a capture and one sample or more to prove the conventions on, or stated ones")
    targets = rows_of_import(tool, made_for, targets)
    files: ForeignFiles = open_files(tool, source, target, made_for, follow_links=follow_links)
    total = files.count
    assert total is not None  # of a folder that does not grow
    files.refuse_other_target(target.head.weights(), target.facts.get("num_layers"))
    made_for = made_for or (files.made_for if targets == "all" else None)
    run = Importer(tool, source, files, target, drop_bad, loss_mask, aux_fp8, shard_bytes, targets, made_for)
    order = map(int, torch.randperm(total, generator=torch.Generator().manual_seed(seed)).numpy())
    run.settle(order, run.read, samples, capture, stated)
    with fresh_folder(out, sources=[source]) as work:
        for index in range(total):
            sample = run.read(index)
            if sample is not None:
                run.add(work, index, sample)
            if progress is not None:
                progress(index + 1, index + 1, total)
        run.finish(work, total, draft_vocab_size)
    return run.imported()


class Importer:
    """Makes a cache of a folder's samples; refuses bad samples, or leaves them out and counts them.

    First `settle`, then `read` and `add` for each sample in order, then `finish`.
    """

    def __init__(
        self,
        tool: str,
        source: Path,
        files: ForeignFiles,
        target: Target,
        drop_bad: bool,
        loss_mask: str | None,
        aux_fp8: bool,
        shard_bytes: int,
        targets: str,
        made_for: str | None,
        after_shard: Callable[[int], object] = lambda index: None,
        check: Callable[[], object] | None = None,
    ) -> None:
        """targets: which target rows the cache gets: one of TARGETS. made_for: the kind of draft, for the manifest.

        after_shard: called with the first sample behind it after each shard is durable. check: called before.
        """
        self._tool, self.source, self._target, self._drop_bad, self._mask = tool, source, target, drop_bad, loss_mask
        self.files, self._after_shard, self._check = files, after_shard, check
        self._aux_fp8, self._shard_bytes, self._targets, self._made_for = aux_fp8, shard_bytes, targets, made_for
        self.dropped: Counter[str] = Counter()
        self.first_dropped: list[str] = []
        self.was_fp8 = self.mask_checked = False
        self.padding = dict.fromkeys(("slots", "unsure_kept", "unsure_left_out"), 0)
        self.form: Form | None = None
        self.totals = dict.fromkeys(("samples", "tokens", "supervised_tokens", "shards"), 0)
        self.target_rows = self.seq_length = self._bits = 0
        self._waiting: list[NativeSample] = []
        self._counts: list[NDArray[np.int64]] = []

    def checked(self, index: int) -> ForeignSample:
        """Return a sample. Raises: BadSample."""
        sample, name = self.files.read(index), self.files.name(index)
        if self._mask == "shifted":
            mask = torch.cat([torch.zeros(1, dtype=torch.bool), sample.loss_mask[:-1]])
            sample = replace(sample, loss_mask=mask)
        self._refuse_other_form(name, sample)
        _refuse_zeros(name, sample, self._targets, self._made_for)
        self.was_fp8 |= sample.was_fp8
        return sample

    def leave_out(self, error: BadSample, *, is_counted: bool) -> None:
        """Leave out a bad sample, and count it. Raises: CacheError E711 without `drop_bad`."""
        if not self._drop_bad:
            raise error.refusal(self.source) from error
        if is_counted:
            self.dropped[error.reason] += 1
            if len(self.first_dropped) < 5:
                self.first_dropped.append(f"{error.name} is {error.reason}: {error.found}")

    def read(self, index: int, *, is_counted: bool = True) -> ForeignSample | None:
        """Return a sample; None for a bad one that is left out. Raises: CacheError."""
        try:
            return self.checked(index)
        except BadSample as error:
            self.leave_out(error, is_counted=is_counted)
            return None

    def settle(
        self, order: Iterable[int], read: Read, samples: int, capture: Capture | None, stated: Convention | None
    ) -> None:
        """Fix the form and the conventions of all samples by some of them: the first usable ones in an order.

        Raises: CacheError.
        """
        drawn = self._drawn(order, read, samples, to_compare=capture is not None)
        self.mask_checked = self._mask is None and refuse_shifted_mask(self.source, [sample for _, sample in drawn])
        convention = prove(self.source, drawn, capture) if capture else stated
        assert convention is not None and self.form is not None
        says = self.files.aux_layer_ids
        if says is not None and says != convention.aux_layer_ids:
            found, expected = f"says that its states are of the blocks {[*says]}", f"{[*convention.aux_layer_ids]}"
            raise CacheError(self.source, found, expected, code="E706")
        self.fix(self.form, convention)

    def fix(self, form: Form, convention: Convention) -> None:
        """Take the form and the conventions of all samples. Raises: CacheError E711 unless they fit each other."""
        (layers, aux_dtype, dtype), stated = form, convention.aux_layer_ids
        if layers != len(stated):
            expected = f"{len(stated)}, for the blocks {[*stated]}"
            raise CacheError(self.source, f"{layers} auxiliary layers", expected, code="E711")
        fitting = enough_for(self._targets, stated)
        if not fitting or self._made_for not in (None, *fitting):  # by the rule of `rows_of_import` it has no layers
            expected = f"those that {self._made_for or KINDS[self._tool][0]} reads"
            remedy = "Pass --for mtp" if "mtp" in KINDS[self._tool] else "Leave --for and --targets out"
            raise CacheError(self.source, "no auxiliary layers", expected, remedy, code="E711")
        stored = "fp8" if self._aux_fp8 else _DTYPE_NAMES[aux_dtype]
        sizes = self._target.hidden_size, layers
        self._layout = NativeLayout(*sizes, _DTYPE_NAMES[dtype], stored, self._targets)
        self.form, self.convention = form, convention
        self._head = _head_for(convention.last_hidden, self._target.head)

    def _drawn(
        self, order: Iterable[int], read: Read, samples: int, *, to_compare: bool
    ) -> list[tuple[str, ForeignSample]]:
        """Return samples in an order, with their names. Their commonest form becomes the form of all samples.

        to_compare: skip samples without stored states among the tokens that the target runs over, as exports have them;
            if there are no others, take samples with states further back.
        Raises: CacheError.
        """
        near: dict[int, ForeignSample] = {}
        late: dict[int, ForeignSample] = {}
        seen = empty = 0
        for index in order:
            sample = read(index, is_counted=False)
            seen += 1
            if sample is None:
                continue
            tokens = reach(sample) if to_compare else PROOF_TOKENS
            if tokens == PROOF_TOKENS:
                near[index] = sample
            elif tokens is not None and len(late) < samples:
                late[index] = sample
            empty += tokens is None
            if len(near) == samples:  # before the next one is waited for
                break
        drawn = near or late
        if not drawn:
            found = f"not one of {seen:,} samples can be used"
            found += f"; {empty:,} have zeros for all states, and give nothing to compare" if empty else ""
            raise CacheError(self.source, found, code="E711")
        self.form = Counter(map(_form_of, drawn.values())).most_common(1)[0][0]
        kept = [index for index in drawn if _form_of(drawn[index]) == self.form or self.read(index, is_counted=False)]
        return [(self.files.name(index), drawn[index]) for index in kept]

    def _refuse_other_form(self, name: str, sample: ForeignSample) -> None:
        """Raise BadSample if layers or dtypes differ from most of the drawn samples."""
        form = _form_of(sample)
        if self.form is not None and form != self.form:
            texts = (f"{layers} layers of {aux}, last {last}" for layers, aux, last in (form, self.form))
            raise BadSample("mismatched", name, "{}, expected {}, as most of the drawn samples have".format(*texts))

    def finish(self, folder: Path, total: int, draft_vocab_size: int | None) -> None:
        """Write the last shard and all other files. total: number of samples, with those left out.

        Raises: CacheError if no sample is left.
        """
        self._flush(folder, total)
        if not self.totals["samples"]:
            raise CacheError(self.source, f"not one of {total:,} samples can be used", code="E711")
        write_weights(folder, self._head.weights())
        self._describe(folder, draft_vocab_size)

    def _native(self, foreign: ForeignSample) -> NativeSample:
        loss = foreign.loss_mask.numpy()
        aux_rows, positions = stored_rows(loss, self._targets)
        last = foreign.last[torch.from_numpy(positions)]
        normalizers, argmax = self._head.log_normalizer_and_argmax(last)
        aux = foreign.aux[:aux_rows]
        aux, scales = quantized(aux) if self._aux_fp8 else (aux.clone(), None)  # a clone, for each file's map to end
        self.seq_length = max(self.seq_length, len(loss))
        ids = foreign.input_ids.numpy().astype(np.uint32)
        return NativeSample(ids, loss, aux, scales, last, normalizers.cpu(), argmax.cpu(), self._targets)

    def add(self, folder: Path, index: int, foreign: ForeignSample) -> None:
        """Keep a sample until its shard is full; write a full shard first."""
        sample = self._native(foreign)
        self.padding["slots"] += foreign.padding
        self.padding["unsure_left_out" if foreign.padding else "unsure_kept"] += foreign.is_unsure
        counts = np.array([[len(sample.input_ids), len(sample.aux_hidden_states), len(sample.last_hidden_states)]])
        bits = int(self._layout.sample_bits(counts)[0])
        if self._waiting and (self._bits + bits > room_bits(self._shard_bytes) or len(self._waiting) == MAX_ROWS):
            self._flush(folder, index)  # as NativeLayout.cut
        self._bits += bits
        self._waiting.append(sample)
        self._counts.append(counts)

    def _flush(self, folder: Path, behind: int) -> None:
        if not self._waiting:
            return
        counts = np.concatenate(self._counts)
        writer = NativeShardWriter(folder, self.totals["shards"], self._layout, counts)
        tokens, aux_rows, target_rows = counts.sum(axis=0).tolist()
        supervised = sum(int(sample.loss_mask[1:].sum()) for sample in self._waiting)
        try:
            for row, sample in enumerate(self._waiting):
                writer.write(row, sample)
            facts = {"tokens": tokens, "supervised": supervised, "aux_rows": aux_rows, "target_rows": target_rows}
            writer.commit(facts, self._check)
        finally:
            writer.discard()
        new = {"samples": len(counts), "tokens": tokens, "supervised_tokens": supervised, "shards": 1}
        self.totals = {name: number + new[name] for name, number in self.totals.items()}
        self.target_rows += target_rows
        self._waiting, self._counts, self._bits = [], [], 0
        self._after_shard(behind)

    def _describe(self, folder: Path, draft_vocab_size: int | None) -> None:
        """Choose the draft's vocabulary by the stored tokens, and write manifest.json and meta.json.

        Raises: CacheError E709 if a draft could learn nothing.
        """
        manifest = self._manifest()
        stored = NativeShards(folder, manifest, max_open=1)
        chosen = frequent_tokens(stored, draft_vocab_size, self._target.special_token_ids)
        write_manifest(folder, manifest | {"draft_vocab_size": len(chosen), "selected_token_ids": chosen})
        totals = self.totals | {"positions": stored.positions(chosen)}
        if problem := Counts.of_meta({"totals": totals}).problem:
            raise CacheError(self.source, problem, code="E709")
        # plan_sha256 is null: no run of this project's producer made the states
        keys: dict[str, Any] = {"plan_sha256": None, "totals": totals, "dropped": dict(self.dropped), "altered": {}}
        keys["source"] = {"kind": self._tool, **self.files.facts_of_run()}
        write_meta(folder, {**keys, "target": dict(self._target.facts)})

    def imported(self) -> Imported:
        """Return what was imported."""
        return Imported(
            self.convention,
            self._mask or "raw",
            self.mask_checked,
            self.totals["samples"],
            self.totals["tokens"],
            self.target_rows,
            dict(self.dropped),
            tuple(self.first_dropped),
            tuple(self._notes()),
            tuple(not_proved(self.convention, self.mask_checked)),
        )

    def _notes(self) -> Iterator[str]:
        last, usual = self.convention.last_hidden, self.files.usual_last
        if last != usual:
            yield f"the last hidden states are {last}, where {self._tool} has {usual}"
        if self.was_fp8:
            yield "the states were float8 with a scale a token; they were dequantized in float32 and rounded to bf16"
        if self._aux_fp8:
            yield "the auxiliary states were quantized to float8"
        yield from self.files.notes(self.padding)

    def _manifest(self) -> dict[str, Any]:
        """Return the manifest without the draft's vocabulary."""
        layout, convention = self._layout, self.convention
        more: dict[str, Any] = {}
        if not convention.samples:
            more["not_proved"] = [*not_proved(convention, self.mask_checked)]
        if any(self.padding.values()):
            more["padding"] = self.padding
        return {
            "format_version": NATIVE_VERSION,
            "target_model": self._target.name,
            "target_vocab_size": self._target.vocab_size,
            "hidden_size": layout.hidden_size,
            "aux_layer_ids": [*convention.aux_layer_ids],
            "aux_dtype": layout.aux_dtype,
            "dtype": layout.dtype,
            "seq_length": self.seq_length,
            "num_samples": self.totals["samples"],
            "num_shards": self.totals["shards"],
            "conventions": {
                "layer_index": "block_output_0based",
                "last_hidden": convention.last_hidden,
                "shift": "none",
                "loss_mask": "raw",
            },
            "head": self._head.facts(),
            "shard_bytes": self._shard_bytes,
            **manifest_keys(self._targets, convention.aux_layer_ids, self._made_for),
            "imported": {"from": self._tool, "proved": convention.as_json(), **more},
        }


def not_proved(convention: Convention, mask_checked: bool) -> Iterator[str]:
    """Yield what an import took on trust: `states` (that the target gives them), `layers`, `last_hidden`, `loss_mask`.

    The head is the target's own by its checkpoint, and proved on its code, in every import.
    """
    if not convention.samples:
        yield from ("states", "layers", "last_hidden")
    if not mask_checked:
        yield "loss_mask"


def _form_of(sample: ForeignSample) -> Form:
    return sample.aux.shape[1], sample.aux.dtype, sample.last.dtype


def _refuse_zeros(name: str, sample: ForeignSample, targets: str, made_for: str | None) -> None:
    """Raise BadSample if a state that the cache stores is zeros; an export has zeros where its cache had none."""
    if (zeros := _first_zeros(sample, targets)) is None:
        return
    fewest = TARGETS.index(DRAFTERS[made_for].reads) if made_for else 0
    fitting = [each for each in TARGETS[fewest : TARGETS.index(targets)] if _first_zeros(sample, each) is None]
    text = "If the folder is an export of a cache with fewer target rows, pass --targets {}. "
    remedy = text.format(fitting[-1]) + "Else leave such samples out: --drop-bad" if fitting else ""
    raise BadSample("mismatched", name, f"{zeros} are zeros, and --targets {targets} stores them", remedy)


def _first_zeros(sample: ForeignSample, targets: str) -> str | None:
    """Return the name of the first stored states that are zeros; None if there are none."""
    aux_rows, positions = stored_rows(sample.loss_mask.numpy(), targets)
    aux = sample.aux[:aux_rows].any(-1).all(-1)
    last = sample.last[torch.from_numpy(positions)].any(-1)
    for part, filled, tokens in (("auxiliary", aux, np.arange(aux_rows)), ("last", last, positions)):
        if not bool(filled.all()):
            return f"the {part} states of token {tokens[int((~filled).nonzero()[0])]}"
    return None


def _head_for(last_hidden: str, head: TargetHead) -> TargetHead:
    """Return the head for states on one side of the final norm. Raises: ValueError for an unknown norm."""
    if last_hidden == head.last_hidden:
        return head
    if last_hidden == "pre_norm":
        text = "the states are before the target's final norm, and that norm is none that is known here"
        raise TargetError(f"{text}. Import post-norm states")
    return head.after_norm()
