"""User-defined sources: which files a pattern matches, and how their rows become texts or chats.

A .txt, .md, .rst or .html file is one document, unchanged; in .jsonl, .json and .parquet files each row is a text or a
chat. All but .parquet may be compressed, with .gz or .zst after the suffix. What gives no sample is counted: as
too_large, unreadable_row, missing_field, malformed, not_text, unknown_role, weight_0, empty_file or git_lfs_pointer. So
is what is left out of a sample that is kept: unread_field:NAME, contradicting_shape, other_text_field.
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from niels_gpt.chat_template import UNKNOWN_ROLE, count_names
from niels_gpt.data import chat_shapes
from niels_gpt.data.files import rollouts
from niels_gpt.data.files.part import FilePart, Share, is_first
from niels_gpt.data.files.rows import TABLE_SUFFIXES, Columns, Reading, rows_or_columns
from niels_gpt.data.files.text import (
    MAX_DOCUMENT_BYTES,
    MISSING_FIELD,
    NOT_FETCHED,
    PACKED_SUFFIXES,
    UnusableFile,
    count,
    has_other_text,
    is_empty_file,
    is_pointer,
    packed_suffix,
    read_text,
)
from niels_gpt.data.files.walk import first_link, in_order, note_forks, note_links, once_each, walk_folders
from niels_gpt.data.reader import Position
from niels_gpt.data.types import ChatSample, PretrainSample, RawChat, SequenceGroup, TextBlock
from niels_gpt.data.upstream_rows import TEXT_FIELDS
from niels_gpt.documents import Partition
from niels_gpt.signals import GIT_LFS_POINTER, OTHER_TEXT_FIELD, UNREAD_FIELD
from niels_gpt.storage.errors import SourceError, SourceNotFound

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
    """The files of one user-defined source, and what they hold."""

    root: Path
    """A folder above all of them; a file's name is its path below it."""
    files: tuple[Path, ...]
    """Absolute, each once, in byte order of their names."""
    other_files: int
    """How many matching files are not read: pictures among notes, pipes, broken links."""
    other_kinds: tuple[tuple[str, int], ...] = ()
    """Their suffixes with their number, the most frequent first."""
    links: tuple[Path, ...] = ()
    """Links that are not followed: those that match, or lead to files that may match."""
    resource_forks: int = 0
    """How many files `._NAME`, which macOS puts beside NAME on other disks, would match if they were not hidden."""

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
        """Stream documents in order of files and rows, empty ones included.

        A .jsonl, .json or .parquet file has rows; any other file is one document.
        source: the samples' source.
        field: of a row's text; None: the first of text, content, document that is a string. A row without a text
            counts as "missing_field".
        counters: receives how many documents were dropped or repaired, by reason.
        max_document_bytes: of a document or row; a larger one counts as "too_large".
        position: where the stream is, kept in this dict; the stream starts behind what it holds (see reader.Position).
        The samples' meta: "index", the number in the stream from 0; "path", the file's name; for a row "row", its
            number from 1 (the line's in .jsonl), and "id", if it is a string or an integer, as a string.
        Raises: ValueError for a damaged file, when it is reached, and at the end if there is no text at all.
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
        """Stream chats in order of files and rows, including those without an assistant's turn.

        raw: as RawChats, for a chat template. partition: whose rows alone are read. What a row may look like, and why
        it may be dropped: see chat_shapes. The rest: as `texts`.
        """
        fields = (*chat_shapes.FIELDS, "id")
        reader = _Reader(self, counters, fields, max_document_bytes, position, partition=partition)
        for row, where in reader.read(rows_only=True):
            sparse = where["path"].lower().endswith(".parquet")
            try:
                chat = (
                    chat_shapes.raw_chat_of(row, sparse=sparse, counters=counters)
                    if raw
                    else chat_shapes.messages_of(row, counters)
                )
            except chat_shapes.NotAChatError as error:
                reader.drop(error.reason, error.found, role=error.role)
            else:
                meta = reader.meta(where)
                yield RawChat(*chat, source, meta) if isinstance(chat, tuple) else ChatSample(chat, source, meta)
        reader.check_any(f"{source}: not one chat", f"one of the shapes {chat_shapes.SHAPES}")

    def rollouts(
        self,
        *,
        source: str,
        counters: Counter[str] | None = None,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        position: dict[str, int] | None = None,
        partition: Partition | None = None,
    ) -> Iterator[SequenceGroup]:
        """Stream groups of recorded sequences; consecutive rows of a file that name the same group are one.

        What a row may look like, and why it may be dropped: see files.rollouts. The rest: as `texts`. To know that a
        group is whole, the row behind it is read; counters and position do not have that row until it is used.
        partition: whose groups alone are yielded, by GROUPS_RULE of files.part. What is counted between two groups goes
            with the second one, so that it is counted in one partition.
        Raises: ValueError for a group of several rows that is larger than `rollouts` allows; as `texts`.
        """
        behind, part = rollouts.Behind(counters, position), FilePart(partition, len(self.files))
        file, number = (behind.position.get(key, -1) for key in ("file", _GROUP))
        reads = partition if part.reads_alone else None
        fields = (*rollouts.FIELDS, "id")
        reader = _Reader(self, behind.counters, fields, max_document_bytes, behind.position, partition=reads)
        group: SequenceGroup | None = None
        tokens = 0
        for row, where in reader.read(rows_only=True):
            try:
                name, samples = rollouts.samples_of(row)
            except rollouts.NotRolloutsError as error:
                reader.drop(error.reason, error.found)
                continue
            count_names(behind.counters, UNREAD_FIELD, rollouts.unread_of(row, reader.names()))
            if behind.continues(name, where["path"]) and group is not None:
                group.samples.extend(samples)
                tokens = rollouts.tokens_of(samples, tokens, f"{where['path']}, row {where['row']}")
                reader.meta(where)
            else:
                if group is not None and behind.passes(part.has_group(file, number)):
                    yield group
                file, number = reader.file, number + 1 if reader.file == file else 0
                meta = {"id": None, **reader.meta(where), **({"id": name} if name and _is_id(name) else {})}
                group = SequenceGroup(samples, source, meta)
                tokens = rollouts.tokens_of(samples)
            if not part.reads_alone:
                behind.position[_GROUP] = number
            behind.mark()
        if group is not None and behind.passes(part.has_group(file, number)):
            yield group
        behind.mark()
        behind.passes(part.reads_alone or is_first(partition))
        reader.check_any(f"{source}: no rollouts", f"one of the forms {rollouts.FORMS}")


def open_files(
    pattern: str,
    *,
    base: Path | None = None,
    rows_only: bool = False,
    as_text: Sequence[str] = (),
    follow_links: bool = False,
) -> LocalFiles:
    """Find the files of a source.

    pattern: a file; a folder, for all files below it, as `FOLDER/**`; or a glob, in which `**` stands for any folders
        and which matches files, not folders. `~` is the home folder. Hidden files and folders (`.git`, `.obsidian`) are
        left out, unless the pattern names them.
    base: what a relative pattern is relative to; None: the current folder.
    rows_only: only .jsonl, .json and .parquet files, as chats and rollouts need.
    as_text: further endings of names, such as ".tex", of files that are one document; as all, in upper or lower case.
    follow_links: also links below the folder, or below the part of a glob before its first wildcard; what the pattern
        itself names may always be a link. Each file is then listed once, by the path with the fewest links, then the
        fewest parts, then the first in byte order.
    Returns: `root` is the folder, the file's folder, or the part of the glob before its first wildcard, so that a new
        file does not change the names of the others.
    Raises: FileNotFoundError if nothing matches, or nothing that can be read.
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
    """Return the files reached without a link below `root`; `links` receives the first link to each other file."""
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
    # The `**` of glob follows links to parent folders: 40 times for one such link, forever for two.
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
    """Stream the documents of `LocalFiles.texts`, or of one partition; blocks: as columns where rows are as usual."""
    wanted = TEXT_FIELDS if field is None else (field,)
    columns = wanted if blocks else ()
    reader = _Reader(found, counters, (*wanted, "id"), max_document_bytes, position, columns, partition)
    for item, where in reader.read():
        if isinstance(item, Columns):
            yield TextBlock(source, item.texts, _ids_of(item, where["path"]), reader.place(item))
        elif isinstance(item, str):
            yield PretrainSample(text=item, source=source, meta=reader.meta(where))
        elif texts := [item[name] for name in wanted if isinstance(item.get(name), str)]:
            if is_pointer(texts[0]):
                reader.drop(GIT_LFS_POINTER, NOT_FETCHED)
                continue
            if has_other_text(texts):
                count(counters, OTHER_TEXT_FIELD)
            yield PretrainSample(text=texts[0], source=source, meta=reader.meta(where))
        else:
            types = [f"{type(item[name]).__name__} in the field {name}" for name in wanted if name in item]
            reader.drop(MISSING_FIELD, ", ".join(types))
    expected = f"a string in the field {' or '.join(wanted)}; name the one that holds the text: NAME=GLOB:FIELD"
    reader.check_any(f"{source}: not one text", expected)


def _ids_of(rows: Columns, path: str) -> list[str]:
    """Return what source_id returns for the samples of these rows."""
    own = rows.fields.get("id") or [None] * len(rows.texts)
    return [
        str(value) if _is_id(value) else f"{path}#{number}" for value, number in zip(own, rows.numbers, strict=True)
    ]


def _is_id(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_ID_CHARS
    return isinstance(value, int) and not isinstance(value, bool)


class _Reader:
    """Reads the documents and rows of a source's files, and counts and logs what is dropped."""

    def __init__(
        self,
        found: LocalFiles,
        counters: Counter[str] | None,
        columns: Collection[str],
        max_document_bytes: int,
        position: dict[str, int] | None,
        as_columns: Sequence[str] = (),
        partition: Partition | None = None,
    ) -> None:
        """as_columns: fields that may hold a row's text, where usual rows are wanted as columns."""
        self._partition = partition
        self._found = found
        self._counters = Counter() if counters is None else counters
        self._columns, self._limit = columns, max_document_bytes
        self._as_columns = as_columns
        self._position = Position(position)
        self._index = self._position.number("index")  # of the next sample
        self._file = 0
        self._row: tuple[Path, int, dict[str, Any]]  # the current one
        self._first = self._problem = ""  # of the first row that could be read, and of the first that could not
        self._columns_of: dict[Path, list[str]] = {}  # of the current parquet file
        self._dropped, self._unlogged = Counter[str](), Counter[str]()
        self._logged: dict[str, set[str | None]] = {}  # kinds by reason

    def read(self, *, rows_only: bool = False) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield each document's text, row or Columns, with "path" and, for a row, "row" and "id"."""
        if is_first(self._partition) and not self._position.resumed:
            note_forks(self._counters, self._found.resource_forks)
        part = FilePart(self._partition, len(self._found.files))
        for file, path in enumerate(self._found.files):
            share = part.share(file)
            if share is None or self._position.skips_file(file):
                continue
            self._file, skip_to = file, self._position.last_skipped_row(file)
            if rows_only or _has_suffix(path, CHAT_SUFFIXES):
                yield from self._rows(path, skip_to, share)
            elif share.has(0) and not skip_to:
                yield from self._document(path)

    def meta(self, where: dict[str, Any]) -> dict[str, Any]:
        """Return the meta of the next sample, after its position is recorded."""
        self._index += 1
        self._position.set(self._file, where.get("row", 1), index=self._index)
        return {"index": self._index - 1, **where}

    def place(self, rows: Columns) -> dict[str, list[int]]:
        """Return the positions of the next samples, which these rows are, after they are recorded."""
        begin = self._index + 1
        self._index += len(rows.texts)
        return self._position.set_all(self._file, rows.numbers, index=range(begin, self._index + 1))

    @property
    def file(self) -> int:
        """Number of the file, from 0, that the current row is in."""
        return self._file

    def _document(self, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        if packed_suffix(path.name) and is_empty_file(path, self._counters):
            return
        try:
            text = read_text(path, counters=self._counters, max_document_bytes=self._limit)
        except UnusableFile as error:
            self._drop_problem(error.reason, None, str(error))
        else:
            yield text, {"path": self._found.name_of(path)}

    def _rows(self, path: Path, skip_to: int, share: Share) -> Iterator[tuple[Any, dict[str, Any]]]:
        name = self._found.name_of(path)
        reading = Reading(
            counters=self._counters,
            columns=self._columns,
            unreadable=lambda problem: self._drop_problem(problem.reason, str(path), problem, problem.rows),
            max_document_bytes=self._limit,
            skip_to=skip_to,
            share=share,
            texts=self._as_columns,
            others=("id",),
        )
        for item in rows_or_columns(path, reading):
            if isinstance(item, Columns):
                yield item, {"path": name}
                continue
            number, row = item
            self._row = (path, number, row)
            self._first = self._first or f"{path}, row {number}, has {self._fields()}"
            known = {"id": str(row["id"])} if _is_id(row.get("id")) else {}
            yield row, {"path": name, "row": number} | known

    def drop(self, reason: str, problem: str, *, role: str | None = None) -> None:
        """Count the current row as dropped, and log the first one of each reason, and of the first roles."""
        if role is not None:
            (role,) = count_names(self._counters, UNKNOWN_ROLE, [role])
        path, number, _ = self._row
        if problem and not self._dropped:
            self._first = f"{path}, row {number}: found {problem}"
        self._count(reason, role, f"{path}, row {number}: found {problem or self._fields()}")

    def check_any(self, problem: str, expected: str) -> None:
        """Raise ValueError with the reasons, at the end, if rows were dropped and there was no sample in any of them.

        Not in a partition: others may have samples. Otherwise log how many rows were dropped beside those logged.
        """
        if not self._index and self._dropped and self._partition is None:
            reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(self._dropped.items()))
            first = f"{self._first}. Expected {expected}" if self._first else self._problem
            rows = f"{self._dropped.total()} rows below {self._found.root} ({reasons})"
            raise SourceError(f"{problem} in {rows}; the first: {first}", code="E303")
        for reason, number in self._unlogged.items():
            where = self._found.root
            logger.warning("%s: and %s more, counted as %s", where, f"{number:,}", reason, extra={"code": "W305"})

    def _drop_problem(self, reason: str, kind: str | None, problem: str, number: int = 1) -> None:
        self._problem = self._problem or problem
        self._count(reason, kind, problem, number)

    def _count(self, reason: str, kind: str | None, problem: str, number: int = 1) -> None:
        self._dropped[reason] += number
        count(self._counters, reason, number)
        logged = self._logged.setdefault(reason, set())
        if kind in logged or len(logged) == _MOST_LOGGED:
            self._unlogged[reason] += number
        else:
            logged.add(kind)
            logger.warning("%s. Counted as %s; more like it are counted only", problem, reason, extra={"code": "W305"})

    def names(self) -> list[str]:
        """Return the names of the current row's fields; in a parquet file also of those that are not read."""
        path, _, row = self._row
        if not _has_suffix(path, (".parquet",)):
            return list(row)
        if path not in self._columns_of:
            from niels_gpt.data.files import parquet  # imports pyarrow, which is heavy

            self._columns_of = {path: parquet.field_names(path)}
        return self._columns_of[path]

    def _fields(self) -> str:
        names = self.names()
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return f"the fields {', '.join(names[:_MOST_NAMES]) or 'none'}{more}"


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
