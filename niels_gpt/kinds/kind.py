"""Cache: named files and a meta.json that names them all. Kind: how to read them. The table of kinds.

A kind stands in the package of its readers. The table names modules, which are loaded at first use: a package that is
not there takes its kind along, and all the others work. A package of somebody else adds a kind by an entry point of the
group `niels_gpt.kinds`, whose name is the kind and whose value is the place of a `Kind`:

    [project.entry-points."niels_gpt.kinds"]
    images = "my_package.images:IMAGES"

The `kind` in a meta.json is the name in this table.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from json import JSONDecodeError
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from niels_gpt.cache.formats import check_partitions
from niels_gpt.cache.meta import check_listed, read_meta
from niels_gpt.engine.units import Looks
from niels_gpt.kinds.files import Damage, FileChecks, Record
from niels_gpt.kinds.homes import loaded
from niels_gpt.storage.checks import Check, Figures, Verdict
from niels_gpt.storage.errors import REBUILD, CacheError, PositionError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.locks import VersionHold, hold_version
from niels_gpt.storage.meta_json import (
    LEAST_SHARE,
    checked_count,
    content_sha256,
    file_records,
    meta_crc32,
    parse_object,
    read_regular,
    resolved,
    shortened,
)
from niels_gpt.storage.remedies import PROGRAM
from niels_gpt.tokenizers.protocol import FullTokenizer
from niels_gpt.work import Progress

OURS = {
    "tokenizer": "niels_gpt.tokenizers.kind:TOKENIZER",
    "pretrain": "niels_gpt.cache.kind.tokens:PRETRAIN",
    "sft": "niels_gpt.cache.kind.tokens:SFT",
    "rollouts": "niels_gpt.prefix_tree.rollouts.kind:ROLLOUTS",
    "draft_vocab": "niels_gpt.eagle3.draft_kind:DRAFT_VOCAB",
    "eagle3": "niels_gpt.eagle3.kind:EAGLE3",
}
"""The kinds of this project: the place of each, as module:name."""
_CRC_KEY = "meta_crc32"
GROUP = "niels_gpt.kinds"
"""The group of entry points by which other packages add kinds."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""What a malformed meta.json makes of code that trusts it."""

Rows = list[tuple[str, str]]
"""Pairs of a name and a text, for a table."""
Columns = tuple[tuple[str, str, str], ...]
"""Of each thing that a reader gives: its name, its dtype and shape, and what it is."""


@dataclass(frozen=True)
class Limits:
    """What the caller of checks may choose."""

    deep: bool = False
    """Compare the sha256 of every file too, which reads them all."""
    max_dropped_share: float = 0.05
    """Of the documents or examples read, 0 to 1; a larger share is a problem."""


Finding = Damage | CacheError | OSError
Rule = Callable[[FileChecks, Limits, Figures], Iterator[Finding]]
"""Yields what is wrong, and says what it measured. It may raise on a damaged file or a malformed meta.json: that is one
more finding."""


class Held(NamedTuple):
    """What a cache holds: one set of numbers for the last line of a build, `list`, `stats` and Dagster."""

    counts: dict[str, dict[str, int]]
    """By thing, in the singular, outermost first; then by split, "" in a cache of one piece."""
    note: str = ""
    """What is said behind the numbers, such as "98.2% of the supervised tokens"."""
    loss: int | None = None
    """Tokens with loss; None: not known, or all of them."""

    def total(self, thing: str) -> int:
        """Return the number of a thing in all splits; 0 where it is not counted."""
        return sum(self.counts.get(thing, {}).values())


class Sealed(NamedTuple):
    """What the seal of a folder says."""

    text: str
    """A line for people."""
    data: dict[str, Any]
    """The same, ready for JSON."""
    next: str
    """The command that comes next."""


@dataclass(frozen=True)
class Page:
    """What an asset's page in Dagster says of every cache of a kind."""

    reader: str = ""
    """Lines of Python with {path} within double quotes, and {T}."""
    icons: frozenset[str] = frozenset()
    """Of those that Dagster has an icon for."""
    look: str = "show"
    """The command of `niels-gpt` that prints the content."""
    columns: Columns = ()


_BY_NAME = (
    "cd FOLDER && find . -type f ! -name meta.json ! -name README.md ! -path './.*' -printf '%P\\n' "
    "| LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"
)


@dataclass(frozen=True)
class Card:
    """What the card of a cache says, README.md of a repository of the hub. The printer of a value escapes it."""

    what: str
    """What a cache is, as the beginning of a sentence."""
    reader: Callable[[Mapping[str, Any]], Iterator[str]]
    """Lines of Python that open the cache in FOLDER, by its meta.json."""
    figures: Callable[[Mapping[str, Any]], Iterator[tuple[str, str]]] | None = None
    """Name and text of each number of a cache without splits."""
    check: str = _BY_NAME
    """The command that checks the files in FOLDER."""
    checked: str = "prints its content_sha256,"
    """What that command does with good files: the card ends the sentence with the content_sha256."""


CHECK_RECORDS = (
    'cd FOLDER && python3 -c \'import json; [print(file["sha256"], "", file["name"]) '
    'for file in json.load(open("meta.json"))["files"]]\' | sha256sum --check --quiet'
)
"""The `check` of a kind whose content_sha256 is not made of the sha256 of every file."""
CHECKED_RECORDS = "prints nothing where every file has the sha256 that meta.json records. Its content_sha256 is"


class Kind:
    """What one kind says of its caches. Nobody else asks which kind a cache is of.

    A method that a kind leaves out is refused with E208, which names the kinds that have it.
    """

    name: ClassVar[str]
    """`kind` in meta.json."""
    unit: ClassVar[str] = ""
    """What `show --at N` counts and Dagster calls a row: "document", "example", "group", "sample"; "": nothing."""
    keys: ClassVar[tuple[str, ...]] = ()
    """Where its caches lie: a key, or with / at the end the folder of its caches."""
    families: ClassVar[Mapping[str, str]] = {}
    """How its caches are built: by the first part of their keys, the place (module:name) of a Family of recipes/."""
    checks: Sequence[Check] = ()
    """The named checks, blocking ones first, each with its rule; without rules, the names of `verdicts`."""
    outside_checks: ClassVar[Mapping[str, str]] = {}
    """Checks that need more than the cache: by name, the place (module:name) of a function of the settings."""
    units: ClassVar[Looks[Any] | None] = None
    """How partitions of its caches are looked at, and joined where each is a cache; None: it is built whole."""
    built_whole: ClassVar[tuple[str, ...]] = ()
    """Of `keys`, those whose caches are built whole all the same."""
    builds_alone = False
    """Whether one build of it runs at a time, since each encodes a large corpus on all cores."""
    builder_version: ClassVar[int] = 0
    """The version that builds write now, for `doctor`; 0: an older cache needs no care."""
    is_small = False
    """Whether all files are hashed at every look."""
    may_lack_vocabulary = False
    """Whether `vocab_size` may be null: the tokenizer of the ids is not known."""
    counted = "documents"
    """What progress of a build counts first; then come tokens."""
    shown = 200
    """How many tokens `show` prints where nobody says how many."""
    needs_tokenizer = False
    """Whether `show` needs the tokenizer of the ids."""
    formats: ClassVar[frozenset[str]] = frozenset()
    """Names of the formats of other tools that can hold one."""
    has_loss = False
    """Whether a cache says which of its tokens carry loss."""
    has_parts = False
    """Whether whole shards of a cache are one too, so that a part can be staged."""
    why_not: ClassVar[Mapping[str, str]] = {}
    """By the name of a method that the kind leaves out, why it cannot have it: a sentence."""
    page = Page()
    card: Card | None = None
    least_share = LEAST_SHARE
    """A file is refused if less than this share of it is on the disk: as `refuse_holes`."""

    # --- is it one, and is it good ---

    def recognizes(self, folder: Path) -> bool:
        """Whether a folder without a meta.json is a cache of this kind, as another tool writes it."""
        return False

    def has_unsealed(self, folder: Path) -> bool:
        """Whether a folder holds units of this kind that were built in place, and that `seal` is to finish."""
        return False

    def seal(self, folder: Path, progress: Progress | None = None) -> Sealed:
        """Check the units in a folder and write its meta.json; one that was sealed before is left as it is.

        Raises: CacheError for units that are missing or damaged.
        """
        raise self.lacks("seal")

    def content_sha256(self, records: Sequence[Record]) -> str:
        """Return the identity of a cache's content by the records of its files."""
        return content_sha256(records)

    def unnamed(self, meta: Mapping[str, Any], names: Collection[str]) -> str:
        """Return how to add the files that an earlier build left out of a meta.json; "" where it names all.

        names: of the files that it names.
        """
        return ""

    def remedy(self, path: Path) -> str:
        """Return what to do about a damaged cache at a path, a sentence."""
        return REBUILD

    def lock_of(self, folder: Path) -> Path | None:
        """Return where a folder that is written in place, not in a version, has its lock; None: none is."""
        return None

    def refuse(self, cache: Cache, *, models: bool) -> None:
        """Open a cache as its readers do. Raises: what they raise.

        models: open a tokenizer's model too, which loads its library.
        """
        raise self.lacks("readers")

    def wrong_sums(self, cache: Cache) -> Iterator[tuple[str, str]]:
        """Yield contradictions within meta.json: a key, and the problem."""
        return iter(())

    def headers(self, files: FileChecks) -> Iterator[Damage]:
        """Yield readable files that do not begin as their format does."""
        return iter(())

    def contents(self, files: FileChecks) -> Iterator[Damage]:
        """Read every readable file, compare its sha256, and look at what it holds."""
        return files.sha256_damages()

    def last_look(self, files: FileChecks, limits: Limits) -> Iterator[Finding]:
        """Yield damage found after all files were found sound."""
        return iter(())

    def verdicts(
        self, cache: Cache, names: Collection[str], limits: Limits, progress: Progress | None = None
    ) -> dict[str, Verdict] | None:
        """Make the checks without a rule, in one pass; None: each check has its rule."""
        return None

    def checks_of_build(self, *, reused: bool, deep: bool) -> list[str]:
        """Return the names of the checks that a build makes at its end.

        reused: nothing was built. deep: every file is to be read.
        """
        return [check.name for check in self.checks if check.name not in self.outside_checks]

    # --- contents ---

    def held(self, meta: Mapping[str, Any]) -> Held:
        """Return what a cache holds, by its meta.json."""
        return Held({})

    def stats(self, cache: Cache, progress: Progress | None = None) -> Rows:
        """Return what a cache holds, and its source and licence, for people."""
        raise self.lacks("stats", cache)

    def stats_data(self, cache: Cache, progress: Progress | None = None) -> dict[str, Any]:
        """Return what a cache holds, ready for JSON."""
        raise self.lacks("stats_data", cache)

    def show(
        self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, at: int, tokens: int, color: bool
    ) -> str:
        """Return a piece of a cache as text with a heading.

        tokenizer: of the ids; None: ids are printed. at: number of a `unit`. tokens: the most that are printed.
        """
        raise self.lacks("show", cache)

    def show_data(
        self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, at: int, tokens: int | None
    ) -> dict[str, Any]:
        """Return what `show` prints, ready for JSON."""
        raise self.lacks("show_data", cache)

    def locate(self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, position: int, tokens: int) -> str:
        """Return the text around a token of a split, and where it came from."""
        raise self.lacks("locate", cache)

    def locate_data(
        self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, position: int, tokens: int | None
    ) -> dict[str, Any]:
        """Return what `locate` prints, ready for JSON."""
        raise self.lacks("locate_data", cache)

    def sizes(self, cache: Cache) -> dict[str, int]:
        """Return how many items of each split `digests` yields; {}: there is nothing to compare but settings."""
        return {}

    def digests(self, cache: Cache, split: str) -> Iterator[bytes]:
        """Yield 16 bytes for each item of a split, equal for equal ids, for `diff`."""
        return iter(())

    def source_ids(self, cache: Cache, split: str) -> Iterator[bytes] | None:
        """Yield the source id of each item of a split; None where none is recorded."""
        return None

    def rows(self, cache: Cache, split: str) -> Iterator[dict[str, Any]]:
        """Yield the items of a split as rows of a table, for a format whose rows are not documents.

        Values: str, int, float, None, or an array of int32, int8 or float32; equal names and types in every row.
        """
        raise self.lacks("rows", cache)

    def words(self, cache: Cache, tokenizer: Any, split: str, number: int) -> str | None:
        """Return the beginning of an item on one line; None without a tokenizer."""
        return None

    def places(self, cache: Cache) -> list[tuple[str, int]]:
        """Return some places of each split that `show` prints on Dagster's page: three items, evenly spaced."""
        counts = self.held(cache.meta).counts.get(self.unit, {})
        return [
            (split, number)
            for split, count in counts.items()
            for number in sorted({0, (count - 1) // 2, count - 1})
            if count
        ]

    def plot(self, cache: Cache, name: str) -> bytes:
        """Return a PNG of a cache, some 10 kB. name: of the cache, for the title."""
        raise self.lacks("plot", cache)

    def more_results(self, cache: Cache) -> dict[str, Any]:
        """Return what a record of a build has beside meta.json: numbers and texts by name."""
        return {}

    # --- what it lacks ---

    def has(self, name: str) -> bool:
        """Whether this kind has an operation: a method of Kind that it overrides."""
        return getattr(type(self), name) is not getattr(Kind, name)

    def lacks(self, name: str, cache: Cache | None = None) -> CacheError:
        """Return the error for an operation that this kind does not have; it names the kinds that have it."""
        where = META_NAME if cache is None else cache.path / META_NAME
        having = [kind.name for kind in kinds() if kind.has(name)]
        expected = " or ".join(having)
        return CacheError(where, f"kind is {shortened(self.name)}", expected, self.why_not.get(name, ""), code="E208")


# --- the table --------------------------------------------------------------------------------------------------------


@functools.cache
def _places() -> dict[str, Callable[[], Any]]:
    """Return what loads each kind, by its name."""
    found: dict[str, Callable[[], Any]] = {point.name: point.load for point in entry_points(group=GROUP)}
    ours = {name: functools.partial(loaded, place) for name, place in OURS.items()}
    return ours | found | ours  # ours first, and not replaced


def kind_names() -> list[str]:
    """Return the names of all kinds; nothing is loaded."""
    return list(_places())


def kind_named(name: object) -> Kind | None:
    """Return a kind by the `kind` of a meta.json; None if no kind has this name, or its package is not installed."""
    load = _places().get(name) if isinstance(name, str) else None
    if load is None:
        return None
    try:
        kind = load()
    except ImportError:
        return None
    if not isinstance(kind, Kind) or kind.name != name:
        raise TypeError(f"the entry point {name!r} of {GROUP} is {kind!r}, expected a Kind of this name")
    return kind


def kinds() -> list[Kind]:
    """Return all kinds whose packages are installed."""
    return [kind for name in kind_names() if (kind := kind_named(name)) is not None]


def kind_of_key(key: str) -> Kind | None:
    """Return the kind of the caches at a key, such as sft/oasst1; None for a key of no kind."""
    return next((kind for kind in kinds() if any(_matches(key, known) for known in kind.keys)), None)


def units_of_key(key: str) -> Looks[Any] | None:
    """Return how partitions of the caches at a key are looked at; None: they are built whole."""
    kind = kind_of_key(key)
    return None if kind is None or any(_matches(key, known) for known in kind.built_whole) else kind.units


def has_partitions(key: str) -> bool:
    """Whether the caches at a key may be built in partitions."""
    return units_of_key(key) is not None


def look_command(key: str, folder: object) -> str:
    """Return the command that prints what is in the cache of a key. folder: the cache's."""
    return f"{PROGRAM} {(kind_of_key(key) or Kind).page.look} {shlex.quote(str(folder))}"


def builds_alone(key: str) -> bool:
    """Whether one build of the caches at a key, and of others like them, runs at a time."""
    kind = kind_of_key(key)
    return kind is not None and kind.builds_alone


def _matches(key: str, known: str) -> bool:
    return key.startswith(known) if known.endswith("/") else key == known


# --- a cache of any kind ----------------------------------------------------------------------------------------------


class MetaDamage(Exception):
    """Why a meta.json cannot be trusted: then no file can be judged by it. `damage` has its bytes."""

    def __init__(self, problem: str, offset: int = 0, end: int = 0) -> None:
        super().__init__(problem)
        self.damage = Damage(META_NAME, offset, end, problem)


class Cache:
    """One version of a cache of any kind: named files and a meta.json that names them all.

    gc leaves the version during the lifetime of this object.
    """

    def __init__(
        self, path: Path, folder: Path, meta: dict[str, Any], kind: Kind, hold: VersionHold | None = None
    ) -> None:
        """path: as the caller named it; folder: the version's own, resolved once; meta: its meta.json.

        hold: of the folder, where it was taken before meta.json was read.
        """
        self.path, self.folder, self.meta, self.kind = path, folder, meta, kind
        self._hold = hold_version(folder) if hold is None else hold

    @classmethod
    def named(cls, path: str | os.PathLike[str]) -> Cache:
        """Resolve a cache once, read its meta.json and find its kind; other keys are not looked at.

        Raises: FileNotFoundError without a meta.json; CacheError if it is damaged or of an unknown kind.
        """
        path = Path(path)
        folder = resolved(path)
        hold = hold_version(folder)
        if not os.path.lexists(folder / META_NAME):
            kind = next((each for each in kinds() if each.recognizes(folder)), None)
            if kind is not None:
                return cls(path, folder, {"kind": kind.name}, kind, hold)
        meta = read_meta(str(folder / META_NAME))
        kind = kind_named(meta.get("kind"))
        if kind is None:
            raise CacheError(path / META_NAME, *unknown_kind(meta), code="E208")
        return cls(path, folder, meta, kind, hold)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Cache:
        """Return `named`, with the keys checked that every command needs.

        The records of files are checked, and `partitions`, `built`, `totals` and `vocab_size` where they are given;
        other keys are looked at inside `errors`.
        Raises: as `named`; CacheError E202 for a wrong value, E204 without a meta.json.
        """
        where = str(Path(path) / META_NAME)
        try:
            cache = cls.named(path)
        except FileNotFoundError:
            raise CacheError(where, "no such file", "the description of a cache", REBUILD, code="E204") from None
        meta = cache.meta
        check_partitions(meta, where)
        check_listed(meta, where)
        if not cache.kind.may_lack_vocabulary or meta.get("vocab_size") is not None:
            checked_count(meta.get("vocab_size", 0), "vocab_size", where)
        return cache

    @classmethod
    def trusted(cls, folder: Path) -> Cache:
        """Read the meta.json of a version for `verify`: its bytes are compared with its CRC-32, and nothing else.

        Raises: MetaDamage.
        """
        hold = hold_version(folder)
        try:
            raw = read_regular(folder / META_NAME)
        except FileNotFoundError:
            raise MetaDamage("no such file, expected the description of a cache") from None
        except CacheError as error:
            raise MetaDamage(error.problem) from error
        except OSError as error:
            raise MetaDamage(str(error)) from error
        try:
            meta = parse_object(raw)
        except ValueError as error:
            raise MetaDamage(str(error), _byte_of(error.__cause__, raw), len(raw)) from error
        stored, actual = meta_crc32(raw)
        # Older builders wrote neither a CRC-32 nor checksums.
        if stored != actual and (stored is not None or "checksums" in meta or _has_damaged_crc_key(meta)):
            what = f"no {_CRC_KEY}" if stored is None else f"another {_CRC_KEY} than its bytes have"
            raise MetaDamage(f"{what}, expected {actual:08x}; the other files were not looked at", 0, len(raw))
        kind = kind_named(meta.get("kind"))
        if kind is None:
            found, expected = unknown_kind(meta)
            raise MetaDamage(f"not of a cache of this project: {found}, expected {expected}")
        return cls(folder, folder, meta, kind, hold)

    @functools.cached_property
    def records(self) -> list[Record]:
        """The record (name, bytes, sha256) of every file. Raises: CacheError E202."""
        return file_records(self.meta, str(self.path / META_NAME))

    @property
    def is_stub(self) -> bool:
        """Whether nothing was built: the source was not asked for."""
        return self.meta.get("built") is False

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what a malformed meta.json raises in the block into a CacheError that names it."""
        try:
            yield
        except (CacheError, PositionError):
            raise
        except MALFORMED as error:
            problem, remedy = f"not as docs/formats.md describes it ({error!r})", f"Look at it: {self.verify_command}"
            raise CacheError(self.path / META_NAME, problem, remedy=remedy, code="E202") from error

    @property
    def verify_command(self) -> str:
        """The command that names every damage of this cache."""
        return f"{PROGRAM} verify {self.path}"


def unknown_kind(meta: dict[str, Any]) -> tuple[str, str]:
    """Return what was found and expected, for the error of a kind that is none, or whose package is missing."""
    name = meta.get("kind")
    what = " of a package that is not installed" if name in kind_names() else ""
    return f"kind is {shortened(name)}{what}", f"one of {', '.join(kind_names())}"


def _byte_of(error: BaseException | None, raw: bytes) -> int:
    """Return the byte at which the parser stopped."""
    if isinstance(error, UnicodeDecodeError):
        return error.start
    return len(raw.decode()[: error.pos].encode()) if isinstance(error, JSONDecodeError) else 0


def _has_damaged_crc_key(meta: dict[str, Any]) -> bool:
    """Whether a key differs from `meta_crc32` in one character."""
    keys = (key for key in meta if len(key) == len(_CRC_KEY))
    return any(sum(a != b for a, b in zip(key, _CRC_KEY, strict=True)) == 1 for key in keys)
