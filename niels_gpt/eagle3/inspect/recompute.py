"""`recomputed`: runs samples, drawn by a seed, through the target again and compares them with the stored ones.

A sample's numbers depend on the other samples of its batch, the padded width and the number of threads, so whole
batches of the plan are run. In the plan's environment every bit must be equal; in another one numbers may differ by
TOLERANCE.

A cache without a plan does not say how it was computed: whole slots are compared, with a wider tolerance. A native
cache has the raw ids. In versions 1 and 2 ids are shifted: of the L tokens of a sample, x[1] to x[L-1] are known and
x[0] is not. The hidden states of slot 0 depend on x[0] alone, so x[0] is searched for: likely tokens first, then the
whole vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from niels_gpt.display.numbers import many
from niels_gpt.eagle3.cache import reconstruct_target_probs
from niels_gpt.eagle3.format.layout import INT_FIELDS
from niels_gpt.eagle3.format.native import stored_rows
from niels_gpt.eagle3.format.plan import CONVERTED_FROM, Batch, TargetPlan, differing_fields, open_plan
from niels_gpt.eagle3.forward import DenseForward, NativeForward, NonFiniteError, broken_weight, cache_fields
from niels_gpt.eagle3.head import TargetHead, embeddings_of
from niels_gpt.eagle3.inspect.forms import DenseCache, NativeCache, open_cache
from niels_gpt.eagle3.inspect.opened import AUX, INDICES, PROBS, VALUES, Field, NotChecked, StoredSample, weight_row
from niels_gpt.eagle3.inspect.verify import Report
from niels_gpt.eagle3.target import CHUNK_VALUES, HFEagle3TargetModel, capture
from niels_gpt.eagle3.workers import Load, torch_threads
from niels_gpt.storage.checks import Verdict
from niels_gpt.storage.errors import CacheError
from niels_gpt.work import Progress

TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""Allowed difference in another environment, by the target's compute dtype: hidden states as a share of their layer's
largest in the sample, probabilities in absolute terms, log-normalizers as a share of the sample's largest. Rounding to
the stored dtype comes on top."""
MASK_SHARE = 0.02
"""Share of the slots with loss where a mask may differ: the first choice may change between two nearly equal tokens."""
MEDIAN, WRONG, WRONG_SHARE = 0.05, 0.2, 0.02
"""Without a plan a field is wrong if the median of its slots' differences exceeds MEDIAN, or more than WRONG_SHARE of
the slots differ by more than WRONG. The difference of two vectors is divided by their length; for two distributions it
is half the sum over the tokens. bf16 arithmetic moves a slot by some hundredths, the next layer by several tenths."""
_IDENTITY = ("revision", "weights_sha256", "config_sha256")
_CHUNK_TOKENS = 1024  # of a table of weights, compared at a time
_CHUNK_ROWS = 64
_FP8_ERROR = 1 / 16  # of a number, rounded to three bits after the first
_FP8_ROUNDING = 0.03  # of a vector's length: each value is off by a sixteenth of itself at most
_FREQUENT = 64  # tokens of the drawn samples that are tried first
_TRIED = 4  # candidates for a sample's first token with which all of it is run
_READ_SAMPLES = 200  # whose masks are read
_REPLIES, _SAME, _MANY = 8, 0.9, 0.5  # of the rule about masks that are not shifted
_TINY = torch.finfo(torch.float32).tiny

Problems = Iterator[CacheError]


@dataclass(frozen=True)
class Target:
    """The target to run."""

    facts: Mapping[str, Any]
    """Its revision, weights_sha256 and config_sha256, as in a plan."""
    load: Load
    """Loads it on a device; called only if it is the plan's target."""
    run: Mapping[str, Any]
    """Environment of the run, as in a plan: device, processor, torch, transformers and so on."""


def recomputed(
    path: Path,
    target: Target,
    *,
    k: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    follow_links: bool = False,
) -> Verdict:
    """Compare `k` samples drawn by `seed` (all, if there are fewer) with the target; return the verdict.

    progress: counts batches; samples for a cache without a plan.
    A target that cannot be loaded is the verdict's note.
    Raises: FileNotFoundError, CacheError if the manifest cannot be read; ValueError for k below 1.
    """
    if k < 1:
        raise ValueError(f"k={k}: expected the number of samples to compare, 1 or more")
    cache = open_cache(path, follow_links=follow_links)
    report, compare = Report(cache), _with_plan if cache.is_planned else _without_plan
    report.ask(compare, cache, target, k, seed, progress or (lambda items, done, total: None))
    samples = min(k, cache.num_samples)
    said = f"{many(samples, 'sample')} of {cache.num_samples:,}, drawn by seed {seed}, went through the target again."
    report.measured.say(said, samples=samples)
    return report.verdict()


def drawn_numbers(samples: int, k: int, seed: int) -> list[int]:
    """Return the numbers of `k` samples drawn by the seed, ascending."""
    return sorted(torch.randperm(samples, generator=torch.Generator().manual_seed(seed))[:k].tolist())


# --- with a plan ------------------------------------------------------------------------------------------------------


def _with_plan(cache: DenseCache | NativeCache, target: Target, k: int, seed: int, progress: Progress) -> Problems:
    _ = cache.plan, cache.samples  # fail early: these errors say more than later ones
    plan = open_plan(cache.folder, follow_links=cache.follow_links)
    other = [name for name in _IDENTITY if target.facts.get(name) != plan.target.get(name)]
    if other:
        of_plan, given = plan.target.get("name"), target.facts.get("name")
        found = f"made from another target: {', '.join(other)} of {of_plan} in the plan differ from those of {given}"
        yield CacheError(cache.folder, found, remedy="Name the target that the cache was made from", code="E706")
        return
    changed = differing_fields(plan.run, target.run)
    device = torch.device(target.run["device"])
    with torch_threads(plan.run["threads"]):
        model = _loaded(target, device)
        how = plan, cache.samples, model, device
        try:
            head = TargetHead.of_model(model) if isinstance(cache, NativeCache) else None
            dense = None if head else DenseForward(*how)
        except ValueError as error:
            yield _cannot_run(cache, model, error)
            return
        yield from other_weights(cache, model, head)
        forward = dense or NativeForward(*how, head=head)
        batches = _batches(plan, k, seed)
        for number, (shard, batch, rows) in enumerate(batches):
            progress(number, number, len(batches))
            try:
                for row, again in _run_again(cache, forward, shard, batch, rows):
                    yield from _compared(row, again, plan.run, changed)
            except NonFiniteError as error:
                yield CacheError(cache.folder, f"run again, {error}", code="E706")


def _loaded(target: Target, device: torch.device) -> Any:
    """Return the loaded target. Raises: NotChecked, as a target that cannot be loaded says nothing about the cache."""
    try:
        return target.load(device)
    except (OSError, ValueError, ImportError) as error:
        raise NotChecked(f"not made, as the target cannot be loaded: {error}") from error


def _cannot_run(cache: DenseCache | NativeCache, model: Any, error: ValueError) -> CacheError:
    """Return the error for a target whose head gives other logits; a broken weight makes them NaN."""
    if broken := broken_weight(model):
        return CacheError(cache.folder, "the target cannot be run again", remedy=broken, code="E708")
    return CacheError(cache.folder, f"the target cannot be run again: {error}", code="E706")


def _batches(plan: TargetPlan, k: int, seed: int) -> list[tuple[int, Batch, list[int]]]:
    """Return the batches that hold `k` drawn samples: shard, batch, and its drawn rows."""
    drawn, first, found = set(drawn_numbers(plan.manifest["num_samples"], k, seed)), 0, []
    for shard, batches in enumerate(plan.batches):
        for batch in batches:
            if rows := sorted(row for row in batch[1] if first + row in drawn):
                found.append((shard, batch, rows))
        first += sum(len(rows) for _, rows in batches)
    return found


def _run_again(
    cache: DenseCache | NativeCache,
    forward: DenseForward | NativeForward,
    shard: int,
    batch: Batch,
    rows: Sequence[int],
) -> Iterator[tuple[StoredSample, StoredSample]]:
    """Yield samples of one batch of a shard, each as stored and as the target computes it now.

    A recomputed dense sample has the slots of its batch, which are fewer. Raises: NonFiniteError.
    """
    made: Any = forward(shard, batch)[0]
    opened: Any = cache.opened(shard)
    for number in rows:
        row, at = cache.row(shard, opened, number), batch[1].index(number)
        if isinstance(cache, NativeCache):
            yield row, cache.of(made[at], shard, row.number)
            continue
        tensors = {name: tensor[at] for name, tensor in made.items()}
        if CONVERTED_FROM in cache.plan["run"] and PROBS in tensors:
            tensors = _as_converted(tensors, stored_rows(cache.samples.row(row.number)[1])[0])
        yield row, replace(row, tensors=tensors)


def _as_converted(again: Mapping[str, Tensor], aux_rows: int) -> dict[str, Tensor]:
    """Return a row as a conversion of a native cache writes it: nothing in the slots that no loss needs.

    aux_rows: number of the sample's auxiliary rows in a native cache of `loss`.
    """
    fields, loss = {name: tensor.clone() for name, tensor in again.items()}, again["loss_mask"] == 1
    width = len(again[PROBS])
    loss, real = loss[:width], again["attention_mask"][:width] == 1
    fields[PROBS][real & ~loss] = 1 / fields[PROBS].shape[-1]
    fields[AUX][aux_rows:] = 0
    return fields


def _compared(row: StoredSample, again: StoredSample, run: Mapping[str, Any], changed: Sequence[str]) -> Problems:
    """Yield the fields in which a sample differs from its recomputed self.

    run: of the plan. changed: parts of the environment in which this run differs from the plan's.
    """
    cache = row.cache
    if row.positions is not None and not all(map(np.array_equal, row.ids_and_loss(), again.ids_and_loss())):
        yield row.problem("input_ids or loss_bits differ from the plan's samples", "equal bits")
        return
    elsewhere = f" where the environment has another {', '.join(changed)}"
    computed = {field.name: field.values for field in again.fields()}
    for name, values, places in row.fields():
        stored = values[: len(computed[name])]
        differs = (_bits(stored) != _bits(computed[name])).any(dim=-1) if len(stored) else torch.zeros(0)
        if not differs.any():
            continue
        if not changed or name in INT_FIELDS:
            why = "" if name in INT_FIELDS else ", because the environment equals the plan's"
            at, column, one, other = _largest_difference(row, again, name, differs)
            found = f"{cache.label(name, column)} is {one:g} at {cache.at(int(places[at]), column)}"
            so = f"{name} differs {cache.within(int(differs.sum()))}"
            yield row.problem(f"{found}, run again {other:g}; {so}", f"equal bits{why}")
        elif name in ("position_mask", "argmax_ids"):
            yield from _too_many(row, name, differs, MASK_SHARE, elsewhere)
        elif name not in (INDICES, "aux_scales"):
            yield from _beyond_tolerance(row, again, Field(name, computed[name], places), run, elsewhere)


def _largest_difference(
    row: StoredSample, again: StoredSample, name: str, differs: Tensor
) -> tuple[int, int, float, float]:
    """Return row and column of a field's largest difference, and both numbers. differs: bool [rows]."""
    stored, computed = (_numbers(each, name, slice(len(differs)), torch.float64).flatten(1) for each in (row, again))
    apart = (stored - computed).abs().nan_to_num(torch.inf)
    apart[~differs] = -1  # the difference may be no more than the sign of a zero
    at, column = divmod(int(apart.argmax()), apart.shape[-1])
    return at, column, float(stored[at, column]), float(computed[at, column])


def _beyond_tolerance(
    row: StoredSample, again: StoredSample, computed: Field, run: Mapping[str, Any], elsewhere: str
) -> Problems:
    """Yield the first chunk of rows in which a float field differs by more than TOLERANCE."""
    name, cache = computed.name, row.cache
    allowed = TOLERANCE[run["compute_dtype"]] + torch.finfo(computed.values.dtype).eps
    if name == AUX and run.get(CONVERTED_FROM) == "fp8":
        allowed += _FP8_ERROR
    is_share = name in (PROBS, VALUES)
    unit = " (1: the largest of its layer)" if name == AUX else " (1: the sample's largest)" * (not is_share)
    largest = torch.ones(())
    if not is_share:
        largest = _numbers(again, name).abs().amax(dim=(0, -1), keepdim=True)
        largest = largest.clamp_min(1 if name == "log_normalizers" else _TINY)
    for start in range(0, len(computed.values), _CHUNK_ROWS):
        part = slice(start, min(start + _CHUNK_ROWS, len(computed.values)))
        one, other = (_compared_numbers(each, name, part) for each in (row, again))
        apart = ((one - other).abs() / largest).nan_to_num(torch.inf).flatten(1)
        if (most := float(apart.max())) > allowed:
            at, column = divmod(int(apart.argmax()), apart.shape[-1])
            before, now = float(one.flatten(1)[at, column]), float(other.flatten(1)[at, column])
            where = cache.at(int(computed.places[start + at]), column)
            found = f"{cache.label(name, column)} is {before:g} at {where}, run again {now:g}: {most:.2g} apart"
            yield row.problem(f"{found}{unit}", f"{allowed:.2g} at most{elsewhere}")
            return


def _too_many(row: StoredSample, name: str, wrong: Tensor, share: float, elsewhere: str = "") -> Problems:
    """Yield an error if a mask or ids differ in more places than one plus a share of the slots with loss.

    wrong: bool [rows].
    """
    targets = int(row.tensors["loss_mask"].sum()) if row.positions is None else len(row.positions)
    different, allowed = int(wrong.sum()), 1 + int(share * targets)
    if different > allowed:
        yield row.problem(f"{name} differs {row.cache.within(different)}", f"{allowed} at most{elsewhere}")


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes [rows, bytes]: NaN equals itself, and zeros of two signs differ."""
    flat = tensor.contiguous().view(torch.uint8)
    return flat.view(len(tensor), flat.numel() // max(1, len(tensor)))


def _numbers(row: StoredSample, name: str, part: slice = slice(None), dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows of a field as stored: [rows, blocks, n]; one block if the field has none."""
    if name == AUX:
        return row.states(part, torch.float32).to(dtype)
    values = row.tensors[name][part].to(dtype)
    return (values[:, None] if values.ndim == 1 else values)[:, None]


def _compared_numbers(row: StoredSample, name: str, part: slice) -> Tensor:
    """Return rows of a field as they are compared: top-k distributions at full width.

    Two runs may disagree about which of two nearly equal tokens is the k-th, so tokens outside the top k count as if
    each had the k-th probability.
    """
    values = _numbers(row, name, part)
    if name != VALUES:
        return values
    whole = reconstruct_target_probs(values[:, 0], row.tensors[INDICES][part], row.cache.draft_vocab_size)
    return torch.maximum(whole, values.amin(dim=-1))[:, None]


def other_weights(
    cache: DenseCache | NativeCache, model: Any, head: TargetHead | None, *, is_rounded: bool = False
) -> Problems:
    """Yield stored weights that differ from the target's. Nothing is computed, so every bit must be equal anywhere.

    head: the target's, for a native cache; its manifest must state the same. is_rounded: accept weights of a target
        that was loaded in another dtype.
    """
    loaded = {"embeddings": embeddings_of(model)} if head is None else head.weights()
    try:
        stored = cache.weights()
    except CacheError as error:
        yield error
        return
    if head is not None:
        stated, found = dict(cache.manifest["head"]), head.facts()
        if is_rounded:
            found["compute_dtype"] = stated["compute_dtype"]
        last = cache.manifest["conventions"]["last_hidden"]
        if (stated, last) != (found, head.last_hidden):
            yield CacheError(cache.folder, f"head is {stated}, {last}", f"{found}, {head.last_hidden}", code="E706")
    path = cache.folder / cache.WEIGHTS
    for name in sorted({*stored, *loaded}):
        shapes = [list(each[name].shape) if name in each else "absent" for each in (stored, loaded)]
        if shapes[0] != shapes[1]:
            yield CacheError(path, f"{name} is {shapes[0]}, the target's {shapes[1]}", "", cache.remedy(), code="E706")
            continue
        kept, weight = (each[name].reshape(len(each[name]), -1) for each in (stored, loaded))
        if wrong := _other_rows(kept, weight, is_rounded=is_rounded):
            so = f"wrong for {len(wrong):,} of {len(kept):,} {'tokens' if name == 'embeddings' else 'rows'}"
            other = f"{weight_row(name, wrong[0])} is not the target's"
            yield CacheError(path, other, f"equal bits; {so}", cache.remedy(), code="E706")


def _other_rows(stored: Tensor, weight: Tensor, *, is_rounded: bool) -> list[int]:
    """Return the rows of a stored table of weights [rows, n] that differ from the loaded one."""
    wrong: list[int] = []
    for start in range(0, len(stored), _CHUNK_TOKENS):
        part = slice(start, start + _CHUNK_TOKENS)
        found, expected = stored[part].float(), weight[part].detach().float().cpu()
        differs = (_bits(found) != _bits(expected)).any(dim=-1)
        for dtype in (torch.bfloat16, torch.float16) if is_rounded else ():
            differs &= (found.to(dtype) != expected.to(dtype)).any(dim=-1)
        wrong += (start + differs.nonzero()[:, 0]).tolist()
    return wrong


# --- without a plan ---------------------------------------------------------------------------------------------------


def _without_plan(cache: DenseCache | NativeCache, target: Target, k: int, seed: int, progress: Progress) -> Problems:
    device = torch.device(target.run["device"])
    with torch_threads(target.run["threads"]):
        model = _loaded(target, device)
        if isinstance(cache, NativeCache):
            yield from _native_differences(cache, model, device, drawn_numbers(cache.num_samples, k, seed), progress)
            return
        yield from other_weights(cache, model, None, is_rounded=True)
        yield from _dense_differences(cache, model, device, drawn_numbers(cache.num_samples, k, seed), progress)


def _differing(row: StoredSample, name: str, apart: Tensor, places: Any = None, rounding: float = 0.0) -> Problems:
    """Yield an error if a field is another one, by the difference at each slot or token [rows].

    places: number of each row; None: from 0. rounding: error of the stored dtype.
    """
    if not len(apart):
        return
    apart, unit = apart.nan_to_num(torch.inf), row.cache.unit
    median, most, wrong = float(apart.median()), MEDIAN + rounding, apart > WRONG
    if median > most or int(wrong.sum()) > WRONG_SHARE * len(apart):
        first = int(wrong.nonzero()[0]) if wrong.any() else int(apart.argmax())
        yield row.problem(
            f"{name} is not what the target gives: the median difference of a {unit} is {median:.2g}",
            f"{most:g} at most; {row.cache.units(int(wrong.sum()))} of {len(apart):,} differ by more than {WRONG}, "
            f"the first at {first if places is None else places[first]}",
        )


def _differing_blocks(row: StoredSample, stored: Tensor, computed: Tensor, rounding: float = 0.0) -> Problems:
    """Yield the blocks whose states differ. stored, computed: float [rows, blocks, n]."""
    apart = _length(stored - computed) / _length(computed)
    for place, layer in enumerate(row.cache.aux_layer_ids):
        yield from _differing(row, f"{AUX} of block {layer}", apart[:, place], rounding=rounding)


def _outside(row: StoredSample, ids: Tensor, vocab_size: int) -> CacheError | None:
    """Return the error for ids beyond the target's vocabulary; None for good ones."""
    if 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        return None
    return row.problem(f"input_ids from {int(ids.min())} to {int(ids.max())}", f"0 to {vocab_size - 1}")


def _length(vectors: Tensor) -> Tensor:
    """Return the length of vectors [..., n]: [...], above 0."""
    return vectors.square().sum(dim=-1).sqrt().clamp_min(_TINY)


def _native_differences(
    cache: NativeCache, model: Any, device: torch.device, numbers: Sequence[int], progress: Progress
) -> Problems:
    """Yield the differences of samples from the target's outputs for their ids, one at a time. model: on `device`."""
    try:
        head = TargetHead.of_model(model)
    except ValueError as error:
        yield _cannot_run(cache, model, error)
        return
    if cache.last_hidden == "post_norm" != head.last_hidden:  # imported: other tools store what lm_head takes
        head = head.after_norm()
    yield from other_weights(cache, model, head, is_rounded=True)
    if (head.vocab_size, head.last_hidden) != (cache.vocab_size, cache.last_hidden):
        return
    for done, number in enumerate(numbers):
        progress(done, done, len(numbers))
        row = cache.sample(number)
        ids = torch.from_numpy(row.ids_and_loss()[0])
        if wrong := _outside(row, ids, cache.vocab_size):
            yield wrong
        elif len(row.positions):
            yield from _native_compared(row, model.eval(), head, ids[None].to(device))


def _native_compared(row: StoredSample, model: Any, head: TargetHead, ids: Tensor) -> Problems:
    """Yield the fields in which a sample differs from the target's outputs for its ids [1, L]."""
    stored, positions = row.tensors, row.positions
    aux, pre_norm, post_norm = (
        each[0] for each in capture(model, ids, torch.ones_like(ids), [*row.cache.aux_layer_ids])
    )
    states = (post_norm if head.last_hidden == "post_norm" else pre_norm)[torch.as_tensor(positions, device=ids.device)]
    rounding = _FP8_ROUNDING if "aux_scales" in stored else 0.0
    yield from _differing_blocks(row, _numbers(row, AUX), aux[: len(stored[AUX])].float().cpu(), rounding)
    last = states.float().cpu()
    apart = _length(stored["last_hidden_states"].float() - last) / _length(last)
    yield from _differing(row, "last_hidden_states", apart, positions)
    yield from differing_rows(row, head, states)


def differing_rows(row: StoredSample, head: TargetHead, states: Tensor) -> Problems:
    """Yield log-normalizers and most probable tokens that differ from the head's, by states [R, H]."""
    normalizers, argmax = (each.cpu() for each in head.log_normalizer_and_argmax(states))
    apart = (row.tensors["log_normalizers"] - normalizers).abs() / normalizers.abs().max().clamp_min(1)
    yield from _differing(row, "log_normalizers", apart, row.positions)
    yield from _too_many(row, "argmax_ids", row.tensors["argmax_ids"] != argmax, WRONG_SHARE)


def _dense_differences(
    cache: DenseCache, model: Any, device: torch.device, numbers: Sequence[int], progress: Progress
) -> Problems:
    """Yield the differences of samples from the target's outputs, and a mask that is not shifted.

    model: on `device`. Raises: NotChecked if the manifest does not name the captured blocks; CacheError.
    """
    if not cache.aux_layer_ids:
        raise NotChecked("cannot be checked: manifest.json has no aux_layer_ids, so what was captured is not known")
    yield from _unshifted(cache)
    again = _Again(cache, model, device)
    if again.vocab_size != cache.vocab_size:
        found = f"target_vocab_size is {cache.vocab_size}, and the target has {again.vocab_size} tokens"
        yield CacheError(cache.folder, found, code="E701")
        return
    rows: list[StoredSample] = [row for number in numbers if (row := cache.sample(number)).length]
    for number, (row, tokens) in enumerate(zip(rows, again.first_tokens(rows), strict=True)):
        progress(number, number, len(rows))
        if not tokens:
            yield row.problem(
                "no token of the target gives the hidden states of slot 0: they come from other blocks than "
                f"{list(cache.aux_layer_ids)}, of another target, or of another slot"
            )
            continue
        wrong: list[CacheError] = []
        for token in tokens:
            found_wrong = list(again.differences(row, token))
            if not found_wrong:
                break
            wrong = wrong or found_wrong
        else:
            yield from wrong


class _Again:
    """Runs a target over samples of a dense cache."""

    def __init__(self, cache: DenseCache, model: Any, device: torch.device) -> None:
        self._cache, self._device = cache, device
        self._target = HFEagle3TargetModel(model, cache.manifest["aux_layer_ids"])
        self.vocab_size = len(self._target.get_input_embeddings().weight)  # type: ignore[arg-type]
        self._likely = [getattr(model.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")]
        self._selected = torch.tensor(cache.manifest.get("selected_token_ids") or [], dtype=torch.int64, device=device)
        self._mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
        self._mask[self._selected] = True

    def first_tokens(self, rows: list[StoredSample]) -> list[list[int]]:
        """Return for each row the tokens that give the hidden states of its slot 0, the best one first."""
        stored = [row.tensors[AUX][0].float() for row in rows]
        found: list[list[tuple[float, int]]] = [[] for _ in rows]
        candidates = self._candidates(rows)
        at_once = max(1, CHUNK_VALUES // max(1, self.vocab_size))
        for begin in range(0, len(candidates), at_once):
            tokens = candidates[begin : begin + at_once]
            states = self._run(torch.tensor(tokens)[:, None]).aux_hidden_states[:, 0].float().cpu()
            for row, wanted in enumerate(stored):
                apart = (_length(self._by_layer(states - wanted)) / _length(self._by_layer(wanted))).amax(-1)
                fits = (apart <= WRONG).nonzero()[:, 0].tolist()
                found[row] = sorted([*found[row], *((float(apart[at]), tokens[at]) for at in fits)])[:_TRIED]
            if all(found):
                break
        return [[token for _, token in tokens] for tokens in found]

    def differences(self, row: StoredSample, first: int) -> Iterator[CacheError]:
        """Yield the fields in which a row differs from the target's outputs for it with this first token."""
        length = row.length
        ids = torch.cat([torch.tensor([first]), row.tensors["input_ids"][: length - 1]])
        loss = torch.cat([torch.zeros(1, dtype=torch.int64), row.tensors["loss_mask"][: length - 1]])
        if wrong := _outside(row, ids, self.vocab_size):
            yield wrong
            return
        outputs, topk = self._run(ids[None], loss[None]), self._cache.layout.topk
        fields, _ = cache_fields(outputs, [length], self._selected, self._mask, topk=topk, dtype=row.tensors[AUX].dtype)
        both = row, replace(row, tensors={name: tensor[0] for name, tensor in fields.items()})
        one, other = (_numbers(each, AUX, slice(length)) for each in both)
        yield from _differing_blocks(row, one, other)
        inner = slice(length - 1)  # what a last token predicts depends on how the tool padded
        one, other = (_compared_numbers(each, VALUES if topk else PROBS, inner) for each in both)
        yield from _differing(row, PROBS, (one - other).abs().sum((1, 2)) / 2)
        one, other = (each.tensors["position_mask"][inner] for each in both)
        yield from _too_many(row, "position_mask", one != other, WRONG_SHARE)

    def _run(self, ids: Tensor, loss: Tensor | None = None) -> Any:
        ids = ids.to(self._device)
        loss = torch.zeros_like(ids) if loss is None else loss.to(self._device)
        return self._target.generate_batch(ids, torch.ones_like(ids), loss)

    def _candidates(self, rows: list[StoredSample]) -> list[int]:
        """Return all ids of the vocabulary, likely first tokens first."""
        counts: Counter[int] = Counter()
        for row in rows:
            counts.update(row.tensors["input_ids"][: row.length].tolist())
        frequent = [token for token, _ in counts.most_common(_FREQUENT)]
        order = dict.fromkeys([*self._likely, *frequent, *range(self.vocab_size)])
        return [token for token in order if isinstance(token, int) and 0 <= token < self.vocab_size]

    def _by_layer(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], len(self._cache.aux_layer_ids), -1)


def _unshifted(cache: DenseCache) -> Iterator[CacheError]:
    """Yield an error if the ids show that the loss mask is not shifted as they are.

    The last token of a reply's header comes before every reply and is the same in every chat. With a shifted mask its
    id stands one slot before the first slot with loss; with an unshifted mask two slots before, and the reply's first
    token, which varies, stands between.
    """
    one_before: Counter[int] = Counter()
    two_before: Counter[int] = Counter()
    left = _READ_SAMPLES
    for shard in range(cache.num_shards):
        tables = cache.opened(shard)
        for ids, loss in zip(tables["input_ids"][:left], tables["loss_mask"][:left], strict=True):
            begins = ((loss[2:] == 1) & (loss[1:-1] == 0) & (loss[:-2] == 0)).nonzero()[:, 0]
            one_before.update(ids[begins + 1].tolist())
            two_before.update(ids[begins].tolist())
        left -= min(left, cache.files.rows_of(shard))
        if not left:
            break
    replies = one_before.total()
    if replies < _REPLIES:
        return
    (_, near), (token, far) = one_before.most_common(1)[0], two_before.most_common(1)[0]
    if far >= _SAME * replies and near < _MANY * replies:
        yield CacheError(
            cache.folder,
            f"loss_mask is not shifted as input_ids are: in {far:,} of {replies:,} replies token {token} stands two "
            "slots before the first slot with loss, and what stands between varies, as the first token of a reply does",
            remedy="Slot p must have the mask of token p+1",
            code="E701",
        )
