"""The folder of a cache in work, its lock held: what is written before the shards, and meta.json at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from niels_gpt import fileio
from niels_gpt.eagle3.convert import content_sha256
from niels_gpt.eagle3.folder import finished_meta, leftovers
from niels_gpt.eagle3.layout import LOCK_NAME, SIDECAR, PathLike
from niels_gpt.eagle3.manifest import EMBEDDINGS_NAME, MANIFEST_NAME, manifest_bytes, write_target_embeddings
from niels_gpt.eagle3.plan import BUILDER_VERSION, SIDECAR_VERSION, Plan
from niels_gpt.eagle3.positions import Counts
from niels_gpt.eagle3.samples import Samples
from niels_gpt.eagle3.shards import read_receipt, receipt_path
from niels_gpt.fileio import META_NAME, CacheError, canonical_json, sha256_file, write_bytes
from niels_gpt.records import meta_bytes, parse_object, read_regular

EMBEDDINGS_RECEIPT = "embeddings.json"
"""In the sidecar, written after the embeddings: their size in bytes and their sha256."""
_RECEIPT_BYTES = 4096


def write_embeddings(cache_dir: PathLike, weight: torch.Tensor) -> None:
    """Write the target's table of input embeddings [V, H], and then its receipt."""
    receipt = Path(cache_dir, SIDECAR, EMBEDDINGS_RECEIPT)
    if receipt.is_file():  # of a table that is not whole any more
        fileio.remove(receipt)
        fileio.fsync_dir(receipt.parent)
    path = Path(write_target_embeddings(cache_dir, weight))
    write_bytes(receipt, canonical_json(_sums(path)))


def _sums(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


@dataclass(frozen=True)
class CacheFolder:
    """The folder of a cache, its lock held, and what belongs there."""

    folder: Path
    plan: Plan

    def prepare(self, samples: Samples) -> None:
        """Write what comes before the shards, where it is not there yet, and remove what killed writers left.

        A meta.json of another kind was refused before: see folder.finished_shards.
        """
        self.remove_leftovers()
        if (self.folder / META_NAME).is_file():  # of a cache that is not whole any more
            fileio.remove(self.folder / META_NAME)
            fileio.fsync_dir(self.folder)
        for name, content in self.plan.sidecar_files().items():  # the plan comes first
            _write_once(self.folder / SIDECAR / name, content)
        self._write_samples(samples)
        _write_once(self.folder / MANIFEST_NAME, manifest_bytes(self.plan.manifest))

    def _write_samples(self, samples: Samples) -> None:
        """Write the samples where they are not there yet: their bytes are put together only where they are needed."""
        paths = {self.folder / SIDECAR / name: sha256 for name, sha256 in samples.sums.items()}
        missing = {path.name for path, sha256 in paths.items() if not path.is_file() or sha256_file(path) != sha256}
        for name, content in samples.files().items() if missing else ():
            if name in missing:
                write_bytes(self.folder / SIDECAR / name, content)

    def lacks_embeddings(self) -> bool:
        """Whether the embeddings or their receipt are missing, or do not go together: they are read as a whole."""
        try:
            receipt = read_regular(self.folder / SIDECAR / EMBEDDINGS_RECEIPT, _RECEIPT_BYTES)
            path = self.folder / EMBEDDINGS_NAME
            said = parse_object(receipt)
            same_size = path.lstat().st_size == said.get("bytes")
            return not same_size or path.is_symlink() or canonical_json(_sums(path)) != receipt
        except (FileNotFoundError, ValueError):
            return True

    def remove_leftovers(self) -> None:
        """Remove the temporary files of writers that are no more."""
        for path in leftovers(self.folder):
            fileio.remove(path)

    def meta(self) -> dict[str, Any] | None:
        """Return the meta.json of a finished cache of this plan; None where there is none, or something is missing."""
        meta = finished_meta(self.folder, self.plan)
        if meta is None or self.lacks_embeddings():
            return None
        files = self.plan.sidecar_files().items()  # of their sizes, but perhaps damaged: see folder.finished_shards
        return meta if all(read_regular(self.folder / SIDECAR / name) == content for name, content in files) else None

    def finish(self) -> dict[str, Any]:
        """Write meta.json, which says that all is there, and return what it says.

        Raises: CacheError where not one slot is a position: such a cache stays unfinished.
        """
        meta = describe(self.folder, self.plan)
        if problem := counts_of(meta).problem:
            raise CacheError(f"{self.folder}: {problem}")
        write_bytes(self.folder / META_NAME, meta_bytes(meta))
        return parse_object(meta_bytes(meta))


def counts_of(meta: dict[str, Any]) -> Counts:
    """Return the slots of a finished cache by its meta.json."""
    totals = meta["totals"]
    return Counts(totals["tokens"], totals["supervised_tokens"], totals["positions"])


def _write_once(path: Path, content: bytes) -> None:
    if not path.is_file() or path.stat().st_size != len(content) or path.read_bytes() != content:
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
