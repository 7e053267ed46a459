"""Write and read meta.json of token caches; decide which keys readers require (D10).

meta.json is the last file of a build, so a folder that has one is complete.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import SHARD_GLOB, SPLITS, check_format, check_loss_keys, has_no_text_bytes, token_dtype_of
from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES
from niels_gpt.storage.errors import REBUILD, CacheError, CacheNotFound
from niels_gpt.storage.fileio import META_NAME, canonical_json, sha256_file, write_bytes
from niels_gpt.storage.meta_json import (
    checked_count,
    checked_sha256,
    file_records,
    meta_bytes,
    meta_crc32,
    parse_object,
    path_inside,
    printable,
    read_regular,
    resolved,
    shortened,
    wrong_value,
)
from niels_gpt.storage.mounted import MOUNTED
from niels_gpt.storage.versions import VERSION_NAME, VERSIONS_DIR, is_plan, version_name
from niels_gpt.tokenizers.document_tokens import end_of_documents, start_of_documents
from niels_gpt.tokenizers.protocol import (
    MAX_IDS,
    FullTokenizer,
    check_vocab_size,
    integer,
    special_id_in,
    tokenizer_sha256_in,
)

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

KINDS = ("tokenizer", "pretrain", "sft", "rollouts")
"""Values of `kind` for caches with these keys."""
_LEVELS_TO_CACHE_DIR = 4  # from a version up: NAME, .versions, pretrain, the folder of the caches


def write_meta(path: str, meta: dict[str, Any]) -> None:
    """Write a meta.json atomically, as canonical JSON: equal dicts give equal bytes.

    Computes `meta_crc32` again if it is there, and adds none.
    """
    write_bytes(path, meta_bytes(meta) if "meta_crc32" in meta else canonical_json(meta))


def read_meta(path: str) -> dict[str, Any]:
    """Return a meta.json as a dict. `reader_meta` and `file_records` check its keys.

    path: of the file; ~ is the home folder.
    Raises: FileNotFoundError; CacheError E209 for a folder, E205 for anything else but a regular file, E206 if it is
        larger than 32 MiB, E202 if it is not a JSON object or does not match its `meta_crc32`.
    """
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        file = os.path.join(path, META_NAME)
        raise CacheError(path, "a folder", f"the {META_NAME} of a cache: read_meta({file!r})", code="E209")
    try:
        raw = read_regular(path)
    except FileNotFoundError:
        from niels_gpt.storage.remedies import build_again

        said = f"{path}: no such file. A cache is complete when it has one. {build_again(path)}"
        raise CacheNotFound(said) from None
    try:
        meta = parse_object(raw)
    except ValueError as error:
        raise CacheError(path, str(error), "a cache's meta.json", REBUILD, code="E202") from error
    if "meta_crc32" in meta:
        stored, computed = meta_crc32(raw)
        if stored != computed:
            found = f"damaged: its bytes have the CRC-32 {computed:08x}"
            raise CacheError(path, found, f"{shortened(meta['meta_crc32'])}, its meta_crc32", REBUILD, code="E202")
    return meta


def find_meta(folder: Path) -> dict[str, Any] | None:
    """Return the meta.json of a folder; None without one, as in a folder of another tool.

    Raises: CacheError E202, E205 or E206 for a bad meta.json, E205 for a link out of the parent folder.
    """
    path = _refuse_link_out(folder) / META_NAME
    return read_meta(str(path)) if os.path.lexists(path) else None


def reader_meta(folder: Path, kind: str | None = None) -> dict[str, Any] | None:
    """Return `find_meta` after `checked_meta`: the meta for every reader, and for `verify`.

    Raises: CacheError E202, E205 or E206 for a bad meta.json, E207 for a stub, which has no data.
    """
    meta = find_meta(folder)
    if meta is None:
        return None
    where = str(folder / META_NAME)
    checked_meta(meta, where, kind)
    if meta.get("built") is False:
        raise CacheError(where, "built is false, so there is nothing to read", remedy=REBUILD, code="E207")
    return meta


def existing_cache(folder: Path, named: str | os.PathLike[str]) -> Path:
    """Return `folder`, a resolved path. named: the path of the caller, for the message.

    Raises: FileNotFoundError with the command that builds it, unless it is a folder.
    """
    if not folder.is_dir():
        from niels_gpt.storage.remedies import instead_of

        raise CacheNotFound(f"{os.fspath(named)}: no such folder. {instead_of(named)}")
    return folder


def checked_meta(meta: dict[str, Any], where: str, kind: str | None = None) -> None:
    """Check the keys of a meta.json that readers use. Accepts absent keys, and keys of other tools.

    kind: the expected one; None: any.
    Raises: CacheError E202 for a key of the wrong type, another format version or kind, a token_dtype that does not fit
        vocab_size or the sizes of files, and a cache of this project without a tokenizer_sha256.
    """
    actual = meta.get("kind", kind)
    if kind is not None and actual != kind:
        raise wrong_value(where, "kind", actual, f"{kind!r}, which this reader reads")
    _check_built(meta, where)
    check_format(meta, where)
    check_vocab_size(meta, where)
    if "tokenizer_sha256" not in meta and meta.get("kind") in KINDS:
        raise CacheError(
            where, "tokenizer_sha256 is absent", "the sha256 of the model of the ids", REBUILD, code="E202"
        )
    tokenizer_sha256_in(meta, where)
    for name in SPECIAL_TOKEN_NAMES:
        special_id_in(meta, name, where)
    start_of_documents(meta, where)
    end_of_documents(meta, where)
    if meta.get("content_sha256") is not None:
        checked_sha256(meta["content_sha256"], "content_sha256", where)
    file_records(meta, where)
    _check_token_sizes(meta, where)
    check_loss_keys(meta, where)


def _check_token_sizes(meta: dict[str, Any], where: str) -> None:
    """Raise CacheError E202 if the sizes of token files need another token_dtype: their ids would be nonsense."""
    itemsize = token_dtype_of(meta, where).itemsize
    for records in meta.get("shards", {}).values():
        for record in records:
            if "tokens" in record and record["bytes"] != itemsize * record["tokens"]:
                found = f"{printable(record['name'])} has {record['tokens']} tokens in {record['bytes']} bytes"
                raise CacheError(where, found, f"{itemsize} bytes for each, by token_dtype", REBUILD, code="E202")


def listed_meta(folder: Path) -> dict[str, Any] | None:
    """Return `find_meta` after `check_listed`. Raises: CacheError for a bad meta.json."""
    meta = find_meta(folder)
    if meta is not None:
        check_listed(meta, str(folder / META_NAME))
    return meta


def check_listed(meta: dict[str, Any], where: str) -> None:
    """Raise CacheError E202 for a wrong `built`, `totals` or list of files, which a table of caches shows."""
    file_records(meta, where)
    _check_built(meta, where)
    totals = meta.get("totals", {})
    if not isinstance(totals, dict):
        raise wrong_value(where, "totals", totals, "an object")
    for name, count in totals.items():
        checked_count(count, f"totals.{name}", where)


def _check_built(meta: dict[str, Any], where: str) -> None:
    built = meta.get("built", True)
    if not any(built is value for value in (True, False)) and built != "partial":  # 1 == True, but is not written
        raise wrong_value(where, "built", built, 'true, false or "partial"')


def split_shards(folder: Path, meta: dict[str, Any] | None, split: str) -> list[tuple[Path, int | None]]:
    """Return the shards of a split of a pretrain cache, with their sizes in bytes.

    Without a list in meta.json, finds them by their names, with sizes None.
    Raises: CacheError E202 for a split that meta.json does not list, or files outside its folder.
    """
    if meta is None or "shards" not in meta:
        names = sorted(path.name for path in (folder / split).glob(SHARD_GLOB))
        return [(path_inside(folder, f"{split}/{name}"), None) for name in names]
    if split not in meta["shards"]:
        raise CacheError(folder / META_NAME, f"no list of shards for split {split}", code="E202")
    records = meta["shards"][split]
    outside = [record["name"] for record in records if not record["name"].startswith(f"{split}/")]
    if outside:
        raise CacheError(folder / META_NAME, f"split {split} names {outside[0]}", f"files below {split}/", code="E202")
    return [(path_inside(folder, record["name"]), record["bytes"]) for record in records]


def text_bytes(folder: Path | str, meta: dict[str, Any] | None, split: str) -> int:
    """Return the utf-8 length of the text of a pretrain split. folder: a URL too, for messages.

    Raises: CacheError E208 if meta.json lacks it.
    """
    keys, where = meta or {}, f"{folder}/{META_NAME}"
    by_split = keys.get("utf8_bytes")
    if keys.get("kind", "pretrain") != "pretrain" or not isinstance(by_split, dict) or split not in by_split:
        expected = "a split of a pretrain cache with the length of its text"
        again = "import it again without --no-utf8-bytes" if has_no_text_bytes(keys) else "this cache lacks it"
        found, remedy = f"no utf8_bytes of a pretrain split {split}", f"Bits per byte need them: {again}"
        raise CacheError(where, found, expected, remedy, code="E208")
    num_bytes = checked_count(by_split[split], f"utf8_bytes.{split}", where)
    if num_bytes == 0:
        raise CacheError(where, f"utf8_bytes.{split} is 0", "text", code="E202")
    return num_bytes


def check_pair(tokens_path: Path, idx_path: Path, meta: dict[str, Any] | None) -> None:
    """Raise CacheError E209 if a token file and an offsets file of an sft cache do not belong together.

    meta: of the tokens' folder. Both files must be of one split, by its lists of files or else by their names. Files of
        two folders are refused if one of them is a cache, which has its files in one folder.
    """
    found = f"the offsets of other tokens than {tokens_path}"
    if tokens_path.parent != idx_path.parent:
        if any("shards" in keys or "index" in keys for keys in (meta or {}, find_meta(idx_path.parent) or {})):
            found += ", which are in another cache"
            raise CacheError(idx_path, found, remedy="Pass two files of one split of one cache", code="E209")
        return
    groups = ((tokens_path, "shards", "_tokens.bin"), (idx_path, "index", "_idx.npy"))
    of_tokens, of_idx = (_split_of(path.name, (meta or {}).get(group, {}), end) for path, group, end in groups)
    if None not in (of_tokens, of_idx) and of_tokens != of_idx:
        raise CacheError(
            idx_path, f"{found}: of {of_idx}, not {of_tokens}", remedy="Pass two files of one split", code="E209"
        )


def recorded_bytes(folder: Path, meta: dict[str, Any] | None, path: Path) -> int | None:
    """Return the size of a file in bytes, by the meta.json of a folder; None without a meta.json or records.

    Raises: CacheError E209 for a file in that folder that its meta.json does not name, E205 for a link.
    """
    sizes = {record["name"]: int(record["bytes"]) for record in file_records(meta or {})}
    if not sizes or path.parent != folder:
        return None
    path_inside(folder, path.name)
    if path.name not in sizes:
        raise CacheError(folder / META_NAME, f"does not name {path.name}, which lies beside it", code="E209")
    return sizes[path.name]


def _split_of(name: str, group: dict[str, Any], end: str) -> str | None:
    """Return the split of a file by a group of meta.json, else by its name; None if neither has it."""
    for split, records in group.items():
        if any(record["name"] == name for record in (records if isinstance(records, list) else [records])):
            return str(split)
    return next((split for split in SPLITS if name == split + end), None)


def check_tokenizer(folder: Path, meta: dict[str, Any] | None, expected_sha256: str | None = None) -> None:
    """Raise CacheError E402 if another tokenizer than the expected one produced a cache's ids.

    expected_sha256: of the caller's model; None: of tokenizer/ beside the cache, if there is one.
    """
    actual = tokenizer_sha256_in(meta or {}, str(folder / META_NAME))
    if expected_sha256 is None:
        expected_sha256 = tokenizer_sha256_in(*_tokenizer_meta_above(folder))
    if actual is not None and expected_sha256 is not None and actual != expected_sha256:
        found, expected = f"ids of tokenizer {actual[:12]}", f"tokenizer {expected_sha256[:12]}"
        raise CacheError(folder / META_NAME, found, expected, REBUILD, code="E402")


def fingerprint(folder: Path, meta: dict[str, Any] | None, *, split: str, tokens: int) -> dict[str, Any]:
    """Return the identity of a split for a checkpoint, a few JSON scalars.

    split, tokens (of the split), content_sha256 (of all files), tokenizer_sha256. The last two are None without a
    meta.json: for files of another tool only the number of tokens is compared later.
    """
    keys, where = meta or {}, str(folder / META_NAME)
    content = keys.get("content_sha256")
    return {
        "split": split,
        "tokens": tokens,
        "content_sha256": None if content is None else checked_sha256(content, "content_sha256", where),
        "tokenizer_sha256": tokenizer_sha256_in(keys, where),
    }


def check_expected(actual: dict[str, Any], expect: Mapping[str, Any] | None, where: str) -> None:
    """Raise CacheError E213 unless a fingerprint equals `expect`, an earlier one; None: compare nothing.

    Raises: ValueError if `expect` is no fingerprint. Ignores further keys of it.
    """
    if expect is None:
        return
    missing = [key for key in actual if key not in expect] if isinstance(expect, Mapping) else list(actual)
    if missing:
        raise ValueError(f"expect={shortened(expect)}: lacks {missing[0]}, expected what fingerprint() returned")
    for key, value in actual.items():
        if expect[key] != value or type(expect[key]) is not type(value):
            expected = f"{shortened(expect[key])}: not the data that was used before"
            remedy = "Open the version of that time, or build it again with its settings"
            raise CacheError(where, f"{key} is {shortened(value)}", expected, remedy, code="E213")


def special_id(folder: Path, meta: dict[str, Any] | None, name: str) -> int:
    """Return the id of the sentinel `name` (sys, usr, asst, eot) by the cache's meta or its tokenizer's (D1).

    Raises: CacheError E404, which names the searched files.
    """
    value = _known_id(folder, meta, name)
    if value is not None:
        return value
    places = f"{folder / META_NAME} or the cache's tokenizer/{META_NAME}"
    remedy = f"Pass {name}_id=..., or put special_token_ids into {places}"
    raise CacheError(folder, f"no id of the {name} sentinel is known", remedy=remedy, code="E404")


def control_ids_of(folder: Path, meta: dict[str, Any]) -> frozenset[int]:
    """Return the ids that no text of a cache has: sentinels, and other special tokens of its tokenizer.

    The tokenizer beside or above a version tells the others, if it produced the ids. Raises: CacheError if it is
    damaged.
    """
    above, where = _tokenizer_meta_above(folder)
    known = above.get("control_ids", []) if above.get("tokenizer_sha256") == meta.get("tokenizer_sha256") else []
    if not isinstance(known, list) or not all(integer(each, 0, MAX_IDS) is not None for each in known):
        raise wrong_value(where, "control_ids", known, "a list of ids")
    return frozenset([*known, *sentinel_names(folder, meta)])


def role_ids(folder: Path, meta: dict[str, Any] | None) -> tuple[int, ...]:
    """Return the possible first ids of an example: sys, usr and asst; () unless all are known."""
    ids = [_known_id(folder, meta, name) for name in ("sys", "usr", "asst")]
    return tuple(id for id in ids if id is not None) if None not in ids else ()


def sentinel_names(folder: Path, meta: dict[str, Any] | None) -> dict[int, str]:
    """Return the short name of each known sentinel, such as <|eot|>, by id."""
    ids = {name: _known_id(folder, meta, name) for name in SPECIAL_TOKEN_NAMES}
    return {id: f"<|{name}|>" for name, id in ids.items() if id is not None}


def tokenizer_of(folder: Path, sha256: str | None) -> FullTokenizer:
    """Open the model of the tokenizer/ beside or above a version. The last four stay open.

    sha256: of the model that produced the ids; None if unknown.
    Raises: FileNotFoundError; CacheError E402 for another model; ImportError without its library.
    """
    return _open_tokenizer(folder, sha256, _model_file(folder) if sha256 is None else ())


def _model_file(folder: Path) -> tuple[int, ...]:
    """Return a value that changes when the tokenizer beside or above a version is replaced; () without one."""
    from niels_gpt.tokenizers.files import tokenizer_file

    beside = tokenizer_above(folder)
    if beside is None:
        return ()
    try:
        about = os.stat(tokenizer_file(beside)[0])
    except (OSError, CacheError):
        return ()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


@functools.lru_cache(maxsize=4)
def _open_tokenizer(folder: Path, sha256: str | None, _file: tuple[int, ...]) -> FullTokenizer:
    from niels_gpt.storage.remedies import build_again
    from niels_gpt.tokenizer import load_tokenizer

    beside = tokenizer_above(folder)
    if beside is None:
        remedy = "Decode `ids` with the tokenizer that made them"
        raise CacheNotFound(
            f"{version_name(folder)}: ids have no text here: there is no tokenizer/ beside this cache. {remedy}"
        )
    try:
        tokenizer = load_tokenizer(beside, follow_links=False)
    except ImportError as error:
        name = str(error.name).partition(".")[0]
        raise ImportError(f"the text of ids needs {name} ({error}): pip install {name}") from error
    if sha256 not in (None, tokenizer.sha256):
        expected = f"tokenizer {str(sha256)[:12]}, which produced the ids"
        found, remedy = f"tokenizer {tokenizer.sha256[:12]}", build_again(folder, "E402")
        raise CacheError(tokenizer.model_path, found, expected, remedy, code="E402")
    return tokenizer


def _known_id(folder: Path, meta: dict[str, Any] | None, name: str) -> int | None:
    """Return the id of a sentinel by the cache's meta, else its tokenizer's; None if neither has it."""
    known = special_id_in(meta or {}, name, str(folder / META_NAME))
    if known is not None:
        return known
    above, where = _tokenizer_meta_above(folder)
    return special_id_in(above, name, where)


def tokenizer_above(folder: Path) -> Path | None:
    """Return the nearest tokenizer/ with a meta.json beside or above a version; None without one.

    For a partition it may be a version that is not installed yet.
    Raises: CacheError E205 if it is a symlink out of its parent folder.
    """
    if str(folder) in MOUNTED:  # of a cache at a URL: what lies beside is of other caches
        return None
    above = list(folder.parents)
    first = 3 if is_plan(Path(*above[2:3])) else 0  # of a partition: .versions/NUMBER, in the folder of a plan
    candidates = [parent / "tokenizer" for parent in above[first : first + _LEVELS_TO_CACHE_DIR]]
    candidates[:0] = _staged_tokenizers(folder, candidates[-1].parent) if first else []
    found = next((path for path in candidates if (path / META_NAME).is_file()), None)
    return None if found is None else _refuse_link_out(found)


def _staged_tokenizers(folder: Path, cache_dir: Path) -> list[Path]:
    """Return the versions of the tokenizer in a folder of caches that produced the ids of a version."""
    sha256, name = (find_meta(folder) or {}).get("tokenizer_sha256"), f"{VERSIONS_DIR}/tokenizer"
    names = sorted(path.name for path in (cache_dir / name).glob("*") if VERSION_NAME.fullmatch(path.name))
    metas = [path_inside(cache_dir, f"{name}/{version}/{META_NAME}") for version in names]
    known = (meta for meta in metas if meta.is_file())
    return [meta.parent for meta in known if read_meta(str(meta)).get("tokenizer_sha256") == sha256]


def _tokenizer_meta_above(folder: Path) -> tuple[dict[str, Any], str]:
    tokenizer = tokenizer_above(folder)
    return ({}, "") if tokenizer is None else (read_meta(str(tokenizer / META_NAME)), str(tokenizer / META_NAME))


def _refuse_link_out(folder: Path) -> Path:
    """Return a folder. Raises: CacheError E205 if it is a link to anything but a version beside it."""
    if folder.is_symlink():
        target, beside = resolved(folder), resolved(folder.parent)
        if not target.is_relative_to(beside):
            remedy = f"If the link is yours, replace it by a copy of its target (cp -rL). {REBUILD}"
            expected = f"one to a version below {beside}: nothing outside the folder of the caches is read"
            raise CacheError(folder, f"a symbolic link to {target}", expected, remedy, code="E205")
    return folder
