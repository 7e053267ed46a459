"""How much a draft can learn from a cache: the slots where its loss counts, as shares.

A slot is a position (`position_mask`) where there is loss and the target's most probable token is in the draft's
vocabulary. Without any, a draft's loss is identically 0, and training goes through without an error.
"""

from __future__ import annotations

from dataclasses import dataclass

FEW = 0.05
"""Share of the slots with loss: a cache with fewer positions is warned of."""
ENOUGH = 10_000
"""Slots with loss: a run that has seen so many without a position stops."""
REMEDY = (
    "Take a draft vocabulary of these samples and this target: leave --draft-vocab-from out, raise --draft-vocab-size, "
    "and name a fresh --output-dir"
)


@dataclass(frozen=True)
class Counts:
    """Slots of a cache, or of a part of it."""

    tokens: int
    """Padding left out."""
    supervised: int
    """Slots with loss."""
    positions: int
    """Slots with loss where the target's most probable token is in the draft's vocabulary."""

    @property
    def supervised_share(self) -> float:
        """Slots with loss as a share of the tokens."""
        return self.supervised / max(1, self.tokens)

    @property
    def position_share(self) -> float:
        """Positions as a share of the slots with loss."""
        return self.positions / max(1, self.supervised)

    @property
    def problem(self) -> str | None:
        """What makes a cache useless; None for one that a draft can learn from."""
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
        """What is said of a cache with few positions; None where there are enough, or none at all."""
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
