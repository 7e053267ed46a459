"""A row of the tables: a code, what it means, what to do, an example."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One situation in which an error or a warning is printed."""

    code: str
    """E or W, the hundred of its subject, and two digits."""
    name: str
    """A few words, joined by hyphens."""
    meaning: str
    """What happened, in two or three sentences."""
    remedy: str
    """What to do."""
    example: str
    """A message with this code, without `error[CODE]: `."""


def rows(table: str) -> tuple[Code, ...]:
    """Return the rows of a table: code and name, then what it means, "> " what to do, "= " an example."""
    found = []
    for block in table.strip().split("\n\n"):
        head, _, text = block.partition("\n")
        meaning, _, rest = text.partition("\n> ")
        remedy, _, example = rest.partition("\n= ")
        found.append(Code(*head.split(), *(" ".join(part.split("\n")) for part in (meaning, remedy, example))))
    return tuple(found)
