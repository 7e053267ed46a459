"""Decoded documents and examples with the supervised tokens marked; decides where printed text is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.documents import bounds, ids_at, mask_of, tokens_of
from niels_gpt.cache.formats import SPLITS, Ids
from niels_gpt.cache.meta import check_tokenizer, sentinel_names
from niels_gpt.display.decoded import Decoder, decoded_text, is_special_token, runs
from niels_gpt.display.tables import cut, most_of, shown
from niels_gpt.kinds.kind import Cache
from niels_gpt.kinds.rows import parts_by_loss
from niels_gpt.storage.errors import REBUILD, CacheError, PositionError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import printable

_SUPERVISED, _REST, _SENTINEL, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[36m", "\x1b[0m"  # green, dim, cyan
_LEGEND = f"{_SUPERVISED}supervised{_PLAIN}  {_REST}not supervised{_PLAIN}  {_SENTINEL}<|sentinel|>{_PLAIN}"
_LEGEND_PLAIN = "supervised tokens are in [[ ]]"
_WINDOW = 200  # tokens


def show_window(cache: Cache, tokenizer: Decoder, split: str, position: int, num_tokens: int, color: bool) -> str:
    """Return a heading and the text from token `position` of a pretrain split on.

    Sentinels have their short names, such as <|eot|>, and other special tokens their literals; both are cyan.
    Raises: CacheError; ValueError for a split or a position that does not exist.
    """
    _refuse(cache, tokenizer)
    ids, found = _window(cache.folder, cache.meta, split, position, num_tokens)
    head = "tokens {position:,} to {end_position:,} of {split_tokens:,}, in {file}".format(**found)
    return _headed(cache, split, head, _document(ids, sentinel_names(cache.folder, cache.meta), tokenizer, color))


def window_data(cache: Cache, tokenizer: Decoder, split: str, position: int, num_tokens: int | None) -> dict[str, Any]:
    """Return what `show_window` prints, ready for JSON. num_tokens: the most tokens; None: 200."""
    num_tokens = _WINDOW if num_tokens is None else num_tokens
    _refuse(cache, tokenizer)
    ids, found = _window(cache.folder, cache.meta, split, position, num_tokens)
    return found | {"text": decoded_text(ids, sentinel_names(cache.folder, cache.meta), tokenizer)}


def show_example(cache: Cache, tokenizer: Decoder, split: str, row: int, num_tokens: int, color: bool) -> str:
    """Return a heading and an example of an sft split; each turn begins a line.

    Supervised tokens are green, the others dim; without color, supervised tokens are in [[ ]].
    Raises: as `show_window`.
    """
    _refuse(cache, tokenizer)
    ids, mask, found = _example(cache.folder, cache.meta, split, row)
    head = "example {example:,} of {examples:,}, {tokens:,} tokens, {supervised_tokens:,} supervised".format(**found)
    head += f", the first {num_tokens:,} below" * (len(ids) > num_tokens)
    names = turn_names(cache.folder, cache.meta)
    return _headed(cache, split, head, _chat(ids[:num_tokens], mask[:num_tokens], names, tokenizer, color))


def example_data(cache: Cache, tokenizer: Decoder, split: str, row: int, num_tokens: int | None) -> dict[str, Any]:
    """Return what `show_example` prints, ready for JSON, and its parts by loss. num_tokens: None: all."""
    _refuse(cache, tokenizer)
    ids, mask, found = _example(cache.folder, cache.meta, split, row)
    ids, mask, names = ids[:num_tokens], mask[:num_tokens], sentinel_names(cache.folder, cache.meta)
    text = {"text": decoded_text(ids, names, tokenizer)}
    return found | text | {"parts": parts_by_loss(ids, mask, names, tokenizer)}


def _refuse(cache: Cache, tokenizer: Decoder) -> None:
    """Raise CacheError for a tokenizer of other ids, and for a stub."""
    check_tokenizer(cache.folder, cache.meta, tokenizer.sha256)
    if cache.is_stub:
        raise CacheError(cache.path / META_NAME, "built is false, so there is nothing to show", code="E207")


def _headed(cache: Cache, split: str, head: str, text: str) -> str:
    return f"{printable(cut(f'{cache.path}/{split}: {head}'))}\n{text}"


def check_piece(cache: Cache, tokenizer: Decoder | None, split: str, num_tokens: int) -> None:
    """Raise an error unless a piece of a split can be shown with this tokenizer."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens}: expected at least 1")
    if tokenizer is not None:
        check_tokenizer(cache.folder, cache.meta, tokenizer.sha256)


def _window(
    folder: Path, meta: dict[str, Any], split: str, position: int, num_tokens: int
) -> tuple[Ids, dict[str, Any]]:
    total = int(meta["totals"][f"{split}_tokens"])
    _check(position, total, f"tokens in {split}")
    before = 0
    for record in meta["shards"][split]:
        if position < before + record["tokens"]:
            end = min(position + num_tokens, before + record["tokens"])
            ids = ids_at(folder, meta, split, position, end)
            of = {"position": position, "end_position": position + len(ids), "split_tokens": total}
            return ids, {**of, "file": record["name"]}
        before += record["tokens"]
    raise CacheError(
        folder / META_NAME, f"its shards hold {before} tokens, its totals say {total}", remedy=REBUILD, code="E201"
    )


def _example(folder: Path, meta: dict[str, Any], split: str, row: int) -> tuple[Ids, NDArray[np.bool_], dict[str, Any]]:
    starts = bounds(folder, meta, split)
    _check(row, len(starts) - 1, f"examples in {split}")
    ids = tokens_of(folder, meta, split)[starts[row] : starts[row + 1]]
    mask = mask_of(folder, meta, split, int(starts[row]), ids)
    of = {"example": row, "examples": len(starts) - 1, "tokens": len(ids), "supervised_tokens": int(mask.sum())}
    return ids, mask, of


def _document(ids: Ids, names: dict[int, str], tokenizer: Decoder, color: bool) -> str:
    is_special = is_special_token(ids, names, tokenizer) & color
    parts = [
        (bool(is_special[start]), shown(cut(decoded_text(ids[start:end], names, tokenizer), most_of(end - start))))
        for start, end in runs(is_special)
        if start < end
    ]
    return "".join(f"{_SENTINEL}{text}{_PLAIN}" if marked else text for marked, text in parts)


def _chat(ids: Ids, mask: NDArray[np.bool_], names: dict[int, str], tokenizer: Decoder, color: bool) -> str:
    """Return a legend and an example with its supervised tokens marked. names: as `turn_names`.

    Special tokens of a chat template are coloured as sentinels, and as supervised where they are.
    """
    is_sentinel = np.isin(ids, list(names)) | (is_special_token(ids, names, tokenizer) & ~mask)
    parts = []
    for start, end in runs(2 * mask + is_sentinel) if color else runs(mask):
        text = shown(cut(decoded_text(ids[start:end], names, tokenizer), most_of(end - start)))
        if color:
            style = _SUPERVISED if mask[start] else _SENTINEL if is_sentinel[start] else _REST
            parts.append(f"{style}{text}{_PLAIN}")
        else:
            parts.append(f"[[{text}]]" if mask[start] else text)
    begins_line = bool(len(ids)) and names.get(int(ids[0]), "").startswith("\n")  # which the legend has ended
    text = "".join(parts).replace("\n", "", 1) if begins_line else "".join(parts)
    return f"{_LEGEND if color else _LEGEND_PLAIN}\n{text}"


def _check(position: int, total: int, what: str) -> None:
    if not 0 <= position < total:
        raise PositionError(f"position {position:,}: there are {total:,} {what}, expected 0 to {total - 1:,}")


def turn_names(folder: Path, meta: dict[str, Any]) -> dict[int, str]:
    """Return the short names of sentinels, and before a role's a line end: each turn begins a line."""
    return {token: name if name == "<|eot|>" else f"\n{name}" for token, name in sentinel_names(folder, meta).items()}
