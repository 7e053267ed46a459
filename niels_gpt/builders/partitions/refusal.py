"""The error of a seal: which partitions are not finished, and the command that mends each."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from niels_gpt.builders.partitions.plan import Plan
from niels_gpt.builders.partitions.receipts import PartitionState
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.versions import versions_dir

_MOST_REMEDIES = 20
_MOST_CHARACTERS = 4_000  # of the list of partitions: 100,000 of them may be missing
_NOT_THERE = ("missing", "started")


class Commands(NamedTuple):
    """The commands that a refused seal names."""

    partition: Callable[[PartitionState], str]
    """Returns the one that builds a partition."""
    whole: str
    """Builds all that are missing, and seals."""
    seal: str


def not_finished(
    plan: Plan, states: Sequence[PartitionState], commands: Commands | None, from_scratch: str | None
) -> CacheError:
    """Return the error that names each partition that is not finished, and the commands that build them and seal.

    Where more than 20 are missing, one command builds them all.
    """
    bad = [state for state in states if state.state != "finished"]
    bad.sort(key=lambda state: (state.state, state.number))
    groups = [(name, list(of)) for name, of in groupby(bad, key=lambda state: state.state)]
    found = "; ".join(f"{name}: {_described(name, of)}" for name, of in groups)
    if len(found) > _MOST_CHARACTERS:
        found = f"{found[:_MOST_CHARACTERS]} ..."
    last = commands.seal if commands else None
    if commands and sum(state.state in _NOT_THERE for state in bad) > _MOST_REMEDIES:
        bad, last = [state for state in bad if state.state not in _NOT_THERE], commands.whole
    remedies = [_remedy(plan, state, commands, from_scratch) for state in bad[:_MOST_REMEDIES]]
    remedies = list(dict.fromkeys(remedies))
    if len(bad) > _MOST_REMEDIES:
        last = f"and so on for {len(bad) - _MOST_REMEDIES:,} more"
    finished = sum(state.state == "finished" for state in states)
    return CacheError(
        plan.path,
        f"{finished:,} of {plan.total:,} partitions are finished; {found}",
        remedy="\n".join(["Build them, then seal:", *remedies, *([last] if last else [])]),
        code="E510",
    )


def _described(state: str, of: Sequence[PartitionState]) -> str:
    if state in _NOT_THERE:
        return _ranges([each.number for each in of])
    return ", ".join(f"{each.number} ({each.found})" if each.number >= 0 else each.found for each in of)


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: `0, 3-5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _remedy(plan: Plan, state: PartitionState, commands: Commands | None, from_scratch: str | None) -> str:
    """Return the commands that mend a partition, as one line of a shell."""
    if state.entry is not None:
        return f"rm -rf {_quoted(str(state.entry))}"
    build = commands.partition(state) if commands is not None else from_scratch or f"build partition {state.number}"
    if state.state in _NOT_THERE:
        return build
    path = plan.partition_path(state.number)
    return f"{shlex.join(['rm', '-rf', str(path), str(versions_dir(path))])} && {build}"


def _quoted(path: str) -> str:
    """Return a path as a word of bash on one line: other than printable characters by their bytes, in $'...'."""
    if path.isprintable():
        return shlex.quote(path)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\{byte:03o}" for byte in os.fsencode(path))
    return f"$'{''.join(plain)}'"
