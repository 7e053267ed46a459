"""Parts of one plan in one folder -> the finished cache: every shard compared with its receipt, then meta.json.

Nothing is removed of a folder that is refused. The finished folder has the bytes that one run without parts makes.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.display.numbers import number_of
from niels_gpt.eagle3.format.embeddings import has_embeddings
from niels_gpt.eagle3.format.layout import LOCK_NAME, SIDECAR, PathLike, refuse_links, shard_path
from niels_gpt.eagle3.format.manifest import existing_shard_indices
from niels_gpt.eagle3.format.native.damage import native_shard_damage
from niels_gpt.eagle3.format.native.weights import has_weights
from niels_gpt.eagle3.format.plan import PLAN_NAME, Plan, open_plan
from niels_gpt.eagle3.format.samples import IDS_NAME, SAMPLES_NAME
from niels_gpt.eagle3.format.shard_writer import read_receipt, receipt_path, shard_damage
from niels_gpt.eagle3.parts.folder import (
    Part,
    known_parts,
    part_command,
    part_of,
    refuse_foreign_files,
    refuse_running,
    remove_parts,
)
from niels_gpt.eagle3.produce.finalize import complete_meta, finish
from niels_gpt.eagle3.produce.resume_checks import is_finished, leftovers
from niels_gpt.progress import Progress
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import sha256_file
from niels_gpt.storage.locks import check_lease, file_lock

_MOST_SHARDS, _MOST_COMMANDS = 12, 24


class Sealed(NamedTuple):
    """A finished cache."""

    meta: dict[str, Any]
    """Its meta.json."""
    is_new: bool
    """Whether meta.json was written; else the cache was sealed before."""


class _Bad(NamedTuple):
    """A shard that cannot be sealed."""

    shard: int
    state: str
    """missing, damaged, of another plan."""
    found: str
    """More words, "" where the state says it."""
    is_in_the_way: bool
    """Whether its file is to be removed first: a part would take it for finished, or for another cache's."""


def seal(cache_dir: PathLike, *, progress: Progress | None = None) -> Sealed:
    """Check all that the parts have made, and write meta.json. A sealed cache is left as it is.

    progress: items are shards, units their bytes; all of them are read.
    Raises: CacheError (E712) naming the shards that are missing or of another plan, and, where there are none of these,
        each damaged one, with the commands of the parts that make them again; and where the plan, the samples or the
        target's weights are missing or damaged; CacheError while a part is being made, and where a draft could learn
        nothing; OSError.
    """
    folder = Path(cache_dir)
    refuse_links(folder)
    if not os.path.lexists(folder / SIDECAR / PLAN_NAME):
        raise CacheError(
            folder,
            "holds no plan that partitions were made by",
            remedy=f"Make a partition: {part_command(folder, (1, 2))}",
            code="E712",
        )
    lock = folder / SIDECAR / LOCK_NAME
    with file_lock(lock, folder, "is being written", wait=False):
        refuse_running(folder)
        refuse_foreign_files(folder)
        plan, parts = _plan(folder), known_parts(folder)
        meta = complete_meta(folder, plan)
        if meta is None:
            _refuse_bad(folder, parts, _unfinished(folder, plan))  # before all is read, which may take hours
            _refuse_bad(folder, parts, list(_damaged(folder, plan, progress)))
            for path in leftovers(folder):
                fileio.remove(path)
            check_lease(lock)
        check = partial(check_lease, lock)
        sealed = Sealed(finish(folder, plan, check=check), is_new=True) if meta is None else Sealed(meta, is_new=False)
        remove_parts(folder)
        return sealed


def _plan(folder: Path) -> Plan:
    """Return the plan, once its files, the samples and the target's weights are whole. Raises: CacheError."""
    parts = known_parts(folder)
    again = part_command(folder, parts[0] if parts else None)
    try:
        plan = open_plan(folder)
    except (FileNotFoundError, CacheError) as error:
        problem = error.problem if isinstance(error, CacheError) else str(error)
        raise CacheError(
            folder, f"its plan cannot be read: {problem}", remedy=f"Make a partition again: {again}", code="E712"
        ) from error
    wrong = [
        name
        for name, sha256 in ((SAMPLES_NAME, plan.samples["sha256"]), (IDS_NAME, plan.samples["ids_sha256"]))
        if not (folder / SIDECAR / name).is_file() or sha256_file(folder / SIDECAR / name) != sha256
    ]
    if not (has_weights(folder) if plan.is_native else has_embeddings(folder)):
        wrong.append("the target's weights")
    if wrong:
        raise CacheError(
            folder,
            f"{' and '.join(wrong)}: missing or damaged",
            remedy=f"Make a partition again, which writes them: {again}",
            code="E712",
        )
    return plan


def _unfinished(folder: Path, plan: Plan) -> list[_Bad]:
    """Return the shards that are not there as the plan says, by receipts and sizes. Raises: CacheError for others."""
    if extra := sorted(shard for shard in existing_shard_indices(folder) if shard >= plan.num_shards):
        path = shard_path(folder, extra[0])
        raise CacheError(path, f"the plan has {plan.num_shards} shards", remedy="Move it away", code="E712")
    found = (_by_receipt(folder, plan, shard) for shard in range(plan.num_shards))
    return [bad for bad in found if bad is not None]


def _by_receipt(folder: Path, plan: Plan, shard: int) -> _Bad | None:
    """Return what is wrong with a shard by its receipt and size; None where it may be whole."""
    try:
        receipt = read_receipt(folder, shard)
    except CacheError:
        return _Bad(shard, "damaged", f"{receipt_path('', shard)} is no receipt", False)
    if receipt is None or not os.path.lexists(shard_path(folder, shard)):
        return _Bad(shard, "missing", "", False)
    if receipt["facts"].get("plan") != plan.sha256:
        return _Bad(shard, "of another plan", "", True)
    if not is_finished(folder, plan, shard):
        return _Bad(shard, "damaged", "its size or its receipt is not as the plan has it", False)
    return None


def _damaged(folder: Path, plan: Plan, progress: Progress | None) -> Iterator[_Bad]:
    """Yield the shards whose bytes do not give their checksums; all of them are read."""
    damage_of = native_shard_damage if plan.is_native else shard_damage
    sizes = [plan.bytes_of(shard) for shard in range(plan.num_shards)]
    done, total = 0, sum(sizes)
    for shard, size in enumerate(sizes):
        if damage := damage_of(folder, shard):
            found = damage[0][1].removeprefix(f"{shard_path(folder, shard)}: ")
            yield _Bad(shard, "damaged", found, True)
        done += size
        if progress is not None:
            progress(shard + 1, done, total)


def _refuse_bad(folder: Path, parts: list[Part], bad: list[_Bad]) -> None:
    """Raise CacheError where there are bad shards: which, and the commands that make them again."""
    if not bad:
        return
    groups = {state: [each for each in bad if each.state == state] for state in dict.fromkeys(b.state for b in bad)}
    texts = []
    for state, group in groups.items():
        shown = [f"{each.shard}{f' ({each.found})' if each.found else ''}" for each in group[:_MOST_SHARDS]]
        more = f" and {len(group) - _MOST_SHARDS:,} more" if len(group) > _MOST_SHARDS else ""
        texts.append(f"{state}: {', '.join(shown)}{more}")
    in_the_way = [shard_path(folder, each.shard) for each in bad if each.is_in_the_way]
    commands = [shlex.join(["rm", *in_the_way])] if in_the_way else []
    again = {part_of(each.shard, parts) for each in bad}
    commands += [part_command(folder, part) for part in sorted(again, key=lambda part: part or (0, 0))]
    more = f"\n  and {len(commands) - _MOST_COMMANDS:,} more" if len(commands) > _MOST_COMMANDS else ""
    lines = "".join(f"\n  {command}" for command in commands[:_MOST_COMMANDS])
    raise CacheError(
        folder,
        f"{number_of(len(bad), 'shard')} cannot be sealed; {'; '.join(texts)}",
        remedy=f"Make these partitions again, on any machine, and seal again:{lines}{more}",
        code="E712",
    )
