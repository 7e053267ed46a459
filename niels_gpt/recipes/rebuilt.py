"""Warn when a new version replaces another: documents moved to val, or an exclusion ended.

The version before is the one in recipe.json. If `gc` has removed it, nothing is logged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from niels_gpt.cache.meta import read_meta
from niels_gpt.data.exclude import EXCLUDED
from niels_gpt.display.numbers import many
from niels_gpt.engine.split import asked_share
from niels_gpt.kinds.diff import num_moved_to_val
from niels_gpt.settings import Settings
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import resolved
from niels_gpt.storage.remedies import build_command, recorded_settings
from niels_gpt.storage.versions import VERSION_DIGITS, versions_dir

logger = logging.getLogger(__name__)

_SURELY_MANY = 100_000
"""From this many documents on no split moves its nearest one: see TextSplit."""


def warn_of_changes(settings: Settings, key: str, path: Path, recorded: Mapping[str, Any]) -> None:
    """Log how the version just committed at `path` differs for readers of the version before.

    recorded: recipe.json of the version before; {} without one.
    """
    name, folder = recorded.get("version"), resolved(path)
    if not isinstance(name, str) or not re.fullmatch(rf"[0-9a-f]{{{VERSION_DIGITS}}}", name) or name == folder.name:
        return
    before = versions_dir(path) / name
    try:
        old, new = (read_meta(str(version / META_NAME)) for version in (before, folder))
        moved = num_moved_to_val(before, folder) if _may_have_moved(old, new) else 0
        excluded = 0 if "exclude" in new["source"] else int(old["source"]["counters"].get(EXCLUDED, 0))
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:  # removed, or damaged: read no more
        logger.info("%s: not compared with the version before: %s", path, error)
        return
    if moved:
        message = (
            "%s: %s of train of the version before %s now in val. A model that was trained on that version has seen "
            "what is evaluated"
        )
        logger.warning(message, path, many(moved, "document"), "is" if moved == 1 else "are", extra={"code": "W311"})
    if excluded:
        _warn_of_exclusion(settings, key, path, excluded)


def _may_have_moved(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether a document can be in train of one version and in val of the other, by the rule of the split."""
    if old.get("built") is False or new.get("built") is False:
        return False
    of_both = [(meta.get("split_rule"), meta.get("seed"), asked_share(meta)) for meta in (old, new)]
    rule = str(of_both[0][0])
    read = min(meta.get("documents_read", meta.get("examples_read", 0)) for meta in (old, new))
    return of_both[0] != of_both[1] or "sha256(seed" not in rule or read < _SURELY_MANY


def _warn_of_exclusion(settings: Settings, key: str, path: Path, excluded: int) -> None:
    file = recorded_settings(path.parent.parent, key).exclude
    again = build_command(replace(settings, exclude=file or "FILE"), key)
    logger.warning(
        "%s: the version before left out %s by --exclude%s, and this one has them again. To leave them out: %s",
        path,
        many(excluded, "document"),
        f" {file}" if file else "",
        again,
        extra={"code": "W312"},
    )
