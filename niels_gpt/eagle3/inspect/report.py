"""The functions that make one check, and what they found: for verify and recompute, of every form of a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.inspect.open_cache import NotChecked, OpenCache
from niels_gpt.storage.checks import MOST_PROBLEMS, Figures, Place, PlacedProblem, Verdict, first_problems, place_of
from niels_gpt.storage.errors import CacheError

_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, OSError)

Problems = Iterator[CacheError | OSError | PlacedProblem]


@dataclass(frozen=True)
class Questions:
    """The functions that make one check."""

    once: Callable[[OpenCache], Problems] | None = None
    per_shard: Callable[[OpenCache, int], Problems] | None = None
    per_row: Callable[[Any], Problems] | None = None
    remarks: Callable[[OpenCache], Problems] | None = None
    """Yields what is no damage."""
    figures: Callable[[OpenCache], str] | None = None
    measured: Callable[[OpenCache, Figures], None] | None = None
    """Says what is looked at, or was measured, without another reading of the shards."""


class Report:
    """What one check found: MOST_PROBLEMS problems at most, each once, or why the check was not made."""

    def __init__(self, cache: OpenCache) -> None:
        self._cache = cache
        self._problems: dict[str, Sequence[Place]] = {}  # each with its places in files
        self._note: str | None = None
        self._remarks: list[str] = []
        self._figures = ""
        self.measured = Figures()

    def ask(self, question: Callable[..., Problems], *arguments: object) -> None:
        """Add what a function yields; what it raises is a problem too."""
        if len(self._problems) > MOST_PROBLEMS or self._note:
            return
        try:
            for problem in islice(question(*arguments), MOST_PROBLEMS + 1 - len(self._problems)):
                self._add(problem)
        except NotChecked as error:
            self._note = str(error)
        except FileNotFoundError as error:
            missing = error.filename and self._cache.missing(Path(error.filename), "one of the cache's")
            self._add(missing or error)
        except (CacheError, OSError) as error:  # both name the file
            self._add(error)
        except _MALFORMED as error:
            found = f"not as docs/formats.md describes it ({error!r})"
            remedy = "See what the other checks report, or produce the cache again"
            self._add(CacheError(self._cache.folder, found, remedy=remedy, code="E701"))

    def _add(self, problem: CacheError | OSError | PlacedProblem) -> None:
        """Keep a problem once: a damaged file is found for each row that needs it."""
        if isinstance(problem, PlacedProblem):
            self._problems[str(problem)] = problem.places
        else:
            self._problems[str(problem)] = [place_of(problem, self._cache.folder)]

    def ask_once(self, questions: Questions) -> None:
        """Ask what is asked once in a cache. Where remarks and figures cannot be told, the problems say why."""
        if questions.once:
            self.ask(questions.once, self._cache)
        with suppress(NotChecked, *_MALFORMED):
            if questions.remarks:
                self._remarks = [str(remark) for remark in islice(questions.remarks(self._cache), MOST_PROBLEMS + 1)]
            if questions.measured:
                questions.measured(self._cache, self.measured)
            if questions.figures:
                self._figures = questions.figures(self._cache)

    def verdict(self) -> Verdict:
        """Return what was found so far. Messages name the public folder, not the version's."""
        folder, path = str(self._cache.folder), str(self._cache.path)
        found = (PlacedProblem(text.replace(folder, path), places) for text, places in self._problems.items())
        problems, remarks = first_problems(found), first_problems(text.replace(folder, path) for text in self._remarks)
        measured = self.measured
        return Verdict(problems, self._note, remarks, self._figures, measured.sentence, measured.values)
