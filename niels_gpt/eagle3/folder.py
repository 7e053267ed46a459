"""The folder of a cache in work: what is finished there, what may be continued, and what meta.json says at the end."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from niels_gpt import fileio
from niels_gpt.eagle3.convert import content_sha256
from niels_gpt.eagle3.layout import LOCK_NAME, SIDECAR, PathLike, header_bytes, shard_path
from niels_gpt.eagle3.manifest import (
    EMBEDDINGS_NAME,
    MANIFEST_NAME,
    existing_shard_indices,
    manifest_bytes,
    manifest_path,
    read_manifest,
)
from niels_gpt.eagle3.plan import BUILDER_VERSION, PLAN_NAME, SIDECAR_VERSION, Plan, differing_fields, read_record
from niels_gpt.eagle3.samples import Samples
from niels_gpt.eagle3.shards import read_receipt, receipt_path
from niels_gpt.fileio import META_NAME, CacheError, canonical_json, sha256_file, write_bytes
from niels_gpt.records import meta_bytes, parse_object, read_regular

logger = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
_FRESH = "Name a fresh folder, or remove this one"


def finished_shards(cache_dir: PathLike, plan: Plan, *, resume: bool) -> set[int]:
    """Return the shards of a plan that stand in a folder, which need not be there; nothing is changed.

    A shard is finished if its receipt is there, is of this plan, and gives the size that the shard has.
    Raises: CacheError where the plan may not be run there: without `resume` in a folder that holds a cache or a part
        of one; with it in one of another plan, whose differing fields are named, or of another tool.
    """
    folder, shards = os.fspath(cache_dir), existing_shard_indices(cache_dir)
    record, has_manifest = read_record(cache_dir), os.path.lexists(manifest_path(cache_dir))
    if not resume:
        refuse_existing(cache_dir)
        return set()
    if record is None:
        if shards and not has_manifest:
            why = "its manifest is missing, so the shards in it cannot be compared with this run"
            raise CacheError(f"--resume was requested for {folder}, but {why}. {_FRESH}")
        if has_manifest:
            why = f"it has no {SIDECAR}/{PLAN_NAME}: another tool wrote it, so what it holds cannot be continued"
            raise CacheError(f"--resume was requested for {folder}, but {why}. {_FRESH}")
        return set()
    found = read_manifest(cache_dir) if has_manifest else plan.manifest
    names = {*differing_fields(record, plan.record), *differing_fields(found, plan.manifest, "manifest.")}
    if wrong := sorted(names):
        raise CacheError(
            f"--resume was requested for {folder}, but the recorded plan does not match the current run configuration "
            f"(mismatched fields: {wrong}). What is there would not fit what this run writes. Run it with the original "
            f"settings, or remove the folder and start fresh. ({_values(record, plan.record)})"
        )
    if strange := sorted(shard for shard in shards if shard >= plan.num_shards):
        raise CacheError(f"{shard_path(folder, strange[0])}: the plan has {plan.num_shards} shards. Move it away")
    return {shard for shard in shards if is_finished(cache_dir, plan, shard)}


def refuse_existing(cache_dir: PathLike) -> None:
    """Raise CacheError where a folder holds a cache or a part of one, which only `resume` may go on with."""
    what = "shards" if existing_shard_indices(cache_dir) else "a plan" if read_record(cache_dir) else "a manifest"
    if what != "a manifest" or os.path.lexists(manifest_path(cache_dir)):
        raise CacheError(f"{os.fspath(cache_dir)} already has {what}; pass --resume to continue or use a fresh dir.")


def _values(left: dict[str, Any], right: dict[str, Any]) -> str:
    """Tell the first few differences, the recorded value first."""
    found = []
    for name in differing_fields(left, right):
        values = []
        for record in (left, right):
            value: Any = record
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            values.append(f"{value!r:.60}")
        found.append(f"{name}: {values[0]}, now {values[1]}")
    return "; ".join(found[:4]) or "manifest.json differs from the plan"


def is_finished(cache_dir: PathLike, plan: Plan, shard: int) -> bool:
    """Whether a shard stands in a folder as its receipt says, and the receipt is of this plan."""
    try:
        receipt = read_receipt(cache_dir, shard)
        raw = receipt_path(cache_dir, shard).read_bytes()
        size = os.lstat(shard_path(cache_dir, shard)).st_size
    except FileNotFoundError:
        return False
    except CacheError as error:
        logger.warning("%s; the shard is made again", error)
        return False
    if receipt is None or raw != canonical_json(receipt) or receipt["facts"].get("plan") != plan.sha256:
        return False
    expected = plan.layout.shard_bytes(plan.rows_of(shard))
    return bool(receipt["samples"] == plan.rows_of(shard) and receipt["bytes"] == expected == size)


@dataclass(frozen=True)
class CacheFolder:
    """The folder of a cache, its lock held, and what belongs there."""

    folder: Path
    plan: Plan

    def prepare(self, samples: Samples) -> None:
        """Write what comes before the shards, where it is not there yet, and remove what killed writers left."""
        self.remove_leftovers()
        if (self.folder / META_NAME).exists():  # of a cache that is not whole any more
            fileio.remove(self.folder / META_NAME)
            fileio.fsync_dir(self.folder)
        files = {**self.plan.sidecar_files(), **samples.files()}
        for name, content in files.items():  # the plan comes first
            _write_once(self.folder / SIDECAR / name, content)
        _write_once(self.folder / MANIFEST_NAME, manifest_bytes(self.plan.manifest))

    def lacks_embeddings(self) -> bool:
        """Whether the embeddings are missing or have another size than the target's."""
        rows, width = self.plan.target["vocab_size"], self.plan.target["hidden_size"]
        size: int = len(header_bytes({"weight": (torch.float32, (width,))}, rows)) + 4 * rows * width
        try:
            return (self.folder / EMBEDDINGS_NAME).lstat().st_size != size
        except FileNotFoundError:
            return True

    def remove_leftovers(self) -> None:
        """Remove the temporary files of writers that are no more."""
        for path in leftovers(self.folder):
            fileio.remove(path)

    def meta(self) -> dict[str, Any] | None:
        """Return the meta.json of a finished cache of this plan; None where there is none, or something is missing."""
        try:
            raw = read_regular(self.folder / META_NAME)
            meta = parse_object(raw)
            sizes = {record["name"]: record["bytes"] for record in meta["files"]}
            whole = all((self.folder / name).lstat().st_size == size for name, size in sizes.items())
            good = whole and raw == meta_bytes(meta) and meta["plan_sha256"] == self.plan.sha256
            return meta if good else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def finish(self) -> dict[str, Any]:
        """Write meta.json, which says that all is there, and return what it says."""
        meta = describe(self.folder, self.plan)
        write_bytes(self.folder / META_NAME, meta_bytes(meta))
        return parse_object(meta_bytes(meta))


def leftovers(cache_dir: PathLike) -> list[Path]:
    """Return the temporary files in a folder: nobody writes them any more where nobody holds the lock."""
    folders = [folder for folder in (Path(cache_dir), Path(cache_dir, SIDECAR)) if folder.is_dir()]
    return sorted(path for folder in folders for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))


def _write_once(path: Path, content: bytes) -> None:
    if not path.is_file() or path.read_bytes() != content:
        write_bytes(path, content)


def describe(folder: Path, plan: Plan) -> dict[str, Any]:
    """Return what meta.json says of a folder whose shards are all there, without meta_crc32.

    Raises: CacheError where a receipt is missing.
    """
    receipts = []
    for shard in range(plan.num_shards):
        receipt = read_receipt(folder, shard)
        if receipt is None:
            raise CacheError(f"{receipt_path(folder, shard)}: no such file. Run the same again with --resume")
        receipts.append(receipt)
    facts = [receipt["facts"] for receipt in receipts]
    tokens, supervised, positions = (
        sum(each[name] for each in facts) for name in ("tokens", "supervised", "positions")
    )
    shard_bytes = sum(receipt["bytes"] for receipt in receipts)
    kept = None if plan.layout.topk == 0 or not positions else sum(each["kept_mass"] for each in facts) / positions
    names = sorted(entry.name for entry in (folder / SIDECAR).iterdir() if entry.name != LOCK_NAME)
    files = [
        _record(folder, name) for name in (MANIFEST_NAME, EMBEDDINGS_NAME, *(f"{SIDECAR}/{name}" for name in names))
    ]
    return {
        "kind": "eagle3",
        "format_version": SIDECAR_VERSION,
        "builder_version": BUILDER_VERSION,
        "built": True,
        "manifest": {name: value for name, value in plan.manifest.items() if name != "selected_token_ids"},
        "plan_sha256": plan.sha256,
        "content_sha256": content_sha256(folder),
        "totals": {
            "samples": plan.manifest["num_samples"],
            "tokens": tokens,
            "supervised_tokens": supervised,
            "positions": positions,
            "shards": plan.num_shards,
        },
        "disk_bytes": shard_bytes + sum(record["bytes"] for record in files),
        "bytes_per_token": shard_bytes / tokens,
        "supervised_share": supervised / tokens,
        "kept_mass": kept,
        "draft_mass": sum(each["draft_mass"] for each in facts) / supervised if supervised else None,
        "dropped": plan.dropped,
        "altered": plan.altered,
        "source": plan.source,
        "target": plan.target,
        "tokenizer_sha256": plan.tokenizer["sha256"],
        "files": files,
    }


def _record(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return {"name": name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
