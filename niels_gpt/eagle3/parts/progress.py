"""Which shards of which part are there, in a folder that is not sealed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from niels_gpt.display.numbers import many
from niels_gpt.eagle3.format.plan import Plan, open_plan, shards_of_part
from niels_gpt.eagle3.parts.folder import has_parts, known_parts, part_text
from niels_gpt.eagle3.produce.resume_checks import is_finished
from niels_gpt.storage.errors import CacheError

_MOST_NAMED = 12


def finished_of(folder: Path, plan: Plan) -> set[int]:
    """Return the shards of a plan that are there with their receipts, by their sizes."""
    return {shard for shard in range(plan.num_shards) if is_finished(folder, plan, shard)}


def progress_text(folder: Path, plan: Plan, done: Collection[int]) -> str:
    """Return how many shards are there, of all and of each part that was started and is not complete; "" of no part."""
    found, shown = {*done}, []
    parts = known_parts(folder)
    if not parts:
        return ""
    for part in parts:
        shards = shards_of_part(plan.num_shards, part)
        if missing := len({*shards} - found):
            shown.append(f"{part_text(part)}, {len(shards) - missing:,} of {many(len(shards), 'shard')}")
    more = f" and {len(shown) - _MOST_NAMED:,} more partitions" if len(shown) > _MOST_NAMED else ""
    each = f"; unfinished: {'; '.join(shown[:_MOST_NAMED])}{more}" if shown else ""
    return f"{len(found):,} of {plan.num_shards:,} shards are there, {many(len(parts), 'partition')} started{each}"


def refuse_unsealed(path: Path) -> None:
    """Raise CacheError where parts were made in a folder that is not sealed: says what is there, and how to seal it."""
    folder = path.resolve()
    if not has_parts(folder):
        return
    try:
        plan = open_plan(folder)
        state = progress_text(folder, plan, finished_of(folder, plan))
    except (FileNotFoundError, CacheError) as error:
        state = f"its plan cannot be read: {error}"
    raise CacheError(
        path,
        f"is not sealed: {state}",
        remedy=f"Once all partitions are made: niels-gpt seal {path}",
        code="E712",
    )
