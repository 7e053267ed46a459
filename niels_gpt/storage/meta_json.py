"""meta.json: its checksum, file records and content_sha256; reading files of a cache. No value in a file is trusted."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import re
import reprlib
import shlex
import stat
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.fileio import META_NAME, NotRegularError, PathLike, canonical_json, open_for_reading
from niels_gpt.storage.mounted import MOUNTED, let_arrive

MAX_JSON_BYTES = 1 << 25
"""Largest file that is parsed: 32 MiB. The meta.json of 15,000 shards has 4 MiB."""
MAX_JSON_VALUES = 1 << 20
"""Most values that are parsed: an empty list has three bytes in a file, but takes a hundred of memory."""

_CRC_LINE = re.compile(rb'(?m)^  "meta_crc32": "([^\n]{8})",?$')  # a string of canonical JSON contains no line end
_CRC_DIGITS = re.compile(rb"[0-9a-f]{8}")
_SHA256 = re.compile("[0-9a-f]{64}")
_MAX_NAME, _MAX_PART = 1024, 255  # bytes of a file name, and of one part of it: the limits of file systems
_MAX_DIGITS = 100
_MIN_SPARSE_BYTES = 1 << 20
LEAST_SHARE = 64
"""A file with less than a 64th of its bytes on disk is mostly holes."""


# --- meta_crc32 -------------------------------------------------------------------------------------------------------


def meta_bytes(meta: Mapping[str, Any]) -> bytes:
    """Return a meta as canonical JSON with `meta_crc32`, which replaces one in `meta`.

    It is the CRC-32 of these bytes with its own eight digits as zeros.
    """
    raw = canonical_json({**meta, "meta_crc32": "0" * 8})
    line = _CRC_LINE.search(raw)
    assert line is not None
    return raw[: line.start(1)] + b"%08x" % zlib.crc32(raw) + raw[line.end(1) :]


def meta_crc32(raw: bytes) -> tuple[int | None, int]:
    """Return the stored and the computed CRC-32 of a meta.json's bytes, which are equal in an intact file.

    Stored is None without a line `  "meta_crc32": "..."`, as in files of older builders and other tools, and -1 if its
    eight characters are not lower-case hex digits. The rest of the file may be damaged.
    """
    line = _CRC_LINE.search(raw)
    if line is None:
        return None, zlib.crc32(raw)
    digits = line.group(1)
    computed = zlib.crc32(raw[line.end(1) :], zlib.crc32(b"0" * 8, zlib.crc32(raw[: line.start(1)])))
    return (int(digits, 16) if _CRC_DIGITS.fullmatch(digits) else -1), computed


# --- reading files of a cache -----------------------------------------------------------------------------------------


def open_regular(path: PathLike, *, holes: bool = False, least_share: int = LEAST_SHARE) -> int:
    """Open a regular file of a cache read-only and return its descriptor, which the caller closes.

    holes: accept a sparse file, such as an EAGLE-3 file that is not completely written. least_share: see
        `refuse_holes`.
    Raises: FileNotFoundError; CacheError E205 for a symlink, a folder, a FIFO or a device; CacheError E203 for a sparse
        file.
    """
    if MOUNTED:
        let_arrive(path)
    try:
        handle = open_for_reading(path)
    except NotRegularError as error:
        raise (
            _link_error(path) if error.is_link else CacheError(path, "not a regular file", remedy=REBUILD, code="E205")
        ) from error
    try:
        if not holes:
            refuse_holes(path, handle, least_share)
    except BaseException:
        os.close(handle)
        raise
    return handle


def refuse_holes(path: PathLike, handle: int, least_share: int = LEAST_SHARE) -> None:
    """Raise CacheError E203 for a file that is mostly holes: a few bytes of an archive take hours and memory to read.

    least_share: n, if at least an n-th of its bytes must be on disk.
    """
    # Both must be true: little of it is on disk, and it has a hole. Either alone proves nothing: some file systems
    # compress, and some do not report the disk space of a file.
    status = os.fstat(handle)
    if not is_sparse(status, least_share):
        return
    try:
        hole = os.lseek(handle, 0, os.SEEK_HOLE)
        os.lseek(handle, 0, os.SEEK_SET)
    except (OSError, AttributeError):  # the file system or the operating system does not report holes
        return
    if hole < status.st_size:
        size = f"{status.st_size:,} bytes, of which {512 * status.st_blocks:,} are on the disk"
        raise CacheError(path, f"{size}: a sparse file", "a file without holes", REBUILD, code="E203")


def is_sparse(status: os.stat_result, least_share: int = LEAST_SHARE) -> bool:
    """Return whether a file may be mostly holes, by its lstat. `refuse_holes` decides."""
    return status.st_size > _MIN_SPARSE_BYTES and least_share * 512 * status.st_blocks < status.st_size


def read_regular(path: PathLike, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a regular file.

    Raises: FileNotFoundError; CacheError E203 or E205 if `open_regular` refuses it; CacheError E206 if it has more than
        `max_bytes`.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CacheError(path, f"{size:,} bytes", f"at most {max_bytes:,}", REBUILD, code="E206")
        return file.read(size)


def sha256_regular(path: PathLike, *, least_share: int = LEAST_SHARE) -> str:
    """Return the hex sha256 of a regular file. least_share: see `refuse_holes`.

    Raises: FileNotFoundError; CacheError E203 or E205 if `open_regular` refuses it.
    """
    with open(open_regular(path, least_share=least_share), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in utf-8 bytes.

    Raises: ValueError, with a message to put after the file's name, for anything but a valid JSON object; for a
        duplicate key, NaN, Infinity, a number beyond a float, an integer of more than 100 digits or a lone surrogate,
        which canonical JSON does not contain; and for more than MAX_JSON_VALUES commas and opening brackets, in strings
        too.

    >>> parse_object(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: not JSON (the key 'a' is there twice)
    """
    if (values := sum(map(raw.count, (b",", b"[", b"{")))) > MAX_JSON_VALUES:
        raise ValueError(f"{values:,} commas and brackets, expected {MAX_JSON_VALUES:,} at most")
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_float,
        )
        if b"\\u" in raw:  # canonical JSON escapes control characters only
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("not JSON (nested too deeply)") from error
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, expected an object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shortened(twice)} is there twice")
    return value


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits, expected {_MAX_DIGITS} at most")
    return int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {shortened(digits)}, expected a finite one")
    return number


def path_inside(folder: Path, name: str) -> Path:
    """Return the path of the file `name` of a cache. Opens nothing; the file may be absent.

    folder: the version's folder, resolved: links above it are not checked.
    Raises: CacheError E202 if `checked_name` refuses the name; CacheError E205 if the file or a folder on its path is a
        symlink.
    """
    path = str(folder)
    for part in checked_name(name, "a file's name", path).split("/"):
        path = f"{path}/{part}"
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            break
        if stat.S_ISLNK(mode):
            raise _link_error(path)
    return folder / name


def resolved(path: Path) -> Path:
    """Return a path without links: for a cache's public name, the version that it points to now.

    Raises: CacheError E205 for circular links.
    """
    try:
        return path.resolve()
    except RuntimeError as error:
        raise CacheError(path, "symbolic links in a circle", remedy=f"Remove them. {REBUILD}", code="E205") from error


def _link_error(path: PathLike) -> CacheError:
    remedy = f"If the link is yours, replace it by a copy of its target (cp -rL). {REBUILD}"
    return CacheError(path, "a symbolic link", "a file or folder: links are not followed", remedy, code="E205")


def link_in_the_way(path: Path, expected: str) -> CacheError:
    """Return the error E205 of a link where this project writes, with the command that removes it."""
    return CacheError(path, "a symbolic link", expected, f"Remove it: {shlex.join(['rm', str(path)])}", code="E205")


# --- untrusted values -------------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Return an untrusted text on one line, with control and format characters escaped, also bidirectional ones."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shortened(value: Any) -> str:
    """Return the repr of an untrusted value, cut to 80 characters."""
    return _REPR.repr(value)[:80]


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxdict, _REPR.maxlist = 3, 76, 76, 3, 4


def wrong_value(where: str, key: str, value: Any, expected: str) -> CacheError:
    """Return the error E202 of a value in the file `where`: "WHERE: shards.train[3].name is '..', expected ..."."""
    return CacheError(where, f"{printable(key)} is {shortened(value)}", expected, REBUILD, code="E202")


def checked_name(value: Any, key: str, where: str) -> str:
    """Return `value` if it is the name of a file below a folder: parts other than . and .., joined by single slashes.

    Raises: CacheError E202 for any other name, for backslashes and unprintable characters, and for parts or names
        longer than file systems allow.
    """
    if isinstance(value, str) and value.isprintable() and "\\" not in value:
        parts = [part.encode() for part in value.split("/")]
        good = all(part not in (b"", b".", b"..") and len(part) <= _MAX_PART for part in parts)
        if good and sum(map(len, parts)) <= _MAX_NAME:
            return value
    raise wrong_value(where, key, value, "the relative path of a file inside the cache")


def checked_count(value: Any, key: str, where: str) -> int:
    """Return `value`. Raises: CacheError E202 unless it is an integer from 0 to 2**63 - 1, and not a bool."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise wrong_value(where, key, value, "an integer from 0 to 2**63 - 1")


def checked_sha256(value: Any, key: str, where: str) -> str:
    """Return `value`. Raises: CacheError E202 unless it is 64 lower-case hex digits."""
    if isinstance(value, str) and _SHA256.fullmatch(value):
        return value
    raise wrong_value(where, key, value, "64 lower-case hex digits")


def checked_int(name: str, value: Any, least: int) -> int:
    """Return a function's argument as int. Raises: ValueError unless it is an integer of any type, `least` or more."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"{name}={value!r}: expected an integer of {least} or more")
    return operator.index(value)


# --- the files that a meta.json names ---------------------------------------------------------------------------------


def file_records(meta: Mapping[str, Any], where: str = META_NAME) -> list[dict[str, Any]]:
    """Return the record (name, bytes, sha256, ...) of every file that a meta.json names.

    In this order: shards of train and val, index, ids and loss bits of train and val, checksums, files.
    where: the path of the meta.json, for messages.
    Raises: CacheError E202 for a record that `checked_record` refuses, and for a file that is named twice.
    """
    records: list[dict[str, Any]] = []
    names: set[str] = set()
    for key, value in _records(meta, where):
        record = checked_record(value, key, where)
        name = record["name"]
        if name == META_NAME or name in names:
            raise wrong_value(where, f"{key}.name", name, f"a file other than {META_NAME}, named once")
        names.add(name)
        records.append(record)
    return records


def _records(meta: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield every value that should be a record, with its path of keys, such as `shards.train[3]`."""
    _typed(meta, dict, "the whole", where)
    for group in ("shards", "index", "ids", "loss_bits"):
        splits = _typed(meta.get(group, {}), dict, group, where)
        for split in sorted(splits):  # train before val, as in a file of sorted keys
            if group == "shards":
                yield from _listed(splits[split], f"{group}.{split}", where)
            else:
                yield f"{group}.{split}", splits[split]
    if "checksums" in meta:
        yield "checksums", meta["checksums"]
    yield from _listed(meta.get("files", []), "files", where)


def _listed(value: Any, key: str, where: str) -> Iterator[tuple[str, Any]]:
    yield from ((f"{key}[{number}]", record) for number, record in enumerate(_typed(value, list, key, where)))


def checked_record(value: Any, key: str, where: str) -> dict[str, Any]:
    """Return `value` if it is the record of a file: name, bytes, sha256; optionally tokens, entries, block_bytes.

    where, key: begin the message, as in "meta.json: shards.train[3].name is ...".
    Raises: CacheError E202 unless `checked_name` accepts the name, the numbers are integers from 0 to 2**63 - 1, and
        sha256 is 64 lower-case hex digits.
    """
    record: dict[str, Any] = _typed(value, dict, key, where)
    for part in ("name", "bytes", "sha256"):
        if part not in record:
            raise wrong_value(where, key, record, f"a record with {part}")
    checked_name(record["name"], f"{key}.name", where)
    for part in ("bytes", "tokens", "entries", "block_bytes"):
        if part in record:
            checked_count(record[part], f"{key}.{part}", where)
    checked_sha256(record["sha256"], f"{key}.sha256", where)
    return record


def _typed(value: Any, kind: type[Any], key: str, where: str) -> Any:
    if not isinstance(value, kind):
        raise wrong_value(where, key, value, "a list" if kind is list else "an object")
    return value


# --- content_sha256 ---------------------------------------------------------------------------------------------------


def content_sha256(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the content_sha256 of most kinds: the sha256 of `sha256sum`'s output for all files, sorted by name.

    records: name and sha256 of every file. Other kinds have a rule of their own: `Kind.content_sha256`.
    """
    lines = sorted((str(record["name"]), str(record["sha256"])) for record in records)
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in lines).encode()).hexdigest()
