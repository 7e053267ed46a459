"""Define Family: how the caches of one family are built, such as sft/NAME for any NAME.

A family decides the content of its caches, the settings that decide their bytes, and their builder. All other steps of
a recipe are common (request.py). A kind names the places of its families; a kind of another package may bring its own:
see docs/kinds.md.
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
    """One call of a builder."""

    path: Path
    """Public folder of the cache, or of one of its partitions."""
    source: Source
    """The source for meta.json. While it is read, its counters fill and its position moves."""
    committed: Callable[[dict[str, Any]], None]
    """Called with the meta of the committed cache: records the recipe."""
    progress: Progress | None = None
    """Receives documents (chats, groups), tokens, and the tokens of both budgets (None without budgets)."""
    partition: Partition | None = None
    """Partition to build; None: the whole cache."""
    plan: str | None = None
    """sha256 of the partition's plan."""


class Family:
    """One family of caches."""

    name: ClassVar[str]
    """First part of the keys, and table of sources.toml that defines its sources."""
    kind: ClassVar[str]
    """`kind` in meta.json of its caches."""
    title: ClassVar[str] = "Cache"
    """Name of a cache on its page in Dagster."""
    holds: ClassVar[str] = "files"
    """Content of a source: "text", "chats"."""
    own_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that decide the bytes of a user-defined source's cache, beside the common ones."""
    of_users: ClassVar[bool] = True
    """Whether users may define its sources."""
    own_val_frac: ClassVar[str | None] = None
    """Setting with the share of val of a user-defined source, if its row names one."""
    own_field: ClassVar[bool] = False
    """Whether a user-defined source may name the field of a row with its text."""
    takes_tokenizer: ClassVar[bool] = False
    """Whether its caches are encoded here; else ids are stored as they are, or there are none."""
    has_text: ClassVar[bool] = False
    """Whether a tokenizer can be trained on its sources."""
    partition_rule: ClassVar[str] = PARTITION_RULE
    """Says in words which files and rows of a user-defined source a partition reads."""
    id_copies: ClassVar[int] = 0
    """How often a build holds the ids on disk, for the lower bound of its need; 0: no bound."""

    @property
    def has_partitions(self) -> bool:
        """Whether its caches can be built in partitions; the kind decides how to join them."""
        from niels_gpt.kinds.kind import has_partitions

        return has_partitions(f"{self.name}/")

    @property
    def builder_version(self) -> int:
        """Version of its builder, part of every fingerprint."""
        from niels_gpt.engine.meta import BUILDER_VERSIONS

        return BUILDER_VERSIONS[self.kind]

    # --- reading ---

    def files(self, pattern: str, base: Path, settings: Settings) -> LocalFiles:
        """Return the files of a user-defined source. base: folder for a relative pattern.

        Raises: FileNotFoundError if nothing matches; ValueError for a malformed pattern.
        """
        return open_files(pattern, base=base, follow_links=settings.follow_links, rows_only=True)

    def load(self, found: LocalFiles, field: str | None, request: LoadRequest, how: dict[str, Any]) -> list[Part]:
        """Return the samples of a user-defined source with their split.

        found: its files. field: of a row, with its text; None: the usual ones.
        how: source (the name), counters, position, max_document_bytes and partition, as in iter_documents.
        """
        raise NotImplementedError

    # --- settings that decide bytes ---

    def recipe(self, settings: Settings, reads: Sequence[str], tokenizer: FullTokenizer | None) -> dict[str, Any]:
        """Return the settings that decide the bytes of a cache, by name, as recorded.

        reads: their names. tokenizer: None if unknown or not needed.
        Raises: ValueError for a setting that does not fit the tokenizer.
        """
        return {name: getattr(settings, name) for name in reads}

    def compared(self, recipe: dict[str, Any], tokenizer: FullTokenizer | None) -> dict[str, Any]:
        """Return a fingerprint's part for a `recipe`, equal for settings that mean the same with this tokenizer."""
        return recipe

    def asks(self, settings: Settings) -> str:
        """Return the text about the settings that a plan shows after the source; "" for none."""
        return ""

    # --- checks before a build ---

    def check(self, settings: Settings, spec: SourceSpec) -> None:
        """Raise ValueError for settings that no cache of the source can have."""

    def check_early(self, settings: Settings) -> None:
        """Raise an error for settings that the family refuses, before a tokenizer is made."""

    def needs_sentinels(self, settings: Settings) -> bool:
        """Return whether its caches need a tokenizer with the sentinels."""
        return False

    def check_tokenizer(self, settings: Settings, spec: SourceSpec, tokenizer: FullTokenizer, where: Path) -> None:
        """Raise CacheError if the source's cache cannot be built with the tokenizer opened at `where`."""

    # --- building ---

    def build(self, request: Any, job: Job) -> dict[str, Any]:
        """Build and commit a cache, or one of its partitions. Returns its meta. A killed build resumes.

        request: the Request (request.py).
        """
        raise NotImplementedError

    def look_back(self, settings: Settings, path: Path, meta: Mapping[str, Any]) -> None:
        """Log warnings about a whole cache, built or reused, that depend on settings which decide no byte. meta: its
        meta.json."""

    def warn(self, request: Any, meta: Mapping[str, Any]) -> None:
        """Log warnings about a whole cache that was built or sealed now. request: the Request."""


def family_named(name: str) -> Family | None:
    """Return a family by its name or a key; None for an unknown one, or if its package is not installed."""
    place = _places().get(name.partition("/")[0])
    return None if place is None else _family_at(place)


def family_of(key: str) -> Family:
    """Return the family of a cache by its key, FAMILY/NAME. Raises: LookupError for an unknown one."""
    found = family_named(key)
    if found is None:
        raise LookupError(f"no family of caches is called {key.partition('/')[0]!r}")
    return found


def family_names() -> list[str]:
    """Return the names of all installed families, in the order of the table of kinds."""
    return list(_places())


@functools.cache
def _places() -> dict[str, str]:
    from niels_gpt.kinds.kind import kinds

    return {name: place for kind in kinds() for name, place in kind.families.items()}


@functools.cache
def _family_at(place: str) -> Family:
    found = loaded(place)
    if not isinstance(found, Family):
        raise TypeError(f"{place} is {found!r}, expected a Family")
    return found
