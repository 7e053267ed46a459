"""meta.json: the last file of a build, so a folder that has one is complete (D10)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import FORMAT_VERSION, SHARD_GLOB, SPLITS, TOKEN_DTYPE
from niels_gpt.fileio import META_NAME, CacheError, canonical_json, sha256_file, write_bytes
from niels_gpt.records import (
    checked_count,
    checked_sha256,
    file_records,
    meta_bytes,
    meta_crc32,
    parse_object,
    path_inside,
    read_regular,
    resolved,
    shortened,
    wrong_value,
)
from niels_gpt.remedies import with_command
from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES

__all__ = [
    "META_NAME",
    "check_expected",
    "check_tokenizer",
    "find_meta",
    "fingerprint",
    "read_meta",
    "reader_meta",
    "sha256_file",
    "special_id",
    "tokenizer_above",
    "write_meta",
]

KINDS = ("tokenizer", "pretrain", "sft")
"""`kind` of the caches that these keys are of."""

_REBUILD = "Rebuild it: python -m niels_gpt.cache.cli build-all"
_MAX_VOCAB_SIZE = 1 << 16  # ids are uint16
_LEVELS_TO_CACHE_DIR = 4  # above a version: NAME, .versions, pretrain, and the folder of the caches


def write_meta(path: str, meta: dict[str, Any]) -> None:
    """Write a meta.json atomically, as canonical JSON: equal dicts give equal bytes.

    A `meta_crc32` in it is replaced by that of the bytes written; without one none is added.
    """
    write_bytes(path, meta_bytes(meta) if "meta_crc32" in meta else canonical_json(meta))


def read_meta(path: str) -> dict[str, Any]:
    """Return a meta.json as a dict, whatever its keys: `reader_meta` and `file_records` look at those.

    path: of the file; ~ is the home folder.
    Raises: FileNotFoundError if there is none; CacheError if it is no regular file, larger than 32 MiB, not a JSON
        object, has a key twice or a number out of all bounds, or if its bytes do not give the `meta_crc32` in it.
    """
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        file = os.path.join(path, META_NAME)
        raise CacheError(f"{path}: a folder, expected the {META_NAME} of a cache: read_meta({file!r})")
    try:
        raw = read_regular(path)
    except FileNotFoundError:
        absent = f"{path}: no such file. A cache is complete when it has one. {_REBUILD}"
        raise FileNotFoundError(with_command(absent)) from None
    try:
        meta = parse_object(raw)
    except ValueError as error:
        raise CacheError(f"{path}: {error}, expected a cache's meta.json. {_REBUILD}") from error
    if "meta_crc32" in meta:
        stored, found = meta_crc32(raw)
        if stored != found:
            in_it = shortened(meta["meta_crc32"])
            raise CacheError(f"{path}: damaged: its bytes have the CRC-32 {found:08x}, it says {in_it}. {_REBUILD}")
    return meta


def find_meta(folder: Path) -> dict[str, Any] | None:
    """Return the meta.json of a folder; None where there is none, as in a folder that another tool wrote.

    Raises: as `read_meta`; CacheError if the folder is a symlink out of the folder that it lies in.
    """
    path = _refuse_link_out(folder) / META_NAME
    return read_meta(str(path)) if os.path.lexists(path) else None


def reader_meta(folder: Path, kind: str | None = None) -> dict[str, Any] | None:
    """Return `find_meta`, checked by `checked_meta`: what every reader goes by, and `verify` too.

    Raises: as `find_meta` and `checked_meta`; CacheError if nothing was built.
    """
    meta = find_meta(folder)
    if meta is None:
        return None
    where = str(folder / META_NAME)
    checked_meta(meta, where, kind)
    if meta.get("built") is False:
        raise CacheError(f"{where}: built is false, so there is nothing to read. {_REBUILD}")
    return meta


def checked_meta(meta: dict[str, Any], where: str, kind: str | None = None) -> None:
    """Check the keys of a meta.json that readers go by; other tools' keys are let be, and absent ones are.

    kind: the one that the reader reads; None: any.
    Raises: CacheError if a key is of the wrong type, or says that the tokens are not uint16 ids of format version 1, or
        that the cache is of another kind; or if a cache of this project does not say whose ids it holds.
    """
    found = meta.get("kind", kind)
    if kind is not None and found != kind:
        raise wrong_value(where, "kind", found, f"{kind!r}, which this reader reads")
    for key, allowed in (("built", (True, False, "partial")), ("token_dtype", (TOKEN_DTYPE,))):
        # `1 == True`, but no builder writes a number there.
        if key in meta and not any(type(meta[key]) is type(value) and meta[key] == value for value in allowed):
            raise wrong_value(where, key, meta[key], " or ".join(map(repr, allowed)))
    version = meta.get("format_version", FORMAT_VERSION)
    if _integer(version, 0, 2**63) != FORMAT_VERSION:
        raise wrong_value(where, "format_version", version, f"{FORMAT_VERSION}, which this reader knows")
    vocab_size = meta.get("vocab_size")
    if vocab_size is not None and _integer(vocab_size, 1, _MAX_VOCAB_SIZE + 1) is None:
        raise wrong_value(where, "vocab_size", vocab_size, f"an integer from 1 to {_MAX_VOCAB_SIZE}")
    if "tokenizer_sha256" not in meta and meta.get("kind") in KINDS:
        raise CacheError(f"{where}: tokenizer_sha256 is not there, expected that of the model of the ids. {_REBUILD}")
    _tokenizer_sha256(meta, where)
    for name in SPECIAL_TOKEN_NAMES:
        _special_id(meta, name, where)
    if meta.get("content_sha256") is not None:
        checked_sha256(meta["content_sha256"], "content_sha256", where)
    file_records(meta, where)


def listed_meta(folder: Path) -> dict[str, Any] | None:
    """Return the meta.json of a folder as `find_meta` does; what a table of caches shows of it is as it should be.

    Raises: CacheError also for a wrong `built`, wrong `totals`, or a wrong list of files.
    """
    meta, where = find_meta(folder), str(folder / META_NAME)
    if meta is not None:
        file_records(meta, where)
        if meta.get("built", True) not in (True, False, "partial"):
            raise wrong_value(where, "built", meta["built"], 'true, false or "partial"')
        totals = meta.get("totals", {})
        if not isinstance(totals, dict):
            raise wrong_value(where, "totals", totals, "an object")
        for name, count in totals.items():
            checked_count(count, f"totals.{name}", where)
    return meta


def split_shards(folder: Path, meta: dict[str, Any] | None, split: str) -> list[tuple[Path, int | None]]:
    """Return the shards of a split of a pretrain cache, with their sizes in bytes.

    By meta.json where it lists them; without, by their names, and no size is known.
    Raises: CacheError for a split that meta.json does not list, or whose files are not below its folder.
    """
    if meta is None or "shards" not in meta:
        names = sorted(path.name for path in (folder / split).glob(SHARD_GLOB))
        return [(path_inside(folder, f"{split}/{name}"), None) for name in names]
    if split not in meta["shards"]:
        raise CacheError(f"{folder / META_NAME}: no list of shards for split {split}")
    records = meta["shards"][split]
    strange = [record["name"] for record in records if not record["name"].startswith(f"{split}/")]
    if strange:
        raise CacheError(f"{folder / META_NAME}: split {split} names {strange[0]}, expected files below {split}/")
    return [(path_inside(folder, record["name"]), record["bytes"]) for record in records]


def text_bytes(folder: Path, meta: dict[str, Any] | None, split: str) -> int:
    """Return the utf-8 length of the text of a pretrain split. Raises: CacheError where meta.json does not say it."""
    found, where = meta or {}, str(folder / META_NAME)
    by_split = found.get("utf8_bytes")
    if found.get("kind", "pretrain") != "pretrain" or not isinstance(by_split, dict) or split not in by_split:
        raise CacheError(
            f"{where}: no utf8_bytes of a pretrain split {split}, expected the folder of a split of a pretrain cache "
            "that this project built. Bits per byte need the length of the text"
        )
    num_bytes = checked_count(by_split[split], f"utf8_bytes.{split}", where)
    if num_bytes == 0:
        raise CacheError(f"{where}: utf8_bytes.{split} is 0, expected text")
    return num_bytes


def check_pair(tokens_path: Path, idx_path: Path, meta: dict[str, Any] | None) -> None:
    """Raise CacheError if a token file and an offsets file of an sft cache are known not to belong together.

    meta: of the tokens' folder. Where it lists the files, both are of one split; by their names they are of one in any
    case. Files of two folders are refused where one of these is a cache, whose own files lie side by side.
    """
    in_words = f"{idx_path}: the offsets of other tokens than {tokens_path}"
    if tokens_path.parent != idx_path.parent:
        if any("shards" in found or "index" in found for found in (meta or {}, find_meta(idx_path.parent) or {})):
            raise CacheError(f"{in_words}: those lie in another cache. Pass two files of one split of one cache")
        return
    groups = ((tokens_path, "shards", "_tokens.bin"), (idx_path, "index", "_idx.npy"))
    of_tokens, of_idx = (_split_of(path.name, (meta or {}).get(group, {}), end) for path, group, end in groups)
    if None not in (of_tokens, of_idx) and of_tokens != of_idx:
        raise CacheError(f"{in_words}: of {of_idx}, not {of_tokens}. Pass two files of one split")


def recorded_bytes(folder: Path, meta: dict[str, Any] | None, path: Path) -> int | None:
    """Return the size that the meta.json of a folder gives a file; None where there is none, or one without records.

    Raises: CacheError for a file in that folder that its meta.json does not name, or that is a link.
    """
    sizes = {record["name"]: int(record["bytes"]) for record in file_records(meta or {})}
    if not sizes or path.parent != folder:
        return None
    path_inside(folder, path.name)
    if path.name not in sizes:
        raise CacheError(f"{folder / META_NAME}: does not name {path.name}, which lies beside it")
    return sizes[path.name]


def _split_of(name: str, group: dict[str, Any], end: str) -> str | None:
    """Return the split that a group of a meta.json has a file in; where it does not, what the file's name says."""
    for split, records in group.items():
        if any(record["name"] == name for record in (records if isinstance(records, list) else [records])):
            return str(split)
    return next((split for split in SPLITS if name == split + end), None)


def check_tokenizer(folder: Path, meta: dict[str, Any] | None, expected_sha256: str | None = None) -> None:
    """Raise CacheError if a cache's ids are of another tokenizer than the expected one.

    expected_sha256: the model that the caller uses; without it, that of tokenizer/ beside the cache, if there is one.
    """
    found = _tokenizer_sha256(meta or {}, str(folder / META_NAME))
    if expected_sha256 is None:
        expected_sha256 = _tokenizer_sha256(*_tokenizer_meta_above(folder))
    if found is not None and expected_sha256 is not None and found != expected_sha256:
        said = f"ids of tokenizer {found[:12]}, expected tokenizer {expected_sha256[:12]}"
        raise CacheError(f"{folder / META_NAME}: {said}. {_REBUILD}")


def fingerprint(folder: Path, meta: dict[str, Any] | None, *, split: str, tokens: int) -> dict[str, Any]:
    """Return what a checkpoint keeps of the data that it was trained on: a few scalars, fit for JSON.

    split, tokens (of that split), content_sha256 (of all files of the cache), tokenizer_sha256. The last two are None
    where no meta.json gives them: of another tool's files only the number of tokens is compared later.
    """
    found, where = meta or {}, str(folder / META_NAME)
    content = found.get("content_sha256")
    return {
        "split": split,
        "tokens": tokens,
        "content_sha256": None if content is None else checked_sha256(content, "content_sha256", where),
        "tokenizer_sha256": _tokenizer_sha256(found, where),
    }


def check_expected(found: dict[str, Any], expect: Mapping[str, Any] | None, where: str) -> None:
    """Raise CacheError unless every scalar of a fingerprint is what `expect`, an earlier one, says; None says nothing.

    Raises: ValueError if `expect` is no fingerprint. Keys that a fingerprint does not have are let be.
    """
    if expect is None:
        return
    missing = [key for key in found if key not in expect] if isinstance(expect, Mapping) else list(found)
    if missing:
        raise ValueError(f"expect={shortened(expect)}: lacks {missing[0]}, expected what fingerprint() returned")
    for key, value in found.items():
        if expect[key] != value or type(expect[key]) is not type(value):
            raise CacheError(
                f"{where}: {key} is {shortened(value)}, expected {shortened(expect[key])}: not the data that was used "
                "before. Open the version of that time, or build it again from its own settings"
            )


def special_id(folder: Path, meta: dict[str, Any] | None, name: str) -> int:
    """Return the id of the sentinel `name` (sys, usr, asst, eot), from the cache's meta or its tokenizer's (D1).

    Raises: CacheError naming the places looked at.
    """
    value = _known_id(folder, meta, name)
    if value is not None:
        return value
    raise CacheError(
        f"{folder}: no id of the {name} sentinel is known. Pass {name}_id=..., or put special_token_ids into "
        f"{folder / META_NAME} or into the cache's tokenizer/{META_NAME}"
    )


def role_ids(folder: Path, meta: dict[str, Any] | None) -> tuple[int, ...]:
    """Return the ids with which an example may begin: of sys, usr and asst; () unless all of them are known."""
    found = [_known_id(folder, meta, name) for name in ("sys", "usr", "asst")]
    return tuple(id for id in found if id is not None) if None not in found else ()


def _known_id(folder: Path, meta: dict[str, Any] | None, name: str) -> int | None:
    """Return the id of a sentinel from the cache's meta, else its tokenizer's; None where neither has it."""
    found = _special_id(meta or {}, name, str(folder / META_NAME))
    if found is not None:
        return found
    above, where = _tokenizer_meta_above(folder)
    return _special_id(above, name, where)


def tokenizer_above(folder: Path) -> Path | None:
    """Return the nearest tokenizer/ with a meta.json beside or above a version; None where there is none.

    Raises: CacheError if it is a symlink out of the folder that it lies in.
    """
    candidates = (parent / "tokenizer" for parent in list(folder.parents)[:_LEVELS_TO_CACHE_DIR])
    found = next((path for path in candidates if (path / META_NAME).is_file()), None)
    return None if found is None else _refuse_link_out(found)


def _tokenizer_meta_above(folder: Path) -> tuple[dict[str, Any], str]:
    tokenizer = tokenizer_above(folder)
    return ({}, "") if tokenizer is None else (read_meta(str(tokenizer / META_NAME)), str(tokenizer / META_NAME))


def _refuse_link_out(folder: Path) -> Path:
    """Return a folder that is none, or a committed one: a link to a version beside it, not to any place of the disk."""
    if folder.is_symlink():
        target, beside = resolved(folder), resolved(folder.parent)
        if not target.is_relative_to(beside):
            raise CacheError(
                f"{folder}: a symbolic link to {target}, expected one to a version below {beside}: what lies outside "
                "the folder of the caches is not read. If the link is yours, copy what it stands for to its place "
                f"(cp -rL). {_REBUILD}"
            )
    return folder


def _tokenizer_sha256(meta: dict[str, Any], where: str) -> str | None:
    found = meta.get("tokenizer_sha256")
    return None if found is None else checked_sha256(found, "tokenizer_sha256", where)


def _special_id(meta: dict[str, Any], name: str, where: str) -> int | None:
    """Return the id of a sentinel as a meta has it; None where it has none."""
    ids, vocab_size = meta.get("special_token_ids"), _integer(meta.get("vocab_size"), 1, _MAX_VOCAB_SIZE + 1)
    if ids is None:
        return None
    if not isinstance(ids, dict):
        raise wrong_value(where, "special_token_ids", ids, "an object")
    if name not in ids:
        return None
    end = vocab_size or _MAX_VOCAB_SIZE
    if _integer(ids[name], 0, end) is None:
        raise wrong_value(where, f"special_token_ids.{name}", ids[name], f"an integer from 0 to {end - 1}")
    return int(ids[name])


def _integer(value: Any, start: int, end: int) -> int | None:
    """Return `value` if it is an integer from start to end - 1, and no bool; None otherwise."""
    return value if isinstance(value, int) and not isinstance(value, bool) and start <= value < end else None
