"""Is a built cache good? Each check is a pure function that yields the problems it finds; none of them loads torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.build.describe import content_sha256
from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import read_meta, tokenizer_above
from niels_gpt.cache.mmap import mmap_tokens
from niels_gpt.fileio import META_NAME, CacheError, sha256_file
from niels_gpt.inspection.contents import IdScan
from niels_gpt.inspection.damage import file_damage, sha256_damages
from niels_gpt.inspection.stats import supervised_counts
from niels_gpt.records import file_records, path_inside
from niels_gpt.remedies import GENERIC, rebuild_command, with_command
from niels_gpt.tokenizer import MODEL_NAME

_CHUNK_TOKENS = 1 << 22  # looked at in one piece: 8 MiB of a token file
_MAX_PROBLEMS = 20  # of one check: a shard of the wrong file would give one for each file
_MAX_EXAMPLES = 5  # named in one problem
_UNREAD = ("malformed", "missing_field", "unknown_role", "unreadable_row")  # by the loaders of one's own text and chats
_NOT_LOST = frozenset({"split_full"})  # dropped because its split had all that was asked for


@dataclass(frozen=True)
class Limits:
    """What the caller may choose."""

    deep: bool = False
    """Compare the sha256 of every file too, which reads them all."""
    max_dropped_share: float = 0.05
    """Of the documents or examples read, 0 to 1; a larger share is a problem."""


@dataclass(frozen=True)
class Check:
    """One question to a finished cache."""

    name: str
    """In snake case, as Dagster's UI shows it."""
    blocking: bool
    """True: a cache that fails must not be used. False: a warning."""
    description: str
    """One or two sentences for the UI."""
    find: Callable[[Path, dict[str, Any], Limits], Iterator[str]]
    """Takes a version's folder and its meta; yields the problems: what was found and where, what was expected.

    It may raise on a damaged file or a malformed meta; `verify` makes a problem of that.
    """


def verify(cache: Path, limits: Limits, *, names: Collection[str] | None = None) -> dict[str, list[str]]:
    """Return the problems that each check found: the check's name -> sentences, [] where it passed.

    cache: the public folder, such as cache/sft/oasst1. It is resolved once, so all checks look at one version.
    names: the checks to make; None: all that there are for this kind of cache.
    Raises: FileNotFoundError and CacheError if meta.json cannot be read or is of no known kind; ValueError for a name
        that is no check of this kind. Damage to anything else is a problem of the checks that need it.
    """
    folder = cache.resolve()
    meta = read_meta(str(folder / META_NAME))
    kind = meta.get("kind")
    if not isinstance(kind, str) or kind not in CHECKS:
        raise CacheError(f"{cache / META_NAME}: kind is {kind!r}, expected one of {', '.join(CHECKS)}")
    known = [check.name for check in CHECKS[kind]]
    for name in names or ():
        if name not in known:
            raise ValueError(f"there is no check {name!r} of kind {kind}, expected some of {', '.join(known)}")
    return {
        # A version's own folder means little to the reader of a message, and a remedy names the public one.
        check.name: [problem.replace(str(folder), str(cache)) for problem in _problems(check, folder, meta, limits)]
        for check in CHECKS[kind]
        if names is None or check.name in names
    }


def _problems(check: Check, folder: Path, meta: dict[str, Any], limits: Limits) -> list[str]:
    problems: list[str] = []
    try:
        for problem in islice(check.find(folder, meta, limits), _MAX_PROBLEMS + 1):
            problems.append(problem)
    except (CacheError, OSError) as error:  # both name the file
        problems.append(str(error))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        problems.append(f"{folder / META_NAME}: not as docs/formats.md describes it ({error!r}). {_again(folder)}")
    problems = [with_command(problem) for problem in problems]
    return problems if len(problems) <= _MAX_PROBLEMS else [*problems[:_MAX_PROBLEMS], "... and more"]


def _again(folder: Path) -> str:
    if folder.name == "tokenizer":
        return f"Remove {folder}, then build it again: {GENERIC}"
    return f"Build it again: {GENERIC}"


def _files_match_meta(folder: Path, meta: dict[str, Any], limits: Limits) -> Iterator[str]:
    records, whole = file_records(meta, str(folder / META_NAME)), []
    for record in records:
        damage = file_damage(folder, record)
        if damage is None:
            whole.append(record)
        else:
            yield f"{folder / damage.file}: {damage.problem}. {_again(folder)}"
    if limits.deep or meta["kind"] == "tokenizer":  # a model is small
        for damage in sha256_damages(folder, meta, whole):
            yield f"{folder / damage.file}: {damage.problem}. {_again(folder)}"
    found, expected = content_sha256(records), meta["content_sha256"]
    if found != expected:
        yield (
            f"{folder / META_NAME}: content_sha256 is {_short(expected)}, but the files it names give {_short(found)}. "
            + _again(folder)
        )


def _short(sha256: Any) -> str:
    return str(sha256)[:12]


def _ids_below_vocab_size(folder: Path, meta: dict[str, Any], limits: Limits) -> Iterator[str]:
    vocab_size = int(meta["vocab_size"])
    for record in (record for records in meta["shards"].values() for record in records):
        if not record["bytes"]:
            continue  # an empty split of an sft cache has an empty file
        scan = IdScan(record["name"], vocab_size)
        try:
            tokens = mmap_tokens(path_inside(folder, record["name"]), expected_bytes=record["bytes"])
        except (CacheError, OSError) as error:  # the other files are still looked at
            yield str(error)
            continue
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            scan.feed(tokens[start : start + _CHUNK_TOKENS])
        for damage in scan.damages():
            yield f"{folder / damage.file}: {damage.problem}. {_again(folder)}"


def _tokenizer_matches(folder: Path, meta: dict[str, Any], limits: Limits) -> Iterator[str]:
    expected, tokenizer = meta["tokenizer_sha256"], tokenizer_above(folder)
    if expected is None:
        yield f"{folder / META_NAME}: tokenizer_sha256 is null, so nothing says whose ids these are. {_again(folder)}"
        return
    if tokenizer is None:
        yield f"{folder}: no tokenizer/{META_NAME} beside or above it, expected tokenizer {_short(expected)}"
        return
    version = tokenizer.resolve()  # one version of both files
    recorded = read_meta(str(version / META_NAME)).get("tokenizer_sha256")
    if recorded != expected:
        yield (
            f"{folder / META_NAME}: ids of tokenizer {_short(expected)}, but {tokenizer / META_NAME} is of tokenizer "
            f"{_short(recorded)}. Build the cache again: {GENERIC}"
        )
    model = version / MODEL_NAME
    if not model.is_file():
        yield f"{tokenizer / MODEL_NAME}: no such file, expected tokenizer {_short(expected)}. {_again(tokenizer)}"
    elif (found := sha256_file(model)) != expected:
        remedy = (
            f"Build the cache again: {rebuild_command(folder) or GENERIC}" if found == recorded else _again(tokenizer)
        )
        yield (
            f"{tokenizer / MODEL_NAME}: sha256 {_short(found)}, but {folder / META_NAME} has ids of tokenizer "
            f"{_short(expected)}. {remedy}"
        )


def _examples_supervised(folder: Path, meta: dict[str, Any], limits: Limits) -> Iterator[str]:
    for split in SPLITS:
        expected, counts = int(meta["supervised_tokens"][split]), supervised_counts(folder, meta, split)
        without = np.flatnonzero(counts == 0)
        if len(without):
            some = ", ".join(map(str, without[:_MAX_EXAMPLES].tolist())) + " and more" * (len(without) > _MAX_EXAMPLES)
            yield (
                f"{folder / split}: {len(without):,} of {len(counts):,} examples have no token that carries loss, "
                f"expected at least one in each. Examples: {some}. {_again(folder)}"
            )
        if int(counts.sum()) != expected:
            yield (
                f"{folder / split}: {int(counts.sum()):,} tokens carry loss, expected {expected:,} by "
                f"supervised_tokens in its {META_NAME}. {_again(folder)}"
            )


def _budget_reached(folder: Path, meta: dict[str, Any], limits: Limits) -> Iterator[str]:
    where, totals = folder / META_NAME, meta["totals"]
    if meta["built"] is False and "budget_reached" not in meta:
        return  # a stub: nothing was asked for
    if meta["built"] == "partial":
        empty = [split for split in SPLITS if not totals[f"{split}_tokens"]]
        yield f"{where}: built is partial: the source lacks a split. Empty: {' and '.join(empty) or 'none'}"
    for split in SPLITS:
        if meta["budget_reached"][split] is False:  # null: no budget
            yield (
                f"{where}: {split} has {totals[f'{split}_tokens']:,} of {meta[f'max_{split}_tokens']:,} tokens: the "
                "source ended first. Give it more text, or lower the budget"
            )


def _dropped_share(folder: Path, meta: dict[str, Any], limits: Limits) -> Iterator[str]:
    """Count what the builder dropped, as a share of what reached it.

    What the loader left out (source.counters) is not counted, for its names do not tell losses from the rest: `blank`
    is a separator line of wikitext but a message of oasst1, where most other reasons count messages too, not examples;
    `not_english` was asked for; `undecodable_utf8` is a repair. A source of one's own has no such names: there the rows
    and chats that could not be read do count.
    """
    if meta["built"] is False:
        return  # a stub has read nothing
    what = "examples" if meta["kind"] == "sft" else "documents"
    read = int(meta[f"{what}_read"])
    lost = {reason: number for reason, number in sorted(meta["dropped"].items()) if reason not in _NOT_LOST}
    if meta["source"].get("kind") == "own":
        unread = {reason: meta["source"]["counters"].get(reason, 0) for reason in _UNREAD}
        lost |= {reason: number for reason, number in unread.items() if number}
        read += sum(unread.values())
    total = sum(lost.values())
    if total > limits.max_dropped_share * read:
        yield (
            f"{folder / META_NAME}: {total:,} of {read:,} {what} were dropped ({total / read:.2%}), expected at most "
            f"{limits.max_dropped_share:.2%}: " + ", ".join(f"{reason} {number:,}" for reason, number in lost.items())
        )


_FILES = Check(
    "files_match_meta",
    True,
    "Every file that meta.json names is there, inside the cache's folder and with its size; a deep check, and any "
    "check of a tokenizer, compares the sha256 of each file too.",
    _files_match_meta,
)
_TOKENS = (
    _FILES,
    Check(
        "ids_below_vocab_size",
        True,
        "Every token is an id of the tokenizer's vocabulary; a larger one would be outside a model's embedding.",
        _ids_below_vocab_size,
    ),
    Check(
        "tokenizer_matches",
        True,
        "The tokenizer beside the cache, its spm.model and its meta.json, is the one that made the cache's ids.",
        _tokenizer_matches,
    ),
)
_DROPPED = Check(
    "dropped_share",
    False,
    "Only a small share of the documents or examples was dropped by the builder; a large one points to a source that "
    "is not what the loader takes it for.",
    _dropped_share,
)
CHECKS: dict[str, tuple[Check, ...]] = {
    "tokenizer": (_FILES,),
    "pretrain": (
        *_TOKENS,
        Check(
            "budget_reached",
            False,
            "Both splits hold as many tokens as were asked for, and the source lacks no split.",
            _budget_reached,
        ),
        _DROPPED,
    ),
    "sft": (
        *_TOKENS,
        Check(
            "examples_supervised",
            True,
            "Every example has a token that carries loss, and their sum is the one in meta.json.",
            _examples_supervised,
        ),
        _DROPPED,
    ),
}
"""The checks of a cache by the `kind` in its meta.json, blocking ones first."""
