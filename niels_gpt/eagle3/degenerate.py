"""Degenerate replies: empty, cut at a limit, or one short cycle of tokens over and over.

    empty      no word: white space at most
    repeated   the last 32 tokens are one block of 1 to 8 tokens over and over; up to 2 tokens after them, which may end
               the turn, do not count
    cut        no end: the target wrote as many tokens as it may

A reply has one kind: the first that applies, in this order. 32 tokens are four blocks of the longest kind, and more
than a row of a table or a line of dashes usually has; a reply that left its loop again is none. A draft learns such
replies as it learns all others, and drafts them too well to say anything about other text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from niels_gpt.signals import Found, Signal

if TYPE_CHECKING:
    from niels_gpt.chat.rows import Row

EMPTY, REPEATED, CUT_OFF = "empty", "repeated", "cut"
KINDS: Final = (EMPTY, REPEATED, CUT_OFF)
"""The kinds of degenerate replies, in the order in which they are tried."""
GENERATED: Final = "generated"
"""Counter of all replies that the target gave, with the ones that were dropped."""
MOST_EXAMPLES: Final = 3
CYCLE, REPEATED_TOKENS, AFTER_CYCLE = 8, 32, 2
"""Longest block that counts as repeated, least tokens of its repetitions, and most tokens after them."""
SHARE: Final = 0.05
"""Above this share there is a warning (W705)."""
_LAST_CHARACTERS, _NAME = 40, 200  # of a reply, and of its name, that are shown
_OF_REPLIES = Signal(
    "degenerate_replies",
    "are degenerate: empty, cut at the limit, or a few tokens over and over",
    "Raise --max-new-tokens if most are cut, try --temperature 0.7 if most are repeated, or leave them out: "
    "--drop-degenerate",
    SHARE,
)
_OF_SAMPLES = Signal(
    "repeated_in_reply",
    "have a reply that ends in a few tokens over and over, and are kept",
    "Replies of eagle3 respond can be made again without them: --drop-degenerate. Else take them out of the input",
    SHARE,
)


def counter_of(kind: str) -> str:
    """Return the counter of the replies of a kind, kept or dropped."""
    return f"degenerate_{kind}"


def kind_of(ids: Sequence[int], text: str, *, is_cut: bool) -> str | None:
    """Return the kind of a degenerate reply, a member of KINDS; None for another reply. ids: without the end token."""
    kinds = {EMPTY: not text.strip(), REPEATED: repeats(ids), CUT_OFF: is_cut}
    return next((kind for kind in KINDS if kinds[kind]), None)


def repeats(ids: Sequence[int]) -> bool:
    """Return whether the last 32 tokens are a block of 1 to 8 tokens over and over, but for up to 2 tokens after it."""
    for after in range(AFTER_CYCLE + 1):
        last = list(ids[: len(ids) - after][-REPEATED_TOKENS:])
        if len(last) == REPEATED_TOKENS and any(last[size:] == last[:-size] for size in range(1, CYCLE + 1)):
            return True
    return False


def example(name: str, text: str) -> str:
    """Return a reply's last characters after its name, to print."""
    return f"{name[:_NAME]}: {text[-_LAST_CHARACTERS:]!a}"


def of_replies(counts: Mapping[str, int], examples: Sequence[str]) -> Found:
    """Return the share of degenerate replies. counts: of the record of a file of replies."""
    number = sum(counts.get(counter_of(kind), 0) for kind in KINDS)
    return Found(_OF_REPLIES, number, counts.get(GENERATED, 0), "replies", "; ".join(examples))


class Repeated:
    """Counts the samples with a reply that ends in repetition."""

    def __init__(self) -> None:
        self.number = 0
        self.examples: list[str] = []
        """Ids of the first samples."""

    def counted(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows. A reply is a run of tokens that carry loss."""
        for row in rows:
            edges = np.flatnonzero(np.diff(row.loss_mask, prepend=0, append=0)).tolist()
            ids = row.input_ids.tolist()
            if any(repeats(ids[begin:end]) for begin, end in zip(edges[::2], edges[1::2], strict=True)):
                self.number += 1
                if self.number <= MOST_EXAMPLES:
                    self.examples.append(row.id[:_NAME])
            yield row

    def found(self, total: int) -> Found:
        """Return the number as a share of all samples."""
        return Found(_OF_SAMPLES, self.number, total, "samples", ", ".join(self.examples))
