"""Decide whether a finished cache is good: `verify` makes named checks, `find_damage` lists damage with file and bytes.

The checks of a kind stand in its table (kinds/kind.py), shared ones in checks.py. A rule yields a `Damage` for wrong
bytes of the cache, or an error for a problem elsewhere or with another remedy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from niels_gpt.kinds.files import Damage, FileChecks
from niels_gpt.kinds.folders import kind_at
from niels_gpt.kinds.kind import MALFORMED, Cache, Finding, Kind, Limits, MetaDamage, Rule
from niels_gpt.storage.checks import Figures, Place, Verdict, first_problems, place_of
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import printable, read_regular, resolved
from niels_gpt.storage.versions import VERSION_DIGITS
from niels_gpt.work import Progress

_MAX_REASON = 100  # characters in a table


def verify(
    path: Path, limits: Limits, *, names: Collection[str] | None = None, progress: Progress | None = None
) -> dict[str, Verdict]:
    """Check a cache. Returns the verdict of each check by name, blocking ones first.

    path: the public folder, such as cache/sft/oasst1; resolved once, so that all checks look at one version.
    names: checks to make; None: every check of this kind that needs only the cache.
    Raises: FileNotFoundError or CacheError if meta.json cannot be read or names an unknown kind; ValueError for an
        unknown check. Other damage is a problem of the checks that find it.
    """
    cache = Cache.named(path)
    outside = cache.kind.outside_checks
    known = {check.name: check for check in cache.kind.checks if check.name not in outside}
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(
            f"there is no check {unknown[0]!r} of kind {cache.kind.name}, expected some of {', '.join(known)}"
        )
    wanted = [name for name in known if names is None or name in names]
    made = cache.kind.verdicts(cache, wanted, limits, progress)
    if made is not None:
        return {name: made[name] for name in wanted}
    return {name: _verdict(cache, rule, limits) for name in wanted if (rule := known[name].rule) is not None}


def _verdict(cache: Cache, rule: Rule, limits: Limits) -> Verdict:
    figures, files = Figures(), file_checks(cache)
    problems = first_problems(_sentences(cache, files.folder, guarded(rule(files, limits, figures))))
    return Verdict.of(problems, figures)


def file_checks(cache: Cache, progress: Progress | None = None) -> FileChecks:
    """Return a FileChecks for the cache."""
    return FileChecks(cache.folder, cache.meta, cache.kind.content_sha256, progress)


def guarded(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield findings. An error raised by a rule is one more finding."""
    try:
        yield from findings
    except (CacheError, OSError) as error:  # both name their file
        yield error
    except MALFORMED as error:
        yield Damage(META_NAME, 0, 0, f"not as docs/formats.md describes it ({error!r})")


def _sentences(cache: Cache, folder: Path, findings: Iterable[Finding]) -> Iterator[str]:
    """Turn findings into sentences that name the public folder, not the folder of the version."""
    path, remedy = cache.path, cache.kind.remedy(cache.path)
    for finding in findings:
        if isinstance(finding, Damage):
            finding = CacheError(path / finding.file, finding.problem, remedy=remedy, code="E201")
        yield str(finding).replace(str(folder), str(path))


# --- every damage, with its bytes -------------------------------------------------------------------------------------


def find_damage(path: Path, *, deep: bool, progress: Progress | None = None) -> list[Damage]:
    """Return the damage of the cache at `path`; [] for a good one. Opens nothing outside its folder.

    Warnings are no damage. A quick look compares sizes, headers and sums, and finds files that meta.json does not name.
    It also reads files that have a further name (a hard link) and were written after meta.json.
    path: the public folder, such as cache/sft/oasst1, or the folder of a version; resolved once.
    deep: read every file. A small cache, such as a tokenizer, is always read.
    progress: called with files, bytes read, and bytes to read in all.
    """
    try:
        folder = path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle; Python 3.13 has an OSError for it
        return [Damage(META_NAME, 0, 0, str(error))]
    kind = kind_at(folder)
    if kind is not None and kind.has("verdicts"):
        return _by_verdicts(path, kind, deep=deep, progress=progress)
    try:
        cache = Cache.trusted(folder)
    except MetaDamage as damage:
        return [_with_end(folder, damage.damage)]
    files = file_checks(cache, progress)
    limits = Limits(deep=deep)

    findings = guarded(_all_damages(cache, files, limits))
    damages = [_as_damage(finding, folder) for finding in findings]
    damages = _of_another_cache(files, damages) or [*damages, *_refused(cache, damages)]
    if not damages:
        damages = [_as_damage(finding, folder) for finding in guarded(cache.kind.last_look(files, limits))]
    return [_with_end(folder, damage) for damage in dict.fromkeys(damages)]


def examined(folder: Path, deep: bool, progress: Progress | None = None) -> tuple[dict[str, Any] | None, str]:
    """Return the meta.json of a unit, None if it cannot be read, and its first damage, "" for a good unit.

    No reader opens a unit, so only sizes, sha256 and CRC-32 of its files are compared.
    folder: of a version, without links on the way.
    Raises: CacheError E205 for a meta.json that is not a regular file.
    """
    try:
        cache = Cache.trusted(folder)
    except MetaDamage as damage:
        if isinstance(damage.__cause__, CacheError):
            raise damage.__cause__ from None
        return None, f"{META_NAME}: {damage.damage.problem}"
    files = file_checks(cache, progress)
    sizes = chain(sum_damages(cache, files), files.size_damages())
    findings = guarded(chain(sizes, files.sha256_damages() if deep else ()))
    first = next((_as_damage(finding, folder) for finding in findings), None)
    return cache.meta, "" if first is None else f"{first.file}: {first.problem}"


def examined_unit(
    check: Callable[[dict[str, Any]], None], folder: Path, deep: bool, progress: Progress | None = None
) -> tuple[dict[str, Any] | None, str]:
    """Return `examined`, and as damage an error that `check` raises for a receipt: see `UnitKind.examine`."""
    meta, problem = examined(folder, deep, progress)
    if meta is not None and not problem:
        try:
            check(meta)
        except (CacheError, *MALFORMED) as error:
            problem = error.problem if isinstance(error, CacheError) else repr(error)
    return meta, problem


def _by_verdicts(path: Path, kind: Kind, *, deep: bool, progress: Progress | None) -> list[Damage]:
    """Return the problems of a kind that makes all its checks in one pass, each once."""
    names = kind.checks_of_build(reused=not deep, deep=deep)
    try:
        verdicts = verify(path, Limits(deep=deep), names=names, progress=progress)
    except (CacheError, OSError) as error:  # its description cannot be read
        return [_of_file(error, path)]
    except MALFORMED as error:
        return [Damage("", 0, 0, f"not as docs/formats.md describes it ({error!r})")]
    problems = [problem for verdict in verdicts.values() for problem in verdict.problems]
    damages = []
    for problem in dict.fromkeys(problems):  # several checks need one file
        places: Sequence[Place] = getattr(problem, "places", [("", 0, 0)])
        file, begins, ends = places[0][0], [place[1] for place in places], [place[2] for place in places]
        text = problem.removeprefix(f"{path / file}: ")
        if len(places) > 1:
            spans = (f"{begin:,} to {end:,}" for begin, end in zip(begins, ends, strict=True))
            text += f" Its checksum is over bytes {', '.join(spans)}"
        damages.append(Damage(file, min(begins), max(ends), text))
    return damages


def _of_file(error: CacheError | OSError, path: Path) -> Damage:
    """Return an error as damage of all bytes of the file that it names; of no bytes if the file lies elsewhere."""
    place = place_of(error, path.resolve())
    return Damage(*place, str(error).removeprefix(f"{path.resolve() / place[0]}: "))


def _all_damages(cache: Cache, files: FileChecks, limits: Limits) -> Iterator[Finding]:
    yield from sum_damages(cache, files)
    yield from files.unnamed_damages()
    yield from files.size_damages()
    yield from cache.kind.headers(files)
    if limits.deep and not cache.is_stub:
        yield from cache.kind.contents(files)
    elif limits.deep or cache.kind.is_small:
        yield from files.sha256_damages()
    else:
        yield from files.linked_damages()


def sum_damages(cache: Cache, files: FileChecks) -> Iterator[Damage]:
    """Yield contradictions within meta.json, each with its line."""
    content = files.content_problem()
    problems = [*([("content_sha256", content)] if content else []), *cache.kind.wrong_sums(cache)]
    raw = read_regular(files.folder / META_NAME) if problems else b""
    for key, problem in problems:
        start = max(0, raw.find(f'\n  "{key}":'.encode()) + 1)
        end = raw.find(b"\n", start) if start else len(raw)
        yield Damage(META_NAME, start, end, problem)


def _as_damage(finding: Finding, folder: Path) -> Damage:
    """Return an error as damage of the file that it names, or of meta.json if the file lies elsewhere."""
    if isinstance(finding, Damage):
        return finding
    if isinstance(finding, CacheError) and folder in Path(finding.path).parents:
        return Damage(os.path.relpath(finding.path, folder), 0, 0, finding.problem)
    inside, _, problem = str(finding).partition(": ")
    if problem and folder in Path(inside).parents:  # an OSError that names its file
        return Damage(os.path.relpath(inside, folder), 0, 0, problem)
    return Damage(META_NAME, 0, 0, str(finding))


def _of_another_cache(files: FileChecks, damages: Sequence[Damage]) -> list[Damage]:
    """Return the damage if meta.json and the folder disagree.

    In a version named after the content that meta.json describes, the files are damaged, not meta.json.
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


def _refused(cache: Cache, damages: Sequence[Damage]) -> Iterator[Damage]:
    """Yield the error with which a reader refuses the cache, unless the damage is known."""
    error = reader_error(cache, models=not damages)  # a model is opened once its sha256 is right
    if error is None:
        return
    refused = _as_damage(error, cache.folder)
    key = refused.problem.partition(" ")[0]
    if not any(damage.file in str(error) and (damage.file != META_NAME or key in damage.problem) for damage in damages):
        yield refused._replace(problem=f"the readers refuse it: {refused.problem}")


def _with_end(folder: Path, damage: Damage) -> Damage:
    """Make damage of meta.json as a whole span all of its bytes."""
    if damage.file != META_NAME or damage.end or not (folder / META_NAME).is_file():
        return damage
    return damage._replace(end=(folder / META_NAME).stat().st_size)


# --- why the readers refuse a cache -----------------------------------------------------------------------------------


def reader_error(cache: Cache, *, models: bool = True) -> CacheError | OSError | None:
    """Return the error with which readers refuse a cache; None if they open it. A stub is not opened.

    models: open the model of a tokenizer too, which loads its library.
    """
    where = str(cache.folder / META_NAME)
    try:
        if cache.is_stub:
            if any(record["bytes"] for record in cache.records):
                raise CacheError(where, "built is false, but it names files that hold something", code="E202")
            return None
        cache.kind.refuse(cache, models=models)
    except (CacheError, OSError) as error:
        return error
    except MALFORMED as error:
        return CacheError(where, f"not as docs/formats.md describes it ({error!r})", code="E202")
    return None


def refusal(path: Path) -> str | None:
    """Return in a few words why readers refuse a cache; None if they open it. path: the public folder."""
    folder = path
    try:
        folder = resolved(path)
        cache = Cache.open(folder)
    except (CacheError, OSError) as error:
        return in_short(error, folder)
    reason = reader_error(cache, models=False)
    return None if reason is None else in_short(reason, folder)


def in_short(error: Exception, folder: Path | str) -> str:
    """Return an error of a cache for a table: without its remedy, with file names relative to the folder."""
    text = str(error).split(". ")[0]  # of another error: its first sentence
    if isinstance(error, CacheError):
        text = f"{error.path}: {error.problem}"
    text = printable(text.replace(f"{folder}/", "").replace(f"{folder}: ", ""))
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"
