"""Decides what a rerun may continue: which plan a folder holds, which shards are finished, which folders are refused.

A run may continue a folder if its plan.json, or the plan that all its receipts name, equals the run's plan. As much as
possible is checked before the input is tokenized (`refuse_other_plan`); nothing is changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from niels_gpt.display.numbers import many
from niels_gpt.eagle3.format.layout import (
    SIDECAR,
    PathLike,
    is_lock,
    read_file,
    read_meta_bytes,
    refuse_links,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import existing_shard_indices, is_native, manifest_path, read_manifest
from niels_gpt.eagle3.format.plan import (
    CONVERTED,
    FREE,
    PLAN_NAME,
    TargetPlan,
    differing_fields,
    open_plan,
    read_record,
    shards_of_part,
)
from niels_gpt.eagle3.format.shard_writer import read_receipt, receipt_path
from niels_gpt.eagle3.partitions import Part, has_parts, known_parts, part_text, value_of
from niels_gpt.engine.units import Unit
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, canonical_json
from niels_gpt.storage.locks.leases import LEASES_DIR, MARKER
from niels_gpt.storage.meta_json import meta_bytes, parse_object, read_regular, shortened
from niels_gpt.storage.versions import PROBE
from niels_gpt.tokenizers.files import CONFIG_NAME, TEMPLATE_NAME

logger = logging.getLogger(__name__)

_LEFTOVER = re.compile(
    r"\.(shard-([0-9]{6})\.(safetensors|json)|(manifest|meta|plan|embeddings|weights|watch)\.json"
    r"|target_(embeddings|weights)\.safetensors|samples\.safetensors|ids\.txt|batches\.jsonl)\.[0-9a-f]{8}\.tmp"
)
_OF_LOCKS = re.compile(rf"{re.escape(MARKER)}|{re.escape(LEASES_DIR)}|{PROBE.pattern}")
"""Files of locking: how a folder is locked, and another machine's probes."""
_FRESH = "Name a fresh folder, or remove this one"
_ORIGINAL = "Run it with the original settings"
_RESUMED = "--resume was requested, but "
_MISMATCH = f"{_RESUMED}the recorded plan does not match the current run configuration"
_MOST_VALUES = 6
_MOST_NAMED = 12  # partitions
_TEMPLATE = "tokenizer.template_sha256"
_ELSEWHERE = " of --chat-template, or of another target"
_FILES = {
    _TEMPLATE: "the chat template ({field})",
    "tokenizer.sha256": "the tokenizer of {target} ({field})",
    "target.config_sha256": "config.json of {target} ({field})",
    "target.weights_sha256": "the weights of {target} ({field})",
    "source.fingerprint": "the input {source} ({field})",
    "manifest.selected_token_ids_sha256": "the draft vocabulary, of --draft-vocab-from or counted ({field})",
}
"""Fields that are checksums -> their files, for messages."""
_FOLLOWS = ("dropped.", "altered.", "samples.", "batches.sha256", "manifest.selected_token_ids", "manifest.num_samples")
"""Fields that follow from the settings and the files."""


# --- may this run continue what the folder holds? ---------------------------------------------------------------------


def finished_shards(cache_dir: PathLike, plan: TargetPlan, *, resume: bool, part: Part | None = None) -> set[int]:
    """Return the finished shards of a plan in a folder, which may be absent; see `is_finished`.

    part: the partition to build; it continues the folder without `resume`. None: the whole cache.
    Raises: CacheError E704 for a folder that holds anything (without `resume`) or another cache's meta.json; CacheError
        E703 (for a partition E712) for another plan, naming the differing fields, or a cache without a usable plan;
        CacheError E205 for a file or sidecar that is a link, as nothing is written or removed through one.
    """
    refuse_links(cache_dir)
    if part is not None:
        with _refusing_a_part(part):
            return _finished_shards(cache_dir, plan)
    if not resume:
        refuse_existing(cache_dir)
        return set()
    return _finished_shards(cache_dir, plan)


def _finished_shards(cache_dir: PathLike, plan: TargetPlan) -> set[int]:
    shards = existing_shard_indices(cache_dir)
    if not _is_of_plan(cache_dir, plan, shards):
        try:
            refuse_foreign(cache_dir)
        except CacheError:
            if not os.path.lexists(os.path.join(cache_dir, SIDECAR, PLAN_NAME)):
                raise
            return _finished_shards(cache_dir, plan)  # another part has fixed the plan meanwhile
        return set()
    _refuse_foreign_meta(cache_dir)
    if extra := sorted(shard for shard in shards if shard >= plan.num_shards):
        raise CacheError(
            shard_path(cache_dir, extra[0]),
            f"the plan has {plan.num_shards} shards",
            remedy="Move it away",
            code="E704",
        )
    done = {shard for shard in shards if is_finished(cache_dir, plan, shard)}
    made_by = set() if done else _plans_named(cache_dir, shards)
    if made_by - {plan.sha256}:  # plan.json was changed, and this run took its settings from it
        _refuse_without_plan(cache_dir, plan, made_by, "its shards name another plan")
    return done


@contextmanager
def _refusing_a_part(part: Part) -> Iterator[None]:
    """Turn a refusal (E703) in the block into one that names the partition (E712)."""
    try:
        yield
    except CacheError as error:
        if error.code != "E703":
            raise
        raise CacheError(
            error.path,
            f"{part_text(part)} does not belong to this cache: {error.found.removeprefix(_RESUMED)}",
            remedy="Build every partition with the same options and versions, on the same kind of device. Options that "
            "a command leaves out come from the plan in the folder. For another plan, name another folder",
            code="E712",
        ) from error


def refuse_other_plan(
    folder: Path, manifest: Mapping[str, Any], known: Mapping[str, Any], part: Part | None = None
) -> None:
    """Raise CacheError, as `finished_shards` does, if no input could give this run the plan of a folder.

    manifest: of the run, without num_samples. known: the fields of its plan that are known before the input is read.
    A folder without a complete plan is left to `finished_shards`.
    """
    try:
        recorded = open_plan(folder)
    except (FileNotFoundError, CacheError):
        return
    sizes = {name: recorded.manifest[name] for name in ("num_samples", "num_shards") if name in recorded.manifest}
    now = replace(recorded, manifest=dict(manifest) | sizes, **known)
    if differing_fields(recorded.record, now.record) or differing_manifest(read_manifest(folder), now):
        finished_shards(folder, now, resume=True, part=part)


def refuse_other_manifest(folder: Path, plan: TargetPlan, part: Part) -> None:
    """Raise CacheError if the manifest of a folder differs from a partition's plan: another draft vocabulary or head.

    A run of the whole cache may change these; for a partition, others may be running.
    """
    with contextlib.suppress(FileNotFoundError):
        manifest = read_manifest(folder)
        if names := differing_fields(manifest, plan.manifest, "manifest."):
            with _refusing_a_part(part):
                _refuse_other(folder, plan, plan.record, manifest, [], names)


def refuse_other_draft(folder: Path, selected: list[int] | None, size: int, *, is_stated: bool) -> None:
    """Raise CacheError E703 if a run would change the draft vocabulary of a native cache.

    An unfinished cache accepts one that the user states: the first one may have had no position.

    selected: target ids of the run's draft tokens; None: `size` tokens, another number than the manifest's.
    is_stated: whether the user set the draft vocabulary.
    """
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return
    is_finished = os.path.lexists(folder / META_NAME)
    if not is_native(manifest) or manifest["selected_token_ids"] == selected or (is_stated and not is_finished):
        return
    recorded, names = manifest["draft_vocab_size"], ["manifest.selected_token_ids"]
    if recorded != size:
        names.insert(0, "manifest.draft_vocab_size")
    values = f": manifest.draft_vocab_size: {recorded}, now {size}" if recorded != size else ""
    choice = ["--draft-vocab-from", "FILE"] if recorded == size else ["--draft-vocab-size", str(size)]
    words = ["niels-gpt", "eagle3", "redraft", str(folder), "OUT", *choice]
    other = f"Or change the draft vocabulary without a run: {shlex.join(words)}"
    remedy = f"{_ORIGINAL}. {other if is_finished else 'Or state the other draft vocabulary: --draft-vocab-size N'}"
    raise CacheError(folder, f"{_MISMATCH} (mismatched fields: {names}){values}", remedy=remedy, code="E703")


def recorded_plan(folder: Path | None) -> dict[str, Any]:
    """Return the content of a folder's plan.json; {} if it is missing or damaged, which `finished_shards` reports."""
    with contextlib.suppress(CacheError):
        return {} if folder is None else read_record(folder) or {}
    return {}


def _is_of_plan(cache_dir: PathLike, plan: TargetPlan, shards: set[int]) -> bool:
    """Return whether a folder holds this plan or a cache made by it; False if it holds neither plan nor cache.

    Raises: CacheError for another plan, or a cache that is not known to be made by this one.
    """
    has_manifest = os.path.lexists(manifest_path(cache_dir))  # written after the plan, perhaps at this moment
    record, damage = _read_record(cache_dir)
    in_plan = [] if record is None else differing_fields(record, plan.record)
    if record is None or in_plan:
        made_by = _plans_named(cache_dir, shards)
        if made_by == {plan.sha256}:
            state = damage or ("does not match the shards" if in_plan else "is missing")
            logger.warning(
                "%s: %s; writing it again",
                os.path.join(cache_dir, SIDECAR, PLAN_NAME),
                state,
                extra={"code": "W701"},
            )
            in_plan = []
        elif record is None:
            if not (made_by or shards or has_manifest or damage):
                return False
            _refuse_without_plan(cache_dir, plan, made_by, damage)
    manifest = read_manifest(cache_dir) if has_manifest else plan.manifest
    in_manifest = differing_manifest(manifest, plan)
    if in_plan or in_manifest:
        _refuse_other(cache_dir, plan, record or {}, manifest, in_plan, in_manifest)
    return True


def differing_manifest(manifest: Mapping[str, Any], plan: TargetPlan) -> list[str]:
    """Return the fields in which a folder's manifest differs from a plan's, except any that decide no shard's bytes."""
    names = differing_fields(manifest, plan.manifest, "manifest.")
    if plan.is_native and manifest.get("format_version") == plan.manifest["format_version"]:
        names = [name for name in names if name.split(".")[1] not in FREE]
    return names


def _read_record(cache_dir: PathLike) -> tuple[dict[str, Any] | None, str]:
    """Return the content of plan.json and ""; or None and its damage, "" if the file is missing."""
    path = Path(cache_dir, SIDECAR, PLAN_NAME)
    try:
        return read_record(cache_dir), ""
    except CacheError as error:
        if not path.is_file() or path.is_symlink():
            raise  # no file of a producer, so it is not replaced
        return None, error.problem


def _plans_named(cache_dir: PathLike, shards: set[int]) -> set[str]:
    """Return the sha256 of every plan that receipts or meta.json name."""
    named = {(finished_meta(cache_dir) or {}).get("plan_sha256")}
    for shard in shards:
        with contextlib.suppress(CacheError):  # a damaged receipt: the shard is made again
            receipt = read_receipt(cache_dir, shard)
            named.add(receipt and receipt["facts"].get("plan"))
    return {str(sha256) for sha256 in named if sha256 is not None}


def _refuse_without_plan(cache_dir: PathLike, plan: TargetPlan, made_by: set[str], damage: str) -> None:
    """Raise CacheError for a cache without a usable plan.json whose shards are not known to be of this plan."""
    name, remedy = f"{SIDECAR}/{PLAN_NAME}", _FRESH
    if made_by:
        sums = ", ".join(sorted(each[:12] for each in made_by))
        problem = (
            f"its {name} {f'is damaged ({damage})' if damage else 'is missing'}, its shards belong to the plan "
            f"{sums}, and these settings give another plan, {plan.sha256[:12]}"
        )
        remedy = f"{_ORIGINAL}: this writes the file again. {_FRESH}"
    elif damage:
        problem = f"its {name} is damaged ({damage}), and nothing else names the plan of its shards"
    elif os.path.lexists(manifest_path(cache_dir)):
        problem = f"it has no {name}: another tool wrote it, so it cannot be continued"
    else:
        problem = "its manifest is missing, so the shards in it cannot be compared with this run"
    raise CacheError(cache_dir, f"{_RESUMED}{problem}", remedy=remedy, code="E703")


def _refuse_other(
    cache_dir: PathLike,
    plan: TargetPlan,
    record: dict[str, Any],
    manifest: dict[str, Any],
    in_plan: list[str],
    in_manifest: list[str],
) -> None:
    """Raise CacheError for a folder of another plan. record, manifest: its content. in_...: the differing fields."""
    names = sorted({*in_plan, *in_manifest}, key=lambda name: (name != CONVERTED[0], name))
    if CONVERTED[0] in in_plan and plan.is_native != is_native(record["manifest"]):
        names = names[:1]  # the other fields differ because the form does
    if not in_plan and {*names} <= {*CONVERTED}:
        back = f"niels-gpt eagle3 convert {shlex.quote(os.fspath(cache_dir))} --format"
        differences = f"it was converted to version {manifest.get('format_version')} later"
        remedy = f"Convert it back first: {back} {plan.manifest['format_version']}"
    else:
        chosen = [name for name in names if not name.startswith(_FOLLOWS)]
        files = [name for name in chosen if name.endswith(("sha256", "fingerprint"))]
        shown = [name for name in chosen if name not in files] or [*files, *(n for n in names if n not in chosen)]
        values = [_values(name, record, manifest, plan) for name in shown]
        more = f"; and {len(values) - _MOST_VALUES} more" if len(values) > _MOST_VALUES else ""
        differences = "; ".join(values[:_MOST_VALUES]) + more
        remedy = f"{_ORIGINAL}, or remove the folder and start from scratch"
    raise CacheError(
        cache_dir,
        f"{_MISMATCH} (mismatched fields: {names}): {differences}",
        remedy=remedy,
        code="E703",
    )


def _values(name: str, record: dict[str, Any], manifest: dict[str, Any], plan: TargetPlan) -> str:
    """Return a field's recorded value, from plan.json or manifest.json, and this run's value, as text."""
    now, recorded = (
        [value_of(of_plan, name), value_of({"manifest": of_manifest}, name)]
        for of_plan, of_manifest in ((plan.record, plan.manifest), (record, manifest))
    )
    ours = next((value for value in now if value is not None), None)
    theirs = next((value for value in recorded if value is not None and value != ours), None)
    before, after = (_shown(name, each) for each in (theirs, ours))
    target, source = (value_of(plan.record, each) for each in ("target.name", "source.input_data"))
    if name == _TEMPLATE:
        before, after = before + _template_file(target, theirs), after + (_template_file(target, ours) or _ELSEWHERE)
    name = _FILES.get(name, "{field}").format(field=name, target=target, source=source)
    return f"{name}: {before}, now {after}"


def _shown(name: str, value: Any) -> str:
    """Return a plan value for a message: twelve digits of a sha256, at most 80 characters."""
    text = str(value)[:12] if "sha256" in name and value else shortened(value)
    return text if len(text) < 80 else f"{text[:76]} ..."


def _template_file(target: Any, sha256: Any) -> str:
    """Return " of FILE" for the file in a target's folder that holds the chat template of this sha256; "" for none."""
    for name in (TEMPLATE_NAME, CONFIG_NAME):
        with contextlib.suppress(OSError, ValueError):
            raw = read_regular(path := Path(str(target), name))
            text = raw.decode() if name == TEMPLATE_NAME else parse_object(raw).get("chat_template")
            if isinstance(text, str) and hashlib.sha256(text.encode()).hexdigest() == sha256:
                return f" of {path}"
    return ""


# --- what a run must not write into -----------------------------------------------------------------------------------


def refuse_existing(cache_dir: PathLike) -> None:
    """Raise CacheError E704 if a folder holds anything that a run from scratch would write into or replace.

    Locks and temporary files of a run that was killed before it had a plan are ignored.
    """
    plan = os.path.join(cache_dir, SIDECAR, PLAN_NAME)
    what = "shards" if existing_shard_indices(cache_dir) else "a plan" if os.path.lexists(plan) else "a manifest"
    if what != "a manifest" or os.path.lexists(manifest_path(cache_dir)):
        raise CacheError(
            cache_dir, f"already has {what}", remedy="Pass --resume to continue it, or name a fresh folder", code="E704"
        )
    refuse_foreign(cache_dir)


def refuse_foreign(cache_dir: PathLike) -> None:
    """Raise CacheError if a folder without a plan holds anything but the leftovers of a killed run."""
    folder, sidecar = Path(cache_dir), Path(cache_dir, SIDECAR)
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise CacheError(folder, "not a folder", "a folder for the cache", "Name a fresh folder", code="E704")
    paths = [path for path in folder.iterdir() if path != sidecar and not _OF_LOCKS.fullmatch(path.name)]
    if sidecar.is_dir() and not sidecar.is_symlink():
        paths += [path for path in sidecar.iterdir() if not is_lock(path.name)]
    elif os.path.lexists(sidecar):
        paths.append(sidecar)
    foreign = [str(path.relative_to(folder)) for path in paths if not _LEFTOVER.fullmatch(path.name)]
    if foreign:
        files = f"{len(foreign)} files" if len(foreign) > 1 else "a file"
        example = shortened(min(foreign))[1:-1]
        raise CacheError(
            folder,
            f"holds {files} that belong to no EAGLE-3 cache (such as {example})",
            remedy="Name a fresh folder",
            code="E704",
        )


def _refuse_foreign_meta(cache_dir: PathLike) -> None:
    """Raise CacheError for another cache's meta.json or a non-file; a damaged one is written again."""
    path = Path(cache_dir, META_NAME)
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_file():
        raise CacheError(path, "not a regular file", "the meta.json of this cache", "Move it away", code="E704")
    try:
        kind = parse_object(read_meta_bytes(cache_dir)).get("kind")
    except ValueError:
        return
    if kind != "eagle3":
        raise CacheError(
            path, f"kind {shortened(kind)}", "'eagle3'", "It belongs to another cache: move it away", code="E704"
        )


# --- what is finished -------------------------------------------------------------------------------------------------


def look_at(cache_dir: PathLike, plan: TargetPlan, shard: int) -> Unit:
    """Return a shard's state by its receipt and its size: finished, missing, stale (of another plan) or damaged.

    The unit's items are samples.
    """
    try:
        receipt = read_receipt(cache_dir, shard)
        raw = read_file(receipt_path(cache_dir, shard))
        size = os.lstat(shard_path(cache_dir, shard)).st_size
    except FileNotFoundError:
        return Unit(shard, "missing", "no receipt")
    except CacheError as error:
        return Unit(shard, "damaged", f"{receipt_path('', shard)} is {error.problem}")
    if receipt is None:
        return Unit(shard, "missing", "no receipt")
    if receipt["facts"].get("plan") != plan.sha256:
        return Unit(shard, "stale", "its receipt belongs to another plan")
    sizes = (plan.rows_of(shard), plan.bytes_of(shard), plan.bytes_of(shard))
    if raw != canonical_json(receipt) or (receipt["samples"], receipt["bytes"], size) != sizes:
        return Unit(shard, "damaged", "its size or its receipt differs from the plan")
    tokens = receipt["facts"].get("tokens")
    return Unit(shard, "finished", "", "", receipt["samples"], tokens if type(tokens) is int else 0, None, receipt)


def is_finished(cache_dir: PathLike, plan: TargetPlan, shard: int) -> bool:
    """Return whether a shard is finished by `look_at`; log a warning about a damaged one."""
    unit = look_at(cache_dir, plan, shard)
    if unit.state == "damaged":
        logger.warning(
            "%s: %s; building the shard again", shard_path(cache_dir, shard), unit.found, extra={"code": "W702"}
        )
    return unit.state == "finished"


def finished_meta(cache_dir: PathLike, plan: TargetPlan | None = None) -> dict[str, Any] | None:
    """Return an undamaged meta.json; None if there is none.

    plan: required plan; every file that meta.json lists must then exist in its recorded size.
    """
    folder = Path(cache_dir)
    try:
        raw = read_meta_bytes(folder)
        meta = parse_object(raw)
        if raw != meta_bytes(meta) or meta["kind"] != "eagle3":
            return None
        if plan is None:
            return meta
        whole = all((folder / record["name"]).lstat().st_size == record["bytes"] for record in meta["files"])
        return meta if whole and meta["plan_sha256"] == plan.sha256 else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def leftovers(cache_dir: PathLike, shards: Collection[int] | None = None) -> list[Path]:
    """Return a folder's temporary files. While its lock is free, no process writes them.

    shards: only the files of these shards, for a partition whose lock is held, as others may run; None: all files.
    """
    folders = [folder for folder in (Path(cache_dir), Path(cache_dir, SIDECAR)) if folder.is_dir()]
    found = ((path, _LEFTOVER.fullmatch(path.name)) for folder in folders for path in folder.iterdir())
    paths = (path for path, match in found if match and (shards is None or (match[2] and int(match[2]) in shards)))
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


# --- a folder that is not sealed --------------------------------------------------------------------------------------


def finished_of(folder: Path, plan: TargetPlan) -> set[int]:
    """Return the plan's shards that are there with their receipts, by size."""
    return {shard for shard in range(plan.num_shards) if is_finished(folder, plan, shard)}


def progress_text(folder: Path, plan: TargetPlan, done: Collection[int]) -> str:
    """Return how many shards are there, in all and in each unfinished partition; "" if no partition was started."""
    found, shown = {*done}, []
    parts = known_parts(folder)
    if not parts:
        return ""
    for part in parts:
        shards = shards_of_part(plan.num_shards, part)
        if missing := len({*shards} - found):
            shown.append(f"{part_text(part)}, {len(shards) - missing:,} of {many(len(shards), 'shard')}")
    more = f" and {len(shown) - _MOST_NAMED:,} more partitions" if len(shown) > _MOST_NAMED else ""
    each = f"; unfinished: {'; '.join(shown[:_MOST_NAMED])}{more}" if shown else ""
    return f"{len(found):,} of {plan.num_shards:,} shards are there, {many(len(parts), 'partition')} started{each}"


def refuse_unsealed(path: Path) -> None:
    """Raise CacheError E712 for an unsealed folder with partitions; name them and the command that seals it."""
    folder = path.resolve()
    if not has_parts(folder):
        return
    try:
        plan = open_plan(folder)
        state = progress_text(folder, plan, finished_of(folder, plan))
    except (FileNotFoundError, CacheError) as error:
        state = f"its plan cannot be read: {error}"
    remedy = f"Once all partitions are made: niels-gpt seal {path}"
    raise CacheError(path, f"is not sealed: {state}", remedy=remedy, code="E712")
