"""User-defined sources: which files a pattern matches, and how their rows become texts, chats or rollouts.

A .txt, .md, .rst or .html file is one document, unchanged. In .jsonl, .json and .parquet files each row is a sample.
All but .parquet may be compressed, with .gz or .zst after the suffix. Rows and files without a sample are counted as
too_large, unreadable_row, missing_field, malformed, not_text, unknown_role, weight_0, empty_file or git_lfs_pointer.
Parts that a kept sample loses are counted too: unread_field:NAME, contradicting_shape, other_text_field.
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from niels_gpt.chat_template import UNKNOWN_ROLE, count_names
from niels_gpt.data import chat_shapes
from niels_gpt.data.files import rollouts
from niels_gpt.data.files.part import FilePart, is_first
from niels_gpt.data.files.rows import TABLE_SUFFIXES, Columns
from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES, PACKED_SUFFIXES, count
from niels_gpt.data.files.walk import first_link, in_order, note_forks, note_links, once_each, walk_folders
from niels_gpt.data.reader import TEXT_FIELDS, Piece, Position, SourceReader
from niels_gpt.data.types import ChatSample, PretrainSample, RawChat, SequenceGroup, TextBlock
from niels_gpt.documents import Partition
from niels_gpt.signals import UNREAD_FIELD
from niels_gpt.storage.errors import SourceNotFound

logger = logging.getLogger(__name__)

_PLAIN_SUFFIXES = (".txt", ".md", ".rst", ".html", ".htm")
DOCUMENT_SUFFIXES = tuple(f"{suffix}{packed}" for packed in ("", *PACKED_SUFFIXES) for suffix in _PLAIN_SUFFIXES)
CHAT_SUFFIXES = (".json", *TABLE_SUFFIXES)
TEXT_SUFFIXES = (*DOCUMENT_SUFFIXES, *CHAT_SUFFIXES)
_MOST_NAMES = 20  # in a message
_MOST_LOGGED = 3  # roles, or files, of one reason
_GROUP = "group"  # in a position: the number in its file of the group of that row, where partitions share files
_MAX_ID_CHARS = 1 << 16  # a longer one is no name, and `locate` could not read it


@dataclass(frozen=True)
class LocalFiles:
    """The files of one user-defined source, and the samples in them."""

    root: Path
    """A folder above all of them; a file's name is its path below it."""
    files: tuple[Path, ...]
    """Absolute paths, each once, in byte order of their names."""
    other_files: int
    """Number of matching files that are not read: pictures among notes, pipes, broken links."""
    other_kinds: tuple[tuple[str, int], ...] = ()
    """(suffix, number) of these other files, the most frequent first."""
    links: tuple[Path, ...] = ()
    """Links that are not followed, and match or lead to files that may match."""
    resource_forks: int = 0
    """Number of files `._NAME`, put beside NAME by macOS on other disks, that would match if they were not hidden."""

    def name_of(self, path: Path) -> str:
        """Return a file's name, with / between folders and U+FFFD for bytes that are not UTF-8."""
        return os.fsencode(path.relative_to(self.root).as_posix()).decode("utf-8", "replace")

    def note_what_is_beside(self, counters: Counter[str] | None) -> None:
        """Count the links that are not followed and the resource forks, only at the first call for these counters."""
        note_links(counters, self.links)
        note_forks(counters, self.resource_forks)

    def texts(
        self,
        *,
        source: str,
        field: str | None = None,
        counters: Counter[str] | None = None,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        position: dict[str, int] | None = None,
    ) -> Iterator[PretrainSample]:
        """Yield documents in order of files and rows, empty ones included.

        A .jsonl, .json or .parquet file has rows; any other file is one document. A sample's meta has "index", its
        number from 0; "path", the file's name; for a row "row", its number from 1 (the line in .jsonl), and "id" as a
        string, if it is a string or an integer.
        source: the samples' source.
        field: holds a row's text; None: the first of text, content, document that is a string. A row without a text
            counts as "missing_field".
        counters: receives dropped and repaired documents, by reason.
        max_document_bytes: limit of a document or row; a larger one counts as "too_large".
        position: where to start; the loader keeps its position in this dict (see reader.Position).
        Raises: SourceError E302 for a damaged file, when it is reached; SourceError E303 at the end if rows were
            dropped and there is no text at all.
        """
        documents = iter_documents(
            self,
            source=source,
            field=field,
            counters=counters,
            max_document_bytes=max_document_bytes,
            position=position,
            blocks=False,
        )
        return cast(Iterator[PretrainSample], documents)

    def chats(
        self,
        *,
        source: str,
        counters: Counter[str] | None = None,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        position: dict[str, int] | None = None,
        raw: bool = False,
        partition: Partition | None = None,
    ) -> Iterator[ChatSample | RawChat]:
        """Yield chats in order of files and rows, also chats without an assistant's turn.

        chat_shapes lists the forms of a row, and the reasons to drop one.
        raw: yield RawChats, for a chat template. partition: read only its rows.
        Takes the other arguments of `texts`, and raises its errors.
        """
        reader = _FileReader(self, source, counters, max_document_bytes, partition, position)
        for piece, row in reader.rows((*chat_shapes.FIELDS, "id")):
            sparse = piece.name.lower().endswith(".parquet")
            try:
                chat = (
                    chat_shapes.raw_chat_of(row, sparse=sparse, counters=counters)
                    if raw
                    else chat_shapes.messages_of(row, counters)
                )
            except chat_shapes.NotAChatError as error:
                reader.drop(piece, error.reason, error.found, kind=reader.role(error.role))
            else:
                meta = reader.meta(piece)
                yield RawChat(*chat, source, meta) if isinstance(chat, tuple) else ChatSample(chat, source, meta)
        reader.check_any("not one chat", f"one of the shapes {chat_shapes.SHAPES}")

    def rollouts(
        self,
        *,
        source: str,
        counters: Counter[str] | None = None,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        position: dict[str, int] | None = None,
        partition: Partition | None = None,
    ) -> Iterator[SequenceGroup]:
        """Yield groups of recorded sequences; consecutive rows of a file that name the same group are one.

        files.rollouts lists the forms of a row, and the reasons to drop one. To know that a group is whole, the row
        after it is read; counters and position do not have that row until it is used.
        partition: yield only its groups, by GROUPS_RULE of files.part. Counts made between two groups belong to the
            second one, so that one partition has them.
        Takes the other arguments of `texts`, and raises its errors.
        Raises: SourceError E302 for a group of several rows with too many tokens or samples.
        """
        behind, part = rollouts.Behind(counters, position), FilePart(partition, len(self.files))
        file, number = (behind.position.get(key, -1) for key in ("file", _GROUP))
        reads = partition if part.reads_alone else None
        reader = _FileReader(self, source, behind.counters, max_document_bytes, reads, behind.position)
        group: SequenceGroup | None = None
        tokens = 0
        for piece, row in reader.rows((*rollouts.FIELDS, "id")):
            try:
                name, samples = rollouts.samples_of(row)
            except rollouts.NotRolloutsError as error:
                reader.drop(piece, error.reason, error.found)
                continue
            count_names(behind.counters, UNREAD_FIELD, rollouts.unread_of(row, reader.names(piece)))
            if behind.continues(name, piece.name) and group is not None:
                group.samples.extend(samples)
                tokens = rollouts.tokens_of(samples, tokens, f"{piece.name}, row {piece.row}")
            else:
                if group is not None and behind.passes(part.has_group(file, number)):
                    yield group
                file, number = reader.file, number + 1 if reader.file == file else 0
                meta = {"id": None, **reader.meta(piece), **({"id": name} if name and _is_id(name) else {})}
                group = SequenceGroup(samples, source, meta)
                tokens = rollouts.tokens_of(samples)
            if not part.reads_alone:
                behind.position[_GROUP] = number
            behind.mark()
        if group is not None and behind.passes(part.has_group(file, number)):
            yield group
        behind.mark()
        behind.passes(part.reads_alone or is_first(partition))
        reader.check_any("no rollouts", f"one of the forms {rollouts.FORMS}")


def open_files(
    pattern: str,
    *,
    base: Path | None = None,
    rows_only: bool = False,
    as_text: Sequence[str] = (),
    follow_links: bool = False,
) -> LocalFiles:
    """Find the files of a source.

    pattern: a file; a folder, for all files below it, as `FOLDER/**`; or a glob, which matches files, with `**` for any
        folders. `~` is the home folder. Hidden files and folders (`.git`, `.obsidian`) are left out, unless the pattern
        names them.
    base: folder that a relative pattern starts from; None: the current folder.
    rows_only: find only .jsonl, .json and .parquet files, as chats and rollouts need.
    as_text: further suffixes, such as ".tex", of files that are one document. Suffixes match in upper and lower case.
    follow_links: also follow links below the folder, or below the part of a glob before its first wildcard. Each file
        is then listed once, by the path with the fewest links, then the fewest parts, then the first in byte order. The
        file or folder that the pattern names may always be a link.
    Returns: files whose `root` is the folder, the file's folder, or the part of the glob before its first wildcard: a
        new file does not change the names of the others.
    Raises: SourceNotFound E301 if nothing matches, or nothing that can be read.

        for sample in open_files("notes/**/*.md").texts(source="notes"):
            print(sample.meta["path"], len(sample.text))
    """
    suffixes = CHAT_SUFFIXES if rows_only else (*TEXT_SUFFIXES, *as_text)
    start, rest = Path.cwd() if base is None else base, os.path.expanduser(pattern)
    literal = Path(os.path.abspath(start / rest))  # a name may have brackets in it
    wild: tuple[str, ...]
    if literal.is_dir():
        root, wild = literal, ("**",)
    elif os.path.lexists(literal):
        root, wild = literal.parent, (glob.escape(literal.name),)
    else:
        root, wild = _split(start, rest)
    links: list[Path] = []
    matches = _matches(root, wild, follow_links, links)
    if not follow_links and (literal.is_dir() or not os.path.lexists(literal)):  # a named file may be a link
        matches = _without_links(matches, root, suffixes, links)
    readable = once_each(path for path in matches if _has_suffix(path, suffixes) and os.path.isfile(path))
    if not readable:
        raise SourceNotFound(_nothing_found(pattern, literal, matches, suffixes, links))
    forks = sum(_has_suffix(path, suffixes) for path in _resource_forks(root, wild, follow_links))
    files, root = in_order(readable.values(), root)
    other = {os.path.realpath(path): path for path in sorted(matches)}
    kinds = Counter(_kind_of(path) for real, path in other.items() if real not in readable)
    return LocalFiles(root, tuple(files), kinds.total(), tuple(kinds.most_common()), tuple(sorted(set(links))), forks)


def _without_links(matches: Iterable[Path], root: Path, suffixes: Sequence[str], links: list[Path]) -> list[Path]:
    """Return the files that no link below `root` leads to. `links` receives the first link to each other file."""
    kept = []
    for path in matches:
        link = first_link(root, path)
        if link is None or (link == path and not _has_suffix(path, suffixes)):  # such as one to a picture
            kept.append(path)
        else:
            links.append(link)
    return kept


def expand(pattern: str) -> list[Path]:
    """Return the files that a glob matches, with `**` and following links, as absolute paths; each once."""
    matches = _matches(*_split(Path.cwd(), os.path.expanduser(pattern)), follow_links=True, links=[])
    return list(once_each(filter(os.path.isfile, matches)).values())


def _split(start: Path, pattern: str) -> tuple[Path, tuple[str, ...]]:
    """Return the folder before a glob's first wildcard, and the other parts; the last part is always one of them."""
    parts = Path(pattern).parts
    fixed = tuple(itertools.takewhile(lambda part: not glob.has_magic(part), parts[:-1]))
    return Path(os.path.abspath(start.joinpath(*fixed))), parts[len(fixed) :]


def _matches(root: Path, wild: Sequence[str], follow_links: bool, links: list[Path]) -> list[Path]:
    matches = {Path(os.path.abspath(path)) for path in _paths(root, wild, follow_links, links)}
    return [path for path in matches if not os.path.isdir(path)]


def _paths(folder: Path, wild: Sequence[str], follow_links: bool, links: list[Path]) -> Iterator[Path]:
    # The `**` of glob follows links to parent folders again and again, until the kernel refuses the path.
    if "**" in wild:
        at = wild.index("**")
        for base in _paths(folder, wild[:at], follow_links, links):
            for below in walk_folders(base, follow_links=follow_links, links=links):
                yield from _paths(below, wild[at + 1 :] or ("*",), follow_links, links)
    elif wild:
        yield from (folder / name for name in glob.iglob(os.path.join(*wild), root_dir=folder))
    else:
        yield folder


def _resource_forks(root: Path, wild: Sequence[str], follow_links: bool) -> list[Path]:
    *folders, last = (*wild, "*") if wild[-1] == "**" else wild
    return _matches(root, (*folders, f"._{last}"), follow_links, links=[]) if last.startswith("*") else []


def _has_suffix(path: Path, suffixes: Sequence[str]) -> bool:
    return path.name.lower().endswith(tuple(suffixes))


def _kind_of(path: Path) -> str:
    return (path.suffix.lower() or "without a suffix") if os.path.isfile(path) else _ODD


_ODD = "pipes, devices or links to nothing"


def iter_documents(
    found: LocalFiles,
    *,
    source: str,
    field: str | None,
    counters: Counter[str] | None,
    max_document_bytes: int,
    position: dict[str, int] | None,
    blocks: bool,
    partition: Partition | None = None,
) -> Iterator[PretrainSample | TextBlock]:
    """Yield the documents of `LocalFiles.texts`, or of one partition; blocks: usual rows as TextBlocks."""
    wanted = TEXT_FIELDS if field is None else (field,)
    reader = _FileReader(found, source, counters, max_document_bytes, partition, position)
    pieces = reader.read((*wanted, "id"), texts=wanted if blocks else ())
    return reader.documents(pieces, wanted, remedy="; name the one that holds the text: NAME=GLOB:FIELD")


def _is_id(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_ID_CHARS
    return isinstance(value, int) and not isinstance(value, bool)


class _FileReader(SourceReader):
    """Reads the files of a user-defined source. Numbers kept samples alone, and logs more of the dropped rows."""

    number_name = "index"
    numbers_dropped = False

    def __init__(self, found: LocalFiles, *about: Any) -> None:
        """about: arguments of SourceReader."""
        super().__init__(*about)
        self._found = found
        self._columns_of: dict[str, list[str]] = {}  # of the current parquet file
        self._unlogged = Counter[str]()
        self._logged: dict[str, set[str | None]] = {}  # kinds by reason

    def read(self, columns: Sequence[str], *, texts: Sequence[str] = (), rows_only: bool = False) -> Iterator[Piece]:
        """Yield documents, and rows with these columns; texts: fields that may hold the text of rows in Columns."""
        if is_first(self.partition) and not Position(self._shared).resumed:
            note_forks(self.counters, self._found.resource_forks)
        yield from self.pieces(
            self._found.files,
            self._found.name_of,
            lambda path: not rows_only and not _has_suffix(path, CHAT_SUFFIXES),
            columns=columns,
            texts=texts,
            others=("id",),
        )

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[Piece, dict[str, Any]]]:
        """Yield each row with its piece."""
        for piece in self.read(columns, rows_only=True):
            yield piece, cast(dict[str, Any], piece.item)

    def meta(self, piece: Piece) -> dict[str, Any]:
        """Return "index", "path", for a row "row", and its "id" if it has one."""
        meta: dict[str, Any] = {"index": piece.index, "path": piece.name}
        if isinstance(piece.item, dict):
            meta["row"] = piece.row
            if _is_id(own := piece.item.get("id")):
                meta["id"] = str(own)
        return meta

    def ids(self, piece: Piece, rows: Columns) -> list[str]:
        """Return the ids that `source_id` returns for the samples of a piece's rows."""
        own = rows.fields.get("id") or [None] * len(rows.texts)
        both = zip(own, rows.numbers, strict=True)
        return [str(value) if _is_id(value) else f"{piece.name}#{number}" for value, number in both]

    def role(self, role: str | None) -> str | None:
        """Count an unknown role, and return the key of its counter; None for none."""
        return None if role is None else next(iter(count_names(self.counters, UNKNOWN_ROLE, [role])))

    def names(self, piece: Piece) -> list[str]:
        """Return the names of a row's fields; in a parquet file of all its columns, read or not."""
        if not piece.name.lower().endswith(".parquet"):
            return super().names(piece)
        if piece.name not in self._columns_of:
            from niels_gpt.data.files import parquet  # imports pyarrow, which is heavy

            self._columns_of = {piece.name: parquet.field_names(self._found.files[self.file])}
        return self._columns_of[piece.name]

    def check_any(self, what: str = "", expected: str = "") -> None:
        """Raise the error of SourceReader; else log how many more rows were dropped than logged."""
        super().check_any(what, expected)
        for reason, number in self._unlogged.items():
            where = self._found.root
            logger.warning("%s: and %s more, counted as %s", where, f"{number:,}", reason, extra={"code": "W305"})

    def _count(self, reason: str, kind: str | None, problem: str, number: int = 1) -> None:
        """Count dropped rows, and log the first of each kind, _MOST_LOGGED kinds of a reason."""
        self._dropped[reason] += number
        count(self.counters, reason, number)
        logged = self._logged.setdefault(reason, set())
        if kind in logged or len(logged) == _MOST_LOGGED:
            self._unlogged[reason] += number
        else:
            logged.add(kind)
            logger.warning("%s. Counted as %s; more like it are counted only", problem, reason, extra={"code": "W305"})


def _nothing_found(
    pattern: str, literal: Path, matches: Sequence[Path], suffixes: Sequence[str], links: Sequence[Path]
) -> str:
    if links and not matches:
        return (
            f"nothing that {pattern!r} matches can be read: found {len(set(links))} symbolic links, such as "
            f"{min(links)}, which are not followed. To follow them, pass --follow-links"
        )
    if not matches and not literal.is_dir():
        return (
            f"nothing matches {pattern!r}: no file or folder at {literal}. Expected a file, a folder, or a glob in "
            "quotation marks, such as 'notes/**/*.md': a shell expands an unquoted one"
        )
    kinds = sorted({(path.suffix or path.name) if os.path.isfile(path) else _ODD for path in matches})[:_MOST_NAMES]
    found = f"{len(matches)} files of other kinds ({', '.join(kinds)})" if matches else f"an empty folder, {literal}"
    more = "; --as-text .SUFFIX,... reads more kinds as text" if DOCUMENT_SUFFIXES[0] in suffixes else ""
    return (
        f"nothing that {pattern!r} matches can be read: found {found}, expected files that end in one of "
        f"{' '.join(suffixes)}{more}. Name the right ones; put a glob in quotation marks, as a shell expands an "
        "unquoted one"
    )
