"""How much a draft can learn from a cache, and when that is too little: the slots where its loss counts.

A supervised slot is a position (`position_mask`) if the target's most probable token is in the draft's vocabulary.
Without positions a draft's loss is 0 throughout, and training runs without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FEW = 0.05
"""Share of the supervised slots: fewer positions give a warning."""
ENOUGH = 10_000
"""Supervised slots: a run stops after so many without a position."""
REMEDY = (
    "Use a draft vocabulary of these samples and this target, in place of --draft-vocab-from, or a larger one "
    "(--draft-vocab-size, the setting eagle3_draft_vocab_size), and a fresh folder for a cache of it"
)


@dataclass(frozen=True)
class Counts:
    """Slots of a cache, or of a part of it."""

    tokens: int
    """Without padding."""
    supervised: int
    """Slots that carry loss."""
    positions: int
    """Supervised slots where the target's most probable token is in the draft's vocabulary."""

    @classmethod
    def of_meta(cls, meta: dict[str, Any]) -> Counts:
        """Return the counts in the meta.json of a finished cache."""
        totals = meta["totals"]
        return cls(totals["tokens"], totals["supervised_tokens"], totals["positions"])

    @property
    def supervised_share(self) -> float:
        """Supervised slots as a share of the tokens."""
        return self.supervised / max(1, self.tokens)

    @property
    def position_share(self) -> float:
        """Positions as a share of the supervised slots."""
        return self.positions / max(1, self.supervised)

    @property
    def problem(self) -> str | None:
        """Why a draft cannot learn from the cache; None if it can."""
        if self.positions:
            return None
        if not self.supervised:
            return f"none of the {self.tokens:,} tokens has loss, expected some"
        return (
            f"0 positions: of {self.supervised:,} slots with loss there is none where the target's most probable token "
            f"is in the draft's vocabulary, so a draft's loss would be 0 throughout. {REMEDY}"
        )

    @property
    def warning(self) -> str | None:
        """Warning of a cache with few positions; None where there are enough, or none at all."""
        if not 0 < self.positions < FEW * self.supervised:
            return None
        return (
            f"few positions: the target's most probable token is in the draft's vocabulary in {self.positions:,} of "
            f"{self.supervised:,} slots with loss ({self.position_share:.1%}), expected {FEW:.0%} or more. {REMEDY}"
        )

    def __str__(self) -> str:
        """Return both shares in words."""
        return (
            f"{self.supervised_share:.1%} of the tokens supervised, {self.position_share:.1%} of these with the "
            "target's most probable token in the draft vocabulary"
        )
