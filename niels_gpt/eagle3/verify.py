"""Is a finished cache good? Checks by name, each a function that yields what it found; shard by shard, row by row.

    complete       all files are there, of the right size and form, and nothing was interrupted
    checksums      every file and every sample has the sha256 that was written down when it was made
    finite         no NaN and no infinity
    ids_match      ids and masks are those of the source's rows
    distribution   the target's distributions are some, and the mask is true only where there is loss
    recomputed     some samples, run through the target once more, give what is stored (recompute.py; needs the target)

Caches that other tools wrote have no sidecar: what needs one is not checked then, and the verdict says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from niels_gpt.eagle3.convert import content_sha256
from niels_gpt.eagle3.layout import SIDECAR, Layout, read_header, shard_path
from niels_gpt.eagle3.manifest import (
    EMBEDDINGS_NAME,
    MANIFEST_NAME,
    existing_shard_indices,
    layout_of,
    load_safetensors,
    number_in,
    read_manifest,
)
from niels_gpt.eagle3.plan import PLAN_NAME, read_record
from niels_gpt.eagle3.row_checks import Row, not_distributions, not_finite, other_ids
from niels_gpt.eagle3.samples import IDS_NAME, SAMPLES_NAME, Samples
from niels_gpt.eagle3.shards import receipt_path, shard_damage
from niels_gpt.fileio import META_NAME, CacheError, sha256_file
from niels_gpt.records import file_records, meta_crc32, parse_object, path_inside, read_regular, shortened

_MAX_PROBLEMS = 20  # of one check
_AGAIN = "Remove it and produce it again: python -m niels_gpt.eagle3.precompute --resume"
_FOREIGN = "cannot be checked: no sidecar, as in caches that other tools wrote"

Progress = Callable[[int, int], None]
"""Is told the bytes looked at, and those to look at in all."""


class NotChecked(Exception):
    """A check cannot be made of this cache, which is no damage; the text says why."""


@dataclass(frozen=True)
class Verdict:
    """What one check found."""

    problems: list[str]
    """Sentences; empty where the check passed or was not made."""
    note: str | None = None
    """Why the check was not made."""


@dataclass(frozen=True)
class Opened:
    """A cache whose manifest can be read."""

    folder: Path
    """Without links, so that all checks look at one version."""
    manifest: dict[str, Any]
    tick: Callable[[int], None] = field(repr=False)
    """Is told bytes that were looked at."""

    @cached_property
    def layout(self) -> Layout:
        """The form of the shards by the manifest. Raises: CacheError."""
        return layout_of(self.manifest, self.folder)

    @cached_property
    def num_samples(self) -> int:
        """By the manifest. Raises: CacheError."""
        return number_in(self.manifest, "num_samples", self.folder)

    @cached_property
    def shard_size(self) -> int:
        """By the manifest. Raises: CacheError."""
        return number_in(self.manifest, "shard_size", self.folder, 1)

    @cached_property
    def shards(self) -> list[int]:
        """The shards that there should be and are."""
        wanted = -(-self.num_samples // self.shard_size)
        return sorted(index for index in existing_shard_indices(self.folder) if index < wanted)

    @cached_property
    def samples(self) -> Samples:
        """The source's rows. Raises: NotChecked where there are none; CacheError where they are damaged."""
        try:
            return Samples.open(self.folder / SIDECAR)
        except FileNotFoundError as error:
            if (self.folder / SIDECAR / PLAN_NAME).is_file():
                raise CacheError(f"{error.filename}: no such file. {_AGAIN}") from error
            raise NotChecked(_FOREIGN) from error

    @cached_property
    def is_planned(self) -> bool:
        """Whether the cache was made by this project's producer."""
        return (self.folder / SIDECAR / PLAN_NAME).is_file()

    def rows_of(self, shard: int) -> int:
        """Return how many samples a shard has to have."""
        return min(self.shard_size, self.num_samples - shard * self.shard_size)

    def name(self, shard: int, row: int) -> str:
        """Return what to call a sample: its number in the cache and, where it is known, its source's name for it."""
        number = shard * self.shard_size + row
        try:
            return f"sample {number} ({shortened(self.samples.source_ids[number])})"
        except (NotChecked, CacheError, IndexError):
            return f"sample {number}"

    def row(self, shard: int, row: int, tables: Mapping[str, torch.Tensor]) -> Row:
        """Return one sample of a shard's tables."""
        return Row(
            f"{shard_path(self.folder, shard)}: {self.name(shard, row)}",
            {name: table[row] for name, table in tables.items()},
            tuple(self.manifest.get("aux_layer_ids") or ()),
            self.layout.draft_vocab_size,
            padding_is_zero=self.is_planned,
        )


def open_cache(cache: Path, tick: Callable[[int], None] = lambda _: None) -> Opened:
    """Resolve a cache once and read its manifest. Raises: FileNotFoundError; CacheError."""
    folder = cache.resolve()
    return Opened(folder, read_manifest(folder), tick)


def tables_of(cache: Opened, shard: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a shard, [n, S, ...], as views of its map. Raises: CacheError unless they are as planned."""
    path = shard_path(cache.folder, shard)
    fields, rows, _ = read_header(path)
    if fields != cache.layout.fields or rows != cache.rows_of(shard):
        raise CacheError(f"{path}: not the tensors that {MANIFEST_NAME} says; see the check `complete`. {_AGAIN}")
    _, safe_open = load_safetensors()
    with safe_open(path, framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in fields}


@dataclass(frozen=True)
class Check:
    """One question to a cache: once, to each shard, or to each sample."""

    name: str
    """In snake case, as Dagster's UI shows it."""
    description: str
    """One or two sentences for the UI."""
    once: Callable[[Opened], Iterator[str]] | None = None
    of_shard: Callable[[Opened, int], Iterator[str]] | None = None
    of_row: Callable[[Opened, int, Row], Iterator[str]] | None = None


def verify(
    cache: Path, *, names: Collection[str] | None = None, progress: Progress | None = None
) -> dict[str, Verdict]:
    """Return the verdict of each check, by its name; `recomputed` has a function of its own, recompute.recomputed.

    names: the checks to make; None: all of CHECKS.
    Raises: FileNotFoundError and CacheError where the manifest cannot be read; ValueError for a name that is no check.
    Damage to anything else is a problem of the checks that need it.
    """
    for name in names or ():
        if name not in CHECKS:
            raise ValueError(f"there is no check {name!r}, expected some of {', '.join(CHECKS)}")
    chosen = [check for check in CHECKS.values() if names is None or check.name in names]
    seen = 0

    def tick(num_bytes: int) -> None:
        nonlocal seen
        seen += num_bytes
        if progress is not None:
            progress(seen, total)

    opened = open_cache(cache, tick)
    found = _Found(opened, cache)
    passes = sum(check.of_shard is not None for check in chosen) + any(check.of_row for check in chosen)
    total = passes * sum(Path(shard_path(opened.folder, shard)).stat().st_size for shard in found.shards())
    for check in chosen:
        if check.once is not None:
            found.add(check, lambda check=check: check.once(opened))  # type: ignore[misc]
    for shard in found.shards():
        for check in chosen:
            if check.of_shard is not None:
                found.add(check, lambda check=check, shard=shard: check.of_shard(opened, shard))  # type: ignore[misc]
        _look_at_rows(found, [check for check in chosen if check.of_row is not None], shard)
    return {check.name: found.verdict(check) for check in chosen}


def _look_at_rows(found: _Found, checks: list[Check], shard: int) -> None:
    """Make the checks of each sample in one go over the shard, so that it is read once."""
    cache, tables = found.cache, {}
    if checks:
        try:
            tables = tables_of(cache, shard)
        except (CacheError, OSError) as error:
            for check in checks:
                found.add(check, lambda said=str(error): iter([said]))  # type: ignore[misc]
    for number in range(len(next(iter(tables.values()), ()))):
        row = cache.row(shard, number, tables)
        for check in checks:
            place = shard * cache.shard_size + number
            found.add(check, lambda check=check, place=place, row=row: check.of_row(cache, place, row))  # type: ignore[misc]
        cache.tick(cache.layout.row_bytes)


class _Found:
    """The problems of each check, up to so many that nobody would read on, and why a check was not made."""

    def __init__(self, cache: Opened, shown: Path) -> None:
        self.cache, self._shown = cache, shown
        self._problems: dict[str, list[str]] = {}
        self._notes: dict[str, str] = {}

    def shards(self) -> list[int]:
        try:
            return self.cache.shards
        except CacheError:  # `complete` tells
            return []

    def add(self, check: Check, find: Callable[[], Iterator[str]]) -> None:
        problems = self._problems.setdefault(check.name, [])
        if len(problems) > _MAX_PROBLEMS or check.name in self._notes:
            return
        try:
            for problem in islice(find(), _MAX_PROBLEMS + 1 - len(problems)):
                problems.append(problem)
        except NotChecked as error:
            self._notes[check.name] = str(error)
        except (CacheError, OSError) as error:  # both name the file
            problems.append(str(error))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            problems.append(f"{self.cache.folder}: not as docs/formats.md describes it ({error!r}). {_AGAIN}")

    def verdict(self, check: Check) -> Verdict:
        problems = self._problems.get(check.name, [])
        said = list(dict.fromkeys(problem.replace(str(self.cache.folder), str(self._shown)) for problem in problems))
        more = ["... and more"] if len(problems) > _MAX_PROBLEMS else []
        return Verdict(said[:_MAX_PROBLEMS] + more, self._notes.get(check.name))


# --- the checks -------------------------------------------------------------------------------------------------------


def _complete(cache: Opened) -> Iterator[str]:
    folder, layout = cache.folder, cache.layout
    if cache.is_planned and not (folder / META_NAME).is_file():
        yield f"{folder / META_NAME}: no such file: production has not finished. Go on with it: precompute --resume"
    wanted, found = -(-cache.num_samples // cache.shard_size), sorted(existing_shard_indices(folder))
    if found != list(range(wanted)):
        lacking = sorted(set(range(wanted)) - set(found))
        yield (
            f"{folder}: declares {cache.num_samples} samples ({wanted} shards) but found {len(found)} shard files"
            + (f"; missing: {_some(lacking)}" if lacking else "")
            + (f"; beyond them: {_some(extra)}" if (extra := sorted(set(found) - set(range(wanted)))) else "")
        )
    for shard in cache.shards:
        yield from _wrong_form(cache, shard)
    selected = cache.manifest.get("selected_token_ids")
    ids = selected if isinstance(selected, list) else []
    if len(ids) != layout.draft_vocab_size or len(set(ids)) != len(ids):
        yield (
            f"{folder / MANIFEST_NAME}: {len(set(ids)):,} different selected_token_ids, expected as many as "
            f"draft_vocab_size, {layout.draft_vocab_size:,}"
        )
    yield from _wrong_embeddings(cache)


def _wrong_form(cache: Opened, shard: int) -> Iterator[str]:
    path = shard_path(cache.folder, shard)
    try:
        fields, rows, _ = read_header(path)
    except CacheError as error:
        yield str(error)
        return
    if rows != cache.rows_of(shard):
        yield f"{path}: {rows} samples, expected {cache.rows_of(shard)} of the manifest's {cache.num_samples}. {_AGAIN}"
    for name, form in {**fields, **cache.layout.fields}.items():
        if fields.get(name) != (wanted := cache.layout.fields.get(name)):
            yield f"{path}: {name} is {_shown(fields.get(name))}, expected {_shown(wanted)} by {MANIFEST_NAME}. {_AGAIN}"
        assert form


def _wrong_embeddings(cache: Opened) -> Iterator[str]:
    path = cache.folder / EMBEDDINGS_NAME
    fields, rows, _ = read_header(path)
    wanted = (torch.float32, (cache.layout.aux_hidden_dim // 3,))
    if fields != {"weight": wanted} or rows != cache.manifest.get("target_vocab_size"):
        yield (
            f"{path}: {', '.join(f'{name} {_shown(form)}' for name, form in fields.items())} of {rows:,} rows, expected "
            f"weight {_shown(wanted)} of {cache.manifest.get('target_vocab_size')} rows"
        )
