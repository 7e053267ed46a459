"""What meta.json says of a cache's files, parsed as if anybody might have written it."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import operator
import os
import re
import reprlib
import stat
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from niels_gpt.fileio import META_NAME, CacheError, canonical_json

MAX_JSON_BYTES = 1 << 25
"""A larger file is not parsed: 32 MiB. The meta.json of 15,000 shards has 4 MiB."""
MAX_JSON_VALUES = 1 << 20
"""More are not parsed either: an empty list takes three bytes of a file, and a hundred of memory."""

_REBUILD = "Rebuild the cache: python -m niels_gpt.cache.cli build-all"
_CRC_LINE = re.compile(rb'(?m)^  "meta_crc32": "([^\n]{8})",?$')  # no string of canonical JSON holds a line end
_CRC_DIGITS = re.compile(rb"[0-9a-f]{8}")
_SHA256 = re.compile("[0-9a-f]{64}")
_MAX_NAME, _MAX_PART = 1024, 255  # bytes of a name and of a part of it; file systems take no longer part
_MAX_DIGITS = 100
_MAX_HOLES = 1 << 20  # bytes


# --- meta.json tells its own damage -----------------------------------------------------------------------------------


def meta_bytes(meta: Mapping[str, Any]) -> bytes:
    """Return a meta as canonical JSON with `meta_crc32`: the CRC-32 of these bytes with its eight digits zeroed.

    A `meta_crc32` that `meta` holds is replaced.
    """
    raw = canonical_json({**meta, "meta_crc32": "0" * 8})
    found = _CRC_LINE.search(raw)
    assert found is not None
    return raw[: found.start(1)] + b"%08x" % zlib.crc32(raw) + raw[found.end(1) :]


def meta_crc32(raw: bytes) -> tuple[int | None, int]:
    """Return the CRC-32 that the bytes of a meta.json say, and the one that they have: equal in a good file.

    The first is None where there is no line `  "meta_crc32": "..."`, as in files of older builders and of other tools,
    and -1 where its eight characters are not lower-case hex digits. Damage elsewhere in the file does not matter.
    """
    line = _CRC_LINE.search(raw)
    if line is None:
        return None, zlib.crc32(raw)
    digits = line.group(1)
    found = zlib.crc32(raw[line.end(1) :], zlib.crc32(b"0" * 8, zlib.crc32(raw[: line.start(1)])))
    return (int(digits, 16) if _CRC_DIGITS.fullmatch(digits) else -1), found


# --- files and JSON that anybody may have put there -------------------------------------------------------------------


def open_regular(path: str | os.PathLike[str], *, holes: bool = False) -> int:
    """Open a regular file read-only and return its descriptor, which the caller closes.

    Neither a link is followed nor a FIFO waited for.
    holes: let the file be mostly holes, as one of eagle3's may be until all of it is written.
    Raises: FileNotFoundError; CacheError for a symlink, a folder, a device or anything else that is no regular file,
        and for a sparse file, as `refuse_holes` says.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise FileNotFoundError(f"{os.fspath(path)}: no such file: what is above it is no folder") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CacheError(_link_refused(os.fspath(path))) from error
        if error.errno == errno.ENXIO:  # a socket
            raise CacheError(f"{os.fspath(path)}: not a regular file. {_REBUILD}") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise CacheError(f"{os.fspath(path)}: not a regular file. {_REBUILD}")
        if not holes:
            refuse_holes(path, handle)
    except BaseException:
        os.close(handle)
        raise
    return handle


def refuse_holes(path: str | os.PathLike[str], handle: int) -> None:
    """Raise CacheError for a file that is mostly holes: a few bytes of an archive that take hours and memory to read.

    It is one where the file system says both: there is a hole, and less than a 64th of its bytes is on the disk. Either
    alone proves nothing: some file systems compress, and some cannot tell what a file takes.
    """
    about = os.fstat(handle)
    if not is_sparse(about):
        return
    try:
        hole = os.lseek(handle, 0, os.SEEK_HOLE)
        os.lseek(handle, 0, os.SEEK_SET)
    except OSError:  # a file system that knows no holes
        return
    if hole < about.st_size:
        found = f"{about.st_size:,} bytes, of which {512 * about.st_blocks:,} are on the disk"
        raise CacheError(f"{os.fspath(path)}: {found}: a sparse file, expected one that was written. {_REBUILD}")


def is_sparse(about: os.stat_result) -> bool:
    """Whether a file may be mostly holes, by its lstat; `refuse_holes` knows."""
    return about.st_size > _MAX_HOLES and 64 * 512 * about.st_blocks < about.st_size


def read_regular(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a regular file. Raises: as `open_regular`; CacheError if it is larger than `max_bytes`."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CacheError(f"{os.fspath(path)}: {size:,} bytes, expected at most {max_bytes:,}. {_REBUILD}")
        return file.read(size)


def sha256_regular(path: str | os.PathLike[str]) -> str:
    """Return the hex sha256 of a regular file, read in large blocks. Raises: as `open_regular`."""
    with open(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object that some bytes spell, as utf-8.

    Raises: ValueError, whose message is to follow the file's name, for all but a valid JSON object, and for what
        canonical JSON does not have: a key given twice, NaN, Infinity, a number beyond a float, an integer of more than
        100 digits, one half of a surrogate pair; and for more than MAX_JSON_VALUES values, counted by commas and
        opening brackets, those in texts included.
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
        if b"\\u" in raw:  # canonical JSON spells only control characters so
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("not JSON (nested too deeply)") from error
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, expected an object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shortened(twice)} is there twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits, expected {_MAX_DIGITS} at most")
    return int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {shortened(digits)}, expected a finite one")
    return number


def printable(text: str) -> str:
    """Return a text that anybody may have written, on one line and without control characters: those are escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shortened(value: Any) -> str:
    """Return the repr of a value that anybody may have written, in 80 characters at most."""
    return _REPR.repr(value)[:80]


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxdict, _REPR.maxlist = 3, 76, 76, 3, 4


# --- the files that a meta.json names ---------------------------------------------------------------------------------


def file_records(meta: Mapping[str, Any], where: str = META_NAME) -> list[dict[str, Any]]:
    """Return the record (name, bytes, sha256, ...) of every file that a meta.json names.

    In this order: shards of train and of val, index of train and of val, ids of train and of val, checksums, files.
    where: begins the messages, such as the path of the meta.json.
    Raises: CacheError unless each record is as `checked_record` says and no file is named twice.
    """
    found: list[dict[str, Any]] = []
    names: set[str] = set()
    for key, value in _records(meta, where):
        record = checked_record(value, key, where)
        name = record["name"]
        if name == META_NAME or name in names:
            raise wrong_value(where, f"{key}.name", name, f"a file other than {META_NAME}, named once")
        names.add(name)
        found.append(record)
    return found


def _records(meta: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the path of keys, such as `shards.train[3]`, and the value of everything that should be a record."""
    _typed(meta, dict, "the whole", where)
    for group in ("shards", "index", "ids"):
        splits = _typed(meta.get(group, {}), dict, group, where)
        for split in sorted(splits):  # train before val, as in a file of sorted keys
            yield from _listed(splits[split], f"{group}.{split}", where, is_list=group == "shards")
    if "checksums" in meta:
        yield "checksums", meta["checksums"]
    yield from _listed(meta.get("files", []), "files", where, is_list=True)


def _listed(value: Any, key: str, where: str, *, is_list: bool) -> Iterator[tuple[str, Any]]:
    if is_list:
        yield from ((f"{key}[{number}]", record) for number, record in enumerate(_typed(value, list, key, where)))
    else:
        yield key, value


def checked_record(value: Any, key: str, where: str) -> dict[str, Any]:
    """Return `value` if it is the record of a file: name, bytes, sha256; tokens, entries, block_bytes where present.

    key, where: begin the messages, as in "meta.json: shards.train[3].name is ...".
    Raises: CacheError unless its name is as `checked_name` says, its numbers are integers from 0 to 2**63 - 1, and its
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


def checked_name(value: Any, key: str, where: str) -> str:
    """Return `value` if it is the name of a file below a folder: parts that are not . or .., joined by single slashes.

    Raises: CacheError for any other name, and for backslashes, characters that are not printable, and parts or names
        that are longer than file systems have them.
    """
    if isinstance(value, str) and value.isprintable() and "\\" not in value:
        parts = [part.encode() for part in value.split("/")]
        good = all(part not in (b"", b".", b"..") and len(part) <= _MAX_PART for part in parts)
        if good and sum(map(len, parts)) <= _MAX_NAME:
            return value
    raise wrong_value(where, key, value, "the relative path of a file inside the cache")


def checked_count(value: Any, key: str, where: str) -> int:
    """Return `value` if it is an integer from 0 to 2**63 - 1, and no bool; CacheError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise wrong_value(where, key, value, "an integer from 0 to 2**63 - 1")


def checked_int(name: str, value: Any, least: int) -> int:
    """Return an argument as int, whatever kind of integer it is; ValueError if it is none, or below `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"{name}={value!r}: expected an integer of {least} or more")
    return operator.index(value)


def checked_sha256(value: Any, key: str, where: str) -> str:
    """Return `value` if it is 64 lower-case hex digits; CacheError otherwise."""
    if isinstance(value, str) and _SHA256.fullmatch(value):
        return value
    raise wrong_value(where, key, value, "64 lower-case hex digits")


def path_inside(folder: Path, name: str) -> Path:
    """Return the path of the file `name` of a cache; nothing is opened, and the file need not be there.

    folder: of one version, resolved: links above it are not looked at.
    Raises: CacheError if the name is not as `checked_name` says, or if the file or a folder on the way is a symlink.
    """
    path = str(folder)
    for part in checked_name(name, "a file's name", path).split("/"):
        path = f"{path}/{part}"
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            break
        if stat.S_ISLNK(mode):
            raise CacheError(_link_refused(path))
    return folder / name


def resolved(path: Path) -> Path:
    """Return a path without links, as the version that a cache's public name stands for right now.

    Raises: CacheError for links that go in a circle, where Python has an error for them.
    """
    try:
        return path.resolve()
    except RuntimeError as error:
        raise CacheError(f"{path}: symbolic links that go in a circle. Remove them. {_REBUILD}") from error


def _link_refused(path: str) -> str:
    return (
        f"{path}: a symbolic link, expected a file or folder of the cache's own, for nothing outside a cache is read. "
        f"If the link is yours, copy what it stands for to its place (cp -rL). {_REBUILD}"
    )


def _typed(value: Any, kind: type[Any], key: str, where: str) -> Any:
    if not isinstance(value, kind):
        raise wrong_value(where, key, value, "a list" if kind is list else "an object")
    return value


def wrong_value(where: str, key: str, value: Any, expected: str) -> CacheError:
    """Return the error of a value that is not as expected: "WHERE: shards.train[3].name is '..', expected ..."."""
    return CacheError(f"{where}: {printable(key)} is {shortened(value)}, expected {expected}. {_REBUILD}")
