"""Which document goes to val (D5), and how many tokens of it still fit."""

from __future__ import annotations

from dataclasses import dataclass, field

SPLITS = ("train", "val")


@dataclass
class TokenBudget:
    """Two budgets that fill together, so that a small corpus has both splits.

    `TokenBudget({"train": 90, "val": 10})` with documents of 10 tokens: val, train x 9.
    """

    limits: dict[str, int | None]
    """Tokens of each split, at most; None: no bound."""
    used: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Tokens of each split so far."""

    def __post_init__(self) -> None:
        for split, limit in self.limits.items():
            if limit is not None and limit < 0:
                raise ValueError(f"max_{split}_tokens={limit}: expected 0 or more tokens")

    def room(self, split: str) -> int | None:
        """Return the tokens that still fit; None: no bound."""
        limit = self.limits[split]
        return None if limit is None else limit - self.used[split]

    def full(self, split: str) -> bool:
        """Whether not one more token fits."""
        return self.room(split) == 0

    def next_split(self) -> str:
        """Return the split that is furthest below its share: the smaller used/limit, a tie goes to val.

        Compared as cross products, for floats would tie where fractions do not. Both limits must be numbers.
        """
        if self.full("val"):
            return "train"
        if self.full("train"):
            return "val"
        train, val = self.limits["train"], self.limits["val"]
        assert train is not None and val is not None
        return "val" if self.used["val"] * train <= self.used["train"] * val else "train"
