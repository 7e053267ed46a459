"""meta.json of a finished cache: where each of its keys comes from, and whether a folder has a complete one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.format.layout import MANIFEST_NAME, SIDECAR
from niels_gpt.eagle3.format.manifest import manifest_bytes
from niels_gpt.eagle3.format.meta import lists_shards, unchanged_shards, write_meta
from niels_gpt.eagle3.format.plan import Plan
from niels_gpt.eagle3.format.shard_writer import read_receipt, receipt_path
from niels_gpt.eagle3.format.shards import NativeShards
from niels_gpt.eagle3.format.weights import has_weights
from niels_gpt.eagle3.produce.positions import Counts
from niels_gpt.eagle3.produce.resume_checks import finished_meta
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import read_regular, shortened


def complete_meta(folder: Path, plan: Plan) -> dict[str, Any] | None:
    """Return the meta.json of a finished cache of this plan; None where it, a file or the plan's own files are not."""
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


def has_target_weights(folder: Path, plan: Plan) -> bool:
    """Return whether the target's weights are there as their receipt has them: its head too in the native form."""
    return has_weights(folder, native=plan.is_native)


def finish(
    folder: Path,
    plan: Plan,
    named: Path | None = None,
    *,
    before: Mapping[str, Any] | None = None,
    check: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Write meta.json, which makes the cache finished, and return its content. The files are read, to be hashed.

    named: what errors call the folder, where it gets another name later. check: as `write_meta`.
    before: the meta.json that was there: shards that it describes, with their receipts, are not read.
    Raises: CacheError where a receipt is missing, and where no slot is a position: the cache then stays unfinished.
    """
    keys = _described(folder, plan)
    if problem := Counts.of_meta(keys).problem:
        raise CacheError(named or folder, problem, code="E709")
    return write_meta(folder, keys, known=unchanged_shards(folder, before), check=check)


def _described(folder: Path, plan: Plan) -> dict[str, Any]:
    """Return the keys of meta.json that come from the plan and the receipts, of a folder that has all its shards.

    Raises: CacheError where a receipt is missing.
    """
    names = ("tokens", "supervised", *(("aux_rows", "target_rows") if plan.is_native else ("positions",)))
    facts = [_receipt(folder, shard, names)["facts"] for shard in range(plan.num_shards)]
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


def _receipt(folder: Path, shard: int, counted: Sequence[str]) -> dict[str, Any]:
    """Return a receipt whose facts have these counts. Raises: CacheError."""
    receipt = read_receipt(folder, shard)
    if receipt is None:
        raise CacheError(
            receipt_path(folder, shard), "no such file", remedy="Run the same command with --resume", code="E702"
        )
    for name in counted:
        if type(number := receipt["facts"].get(name)) is not int:
            path, remedy = receipt_path(folder, shard), "Remove it and produce the shard again: precompute --resume"
            raise CacheError(path, f"{name} is {shortened(number)}", "a count", remedy, code="E701")
    return receipt
