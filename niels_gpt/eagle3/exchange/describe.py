"""The draft's tokens and meta.json of an imported cache, which has no plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.derive.redraft import frequent_tokens, positions_of
from niels_gpt.eagle3.format.convert import content_sha256
from niels_gpt.eagle3.format.layout import MANIFEST_NAME, SIDECAR
from niels_gpt.eagle3.format.manifest import read_manifest, write_manifest
from niels_gpt.eagle3.format.native.shard_reader import NativeShards
from niels_gpt.eagle3.format.native.weights import WEIGHTS_NAME
from niels_gpt.eagle3.format.plan import BUILDER_VERSION, SIDECAR_VERSION
from niels_gpt.eagle3.format.shard_writer import read_receipt
from niels_gpt.eagle3.produce.positions import Counts
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, sha256_file, write_bytes
from niels_gpt.storage.meta_json import meta_bytes


def add_draft_vocab(folder: Path, draft_vocab_size: int | None, special_token_ids: Sequence[int | None]) -> None:
    """Choose the draft's tokens by the supervised tokens of the cache in `folder`, and write them into its manifest.

    draft_vocab_size: None: all of the target's. special_token_ids: come first.
    """
    shards = NativeShards(folder)
    chosen = frequent_tokens(shards, draft_vocab_size, special_token_ids)
    write_manifest(folder, {**shards.manifest, "draft_vocab_size": len(chosen), "selected_token_ids": chosen})


def write_meta(folder: Path, source: Path, tool: str, target: Mapping[str, Any], dropped: Mapping[str, int]) -> None:
    """Write meta.json, whose plan_sha256 is null: no run of this project's producer made the states.

    Raises: CacheError naming `source` where nothing could be trained on.
    """
    manifest = read_manifest(folder)
    receipts = [receipt for shard in range(manifest["num_shards"]) if (receipt := read_receipt(folder, shard))]
    tokens, supervised = (sum(each["facts"][name] for each in receipts) for name in ("tokens", "supervised"))
    shard_bytes = sum(each["bytes"] for each in receipts)
    names = [MANIFEST_NAME, WEIGHTS_NAME, *sorted(f"{SIDECAR}/{each.name}" for each in (folder / SIDECAR).iterdir())]
    files: list[dict[str, Any]] = [
        {"name": name, "bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)} for name in names
    ]
    totals = {
        "samples": manifest["num_samples"],
        "tokens": tokens,
        "supervised_tokens": supervised,
        "positions": positions_of(NativeShards(folder), manifest["selected_token_ids"]),
        "shards": manifest["num_shards"],
    }
    if problem := Counts.of_meta({"totals": totals}).problem:
        raise CacheError(source, problem, code="E709")
    meta: dict[str, Any] = {
        "kind": "eagle3",
        "format_version": SIDECAR_VERSION,
        "builder_version": BUILDER_VERSION,
        "built": True,
        "manifest": {name: value for name, value in manifest.items() if name != "selected_token_ids"},
        "plan_sha256": None,
        "content_sha256": content_sha256(folder),
        "totals": totals,
        "disk_bytes": shard_bytes + sum(record["bytes"] for record in files),
        "bytes_per_token": shard_bytes / tokens,
        "supervised_share": supervised / tokens,
        "dropped": dict(dropped),
        "altered": {},
        "source": {"kind": tool},
        "target": dict(target),
        "files": files,
    }
    write_bytes(folder / META_NAME, meta_bytes(meta))
