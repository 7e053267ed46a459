"""Decoded documents and examples with the supervised tokens marked; decides where printed text is cut.

`show` prints one part of a cache: its first `num_tokens` tokens. `sample_texts` gives rows of a table: `_short_example`
cuts the messages of an example to one length, and may end it after the first reply.
"""

from __future__ import annotations

import os
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS, Ids
from niels_gpt.cache.meta import check_tokenizer, find_meta, read_meta, sentinel_names, tokenizer_above
from niels_gpt.display.decoded import Decoder, decoded_text, is_special_token, runs
from niels_gpt.display.tables import cut, most_of, shown
from niels_gpt.inspection.readers import check_model
from niels_gpt.inspection.source_ids import printable
from niels_gpt.inspection.stats import bounds, ids_at, mask_of, meta_errors, open_version, tokens_of
from niels_gpt.storage.errors import REBUILD, CacheError, PositionError, TokenizerNotFound
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import resolved
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.protocol import FullTokenizer

_SUPERVISED, _REST, _SENTINEL, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[36m", "\x1b[0m"  # green, dim, cyan
_LEGEND = f"{_SUPERVISED}supervised{_PLAIN}  {_REST}not supervised{_PLAIN}  {_SENTINEL}<|sentinel|>{_PLAIN}"
_LEGEND_PLAIN = "supervised tokens are in [[ ]]"
_WINDOW = 200  # tokens
_MORE = " …"
_LEAST_TOKENS = 8  # of a shortened message


def tokenizer_of(cache: Path, model: str | None = None) -> FullTokenizer:
    """Open a named model, or the one beside or above a cache.

    Raises: FileNotFoundError; CacheError, also for a model that is not the one of its meta.json.
    """
    if model:
        return load_tokenizer(model)
    beside = tokenizer_above(resolved(cache)) or cache.absolute().parent.parent / "tokenizer"
    if about := find_meta(beside):  # refuses a link out of the folder of caches
        check_model(beside, about)
    elif not os.path.lexists(beside):
        raise TokenizerNotFound(f"{beside}: there is no tokenizer. Name the tokenizer of the ids: --tokenizer MODEL")
    return load_tokenizer(beside, follow_links=False)


def tokenizer_beside(cache: Path) -> FullTokenizer | None:
    """Open the model beside or above a cache; None where there is none, or its ids are not the cache's."""
    try:
        tokenizer = tokenizer_of(cache)
        check_tokenizer(cache, read_meta(str(cache / META_NAME)), tokenizer.sha256)
    except (OSError, CacheError):
        return None
    return tokenizer


def show(cache: Path, tokenizer: Decoder, *, split: str, position: int, num_tokens: int, color: bool) -> str:
    """Return a heading and the text at `position`: a token of a pretrain split, or the number of an sft example.

    Sentinels have their short names, such as <|eot|>, and other special tokens their literals; both are cyan. In an
    example each turn begins a line; supervised tokens are green, the others dim; without color, supervised tokens are
    in [[ ]]. num_tokens: the most tokens.
    Raises: FileNotFoundError, CacheError; ValueError for a split or a position that does not exist.
    """
    folder, meta = _opened(cache, tokenizer, split, num_tokens)
    with meta_errors(cache):
        if meta.get("kind") == "sft":
            ids, mask, found = _example(folder, meta, split, position)
            head = "example {example:,} of {examples:,}, {tokens:,} tokens, {supervised_tokens:,} supervised"
            head += f", the first {num_tokens:,} below" * (len(ids) > num_tokens)
            text = _chat(ids[:num_tokens], mask[:num_tokens], turn_names(folder, meta), tokenizer, color)
        else:
            ids, found = _window(folder, meta, split, position, num_tokens)
            head = "tokens {position:,} to {end_position:,} of {split_tokens:,}, in {file}"
            text = _document(ids, short_names(folder, meta), tokenizer, color)
    return f"{printable(cut(f'{cache}/{split}: {head.format(**found)}'))}\n{text}"


def show_data(cache: Path, tokenizer: Decoder, *, split: str, position: int, num_tokens: int | None) -> dict[str, Any]:
    """Return what `show` prints, ready for JSON: its figures, the whole text, and of an example its parts by loss.

    num_tokens: the most tokens; None: all of an example, 200 of a pretrain split. docs/building.md has the fields.
    Raises: as `show`.
    """
    folder, meta = _opened(cache, tokenizer, split, 1 if num_tokens is None else num_tokens)
    about, mask = {"cache": str(cache), "kind": meta["kind"], "split": split}, None
    with meta_errors(cache):
        if meta["kind"] == "sft":
            ids, mask, found = _example(folder, meta, split, position)
            ids, mask = ids[:num_tokens], mask[:num_tokens]
        else:
            ids, found = _window(folder, meta, split, position, num_tokens or _WINDOW)
        names = short_names(folder, meta)
        text = {"text": decoded_text(ids, names, tokenizer)}
        return about | found | text | ({} if mask is None else {"parts": parts_by_loss(ids, mask, names, tokenizer)})


def parts_by_loss(
    ids: Ids, mask: NDArray[np.bool_], names: dict[int, str], tokenizer: Decoder
) -> list[dict[str, str | bool]]:
    """Return the text of some tokens in parts, each with whether it is supervised."""
    return [
        {"supervised": bool(mask[start]), "text": decoded_text(ids[start:end], names, tokenizer)}
        for start, end in runs(mask)
        if start < end
    ]


def _opened(cache: Path, tokenizer: Decoder, split: str, num_tokens: int) -> tuple[Path, dict[str, Any]]:
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens}: expected at least 1")
    folder, meta = _open_with(cache, tokenizer)
    if meta.get("built") is False:
        raise CacheError(cache / META_NAME, "built is false, so there is nothing to show", code="E207")
    return folder, meta


def _open_with(cache: Path, tokenizer: Decoder) -> tuple[Path, dict[str, Any]]:
    cache, meta = open_version(cache)
    check_tokenizer(cache, meta, tokenizer.sha256)
    return cache, meta


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


def sample_texts(
    cache: Path, tokenizer: Decoder, *, per_split: int = 3, num_tokens: int = 120
) -> list[dict[str, str | int]]:
    """Return rows of evenly spaced documents or examples of each split, the first and last included; none for a stub.

    A row has `split`, `number`, `tokens` (the whole length) and `text`; of an sft example also `with_loss`, the number
    of supervised tokens, which are in [[ ]] in the text. Sentinels have their short names, such as <|eot|>.
    num_tokens: the approximate length of a text. " …" replaces what is left out; each message of an example is cut on
    its own, and the first reply, or its beginning, is always included.
    Raises: FileNotFoundError, CacheError; ValueError for a number below 1.
    """
    for name, value in (("per_split", per_split), ("num_tokens", num_tokens)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    cache, meta = _open_with(cache, tokenizer)
    if meta.get("built") is False:
        return []
    with meta_errors(cache):
        return _samples(cache, meta, tokenizer, per_split, num_tokens)


def _samples(
    cache: Path, meta: dict[str, Any], tokenizer: Decoder, per_split: int, num_tokens: int
) -> list[dict[str, str | int]]:
    sentinels = short_names(cache, meta)
    rows: list[dict[str, str | int]] = []
    for split in SPLITS:
        starts = bounds(cache, meta, split)
        for number in _spread(len(starts) - 1, per_split):
            start, end = starts[number : number + 2].tolist()
            rows.append({"split": split, "number": number, "tokens": end - start})
            if meta["kind"] == "sft":
                ids = tokens_of(cache, meta, split)[start:end]
                mask = mask_of(cache, meta, split, start, ids)
                rows[-1] |= {"with_loss": int(mask.sum())}
                rows[-1] |= {"text": _short_example(ids, mask, sentinels, tokenizer, num_tokens)}
            else:
                ids = ids_at(cache, meta, split, start, min(end, start + num_tokens))
                rows[-1] |= {
                    "text": decoded_text(ids, sentinels, tokenizer) + (_MORE if len(ids) < end - start else "")
                }
    return rows


def short_names(cache: Path, meta: dict[str, Any]) -> dict[int, str]:
    """Return the name of each sentinel by its id, such as <|eot|>; {} of a tokenizer without sentinels."""
    return sentinel_names(cache, meta)


def turn_names(cache: Path, meta: dict[str, Any]) -> dict[int, str]:
    """Return the short names with a line end before those of roles, so that each turn begins a line."""
    return {token: name if name == "<|eot|>" else f"\n{name}" for token, name in short_names(cache, meta).items()}


def _spread(count: int, wanted: int) -> list[int]:
    """Return at most `wanted` evenly spaced numbers below `count`, the first and the last included."""
    wanted = min(wanted, count)
    return [step * (count - 1) // max(1, wanted - 1) for step in range(wanted)]


def _short_example(
    ids: Ids, mask: NDArray[np.bool_], sentinels: dict[int, str], tokenizer: Decoder, num_tokens: int
) -> str:
    """Return an example in about `num_tokens` tokens: long messages are cut, and messages after the first reply may be
    left out."""
    is_sentinel = is_special_token(ids, sentinels, tokenizer)
    pieces = runs(2 * mask + is_sentinel)  # each is a message, or sentinels between two, with one mask value
    room = num_tokens - int(is_sentinel.sum())
    longest = _longest([end - start for start, end in pieces if not is_sentinel[start]], room)
    parts: list[tuple[bool, str]] = []
    shown = 0
    for start, end in pieces:
        stop = end if is_sentinel[start] else min(end, start + longest)
        if not is_sentinel[start] and shown >= num_tokens and mask[:start].any():
            parts.append((False, _MORE))
            break
        more = _MORE if stop < end else ""
        parts.append((bool(mask[start]), decoded_text(ids[start:stop], sentinels, tokenizer) + more))
        shown += stop - start
    joined = [(marked, "".join(text for _, text in group)) for marked, group in groupby(parts, key=itemgetter(0))]
    return "".join(f"[[{text}]]" if marked else text for marked, text in joined)


def _longest(sizes: list[int], room: int) -> int:
    """Return the length to cut messages to, so that all fit into `room` tokens; at least _LEAST_TOKENS."""
    longest = max(sizes, default=0)
    if sum(sizes) > room:
        longest = max(min(longest, room), _LEAST_TOKENS)
        while longest > _LEAST_TOKENS and sum(min(size, longest) for size in sizes) > room:
            longest -= 1
    return longest
