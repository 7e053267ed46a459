"""Why the readers refuse a cache: everything that they check when they open it, without torch.

`verify` passes only what the readers open; `list` and `stats` print the first reason.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import SPLITS, has_loss_bits, has_no_text_bytes, token_dtype_of
from niels_gpt.cache.loss_bits import LossBits, bits_path
from niels_gpt.cache.meta import (
    check_pair,
    check_tokenizer,
    checked_meta,
    find_meta,
    recorded_bytes,
    role_ids,
    special_id,
    split_shards,
    text_bytes,
)
from niels_gpt.cache.mmap import TokenFiles, check_starts, load_idx, mmap_tokens
from niels_gpt.inspection.file_checks import CacheFiles
from niels_gpt.inspection.source_ids import printable
from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import (
    checked_sha256,
    file_records,
    path_inside,
    read_regular,
    resolved,
    shortened,
    wrong_value,
)
from niels_gpt.storage.remedies import ANOTHER_COPY, is_copy, rebuild_command
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.files import COMPANIONS, MAX_TOKENIZER_JSON_BYTES, MODEL_NAME, TOKENIZER_JSON

_CHUNK = 1 << 20  # examples whose first ids are checked at a time
_MAX_REASON = 100  # characters in a table
Meta = dict[str, Any]
Step = Callable[[], object]
"""A part of what a reader does when it opens a cache; it may raise."""


def refusals(folder: Path, *, models: bool = True) -> Iterator[CacheError | OSError]:
    """Yield the error with which readers refuse a version of a cache; nothing for one that they open.

    folder: of one version, resolved. Of a stub, and of a split without tokens, nothing is opened: nothing was built.
    models: open a tokenizer's model too, which loads its library.
    """
    where = str(folder / META_NAME)
    try:
        meta = find_meta(folder)
        if meta is None:
            raise CacheError(where, "no such file", "the description of a cache", code="E204")
        checked_meta(meta, where)
        kind = meta.get("kind")
        if not isinstance(kind, str) or kind not in (*_READERS, *_OTHER_KINDS):
            raise wrong_value(where, "kind", kind, f"one of {', '.join(_READERS)}")
        if meta.get("built") is False:
            if any(record["bytes"] for record in file_records(meta, where)):
                raise CacheError(where, "built is false, but it names files that hold something", code="E202")
            return
        for step in _READERS[kind](folder, meta, models) if kind in _READERS else ():
            step()
    except (CacheError, OSError) as error:
        yield error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        yield CacheError(where, f"not as docs/formats.md describes it ({error!r})", code="E202")


def refusal(cache: Path) -> str | None:
    """Return in a few words why the readers refuse a cache; None where they do not. cache: the public folder."""
    try:
        folder = resolved(cache)
    except (CacheError, OSError) as error:
        return in_short(error, cache)
    reason = next(refusals(folder, models=False), None)
    return None if reason is None else in_short(reason, folder)


def in_short(error: Exception, folder: Path) -> str:
    """Return what an error of a cache found, without its remedy, for a table; files by their names in the folder."""
    text = str(error).split(". ")[0]  # of another error: its first sentence
    if isinstance(error, CacheError):
        text = f"{error.path}: {error.problem}"
    text = printable(text.replace(f"{folder}/", "").replace(f"{folder}: ", ""))
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"


def _pretrain(folder: Path, meta: Meta, models: bool) -> Iterator[Step]:
    yield partial(check_tokenizer, folder, meta)
    for split in SPLITS:
        if not _is_empty(meta, split):
            yield partial(_open_split, folder, meta, split)


def _is_empty(meta: Meta, split: str) -> bool:
    """Whether a split was built without a token, by its total and by the sizes of its shards."""
    totals, records = meta.get("totals"), meta.get("shards", {}).get(split, [{}])
    num_tokens = totals.get(f"{split}_tokens") if isinstance(totals, dict) else None
    return not num_tokens and not any(record.get("bytes", 1) for record in records)


def _open_split(folder: Path, meta: Meta, split: str) -> None:
    if not path_inside(folder, split).is_dir():
        raise CacheError(folder / split, "no such folder", remedy=REBUILD, code="E204")
    if not (shards := split_shards(folder, meta, split)):
        raise wrong_value(str(folder / META_NAME), f"shards.{split}", shards, "the files of its tokens")
    TokenFiles(shards, dtype=token_dtype_of(meta, folder / META_NAME))
    if not has_no_text_bytes(meta):
        text_bytes(folder, meta, split)


def _sft(folder: Path, meta: Meta, models: bool) -> Iterator[Step]:
    yield partial(check_tokenizer, folder, meta)
    if not has_loss_bits(meta):
        yield partial(special_id, folder, meta, "asst")
    for split in SPLITS:
        if not _is_empty(meta, split):
            yield partial(_open_examples, folder, meta, split)


def _open_examples(folder: Path, meta: Meta, split: str) -> None:
    tokens_path, idx_path = folder / f"{split}_tokens.bin", folder / f"{split}_idx.npy"
    check_pair(tokens_path, idx_path, meta)
    size, dtype = recorded_bytes(folder, meta, tokens_path), token_dtype_of(meta, folder / META_NAME)
    tokens = mmap_tokens(tokens_path, expected_bytes=size, dtype=dtype)
    idx_bytes = recorded_bytes(folder, meta, idx_path)
    starts, roles = load_idx(idx_path, num_tokens=len(tokens), expected_bytes=idx_bytes), role_ids(folder, meta)
    bits = open_bits(folder, meta, split, len(tokens)) if has_loss_bits(meta) else None
    for first in range(0, len(starts), _CHUNK):
        some = starts[first : first + _CHUNK]
        if bits is not None:
            bits.check_starts(some, first, idx_path.name)
            continue
        check_starts(tokens[some], some, roles, first=first, tokens_path=tokens_path, idx_path=idx_path)


def open_bits(folder: Path, meta: Meta, split: str, num_tokens: int) -> LossBits:
    """Map the loss bits of a split that has tokens. Raises: as `LossBits`."""
    path = bits_path(folder, meta, f"{split}_tokens.bin")
    return LossBits(path, num_tokens, recorded=recorded_bytes(folder, meta, path))


def _tokenizer(folder: Path, meta: Meta, models: bool) -> Iterator[Step]:
    yield partial(_open_model, folder, meta, models)


def _open_model(folder: Path, meta: Meta, models: bool) -> None:
    check_model(folder, meta)
    if not models:
        return
    tokenizer = load_tokenizer(folder, follow_links=False)
    known = {
        "tokenizer_kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "special_token_ids": tokenizer.special_token_ids(),
        "control_ids": sorted(tokenizer.control_ids),
    }
    for key, value in known.items():
        if meta.get(key, value) != value:
            found = f"its {key} is {shortened(value)}, but {shortened(meta[key])} in {META_NAME}"
            raise CacheError(tokenizer.model_path, found, code="E402")


def check_model(tokenizer: Path, meta: Meta, remedy: str = "") -> None:
    """Raise CacheError unless the files in a tokenizer's folder are those of its meta.json.

    remedy: what to do; "": remove the tokenizer and build.
    """
    remedy = remedy or make_again(tokenizer)
    expected = {record["name"]: record["sha256"] for record in file_records(meta, str(tokenizer / META_NAME))}
    name = next(iter(expected), MODEL_NAME)
    if (of_ids := meta.get("tokenizer_sha256")) is not None:
        checked_sha256(of_ids, "tokenizer_sha256", str(tokenizer / META_NAME))
    expected[name] = of_ids  # of the file that decides the ids; other tools may record no files
    for name, sha256 in expected.items():
        if not os.path.lexists(tokenizer / name):
            raise CacheError(tokenizer / name, "no such file", "a file of the tokenizer", remedy, code="E204")
        actual = hashlib.sha256(read_regular(path_inside(tokenizer, name), MAX_TOKENIZER_JSON_BYTES)).hexdigest()
        if sha256 not in (None, actual):
            found = f"its sha256 is {actual[:12]}"
            raise CacheError(tokenizer / name, found, f"{sha256[:12]}, as in its {META_NAME}", remedy, code="E403")
    for name in COMPANIONS if TOKENIZER_JSON in expected else ():
        if name not in expected and os.path.lexists(tokenizer / name):  # it would change what ends a document
            raise CacheError(tokenizer / name, f"is not in its {META_NAME}", remedy=remedy, code="E403")


def make_again(tokenizer: Path) -> str:
    """Return the remedy of a damaged tokenizer."""
    return ANOTHER_COPY if is_copy(tokenizer) else f"Make another one: {remake_command(tokenizer)}"


def remake_command(tokenizer: Path) -> str:
    """Return the command that replaces a damaged tokenizer: a build does not replace one that exists."""
    remove = shlex.join(["rm", *([] if tokenizer.is_symlink() else ["-r"]), str(tokenizer)])
    return f"{remove} && {rebuild_command(tokenizer)}"


def _rollouts(folder: Path, meta: Meta, models: bool) -> Iterator[Step]:
    """The files of its description; the index is checked by niels_gpt.recipes.rollouts, which knows its reader."""
    yield partial(check_tokenizer, folder, meta)
    files = CacheFiles(folder, meta)
    for record in files.records:
        yield partial(_check_size, files, record)


def _check_size(files: CacheFiles, record: dict[str, Any]) -> None:
    if damage := files.size_damage(record):
        raise CacheError(files.folder / damage.file, damage.problem, remedy=REBUILD, code="E203")


_OTHER_KINDS = ("eagle3", "draft_vocab")  # have their own readers and checks
_READERS: dict[str, Callable[[Path, Meta, bool], Iterator[Step]]] = {
    "pretrain": _pretrain,
    "sft": _sft,
    "rollouts": _rollouts,
    "tokenizer": _tokenizer,
}
