"""What a meta.json says of a cache's files, parsed as if anybody might have written it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def file_records(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the record (name, bytes, sha256, ...) of every file that a meta.json names, in its own order."""
    shards = (record for group in meta.get("shards", {}).values() for record in group)
    return [*shards, *meta.get("index", {}).values(), *meta.get("files", [])]
