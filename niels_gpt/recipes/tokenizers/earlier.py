"""Versions of a tokenizer that earlier runs have made: which is whole, and which these settings trained."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from niels_gpt.cache.meta import find_meta, read_meta
from niels_gpt.engine.meta import content_sha256
from niels_gpt.recipes.tokenizers.texts import was_trained_by
from niels_gpt.settings import Settings
from niels_gpt.storage import versions
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import file_records, resolved
from niels_gpt.tokenizers.files import tokenizer_files


def records_of(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Return what meta.json says of each file of a tokenizer."""
    return [
        {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    ]


def meta_or_none(path: Path) -> dict[str, Any] | None:
    """Return the meta of a tokenizer; None without one, or if it is damaged."""
    with contextlib.suppress(CacheError):
        return find_meta(path)
    return None


def undamaged(version: Path) -> dict[str, Any] | None:
    """Return the meta of a version of a tokenizer; None without one, or if it is damaged."""
    with contextlib.suppress(CacheError, OSError):
        meta = read_meta(str(version / META_NAME))
        records = records_of(tokenizer_files(version))
        names_model = meta.get("tokenizer_sha256") in {record["sha256"] for record in records}
        is_whole = records == file_records(meta) and content_sha256(records) == meta["content_sha256"]
        return meta if is_whole and names_model else None
    return None


def trained_earlier(settings: Settings, path: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return a version that these settings trained after the installed one, and that is not installed yet."""
    folder = versions.versions_dir(path)
    installed = resolved(path)
    if meta_or_none(path) is None or installed.parent != resolved(folder):
        return None
    candidates = [version for version in folder.glob("[0-9a-f]" * versions.VERSION_DIGITS) if not version.is_symlink()]
    for version in sorted(candidates, key=lambda version: -version.stat().st_mtime_ns):
        if version.stat().st_mtime_ns <= installed.stat().st_mtime_ns:
            break
        meta = undamaged(version)
        if meta is not None and was_trained_by(settings, meta):
            return version, meta
    return None
