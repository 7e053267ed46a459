"""What a tokenizer means for the caches of its folder: which it makes unreadable, which sources it has not seen."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from niels_gpt import versions
from niels_gpt.cache.meta import find_meta
from niels_gpt.data.credits import CREDITS
from niels_gpt.fileio import CacheError
from niels_gpt.recipes.own import FAMILIES, own_sources
from niels_gpt.recipes.produce import TOKENIZER_KEY, cache_root
from niels_gpt.remedies import build_command, recorded_settings, source_of
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import MODEL_NAME

logger = logging.getLogger(__name__)

LITTLE_TEXT = 1_000_000
"""Utf-8 bytes; a tokenizer that was trained on less has hardly a piece longer than a syllable."""


def warn_of_older_caches(settings: Settings, meta: Mapping[str, Any]) -> None:
    """Say which caches a tokenizer with this meta makes unreadable when it is installed, and name the way back."""
    root = cache_root(settings)
    older = _older_caches(root, str(meta["tokenizer_sha256"]))
    if not older:
        return
    installed = find_meta(root / TOKENIZER_KEY) or {}
    before = str(installed.get("tokenizer_sha256"))
    logger.warning(
        "tokenizer %s is about to take the place of %s. Readers then refuse %s until they are built again: %s",
        str(meta["tokenizer_sha256"])[:12],
        before[:12],
        ", ".join(older),
        _command(settings, list(older)),
    )
    back = versions.versions_dir(root / TOKENIZER_KEY) / str(installed.get("content_sha256"))[: versions.VERSION_DIGITS]
    same = [key for key, sha256 in older.items() if sha256 == before]
    if same:
        logger.warning("the way back: %s", _command(settings, same, tokenizer_model=str(back / MODEL_NAME)))


def say_unseen(settings: Settings, meta: Mapping[str, Any], key: str) -> None:
    """Say that a tokenizer which was trained here has not seen the source of a cache, and how to train one that has."""
    seen, name = meta.get("trained_on_bytes"), key.rpartition("/")[2]
    if meta.get("origin") != "trained" or not isinstance(seen, Mapping):
        return
    known = [source for source, size in seen.items() if isinstance(size, int) and size]
    if name in known:
        return
    path = cache_root(settings) / TOKENIZER_KEY
    remove = shlex.join(["rm", *([] if path.is_symlink() else ["-r"]), str(path)])
    own = [source for source in known if source not in CREDITS]
    logger.info(
        "%s: the tokenizer has not seen this source: it was trained on %s bytes of %s. To train one that has, and "
        "build with it: %s && %s",
        key,
        f"{meta.get('bytes_seen', 0):,}",
        ", ".join(known),
        remove,
        _command(settings, [*own, key]),
    )


def warn_of_little_text(meta: Mapping[str, Any], seen: Mapping[str, int | str]) -> None:
    """Warn where a tokenizer that is trained here has seen little text: caches that are built later get it too."""
    if meta["bytes_seen"] < LITTLE_TEXT:
        logger.warning(
            "tokenizer: trained on little text, %s bytes of %s, for %s ids; every cache of this folder is encoded with "
            "it. Give the first build more sources, or name a model with --tokenizer-model",
            f"{meta['bytes_seen']:,}",
            ", ".join(source for source, size in seen.items() if isinstance(size, int) and size),
            f"{meta['vocab_size']:,}",
        )


def _older_caches(root: Path, sha256: str) -> dict[str, str]:
    """Return the caches that have ids of another tokenizer: key -> sha256 of that one."""
    found: dict[str, str] = {}
    for folder in sorted(path for kind in ("pretrain", "sft") for path in (root / kind).glob("[!.]*")):
        with contextlib.suppress(CacheError):  # whoever reads a damaged cache is told
            other = (find_meta(folder) or {}).get("tokenizer_sha256")
            if other not in (None, sha256):
                found[folder.relative_to(root).as_posix()] = str(other)
    return found


def _command(settings: Settings, keys: Sequence[str], **changed: Any) -> str:
    """Return the command that builds some caches, given by key or name, under these settings.

    A user-defined source that they do not name has the line of its last recorded run; without one it is left out.
    """
    settings, chosen = replace(settings, **changed), []
    for name in dict.fromkeys(key.rpartition("/")[2] for key in keys):
        if name not in CREDITS and name not in own_sources(settings):
            lines = _recorded_line(settings, name)
            if not lines:
                continue
            settings = replace(settings, **lines)
        chosen.append(name)
    return build_command(settings, chosen)


def _recorded_line(settings: Settings, name: str) -> dict[str, Any]:
    """Return the setting that also names a user-defined source, as its last run did; {} where none is recorded."""
    for family in FAMILIES:
        recorded = getattr(recorded_settings(cache_root(settings), f"{family}/{name}"), family) or ""
        lines = [line for line in recorded.split(";") if source_of(line) == name]
        if lines:
            return {family: ";".join(filter(None, [getattr(settings, family), *lines]))}
    return {}
