"""Is a rollout cache good? The checks of files and meta.json that all caches have, and whether every group can be read.

niels_gpt.inspection has the first; it does not know what rollouts are, and niels_gpt.prefix_tree reads them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import read_meta
from niels_gpt.display.numbers import many
from niels_gpt.inspection import verify as inspection
from niels_gpt.inspection.file_checks import HEADER_BYTES, Damage
from niels_gpt.inspection.verify import Limits
from niels_gpt.progress import Progress
from niels_gpt.storage.checks import Check, Figures, Verdict, first_problems
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import file_records, resolved, shortened

if TYPE_CHECKING:
    from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset

GROUPS_READ = Check(
    "groups_read",
    "The reader opens every split: index, ids, loss mask and fields belong together. A deep check reads every group, "
    "folds it, and compares the index with its ids.",
)
CHECKS = (*inspection.CHECKS["rollouts"][:2], GROUPS_READ, *inspection.CHECKS["rollouts"][2:])
"""The checks of a rollout cache, blocking ones first."""
_TOTALS = ("groups", "samples", "tokens")
_SUMS = (*_TOTALS, "tokens_after", "pairs", "pairs_after", "loss_tokens", "scores", "samples_without_target")
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def verify(cache: Path, limits: Limits, *, names: Collection[str] | None = None) -> dict[str, Verdict]:
    """Make the checks of a rollout cache, or some of them; otherwise as `inspection.verify.verify`."""
    wanted = [check.name for check in CHECKS if names is None or check.name in names]
    found = inspection.verify(cache, limits, names=[name for name in wanted if name != GROUPS_READ.name])
    if GROUPS_READ.name in wanted:
        folder = resolved(cache)
        figures = Figures()
        problems = _problems(folder, figures, deep=limits.deep)
        named = (problem.replace(str(folder), str(cache)) for problem in problems)
        found[GROUPS_READ.name] = Verdict.of(first_problems(named), figures)
    return {name: found[name] for name in wanted}


def find_damage(cache: Path, *, deep: bool, progress: Progress | None = None) -> list[Damage]:
    """Return what is wrong with a rollout cache, as `inspection.verify.find_damage`.

    Where a file is damaged, its groups are not judged.
    """
    found = inspection.find_damage(cache, deep=deep, progress=progress)
    if found:
        return found
    folder = cache.resolve()
    problems = _problems(folder, Figures(), deep=deep)
    return [Damage("", 0, 0, f"the reader refuses it: {problem}") for problem in problems]


def _problems(folder: Path, figures: Figures, *, deep: bool) -> Iterator[str]:
    kept, is_read = Counter[str](), True
    parts = [partial(_of_split, folder, split, kept, deep=deep) for split in SPLITS]
    for part in (*parts, partial(_counts, folder, kept)):
        try:
            yield from part() if is_read or part.func is _of_split else ()
        except (CacheError, OSError) as error:
            yield str(error)
            is_read = False
        except _MALFORMED as error:
            yield f"{folder / META_NAME}: not as docs/formats.md describes it ({error!r})"
            is_read = False
    held = f"{many(kept['groups'], 'group')} of {many(kept['samples'], 'sample')}"
    how = "each was read and folded" if deep else "none was read: deep_checks is false"
    figures.say(
        f"The reader opens {held}; {how}.",
        groups=kept["groups"],
        samples=kept["samples"],
    )


def _of_split(folder: Path, split: str, kept: Counter[str], *, deep: bool) -> Iterator[str]:
    """Yield the problems of a split. kept: counts its groups and samples."""
    from niels_gpt.prefix_tree.rollouts.index import sums
    from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset

    meta: dict[str, Any] = read_meta(os.fspath(folder / META_NAME))
    data = None if _is_empty(meta, split) else RolloutDataset(folder, split)
    counted = dict.fromkeys(_SUMS, 0) if data is None else sums(data.groups, data.samples)
    kept.update(groups=counted["groups"], samples=counted["samples"])
    for key, number in counted.items():
        name, found = f"{key}.{split}", meta[key][split] if key not in _TOTALS else None
        if key in _TOTALS:
            name, found = f"totals.{split}_{key}", meta["totals"][f"{split}_{key}"]
        if found != number:
            yield f"{folder / META_NAME}: {name} is {shortened(found)}, not {number}"
    if deep and data is not None:
        yield from _of_groups(data)


def _of_groups(data: RolloutDataset) -> Iterator[str]:
    """Read every group, and compare the index with its ids."""
    from niels_gpt.prefix_tree.rollouts.format import GROUP_COLUMNS, stored

    for number in range(len(data)):
        data.id(number)
        group, row = stored(data.read(number)), dict(zip(GROUP_COLUMNS, data.groups[number].tolist(), strict=True))
        first = row["first_sample"]
        rows = data.samples[first : first + row["samples"]]
        if not np.array_equal(group.samples, rows) or group.folded != (row["tokens_after"], row["pairs_after"]):
            yield f"{data.folder / f'index/{data.split}_groups.npy'}: group {number} does not fold as the index has it"


def _is_empty(meta: dict[str, Any], split: str) -> bool:
    """Whether the files of a split hold nothing, whatever the totals say."""
    records = [record for record in file_records(meta) if record["name"].split("/")[-1].startswith(f"{split}_")]
    return all(record["bytes"] <= (HEADER_BYTES if record["name"].endswith(".npy") else 0) for record in records)


def _counts(folder: Path, kept: Counter[str]) -> Iterator[str]:
    """Compare what was read with what was kept and dropped."""
    meta = read_meta(os.fspath(folder / META_NAME))
    dropped = Counter(meta["dropped"])
    without = dropped.pop("groups_without_sample", 0)
    expected = {"groups_read": kept["groups"] + without, "samples_read": kept["samples"] + dropped.total()}
    for key, number in expected.items():
        if meta[key] != number:
            yield f"{folder / META_NAME}: {key} is {shortened(meta[key])}, but {number} were kept or dropped"
