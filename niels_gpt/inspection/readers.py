"""Why the readers of a cache would refuse it: everything that they look at when they open it, without torch.

`verify` ends with these questions, so it passes only what the readers open; `list` and `stats` print the first answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import SPLITS
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
from niels_gpt.fileio import META_NAME, CacheError
from niels_gpt.inspection.source_ids import printable
from niels_gpt.records import file_records, path_inside, read_regular, resolved, wrong_value
from niels_gpt.tokenizer import MODEL_NAME, SentencePieceTokenizer

_CHUNK = 1 << 20  # examples whose first ids are looked at in one piece
_MAX_REASON = 100  # characters in a table
_MAX_MODEL = 1 << 30  # bytes of a model that is opened
Meta = dict[str, Any]
Opening = Callable[[], object]
"""A part of what a reader does when it opens a cache; it may raise."""


def refusals(folder: Path, *, models: bool = True) -> Iterator[str]:
    """Yield why readers refuse a version of a cache: the first error of each split, or of what all have in common.

    folder: of one version, resolved. Of a stub, and of a split without tokens, nothing is opened: nothing was built.
    models: open a tokenizer's model too, which loads SentencePiece.
    """
    where = str(folder / META_NAME)
    try:
        meta = find_meta(folder)
        if meta is None:
            raise FileNotFoundError(f"{where}: no such file, expected the description of a cache")
        checked_meta(meta, where)
        kind = meta.get("kind", _OTHER_KINDS[0])
        if not isinstance(kind, str) or kind not in (*_READERS, *_OTHER_KINDS):
            raise wrong_value(where, "kind", kind, f"one of {', '.join(_READERS)}")
        if meta.get("built") is False:
            if any(record["bytes"] for record in file_records(meta, where)):
                raise CacheError(f"{where}: built is false, but it names files that hold something")
            return
        for opening in _READERS[kind](folder, meta, models) if kind in _READERS else ():
            opening()
    except (CacheError, OSError) as error:
        yield str(error)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        yield f"{where}: not as docs/formats.md describes it ({error!r})"


def refusal(cache: Path) -> str | None:
    """Return in a few words why the readers refuse a cache; None where they do not. cache: the public folder."""
    try:
        folder = resolved(cache)
    except (CacheError, OSError) as error:
        return in_short(error, cache)
    found = next(refusals(folder, models=False), None)
    return None if found is None else in_short(found, folder)


def in_short(error: object, folder: Path) -> str:
    """Return the first sentence of an error of a cache, for a table; its files by their names in the folder."""
    text = printable(str(error).replace(f"{folder}/", "").replace(f"{folder}: ", "").split(". ")[0])
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"


def _pretrain(folder: Path, meta: Meta, models: bool) -> Iterator[Opening]:
    yield partial(check_tokenizer, folder, meta)
    for split in SPLITS:
        if not _is_empty(meta, split):
            yield partial(_open_split, folder, meta, split)


def _is_empty(meta: Meta, split: str) -> bool:
    """Whether a split was built without a token, by all that a meta.json says of it."""
    totals, records = meta.get("totals"), meta.get("shards", {}).get(split, [{}])
    said = totals.get(f"{split}_tokens") if isinstance(totals, dict) else None
    return not said and not any(record.get("bytes", 1) for record in records)


def _open_split(folder: Path, meta: Meta, split: str) -> None:
    if not path_inside(folder, split).is_dir():
        raise FileNotFoundError(f"{folder / split}: no such folder")
    TokenFiles(split_shards(folder, meta, split))
    text_bytes(folder, meta, split)


def _sft(folder: Path, meta: Meta, models: bool) -> Iterator[Opening]:
    yield partial(check_tokenizer, folder, meta)
    yield partial(special_id, folder, meta, "asst")
    for split in SPLITS:
        if not _is_empty(meta, split):
            yield partial(_open_examples, folder, meta, split)


def _open_examples(folder: Path, meta: Meta, split: str) -> None:
    tokens_path, idx_path = folder / f"{split}_tokens.bin", folder / f"{split}_idx.npy"
    check_pair(tokens_path, idx_path, meta)
    tokens = mmap_tokens(tokens_path, expected_bytes=recorded_bytes(folder, meta, tokens_path))
    idx_bytes = recorded_bytes(folder, meta, idx_path)
    starts, roles = load_idx(idx_path, num_tokens=len(tokens), expected_bytes=idx_bytes), role_ids(folder, meta)
    for first in range(0, len(starts), _CHUNK):
        some = starts[first : first + _CHUNK]
        check_starts(tokens[some], some, roles, first=first, tokens_path=tokens_path, idx_path=idx_path)


def _tokenizer(folder: Path, meta: Meta, models: bool) -> Iterator[Opening]:
    yield partial(_open_model, folder, meta, models)


def _open_model(folder: Path, meta: Meta, models: bool) -> None:
    path, ids = path_inside(folder, MODEL_NAME), meta.get("special_token_ids")
    if not models:
        read_regular(path, _MAX_MODEL)
        return
    found = SentencePieceTokenizer(path, expected_special_token_ids=ids).vocab_size
    if meta.get("vocab_size", found) != found:
        raise CacheError(f"{path}: has {found} ids, but vocab_size is {meta['vocab_size']} in {META_NAME}")


_OTHER_KINDS = ("", "eagle3")  # another tool's, and one that has readers and checks of its own
_READERS: dict[str, Callable[[Path, Meta, bool], Iterator[Opening]]] = {
    "pretrain": _pretrain,
    "sft": _sft,
    "tokenizer": _tokenizer,
}
