"""Where a source of files resumes, so that what was taken from it is not read again: what a checkpoint says of it.

It is the place of the last document but one: the last one is taken again, and must be what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from niels_gpt.build.stream import Mark
from niels_gpt.records import checked_count

_DOCUMENTS = "documents"
"""In a source's position, until it is read: how many documents are before the first one that comes."""


@dataclass(frozen=True)
class Seek:
    """What a checkpoint knows of a source whose documents come in the order of its files."""

    fingerprint: str
    """Of the files."""
    before: dict[str, int]
    """The loader's counters before the first row: what lies beside the files, and the fingerprint does not tell."""
    counters: dict[str, int]
    position: dict[str, int]
    """Those of the last document but one."""
    last_counters: dict[str, int]
    last_position: dict[str, int]
    """Those of the last document."""

    @classmethod
    def between(cls, fingerprint: str, before: Mapping[str, int], mark: Mark, last: Mark) -> Seek | None:
        """Return what to write down; None where a mark does not say where the source was."""
        if not mark.position or not last.position:
            return None
        parts = (before, mark.counters, mark.position, last.counters, last.position)
        return cls(fingerprint, *map(dict[str, int], parts))

    @classmethod
    def parsed(cls, value: Any, where: str) -> Seek | None:
        """Return what a line of a journal says. Raises: TypeError, ValueError, LookupError for anything else."""
        if value is None:
            return None
        if set(value) != set(cls.__dataclass_fields__) or not isinstance(value["fingerprint"], str):
            raise ValueError("seek has other keys than it should have")
        numbers = {key: counts for key, counts in value.items() if key != "fingerprint"}
        for key, counts in numbers.items():
            for number in counts.values():
                checked_count(number, key, where)
        return cls(value["fingerprint"], **{key: dict(counts) for key, counts in numbers.items()})

    def as_json(self) -> dict[str, Any]:
        """Return what a line of a journal has."""
        return asdict(self)

    def leads_to(self, mark: Mark) -> bool:
        """Whether a document has the mark that the last one had."""
        found = (dict(mark.counters), dict(mark.position), mark.generator)
        return found == (self.last_counters, self.last_position, None)


def set_out(seek: Seek, documents: int, counters: dict[str, int], position: dict[str, int]) -> Mark:
    """Let a source, of which nothing is read yet, begin with the last of so many documents; returns the mark before."""
    counters.clear()
    counters.update(seek.counters)
    position.clear()
    position.update(seek.position)
    position[_DOCUMENTS] = documents - 1
    return Mark(seek.counters, None, seek.position)


def first_number(position: dict[str, int] | None) -> int:
    """Return the number of the first document of a source, and take it out of its position."""
    return 0 if position is None else position.pop(_DOCUMENTS, 0)
