"""`recomputed`: runs some samples, drawn by a seed, through the target again and compares them with what is stored.

A sample's numbers depend on the other samples in its batch, on the padded width and on the number of threads, so whole
batches of the plan are run. In the environment of the plan every bit must be equal; in another one numbers may differ
by `compare.TOLERANCE`. A cache without a plan is compared within a wider one: unplanned.py of either form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from niels_gpt.display.numbers import many
from niels_gpt.eagle3.format.plan import Batch, Plan, differing_fields, open_plan
from niels_gpt.eagle3.forward import NonFiniteError
from niels_gpt.eagle3.inspect.native import unplanned as native
from niels_gpt.eagle3.inspect.native.again import NativeAgain
from niels_gpt.eagle3.inspect.native.opened import NativeCache
from niels_gpt.eagle3.inspect.opening import open_cache
from niels_gpt.eagle3.inspect.published.again import PublishedAgain, other_embeddings
from niels_gpt.eagle3.inspect.published.opened import PublishedCache
from niels_gpt.eagle3.inspect.published.unplanned import differences
from niels_gpt.eagle3.inspect.report import Report
from niels_gpt.eagle3.workers import Load, torch_threads
from niels_gpt.progress import Progress
from niels_gpt.storage.checks import Verdict
from niels_gpt.storage.errors import CacheError

_IDENTITY = ("revision", "weights_sha256", "config_sha256")


@dataclass(frozen=True)
class Target:
    """The target to run."""

    facts: Mapping[str, Any]
    """Its revision, weights_sha256 and config_sha256, as in a plan."""
    load: Load
    """Loads it on a device; called only where it is the plan's."""
    run: Mapping[str, Any]
    """The environment that it will run in, as in a plan: device, processor, torch, transformers and so on."""


def recomputed(
    path: Path,
    target: Target,
    *,
    k: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    follow_links: bool = False,
) -> Verdict:
    """Return the verdict on `k` samples (all, where there are fewer) that are drawn by `seed`.

    progress: its items and units are batches; samples in a cache without a plan.
    Raises: FileNotFoundError, CacheError where the manifest cannot be read; ValueError for k below 1; what
        `target.load` raises.
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


def _with_plan(
    cache: PublishedCache | NativeCache, target: Target, k: int, seed: int, progress: Progress
) -> Iterator[CacheError]:
    _ = cache.plan, cache.samples  # fail early: these errors say more than those of what needs the files
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
        how = plan, target.load(device), device, changed
        try:
            again = NativeAgain(cache, *how) if isinstance(cache, NativeCache) else PublishedAgain(cache, *how)
        except ValueError as error:  # of a model whose head gives other logits, such as NaN
            yield CacheError(cache.folder, f"the target cannot be run again: {error}", code="E706")
            return
        yield from again.other_weights()
        batches = _drawn(plan, k, seed)
        for number, (shard, batch, rows) in enumerate(batches):
            progress(number, number, len(batches))
            try:
                yield from again.differences(shard, batch, rows)
            except NonFiniteError as error:
                yield CacheError(cache.folder, f"run again, {error}", code="E706")


def _without_plan(
    cache: PublishedCache | NativeCache, target: Target, k: int, seed: int, progress: Progress
) -> Iterator[CacheError]:
    device = torch.device(target.run["device"])
    with torch_threads(target.run["threads"]):
        model = target.load(device)
        if isinstance(cache, NativeCache):
            yield from native.differences(cache, model, device, k, seed, progress)
            return
        yield from other_embeddings(cache, model.get_input_embeddings(), is_rounded=True)
        yield from differences(cache, model, device, k, seed, progress)


def _drawn(plan: Plan, k: int, seed: int) -> list[tuple[int, Batch, list[int]]]:
    """Return the batches that hold `k` samples drawn by the seed: shard, batch, and which of its rows were drawn."""
    order = torch.randperm(plan.manifest["num_samples"], generator=torch.Generator().manual_seed(seed))
    drawn, first, found = set(order[:k].tolist()), 0, []
    for shard, batches in enumerate(plan.batches):
        for batch in batches:
            if rows := sorted(row for row in batch[1] if first + row in drawn):
                found.append((shard, batch, rows))
        first += sum(len(rows) for _, rows in batches)
    return found
