"""What a run finds in its output folder: whether it can be used, and whether the plan that stands there is this run's.

All of it is told before the input is tokenized, which may take hours.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.fileio import CacheError

if TYPE_CHECKING:
    from niels_gpt.eagle3.models import TargetFacts

_BYTES_OF_A_TARGET = ("weights_sha256", "config_sha256")


def refuse_unusable(folder: Path) -> None:
    """Raise where no cache can be written into a folder, which need not be there; nothing is changed.

    Raises: CacheError naming the file that is in the way; OSError where no file can be made.
    """
    from niels_gpt.eagle3.estimate import has_holes
    from niels_gpt.eagle3.layout import SIDECAR, refuse_links

    refuse_links(folder)
    way = folder.absolute()
    places = [way / SIDECAR, way, *way.parents]
    for place in places:
        if os.path.lexists(place) and not place.is_dir():
            raise CacheError(
                f"--output-dir {folder}: {place} is in the way, which is no folder. Move it away, or name another place"
            )
    has_holes(next(place for place in places if place.is_dir()))  # it makes a file without a name


def recorded_plan(folder: Path | None) -> dict[str, Any]:
    """Return what plan.json in a folder holds; {} where there is none, or a damaged one: `finished_shards` decides."""
    from niels_gpt.eagle3.plan import read_record

    with contextlib.suppress(CacheError):
        return {} if folder is None else read_record(folder) or {}
    return {}


def recorded_target_name(target: TargetFacts, recorded: Mapping[str, Any]) -> str | None:
    """Return what a plan calls this target, however the path of its folder is spelled; None where it is another one."""
    begun = recorded.get("target", {})
    if target.weights_sha256 is None or any(begun.get(name) != getattr(target, name) for name in _BYTES_OF_A_TARGET):
        return None
    name: str | None = begun.get("name")
    return name


def under_recorded_name(source: dict[str, Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of an input, its files called as a plan calls them where they are the same ones."""
    begun = recorded.get("source", {})
    if source["kind"] != "own" or any(begun.get(name) != source[name] for name in ("kind", "fingerprint")):
        return source
    return {**source, "input_data": begun.get("input_data")}


def refuse_other_plan(folder: Path, manifest: Mapping[str, Any], decided: Mapping[str, Any]) -> None:
    """Raise where the plan in a folder cannot be that of a run, whatever the run's input holds.

    manifest: of the run, without what only its samples tell. decided: the parts of its plan that are known before.
    Raises: CacheError as `finished_shards`. A folder that lacks a part of its plan is left to that.
    """
    from niels_gpt.eagle3.folder import finished_shards
    from niels_gpt.eagle3.manifest import read_manifest
    from niels_gpt.eagle3.plan import differing_fields, open_plan

    try:
        begun = open_plan(folder)
    except (FileNotFoundError, CacheError):
        return
    now = replace(begun, manifest={**manifest, "num_samples": begun.manifest["num_samples"]}, **decided)
    found = read_manifest(folder)
    if differing_fields(begun.record, now.record) or differing_fields(found, now.manifest):
        finished_shards(folder, now, resume=True)
