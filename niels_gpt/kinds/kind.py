"""Define Cache, named files and a meta.json that names them all; Kind, how to read one; and the table of kinds.

Each kind stands in the package of its readers. The table names modules, which are loaded at first use: a missing
package takes its kind along, and all others work. Another package adds a kind by an entry point of the group
`niels_gpt.kinds`, which gives the kind's name and the place of a `Kind`:

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
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from niels_gpt.cache.formats import check_partitions
from niels_gpt.cache.meta import check_listed, read_meta
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
from niels_gpt.storage.mounted import shown
from niels_gpt.storage.remedies import PROGRAM
from niels_gpt.work import Progress

if TYPE_CHECKING:  # the engine is loaded by what looks at units
    from niels_gpt.display.sketch import Distributions
    from niels_gpt.engine.units import Looks
    from niels_gpt.tokenizers.protocol import FullTokenizer

OURS = {
    "tokenizer": "niels_gpt.tokenizers.kind:TOKENIZER",
    "pretrain": "niels_gpt.cache.kind.tokens:PRETRAIN",
    "sft": "niels_gpt.cache.kind.tokens:SFT",
    "rollouts": "niels_gpt.prefix_tree.rollouts.kind:ROLLOUTS",
    "draft_vocab": "niels_gpt.eagle3.draft_kind:DRAFT_VOCAB",
    "eagle3": "niels_gpt.eagle3.kind:EAGLE3",
}
"""Kinds of this project: name -> place, as module:name."""
_CRC_KEY = "meta_crc32"
GROUP = "niels_gpt.kinds"
"""Group of entry points by which other packages add kinds."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""Exceptions that a malformed meta.json causes in code that trusts it."""

Rows = list[tuple[str, str]]
"""Pairs of a name and a text, for a table."""
Columns = tuple[tuple[str, str, str], ...]
"""Name, dtype and shape, and meaning of each value that a reader gives."""


@dataclass(frozen=True)
class Limits:
    """Choices of the caller of checks."""

    deep: bool = False
    """Compare the sha256 of every file too, which reads them all."""
    max_dropped_share: float = 0.05
    """Largest share of dropped documents, 0 to 1, that is no problem."""


Finding = Damage | CacheError | OSError
Rule = Callable[[FileChecks, Limits, Figures], Iterator[Finding]]
"""Yields problems, and says what it measured. It may raise on a damaged file or malformed meta.json; the error is one
more finding."""


class Held(NamedTuple):
    """What a cache holds: the numbers in the last line of a build, `list`, `stats` and Dagster."""

    counts: dict[str, dict[str, int]]
    """Things in the singular, outermost first -> split -> number; split "" for a cache of one piece."""
    note: str = ""
    """Text after the numbers, such as "98.2% of the supervised tokens"."""
    loss: int | None = None
    """Tokens with loss; None if unknown or all."""

    def total(self, thing: str) -> int:
        """Return the number of a thing in all splits; 0 if it is not counted."""
        return sum(self.counts.get(thing, {}).values())


class Sealed(NamedTuple):
    """Result of the seal of a folder."""

    text: str
    """A line for people."""
    data: dict[str, Any]
    """The same, ready for JSON."""
    next: str
    """Next command to run."""


@dataclass(frozen=True)
class Page:
    """Page of an asset in Dagster, the same for every cache of a kind."""

    reader: str = ""
    """Lines of Python with {path} within double quotes, and {T}."""
    icons: frozenset[str] = frozenset()
    """Names of icons that Dagster has."""
    look: str = "show"
    """Command of `niels-gpt` that prints the content."""
    columns: Columns = ()


_BY_NAME = (
    "cd FOLDER && find . -type f ! -name meta.json ! -name README.md ! -path './.*' -printf '%P\\n' "
    "| LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"
)


@dataclass(frozen=True)
class Card:
    """Card of a cache, README.md of a repository on the hub. The printer escapes the values."""

    what: str
    """Beginning of a sentence that says what the cache is."""
    reader: Callable[[Mapping[str, Any]], Iterator[str]]
    """Yields lines of Python that open the cache in FOLDER, by its meta.json."""
    figures: Callable[[Mapping[str, Any]], Iterator[tuple[str, str]]] | None = None
    """Yields name and text of each number of a cache without splits."""
    check: str = _BY_NAME
    """Command that checks the files in FOLDER."""
    checked: str = "prints its content_sha256,"
    """What the command does with good files; the card ends the sentence with the content_sha256."""


CHECK_RECORDS = (
    'cd FOLDER && python3 -c \'import json; [print(file["sha256"], "", file["name"]) '
    'for file in json.load(open("meta.json"))["files"]]\' | sha256sum --check --quiet'
)
"""The `check` of a kind whose content_sha256 does not come from the sha256 of every file."""
CHECKED_RECORDS = "prints nothing where every file has the sha256 that meta.json records. Its content_sha256 is"


class Kind:
    """Everything that one kind knows of its caches. No other code asks for the kind of a cache.

    An operation that a kind leaves out raises CacheError E208, which names the kinds that have it.
    """

    name: ClassVar[str]
    """`kind` in meta.json."""
    unit: ClassVar[str] = ""
    """Name of one item, which `show --at N` counts: "document", "example", "group", "sample"; "" for none."""
    keys: ClassVar[tuple[str, ...]] = ()
    """Keys of its caches; an entry with / at the end stands for all keys in that folder."""
    families: ClassVar[Mapping[str, str]] = {}
    """First part of a key -> place (module:name) of a Family of recipes/, which builds its caches."""
    checks: Sequence[Check] = ()
    """Named checks with their rules, blocking ones first; checks without a rule are made by `verdicts`."""
    outside_checks: ClassVar[Mapping[str, str]] = {}
    """Checks that need more than the cache: name -> place (module:name) of a function of the settings."""
    built_whole: ClassVar[tuple[str, ...]] = ()
    """Entries of `keys` whose caches are built whole all the same."""
    builds_alone = False
    """Whether only one build runs at a time, because each encodes a large corpus on all cores."""
    builder_version: ClassVar[int] = 0
    """Version that builds write now, for `doctor`; 0: older caches need no care."""
    is_small = False
    """Whether every look hashes all files."""
    may_lack_vocabulary = False
    """Whether `vocab_size` may be null, for ids of an unknown tokenizer."""
    counted = "documents"
    """What the progress of a build counts, besides tokens."""
    shown = 200
    """Default number of tokens that `show` prints."""
    needs_tokenizer = False
    """Whether `show` needs the tokenizer of the ids."""
    formats: ClassVar[frozenset[str]] = frozenset()
    """Names of the export formats that can hold a cache."""
    has_loss = False
    """Whether a cache records which tokens carry loss."""
    has_parts = False
    """Whether whole shards of a cache are a cache too, so that a part can be staged."""
    why_not: ClassVar[Mapping[str, str]] = {}
    """Name of a method that the kind leaves out -> a sentence that says why."""
    page = Page()
    card: Card | None = None
    least_share = LEAST_SHARE
    """Least share of a file that must be on the disk: see `refuse_holes`."""

    @property
    def units(self) -> Looks[Any] | None:
        """How to examine partitions of its caches, and join them if each is a cache; None: built whole."""
        return None

    # --- is it one, and is it good ---

    def recognizes(self, folder: Path) -> bool:
        """Return whether a folder without meta.json is a cache of this kind, written by another tool."""
        return False

    def has_unsealed(self, folder: Path) -> bool:
        """Return whether a folder holds units of this kind that `seal` can finish."""
        return False

    def unfinished(self, folder: Path) -> str:
        """Return how far an unfinished build in this folder is, and the command that continues it; "" for none."""
        return ""

    def seal(self, folder: Path, progress: Progress | None = None) -> Sealed:
        """Check the units in a folder and write its meta.json. Leaves a sealed folder unchanged.

        Raises: CacheError for missing or damaged units.
        """
        raise self.lacks("seal")

    def content_sha256(self, records: Sequence[Record]) -> str:
        """Return the identity of a cache's content, from the records of its files."""
        return content_sha256(records)

    def unnamed(self, meta: Mapping[str, Any], names: Collection[str]) -> str:
        """Return how to add files that an earlier build left out of meta.json; "" if it names all.

        names: files that it names.
        """
        return ""

    def remedy(self, path: Path) -> str:
        """Return a sentence: what to do about a damaged cache at a path."""
        return REBUILD

    def is_opened_whole(self, name: str) -> bool:
        """Return whether a look at a cache at a URL needs this file, because its code does not let it arrive first."""
        return self.is_small

    def lock_of(self, folder: Path) -> Path | None:
        """Return the lock of a folder that is written in place, not as a version; None without one."""
        return None

    def refuse(self, cache: Cache, *, models: bool) -> None:
        """Open a cache as its readers do. Raises: the error of the reader.

        models: open the model of a tokenizer too, which loads its library.
        """
        raise self.lacks("readers")

    def wrong_sums(self, cache: Cache) -> Iterator[tuple[str, str]]:
        """Yield contradictions within meta.json: a key, and the problem."""
        return iter(())

    def headers(self, files: FileChecks) -> Iterator[Damage]:
        """Yield readable files with a wrong header."""
        return iter(())

    def contents(self, files: FileChecks) -> Iterator[Damage]:
        """Read every readable file, compare its sha256, and scan its content."""
        return files.sha256_damages()

    def last_look(self, files: FileChecks, limits: Limits) -> Iterator[Finding]:
        """Yield damage that shows only after all files were found sound."""
        return iter(())

    def verdicts(
        self, cache: Cache, names: Collection[str], limits: Limits, progress: Progress | None = None
    ) -> dict[str, Verdict] | None:
        """Make all checks without a rule in one pass; None: each check has its rule."""
        return None

    def checks_of_build(self, *, reused: bool, deep: bool) -> list[str]:
        """Return the names of the checks that a build makes at its end.

        reused: nothing was built. deep: read every file.
        """
        return [check.name for check in self.checks if check.name not in self.outside_checks]

    # --- contents ---

    def held(self, meta: Mapping[str, Any]) -> Held:
        """Return what a cache holds, by its meta.json."""
        return Held({})

    def stats(self, cache: Cache, progress: Progress | None = None) -> Rows:
        """Return contents, source and licence of a cache, as pairs of a name and a text."""
        raise self.lacks("stats", cache)

    def stats_data(self, cache: Cache, progress: Progress | None = None) -> dict[str, Any]:
        """Return contents, source and licence of a cache, ready for JSON."""
        raise self.lacks("stats_data", cache)

    def show(
        self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, at: int, tokens: int, color: bool
    ) -> str:
        """Return a piece of a cache as text with a heading.

        tokenizer: of the ids; None: print ids. at: number of a `unit`. tokens: most tokens to print.
        """
        raise self.lacks("show", cache)

    def show_data(
        self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, at: int, tokens: int | None
    ) -> dict[str, Any]:
        """Return the content of `show`, ready for JSON."""
        raise self.lacks("show_data", cache)

    def locate(self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, position: int, tokens: int) -> str:
        """Return the text around a token of a split, and its origin."""
        raise self.lacks("locate", cache)

    def locate_data(
        self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, position: int, tokens: int | None
    ) -> dict[str, Any]:
        """Return the content of `locate`, ready for JSON."""
        raise self.lacks("locate_data", cache)

    def sizes(self, cache: Cache) -> dict[str, int]:
        """Return how many items `digests` yields for each split; {} if only settings can be compared."""
        return {}

    def digests(self, cache: Cache, split: str) -> Iterator[bytes]:
        """Yield 16 bytes for each item of a split, equal for equal ids, for `diff`."""
        return iter(())

    def source_ids(self, cache: Cache, split: str) -> Iterator[bytes] | None:
        """Yield the source id of each item of a split; None if none are recorded."""
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
        """Return three evenly spaced items of each split, for Dagster's page."""
        counts = self.held(cache.meta).counts.get(self.unit, {})
        return [
            (split, number)
            for split, count in counts.items()
            for number in sorted({0, (count - 1) // 2, count - 1})
            if count
        ]

    def plot(self, cache: Cache, name: str) -> bytes:
        """Return a PNG of a cache, about 10 kB. name: of the cache, for the title."""
        raise self.lacks("plot", cache)

    def distributions(self, cache: Cache) -> Distributions:
        """Return values of the items to sketch on Dagster's page; {} for none."""
        return {}

    def more_results(self, cache: Cache) -> dict[str, Any]:
        """Return numbers and texts that a record of a build has beside meta.json, by name."""
        return {}

    # --- what it lacks ---

    def has(self, name: str) -> bool:
        """Return whether this kind overrides a method of Kind."""
        return getattr(type(self), name) is not getattr(Kind, name)

    def lacks(self, name: str, cache: Cache | None = None) -> CacheError:
        """Return CacheError E208 for an operation that this kind lacks; it names the kinds that have it."""
        where = META_NAME if cache is None else cache.path / META_NAME
        having = [kind.name for kind in kinds() if kind.has(name)]
        expected = " or ".join(having)
        return CacheError(where, f"kind is {shortened(self.name)}", expected, self.why_not.get(name, ""), code="E208")


# --- the table --------------------------------------------------------------------------------------------------------


@functools.cache
def _of_others() -> dict[str, Callable[[], Any]]:
    """Return the loader of each kind of other packages, by name. The names of ours are not replaced."""
    from importlib.metadata import entry_points  # takes longer than all of our kinds

    return {point.name: point.load for point in entry_points(group=GROUP) if point.name not in OURS}


def kind_names() -> list[str]:
    """Return the names of all kinds, ours first. Loads none."""
    return [*OURS, *_of_others()]


def kind_named(name: object) -> Kind | None:
    """Return a kind by the `kind` of a meta.json; None for an unknown name, or if its package is not installed.

    Raises: TypeError if an entry point gives anything but a Kind of this name.
    """
    if not isinstance(name, str) or not (name in OURS or name in _of_others()):
        return None
    try:
        kind = loaded(OURS[name]) if name in OURS else _of_others()[name]()
    except ImportError:
        return None
    if not isinstance(kind, Kind) or kind.name != name:
        raise TypeError(f"the entry point {name!r} of {GROUP} is {kind!r}, expected a Kind of this name")
    return kind


def kinds() -> Iterator[Kind]:
    """Yield all kinds whose packages are installed, ours first; each is loaded when it is asked for."""
    yield from filter(None, map(kind_named, OURS))
    yield from filter(None, map(kind_named, _of_others()))


def kind_of_key(key: str) -> Kind | None:
    """Return the kind of the caches at a key, such as sft/oasst1; None for a key of no kind."""
    return next((kind for kind in kinds() if any(_matches(key, known) for known in kind.keys)), None)


def units_of_key(key: str) -> Looks[Any] | None:
    """Return how to examine and join partitions of the caches at a key; None if they are built whole."""
    kind = kind_of_key(key)
    return None if kind is None or any(_matches(key, known) for known in kind.built_whole) else kind.units


def has_partitions(key: str) -> bool:
    """Return whether the caches at a key can be built in partitions."""
    return units_of_key(key) is not None


def look_command(key: str, folder: object) -> str:
    """Return the command that prints the content of a cache. key, folder: of the cache."""
    return f"{PROGRAM} {(kind_of_key(key) or Kind).page.look} {shlex.quote(str(folder))}"


def builds_alone(key: str) -> bool:
    """Return whether only one build of the caches at a key, and of others like them, runs at a time."""
    kind = kind_of_key(key)
    return kind is not None and kind.builds_alone


def _matches(key: str, known: str) -> bool:
    return key.startswith(known) if known.endswith("/") else key == known


# --- a cache of any kind ----------------------------------------------------------------------------------------------


class MetaDamage(Exception):
    """The reason why a meta.json cannot be trusted; no file can be judged by it. `damage` has its bytes."""

    def __init__(self, problem: str, offset: int = 0, end: int = 0) -> None:
        super().__init__(problem)
        self.damage = Damage(META_NAME, offset, end, problem)


class Cache:
    """One version of a cache of any kind: named files and a meta.json that names them all.

    gc keeps the version while this object lives.
    """

    def __init__(
        self, path: Path, folder: Path, meta: dict[str, Any], kind: Kind, hold: VersionHold | None = None
    ) -> None:
        """path: as the caller named it. folder: of the version, resolved once. meta: its meta.json. hold: of the
        folder, if taken before meta.json was read."""
        self.path, self.folder, self.meta, self.kind = path, folder, meta, kind
        self._hold = hold_version(folder) if hold is None else hold

    @classmethod
    def named(cls, path: str | os.PathLike[str]) -> Cache:
        """Resolve a cache once, read its meta.json and find its kind. Checks no other key.

        Raises: FileNotFoundError without a meta.json; CacheError E202 for a damaged one, E208 for an unknown kind.
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
        """Open a cache like `named`, and check the keys that every command needs.

        Checks the records of files, and `partitions`, `built`, `totals` and `vocab_size` if they are there. Use other
        keys inside `errors`.
        Raises: CacheError E202 for a damaged meta.json or a wrong value, E204 without a meta.json, E208 for an unknown
            kind.
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
        """Read the meta.json of a version for `verify`. Only compares its bytes with its CRC-32.

        Raises: MetaDamage if it cannot be trusted.
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
        """Record (name, bytes, sha256) of every file. Raises: CacheError E202 for a malformed one."""
        return file_records(self.meta, str(self.path / META_NAME))

    @property
    def shown(self) -> str:
        """Its path for messages: of a cache at a URL, the URL."""
        return shown(self.path)

    @property
    def is_stub(self) -> bool:
        """Whether nothing was built, because nobody asked for the source."""
        return self.meta.get("built") is False

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn exceptions that a malformed meta.json causes in the block into CacheError E202, which names it."""
        try:
            yield
        except (CacheError, PositionError):
            raise
        except MALFORMED as error:
            problem, remedy = f"not as docs/formats.md describes it ({error!r})", f"Look at it: {self.verify_command}"
            raise CacheError(self.path / META_NAME, problem, remedy=remedy, code="E202") from error

    @property
    def verify_command(self) -> str:
        """Command that names every damage of this cache."""
        return f"{PROGRAM} verify {self.shown}"


def unknown_kind(meta: dict[str, Any]) -> tuple[str, str]:
    """Return found and expected, for the error of an unknown kind or a missing package."""
    name = meta.get("kind")
    what = " of a package that is not installed" if name in kind_names() else ""
    return f"kind is {shortened(name)}{what}", f"one of {', '.join(kind_names())}"


def _byte_of(error: BaseException | None, raw: bytes) -> int:
    """Return the byte where the parser stopped."""
    if isinstance(error, UnicodeDecodeError):
        return error.start
    return len(raw.decode()[: error.pos].encode()) if isinstance(error, JSONDecodeError) else 0


def _has_damaged_crc_key(meta: dict[str, Any]) -> bool:
    """Return whether a key differs from `meta_crc32` in one character."""
    keys = (key for key in meta if len(key) == len(_CRC_KEY))
    return any(sum(a != b for a, b in zip(key, _CRC_KEY, strict=True)) == 1 for key in keys)
