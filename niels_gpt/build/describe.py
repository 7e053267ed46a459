"""What meta.json says: the keys that every cache has, and its content sha256."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from niels_gpt.build.encode import TextEncoder
from niels_gpt.build.writer import TOKEN_DTYPE_NAME
from niels_gpt.fileio import META_NAME, canonical_json
from niels_gpt.records import file_records

FORMAT_VERSION = 1
BUILDER_VERSION = 1  # raised when the same input gives other bytes


@dataclass(frozen=True)
class Source:
    """Where a cache's text comes from, as its meta.json tells it. Nothing in it may depend on the machine."""

    name: str | None = None
    """dataset_name: the hub's dataset id, or the source's own name."""
    config: str | None = None
    """dataset_config: the hub's config; None where there is none."""
    streaming: bool = False
    """Whether upstream was streamed, so that determinism rests on upstream's order."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """revision, licence, fingerprint, versions: whatever else is known."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """What the loader dropped or repaired, by reason; read when the stream has ended."""


def content_sha256(records: list[dict[str, Any]]) -> str:
    """Return the sha256 of the lines `<sha256>  <name>`, sorted by name: `sha256sum` of the files, hashed again."""
    lines = sorted((str(record["name"]), str(record["sha256"])) for record in records)
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in lines).encode()).hexdigest()


def vocabulary_of(encoder: TextEncoder) -> dict[str, Any]:
    """Return the keys of meta.json that tell whose ids a cache holds."""
    return {
        "tokenizer_sha256": encoder.tokenizer_sha256,
        "vocab_size": encoder.vocab_size,
        "special_token_ids": encoder.special_token_ids,
    }


def write_description(
    work: Path,
    *,
    vocabulary: Mapping[str, Any],
    source: Source,
    seed: int,
    shards: dict[str, list[dict[str, Any]]],
    index: dict[str, dict[str, Any]],
    totals: dict[str, int],
    **keys: Any,
) -> dict[str, Any]:
    """Write meta.json, the last file of a build, and return it. `totals` also stand at the top level.

    The spec's sentence "totals: train_tokens, val_tokens" reads both ways, as one key and as two.
    """
    meta = {
        "format_version": FORMAT_VERSION,
        "builder_version": BUILDER_VERSION,
        "dataset_name": source.name,
        "dataset_config": source.config,
        "streaming": source.streaming,
        "source": {**source.facts, "counters": dict(sorted(source.counters.items()))},
        "seed": seed,
        "token_dtype": TOKEN_DTYPE_NAME,
        **vocabulary,
        "shards": shards,
        "index": index,
        "totals": totals,
        **totals,
        "content_sha256": content_sha256(file_records({"shards": shards, "index": index})),
        **keys,
    }
    (work / META_NAME).write_bytes(canonical_json(meta))
    return meta
