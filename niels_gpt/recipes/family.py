"""Family: how the caches of one family are built, such as sft/NAME for any NAME. A kind holds the places of its own.

A family says what its caches are made of, what decides their bytes, and who writes them; everything else of a recipe is
the same for all (request.py). A kind of another package builds caches with a family of its own: see docs/kinds.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from niels_gpt.data.files.part import PARTITION_RULE
from niels_gpt.data.local import LocalFiles, open_files
from niels_gpt.data.spec import LoadRequest, Part, SourceSpec
from niels_gpt.kinds.homes import loaded
from niels_gpt.settings import Settings
from niels_gpt.work import Progress

if TYPE_CHECKING:  # with numpy, and the help of commands is to come at once
    from niels_gpt.documents import Partition
    from niels_gpt.engine.meta import Source
    from niels_gpt.tokenizers.protocol import FullTokenizer


class Job(NamedTuple):
    """What one call of a builder is to make."""

    path: Path
    """Public folder of the cache, or of one of its partitions."""
    source: Source
    """What meta.json says of the source; its counters fill, and its position moves, while it is read."""
    committed: Callable[[dict[str, Any]], None]
    """Called with the meta of the cache when it is committed: records which recipe built it."""
    progress: Progress | None = None
    """Receives documents (chats, groups), tokens, and the tokens of both budgets (None without budgets)."""
    partition: Partition | None = None
    """Which one is built; None: the whole cache."""
    plan: str | None = None
    """The sha256 of the partition's plan."""


class Family:
    """What one family says of its caches."""

    name: ClassVar[str]
    """The first part of the keys, and the table of sources.toml that defines sources of it."""
    kind: ClassVar[str]
    """`kind` in the meta.json of its caches."""
    title: ClassVar[str] = "Cache"
    """What one of its caches is called on its page in Dagster."""
    holds: ClassVar[str] = "files"
    """What a source of it holds: "text", "chats"."""
    own_settings: ClassVar[tuple[str, ...]] = ()
    """The settings that decide the bytes of the cache of a user-defined source, beside those common to the family."""
    of_users: ClassVar[bool] = True
    """Whether users may define sources of it."""
    own_val_frac: ClassVar[str | None] = None
    """The setting that holds the share of val of a user-defined source, where the source's row is to name one."""
    own_field: ClassVar[bool] = False
    """Whether a user-defined source may name the field of a row that holds its text."""
    takes_tokenizer: ClassVar[bool] = False
    """Whether its caches are encoded here; else ids are stored as they are, or there are none."""
    has_text: ClassVar[bool] = False
    """Whether a tokenizer can be trained on its sources."""
    partition_rule: ClassVar[str] = PARTITION_RULE
    """Which files and rows of a user-defined source a partition reads, in words."""
    id_copies: ClassVar[int] = 0
    """How often the ids of a cache are on the disk in a build, for the least that it needs; 0: nothing bounds it."""

    @property
    def has_partitions(self) -> bool:
        """Whether its caches may be built in partitions: the kind says how those are joined."""
        from niels_gpt.kinds.kind import has_partitions

        return has_partitions(f"{self.name}/")

    @property
    def builder_version(self) -> int:
        """The version that its builds write: part of every fingerprint."""
        from niels_gpt.engine.meta import BUILDER_VERSIONS

        return BUILDER_VERSIONS[self.kind]

    # --- reading ---

    def files(self, pattern: str, base: Path, settings: Settings) -> LocalFiles:
        """Return the files of a user-defined source. base: what a relative pattern is relative to.

        Raises: FileNotFoundError, ValueError as data.local.open_files.
        """
        return open_files(pattern, base=base, follow_links=settings.follow_links, rows_only=True)

    def load(self, found: LocalFiles, field: str | None, request: LoadRequest, how: dict[str, Any]) -> list[Part]:
        """Return the samples of a user-defined source with their split.

        found: its files. field: of a row, that holds its text; None: the usual ones.
        how: source (the name), counters, position, max_document_bytes and partition, as of iter_documents.
        """
        raise NotImplementedError

    # --- settings that decide bytes ---

    def recipe(self, settings: Settings, reads: Sequence[str], tokenizer: FullTokenizer | None) -> dict[str, Any]:
        """Return the settings that decide the bytes of a cache, by name, as they are recorded.

        reads: their names. tokenizer: None: not known, or none.
        Raises: ValueError for a setting that the tokenizer does not fit.
        """
        return {name: getattr(settings, name) for name in reads}

    def compared(self, recipe: dict[str, Any], tokenizer: FullTokenizer | None) -> dict[str, Any]:
        """Return what a fingerprint has of a `recipe`: settings that mean the same with this tokenizer are equal."""
        return recipe

    def asks(self, settings: Settings) -> str:
        """Return what a plan says of the settings, behind the source; "" for nothing."""
        return ""

    # --- checks before a build ---

    def check(self, settings: Settings, spec: SourceSpec) -> None:
        """Raise ValueError for settings that no cache of the source can have."""

    def check_early(self, settings: Settings) -> None:
        """Refuse what no cache of the family can be built with, before a tokenizer is made."""

    def needs_sentinels(self, settings: Settings) -> bool:
        """Whether its caches can be built only with a tokenizer that has the sentinels."""
        return False

    def check_tokenizer(self, settings: Settings, spec: SourceSpec, tokenizer: FullTokenizer, where: Path) -> None:
        """Raise CacheError for a tokenizer, opened at `where`, that the cache of a source cannot be built with."""

    # --- building ---

    def build(self, request: Any, job: Job) -> dict[str, Any]:
        """Build a cache, or one of its partitions, and commit it; returns its meta. A killed build resumes.

        request: the Request (request.py).
        """
        raise NotImplementedError

    def look_back(self, settings: Settings, path: Path, meta: Mapping[str, Any]) -> None:
        """Log what settings that decide no byte say of a whole cache, built or reused. meta: its meta.json."""

    def warn(self, request: Any, meta: Mapping[str, Any]) -> None:
        """Log warnings about a whole cache that was built or sealed now. request: the Request."""


def family_named(name: str) -> Family | None:
    """Return a family by its name, or a key of it; None if no kind has it, or its package is not installed."""
    place = _places().get(name.partition("/")[0])
    return None if place is None else _family_at(place)


def family_of(key: str) -> Family:
    """Return the family of a cache by its key, FAMILY/NAME. Raises: LookupError for a key of none."""
    found = family_named(key)
    if found is None:
        raise LookupError(f"no family of caches is called {key.partition('/')[0]!r}")
    return found


def family_names() -> list[str]:
    """Return the names of the families of all kinds that are installed, in the order of the table of kinds."""
    return list(_places())


def _places() -> dict[str, str]:
    from niels_gpt.kinds.kind import kinds

    return {name: place for kind in kinds() for name, place in kind.families.items()}


@functools.cache
def _family_at(place: str) -> Family:
    found = loaded(place)
    if not isinstance(found, Family):
        raise TypeError(f"{place} is {found!r}, expected a Family")
    return found
