"""Text of a file: its encoding, size limit and compression, and the counters of repaired and dropped documents.

A file that begins with a byte-order mark is decoded as it says (UTF-8, UTF-16, UTF-32), without the mark. Any other
file is UTF-8; invalid bytes become U+FFFD, and the document or row counts as "repaired_utf8". A document or row of more
than `max_document_bytes` is never held in memory: it is dropped and counts as "too_large". Compressed files are read as
a stream, so they need no more memory than the limit and, for .zst, a window of at most 128 MiB.
"""

from __future__ import annotations

import codecs
import gzip
import io
import logging
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from niels_gpt.data.files.part import WHOLE_FILE, Share
from niels_gpt.signals import EMPTY_FILE, GIT_LFS_POINTER
from niels_gpt.storage.errors import CacheError, SourceError, errors_as
from niels_gpt.storage.fileio import open_for_reading
from niels_gpt.storage.meta_json import refuse_holes

logger = logging.getLogger(__name__)

_TOLD_BYTES = 1 << 32  # a line that is too large is named again after this many: unpacked, it can have any length

MAX_DOCUMENT_BYTES = 1 << 26
"""The largest document or row by default: 64 MiB."""

REPAIRED, BYTE_ORDER_MARK, WITH_NUL = "repaired_utf8", "byte_order_mark", "texts_with_nul"
"""Counters of kept documents; `signals.is_of_kept` knows more. Every other counter has dropped documents."""
TOO_LARGE, UNREADABLE_ROW, MISSING_FIELD = "too_large", "unreadable_row", "missing_field"
LINKS, RESOURCE_FORK = "links_not_followed", "resource_fork"

NOT_FETCHED = "a pointer of git-lfs in place of the text; fetch it: git lfs pull"

PACKED_SUFFIXES = (".gz", ".zst")
"""Suffixes of compressed files, after the suffix of their content."""

_MARKS = (  # UTF-32 LE first: its mark begins with that of UTF-16 LE
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_POINTER_BEGINS = b"version https://git-lfs.github.com/spec/v1"
TWO_WORDS = r"[^ \t\n\f\r][ \t\n\f\r]+[^ \t\n\f\r]"  # by classes: `re` and arrow differ in \s
_POINTER_BYTES = 1 << 10  # git-lfs's own limit
_BLOCK_BYTES = 1 << 16
_READ_BYTES = 1 << 20
_ZSTD_WINDOW_LOG = 27  # 128 MiB, what zstd itself reads without --long
_BROKEN = "niels_gpt.broken"
# Invalid UTF-16 becomes a byte that is invalid UTF-8, which is replaced and counted with its document.
codecs.register_error(_BROKEN, lambda error: ("\udcff", cast(UnicodeDecodeError, error).end))


class Problem(str):
    """The reason to drop a row: a sentence that names the file and the row."""

    reason: str = UNREADABLE_ROW
    rows: int = 1

    @classmethod
    def too_large(cls, where: str, limit: int, *, rows: int = 1, found: str = "") -> Problem:
        """Return the problem of a document, a row, or several rows that can only be read together. found: the size."""
        found = found or f"more than {limit:,} bytes"
        problem = cls(f"{where}: {found}, expected at most {limit:,} in a document (--max-document-bytes)")
        problem.reason, problem.rows = TOO_LARGE, rows
        return problem


def count(counters: Counter[str] | None, reason: str, number: int = 1) -> None:
    """Add to a counter, if there are counters; 0 adds no entry."""
    if counters is not None and number:
        counters[reason] += number


def note(counters: Counter[str] | None, reason: str, problem: str, number: int = 1) -> None:
    """Count a problem, and log the first of each reason. A build has one Counter per source. None: do neither."""
    if counters is None:
        return
    if not counters[reason]:
        logger.warning("%s. Counted as %s; more like it are counted only", problem, reason, extra={"code": "W305"})
    counters[reason] += number


def is_pointer(text: bytes | str) -> bool:
    """Return whether a text is a pointer of git-lfs to a text that is not fetched."""
    begin = text[:_POINTER_BYTES]
    if isinstance(begin, str):
        begin = begin.encode(errors="replace")
    return begin.startswith(_POINTER_BEGINS) and len(begin) < _POINTER_BYTES


def has_other_text(texts: Sequence[str]) -> bool:
    """Return whether a row has a second text, different from the first one, which is read.

    A string without white space inside is not text but a name or an id.
    """
    return any(text != texts[0] and re.search(TWO_WORDS, text) for text in texts[1:])


def is_empty_file(path: Path, counters: Counter[str] | None) -> bool:
    """Return whether a file of rows, or a compressed one, has no byte, and count it. A parquet file is damaged then."""
    if path.name.lower().endswith(".parquet"):
        return False
    with errors_as("E301"):
        about = path.stat()
    if about.st_size or not stat.S_ISREG(about.st_mode):
        return False
    note(counters, EMPTY_FILE, f"{path}: a file without a byte")
    return True


def says_nothing(value: Any) -> bool:
    """Return whether a value is empty: null, a blank text, an empty list or object, or one of such values."""
    if isinstance(value, str):
        return value.strip() in ("", "null", "[]", "{}")  # the last three: as JSON in a text
    if isinstance(value, dict):
        return all(map(says_nothing, value.values()))
    return value is None or (isinstance(value, list) and all(map(says_nothing, value)))


def decode(data: bytes, *, counters: Counter[str] | None = None, where: str = "") -> str:
    """Decode UTF-8 with U+FFFD for invalid bytes, which count as "repaired_utf8" once per call.

    where: the file, and the row if any, for the log.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"{where}: not UTF-8 at byte {error.start}; kept, with U+FFFD in place of what cannot be decoded"
        note(counters, REPAIRED, problem)
        return data.decode("utf-8", errors="replace")


def read_text(
    path: str | os.PathLike[str],
    *,
    counters: Counter[str] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
) -> str:
    """Read a whole file, decompressed if it is of PACKED_SUFFIXES, newlines unchanged; see `decode`.

    Raises: UnusableFile, a ValueError, for more than `max_document_bytes` of UTF-8 and for a pointer of git-lfs;
        ValueError for a damaged .gz or .zst.
    """
    blocks, size = [], 0
    with opened_text(Path(path), counters=counters) as file:  # block by block: a file may be a gzip bomb, or grow
        while size <= max_document_bytes and (block := file.read(min(_READ_BYTES, max_document_bytes + 1 - size))):
            blocks.append(block)
            size += len(block)
    data = b"".join(blocks)
    blocks.clear()
    if len(data) > max_document_bytes:
        name = unpacked_name(Path(path).name)
        cut = f"split -C 10M --additional-suffix {Path(name).suffix} {name} part-"
        problem = Problem.too_large(os.fspath(path), max_document_bytes)
        raise UnusableFile(TOO_LARGE, f"{problem}. To keep it, cut it at line ends: {cut}")
    return decode(data, counters=counters, where=os.fspath(path))


class UnusableFile(SourceError):
    """A file is too large for one document, or a pointer of git-lfs. The message names the file and the remedy."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason
        """The counter of the dropped document."""


def unpacked_name(name: str) -> str:
    """Return a file's name without the suffix of its compression."""
    return name[: -len(found)] if (found := packed_suffix(name)) else name


def packed_suffix(name: str) -> str:
    """Return the one of PACKED_SUFFIXES that ends a file's name; "" for none."""
    return next((suffix for suffix in PACKED_SUFFIXES if name.lower().endswith(suffix)), "")


def lines_of(
    file: BinaryIO, limit: int, share: Share = WHOLE_FILE, skip_to: int = 0, *, path: Path | None = None
) -> Iterator[tuple[int, bytes | None]]:
    """Yield lines with their numbers from 1 and their line ends; None instead of a line of more than `limit` bytes.

    share: lines to yield. skip_to: leave out the lines up to this number. path: names the file in messages.
    """
    for first, lines in line_blocks(file, limit, path):
        numbers = share.numbers(max(first, skip_to + 1), first + len(lines))
        yield from zip(numbers, lines[numbers.start - first :: numbers.step], strict=True)


def line_blocks(file: BinaryIO, limit: int, path: Path | None = None) -> Iterator[tuple[int, list[bytes | None]]]:
    """Yield the lines of `lines_of`, about a mebibyte at a time: the number of the first line, and the lines."""
    reader = cast(io.BufferedReader, file)
    number, parts, size = 1, list[bytes](), 0  # parts: of a line without its end so far; none of one that is too large
    while block := reader.read1(_READ_BYTES):  # what could be read before a damaged place is not lost
        lines: list[bytes | None] = list(io.BytesIO(block))
        rest = b"" if block.endswith(b"\n") else cast(bytes, lines.pop())
        if lines:
            if len(block) > limit:
                lines = [line if len(cast(bytes, line)) <= limit else None for line in lines]
            if size:
                begin = lines[0] or b""
                lines[0] = b"".join([*parts, begin]) if begin and size + len(begin) <= limit else None
            yield number, lines
            number += len(lines)
            parts, size = [], 0
        size += len(rest)
        if size > limit:
            parts = []
            if size // _TOLD_BYTES > (size - len(rest)) // _TOLD_BYTES:
                logger.info("%s, line %d: more than %d GiB, too large; looking for its end", path, number, size >> 30)
        elif rest:
            parts.append(rest)
    if size:
        yield number, [b"".join(parts) if size <= limit else None]


def open_source(path: Path) -> int:
    """Open a regular file of a source and return its descriptor.

    Raises: FileNotFoundError E301 if it does not exist; NotRegularError E205 if it is not a regular file; SourceError
        E302 if it is mostly holes.
    """
    with errors_as("E301"):
        handle = open_for_reading(path, follow_links=True)
    try:
        refuse_holes(path, handle)
    except CacheError as error:
        os.close(handle)
        raise SourceError(f"{path}: {error.problem}. Fetch it again, or take it away") from None
    return handle


@contextmanager
def opened_text(path: Path, *, counters: Counter[str] | None = None) -> Iterator[BinaryIO]:
    """Open a file and yield its text as UTF-8 without a byte-order mark, which is counted.

    Raises: UnusableFile E302 for a pointer of git-lfs; the errors of `open_source`; inside the block SourceError E302
        for a damaged .gz or .zst file.
    """
    packed = packed_suffix(path.name)
    with open(open_source(path), "rb") as raw:
        if is_pointer(raw.peek(_POINTER_BYTES)):
            raise UnusableFile(GIT_LFS_POINTER, f"{path}: {NOT_FETCHED}")
        if packed == ".gz":
            try:
                with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
                    yield _as_utf8(cast(BinaryIO, unpacked), path, counters)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise SourceError(f"{path}: damaged gzip file ({error}); fetch it again") from error
        elif packed == ".zst":
            with _unpacked_zstd(raw, path) as file:
                yield _as_utf8(file, path, counters)
        else:
            yield _as_utf8(raw, path, counters)


@contextmanager
def _unpacked_zstd(raw: io.BufferedReader, path: Path) -> Iterator[BinaryIO]:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    if not raw.peek(1):  # as gzip does, nothing is nothing
        yield raw
        return
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
    try:
        with zstd.ZstdFile(raw, "rb", options=options) as unpacked:
            yield cast(BinaryIO, unpacked)
    except (zstd.ZstdError, EOFError) as error:
        if "too much memory" in str(error):
            window = f"a window of more than {1 << _ZSTD_WINDOW_LOG:,} bytes (zstd --long)"
            raise SourceError(f"{path}: {window}; compress it without --long") from error
        raise SourceError(f"{path}: damaged zstd file ({error}); fetch it again") from error


def _as_utf8(file: BinaryIO, path: Path, counters: Counter[str] | None) -> BinaryIO:
    head = cast(io.BufferedReader, file).peek(4)[:4]
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            file.read(len(mark))
            count(counters, BYTE_ORDER_MARK)
            return file if encoding == "utf-8" else io.BufferedReader(_Transcoded(file, encoding), _BLOCK_BYTES)
    return file


class _Transcoded(io.RawIOBase):
    """A file of another encoding, read as UTF-8."""

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)(_BROKEN)
        self._ready = b""
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready and not self._ended:
            block = self._file.read(_BLOCK_BYTES)
            self._ended = not block
            self._ready = self._decoder.decode(block, final=self._ended).encode("utf-8", "surrogateescape")
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size
