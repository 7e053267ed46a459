"""The counts of a cache of several partitions: sums of those in their receipts; and the warnings about all of them."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

from niels_gpt.cache.build_pretrain import IN_PARTITIONS
from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.shards import warn_of_unmet_budgets
from niels_gpt.engine.losses import warn_of_losses
from niels_gpt.engine.split import asked_share, warn_of_share
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import checked_count

logger = logging.getLogger(__name__)

_BY_NAME = ("dropped", "noticed")
_OF_SPLITS = ("docs", "utf8_bytes")
_NUMBERS = ("documents_read", "unknown_ids")


class Sums:
    """Adds up the counts of receipts, one after the other."""

    def __init__(self) -> None:
        self.counters = Counter[str]()
        """What the loader dropped or repaired, by reason."""
        self.of_each: list[dict[str, int]] = []
        """Tokens, documents and shards of each partition: `partitions.of_each` of meta.json."""
        groups = (*_BY_NAME, *_OF_SPLITS, "totals", "cut", "trip")
        self._examples: dict[str, str] = {}
        self._sums: dict[str, Counter[str]] = {key: Counter() for key in groups}
        self._numbers = Counter[str]()
        self._limits: dict[str, int | None] = dict.fromkeys(SPLITS, 0)

    def add(self, meta: Mapping[str, Any]) -> None:
        """Add a receipt. Raises: LookupError, TypeError, ValueError and the like for counts in another form."""
        totals = {f"{split}_tokens": meta["totals"][f"{split}_tokens"] for split in SPLITS}
        trip = {key: meta["roundtrip"][key] for key in ("texts", "differ")}
        cut = {key: meta["cut"][key] for key in ("documents", "tokens")}
        counts = {"totals": totals, "trip": trip, "cut": cut, **{key: meta[key] for key in (*_BY_NAME, *_OF_SPLITS)}}
        for key, numbers in counts.items():
            self._sums[key].update(_checked(numbers, key))
        self.counters.update(_checked(meta["source"]["counters"], "source.counters"))
        for name, example in meta.get("first_noticed", {}).items():
            self._examples.setdefault(str(name), str(example))
        self._numbers.update(_checked({key: meta[key] for key in _NUMBERS}, "the whole"))
        for split, limit in self._limits.items():
            of_part = meta[f"max_{split}_tokens"]
            known = limit is not None and of_part is not None
            self._limits[split] = (limit or 0) + checked_count(of_part, "a budget", META_NAME) if known else None
        docs = {f"{split}_docs": meta["docs"][split] for split in SPLITS}
        self.of_each.append(totals | docs | {f"{split}_shards": len(meta["shards"][split]) for split in SPLITS})

    def noticed(self, counter: str, number: int) -> None:
        """Take a number that no partition knows, in place of the sum of theirs."""
        self._sums["noticed"][counter] = number

    def of(self, key: str, split: str) -> int:
        """Return the sum of `docs`, `utf8_bytes` or `tokens` of a split."""
        return self._sums["totals"][f"{split}_tokens"] if key == "tokens" else self._sums[key][split]

    def keys(self) -> dict[str, Any]:
        """Return the keys of meta.json but duplicates, files and what all partitions have in common."""
        trip = {key: self._sums["trip"][key] for key in ("texts", "differ")}
        full = {
            split: None if limit is None else self.of("tokens", split) == limit for split, limit in self._limits.items()
        }
        return {
            "totals": {f"{split}_tokens": self.of("tokens", split) for split in SPLITS},
            **{f"max_{split}_tokens": self._limits[split] for split in SPLITS},
            "budget_reached": full,
            **{key: {split: self.of(key, split) for split in SPLITS} for key in _OF_SPLITS},
            **{key: self._numbers[key] for key in _NUMBERS},
            "cut": {key: self._sums["cut"][key] for key in ("documents", "tokens")},
            **{key: dict(sorted((+self._sums[key]).items())) for key in _BY_NAME},
            **({"first_noticed": dict(sorted(self._examples.items()))} if self._examples else {}),
            "roundtrip": trip,
            "lossless": trip["differ"] == 0 if trip["texts"] else None,
        }


def warn_of_whole(path: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
    """Log what no partition can know: a share of val far from that asked for, losses, unmet budgets, an empty val."""
    warn_of_share(path, meta)
    warn_of_losses(path, meta)
    warn_of_unmet_budgets(path, meta)
    if asked_share(meta) and not meta["totals"]["val_tokens"] and meta["split_rule"] in IN_PARTITIONS.values():
        distinct = meta["docs"]["train"] - meta["duplicates"]["train"]
        logger.warning(
            "%s: val is empty: none of %d distinct texts fell to it by its share. With --partitions 1 the nearest one "
            "goes there",
            path,
            distinct,
            extra={"code": "W308"},
        )


def _checked(numbers: Mapping[str, Any], key: str) -> dict[str, int]:
    return {str(name): checked_count(number, f"{key}.{name}", META_NAME) for name, number in numbers.items()}
