"""Check and Verdict: one question to a finished cache and its result, for token caches and EAGLE-3 caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

MOST_PROBLEMS = 20
"""Reported problems of one check: a wrong shard would give one for each row."""


@dataclass(frozen=True)
class Check:
    """One question to a finished cache."""

    name: str
    """In snake case, as Dagster's UI shows it."""
    description: str
    """One or two sentences for the UI."""
    blocking: bool = True
    """True: a cache that fails must not be used. False: a warning."""


@dataclass(frozen=True)
class Verdict:
    """Result of one check."""

    problems: list[str]
    """What is wrong, where, and what was expected; empty if the check passed or was not made."""
    note: str | None = None
    """Why the check was not made; None if it was."""
    remarks: list[str] = field(default_factory=list)
    """Findings that are not damage."""
    figures: str = field(default="", compare=False)
    """Measured values, as text."""


def first_problems(problems: Iterator[str]) -> list[str]:
    """Return the first MOST_PROBLEMS problems, and "... and more" if there are others."""
    first = list(islice(problems, MOST_PROBLEMS + 1))
    return first if len(first) <= MOST_PROBLEMS else [*first[:MOST_PROBLEMS], "... and more"]
