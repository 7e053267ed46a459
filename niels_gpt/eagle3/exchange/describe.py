"""The draft's tokens and meta.json of an imported cache, which has no plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.derive.redraft import frequent_tokens, positions_of
from niels_gpt.eagle3.format import meta
from niels_gpt.eagle3.format.manifest import read_manifest, write_manifest
from niels_gpt.eagle3.format.native.shard_reader import NativeShards
from niels_gpt.eagle3.format.shard_writer import read_receipt
from niels_gpt.eagle3.totals import Counts
from niels_gpt.storage.errors import CacheError


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
    facts = [receipt["facts"] for shard in range(manifest["num_shards"]) if (receipt := read_receipt(folder, shard))]
    totals = {
        "samples": manifest["num_samples"],
        "tokens": sum(each["tokens"] for each in facts),
        "supervised_tokens": sum(each["supervised"] for each in facts),
        "positions": positions_of(NativeShards(folder), manifest["selected_token_ids"]),
        "shards": manifest["num_shards"],
    }
    if problem := Counts.of_meta({"totals": totals}).problem:
        raise CacheError(source, problem, code="E709")
    keys = {"plan_sha256": None, "totals": totals, "dropped": dict(dropped), "altered": {}}
    meta.write_meta(folder, {**keys, "source": {"kind": tool}, "target": dict(target)})
