"""Is a rollout cache good? The checks of files and meta.json that all caches have, and whether every group can be read.

niels_gpt.inspection has the first; it does not know what rollouts are, and niels_gpt.prefix_tree reads them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.builders.split import SPLITS
from niels_gpt.cache.meta import read_meta
from niels_gpt.inspection import verify as inspection
from niels_gpt.inspection.file_checks import Damage
from niels_gpt.inspection.verify import Limits
from niels_gpt.progress import Progress
from niels_gpt.storage.checks import Check, Verdict, first_problems
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import resolved

GROUPS_READ = Check(
    "groups_read",
    "The reader opens every split: index, ids, loss mask and fields belong together. A deep check reads every group, "
    "folds it, and compares the index with its ids.",
)
CHECKS = (*inspection.CHECKS["rollouts"][:2], GROUPS_READ, *inspection.CHECKS["rollouts"][2:])
"""The checks of a rollout cache, blocking ones first."""
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def verify(cache: Path, limits: Limits, *, names: Collection[str] | None = None) -> dict[str, Verdict]:
    """Make the checks of a rollout cache, or some of them; otherwise as `inspection.verify.verify`."""
    wanted = [check.name for check in CHECKS if names is None or check.name in names]
    found = inspection.verify(cache, limits, names=[name for name in wanted if name != GROUPS_READ.name])
    if GROUPS_READ.name in wanted:
        folder = resolved(cache)
        problems = (problem.replace(str(folder), str(cache)) for problem in _problems(folder, deep=limits.deep))
        found[GROUPS_READ.name] = Verdict(first_problems(problems))
    return {name: found[name] for name in wanted}


def find_damage(cache: Path, *, deep: bool, progress: Progress | None = None) -> list[Damage]:
    """Return what is wrong with a rollout cache, as `inspection.verify.find_damage`.

    Where a file is damaged, its groups are not judged.
    """
    found = inspection.find_damage(cache, deep=deep, progress=progress)
    if found:
        return found
    folder = cache.resolve()
    return [Damage("", 0, 0, f"the reader refuses it: {problem}") for problem in _problems(folder, deep=deep)]


def _problems(folder: Path, *, deep: bool) -> Iterator[str]:
    for split in SPLITS:
        try:
            yield from _of_split(folder, split, deep=deep)
        except (CacheError, OSError) as error:
            yield str(error)
        except _MALFORMED as error:
            yield f"{folder / META_NAME}: not as docs/formats.md describes it ({error!r})"


def _of_split(folder: Path, split: str, *, deep: bool) -> Iterator[str]:
    from niels_gpt.prefix_tree.rollouts.format import GROUP_COLUMNS, stored
    from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset

    meta: dict[str, Any] = read_meta(os.fspath(folder / META_NAME))
    if not meta["totals"][f"{split}_groups"]:
        return
    data = RolloutDataset(folder, split)
    counted = {"groups": len(data), "samples": len(data.samples), "tokens": int(data.samples[:, 0].sum())}
    for unit, number in counted.items():
        if meta["totals"][f"{split}_{unit}"] != number:
            yield f"{folder / META_NAME}: totals.{split}_{unit} is {meta['totals'][f'{split}_{unit}']}, not {number}"
    for number in range(len(data)) if deep else ():
        group, row = stored(data.read(number)), dict(zip(GROUP_COLUMNS, data.groups[number].tolist(), strict=True))
        first = row["first_sample"]
        rows = data.samples[first : first + row["samples"]]
        if not np.array_equal(group.samples, rows) or group.folded != (row["tokens_after"], row["pairs_after"]):
            yield f"{folder / f'index/{split}_groups.npy'}: group {number} does not fold as the index has it"
