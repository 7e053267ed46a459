"""Check and Verdict: one question to a finished cache, and its result; Figures: the values that a check measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

MOST_PROBLEMS = 20
"""Most problems reported by one check: a wrong shard would give one for each row."""


@dataclass(frozen=True)
class Check:
    """One question to a finished cache."""

    name: str
    """In snake case, as Dagster's UI shows it."""
    description: str
    """One or two sentences for the UI."""
    blocking: bool = True
    """True: a cache that fails must not be used. False: a warning."""
    rule: Callable[..., Iterator[Any]] | None = field(default=None, compare=False, repr=False)
    """The niels_gpt.kinds.kind.Rule that makes the check; None if one pass makes several."""


Place = tuple[str, int, int]
"""Name of a file in the cache's folder, the first byte that may be wrong, and the byte after the last one."""
Value = int | float | str
"""A measured number, a share from 0 to 1, or a short text, such as a limit or a name."""


@dataclass
class Figures:
    """The values that a check measured. Filled while the check is made, so that no file is read twice."""

    sentence: str = ""
    values: dict[str, Value] = field(default_factory=dict)
    """By names in snake case."""

    def say(self, sentence: str, **values: Value) -> None:
        """Set both."""
        self.sentence, self.values = sentence, values


@dataclass(frozen=True)
class Verdict:
    """Result of one check."""

    problems: list[str]
    """Each with its place, the finding and the expected state; empty if the check passed or was not made."""
    note: str | None = None
    """Why the check was not made; None if it was."""
    remarks: list[str] = field(default_factory=list)
    """Findings that are not damage."""
    figures: str = field(default="", compare=False)
    """Measured values as text, for the command line."""
    sentence: str = field(default="", compare=False)
    """The examined part, the measured value and the limit."""
    values: dict[str, Value] = field(default_factory=dict, compare=False)
    """The same as `Figures.values`."""

    @classmethod
    def of(cls, problems: list[str], figures: Figures) -> Verdict:
        """Return the verdict of a check that was made."""
        return cls(problems, sentence=figures.sentence, values=figures.values)


class PlacedProblem(str):
    """A problem of a `Verdict` with its places in files of the cache, for kinds that make all checks in one pass."""

    places: Sequence[Place]

    def __new__(cls, text: str, places: Sequence[Place] = ()) -> PlacedProblem:
        """places: several where one checksum is over all of them."""
        problem = super().__new__(cls, text)
        problem.places = places
        return problem


def place_of(error: object, folder: Path) -> Place:
    """Return the whole file that an error names: name, 0, size; or "", 0, 0 for a file outside `folder`.

    folder: of a version, resolved. An absent file has size 0.
    """
    path = Path(getattr(error, "path", None) or getattr(error, "filename", None) or "")
    if folder not in path.parents:
        return "", 0, 0
    return str(path.relative_to(folder)), 0, path.stat().st_size if path.is_file() else 0


def first_problems(problems: Iterator[str]) -> list[str]:
    """Return the first MOST_PROBLEMS problems, and "... and more" if there are others."""
    first = list(islice(problems, MOST_PROBLEMS + 1))
    return first if len(first) <= MOST_PROBLEMS else [*first[:MOST_PROBLEMS], "... and more"]
