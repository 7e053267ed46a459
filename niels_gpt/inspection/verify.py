"""Is a finished cache good? The table of named checks (CHECKS), and every damage with its file and bytes (find_damage).

A new check is a function here, or in the module of its subject, and a row in `_RULES`; CHECKS decides which kinds of
caches it is made for, and whether its failure makes a cache unusable. Rules yield a `Damage`, where bytes of the cache
are wrong, or an error, where the problem lies elsewhere or has another remedy. Both `verify` (named checks: a
build's, Dagster's) and `find_damage` (the command `verify`) run the rules of

    file_checks.py   presence, sizes, sha256, block checksums
    meta_checks.py   meta.json: bytes, sums; the warnings
    contents.py      ids, sentinels, offsets, source ids
    readers.py       what the readers refuse
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import read_meta, tokenizer_above
from niels_gpt.display.numbers import many, number_of, share_text, size_text
from niels_gpt.inspection import meta_checks
from niels_gpt.inspection.contents import content_damages, id_damages, supervised_damages
from niels_gpt.inspection.file_checks import CacheFiles, Damage
from niels_gpt.inspection.readers import make_again, refusals
from niels_gpt.inspection.stats import supervised_counts
from niels_gpt.progress import Progress
from niels_gpt.storage.checks import Check, Figures, Verdict, first_problems
from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import path_inside, resolved, sha256_regular
from niels_gpt.storage.remedies import build_again
from niels_gpt.storage.versions import VERSION_DIGITS
from niels_gpt.tokenizers.files import FILE_OF, MODEL_NAME

_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Limits:
    """What the caller may choose."""

    deep: bool = False
    """Compare the sha256 of every file too, which reads them all."""
    max_dropped_share: float = 0.05
    """Of the documents or examples read, 0 to 1; a larger share is a problem."""


Finding = Damage | CacheError | OSError
Rule = Callable[[CacheFiles, Limits, Figures], Iterator[Finding]]
"""Yields what is wrong, and says what it measured. It may raise on a damaged file or a malformed meta.json: that is one
more finding."""


def verify(cache: Path, limits: Limits, *, names: Collection[str] | None = None) -> dict[str, Verdict]:
    """Make the checks of a cache; returns the verdict of each by the check's name, blocking ones first.

    cache: the public folder, such as cache/sft/oasst1. It is resolved once, so all checks look at one version.
    names: the checks to make; None: all those of this kind of cache.
    Raises: FileNotFoundError and CacheError if meta.json cannot be read or is of an unknown kind; ValueError for a name
        that is no check of this kind. Damage to anything else is a problem of the checks that need it.
    """
    folder = resolved(cache)
    meta = read_meta(str(folder / META_NAME))
    kind = meta.get("kind")
    if not isinstance(kind, str) or kind not in CHECKS:
        raise CacheError(cache / META_NAME, f"kind is {kind!r}", f"one of {', '.join(CHECKS)}", code="E208")
    known = [check.name for check in CHECKS[kind]]
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"there is no check {unknown[0]!r} of kind {kind}, expected some of {', '.join(known)}")
    wanted = [name for name in known if names is None or name in names]
    return {name: _verdict(cache, _RULES[name], CacheFiles(folder, meta), limits) for name in wanted}


def _verdict(cache: Path, rule: Rule, files: CacheFiles, limits: Limits) -> Verdict:
    figures = Figures()
    problems = first_problems(_sentences(cache, files.folder, _found(rule, files, limits, figures)))
    return Verdict.of(problems, figures)


def _found(rule: Rule, files: CacheFiles, limits: Limits, figures: Figures) -> Iterator[Finding]:
    try:
        yield from rule(files, limits, figures)
    except (CacheError, OSError) as error:  # both name their file
        yield error
    except _MALFORMED as error:
        yield Damage(META_NAME, 0, 0, f"not as docs/formats.md describes it ({error!r})")


def _sentences(cache: Path, folder: Path, findings: Iterable[Finding]) -> Iterator[str]:
    """Turn findings into sentences that name the public folder, not the version's, which means little to readers."""
    remedy = make_again(cache) if cache.name == "tokenizer" else REBUILD
    for finding in findings:
        if isinstance(finding, Damage):
            finding = CacheError(cache / finding.file, finding.problem, remedy=remedy, code="E201")
        yield str(finding).replace(str(folder), str(cache))


# --- every damage, with its bytes -------------------------------------------------------------------------------------


def find_damage(cache: Path, *, deep: bool, progress: Progress | None = None) -> list[Damage]:
    """Return what is wrong with the cache at `cache`, [] for a good one. Nothing outside its folder is opened.

    Warnings are no damage. A quick look compares sizes, headers and sums; it finds files that meta.json does not name.
    It reads the files that have another name, a hard link, and were written after meta.json.
    cache: the public folder, such as cache/sft/oasst1, or a version's own. It is resolved once.
    deep: read every file; a tokenizer's model, which is small, is always read.
    progress: called with files, bytes read, and bytes to read in all.
    """
    try:
        folder = cache.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle; Python 3.13 has an OSError for it
        return [Damage(META_NAME, 0, 0, str(error))]
    meta = meta_checks.described(folder)
    if isinstance(meta, Damage):
        return [_with_end(folder, meta)]
    files = CacheFiles(folder, meta, progress)
    damages = [_as_damage(finding, folder) for finding in _found(_all_damages, files, Limits(deep=deep), Figures())]
    damages = _of_another_cache(files, damages) or [*damages, *_refused(files, damages)]
    return [_with_end(folder, damage) for damage in dict.fromkeys(damages)]


def _all_damages(files: CacheFiles, limits: Limits, figures: Figures) -> Iterator[Finding]:
    yield from meta_checks.sum_damages(files)
    yield from files.unnamed_damages()
    yield from files.size_damages()
    yield from files.header_damages()
    is_tokenizer = files.meta["kind"] == "tokenizer"
    if limits.deep and files.meta["kind"] not in ("tokenizer", "rollouts") and files.meta.get("built") is not False:
        yield from content_damages(files)
    elif limits.deep or is_tokenizer:
        yield from files.sha256_damages()
    else:
        yield from files.linked_damages()


def _as_damage(finding: Finding, folder: Path) -> Damage:
    """Return an error as damage of the file that it names, or of meta.json where that file lies elsewhere."""
    if isinstance(finding, Damage):
        return finding
    if isinstance(finding, CacheError) and folder in Path(finding.path).parents:
        return Damage(os.path.relpath(finding.path, folder), 0, 0, finding.problem)
    inside, _, problem = str(finding).partition(": ")
    if problem and folder in Path(inside).parents:  # an OSError that names its file
        return Damage(os.path.relpath(inside, folder), 0, 0, problem)
    return Damage(META_NAME, 0, 0, str(finding))


def _of_another_cache(files: CacheFiles, damages: Sequence[Damage]) -> list[Damage]:
    """Return the one damage of a meta.json that describes other files than those that are there; else nothing.

    In a version whose name is the content that meta.json describes, the files are damaged, not meta.json.
    """
    try:
        names = {record["name"] for record in files.records if record["bytes"]}
    except CacheError:
        return []
    wrong = sorted({damage.file for damage in damages if os.path.lexists(files.folder / damage.file)} & names)
    is_its_own = files.folder.name == str(files.meta.get("content_sha256"))[:VERSION_DIGITS]
    if is_its_own or len(wrong) < 2 or 2 * len(wrong) <= len(names):
        return []
    differ = f"{len(wrong)} of the {len(names)} files that it names are here and hold something else ({wrong[0]}, ...)"
    return [Damage(META_NAME, 0, 0, f"of another cache, it seems: {differ}. Those were not judged by it")]


def _refused(files: CacheFiles, damages: Sequence[Damage]) -> Iterator[Damage]:
    """Yield why a reader refuses the cache, unless the reason is a known damage."""
    for error in refusals(files.folder, models=not damages):  # a model is opened once its sha256 is right
        refused = _as_damage(error, files.folder)
        key = refused.problem.partition(" ")[0]
        if not any(
            damage.file in str(error) and (damage.file != META_NAME or key in damage.problem) for damage in damages
        ):
            yield refused._replace(problem=f"the readers refuse it: {refused.problem}")


def _with_end(folder: Path, damage: Damage) -> Damage:
    """Let damage of meta.json as a whole span all of its bytes."""
    if damage.file != META_NAME or damage.end or not (folder / META_NAME).is_file():
        return damage
    return damage._replace(end=(folder / META_NAME).stat().st_size)


# --- the rules of the named checks ------------------------------------------------------------------------------------


def _files_match_meta(files: CacheFiles, limits: Limits, figures: Figures) -> Iterator[Finding]:
    is_deep = limits.deep or files.meta["kind"] == "tokenizer"  # a model is small
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
    if problem := meta_checks.content_sha256_problem(files.meta, files.records):
        yield Damage(META_NAME, 0, 0, problem)


def _tokenizer_matches(files: CacheFiles, limits: Limits, figures: Figures) -> Iterator[Finding]:
    where, expected, tokenizer = files.folder / META_NAME, files.meta["tokenizer_sha256"], tokenizer_above(files.folder)
    if expected is None and files.meta["kind"] == "rollouts":
        figures.say("The ids were recorded with a tokenizer that the cache does not know.", tokenizer="not known")
        return
    if expected is None:
        yield Damage(META_NAME, 0, 0, "tokenizer_sha256 is null, expected that of the model of the ids")
        return
    figures.say(f"Ids and model are of tokenizer {expected[:12]}.", tokenizer=expected[:12])
    if tokenizer is None:
        problem = f"no tokenizer/{META_NAME} beside or above it"
        yield CacheError(files.folder, problem, f"tokenizer {expected[:12]}", code="E401")
        return
    again = build_again(files.folder, "E402")
    version = resolved(tokenizer)  # one version of both files
    about = read_meta(str(version / META_NAME))
    recorded = about.get("tokenizer_sha256")
    if recorded != expected:
        problem = f"ids of tokenizer {expected[:12]}, but {tokenizer / META_NAME} is of tokenizer {str(recorded)[:12]}"
        yield CacheError(where, problem, remedy=again, code="E402")
    name = FILE_OF.get(str(about.get("tokenizer_kind")), MODEL_NAME)
    model = tokenizer / name
    if not os.path.lexists(version / name):
        yield CacheError(model, "no such file", f"tokenizer {expected[:12]}", make_again(tokenizer), code="E401")
    elif (sha256 := sha256_regular(path_inside(version, name))) != expected:
        problem = f"sha256 {sha256[:12]}, but {where} has ids of tokenizer {expected[:12]}"
        yield CacheError(model, problem, remedy=again if sha256 == recorded else make_again(tokenizer), code="E402")


def _readers_open(files: CacheFiles, limits: Limits, figures: Figures) -> Iterator[Finding]:
    yield from refusals(files.folder)
    totals = {split: int(files.meta["totals"][f"{split}_tokens"]) for split in SPLITS}
    opened = [f"{split} ({number_of(count, 'token')})" for split, count in totals.items() if count]
    figures.say(
        f"The readers open {' and '.join(opened)}." if opened else "The readers open it; it holds nothing.",
        splits_opened=len(opened),
    )


def _examples_supervised(files: CacheFiles, limits: Limits, figures: Figures) -> Iterator[Finding]:
    examples = supervised = 0
    for split in SPLITS:
        counts = supervised_counts(files.folder, files.meta, split)
        examples, supervised = examples + len(counts), supervised + int(counts.sum())
        yield from supervised_damages(files, split, counts)
    tokens = sum(int(files.meta["totals"][f"{split}_tokens"]) for split in SPLITS)
    share = supervised / max(1, tokens)
    figures.say(
        f"Each of {many(examples, 'example')} has tokens with loss: {supervised:,} of {many(tokens, 'token')}, "
        f"{share_text(share)}.",
        examples=examples,
        supervised_tokens=supervised,
        supervised_share=share,
    )


def _warning(problems: Callable[[dict[str, Any], Limits, Figures], Iterator[str]]) -> Rule:
    """Return the rule of a warning, which names meta.json and has no remedy but its own words."""

    def rule(files: CacheFiles, limits: Limits, figures: Figures) -> Iterator[Finding]:
        for problem in problems(files.meta, limits, figures):
            yield CacheError(files.folder / META_NAME, problem, code="W201")

    return rule


_RULES: dict[str, Rule] = {
    "files_match_meta": _files_match_meta,
    "ids_below_vocab_size": lambda files, limits, figures: id_damages(files, figures),
    "tokenizer_matches": _tokenizer_matches,
    "readers_open": _readers_open,
    "examples_supervised": _examples_supervised,
    "budget_reached": _warning(lambda meta, limits, figures: meta_checks.budget_problems(meta, figures)),
    "dropped_share": _warning(
        lambda meta, limits, figures: meta_checks.dropped_problems(meta, limits.max_dropped_share, figures)
    ),
    "signals": _warning(lambda meta, limits, figures: meta_checks.signal_problems(meta, figures)),
    "repaired_share": _warning(lambda meta, limits, figures: meta_checks.repaired_problems(meta, figures)),
}

_FILES = Check(
    "files_match_meta",
    "Every file that meta.json names is there, inside the cache's folder and with its size; a deep check, and any "
    "check of a tokenizer, compares the sha256 of each file too. Another check does so for a file that has a second "
    "name, as an export gives it, and was written after meta.json.",
)
_TOKENS = (
    _FILES,
    Check(
        "ids_below_vocab_size",
        "Every token is an id of the tokenizer's vocabulary; a larger one would be outside a model's embedding.",
    ),
    Check(
        "tokenizer_matches",
        "The tokenizer beside the cache, its meta.json and its spm.model or tokenizer.json, is the one that made the "
        "cache's ids.",
    ),
    Check(
        "readers_open",
        "Every reader opens the cache: meta.json is as they need it, and tokens and offsets belong together.",
    ),
)
_WARNINGS = (
    Check(
        "dropped_share",
        "Only a small share of the documents or examples was dropped by the builder; a large one points to a source "
        "that is not what the loader takes it for.",
        blocking=False,
    ),
    Check(
        "repaired_share",
        "Hardly a document or example was in another encoding than UTF-8, or holds NUL characters; many point to files "
        "that have to be converted.",
        blocking=False,
    ),
    Check(
        "signals",
        "Few of the documents, chats or samples have a sign that the source is not what it is taken for, such as chats "
        "that begin with a reply; the table of signs is in docs/own_data.md and docs/rollouts.md.",
        blocking=False,
    ),
)
_TOKENIZER = next(check for check in _TOKENS if check.name == "tokenizer_matches")
CHECKS: dict[str, tuple[Check, ...]] = {
    "tokenizer": (_FILES,),
    "rollouts": (_FILES, _TOKENIZER, *_WARNINGS),  # recipes/rollouts/checks.py has one more, which reads the groups
    "pretrain": (
        *_TOKENS,
        Check(
            "budget_reached",
            "Both splits hold as many tokens as were asked for, and the source lacks no split.",
            blocking=False,
        ),
        *_WARNINGS,
    ),
    "sft": (
        *_TOKENS,
        Check(
            "examples_supervised",
            "Every example has a token that carries loss, and their sum is the one in meta.json.",
        ),
        *_WARNINGS,
    ),
}
"""The checks of a cache by the `kind` in its meta.json, blocking ones first."""
