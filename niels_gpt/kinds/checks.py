"""Checks that several kinds share: of files, the tokenizer and the readers; and rules for warnings.

Decides when a build warns about dropped documents (`dropped_share`), documents in another encoding (`repaired_share`),
a source that ended before the token budget (`budget_reached`), and text that seems to be of another sort (`signals`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import read_meta, tokenizer_above
from niels_gpt.display.numbers import many, number_of, share_text, size_text
from niels_gpt.engine.meta import why_unmet
from niels_gpt.kinds.files import Damage, FileChecks
from niels_gpt.kinds.kind import Finding, Limits, Rule
from niels_gpt.signals import above, found_in
from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES
from niels_gpt.storage.checks import Check, Figures
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import path_inside, resolved, sha256_regular
from niels_gpt.storage.remedies import build_again, make_again
from niels_gpt.tokenizers.files import FILE_OF, MODEL_NAME
from niels_gpt.tokenizers.protocol import integer, most_ids

_UNREAD = ("too_large", "unreadable_row")  # counters of every loader
_UNREAD_USER_DEFINED = (  # of user files
    *(*_UNREAD, "malformed", "missing_field", "not_text", "unknown_role", "weight_0", "git_lfs_pointer"),
)
_MAX_REPAIRED_SHARE = 0.01  # of the documents or examples read: more point to files of another encoding
_NOT_LOST = frozenset({"split_full", "groups_without_sample"})
"""Reasons to drop a document from a split that has all it should hold; its samples are counted already."""

Meta = dict[str, Any]
Problem = tuple[str, str]
"""A key of meta.json, and the problem: found and expected."""


# --- files, vocabulary, tokenizer -------------------------------------------------------------------------------------


def vocabulary_sums(meta: Meta, *, may_lack_sentinels: bool = True) -> Iterator[Problem]:
    """Yield a malformed vocab_size, and sentinels that are not ids below it.

    may_lack_sentinels: the tokenizer may have none.
    """
    size, ids = meta.get("vocab_size"), meta.get("special_token_ids")
    most = most_ids(meta, META_NAME)
    if integer(size, 1, most + 1) is None:
        yield "vocab_size", f"vocab_size is {size!r}, expected 1 to {most:,}"
    elif ids == {} and may_lack_sentinels:
        pass  # of a tokenizer without the sentinels
    elif not isinstance(ids, dict) or not all(
        isinstance(ids.get(name), int) and 0 <= ids[name] < size for name in SPECIAL_TOKEN_NAMES
    ):
        yield "special_token_ids", f"special_token_ids are {ids!r}, expected an id of the {size} for each sentinel"


def partition_sums(meta: Meta) -> Iterator[Problem]:
    """Yield counts of partitions that do not add up to the totals."""
    if "partitions" not in meta:
        return
    total, of_each = meta["partitions"]["total"], meta["partitions"]["of_each"]
    if total != len(of_each):
        yield "partitions", f"partitions.total is {total!r}, expected {len(of_each)} by the rest of it"
    for key in of_each[0] if of_each else ():
        if (found := sum(each[key] for each in of_each)) != meta["totals"][key]:
            yield "partitions", f"the sum of {key} in partitions.of_each is {found}, expected {meta['totals'][key]}"


def _files_match_meta(
    files: FileChecks, limits: Limits, figures: Figures, *, is_small: bool = False
) -> Iterator[Finding]:
    is_deep = limits.deep or is_small
    count, num_bytes = len(files.records), sum(record["bytes"] for record in files.records)
    compared = "sizes and sha256 compared with" if is_deep else "sizes compared with"
    figures.say(
        f"{many(count, 'file')} of {size_text(num_bytes)} in all, {compared} {META_NAME}.",
        files=count,
        bytes=num_bytes,
        sha256="compared" if is_deep else "not compared: deep_checks is false",
    )
    yield from files.size_damages()
    yield from files.sha256_damages() if is_deep else files.linked_damages()
    if problem := files.content_problem():
        yield Damage(META_NAME, 0, 0, problem)


def _tokenizer_matches(
    files: FileChecks, limits: Limits, figures: Figures, *, may_be_unknown: bool = False
) -> Iterator[Finding]:
    where, expected, tokenizer = files.folder / META_NAME, files.meta["tokenizer_sha256"], tokenizer_above(files.folder)
    if expected is None and may_be_unknown:
        figures.say("The ids were recorded with a tokenizer that the cache does not know.", tokenizer="not known")
        return
    if expected is None:
        yield Damage(META_NAME, 0, 0, "tokenizer_sha256 is null, expected the sha256 of the model of the ids")
        return
    figures.say(f"Ids and model are of tokenizer {expected[:12]}.", tokenizer=expected[:12])
    if tokenizer is None:
        problem = f"no tokenizer/{META_NAME} beside or above it"
        yield CacheError(files.folder, problem, f"tokenizer {expected[:12]}", code="E401")
        return
    version = resolved(tokenizer)  # one version of both files
    about = read_meta(str(version / META_NAME))
    recorded = about.get("tokenizer_sha256")
    if recorded != expected:
        problem = f"ids of tokenizer {expected[:12]}, but {tokenizer / META_NAME} names tokenizer {str(recorded)[:12]}"
        yield CacheError(where, problem, remedy=build_again(files.folder, "E402"), code="E402")
    name = FILE_OF.get(str(about.get("tokenizer_kind")), MODEL_NAME)
    model = tokenizer / name
    if not os.path.lexists(version / name):
        yield CacheError(model, "no such file", f"tokenizer {expected[:12]}", make_again(tokenizer), code="E401")
    elif (sha256 := sha256_regular(path_inside(version, name))) != expected:
        problem = f"sha256 {sha256[:12]}, but {where} has ids of tokenizer {expected[:12]}"
        again = build_again(files.folder, "E402") if sha256 == recorded else make_again(tokenizer)
        yield CacheError(model, problem, remedy=again, code="E402")


# --- warnings about the source ----------------------------------------------------------------------------------------


def budget_problems(meta: Meta, limits: Limits, figures: Figures) -> Iterator[str]:
    """Yield splits below their token budget, except in the bundled sample, and splits that the source lacks."""
    totals = meta["totals"]
    if meta["built"] is False and "budget_reached" not in meta:
        figures.say("A stub: nothing was asked for.")
        return
    _say_budgets(meta, figures)
    if meta["built"] == "partial":
        empty = [split for split in SPLITS if not totals[f"{split}_tokens"]]
        yield f"built is partial: the source lacks a split. Empty: {' and '.join(empty) or 'none'}"
    if meta["source"].get("kind") == "sample":
        return  # it is small on purpose
    for split in SPLITS:
        if meta["budget_reached"][split] is False:  # null: no budget
            yield (
                f"{split} has {totals[f'{split}_tokens']:,} of {meta[f'max_{split}_tokens']:,} tokens: "
                f"{why_unmet(meta)}. Give it more text, or lower the budget"
            )


def _say_budgets(meta: Meta, figures: Figures) -> None:
    counts = {f"{split}_tokens": int(meta["totals"][f"{split}_tokens"]) for split in SPLITS}
    asked = [meta[f"max_{split}_tokens"] for split in SPLITS]
    limits = [f"{number_of(count, 'token')}" if count is not None else "no limit" for count in asked]
    said = ", ".join(
        f"{split} has {number_of(counts[f'{split}_tokens'], 'token')} ({limit} asked for)"
        for split, limit in zip(SPLITS, limits, strict=True)
    )
    is_sample = " The bundled sample is small on purpose." if meta["source"].get("kind") == "sample" else ""
    figures.say(
        f"{said[0].upper()}{said[1:]}.{is_sample}",
        **counts,
        asked=", ".join(f"{split} {limit}" for split, limit in zip(SPLITS, limits, strict=True)),
    )


def dropped_problems(meta: Meta, limits: Limits, figures: Figures, unit: str) -> Iterator[str]:
    """Compare the share of dropped documents, among all that reached the builder, with the limit.

    Counts also rows that the loader could not read or found too large (source.counters). Other counters do not tell
    losses from the rest: `blank` is a separator line of wikitext but a message of oasst1, whose other counters count
    messages too, not examples; `not_english` was asked for; `repaired_utf8` is a repair. User-defined sources, and all
    sources of text, have none of these: for them rows without a text or a chat count too.
    """
    if meta["built"] is False:
        figures.say("A stub: nothing was read.")
        return
    dropped = {reason: count for reason, count in sorted(meta["dropped"].items()) if reason not in _NOT_LOST}
    counters = meta["source"].get("counters", {})
    all_rows = meta["source"].get("kind") == "own" or unit == "documents"
    unread = {reason: counters.get(reason, 0) for reason in (_UNREAD_USER_DEFINED if all_rows else _UNREAD)}
    for reason, count in unread.items():
        if count:  # the builder may drop others for the same reason
            dropped[reason] = dropped.get(reason, 0) + count
    read, total = int(meta[f"{unit}_read"]) + sum(unread.values()), sum(dropped.values())
    units = "samples and rows" if unit == "samples" and any(unread.values()) else unit  # a row may hold many samples
    share, most = total / read if read else 0.0, limits.max_dropped_share
    figures.say(
        f"{share_text(share)} of {read:,} {units} were dropped, at most {share_text(most)} may be.",
        dropped_share=share,
        dropped=total,
        read=read,
        limit=share_text(most),
        reasons=", ".join(f"{reason} {count:,}" for reason, count in dropped.items() if count) or "none",
    )
    if total > most * read:
        yield (
            f"{total:,} of {read:,} {units} were dropped ({total / read:.2%}), expected at most {most:.2%}: "
            + ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
        )


def repaired_problems(meta: Meta, limits: Limits, figures: Figures, unit: str) -> Iterator[str]:
    """Yield counts of kept documents with repaired or odd text that are a large share of the documents read."""
    if meta["built"] is False:
        figures.say("A stub: nothing was read.")
        return
    read, counters = int(meta[f"{unit}_read"]), meta["source"].get("counters", {})
    most = max(counters.get(reason, 0) for reason in _ODD_TEXTS)
    share, limit = most / read if read else 0.0, share_text(_MAX_REPAIRED_SHARE)
    figures.say(
        f"{share_text(share)} of {read:,} {unit} were repaired or hold NUL, at most {limit} may.",
        repaired_share=share,
        **{reason: counters.get(reason, 0) for reason in _ODD_TEXTS},
        read=read,
        limit=limit,
    )
    for reason, problem in _ODD_TEXTS.items():
        count = counters.get(reason, 0)
        if count > max(1, _MAX_REPAIRED_SHARE * read):  # a single one is in the build's log
            yield f"of {read:,} {unit}, {count:,} {problem} ({reason})"


_ODD_TEXTS = {
    "repaired_utf8": "were not UTF-8 and have U+FFFD where they could not be decoded: convert the files to UTF-8, as "
    "does `iconv -f LATIN1 -t UTF-8`, and build again",
    "texts_with_nul": "hold NUL characters, a sign of UTF-16 without a byte-order mark: convert the files to UTF-8, as "
    "does `iconv -f UTF-16LE -t UTF-8`, and build again",
}


def signal_problems(meta: Meta, limits: Limits, figures: Figures) -> Iterator[str]:
    """Yield signals that are above their share."""
    found = found_in(meta)
    shown = ", ".join(f"{each.signal.counter.rstrip(':')} {each.number:,}" for each in found) or "none"
    figures.say(f"Signs that the source is not what it is taken for: {shown}.", signals=shown)
    yield from map(str, above(meta))


# --- the named checks -------------------------------------------------------------------------------------------------


def _warning(problems: Callable[..., Iterator[str]], **how: Any) -> Rule:
    """Return the rule of a warning: a problem of meta.json without a remedy of its own."""

    def rule(files: FileChecks, limits: Limits, figures: Figures) -> Iterator[Finding]:
        for problem in problems(files.meta, limits, figures, **how):
            yield CacheError(files.folder / META_NAME, problem, code="W201")

    return rule


FILES = Check(
    "files_match_meta",
    "Every file that meta.json names is there, inside the cache's folder and with its size; a deep check, and any "
    "check of a tokenizer, compares the sha256 of each file too. Another check does so for a file that has a second "
    "name, as an export gives it, and was written after meta.json.",
    rule=_files_match_meta,
)
SMALL_FILES = replace(FILES, rule=partial(_files_match_meta, is_small=True))
"""FILES for a kind whose files are read at every look."""
TOKENIZER_MATCHES = Check(
    "tokenizer_matches",
    "The tokenizer beside the cache, its meta.json and its spm.model or tokenizer.json, is the one that made the "
    "cache's ids.",
    rule=_tokenizer_matches,
)
TOKENIZER_MAY_MATCH = replace(TOKENIZER_MATCHES, rule=partial(_tokenizer_matches, may_be_unknown=True))
"""TOKENIZER_MATCHES for recorded ids, whose tokenizer may be unknown."""
BUDGET_REACHED = Check(
    "budget_reached",
    "Both splits hold as many tokens as were asked for, and the source lacks no split.",
    blocking=False,
    rule=_warning(budget_problems),
)


def warnings_of(unit: str) -> tuple[Check, ...]:
    """Return the warnings about a source. unit: the items read, as in the key documents_read of meta.json."""
    return (
        Check(
            "dropped_share",
            "Only a small share of the documents or examples was dropped by the builder; a large one points to a "
            "source that is not what the loader takes it for.",
            blocking=False,
            rule=_warning(dropped_problems, unit=unit),
        ),
        Check(
            "repaired_share",
            "Hardly a document or example was in another encoding than UTF-8, or holds NUL characters; many point to "
            "files that have to be converted.",
            blocking=False,
            rule=_warning(repaired_problems, unit=unit),
        ),
        Check(
            "signals",
            "Few of the documents, chats or samples have a sign that the source is not what it is taken for, such as "
            "chats that begin with a reply; the table of signs is in docs/own_data.md and docs/rollouts.md.",
            blocking=False,
            rule=_warning(signal_problems),
        ),
    )
