"""Outcomes, plans and what was found in caches, as plain text."""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from niels_gpt.fileio import CacheError, walked
from niels_gpt.inspection.contents import Damage
from niels_gpt.inspection.diff import PARTS, is_equal
from niels_gpt.inspection.source_ids import printable
from niels_gpt.inspection.verify import CHECKS, Limits, verify
from niels_gpt.recipes.plan import Plan
from niels_gpt.recipes.produce import TOKENIZER_KEY, Outcome
from niels_gpt.recipes.snapshot import ORDER_SETTINGS
from niels_gpt.settings import Settings


def outcomes_table(outcomes: Sequence[Outcome], failures: Mapping[str, Exception]) -> str:
    """Return a line for each cache: what was done, its size, its speed; failures stand at the end."""
    rows: list[tuple[str, ...]] = [("cache", "state", "train", "val", "seconds", "tokens/s", "peak memory", "on disk")]
    for outcome in outcomes:
        totals = outcome.meta.get("totals") or {}
        speed = "-" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:,.0f}"
        peak = "-" if outcome.peak_bytes is None else size(outcome.peak_bytes)
        counts = [_count(totals, split) for split in ("train", "val")]
        if outcome.key == TOKENIZER_KEY:
            counts = [f"{outcome.meta['vocab_size']:,} ids", "-"]
        elif outcome.meta.get("kind") == "eagle3":  # of one piece
            counts = [f"{totals['samples']:,} samples, {totals['tokens']:,} tokens", "-"]
        seconds = f"{outcome.seconds:.2f}".replace("nan", "-")
        rows.append((outcome.key, _state(outcome), *counts, seconds, speed, peak, size(outcome.disk_bytes)))
    rows += [(key, "FAILED", *["-"] * 6) for key in failures]
    return table(rows)


def plan_table(plans: Sequence[Plan], cache_dir: str) -> str:
    """Return a line for each cache: what a run would do; and the disk that is free."""
    rows = [(item.key, item.action, item.source, size(item.disk_bytes)) for item in plans]
    lines = table([("what", "would be", "from", "disk at most"), *rows])
    return f"{lines}\ndisk free at {cache_dir}: {size(_free_bytes(Path(cache_dir)))}"


def snapshot_lines(
    settings: Settings, source: str, dest: Path, tokens: int | None, folder: Path, manifest: Mapping[str, Any]
) -> str:
    """Return what a snapshot holds, and the command that builds from it: its settings are those of the snapshot."""
    root = f"./{dest}" if str(dest) in ("hub", "sample") else str(dest)
    given: dict[str, Any] = {"source_root": root}
    for field in fields(settings):
        if field.name in ORDER_SETTINGS and getattr(settings, field.name) != field.default:
            given[field.name] = getattr(settings, field.name)
    names = {split: f"{source}_{split}_tokens" for split in ("train", "val")}
    if tokens is not None:
        wanted = {split: getattr(settings, name) for split, name in names.items()}
        if tokens < sum(wanted.values()):  # as much as it is for, in the same proportion
            given[names["val"]] = tokens * wanted["val"] // sum(wanted.values())
            given[names["train"]] = tokens - given[names["val"]]
    flags = " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given.items())
    files = manifest["files"]
    part = "all of the dataset" if manifest["ended"] else "the beginning of the stream"
    return (
        f"{folder}: {sum(file['rows'] for file in files):,} rows in {len(files)} files, "
        f"{size(sum(file['bytes'] for file in files))}, revision {manifest['revision']}, {part}\n"
        f"build from it: python -m niels_gpt.cache.cli build {source} {flags}"
    )


def checked(outcome: Outcome, settings: Settings) -> list[str]:
    """Make the checks of Dagster's assets; returns the warnings. Raises: CacheError for what makes a cache bad."""
    limits = Limits(deep=settings.deep_checks, max_dropped_share=settings.max_dropped_share)
    problems = verify(outcome.path, limits)
    found: dict[bool, list[str]] = {True: [], False: []}
    for check in CHECKS[outcome.meta["kind"]]:
        found[check.blocking] += problems[check.name]
    if found[True]:
        raise CacheError("; ".join(found[True]))
    return found[False]


def damage_lines(cache: Path, damages: Sequence[Damage]) -> str:
    """Return a line for a cache, and one for each of its damages."""
    lines = [f"{printable(str(cache))}: {_number(len(damages), 'damage') if damages else 'ok'}"]
    lines += [
        f"  {printable(found.file)}, bytes {found.offset:,} to {found.end:,}: {printable(found.problem)}"
        for found in damages
    ]
    return "\n".join(lines)


def difference_lines(found: Mapping[str, Any]) -> str:
    """Return what `inspection.diff.diff` found, for people."""
    if is_equal(dict(found)):
        return "equal" + ("" if found["compared"] else f"; documents were not compared: {found['why_not_tokens']}")
    lines = []
    if "content_sha256" in found:
        said = {side: printable(str(value))[:12] for side, value in found["content_sha256"].items()}
        lines.append(f"content_sha256: A {said['a']}, B {said['b']}")
    for key, values in found["settings"].items():
        shown = [_shown(values[side]) if side in values else "absent" for side in ("a", "b")]
        lines.append(f"{printable(key)}: A {shown[0]}, B {shown[1]}")
    if not found["compared"]:
        return "\n".join([*lines, f"documents were not compared: {found['why_not_tokens']}"])
    counts = [", ".join(f"{number:,} {split}" for split, number in found["documents"][side].items()) for side in "ab"]
    why = f", for {found['why_not_tokens']}" if found["why_not_tokens"] else ""
    lines.append(f"documents, compared by {found['compared']}{why}: A {counts[0]}; B {counts[1]}")
    for part in PARTS:
        count, first = found[part]["count"], found[part]["first"]
        if not count:
            continue
        lines.append(f"{_PARTS[part]}: {_number(count, 'document')}")
        lines += [f"  {_document(document)}" for document in first]
        lines += [f"  and {count - len(first):,} more"] * (len(first) < count)
    return "\n".join(lines)


_PARTS = {
    "only_a": "only in A",
    "only_b": "only in B",
    "moved": "moved to the other split",
    "reordered": "at another place among those that are in both",
    "renamed": "of another source id",
}


def _document(document: Mapping[str, Any]) -> str:
    parts = [f"{document['split']} {document['document']}"]
    if document["source_id"] is not None:
        parts.append(f"source id {printable(document['source_id'])}")
    if document["words"] is not None:
        parts.append(repr(document["words"]))
    if "in_b" in document:
        in_b = document["in_b"]
        parts.append(f"in B {in_b['split']} {in_b['document']}")
        if in_b["source_id"] not in (None, document["source_id"]):
            parts.append(f"source id {printable(in_b['source_id'])}")
    return ", ".join(parts)


def _shown(value: Any, width: int = 80) -> str:
    text = printable(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= width else text[: width - 1] + "…"


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as aligned columns, two spaces apart; control characters in them are escaped."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def size(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"


def disk_bytes(path: Path) -> int:
    """Return the bytes of a file or link, or of all files below a folder; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        return sum(about.st_size for _, _, about in walked(path) if not stat.S_ISDIR(about.st_mode))
    return path.lstat().st_size


def _state(outcome: Outcome) -> str:
    built = {"partial": "partial", False: "not built"}.get(outcome.meta.get("built"), "built")
    return f"{built}, up to date" if outcome.reused else built


def _count(totals: Mapping[str, int], split: str) -> str:
    if f"{split}_examples" in totals:
        return f"{totals[f'{split}_examples']:,} examples, {totals[f'{split}_tokens']:,} tokens"
    return f"{totals.get(f'{split}_tokens', 0):,} tokens"


def _free_bytes(folder: Path) -> int:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    stat = os.statvfs(existing)
    return stat.f_bavail * stat.f_frsize
