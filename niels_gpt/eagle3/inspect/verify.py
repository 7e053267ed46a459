"""verify: makes the checks of a finished cache, reading each file and sample once, and collects their findings.

`_questions` maps each check of checks.py to its functions. A cache is read in pieces of some megabytes. A check that
needs a sidecar or a plan is not made for a cache that never had one, and its verdict says so. A file that several
checks miss is reported only by `complete`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from niels_gpt.display.numbers import many, share_text
from niels_gpt.eagle3.format.layout import (
    INT_FIELDS,
    MANIFEST_NAME,
    SHARD_NAME,
    SIDECAR,
    is_lock,
    open_file,
    read_meta_bytes,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import existing_shard_indices
from niels_gpt.eagle3.format.meta import content_sha256, file_sha256
from niels_gpt.eagle3.format.samples import IDS_NAME, SAMPLES_NAME
from niels_gpt.eagle3.format.shard_writer import receipt_path
from niels_gpt.eagle3.inspect.forms import NativeCache, open_cache
from niels_gpt.eagle3.inspect.opened import (
    BY_SOURCE,
    FOREIGN,
    INDICES,
    PROBS,
    VALUES,
    Eagle3Cache,
    NotChecked,
    StoredSample,
    weight_row,
)
from niels_gpt.eagle3.totals import FEW
from niels_gpt.storage.checks import MOST_PROBLEMS, Figures, Place, PlacedProblem, Verdict, first_problems, place_of
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import checked_name, file_records, meta_crc32, parse_object, shortened
from niels_gpt.work import Progress

_RECEIPT = re.compile(r"shard-(.*)\.json", re.DOTALL)
_INDEX = re.compile(r"[0-9]{6}")
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, OSError)
_CHUNK = 1 << 21  # values looked at a time: 8 MiB in float32
_SOFTMAX_ERROR = 2**-14  # of a sum in float32 over a vocabulary, with room
_ROWS = 16  # target rows of a shard that are compared with the head
LOGIT_SHARE = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 1.6e-2}
"""Allowed distance of a log-normalizer from the value computed from the stored state, as a share of the row's largest
logit: by the less exact dtype, the stored one or the head's."""

Problems = Iterator[CacheError | OSError | PlacedProblem]


def verify(
    path: Path,
    *,
    names: Collection[str] | None = None,
    progress: Progress | None = None,
    follow_links: bool = False,
) -> dict[str, Verdict]:
    """Make checks; return their verdicts by name, in the order of CHECKS. `recomputed` has its own function.

    path: the public folder; resolved once, so all checks read one version.
    names: checks to make; None: all.
    progress: called with finished passes over a shard, bytes read, and the bytes of all passes.
    follow_links: read files that are links, as in a snapshot of the Hugging Face hub; else they are problems.
    Raises: FileNotFoundError and CacheError if the manifest cannot be read; ValueError for an unknown name. Any other
        damage is a problem of the checks that need the file.
    """
    passes_done, bytes_done, total = 0, 0, 0

    def tick(num_bytes: int) -> None:
        nonlocal bytes_done
        bytes_done += num_bytes
        if progress is not None:
            progress(passes_done, bytes_done, total)

    cache = open_cache(path, follow_links=follow_links, tick=tick)
    questions = _questions(cache)
    if unknown := [name for name in names or () if name not in questions]:
        raise ValueError(f"there is no check {unknown[0]!r}, expected some of {', '.join(questions)}")
    reports = {name: Report(cache) for name in questions if names is None or name in names}
    for name, report in reports.items():
        report.ask_once(questions[name])
    by_shard = [(report, ask) for name, report in reports.items() if (ask := questions[name].per_shard)]
    by_row = [(report, ask_row) for name, report in reports.items() if (ask_row := questions[name].per_row)]
    sizes = _shard_sizes(cache)
    total = (len(by_shard) + bool(by_row)) * sum(sizes.values())
    for shard in sizes:
        for report, question in by_shard:
            report.ask(question, cache, shard)
            passes_done += 1
        if by_row:
            _ask_rows(cache, shard, by_row)
            passes_done += 1
    return {name: report.verdict() for name, report in reports.items()}


def _shard_sizes(cache: Eagle3Cache) -> dict[int, int]:
    """Return the shards to read and their sizes; {} if the manifest does not name them, as `complete` reports."""
    sizes = dict[int, int]()
    with suppress(CacheError):
        for shard in cache.shards:
            sizes[shard] = 0
            with suppress(OSError):  # a dangling link
                sizes[shard] = os.stat(shard_path(cache.folder, shard)).st_size
    return sizes


def _ask_rows(cache: Eagle3Cache, shard: int, questions: Sequence[tuple[Report, Callable[[Any], Problems]]]) -> None:
    """Make several checks in one pass over a shard."""
    try:
        rows = cache.stored(shard)
    except (CacheError, OSError) as error:
        for report, _ in questions:
            report.ask(iter, [error])
        return
    for row in rows:
        for report, question in questions:
            report.ask(question, row)
        cache.tick(row.nbytes)


# --- one check --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Questions:
    """The functions that make one check."""

    once: Callable[[Any], Problems] | None = None
    per_shard: Callable[[Any, int], Problems] | None = None
    per_row: Callable[[Any], Problems] | None = None
    remarks: Callable[[Any], Problems] | None = None
    """Yields remarks, which are no damage."""
    measured: Callable[[Any, Figures], None] | None = None
    """States measured figures without reading the shards again."""
    figures: Callable[[Any], str] | None = None


def _questions(cache: Eagle3Cache) -> dict[str, Questions]:
    """Map each check to its functions, in the order of CHECKS."""
    distribution = Questions(per_row=_not_distributions, measured=_say_samples)
    if isinstance(cache, NativeCache):
        distribution = Questions(per_shard=_not_by_the_head, per_row=_not_target_rows, measured=_say_samples)
    return {
        "complete": Questions(once=_incomplete, remarks=_unused_files, measured=_say_files),
        "checksums": Questions(once=_wrong_checksums, per_shard=_wrong_shard, measured=_say_samples),
        "finite": Questions(once=_weights_not_finite, per_row=_not_finite, measured=_say_samples),
        "ids_match": Questions(once=_other_samples, per_row=_other_ids, measured=_say_samples),
        "distribution": distribution,
        "positions": Questions(
            once=_no_positions, remarks=_few_positions, figures=lambda cache: str(cache.counts), measured=_say_counts
        ),
    }


class Report:
    """One check's findings: at most MOST_PROBLEMS problems, each once, or why the check was not made."""

    def __init__(self, cache: Eagle3Cache) -> None:
        self._cache = cache
        self._problems: dict[str, Sequence[Place]] = {}  # each with its places in files
        self._note: str | None = None
        self._remarks: list[str] = []
        self._figures = ""
        self.measured = Figures()

    def ask(self, question: Callable[..., Problems], *arguments: object) -> None:
        """Add the problems that a function yields; its error is a problem too."""
        if len(self._problems) > MOST_PROBLEMS or self._note:
            return
        try:
            for problem in islice(question(*arguments), MOST_PROBLEMS + 1 - len(self._problems)):
                self._add(problem)
        except NotChecked as error:
            self._note = str(error)
        except FileNotFoundError as error:
            missing = error.filename and self._cache.missing(error.filename, "one of the cache's")
            self._add(missing or error)
        except CacheError as error:
            self._add(self._cache.with_remedy(error) if error.code == "E205" else error)
        except OSError as error:  # names the file, as the others do
            self._add(error)
        except _MALFORMED as error:
            found = f"not as docs/formats.md describes it ({error!r})"
            remedy = "See what the other checks report, or produce the cache again"
            self._add(CacheError(self._cache.folder, found, remedy=remedy, code="E701"))

    def _add(self, problem: CacheError | OSError | PlacedProblem) -> None:
        """Keep a problem once: a damaged file is found for each row that needs it."""
        places = problem.places if isinstance(problem, PlacedProblem) else [place_of(problem, self._cache.folder)]
        self._problems[str(problem)] = places

    def ask_once(self, questions: Questions) -> None:
        """Ask the questions about the whole cache. If remarks or figures fail, the problems say why."""
        if questions.once:
            self.ask(questions.once, self._cache)
        with suppress(NotChecked, *_MALFORMED):
            if questions.remarks:
                self._remarks = [str(remark) for remark in islice(questions.remarks(self._cache), MOST_PROBLEMS + 1)]
            if questions.measured:
                questions.measured(self._cache, self.measured)
            if questions.figures:
                self._figures = questions.figures(self._cache)

    def verdict(self) -> Verdict:
        """Return the findings so far. Messages name the public folder instead of the version's."""
        folder, path = str(self._cache.folder), str(self._cache.path)
        found = (PlacedProblem(text.replace(folder, path), places) for text, places in self._problems.items())
        problems, remarks = first_problems(found), first_problems(text.replace(folder, path) for text in self._remarks)
        measured = self.measured
        return Verdict(problems, self._note, remarks, self._figures, measured.sentence, measured.values)


def _say_samples(cache: Eagle3Cache, figures: Figures, what: str = "were read") -> None:
    shards, samples = cache.num_shards, cache.num_samples
    figures.say(f"{many(samples, 'sample')} in {many(shards, 'shard')} {what}.", samples=samples, shards=shards)


def _say_files(cache: Eagle3Cache, figures: Figures) -> None:
    _say_samples(cache, figures, "are there; of each shard the header and a sample were read")


# --- complete ---------------------------------------------------------------------------------------------------------


def _incomplete(cache: Eagle3Cache) -> Problems:
    """Yield files that are missing, left over or of another form; without any, open every shard with the reader."""
    is_complete = True
    for problem in _wrong_files(cache):
        is_complete = False
        yield problem
    if is_complete:
        cache.read_each_shard()


def _wrong_files(cache: Eagle3Cache) -> Problems:
    folder, declared = cache.folder, f"{cache.num_shards:,} shards of {cache.num_samples:,} samples by {MANIFEST_NAME}"
    yield from _missing_files(cache)
    found = existing_shard_indices(folder)
    for shard in (shard for shard in range(cache.num_shards) if shard not in found):
        yield cache.missing(shard_path(folder, shard), declared)
    for shard in sorted(shard for shard in found if shard >= cache.num_shards):
        yield CacheError(shard_path(folder, shard), "a shard too many", declared, "Move it away", code="E701")
    for path in _files(folder / SIDECAR):
        receipt = _RECEIPT.fullmatch(path.name)
        if receipt and not (_INDEX.fullmatch(receipt[1]) and int(receipt[1]) < cache.num_shards):
            yield CacheError(path, "a receipt too many", declared, "Move it away", code="E701")
    for shard in cache.shards:
        yield from cache.wrong_form(shard)
    yield from _wrong_vocabulary(cache)
    try:
        yield from cache.wrong_weights()
    except CacheError as error:  # the samples are compared all the same
        yield error
    if cache.is_planned and len(cache.samples) != cache.num_samples:
        expected = f"{cache.num_samples} by {MANIFEST_NAME}"
        yield CacheError(folder / SIDECAR, f"{len(cache.samples)} samples", expected, code="E701")


def _missing_files(cache: Eagle3Cache) -> Problems:
    if not cache.is_ours:
        return
    if cache.is_planned:
        path = cache.folder / META_NAME
        if not os.path.lexists(path):
            remedy = "Resume it: precompute --resume"
            yield CacheError(path, "no such file: production has not finished", remedy=remedy, code="E702")
        for name in cache.planned:
            path = cache.folder / SIDECAR / name
            if not os.path.lexists(path):
                yield cache.missing(path, "one in every cache that precompute made")
    for shard in range(cache.num_shards):
        if not os.path.lexists(receipt_path(cache.folder, shard)):
            yield cache.receipt_missing(shard)


def _unused_files(cache: Eagle3Cache) -> Problems:
    """Yield harmless files: temporary files of killed writers, and sidecar files that nothing reads."""
    left = "left by a writer that was killed. It is not read; --resume removes it"
    for path in (*_files(cache.folder), *_files(cache.folder / SIDECAR)):
        name, is_ours = path.name, path.parent == cache.folder
        if name.startswith(".") and path.suffix == ".tmp":
            yield CacheError(path, left, code="E701")
        elif not (is_ours or name in cache.planned or is_lock(name) or _RECEIPT.fullmatch(name)):
            yield CacheError(path, "no file of a cache. It is not read", code="E701")


def _files(folder: Path) -> list[Path]:
    try:
        return [] if folder.is_symlink() else sorted(folder.iterdir())
    except OSError:
        return []


def _wrong_vocabulary(cache: Eagle3Cache) -> Problems:
    selected, size, vocab = cache.manifest.get("selected_token_ids"), cache.draft_vocab_size, cache.vocab_size
    where, expected = cache.folder / MANIFEST_NAME, f"{size:,} different ones"
    if not isinstance(selected, list) or not all(type(token) is int for token in selected):
        found, expected = f"selected_token_ids is {shortened(selected)}", f"a list of {size:,} token ids"
        yield CacheError(where, found, expected, code="E701")
        return
    outside, distinct = [token for token in selected if not 0 <= token < vocab], len(set(selected))
    if len(selected) != size or distinct != size or outside:
        counts = (
            f"{len(selected):,} ids, {distinct:,} different ones and {len(outside):,} beyond the target's {vocab:,}"
        )
        yield CacheError(where, f"selected_token_ids has {counts}", expected, code="E701")


# --- checksums --------------------------------------------------------------------------------------------------------


def _wrong_checksums(cache: Eagle3Cache) -> Problems:
    """Yield a meta.json, or files listed in it, with another checksum; shards have their own function."""
    if not cache.is_ours:
        raise NotChecked(FOREIGN)
    path = cache.folder / META_NAME
    if not cache.has_meta:
        return
    raw = read_meta_bytes(cache.folder, follow_links=cache.follow_links)
    recorded, computed = meta_crc32(raw)
    if recorded != computed:
        found = "meta_crc32 does not fit its content: it was changed"
        yield CacheError(path, found, remedy=cache.remedy(), code="E701")
    meta = parse_object(raw)
    is_whole = len(existing_shard_indices(cache.folder)) == cache.num_shards == len(cache.shards)
    records = file_records(meta, str(path))
    for record in records:
        if SHARD_NAME.match(record["name"]):
            continue  # the receipts have the checksums of shards, by sample
        for wrong in _wrong_file(cache, record["name"], record["bytes"], record["sha256"]):
            is_whole = False
            yield wrong
    # content_sha256 is over all files: a missing or changed one, reported above, always changes it.
    stated = meta.get("content_sha256")
    if is_whole and (content := content_sha256(records)) != stated:  # of files that were read just now
        found = f"content_sha256 is {shortened(stated)[:14]}, but the files give {content[:12]}"
        yield CacheError(path, found, remedy=cache.remedy(), code="E701")


def _wrong_file(cache: Eagle3Cache, name: str, size: int, sha256: str) -> Problems:
    path = cache.folder / checked_name(name, "a file's name", str(cache.folder))
    if not os.path.lexists(path):
        yield cache.missing(path, f"one of {size:,} bytes by {META_NAME}")
        return
    if path.is_symlink() and not cache.follow_links:
        os.close(open_file(path))  # raises the error that links get
    found, expected, is_file = "", f"{size:,} bytes by {META_NAME}", path.is_file()
    if not is_file:
        found, expected = "not a regular file", f"one of {expected}"
    elif path.stat().st_size != size:
        found = f"{path.stat().st_size:,} bytes"
    elif (computed := file_sha256(path, follow_links=cache.follow_links)) != sha256:
        found, expected = f"sha256 {computed[:12]}", f"{sha256[:12]} by {META_NAME}"
    if found:
        yield CacheError(path, found, expected, cache.remedy(path.name, is_file=is_file), code="E701")


def _wrong_shard(cache: Eagle3Cache, shard: int) -> Problems:
    """Yield the samples of a shard whose bytes differ from its receipt."""
    if not os.path.lexists(receipt_path(cache.folder, shard)):
        yield cache.receipt_missing(shard)
        return
    path = Path(shard_path(cache.folder, shard))
    for row, damage in cache.files.damage(shard, cache.tick):
        text, spans = damage, [(0, path.stat().st_size)]
        if not path.is_file():  # a folder or a pipe
            text = f"{damage}. {cache.remedy(is_file=False)}"
        if row is not None:
            text = f"{damage}. It is {cache.name(cache.files.first_of(shard) + row)}. {cache.remedy()}"
            spans = cache.files.spans(shard, row)
        yield PlacedProblem(text, [(path.name, *span) for span in spans])


# --- finite -----------------------------------------------------------------------------------------------------------


def _weights_not_finite(cache: Eagle3Cache) -> Problems:
    """Yield the first number that is not finite in each of the target's weights."""
    for name, weight in cache.weights().items():
        for start, wrong, _ in _wrong_numbers(weight):
            what = weight_row(name, start + int(wrong.nonzero()[0, 0]))
            found = f"{what} is not finite: a weight of the target is broken"
            yield CacheError(cache.folder / cache.WEIGHTS, found, "numbers", code="E701")
            break


def _not_finite(row: StoredSample) -> Problems:
    """Yield the first NaN or infinity of each float field, and how many slots or tokens have one."""
    cache = row.cache
    for name, values, places in row.fields():
        wrong_rows, first = 0, ""
        for start, wrong, chunk in _wrong_numbers(values):
            at, column = wrong.nonzero()[0].tolist()
            where = cache.at(int(places[start + at]), column)
            first = first or f"{cache.label(name, column)} is {float(chunk[at, column])} at {where}"
            wrong_rows += int(wrong.any(dim=-1).sum())
        if wrong_rows:
            yield row.problem(f"{first} (so {cache.within(wrong_rows)})", "finite numbers")


def _wrong_numbers(values: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the chunks [rows, width] of a tensor that are not finite: first row, mask of bad numbers, chunk."""
    for start, chunk in _chunks(values) if values.is_floating_point() else ():
        if chunk.dtype == torch.float8_e4m3fn:  # has NaN, and no infinity
            wrong = (chunk.view(torch.uint8) & 0x7F) == 0x7F
            is_good = not bool(wrong.any())
        else:
            low, high = torch.aminmax(chunk)  # both are NaN where one is there; no copy is made
            is_good = bool(torch.isfinite(low) and torch.isfinite(high))
            wrong = chunk if is_good else ~torch.isfinite(chunk)
        if not is_good:
            yield start, wrong, chunk


def _chunks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield a tensor in chunks [rows, width] of at most _CHUNK values, each with the number of its first row."""
    tensor = tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]
    step = max(1, _CHUNK // max(1, tensor.shape[-1]))
    for start in range(0, len(tensor) if tensor.numel() else 0, step):
        yield start, tensor[start : start + step]


# --- ids_match --------------------------------------------------------------------------------------------------------


def _other_samples(cache: Eagle3Cache) -> Problems:
    planned = cache.plan["samples"]
    for name, key in ((SAMPLES_NAME, "sha256"), (IDS_NAME, "ids_sha256")):
        if (computed := cache.samples.checksums[name]) != planned[key]:
            by = f"{str(planned[key])[:12]} by {SIDECAR}/plan.json: these are not the rows that the target was run on"
            path = cache.folder / SIDECAR / name
            yield CacheError(path, f"sha256 {computed[:12]}", by, cache.remedy(name), code="E701")


def _other_ids(row: StoredSample) -> Problems:
    """Yield differences of the stored ids and masks from the source's row."""
    for name, stored, wanted in row.cache.beside(row):
        for at, so in _first(row, stored != wanted):
            found = f"{name} is {int(stored[at])} at {row.cache.unit} {at}"
            yield row.problem(found, f"{int(wanted[at])} {BY_SOURCE}{so}")


def _first(row: StoredSample, wrong: Any) -> Iterator[tuple[int, str]]:
    """Yield the first true place of `wrong`, bool [rows], and a note on their number; nothing if none is true."""
    found = np.flatnonzero(np.asarray(wrong))
    if len(found):
        yield int(found[0]), f"; wrong {row.cache.within(len(found))}"


# --- distribution -----------------------------------------------------------------------------------------------------


def _not_distributions(row: StoredSample) -> Problems:
    """Yield faults of the target's distribution, and of the mask that says where it counts."""
    length, supervised, loss = row.length, row.tensors["position_mask"][:, 0], row.tensors["loss_mask"]
    for slot, so in _first(row, supervised & (loss != 1)):
        yield row.problem(f"position_mask is true at slot {slot} where loss_mask is 0", f"false{so}")
    last = max(0, length - 1)
    for slot, _ in _first(row, loss[last:] == 1):
        yield row.problem(
            f"loss_mask is 1 at slot {last + slot}",
            f"0: after its {length:,} tokens there is none to predict. It must be shifted as input_ids are: slot p has "
            "the mask of token p+1",
        )
    yield from _wrong_sums(row, length, supervised)
    if VALUES in row.tensors:
        yield from _wrong_top_k(row, length)
    if row.cache.is_planned:  # other tools store what the target gives for the padding
        for name, tensor in row.tensors.items():
            padding = tensor[length:]
            if name not in INT_FIELDS and padding.numel() and bool(padding.any()):
                for slot, _ in _first(row, padding.reshape(len(padding), -1).any(dim=-1)):
                    expected = f"zeros after its {length:,} tokens"
                    yield row.problem(f"{name} is not zero at slot {length + slot}", expected)


def tolerance(dtype: torch.dtype, width: int) -> float:
    """Return how far a sum of `width` probabilities, each rounded to a dtype, may be from 1."""
    about = torch.finfo(dtype)
    return about.eps / 2 + width * about.smallest_normal * about.eps / 2 + _SOFTMAX_ERROR


def _wrong_sums(row: StoredSample, length: int, supervised: Tensor) -> Problems:
    probs = row.tensors[VALUES if VALUES in row.tensors else PROBS]
    allowed = tolerance(probs.dtype, probs.shape[-1])
    lowest = torch.cat([chunk.amin(dim=-1) for _, chunk in _chunks(probs)])
    sums = torch.cat([chunk.sum(dim=-1, dtype=torch.float32) for _, chunk in _chunks(probs)])
    # In the padding other tools store a distribution, and this project stores zeros.
    is_padding = (sums == 0) & (torch.arange(len(sums)) >= length) & ~supervised
    for slot, so in _first(row, lowest < 0):
        yield row.problem(f"a probability is {float(lowest[slot]):g} at slot {slot}", f"none below 0{so}")
    for slot, so in _first(row, ~((sums - 1).abs() <= allowed) & ~is_padding):
        yield row.problem(f"probabilities sum to {float(sums[slot]):.6g} at slot {slot}", f"1 within {allowed:.2g}{so}")


def _wrong_top_k(row: StoredSample, length: int) -> Problems:
    values, indices = row.tensors[VALUES][:length], row.tensors[INDICES][:length]
    size = row.cache.draft_vocab_size
    for slot, so in _first(row, ((indices < 0) | (indices >= size)).any(dim=-1)):
        outside = next(index for index in indices[slot].tolist() if not 0 <= index < size)
        yield row.problem(f"draft id {outside} at slot {slot}", f"0 to {size - 1}{so}")
    ordered = indices.sort(dim=-1).values
    for slot, so in _first(row, (ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)):
        yield row.problem(f"a draft id is there twice at slot {slot}", f"different ones{so}")
    for slot, so in _first(row, (values[:, 1:] > values[:, :-1]).any(dim=-1)):
        yield row.problem(f"{VALUES} rise at slot {slot}", f"the largest first{so}")


def _not_target_rows(row: StoredSample) -> Problems:
    """Yield impossible target ids, and scales that no fp8 writer writes."""
    argmax, scales, positions = row.tensors["argmax_ids"], row.tensors.get("aux_scales"), row.positions
    size = row.cache.vocab_size
    for at, so in _first(row, argmax >= size):
        yield row.problem(f"argmax_ids is {int(argmax[at])} at token {positions[at]}", f"an id below {size}{so}")
    if scales is not None:
        for at, so in _first(row, (scales < 0).any(dim=-1)):
            yield row.problem(f"aux_scales is {scales[at].tolist()} at token {at}", f"none below 0{so}")


def _not_by_the_head(cache: NativeCache, shard: int) -> Problems:
    """Yield target rows, spread over a shard, whose log-normalizer or argmax contradicts their states."""
    mapped = cache.opened(shard)
    cache.tick(sum(tensor.nbytes for tensor in mapped.tensors.values()))  # the rest is not read
    starts = mapped.starts[:, 2]
    if not starts[-1]:
        return
    chosen = np.unique(np.linspace(0, starts[-1] - 1, _ROWS).astype(np.int64))
    share = max(LOGIT_SHARE[cache.manifest["dtype"]], LOGIT_SHARE[cache.manifest["head"]["compute_dtype"]])
    with torch.no_grad():  # of all rows at once: lm_head is read once
        logits = cache.head.logits(mapped.tensors["last_hidden_states"][torch.from_numpy(chosen)]).float()
    for target_row, row_logits in zip(chosen, logits, strict=True):
        row = int(np.searchsorted(starts, target_row, side="right")) - 1
        yield from _compared(cache.row(shard, mapped, row), int(target_row - starts[row]), row_logits, share)


def _compared(row: StoredSample, at: int, logits: Tensor, share: float) -> Problems:
    allowed = share * max(1.0, float(logits.abs().max()))
    stored, computed = float(row.tensors["log_normalizers"][at]), float(logits.logsumexp(-1))
    token, position = int(row.tensors["argmax_ids"][at]), row.positions[at]
    by = f"by {row.cache.WEIGHTS} and the stored state"
    if not abs(stored - computed) <= allowed:
        expected = f"{computed:.6g} within {allowed:.2g} {by}"
        yield row.problem(f"log_normalizers is {stored:.6g} at token {position}", expected)
    if token < len(logits) and not float(logits[token]) >= float(logits.max()) - 2 * allowed:
        apart = float(logits.max() - logits[token])
        expected = f"{int(logits.argmax())}, whose logit is {apart:.3g} higher {by}"
        yield row.problem(f"argmax_ids is {token} at token {position}", expected)


# --- positions --------------------------------------------------------------------------------------------------------


def _no_positions(cache: Eagle3Cache) -> Problems:
    if problem := cache.counts.problem:
        yield CacheError(cache.folder, problem, code="E709")


def _few_positions(cache: Eagle3Cache) -> Problems:
    if warning := cache.counts.warning:
        yield CacheError(cache.folder, warning, code="W703")


def _say_counts(cache: Eagle3Cache, figures: Figures) -> None:
    counts = cache.counts
    figures.say(
        f"{counts}.",
        positions=counts.positions,
        supervised_share=counts.supervised_share,
        position_share=counts.position_share,
        least=f"{share_text(FEW)} of the supervised tokens are positions",
    )
