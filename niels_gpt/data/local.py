"""Anyone's own text and chats: a file, a folder or a glob becomes a stream of samples.

A .txt, .md, .rst or .html file is one document, as it is; in .jsonl, .json and .parquet files a row is a text or a
chat. All but .parquet may be compressed, with .gz after the suffix. What gives no sample is counted: as too_large,
unreadable_row, missing_field, malformed or unknown_role.
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
from typing import Any

from niels_gpt.chat_template import count_role
from niels_gpt.data import chat_rows, places
from niels_gpt.data.fineweb_edu import TEXT_FIELDS
from niels_gpt.data.parquet_stream import field_names
from niels_gpt.data.position import Position
from niels_gpt.data.text_files import MAX_DOCUMENT_BYTES, TOO_LARGE, Problem, TooLarge, read_text
from niels_gpt.data.types import ChatSample, PretrainSample

logger = logging.getLogger(__name__)

_PLAIN_SUFFIXES = (".txt", ".md", ".rst", ".html", ".htm")
DOCUMENT_SUFFIXES = (*_PLAIN_SUFFIXES, *(f"{suffix}.gz" for suffix in _PLAIN_SUFFIXES))
CHAT_SUFFIXES = (".json", *places.TABLE_SUFFIXES)
TEXT_SUFFIXES = (*DOCUMENT_SUFFIXES, *CHAT_SUFFIXES)
_MOST_NAMES = 20  # in a message


@dataclass(frozen=True)
class LocalFiles:
    """The files of one source."""

    root: Path
    """A folder common to them; a file's name is its path below it."""
    files: tuple[Path, ...]
    """Absolute, each once, in order of the bytes of their names."""
    other_files: int
    """How many more match and are not read: pictures among notes, pipes, links to nothing."""
    other_kinds: tuple[tuple[str, int], ...] = ()
    """The suffixes of those, each with their number, the most frequent first."""
    links: tuple[Path, ...] = ()
    """The links that match, or are in the way to files that may, and are not followed."""

    def name_of(self, path: Path) -> str:
        """Return a file's name, with / between folders; U+FFFD stands for bytes of it that are not utf-8."""
        return os.fsencode(path.relative_to(self.root).as_posix()).decode("utf-8", "replace")


def find(
    pattern: str,
    *,
    base: Path | None = None,
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    follow_links: bool = False,
) -> LocalFiles:
    """Find the files of a source.

    pattern: a file; a folder, for all that is below it, as `FOLDER/**` is; or a glob, in which `**` stands for any
        folders, and which matches files, not folders. `~` is the home folder. Hidden files and folders (`.git`,
        `.obsidian`) are left out, unless the pattern names them.
    base: what a relative pattern is relative to; None: the current folder.
    suffixes: of the kinds that are read, in upper or lower case; CHAT_SUFFIXES for chats.
    follow_links: follow those below the folder, or below the part of a glob before its first wildcard, too; what the
        pattern itself names may always be a link. Each file comes once then, by the name with the fewest links, then
        the fewest parts, then the first by its bytes.
    Returns: `root` is the folder, the file's folder, or the part of the glob before its first wildcard, so that a new
        file leaves the names of the others as they are.
    Raises: FileNotFoundError if nothing matches, or nothing that can be read.
    """
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
    if not follow_links and (literal.is_dir() or not os.path.lexists(literal)):  # a file that is named may be a link
        matches = _without_links(matches, root, suffixes, links)
    readable = places.once_each(path for path in matches if _has_suffix(path, suffixes) and os.path.isfile(path))
    if not readable:
        raise FileNotFoundError(_nothing_found(pattern, literal, matches, suffixes, links))
    files, root = in_order(readable.values(), root)
    other = {os.path.realpath(path): path for path in sorted(matches)}
    kinds = Counter(_kind_of(path) for real, path in other.items() if real not in readable)
    return LocalFiles(root, tuple(files), kinds.total(), tuple(kinds.most_common()), tuple(sorted(set(links))))


def _without_links(matches: Iterable[Path], root: Path, suffixes: Sequence[str], links: list[Path]) -> list[Path]:
    """Return what is reached without a link below `root`; `links` receives the others' first ones."""
    kept = []
    for path in matches:
        link = places.first_link(root, path)
        if link is None or (link == path and not _has_suffix(path, suffixes)):  # such as one to a picture
            kept.append(path)
        else:
            links.append(link)
    return kept


def expand(pattern: str) -> list[Path]:
    """Return the files that a glob matches, `**` included, as absolute paths; each once, links followed."""
    matches = _matches(*_split(Path.cwd(), os.path.expanduser(pattern)), follow_links=True, links=[])
    return list(places.once_each(filter(os.path.isfile, matches)).values())


def _split(start: Path, pattern: str) -> tuple[Path, tuple[str, ...]]:
    """Return the folder that a glob begins in, and the parts from its first wildcard on, the last one in any case."""
    parts = Path(pattern).parts
    fixed = tuple(itertools.takewhile(lambda part: not glob.has_magic(part), parts[:-1]))
    return Path(os.path.abspath(start.joinpath(*fixed))), parts[len(fixed) :]


def _matches(root: Path, wild: Sequence[str], follow_links: bool, links: list[Path]) -> list[Path]:
    matches = {Path(os.path.abspath(path)) for path in _paths(root, wild, follow_links, links)}
    return [path for path in matches if not os.path.isdir(path)]


def _paths(folder: Path, wild: Sequence[str], follow_links: bool, links: list[Path]) -> Iterator[Path]:
    # glob's own `**` goes round in links to folders above: 40 times for one of them, without an end for two.
    if "**" in wild:
        at = wild.index("**")
        for base in _paths(folder, wild[:at], follow_links, links):
            for below in places.walk_folders(base, follow_links=follow_links, links=links):
                yield from _paths(below, wild[at + 1 :] or ("*",), follow_links, links)
    elif wild:
        yield from (folder / name for name in glob.iglob(os.path.join(*wild), root_dir=folder))
    else:
        yield folder


def _has_suffix(path: Path, suffixes: Sequence[str]) -> bool:
    return path.name.lower().endswith(tuple(suffixes))


def _kind_of(path: Path) -> str:
    return (path.suffix.lower() or "without a suffix") if path.is_file() else _ODD


_ODD = "pipes, devices or links to nothing"


def in_order(files: Iterable[Path], *folders: Path) -> tuple[list[Path], Path]:
    """Return absolute files, each once, and the folder common to them and to `folders`.

    Their order is that of the bytes of their paths below it, so that the same files elsewhere come in the same order.
    """
    once = set(files)
    root = Path(os.path.commonpath([*(path.parent for path in once), *folders]))
    return sorted(once, key=lambda path: os.fsencode(path.relative_to(root))), root


def iter_texts(
    found: LocalFiles,
    *,
    source: str,
    field: str | None = None,
    counters: Counter[str] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    position: dict[str, int] | None = None,
) -> Iterator[PretrainSample]:
    """Stream documents in order of files and rows, empty ones included.

    A file is rows where its suffix is one of CHAT_SUFFIXES, else one document.
    field: of a row, where its text is; None: the first of text, content, document that is a string. A row without one
        counts as "missing_field".
    max_document_bytes: of a document or row; a larger one counts as "too_large".
    position: where it is told where the stream is, and begins, by `file`, `row` and `index`: see position.Position.
    The samples' meta: "index", its number in the stream from 0; "path", the file's name; and of a row "row", its number
        from 1 (see places.numbered_rows), and "id", where it has one that is a string or an integer, as a string.
    Raises: ValueError for a file that is damaged, when it is reached, and at the end if there is not one text.
    """
    wanted = TEXT_FIELDS if field is None else (field,)
    rows = _Rows(found, counters, columns=(*wanted, "id"), max_document_bytes=max_document_bytes)
    place = Position(position)
    index = place.number("index")
    for file, path in enumerate(found.files):
        if place.passed(file):
            continue
        if not _has_suffix(path, CHAT_SUFFIXES):
            for text in () if place.behind(file) else rows.document(path):
                place.at(file, 1, index=index + 1)
                yield PretrainSample(text=text, source=source, meta={"index": index, "path": found.name_of(path)})
                index += 1
            continue
        for row, where in rows.of(path, place.behind(file)):
            texts = [row[name] for name in wanted if isinstance(row.get(name), str)]
            if not texts:
                found_in = [f"{type(row[name]).__name__} in the field {name}" for name in wanted if name in row]
                rows.drop(chat_rows.MISSING_FIELD, ", ".join(found_in))
                continue
            place.at(file, where["row"], index=index + 1)
            yield PretrainSample(text=texts[0], source=source, meta={"index": index, **where})
            index += 1
    if not index and rows.dropped:
        expected = f"a string in the field {' or '.join(wanted)}; name the one that holds the text: NAME=GLOB:FIELD"
        raise ValueError(f"{source}: not one text in {rows.summary(expected)}")


def iter_chats(
    found: LocalFiles,
    *,
    source: str,
    counters: Counter[str] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    position: dict[str, int] | None = None,
) -> Iterator[ChatSample]:
    """Stream chats in order of files and rows, those without an assistant's turn included.

    What a row may look like, and why it may be dropped: see chat_rows. The rest: as `iter_texts`.
    """
    rows = _Rows(found, counters, columns=(*chat_rows.FIELDS, "id"), max_document_bytes=max_document_bytes)
    place = Position(position)
    index = place.number("index")
    for file, path in enumerate(found.files):
        if place.passed(file):
            continue
        for row, where in rows.of(path, place.behind(file)):
            try:
                messages = chat_rows.messages_of(row)
            except chat_rows.NotAChatError as error:
                rows.drop(error.reason, error.found, role=error.role)
                continue
            place.at(file, where["row"], index=index + 1)
            yield ChatSample(messages=messages, source=source, meta={"index": index, **where})
            index += 1
    if not index and rows.dropped:
        raise ValueError(f"{source}: not one chat in {rows.summary(f'one of the shapes {chat_rows.SHAPES}')}")


class _Rows:
    """The rows of a source's files, and what was dropped of them."""

    def __init__(
        self,
        found: LocalFiles,
        counters: Counter[str] | None,
        *,
        columns: Collection[str],
        max_document_bytes: int,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._found = found
        self._counters = Counter() if counters is None else counters
        self._limit = max_document_bytes
        self._columns = columns
        self._row: tuple[Path, int, dict[str, Any]]  # the present one
        self._first = ""  # what fields the first row has that could be read
        self._problem = ""  # of the first that could not
        self._told: set[tuple[str, str | None]] = set()

    def document(self, path: Path) -> Iterator[str]:
        """Yield the text of a file that is one document, or nothing, which is counted."""
        try:
            yield read_text(path, counters=self._counters, max_document_bytes=self._limit)
        except TooLarge as error:
            self._problem = self._problem or str(error)
            if self._counted_first(TOO_LARGE, None):
                _warn(str(error), TOO_LARGE)

    def of(self, path: Path, behind: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the rows of a file behind the one of that number, each with its place as a sample's meta gives it."""
        name = self._found.name_of(path)

        def pass_over(problem: Problem) -> None:
            self._problem = self._problem or problem
            if self._counted_first(problem.reason, str(path), problem.rows):
                _warn(problem, problem.reason)

        rows = places.numbered_rows(
            path,
            counters=self._counters,
            columns=self._columns,
            unreadable=pass_over,
            max_document_bytes=self._limit,
            behind=behind,
        )
        for number, row in rows:
            self._row = (path, number, row)
            self._first = self._first or f"{path}, row {number}, has {self._fields()}"
            known = isinstance(row.get("id"), str | int) and not isinstance(row["id"], bool)
            yield row, {"path": name, "row": number} | ({"id": str(row["id"])} if known else {})

    def drop(self, reason: str, found: str, *, role: str | None = None) -> None:
        """Count the present row as dropped, and log the first one of each reason and of each foreign role.

        found: what is wrong with it; "": its fields are not those that were looked for.
        """
        if role is not None and self._counters is not None:
            count_role(self._counters, role)
        if self._counted_first(reason, role):
            path, number, _ = self._row
            _warn(f"{path}, row {number}: found {found or self._fields()}", reason)

    def summary(self, expected: str) -> str:
        """Tell how many rows were dropped, why, what the first is like, and what was expected, if they have fields."""
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(self.dropped.items()))
        count = f"{self.dropped.total()} rows below {self._found.root} ({reasons}); the first: "
        return count + (f"{self._first}. Expected {expected}" if self._first else self._problem)

    def _counted_first(self, reason: str, kind: str | None, number: int = 1) -> bool:
        self.dropped[reason] += number
        places.count(self._counters, reason, number)
        first = (reason, kind) not in self._told
        self._told.add((reason, kind))
        return first

    def _fields(self) -> str:
        path, _, row = self._row
        names = field_names(path) if _has_suffix(path, (".parquet",)) else list(row)  # not all of its are read
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return f"the fields {', '.join(names[:_MOST_NAMES]) or 'none'}{more}"


def _warn(problem: str, reason: str) -> None:
    logger.warning("%s. Counted as %s; more like it are counted only", problem, reason)


def _nothing_found(
    pattern: str, literal: Path, matches: Sequence[Path], suffixes: Sequence[str], links: Sequence[Path]
) -> str:
    if links and not matches:
        return (
            f"nothing that {pattern!r} matches can be read: found {len(set(links))} symbolic links, such as "
            f"{min(links)}, which are not followed. If they may be, pass --follow-links"
        )
    if not matches and not literal.is_dir():
        return (
            f"nothing matches {pattern!r}: no file or folder at {literal}. Expected a file, a folder, or a glob in "
            "quotation marks, such as 'notes/**/*.md': a shell expands an unquoted one"
        )
    kinds = sorted({(path.suffix or path.name) if path.is_file() else _ODD for path in matches})[:_MOST_NAMES]
    found = f"{len(matches)} files of other kinds ({', '.join(kinds)})" if matches else f"an empty folder, {literal}"
    more = "; --as-text .SUFFIX,... reads more kinds as text" if DOCUMENT_SUFFIXES[0] in suffixes else ""
    return (
        f"nothing that {pattern!r} matches can be read: found {found}, expected files that end in one of "
        f"{' '.join(suffixes)}{more}. Name the right ones; put a glob in quotation marks, as a shell expands an "
        "unquoted one"
    )
