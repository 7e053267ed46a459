"""Parts of one plan in one folder -> the finished cache: every shard compared with its receipt, then meta.json.

Also the error for a folder that is not sealed.

Nothing is removed of a folder that is refused. The finished folder has the bytes that one run without parts makes.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.display.numbers import many
from niels_gpt.eagle3.format.layout import LOCK_NAME, SIDECAR, PathLike, refuse_links
from niels_gpt.eagle3.format.plan import PLAN_NAME, Plan, open_plan, shards_of_part
from niels_gpt.eagle3.format.samples import IDS_NAME, SAMPLES_NAME
from niels_gpt.eagle3.parts.folder import (
    has_parts,
    known_parts,
    part_command,
    part_of,
    part_text,
    refuse_running,
    remove_parts,
)
from niels_gpt.eagle3.parts.units import SHARDS, FolderPlan
from niels_gpt.eagle3.produce.finalize import complete_meta, finish, has_target_weights
from niels_gpt.eagle3.produce.positions import Counts
from niels_gpt.eagle3.produce.resume_checks import is_finished, leftovers
from niels_gpt.engine.units import Commands, not_finished, states_of
from niels_gpt.progress import Progress
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import sha256_file
from niels_gpt.storage.locks import check_lease, file_lock

logger = logging.getLogger(__name__)
_MOST_NAMED = 12


class Sealed(NamedTuple):
    """A finished cache."""

    meta: dict[str, Any]
    """Its meta.json."""
    is_new: bool
    """Whether meta.json was written; else the cache was sealed before."""


def seal(
    cache_dir: PathLike,
    *,
    named: Path | None = None,
    deep: bool = True,
    commands: Commands | None = None,
    progress: Progress | None = None,
) -> Sealed:
    """Check all that the parts have made, and write meta.json. A sealed cache is left as it is.

    named: what errors call the folder, where it gets another name later. commands: that errors name; None: those of
    `niels-gpt eagle3 precompute`. deep: read all shards; else receipts and sizes alone.
    progress: receives shards, bytes read, and bytes to read in all.
    Raises: CacheError (E712) naming each shard that is not finished, with the commands that make it again, and where
        the plan, the samples or the target's weights are missing or damaged; CacheError while a part is being made, and
        where a draft could learn nothing; OSError.
    """
    folder = Path(cache_dir)
    refuse_links(folder)
    commands = commands or _commands(folder)
    if not os.path.lexists(folder / SIDECAR / PLAN_NAME):
        found = "holds no plan that partitions were made by"
        remedy = f"Make a partition: {part_command(folder, (1, 2))}"
        raise CacheError(named or folder, found, remedy=remedy, code="E712")
    lock = folder / SIDECAR / LOCK_NAME
    with file_lock(lock, folder, "is being written", wait=False):
        refuse_running(folder)
        plan = _plan(folder, named or folder, commands)
        meta = complete_meta(folder, plan)
        if meta is None:
            _refuse_unfinished(FolderPlan(named or folder, folder, plan), commands, deep, progress)
            for path in leftovers(folder):
                fileio.remove(path)
            check_lease(lock)
        check = partial(check_lease, lock)
        sealed = Sealed(finish(folder, plan, named, check=check), True) if meta is None else Sealed(meta, False)
        remove_parts(folder)
    if sealed.is_new and (warning := Counts.of_meta(sealed.meta).warning):
        logger.warning("%s: %s", named or folder, warning, extra={"code": "W703"})
    return sealed


def _refuse_unfinished(plan: FolderPlan, commands: Commands, deep: bool, progress: Progress | None) -> None:
    """Raise CacheError where a shard is not finished. All of it is read, if `deep`, only where nothing is missing."""
    for is_deep in (False, True) if deep else (False,):
        units = states_of(plan, SHARDS, deep=is_deep, progress=progress if is_deep else None)
        if any(unit.state != "finished" for unit in units):
            raise not_finished(plan, SHARDS, units, commands)


def _commands(folder: Path) -> Commands:
    """Return the commands of a folder that `niels-gpt eagle3 precompute` makes."""
    parts = known_parts(folder)
    return Commands(
        lambda shard: part_command(folder, part_of(shard, parts)),
        part_command(folder, None),
        shlex.join(["niels-gpt", "seal", str(folder)]),
    )


def _plan(folder: Path, named: Path, commands: Commands) -> Plan:
    """Return the plan, once its files, the samples and the target's weights are whole. Raises: CacheError."""
    again = f"Make a partition again: {commands.unit(0)}"
    try:
        plan = open_plan(folder)
    except (FileNotFoundError, CacheError) as error:
        problem = error.problem if isinstance(error, CacheError) else str(error)
        raise CacheError(named, f"its plan cannot be read: {problem}", remedy=again, code="E712") from error
    wrong = [
        name
        for name, sha256 in ((SAMPLES_NAME, plan.samples["sha256"]), (IDS_NAME, plan.samples["ids_sha256"]))
        if not (folder / SIDECAR / name).is_file() or sha256_file(folder / SIDECAR / name) != sha256
    ]
    if not has_target_weights(folder, plan):
        wrong.append("the target's weights")
    if wrong:
        raise CacheError(named, f"{' and '.join(wrong)}: missing or damaged", remedy=again, code="E712")
    return plan


# --- a folder that is not sealed --------------------------------------------------------------------------------------


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
    """Raise CacheError where parts were made in a folder that is not sealed; it names them, and the command to seal."""
    folder = path.resolve()
    if not has_parts(folder):
        return
    try:
        plan = open_plan(folder)
        state = progress_text(folder, plan, finished_of(folder, plan))
    except (FileNotFoundError, CacheError) as error:
        state = f"its plan cannot be read: {error}"
    remedy = f"Once all partitions are made: niels-gpt seal {path}"
    raise CacheError(path, f"is not sealed: {state}", remedy=remedy, code="E712")
