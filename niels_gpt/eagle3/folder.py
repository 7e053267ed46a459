"""What a folder holds before a run: what is finished there, what may be continued, and what is refused."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.layout import LOCK_NAME, SIDECAR, PathLike, read_file, read_meta_bytes, refuse_links, shard_path
from niels_gpt.eagle3.manifest import existing_shard_indices, manifest_path, read_manifest
from niels_gpt.eagle3.plan import CONVERTED, PLAN_NAME, Plan, differing_fields, read_record
from niels_gpt.eagle3.shards import read_receipt, receipt_path
from niels_gpt.fileio import META_NAME, CacheError, canonical_json
from niels_gpt.records import meta_bytes, parse_object, shortened

logger = logging.getLogger(__name__)

_LEFTOVER = re.compile(
    r"\.(shard-[0-9]{6}\.(safetensors|json)|(manifest|meta|plan|embeddings)\.json|target_embeddings\.safetensors"
    r"|samples\.safetensors|ids\.txt|batches\.jsonl)\.[0-9a-f]{8}\.tmp"
)
_FRESH = "Name a fresh folder, or remove this one"
_MAX_VALUES = 6


# --- what may be run there --------------------------------------------------------------------------------------------


def finished_shards(cache_dir: PathLike, plan: Plan, *, resume: bool) -> set[int]:
    """Return the shards of a plan that stand in a folder, which need not be there; nothing is changed.

    A shard is finished if its receipt is there, is of this plan, and gives the size that the shard has.
    Raises: CacheError where the plan may not be run there: without `resume` in a folder that holds anything; with it in
        one of another plan, whose differing fields are named, of another tool, or with another cache's meta.json; and
        where one of its files, or the sidecar, is a link, for nothing is written or removed through one.
    """
    folder = os.fspath(cache_dir)
    refuse_links(cache_dir)
    if not resume:
        refuse_existing(cache_dir)
        return set()
    shards = existing_shard_indices(cache_dir)
    if not _is_of_plan(cache_dir, plan, shards):
        _refuse_foreign(cache_dir)
        return set()
    _refuse_foreign_meta(cache_dir)
    if strange := sorted(shard for shard in shards if shard >= plan.num_shards):
        raise CacheError(f"{shard_path(folder, strange[0])}: the plan has {plan.num_shards} shards. Move it away")
    done = {shard for shard in shards if is_finished(cache_dir, plan, shard)}
    made_by = set() if done else _plans_named(cache_dir, shards)
    if made_by - {plan.sha256}:  # a plan.json that was changed, and settings that were taken from it
        _refuse_without_plan(cache_dir, plan, made_by, True, "its shards name another plan")
    return done


def _is_of_plan(cache_dir: PathLike, plan: Plan, shards: set[int]) -> bool:
    """Whether a folder holds this plan, or what was made by it; False where there is neither a plan nor a cache.

    Raises: CacheError where there is another plan, or a cache of which nothing says that it is of this one.
    """
    record, damage = _read_record(cache_dir)
    has_manifest = os.path.lexists(manifest_path(cache_dir))
    in_plan = [] if record is None else differing_fields(record, plan.record)
    if record is None or in_plan:
        made_by = _plans_named(cache_dir, shards)
        if made_by == {plan.sha256}:
            said = damage or ("is not that of the shards" if in_plan else "is missing")
            logger.warning("%s: %s; it is written again", os.path.join(cache_dir, SIDECAR, PLAN_NAME), said)
            in_plan = []
        elif record is None:
            if not (made_by or shards or has_manifest or damage):
                return False
            _refuse_without_plan(cache_dir, plan, made_by, has_manifest, damage)
    found = read_manifest(cache_dir) if has_manifest else plan.manifest
    in_manifest = differing_fields(found, plan.manifest, "manifest.")
    if in_plan or in_manifest:
        _refuse_other(cache_dir, plan, {} if record is None else record, found, in_plan, in_manifest)
    return True


def _read_record(cache_dir: PathLike) -> tuple[dict[str, Any] | None, str]:
    """Return what plan.json holds, or None and what is wrong with it; nothing is wrong where there is none."""
    path = Path(cache_dir, SIDECAR, PLAN_NAME)
    try:
        return read_record(cache_dir), ""
    except CacheError as error:
        if not path.is_file() or path.is_symlink():
            raise  # nothing of ours, and no file that could be written again in its place
        return None, str(error).removeprefix(f"{path}: ")


def _plans_named(cache_dir: PathLike, shards: set[int]) -> set[str]:
    """Return the sums of the plans by which the receipts and meta.json say that they were made."""
    named = {str((finished_meta(cache_dir) or {}).get("plan_sha256"))} - {"None"}
    for shard in shards:
        try:
            receipt = read_receipt(cache_dir, shard)
        except CacheError:
            continue  # the shard is made again
        if receipt is not None and receipt["facts"].get("plan") is not None:
            named.add(str(receipt["facts"]["plan"]))
    return named


def _refuse_without_plan(cache_dir: PathLike, plan: Plan, made_by: set[str], has_manifest: bool, damage: str) -> None:
    path = f"{SIDECAR}/{PLAN_NAME}"
    if made_by:
        sums = ", ".join(sorted(each[:12] for each in made_by))
        why = (
            f"its {path} {'is damaged (' + damage + ')' if damage else 'is missing'}, and these settings give another "
            f"plan, {plan.sha256[:12]}, than the one that its shards were made by, {sums}. Run it with the original "
            "settings, which write that file again"
        )
    elif damage:
        why = f"its {path} is damaged ({damage}), and nothing else says by which plan it was made"
    elif has_manifest:
        why = f"it has no {path}: another tool wrote it, so what it holds cannot be continued"
    else:
        why = "its manifest is missing, so the shards in it cannot be compared with this run"
    raise CacheError(f"--resume was requested for {os.fspath(cache_dir)}, but {why}. {_FRESH}")


def _refuse_other(
    cache_dir: PathLike,
    plan: Plan,
    record: dict[str, Any],
    manifest: dict[str, Any],
    in_plan: list[str],
    in_manifest: list[str],
) -> None:
    folder, names = os.fspath(cache_dir), sorted({*in_plan, *in_manifest})
    if not in_plan and {*names} <= {*CONVERTED}:
        version = plan.manifest["format_version"]
        told = (
            f"It was converted to version {manifest.get('format_version')} since: convert it back first "
            f"(python -m niels_gpt.eagle3 convert {folder} --format-version {version})"
        )
    else:
        told = (
            "What is there would not fit what this run writes. Run it with the original settings, or remove the "
            f"folder and start fresh. ({_values(names, (record, {'manifest': manifest}), plan)})"
        )
    raise CacheError(
        f"--resume was requested for {folder}, but the recorded plan does not match the current run configuration "
        f"(mismatched fields: {names}). {told}"
    )


def _values(names: list[str], there: tuple[dict[str, Any], ...], plan: Plan) -> str:
    """Tell the first few differences, the recorded value first: what one may have chosen before what follows from it.

    there: the plan and the manifest of the folder, in which the names are looked up, one after the other.
    """
    chosen = [name for name in names if not _rank(name)]
    found = []
    for name in chosen or sorted(names, key=_rank):
        ours = next(_values_of(name, (plan.record, {"manifest": plan.manifest})), None)
        theirs = next((value for value in _values_of(name, there) if value != ours), None)
        found.append(f"{name}: {theirs!r:.60}, now {ours!r:.60}")
    more = len(found) - _MAX_VALUES
    return "; ".join(found[:_MAX_VALUES]) + (f"; and {more} more" if more > 0 else "")


def _rank(name: str) -> int:
    """Return 0 for what one chooses, 1 for what stands for a file or a folder, 2 for what follows from both."""
    if name.startswith(("dropped.", "altered.", "samples.", "batches.sha256", "manifest.selected_token_ids")):
        return 2
    if name == "manifest.num_samples":
        return 2
    return int(name.endswith(("sha256", "fingerprint")))


def _values_of(name: str, records: tuple[dict[str, Any], ...]) -> Iterator[Any]:
    """Yield the values that a dotted name has in some records."""
    for record in records:
        value: Any = record
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            yield value


# --- what is not to be written into -----------------------------------------------------------------------------------


def refuse_existing(cache_dir: PathLike) -> None:
    """Raise CacheError where a folder holds anything that a fresh run would write into or replace.

    A cache, or a part of one, is for a run with `resume`. What a run leaves that was killed before it had a plan, its
    lock and temporary files, is nothing.
    """
    what = "shards" if existing_shard_indices(cache_dir) else "a plan" if _has_plan(cache_dir) else "a manifest"
    if what != "a manifest" or os.path.lexists(manifest_path(cache_dir)):
        raise CacheError(f"{os.fspath(cache_dir)} already has {what}; pass --resume to continue or use a fresh dir.")
    _refuse_foreign(cache_dir)


def _has_plan(cache_dir: PathLike) -> bool:
    return os.path.lexists(os.path.join(cache_dir, SIDECAR, PLAN_NAME))


def _refuse_foreign(cache_dir: PathLike) -> None:
    """Raise CacheError where a folder without a plan holds anything but what a killed run leaves."""
    folder = Path(cache_dir)
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise CacheError(f"{folder}: is no folder, expected one for the cache. Name a fresh folder")
    found = [path.name for path in folder.iterdir() if path.name != SIDECAR and not _LEFTOVER.fullmatch(path.name)]
    sidecar = folder / SIDECAR
    if sidecar.is_dir() and not sidecar.is_symlink():
        names = [path.name for path in sidecar.iterdir() if path.name != LOCK_NAME]
        found += [f"{SIDECAR}/{name}" for name in names if not _LEFTOVER.fullmatch(name)]
    elif os.path.lexists(sidecar):
        found.append(SIDECAR)
    if found:
        files = f"{len(found)} files" if len(found) > 1 else "a file"
        raise CacheError(
            f"{folder} holds {files} that no EAGLE-3 cache put there (such as {shortened(min(found))[1:-1]}). "
            "Name a fresh folder"
        )


def _refuse_foreign_meta(cache_dir: PathLike) -> None:
    """Raise CacheError for a meta.json that is another cache's, or no file; one that is damaged is written again."""
    path = Path(cache_dir, META_NAME)
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_file():
        raise CacheError(f"{path}: not a regular file, expected the meta.json of this cache. Move it away")
    try:
        kind = parse_object(read_meta_bytes(cache_dir)).get("kind")
    except ValueError:
        return
    if kind != "eagle3":
        raise CacheError(f"{path}: kind {shortened(kind)}, expected 'eagle3': another cache's. Move it away")


# --- what is finished -------------------------------------------------------------------------------------------------


def is_finished(cache_dir: PathLike, plan: Plan, shard: int) -> bool:
    """Whether a shard stands in a folder as its receipt says, and the receipt is of this plan."""
    try:
        receipt = read_receipt(cache_dir, shard)
        raw = read_file(receipt_path(cache_dir, shard))
        size = os.lstat(shard_path(cache_dir, shard)).st_size
    except FileNotFoundError:
        return False
    except CacheError as error:
        logger.warning("%s; the shard is made again", error)
        return False
    if receipt is None or raw != canonical_json(receipt) or receipt["facts"].get("plan") != plan.sha256:
        return False
    expected = plan.layout.shard_bytes(plan.rows_of(shard))
    return bool(receipt["samples"] == plan.rows_of(shard) and receipt["bytes"] == expected == size)


def finished_meta(cache_dir: PathLike, plan: Plan | None = None) -> dict[str, Any] | None:
    """Return a meta.json that is whole; None where there is none.

    plan: by which the cache must have been made, with all the files there that meta.json names, in their sizes.
    """
    folder = Path(cache_dir)
    try:
        raw = read_meta_bytes(folder)
        meta = parse_object(raw)
        if raw != meta_bytes(meta) or meta["kind"] != "eagle3":
            return None
        if plan is None:
            return meta
        sizes = {record["name"]: record["bytes"] for record in meta["files"]}
        whole = all((folder / name).lstat().st_size == size for name, size in sizes.items())
        return meta if whole and meta["plan_sha256"] == plan.sha256 else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def leftovers(cache_dir: PathLike) -> list[Path]:
    """Return the temporary files in a folder: nobody writes them any more where nobody holds the lock."""
    folders = [folder for folder in (Path(cache_dir), Path(cache_dir, SIDECAR)) if folder.is_dir()]
    found = (path for folder in folders for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))
    return sorted(path for path in found if path.is_file() and not path.is_symlink())
