"""The draft's tokens and meta.json of an imported cache, which has no plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.eagle3.format.convert import content_sha256
from niels_gpt.eagle3.format.layout import MANIFEST_NAME, SIDECAR
from niels_gpt.eagle3.format.manifest import read_manifest, write_manifest
from niels_gpt.eagle3.format.native.shard_reader import NativeShards
from niels_gpt.eagle3.format.native.weights import WEIGHTS_NAME
from niels_gpt.eagle3.format.plan import BUILDER_VERSION, SIDECAR_VERSION
from niels_gpt.eagle3.format.shard_writer import read_receipt
from niels_gpt.eagle3.vocab import build_eagle3_token_mapping
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, sha256_file, write_bytes
from niels_gpt.storage.meta_json import meta_bytes


def add_draft_vocab(folder: Path, draft_vocab_size: int | None, special_token_ids: Sequence[int | None]) -> None:
    """Choose the draft's tokens by the supervised tokens of the cache in `folder`, and write them into its manifest.

    draft_vocab_size: None: all of the target's. special_token_ids: come first.
    """
    manifest, stored = read_manifest(folder), NativeShards(folder)
    vocab_size = manifest["target_vocab_size"]

    def batches() -> Iterator[dict[str, Any]]:
        for index in range(stored.num_samples):
            sample = stored.sample(index)
            yield {"input_ids": sample.input_ids.astype(np.int64), "loss_mask": sample.loss_mask}

    size = min(draft_vocab_size or vocab_size, vocab_size)
    chosen, _ = build_eagle3_token_mapping(
        batches(), target_vocab_size=vocab_size, draft_vocab_size=size, special_token_ids=special_token_ids
    )
    write_manifest(folder, {**manifest, "draft_vocab_size": size, "selected_token_ids": chosen.tolist()})


def write_meta(folder: Path, tool: str, target: Mapping[str, Any], dropped: Mapping[str, int]) -> None:
    """Write meta.json, whose plan_sha256 is null: no run of this project's producer made the states.

    Raises: CacheError where nothing could be trained on.
    """
    manifest = read_manifest(folder)
    receipts = [receipt for shard in range(manifest["num_shards"]) if (receipt := read_receipt(folder, shard))]
    tokens, supervised = (sum(each["facts"][name] for each in receipts) for name in ("tokens", "supervised"))
    shard_bytes = sum(each["bytes"] for each in receipts)
    names = [MANIFEST_NAME, WEIGHTS_NAME, *sorted(f"{SIDECAR}/{each.name}" for each in (folder / SIDECAR).iterdir())]
    files: list[dict[str, Any]] = [
        {"name": name, "bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)} for name in names
    ]
    meta: dict[str, Any] = {
        "kind": "eagle3",
        "format_version": SIDECAR_VERSION,
        "builder_version": BUILDER_VERSION,
        "built": True,
        "manifest": {name: value for name, value in manifest.items() if name != "selected_token_ids"},
        "plan_sha256": None,
        "content_sha256": content_sha256(folder),
        "totals": {
            "samples": manifest["num_samples"],
            "tokens": tokens,
            "supervised_tokens": supervised,
            "positions": _positions(folder),
            "shards": manifest["num_shards"],
        },
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


def _positions(folder: Path) -> int:
    """Return the supervised target rows whose most probable token the draft knows. Raises: CacheError for none."""
    stored = NativeShards(folder)
    known = np.zeros(stored.manifest["target_vocab_size"], np.bool_)
    known[stored.manifest["selected_token_ids"]] = True
    count = 0
    for index in range(stored.num_samples):
        sample = stored.sample(index)
        count += int((known[sample.argmax_ids.numpy()] & sample.loss_mask[sample.positions]).sum())
    if not count:
        found = "not one slot is a position: where the loss mask is 1, no most probable token is among the draft's"
        raise CacheError(folder, found, remedy="Take a larger --draft-vocab-size", code="E709")
    return count
