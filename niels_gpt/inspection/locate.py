"""From a position in a split's token stream to its document: number, source id, file and text.

Decides which part of a long document is printed: the tokens around the position.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS, Ids, token_dtype_of
from niels_gpt.cache.meta import check_tokenizer
from niels_gpt.display.decoded import Decoder, decoded_text
from niels_gpt.display.tables import shown
from niels_gpt.inspection.show import short_names, turn_names
from niels_gpt.inspection.source_ids import printable, source_id
from niels_gpt.inspection.stats import bounds, ids_at, meta_errors, open_version
from niels_gpt.storage.errors import REBUILD, CacheError, PositionError
from niels_gpt.storage.fileio import META_NAME

_MAX_MARKED = 4  # tokens: each byte of a character may be one


def locate(cache: Path, tokenizer: Decoder | None, *, split: str, position: int, num_tokens: int) -> str:
    """Return what is at token `position` of a split's stream, as lines of text; an sft example is a document.

    tokenizer: of the cache; None: ids are printed instead of text.
    num_tokens: the most tokens of the document that are printed; a longer one is cut around the position.
    Raises: FileNotFoundError, CacheError; ValueError for a split or a position that does not exist.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens}: expected at least 1")
    folder, meta = open_version(cache)
    if tokenizer is not None:
        check_tokenizer(folder, meta, tokenizer.sha256)
    with meta_errors(cache):
        return _located(cache, folder, meta, tokenizer, split, position, num_tokens)


def _located(
    cache: Path,
    folder: Path,
    meta: dict[str, Any],
    tokenizer: Decoder | None,
    split: str,
    position: int,
    num_tokens: int,
) -> str:
    starts = bounds(folder, meta, split)
    total = int(starts[-1])
    if not total:
        raise PositionError(f"position {position:,}: {cache}/{split} has no token")
    if not 0 <= position < total:
        raise PositionError(f"position {position:,}: {cache}/{split} has {total:,} tokens, expected 0 to {total - 1:,}")
    number = int(np.searchsorted(starts, position, side="right")) - 1
    start, end = starts[number : number + 2].tolist()
    unit = "example" if meta["kind"] == "sft" else "document"
    token = int(ids_at(folder, meta, split, position, position + 1)[0])
    decode, piece = None, ""
    if tokenizer is not None:
        decode = partial(decoded_text, sentinels=turn_names(folder, meta), tokenizer=tokenizer)
        piece = f" {decoded_text(np.array([token]), short_names(folder, meta), tokenizer)!r}"
    name = source_id(folder, meta, split, number)
    rows = [
        ("token", f"{position:,} of {total:,} of {cache}/{split}: id {token}{piece}"),
        (unit, f"{number:,} of {len(starts) - 1:,}, {end - start:,} tokens"),
        ("source id", "not recorded" if name is None else printable(name)),
        ("offset in it", f"{position - start:,} tokens"),
        ("file", _file(folder, meta, split, position)),
    ]
    # Around the position, and not shorter than num_tokens where the document starts or ends near it.
    first = max(start, min(position - num_tokens // 2, end - num_tokens))
    last = min(end, first + num_tokens)
    cut = f", tokens {first - start:,} to {last - start:,} of its {end - start:,}" if last - first < end - start else ""
    rows.append(("text" if decode is not None else "ids", f"the token in [[ ]]{cut}"))
    ids = ids_at(folder, meta, split, first, last)
    text = _marked(ids, position - first, decode)
    text = text.removeprefix("\n") if text.startswith(("\n<|", "\n[[<|")) else text
    lines = [f"{label + ':':14}{printable(value)}" for label, value in rows]
    return "\n".join([*lines, "", shown(text)])


def _file(folder: Path, meta: dict[str, Any], split: str, position: int) -> str:
    for record in meta["shards"][split]:
        if position < record["tokens"]:
            size = token_dtype_of(meta, META_NAME).itemsize
            return f"{record['name']}, bytes {size * position:,} to {size * (position + 1):,}"
        position -= record["tokens"]
    raise CacheError(
        folder / META_NAME, f"its shards of {split} hold fewer tokens than its totals say", remedy=REBUILD, code="E201"
    )


def _marked(ids: Ids, place: int, decode: Callable[[NDArray[Any]], str] | None) -> str:
    """Return text with [[ ]] around the token, or around the few tokens that together encode its character."""
    if decode is None:
        return " ".join(f"[[{token}]]" if number == place else str(token) for number, token in enumerate(ids.tolist()))
    whole, choices = decode(ids), []
    for length in range(1, _MAX_MARKED + 1):
        for first in range(max(0, place - length + 1), min(place, len(ids) - length) + 1):
            parts = [decode(part) for part in np.split(ids, [first, first + length])]
            choices.append("{}[[{}]]{}".format(*parts).replace("[[\n<|", "\n[[<|"))  # a turn begins a line
            if "".join(parts) == whole:
                return choices[-1]
    return choices[0]
