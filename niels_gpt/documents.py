"""Documents as columns: what a loader of files gives a builder, many documents at a time.

A loader that reads rows one by one yields (split, text, id) instead; a builder takes both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NO_COUNTERS: tuple[tuple[int, Mapping[str, int]], ...] = ((0, {}),)


@dataclass(frozen=True)
class DocumentBatch:
    """Consecutive documents of a source, one entry each in `texts` and `ids`.

    A document's counters and position are those that the loader had when it gave this document: what was dropped before
    it is in them, what was dropped behind it is not. So they do not depend on where a batch ends.
    """

    texts: Sequence[bytes]
    """Each document's text in valid UTF-8, repaired by the loader where it was not."""
    ids: Sequence[str]
    """Each document's id in its source."""
    split: str | None = None
    """train or val, for all of them; None leaves the choice to the text and the seed."""
    counters: Sequence[tuple[int, Mapping[str, int]]] = NO_COUNTERS
    """(n, the loader's counters from document n of this batch on): ascending, the first n is 0."""
    position: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Each document's place in the files, a column for each key of data.files.rows.Position; {} if it has none."""
    is_checked: bool = False
    """Whether all of this is known to be true, as the project's loaders know it; a builder checks other batches."""

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.texts)
