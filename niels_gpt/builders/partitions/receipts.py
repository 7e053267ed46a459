"""The state of every partition of a plan: which are finished, and what is wrong with the others."""

from __future__ import annotations

from typing import NamedTuple

from niels_gpt.builders.partitions.plan import Plan
from niels_gpt.progress import Progress


class PartitionState(NamedTuple):
    """What was found of one partition."""

    number: int
    """From 0; -1 of an entry of the plan's folder that is no partition of it."""
    state: str
    """finished; missing: no receipt; started: an unfinished build is there; doubled: its receipt claims another number;
    foreign: not made by a build of ours, or a link out; stale: of another plan or version of the builder; damaged: its
    files differ from its receipt."""
    documents: int
    """In both splits, by its receipt; 0 without a good one."""
    tokens: int
    """In both splits, by its receipt; 0 without a good one."""
    found: str
    """What is wrong, for a message; "" where it is finished."""


def partition_states(plan: Plan, *, deep: bool = False, progress: Progress | None = None) -> list[PartitionState]:
    """Return the state of each partition, by number, and of foreign entries of the plan's folder, which have number -1.

    deep: compare the sha256 of every file too; else links, receipts and sizes only.
    progress: called with files, bytes read, and bytes to read in all.
    """
    raise NotImplementedError
