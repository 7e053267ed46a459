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
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.chat_template import count_role
from niels_gpt.data import chat_rows, places
from niels_gpt.data.fineweb_edu import TEXT_FIELDS
from niels_gpt.data.parquet_stream import field_names
from niels_gpt.data.types import ChatSample, PretrainSample

logger = logging.getLogger(__name__)

DOCUMENT_SUFFIXES = (".txt", ".md")
CHAT_SUFFIXES = (".json", *places.TABLE_SUFFIXES)
TEXT_SUFFIXES = (*DOCUMENT_SUFFIXES, *CHAT_SUFFIXES)
UNREADABLE_ROW = "unreadable_row"
DOCUMENT_BYTES = 1 << 26
"""Of a .txt or .md file, at most: 132 MB of text took 4.7 GB to encode."""
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

    def name_of(self, path: Path) -> str:
        """Return a file's name, with / between folders; U+FFFD stands for bytes of it that are not utf-8."""
        return os.fsencode(path.relative_to(self.root).as_posix()).decode("utf-8", "replace")


def find(pattern: str, *, base: Path | None = None, suffixes: Sequence[str] = TEXT_SUFFIXES) -> LocalFiles:
    """Find the files of a source.

    pattern: a file; a folder, for all that is below it, as `FOLDER/**` is; or a glob, in which `**` stands for any
        folders, and which matches files, not folders. `~` is the home folder. Hidden files and folders (`.git`,
        `.obsidian`) are left out, unless the pattern names them. Links are followed, and each file comes once, by the
        name with the fewest links, then the fewest parts, then the first by its bytes.
    base: what a relative pattern is relative to; None: the current folder.
    suffixes: of the kinds that are read, in upper or lower case; CHAT_SUFFIXES for chats.
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
    matches = _matches(root, wild)
    readable = _once_each(path for path in matches if _has_suffix(path, suffixes) and os.path.isfile(path))
    if not readable:
        raise FileNotFoundError(_nothing_found(pattern, literal, matches, suffixes))
    files, root = in_order(readable.values(), root)
    return LocalFiles(root, tuple(files), len({os.path.realpath(path) for path in matches} - readable.keys()))


def expand(pattern: str) -> list[Path]:
    """Return the files that a glob matches, `**` included, as absolute paths; each once, as `find` has them."""
    return list(_once_each(filter(os.path.isfile, _matches(*_split(Path.cwd(), os.path.expanduser(pattern))))).values())


def _split(start: Path, pattern: str) -> tuple[Path, tuple[str, ...]]:
    """Return the folder that a glob begins in, and the parts from its first wildcard on, the last one in any case."""
    parts = Path(pattern).parts
    fixed = tuple(itertools.takewhile(lambda part: not glob.has_magic(part), parts[:-1]))
    return Path(os.path.abspath(start.joinpath(*fixed))), parts[len(fixed) :]


def _matches(root: Path, wild: Sequence[str]) -> list[Path]:
    matches = {Path(os.path.abspath(path)) for path in _paths(root, wild)}
    return [path for path in matches if not os.path.isdir(path)]


def _paths(folder: Path, wild: Sequence[str]) -> Iterator[Path]:
    # glob's own `**` goes round in links to folders above: 40 times for one of them, without an end for two.
    if "**" in wild:
        at = wild.index("**")
        for base in _paths(folder, wild[:at]):
            for below in places.walk_folders(base):
                yield from _paths(below, wild[at + 1 :] or ("*",))
    elif wild:
        yield from (folder / name for name in glob.iglob(os.path.join(*wild), root_dir=folder))
    else:
        yield folder


def _once_each(paths: Iterable[Path]) -> dict[str, Path]:
    """Return the best of the names of each file, by what it resolves to."""
    names: dict[str, list[Path]] = {}
    for path in paths:
        names.setdefault(os.path.realpath(path), []).append(path)
    return {real: found[0] if len(found) == 1 else min(found, key=_detours) for real, found in names.items()}


def _detours(path: Path) -> tuple[int, int, bytes]:
    return sum(map(os.path.islink, (path, *path.parents))), len(path.parts), os.fsencode(path)


def _has_suffix(path: Path, suffixes: Sequence[str]) -> bool:
    return path.name.lower().endswith(tuple(suffixes))


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
    Raises: ValueError for a file that is damaged, or larger than DOCUMENT_BYTES, when it is reached, and at the end for
        rows of which none has a text.
    """
    wanted = TEXT_FIELDS if field is None else (field,)
    rows = _Rows(found, counters, columns=(*wanted, "id"))
    index = 0
    for path in found.files:
        if _has_suffix(path, DOCUMENT_SUFFIXES):
            _check_size(path)
            text = places.read_text(path, counters=counters)
            yield PretrainSample(text=text, source=source, meta={"index": index, "path": found.name_of(path)})
            index += 1
            continue
        for row, where in rows.of(path):
            texts = [row[name] for name in wanted if isinstance(row.get(name), str)]
            if not texts:
                found_in = [f"{type(row[name]).__name__} in the field {name}" for name in wanted if name in row]
                rows.drop(chat_rows.MISSING_FIELD, ", ".join(found_in))
                continue
            yield PretrainSample(text=texts[0], source=source, meta={"index": index, **where})
            index += 1
    if not index and rows.dropped:
        expected = f"a string in the field {' or '.join(wanted)}; name the one that holds the text: NAME=GLOB:FIELD"
        raise ValueError(f"{source}: not one text in {rows.summary(expected)}")


def _check_size(path: Path) -> None:
    size = path.stat().st_size
    if size > DOCUMENT_BYTES:
        raise ValueError(
            f"{path}: one document of {size:,} bytes, expected at most {DOCUMENT_BYTES:,}: a document is encoded "
            "whole, and takes about 36 times its size in memory. Cut it at line ends, as does `split -C 10M "
            f"--additional-suffix {path.suffix} {path.name} part-`, or make its parts rows of a .jsonl file"
        )


def iter_chats(found: LocalFiles, *, source: str, counters: Counter[str] | None = None) -> Iterator[ChatSample]:
    """Stream chats in order of files and rows, those without an assistant's turn included.

    What a row may look like, and why it may be dropped: see chat_rows. meta and Raises: as `iter_texts`.
    """
    rows = _Rows(found, counters, columns=(*chat_rows.FIELDS, "id"))
    index = 0
    for path in found.files:
        for row, where in rows.of(path):
            try:
                messages = chat_rows.messages_of(row)
            except chat_rows.NotAChatError as error:
                rows.drop(error.reason, error.found, role=error.role)
                continue
            yield ChatSample(messages=messages, source=source, meta={"index": index, **where})
            index += 1
    if not index and rows.dropped:
        raise ValueError(f"{source}: not one chat in {rows.summary(f'one of the shapes {chat_rows.SHAPES}')}")


class _Rows:
    """The rows of a source's files, and what was dropped of them."""

    def __init__(self, found: LocalFiles, counters: Counter[str] | None, *, columns: Collection[str]) -> None:
        self.dropped: Counter[str] = Counter()
        self._found = found
        self._counters = counters
        self._columns = columns
        self._row: tuple[Path, int, dict[str, Any]]  # the present one
        self._first = ""  # what fields the first row has that could be read
        self._problem = ""  # of the first that could not
        self._told: set[tuple[str, str | None]] = set()

    def of(self, path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the rows of a file, each with its place as a sample's meta gives it."""
        name = self._found.name_of(path)

        def pass_over(problem: str) -> None:
            self._problem = self._problem or problem
            if self._counted_first(UNREADABLE_ROW, str(path)):
                _warn(problem, UNREADABLE_ROW)

        rows = places.numbered_rows(path, counters=self._counters, columns=self._columns, unreadable=pass_over)
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

    def _counted_first(self, reason: str, kind: str | None) -> bool:
        self.dropped[reason] += 1
        places.count(self._counters, reason)
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


def _nothing_found(pattern: str, literal: Path, matches: Sequence[Path], suffixes: Sequence[str]) -> str:
    if not matches and not literal.is_dir():
        return (
            f"nothing matches {pattern!r}: no file or folder at {literal}. Expected a file, a folder, or a glob in "
            "quotation marks, such as 'notes/**/*.md': a shell expands an unquoted one"
        )
    odd = "pipes, devices or links to nothing"
    kinds = sorted({(path.suffix or path.name) if path.is_file() else odd for path in matches})[:_MOST_NAMES]
    found = f"{len(matches)} files of other kinds ({', '.join(kinds)})" if matches else f"an empty folder, {literal}"
    return (
        f"nothing that {pattern!r} matches can be read: found {found}, expected files that end in one of "
        f"{' '.join(suffixes)}. Name the right ones; put a glob in quotation marks, as a shell expands an unquoted one"
    )
