"""Anyone's own text and chats: a file, a folder or a glob becomes a stream of samples.

A .txt or .md file is one document; in .jsonl, .json (both also with .gz) and .parquet files a row is a text or a chat.
A row that gives no sample is counted: as unreadable_row, missing_field, malformed or unknown_role.
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.data import chat_rows, places
from niels_gpt.data.fineweb_edu import TEXT_FIELDS
from niels_gpt.data.types import ChatSample, PretrainSample

logger = logging.getLogger(__name__)

DOCUMENT_SUFFIXES = (".txt", ".md")
CHAT_SUFFIXES = (".json", *places.TABLE_SUFFIXES)
TEXT_SUFFIXES = (*DOCUMENT_SUFFIXES, *CHAT_SUFFIXES)
UNREADABLE_ROW = "unreadable_row"
_MOST_NAMES = 20  # in a message


@dataclass(frozen=True)
class LocalFiles:
    """The files of one source."""

    root: Path
    """A folder common to them; a file's name is its path below it."""
    files: tuple[Path, ...]
    """Absolute, each once, in order of the bytes of their names."""
    other_files: int
    """How many more match, of kinds that are not read: pictures among notes."""

    def name_of(self, path: Path) -> str:
        """Return a file's name, with / between folders; U+FFFD stands for bytes of it that are not utf-8."""
        return os.fsencode(path.relative_to(self.root).as_posix()).decode("utf-8", "replace")


def find(pattern: str, *, base: Path | None = None, suffixes: Sequence[str] = TEXT_SUFFIXES) -> LocalFiles:
    """Find the files of a source.

    pattern: a file; a folder, for all that is below it; or a glob, in which `**` stands for any folders, and which
        matches files, not folders, and once each, however many links lead there. `~` is the home folder. Hidden files
        and folders (`.git`, `.obsidian`) are left out, unless the pattern names them.
    base: what a relative pattern is relative to; None: the current folder.
    suffixes: of the kinds that are read; CHAT_SUFFIXES for chats.
    Returns: `root` is the folder, the file's folder, or the part of the glob before its first wildcard, so that a new
        file leaves the names of the others as they are.
    Raises: FileNotFoundError if nothing matches, or nothing that can be read.
    """
    start, rest = Path.cwd() if base is None else base, os.path.expanduser(pattern)
    literal = Path(os.path.abspath(start / rest))  # a name may have brackets in it
    if literal.is_dir():
        root, matches = literal, places.walk_files(literal, suffixes=("",))
    elif literal.is_file():
        root, matches = literal.parent, [literal]
    else:
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), Path(rest).parts)
        root = Path(os.path.abspath(start.joinpath(*fixed)))
        matches = _once_each(expand(os.path.join(glob.escape(str(start)), rest)))
    readable = [path for path in matches if path.name.endswith(tuple(suffixes))]
    if not readable:
        raise FileNotFoundError(_nothing_found(pattern, literal, matches, suffixes))
    files, root = in_order(readable, root)
    return LocalFiles(root, tuple(files), len(matches) - len(files))


def expand(pattern: str) -> list[Path]:
    """Return the files that a glob matches, `**` included, as absolute paths; folders are passed over."""
    matches = [Path(os.path.abspath(name)) for name in glob.iglob(os.path.expanduser(pattern), recursive=True)]
    return [path for path in matches if path.is_file()]


def _once_each(paths: Sequence[Path]) -> list[Path]:
    # `**` follows links to folders, and one to a folder above makes 40 names for each file: the shortest is kept.
    shortest: dict[str, Path] = {}
    for path in sorted(set(paths), key=lambda path: (len(path.parts), os.fsencode(path))):
        kept = shortest.setdefault(os.path.realpath(path), path)
        if kept is not path:
            logger.debug("%s is %s, which is read once", path, kept)
    return list(shortest.values())


def in_order(files: Iterable[Path], *folders: Path) -> tuple[list[Path], Path]:
    """Return absolute files, each once, and the folder common to them and to `folders`.

    Their order is that of the bytes of their paths below it, so that the same files elsewhere come in the same order.
    """
    once = set(files)
    root = Path(os.path.commonpath([*(path.parent for path in once), *folders]))
    return sorted(once, key=lambda path: os.fsencode(path.relative_to(root))), root


def iter_texts(
    found: LocalFiles, *, source: str, field: str | None = None, counters: Counter[str] | None = None
) -> Iterator[PretrainSample]:
    """Stream documents in order of files and rows, empty ones included.

    field: of a row, where its text is; None: the first of text, content, document that is a string. A row without one
        counts as "missing_field".
    The samples' meta: "index", its number in the stream from 0; "path", the file's name; and of a row "row", its number
        from 1 (see places.numbered_rows), and "id", where it has one that is a string or an integer, as a string.
    Raises: ValueError for a file that is damaged, when it is reached, and at the end for rows of which none has a text.
    """
    rows = _Rows(found, counters)
    wanted = TEXT_FIELDS if field is None else (field,)
    index = 0
    for path in found.files:
        if path.name.endswith(DOCUMENT_SUFFIXES):
            text = places.read_text(path, counters=counters)
            yield PretrainSample(text=text, source=source, meta={"index": index, "path": found.name_of(path)})
            index += 1
            continue
        for row, where in rows.of(path):
            texts = [row[name] for name in wanted if isinstance(row.get(name), str)]
            if not texts:
                rows.drop("missing_field")
                continue
            yield PretrainSample(text=texts[0], source=source, meta={"index": index, **where})
            index += 1
    if not index and rows.dropped:
        raise ValueError(
            f"{source}: not one text in {rows.summary()}. Expected a string in the field {' or '.join(wanted)}; "
            "name the one that holds the text: NAME=GLOB:FIELD"
        )


def iter_chats(found: LocalFiles, *, source: str, counters: Counter[str] | None = None) -> Iterator[ChatSample]:
    """Stream chats in order of files and rows, those without an assistant's turn included.

    What a row may look like, and why it may be dropped: see chat_rows. meta and Raises: as `iter_texts`.
    """
    rows = _Rows(found, counters)
    foreign_roles: set[str] = set()
    index = 0
    for path in found.files:
        for row, where in rows.of(path):
            try:
                messages = chat_rows.messages_of(row)
            except chat_rows.NotAChatError as error:
                rows.drop(error.reason)
                if error.role is not None and error.role not in foreign_roles:
                    foreign_roles.add(error.role)
                    spot = f"{path}, row {where['row']}"
                    logger.warning("%s: found a turn of role %r; chats with one are dropped", spot, error.role)
                continue
            yield ChatSample(messages=messages, source=source, meta={"index": index, **where})
            index += 1
    if not index and rows.dropped:
        raise ValueError(f"{source}: not one chat in {rows.summary()}. Expected one of the shapes {chat_rows.SHAPES}")


class _Rows:
    """The rows of a source's files, and what was dropped of them."""

    def __init__(self, found: LocalFiles, counters: Counter[str] | None) -> None:
        self.dropped: Counter[str] = Counter()
        self._found = found
        self._counters = counters
        self._fields = ""  # of the first row that could be read
        self._problem = ""  # of the first that could not

    def of(self, path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the rows of a file, each with its place as a sample's meta gives it."""
        name = self._found.name_of(path)
        unreadable = 0

        def pass_over(problem: str) -> None:
            nonlocal unreadable
            unreadable += 1
            self.drop(UNREADABLE_ROW)
            self._problem = self._problem or problem
            if unreadable == 1:
                logger.warning("%s. Counted as %s; more in this file are counted only", problem, UNREADABLE_ROW)

        for number, row in places.numbered_rows(path, counters=self._counters, unreadable=pass_over):
            self._fields = self._fields or f"{path}, row {number}, has the fields {_names_in(row)}"
            known = isinstance(row.get("id"), str | int) and not isinstance(row["id"], bool)
            yield row, {"path": name, "row": number} | ({"id": str(row["id"])} if known else {})

    def drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        places.count(self._counters, reason)

    def summary(self) -> str:
        """Tell how many rows were dropped, why, and what the first is like."""
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(self.dropped.items()))
        first = self._fields or self._problem
        return f"{self.dropped.total()} rows below {self._found.root} ({reasons}); the first: {first}"


def _names_in(row: Mapping[str, Any]) -> str:
    more = f" and {len(row) - _MOST_NAMES} more" if len(row) > _MOST_NAMES else ""
    return (", ".join(itertools.islice(row, _MOST_NAMES)) or "none") + more


def _nothing_found(pattern: str, literal: Path, matches: Sequence[Path], suffixes: Sequence[str]) -> str:
    if not matches and not literal.is_dir():
        return (
            f"nothing matches {pattern!r}: no file or folder at {literal}. Expected a file, a folder, or a glob in "
            "quotation marks, such as 'notes/**/*.md': a shell expands an unquoted one"
        )
    kinds = sorted({path.suffix or path.name for path in matches})[:_MOST_NAMES]
    found = f"{len(matches)} files of other kinds ({', '.join(kinds)})" if matches else f"an empty folder, {literal}"
    return (
        f"nothing that {pattern!r} matches can be read: found {found}, expected files that end in one of "
        f"{' '.join(suffixes)}. Name the right ones; put a glob in quotation marks, as a shell expands an unquoted one"
    )
