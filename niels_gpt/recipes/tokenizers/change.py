"""What is logged of a new tokenizer: the caches it makes unreadable, and the sources it was not trained on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from niels_gpt.cache.meta import find_meta
from niels_gpt.data.sources import SOURCES
from niels_gpt.data.trees import TREES
from niels_gpt.recipes.run_recipe import TOKENIZER_KEY, cache_root
from niels_gpt.recipes.user_sources import FAMILIES, user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage import versions
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.remedies import build_command, recorded_settings, source_of, with_recorded_tokenizer

logger = logging.getLogger(__name__)

LITTLE_TEXT = 1_000_000
"""utf-8 bytes; a tokenizer that was trained on less has hardly a piece longer than a syllable."""

_WITH_TOKENIZER = ("document_start", "document_end", "on_special")
"""Settings that suit one tokenizer and not another: the way back takes them from the last build of each cache."""


def warn_of_older_caches(settings: Settings, meta: Mapping[str, Any]) -> None:
    """Warn of the caches that a tokenizer with this meta makes unreadable when it is installed, and how to go back."""
    root = cache_root(settings)
    older = _caches_of_other_tokenizers(root, str(meta["tokenizer_sha256"]))
    if not older:
        return
    installed = find_meta(root / TOKENIZER_KEY) or {}
    before = str(installed.get("tokenizer_sha256"))
    logger.warning(
        "tokenizer %s is about to replace %s. Readers then refuse %s until they are built again: %s",
        str(meta["tokenizer_sha256"])[:12],
        before[:12],
        ", ".join(older),
        _command(settings, list(older)),
        extra={"code": "W404"},
    )
    back = versions.versions_dir(root / TOKENIZER_KEY) / str(installed.get("content_sha256"))[: versions.VERSION_DIGITS]
    groups: dict[tuple[str, ...], list[str]] = {}
    for key in (key for key, sha256 in older.items() if sha256 == before):
        recorded = recorded_settings(root, key)
        groups.setdefault(tuple(getattr(recorded, name) for name in _WITH_TOKENIZER), []).append(key)
    if groups:
        logger.warning(
            "for the old one: %s",
            " && ".join(
                _command(settings, keys, tokenizer=str(back), **dict(zip(_WITH_TOKENIZER, values, strict=True)))
                + " --yes" * (len(groups) > 1)
                for values, keys in groups.items()
            ),
            extra={"code": "W404"},
        )


def ended_caches(settings: Settings, chosen: Sequence[str]) -> list[str]:
    """Return the finished caches of the installed tokenizer that a build of `chosen` does not build again."""
    root = cache_root(settings)
    installed = (find_meta(root / TOKENIZER_KEY) or {}).get("tokenizer_sha256")
    of_others = _caches_of_other_tokenizers(root, "")
    return [key for key, sha256 in of_others.items() if sha256 == installed and key not in chosen]


def log_unseen_source(settings: Settings, meta: Mapping[str, Any], key: str) -> None:
    """Log that a tokenizer trained here was not trained on the source of a cache, and how to train one that is."""
    num_bytes, name = meta.get("trained_on_bytes"), key.rpartition("/")[2]
    if meta.get("origin") != "trained" or not isinstance(num_bytes, Mapping):
        return
    trained_on = _sources_with_text(num_bytes)
    if name in trained_on:
        return
    again = with_recorded_tokenizer(settings, cache_root(settings))
    user_defined = [source for source in trained_on if source not in SOURCES]
    logger.info(
        "%s: the tokenizer has not seen this source: it was trained on %s bytes of %s. To train one that has, and "
        "build with it: %s",
        key,
        f"{meta.get('bytes_seen', 0):,}",
        ", ".join(trained_on),
        _command(again, [*user_defined, key], retrain_tokenizer=True),
    )


def warn_of_little_text(meta: Mapping[str, Any], num_bytes: Mapping[str, int | str]) -> None:
    """Warn where a tokenizer was trained on little text: later caches of the folder are encoded with it too."""
    if meta["bytes_seen"] < LITTLE_TEXT:
        logger.warning(
            "tokenizer: trained on little text, %s bytes of %s, for %s ids; every cache of this folder is encoded with "
            "it. Give the first build more sources, or name a model with --tokenizer",
            f"{meta['bytes_seen']:,}",
            ", ".join(_sources_with_text(num_bytes)),
            f"{meta['vocab_size']:,}",
            extra={"code": "W405"},
        )


def _sources_with_text(num_bytes: Mapping[str, Any]) -> list[str]:
    return [source for source, size in num_bytes.items() if isinstance(size, int) and size]


def _caches_of_other_tokenizers(root: Path, sha256: str) -> dict[str, str]:
    """Return the caches whose ids are of another tokenizer: key -> its sha256."""
    others: dict[str, str] = {}
    for folder in sorted(path for family in (*FAMILIES, "trees") for path in (root / family).glob("[!.]*")):
        with contextlib.suppress(CacheError):  # the reader of a damaged cache reports it
            other = (find_meta(folder) or {}).get("tokenizer_sha256")
            if other not in (None, sha256):
                others[folder.relative_to(root).as_posix()] = str(other)
    return others


def _command(settings: Settings, keys: Sequence[str], **changed: Any) -> str:
    """Return the command that builds some caches, given by key or name, under these settings.

    A user-defined source that the settings do not define has the line of its last recorded run; without one it is left
    out.
    """
    settings, chosen = replace(settings, **changed), []
    for name in dict.fromkeys(key if key in TREES else key.rpartition("/")[2] for key in keys):
        if name not in (*SOURCES, *TREES) and name not in user_sources(settings):
            lines = _recorded_line(settings, name)
            if not lines:
                continue
            settings = replace(settings, **lines)
        chosen.append(name)
    return build_command(settings, chosen)


def _recorded_line(settings: Settings, name: str) -> dict[str, Any]:
    """Return the settings' line, with the line that defined a user source in its last run; {} without a record."""
    for family in FAMILIES:
        recorded = getattr(recorded_settings(cache_root(settings), f"{family}/{name}"), family) or ""
        lines = [line for line in recorded.split(";") if source_of(line) == name]
        if lines:
            return {family: ";".join(filter(None, [getattr(settings, family), *lines]))}
    return {}
