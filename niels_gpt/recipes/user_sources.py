"""Find the user-defined sources: lines NAME=GLOB[:FIELD] of the settings, and sources.toml.

    [pretrain]
    notes = "~/notes"                          # the same as the line notes=~/notes
    papers = "papers/**/*.jsonl.gz:abstract"   # rows, with their text in the field `abstract`

    [rollouts]
    maths = "rollouts/step_*.jsonl.gz"

    [sft.support]                              # a table, for more settings
    files = "chats/*.json"
    licence = "CC BY 4.0"
    attribution = "The support team"

A relative path starts in the folder of sources.toml or, in a line of the settings, in the current folder.
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.data import local
from niels_gpt.data.files.part import is_first
from niels_gpt.data.files.text import PACKED_SUFFIXES, count
from niels_gpt.data.files.walk import note_links
from niels_gpt.data.sources import SOURCES
from niels_gpt.data.spec import Credit, LoadRequest, Part, SourceSpec
from niels_gpt.recipes.family import Family, family_named, family_names
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import DefinitionError, NotFound, UsageError
from niels_gpt.storage.fileio import open_for_reading

logger = logging.getLogger(__name__)

FAMILIES = ("pretrain", "sft", "rollouts")
"""Families whose sources a line of the settings may define; sources.toml takes every family."""
DELIVERIES = ("export", "published")
"""Tables of sources.toml that define no source: they export or push caches."""
UNSTATED = "not stated"
MAX_TOML_BYTES = 1 << 20
_MAX_DOTS = 1_000  # of a line: tomllib takes hours for a key of 100,000 parts
_KEYS = ("files", "field", "licence", "attribution")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
_FIELD = re.compile(r"(?P<files>.+):(?P<field>[^:/\\*?\[\]]+)")
_SUFFIX = re.compile(r"\.[^\s/*?\[\],]+")
_RESERVED = ("tokenizer",)  # a folder of this name beside a cache is its tokenizer
_MAX_KINDS = 12  # suffixes in a message


@dataclass(frozen=True)
class UserSource:
    """A user-defined source."""

    family: str
    """pretrain, sft or rollouts."""
    name: str
    """NAME of the cache FAMILY/NAME."""
    files: str
    """A file, a folder or a glob."""
    base: Path
    """Folder for a relative `files`."""
    named_in: str
    """Flag or file that defines it, for messages."""
    field: str | None = None
    """Field of a row with its text; None: text, content or document."""
    licence: str = UNSTATED
    """As the user states it."""
    attribution: str = UNSTATED
    """Whom to name, as the user states it."""

    @property
    def of_family(self) -> Family:
        """Its family; if the package is not installed, a family that can build nothing."""
        return family_named(self.family) or Family()

    @property
    def spec(self) -> SourceSpec:
        """Its row, in the form of the table of built-in sources."""
        family = self.of_family
        return SourceSpec(
            name=self.name,
            family=self.family,
            description=f"{family.title} of your own {family.holds}: {self.files}, by {self.named_in}. "
            f"Licence: {self.licence}. Attribution: {self.attribution}.",
            credit=Credit(self.licence, self.attribution),
            load=self._load,
            files=lambda settings, _: self.find(settings),
            val_frac=family.own_val_frac,
            reads=family.own_settings,
            partition_rule=family.partition_rule,
        )

    def find(self, settings: Settings) -> local.LocalFiles:
        """Return its files. Raises: FileNotFoundError if nothing matches; ValueError for a malformed pattern."""
        return self.of_family.files(self.files, self.base, settings)

    def _load(self, request: LoadRequest) -> list[Part]:
        found, counters = request.found, request.counters
        assert found is not None
        if is_first(request.partition):
            self._count_what_is_not_read(found, counters)
        how: dict[str, Any] = {"source": self.name, "counters": counters, "position": request.position}
        how |= {"max_document_bytes": request.settings.max_document_bytes, "partition": request.partition}
        return self.of_family.load(found, self.field, request, how)

    def _count_what_is_not_read(self, found: local.LocalFiles, counters: Counter[str]) -> None:
        note_links(counters, found.links)
        if number := found.other_files:
            kinds = ", ".join(f"{each:,} {kind}" for kind, each in found.other_kinds[:_MAX_KINDS])
            as_text = "as_text" in self.of_family.own_settings
            more = ". --as-text .SUFFIX,... reads more kinds as text" if as_text else ""
            text = "%s: %d files of kinds that are not read: %s%s"
            logger.warning(text, self.name, number, kinds, more, extra={"code": "W302"})
            count(counters, "other_files", number)


def user_sources(settings: Settings) -> dict[str, UserSource]:
    """Return the user-defined sources by name, first from sources.toml.

    Raises: ValueError for a malformed entry or a name that is taken, UsageError if a line of the settings is the cause;
        FileNotFoundError for a missing `sources_file` other than the default.
    """
    sources: dict[str, UserSource] = {}
    for user in (*_of_file(settings), *_of_lines(settings)):
        where = f"{user.named_in}: {user.family}/{user.name}"
        if not _NAME.fullmatch(user.name):
            expected = "expected a name of letters, digits and _, 100 at most, that starts with a letter"
            raise _error(user.named_in, f"{where}: {expected}")
        if user.name in SOURCES or user.name in _RESERVED:
            raise _error(user.named_in, f"{where}: {user.name} is a built-in name. Choose another one")
        if user.name in sources:
            other = sources[user.name]
            taken = f"{other.named_in} names {other.family}/{user.name} already"
            raise _error(user.named_in, f"{where}: {taken}. Choose another name")
        sources[user.name] = user
    return sources


def text_sources(settings: Settings) -> dict[str, UserSource]:
    """Return the user-defined sources with text, on which a tokenizer can be trained."""
    return {name: user for name, user in user_sources(settings).items() if user.of_family.has_text}


def names_in_lines(settings: Settings) -> list[str]:
    """Return the names that lines of the settings define."""
    return [user.name for user in _of_lines(settings)]


def text_suffixes(settings: Settings) -> tuple[str, ...]:
    """Return the suffixes that settings.as_text adds to user-defined text, each also with .gz and .zst.

    Raises: ValueError for a malformed suffix, or one whose files hold rows.
    """
    suffixes: list[str] = []
    for item in (settings.as_text or "").split(","):
        suffix = item.strip().lower()
        if not suffix:
            continue
        if not _SUFFIX.fullmatch(suffix):
            raise DefinitionError(f"--as-text {item.strip()}: expected suffixes separated by commas, as in .py,.tex")
        if suffix.endswith(local.CHAT_SUFFIXES):
            remedy = "Copy them to files of another suffix"
            raise DefinitionError(f"--as-text {suffix}: these files are read as rows. {remedy}")
        suffixes += [suffix, *(f"{suffix}{packed}" for packed in PACKED_SUFFIXES)]
    return tuple(suffixes)


def stated_credit(settings: Settings, source: str) -> dict[str, str]:
    """Return the licence and attribution that lines of the settings state for a source.

    Raises: UsageError for a malformed line, or a name that no source has.
    """
    stated: dict[str, str] = {}
    for name in ("licence", "attribution"):
        for line in filter(str.strip, (getattr(settings, name) or "").split(";")):
            about, equals, text = (part.strip() for part in line.partition("="))
            known = [*SOURCES, *user_sources(settings)]
            if not (equals and text) or about not in known:
                expected = f"expected SOURCE=TEXT, SOURCE one of {', '.join(known)}"
                raise UsageError(f"--{name} {line.strip()}: {expected}", code="E104")
            if about == source:
                stated[name] = text
    return stated


def _of_lines(settings: Settings) -> Iterator[UserSource]:
    for family in FAMILIES:
        for line in (getattr(settings, family) or "").split(";"):
            if line.strip():
                named_in = f"--{family} {line.strip()}"
                name, equals, files = line.partition("=")
                if not (equals and name.strip() and files.strip()):
                    form = "NAME=GLOB" + "[:FIELD]" * (family_named(family) or Family()).own_field
                    raise UsageError(f"{named_in}: expected {form}", code="E104")
                yield _user_source(family, name.strip(), files.strip(), Path.cwd(), named_in)


def sources_tables(settings: Settings) -> tuple[Path, dict[str, Any]]:
    """Return the path and content of sources.toml; {} without one.

    Raises: FileNotFoundError for a missing `sources_file` other than the default; ValueError for a malformed one.
    """
    path = Path(settings.sources_file).expanduser().absolute()
    if not path.exists():
        if settings.sources_file != Settings.sources_file:
            raise NotFound(f"{path}: no such file, expected the sources.toml that --sources-file names", code="E104")
        return path, {}
    with open(open_for_reading(path, follow_links=True), "rb") as file:
        raw = file.read(MAX_TOML_BYTES + 1)
    if len(raw) > MAX_TOML_BYTES:
        raise DefinitionError(f"{path}: more than {MAX_TOML_BYTES:,} bytes, expected a file that defines sources")
    if any(line.count(b".") > _MAX_DOTS for line in raw.split(b"\n")):
        raise DefinitionError(f"{path}: a line with more than {_MAX_DOTS:,} dots, expected a file that defines sources")
    try:
        return path, tomllib.loads(raw.decode("utf-8-sig"))
    except RecursionError:
        raise DefinitionError(f"{path}: TOML that is nested too deeply") from None
    except ValueError as error:  # of utf-8 and of TOML, and of an integer with too many digits
        raise DefinitionError(f"{path}: not TOML: {error}") from None


def _of_file(settings: Settings) -> Iterator[UserSource]:
    path, content = sources_tables(settings)
    for family, entries in content.items():
        if family in DELIVERIES and isinstance(entries, Mapping):  # see recipes/exchange/outputs.py
            continue
        if not _defines_sources(family) or not isinstance(entries, Mapping):
            families = filter(_defines_sources, dict.fromkeys((*FAMILIES, *family_names())))
            tables = [f"[{name}]" for name in (*families, *DELIVERIES)]
            expected = f"expected tables {', '.join(tables[:-1])} and {tables[-1]}"
            raise DefinitionError(f"{path}: found {family!r}, {expected}; a kind of another package needs the package")
        for name, entry in entries.items():
            yield _of_entry(family, name, entry, path)


def _defines_sources(name: str) -> bool:
    found = family_named(name)
    return name in FAMILIES or (found is not None and found.of_users)


def _of_entry(family: str, name: str, entry: Any, path: Path) -> UserSource:
    if _is_text(entry):
        return _user_source(family, name, entry, path.parent, str(path))
    has_field = (family_named(family) or Family()).own_field
    known = isinstance(entry, Mapping) and all(key in _KEYS and _is_text(entry[key]) for key in entry)
    if not known or "files" not in entry or ("field" in entry and not has_field):
        keys = [key for key in _KEYS if has_field or key != "field"]
        raise DefinitionError(
            f'{path}, {family}.{name}: found {entry!r}, expected a text "GLOB", or a table with the texts '
            f"{', '.join(keys)}, where `files` is required"
        )
    return UserSource(family, name, base=path.parent, named_in=str(path), **entry)


def _error(named_in: str, message: str) -> ValueError:
    return UsageError(message, code="E104") if named_in.startswith("--") else DefinitionError(message)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _user_source(family: str, name: str, files: str, base: Path, named_in: str) -> UserSource:
    split = _FIELD.fullmatch(files)
    if split is None or (base / Path(files).expanduser()).exists():  # a colon in the name of a file or folder
        return UserSource(family, name, files, base, named_in)
    of_family = family_named(family) or Family()
    if of_family.own_field:
        return UserSource(family, name, split["files"], base, named_in, field=split["field"])
    if files.lower().endswith(local.CHAT_SUFFIXES):
        return UserSource(family, name, files, base, named_in)
    found = f"a source of {of_family.holds} takes no field, found {':' + split['field']!r}"
    remedy = f"its fields are known. Leave it out: {name}={split['files']}"
    raise _error(named_in, f"{named_in}: {found}: {remedy}")
