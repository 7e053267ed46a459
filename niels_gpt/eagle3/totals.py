"""Counts a cache, and writes meta.json of a finished one from the plan and the receipts.

The counts say how much a draft can learn. A supervised slot is a position (`position_mask`) if the target's most
probable token is in the draft's vocabulary. Without positions a draft's loss is 0 throughout, and training runs without
an error: so a cache without any is refused, and one with few gets a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.format.layout import MANIFEST_NAME, SIDECAR
from niels_gpt.eagle3.format.manifest import manifest_bytes
from niels_gpt.eagle3.format.meta import lists_shards, unchanged_shards, write_meta
from niels_gpt.eagle3.format.plan import TargetPlan
from niels_gpt.eagle3.format.shard_writer import read_receipt, receipt_path
from niels_gpt.eagle3.format.shards import NativeShards
from niels_gpt.eagle3.format.weights import has_weights
from niels_gpt.eagle3.resume import finished_meta
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import read_regular, shortened

FEW = 0.05
"""Share of the supervised slots: fewer positions give a warning."""
ENOUGH = 10_000
"""A run stops after this many supervised slots without a position."""
REMEDY = (
    "Count the draft vocabulary from these samples (leave out --draft-vocab-from), or take a larger one "
    "(--draft-vocab-size, the setting eagle3_draft_vocab_size). Build that cache in a fresh folder"
)


@dataclass(frozen=True)
class Counts:
    """Slots of a cache, or of some of its shards."""

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
            f"0 positions: the target's most probable token is in the draft's vocabulary in none of "
            f"{self.supervised:,} slots with loss, so a draft's loss would always be 0. {REMEDY}"
        )

    @property
    def warning(self) -> str | None:
        """Warning about few positions; None if there are enough, or none at all."""
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


# --- meta.json --------------------------------------------------------------------------------------------------------


def complete_meta(folder: Path, plan: TargetPlan) -> dict[str, Any] | None:
    """Return meta.json of a finished cache of this plan; None if it or another file is missing or differs."""
    meta = finished_meta(folder, plan)
    if meta is None or not lists_shards(meta):  # of an earlier build, whose files are listed now
        return None
    if not has_target_weights(folder, plan):
        return None
    # meta.json states their sizes; here their bytes are compared
    files = {folder / SIDECAR / name: content for name, content in plan.sidecar_files().items()}
    if plan.is_native:  # whose draft vocabulary may be another one
        files[folder / MANIFEST_NAME] = manifest_bytes(plan.manifest)
    return meta if all(read_regular(path) == content for path, content in files.items()) else None


def has_target_weights(folder: Path, plan: TargetPlan) -> bool:
    """Return whether the target's weights match their receipt."""
    return has_weights(folder, native=plan.is_native)


def finish(
    folder: Path,
    plan: TargetPlan,
    named: Path | None = None,
    *,
    before: Mapping[str, Any] | None = None,
    check: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Write meta.json, which makes the cache finished, and return its content. Hashes all files.

    named: what errors call the folder, if it gets another name later. check: see `write_meta`.
    before: the earlier meta.json; shards that it lists with their current receipts are not hashed again.
    Raises: CacheError E701 if a receipt lacks a count; CacheError E709 if no slot is a position: the cache stays
        unfinished.
    """
    keys = _described(folder, plan)
    if problem := Counts.of_meta(keys).problem:
        raise CacheError(named or folder, problem, code="E709")
    return write_meta(folder, keys, known=unchanged_shards(folder, before), check=check)


def _described(folder: Path, plan: TargetPlan) -> dict[str, Any]:
    """Return the keys of meta.json that come from plan and receipts. All shards are there.

    Raises: CacheError if a receipt lacks a count.
    """
    names = ("tokens", "supervised", *(("aux_rows", "target_rows") if plan.is_native else ("positions",)))
    facts = [_facts(folder, shard, names) for shard in range(plan.num_shards)]
    totals = {name: sum(each[name] for each in facts) for name in names}
    if plan.is_native:
        totals["positions"] = NativeShards(folder, plan.manifest, max_open=1).positions(
            plan.manifest["selected_token_ids"]
        )
    tokens, supervised, positions = (totals[name] for name in ("tokens", "supervised", "positions"))
    topk = 0 if plan.is_native else plan.layout.topk
    kept = None if topk == 0 or not positions else sum(each["kept_mass"] for each in facts) / positions
    draft_mass = None if plan.is_native or not supervised else sum(each["draft_mass"] for each in facts) / supervised
    return {
        "plan_sha256": plan.sha256,
        "totals": {
            "samples": plan.manifest["num_samples"],
            "tokens": tokens,
            "supervised_tokens": supervised,
            "positions": positions,
            "shards": plan.num_shards,
            **{name: totals[name] for name in ("aux_rows", "target_rows") if name in totals},
        },
        "token_bytes": plan.token_bytes,
        "kept_mass": kept,
        "draft_mass": draft_mass,
        "dropped": plan.dropped,
        "altered": plan.altered,
        "source": plan.source,
        "target": plan.target,
        "tokenizer_sha256": plan.tokenizer["sha256"],
    }


def _facts(folder: Path, shard: int, counted: Sequence[str]) -> dict[str, Any]:
    """Return the facts of a receipt that must have these counts. Raises: CacheError."""
    facts: dict[str, Any] = (read_receipt(folder, shard) or {"facts": {}})["facts"]
    for name in counted:
        if type(number := facts.get(name)) is not int:
            path, remedy = receipt_path(folder, shard), "Remove it, and run the same precompute command with --resume"
            raise CacheError(path, f"{name} is {shortened(number)}", "a count", remedy, code="E701")
    return facts
