"""Outcomes, plans, damages and differences of caches as plain text."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from string import hexdigits
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from niels_gpt.display.numbers import count_text, many, number_of, size_text
from niels_gpt.display.tables import cut, folded, table
from niels_gpt.engine.losses import loss_table
from niels_gpt.kinds.kind import Cache, Limits, kind_named
from niels_gpt.kinds.verify import in_short, refusal, verify
from niels_gpt.signals import below
from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.meta_json import printable, shortened
from niels_gpt.storage.remedies import PROGRAM
from niels_gpt.storage.versions import committed_version, note_check

if TYPE_CHECKING:
    from niels_gpt.kinds.files import Damage
    from niels_gpt.recipes.plan import Plan
    from niels_gpt.recipes.records import Outcome
    from niels_gpt.recipes.units import MadeUnit
    from niels_gpt.settings import Settings

_MOST_OF_SETTINGS = 20_000  # characters: 200 lines
_ACTION = re.compile(r"(.*?)(?:: (.*)| \((.*)\))?", re.DOTALL)  # "cannot be built: no notes"; "build (one is there)"
_COUNTER = re.compile(r"(?P<name>\w+) [\d,]*\d")


def outcomes_table(
    outcomes: Sequence[Outcome],
    failures: Mapping[str, Exception],
    refused: Mapping[str, str] = MappingProxyType({}),
    *,
    timed: bool = True,
) -> str:
    """Return a table with a line for each cache, then the losses and refusals.

    refused: why readers refuse a cache, by key. timed: show the seconds of each build, unless all are up to date.
    """
    found: list[dict[str, str]] = []
    reasons = dict(refused)
    for outcome in outcomes:
        cells: dict[str, str] = {}
        try:
            cells = _cells(outcome)
        except _MALFORMED as error:  # a malformed meta.json spoils only its own line
            reasons.setdefault(outcome.key, _malformed(error))
        state = "refused" if outcome.key in reasons else _state(outcome)
        found.append({"cache": outcome.key, "state": state, **cells})
    found += [{"cache": key, "state": "refused" if key in reasons else "FAILED"} for key in failures]
    is_timed = timed and not all(outcome.reused for outcome in outcomes)  # else it is the time of a look
    columns = ["cache", "state", "holds", "train tokens", "val tokens", "on disk", *["seconds"] * is_timed]
    if any("tokens" in cells for cells in found):  # caches without splits
        columns.insert(3, "tokens")
    rows = [tuple(columns), *(tuple(cells.get(name, "-") for name in columns) for cells in found)]
    refusals = (f"{key}: refused: {reason}" for key, reason in reasons.items())
    lines = [table(rows), *map(notices, outcomes), *map(_noted, refusals)]
    return "\n".join(filter(None, lines))


def notices(outcome: Outcome) -> str:
    """Return a line on the losses of a cache, folded; "" if there are none."""
    quiet: set[str] = set()
    with suppress(*_MALFORMED):  # malformed; the table says so
        quiet = below(outcome.meta)
    found = _template_table(outcome.meta) | loss_table(outcome.meta, quiet)
    asked = outcome.meta.get("requested_vocab_size")
    if isinstance(asked, int) and asked > outcome.meta["vocab_size"] and outcome.meta.get("trained_on") != "sample":
        found["vocabulary"] = f"{outcome.meta['vocab_size']:,} ids of {asked:,} asked for: more text would give more"
    source = outcome.meta.get("source")
    if isinstance(source, Mapping) and source.get("kind") == "sample":  # odd texts on purpose; `stats` prints them
        found.pop("noticed", None)
    if outcome.meta.get("lossless") is not False:
        found.pop("round trip", None)
    if not outcome.meta.get("unknown_ids"):
        found.pop("unknown ids", None)
    if "noticed" in found:
        found["noticed"] = _COUNTER.sub(lambda each: each[0] + _meaning(each["name"], outcome.meta), found["noticed"])
    said = "; ".join(f"{name}: {value}" for name, value in found.items())
    return _noted(f"{outcome.key}: {said}") if said else ""


def _meaning(counter: str, meta: Mapping[str, Any]) -> str:
    """Return what a counter means, in parentheses, if its name does not tell what to do; else ""."""
    if counter == "merged_at_reply_edge":
        return " (chats with a token that carries loss and reaches over the edge of a reply)"
    if counter != "turns_without_loss":
        return ""
    template = meta.get("chat_template")
    if isinstance(template, Mapping) and template.get("loss_on") == "assistant":
        return " (assistant turns that call a tool, or of weight 0; for tool calls: --loss-on assistant,tool_calls)"
    return " (assistant turns that --loss-on leaves out, or of weight 0)"


def _noted(text: str) -> str:
    return "\n".join(folded(printable(cut(text)), indent="  "))


def outcome_line(outcome: Outcome) -> str:
    """Return one line about a build: "pretrain/notes: 1,204 documents, 5.81M tokens, in 3.2 s"."""
    meta = outcome.meta
    what = "not built, a stub" if meta.get("built") is False else held_text(meta)
    if isinstance(parts := meta.get("partitions"), Mapping):
        what += f", {number_of(parts['total'], 'partition')}"
    return f"{outcome.key}: {what}, {'up to date' if outcome.reused else f'in {outcome.seconds:.1f} s'}"


def held_text(meta: Mapping[str, Any]) -> str:
    """Return the contents of a cache: "1,204 documents, 5.81M tokens"."""
    kind = kind_named(meta["kind"])
    if kind is None:
        return f"kind {shortened(meta['kind'])}, which is not installed"
    held = kind.held(meta)
    return ", ".join([*(number_of(held.total(thing), thing) for thing in held.counts), *filter(None, [held.note])])


def partition_line(made: MadeUnit) -> str:
    """Return one line about a partition: "pretrain/notes: partition 3 of 8: 1,204 documents, in 3.2 s"."""
    number, meta = made.partition.number, made.meta
    if "partition" not in meta:
        return f"{made.key}: all {number_of(made.partition.total, 'partition')} are sealed, up to date"
    what = held_text(meta)
    when = "finished before" if made.reused else f"in {made.seconds:.1f} s"
    return f"{made.key}: partition {number} of {made.partition.total:,}: {what}, {when}"


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError)


def _cells(outcome: Outcome) -> dict[str, str]:
    """Return a cache's cells of the table by column: contents, tokens of each split, size on disk, seconds."""
    kind = kind_named(outcome.meta.get("kind"))
    if kind is None:
        raise ValueError(f"kind is {shortened(outcome.meta.get('kind'))}")
    held = kind.held(outcome.meta)
    things = [thing for thing in held.counts if thing != "token"]
    tokens = {f"{split} tokens".lstrip(): count_text(count) for split, count in held.counts.get("token", {}).items()}
    return {
        "holds": number_of(held.total(things[-1]), things[-1]) if things else "-",
        **tokens,
        "on disk": size_text(outcome.disk_bytes),
        "seconds": f"{outcome.seconds:.2f}".replace("nan", "-"),
    }


def listed(
    root: Path | str,
    outcomes: Sequence[Outcome],
    damaged: Mapping[str, Exception],
    reasons: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each cache below a folder, ready for JSON. reasons: why readers refuse one; None: let them open.

    key; state: built, up to date, partial, not built, or refused; refused: why readers refuse the cache, or null. With
    a readable meta.json also totals and disk_bytes, and seconds, tokens_per_second and peak_bytes (memory) of the
    build; null if unknown.
    """
    rows: list[dict[str, Any]] = []
    for outcome in outcomes:
        found: dict[str, Any] = {}
        reason = refusal(outcome.path) if reasons is None else reasons.get(outcome.key)
        try:
            _cells(outcome)
            seconds = None if math.isnan(outcome.seconds) else outcome.seconds
            found = {"totals": outcome.meta.get("totals"), "disk_bytes": outcome.disk_bytes, "seconds": seconds}
            found |= {"tokens_per_second": outcome.tokens_per_second, "peak_bytes": outcome.peak_bytes}
        except _MALFORMED as error:
            reason = reason or _malformed(error)
        state = _state(outcome) if reason is None else "refused"
        rows.append({"key": outcome.key, "state": state, "refused": reason, **found})
    for key, failure in damaged.items():
        rows.append({"key": key, "state": "refused", "refused": in_short(failure, f"{root}/{key}")})
    return rows


def _malformed(error: Exception) -> str:
    return f"meta.json is not as docs/formats.md describes it ({shortened(str(error))})"


def _template_table(meta: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat template of a cache and the dropped chats by reason, as rows of a table.

    Returns {} for niels-gpt's own template. Values that do not follow docs/formats.md are left out.
    """
    template, dropped = meta.get("chat_template"), meta.get("dropped")
    if not isinstance(template, Mapping):
        return {}
    rows = {"chat template": f"{str(template.get('sha256'))[:12]}, loss on {template.get('loss_on')}"}
    found = dropped.items() if isinstance(dropped, Mapping) else ()
    if counts := [f"{reason} {number:,}" for reason, number in found if type(number) is int and number]:
        rows["dropped"] = ", ".join(counts)
    return rows


def plan_table(plans: Sequence[Plan], cache_dir: str) -> str:
    """Return a table of the planned builds, then notes, the reasons against some, and the free disk space."""
    from niels_gpt.recipes.disk import free_bytes

    rows, reasons = [("what", "would be", "at least", "from")], dict[str, list[str]]()
    for item in plans:
        action, why, detail = _ACTION.fullmatch(item.action).groups()  # type: ignore[union-attr]  # it matches any text
        rows.append((item.key, action, size_text(item.disk_bytes), item.source))
        for note in filter(
            None, (why and f" {action}: {why}", detail and f": {detail}", item.note and f": {item.note}")
        ):
            reasons.setdefault(note, []).append(item.key)
    lines = "\n".join([table(rows), *(_noted(f"{', '.join(keys)}{why}") for why, keys in reasons.items())])
    return f"{lines}\ndisk free at {cache_dir}: {size_text(free_bytes(Path(cache_dir)))}"


def snapshot_lines(
    settings: Settings, source: str, dest: Path, tokens: int | None, folder: Path, manifest: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the contents of a snapshot, and the command that builds from it with the same settings."""
    from niels_gpt.recipes.snapshot import ORDER_SETTINGS

    root = f"./{dest}" if str(dest) in ("hub", "sample") else str(dest)
    given: dict[str, Any] = {"source_root": root}
    for field in fields(settings):
        if field.name in ORDER_SETTINGS and getattr(settings, field.name) != field.default:
            given[field.name] = getattr(settings, field.name)
    names = {split: f"{source}_{split}_tokens" for split in ("train", "val")}
    if tokens is not None:
        wanted = {split: getattr(settings, name) for split, name in names.items()}
        if tokens < sum(wanted.values()):  # the snapshot is smaller: keep the proportion
            given[names["val"]] = tokens * wanted["val"] // sum(wanted.values())
            given[names["train"]] = tokens - given[names["val"]]
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    files = manifest["files"]
    part = "all of the dataset" if manifest["ended"] else "the beginning of the stream"
    return (
        f"{folder}: {sum(file['rows'] for file in files):,} rows in {len(files)} files, "
        f"{size_text(sum(file['bytes'] for file in files))}, revision {manifest['revision']}, {part}",
        shlex.join([PROGRAM, "build", source, *flags]),
    )


def checked(outcome: Outcome, settings: Settings) -> list[tuple[str, str]]:
    """Run the checks at the end of a build, and return code and text of each warning.

    Raises: CacheError E211 for problems that make the cache unusable.
    """
    limits = Limits(deep=settings.deep_checks, max_dropped_share=settings.max_dropped_share)
    kind = Cache.open(outcome.path).kind
    said = () if outcome.reused else ("budget_reached", "signals")  # the build itself has warned of these
    names = [name for name in kind.checks_of_build(reused=outcome.reused, deep=limits.deep) if name not in said]
    verdicts = verify(outcome.path, limits, names=names)
    bad, warnings = list[str](), list[tuple[str, str]]()
    version = committed_version(outcome.path)
    for check in kind.checks:
        problems = verdicts[check.name].problems if check.name in verdicts else []
        if check.name in verdicts and not problems and not outcome.reused:
            with suppress(OSError, CacheError):  # such as another build that has started
                note_check(outcome.path, version, check.name, has_failed=False)
        if check.blocking:
            bad += problems
        else:
            warnings += [("W314" if check.name == "signals" else "W201", problem) for problem in problems]
    if bad:
        again = "" if any(check.rule for check in kind.checks) else REBUILD  # problems of rules name their own command
        text = "\n".join(["it fails its checks", *dict.fromkeys(bad)])
        raise CacheError(outcome.path, text, remedy=again, code="E211")
    return warnings


def damage_lines(cache: Path | str, damages: Sequence[Damage]) -> str:
    """Return a line for a cache, and one for each of its damages."""
    lines = [f"{printable(str(cache))}: {many(len(damages), 'damage') if damages else 'ok'}"]
    for found in damages:
        place = f"{printable(found.file)}, bytes {found.offset:,} to {found.end:,}: " if found.file else ""
        lines.append(f"  {place}{printable(cut(found.problem))}")
    return "\n".join(lines)


def difference_lines(found: Mapping[str, Any]) -> str:
    """Return the result of `kinds.diff.diff` as text."""
    from niels_gpt.kinds.diff import PARTS, is_equal

    if is_equal(dict(found)):
        return "equal" + ("" if found["compared"] else f"; documents were not compared: {found['why_not_tokens']}")
    lines = []
    if "content_sha256" in found:
        said = {side: printable(str(value))[:12] for side, value in found["content_sha256"].items()}
        lines.append(f"content_sha256: A {said['a']}, B {said['b']}")
    settings = []
    for key, values in found["settings"].items():
        shown = [_shown(values[side]) if side in values else "absent" for side in ("a", "b")]
        settings += folded(f"{printable(cut(key))}: A {shown[0]}, B {shown[1]}", indent="  ")
    lines += [cut("\n".join(settings), _MOST_OF_SETTINGS)] * bool(settings)
    if not found["compared"]:
        return "\n".join([*lines, f"documents were not compared: {found['why_not_tokens']}"])
    counts = [", ".join(f"{number:,} {split}" for split, number in found["documents"][side].items()) for side in "ab"]
    why = f", for {found['why_not_tokens']}" if found["why_not_tokens"] else ""
    lines.append(f"documents, compared by {found['compared']}{why}: A {counts[0]}; B {counts[1]}")
    for part in PARTS:
        count, first = found[part]["count"], found[part]["first"]
        if not count:
            continue
        lines.append(f"{_PARTS[part]}: {many(count, 'document')}")
        lines += [line for document in first for line in folded(f"  {cut(_document(document))}", indent="    ")]
        lines += [f"  and {count - len(first):,} more"] * (len(first) < count)
    return "\n".join(lines)


_PARTS = {
    "only_a": "only in A",
    "only_b": "only in B",
    "moved": "moved to the other split",
}


def _document(document: Mapping[str, Any]) -> str:
    parts = [f"{document['split']} {document['document']}"]
    if document["words"] is not None:
        parts.append(repr(document["words"]))
    if document["source_id"] is not None:
        parts.append(f"source id {printable(document['source_id'])}")
    if "in_b" in document:
        in_b = document["in_b"]
        parts.append(f"in B {in_b['split']} {in_b['document']}")
        if in_b["source_id"] not in (None, document["source_id"]):
            parts.append(f"source id {printable(in_b['source_id'])}")
    return ", ".join(parts)


def _shown(value: Any, width: int = 80) -> str:
    if isinstance(value, str) and len(value) == 64 and set(value) <= set(hexdigits):
        return value[:12]  # a sha256
    text = printable(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= width else text[: width - 1] + "…"


def _state(outcome: Outcome) -> str:
    built = {"partial": "partial", False: "not built"}.get(outcome.meta.get("built"), "built")
    return "up to date" if outcome.reused and built == "built" else built
