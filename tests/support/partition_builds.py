"""Small caches in partitions: which documents each has, how they are built, and their seal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from niels_gpt.builders.meta_keys import Source
from niels_gpt.builders.partitions.plan import Plan, fix_plan
from niels_gpt.builders.partitions.seal import seal
from niels_gpt.documents import Partition
from niels_gpt.storage.meta_json import meta_bytes
from niels_gpt.storage.versions import build_lock, versions_dir
from support.byte_tokenizer import ByteTokenizer
from support.small_builds import counting, documents, pretrain

TOTAL = 4
SHA256 = "ab" * 32
RULE = "document f to f mod P"


def content(total: int = TOTAL, **changed: Any) -> dict[str, Any]:
    """Return what plan.json holds."""
    return {
        "plan_version": 1,
        "kind": "partition_plan",
        "cache": "c",
        "partitions": total,
        "rule": RULE,
        "fingerprint": "f" * 64,
        "recipe": {"seed": 0},
        "source": {},
        "tokenizer_sha256": SHA256,
        "tokenizer_content_sha256": SHA256,
        "code": {"version": "1"},
        **changed,
    }


class HashedBytes(ByteTokenizer):
    """The byte tokenizer, with the sha256 that the plans name."""

    sha256 = SHA256


def planned(path: Path, total: int = TOTAL, **changed: Any) -> Plan:
    """Fix the plan of a cache."""
    with build_lock(path):
        return fix_plan(path, content(total, **changed))


def items_of(number: int, total: int = TOTAL) -> list[Any]:
    """Return the documents of a partition."""
    return documents(0)[number::total]


def build_part(plan: Plan, number: int, *, items: Iterable[Any] | None = None, **changed: Any) -> dict[str, Any]:
    """Build a partition; by default without budgets, so that nothing is dropped for them."""
    counters: dict[str, int] = {}
    arguments: dict[str, Any] = {
        "max_train_tokens": None,
        "max_val_tokens": None,
        "val_frac": 0.2,
        "tokenizer": HashedBytes(),
        "source": Source(name="small", counters=counters),
        "partition": Partition(number, plan.total),
        "plan": plan.sha256,
    }
    found = counting(items_of(number, plan.total) if items is None else items, counters)
    return pretrain(plan.partition_path(number), items=found, **{**arguments, **changed})


def whole(path: Path, order: Iterable[int] = range(TOTAL), **changed: Any) -> dict[str, Any]:
    """Fix a plan, build its partitions in an order, and seal them."""
    plan = planned(path)
    for number in order:
        build_part(plan, number, **changed)
    return seal(plan, source=Source(name="small"))


def cloned(plan: Plan, numbers: Iterable[int]) -> None:
    """Make further partitions of the files of partition 0, linked: the same documents under other numbers."""
    first = plan.partition_path(0).resolve()
    meta = json.loads((first / "meta.json").read_bytes())
    for number in numbers:
        path = plan.partition_path(number)
        folder = versions_dir(path) / first.name
        for file in first.rglob("*"):
            if file.is_file() and file.name != "meta.json":
                (folder / file.relative_to(first)).parent.mkdir(parents=True, exist_ok=True)
                (folder / file.relative_to(first)).hardlink_to(file)
        claim = {"partition": {**meta["partition"], "number": number}}
        (folder / "meta.json").write_bytes(meta_bytes(meta | claim))
        path.symlink_to(f".versions/{path.name}/{first.name}")
