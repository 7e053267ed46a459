"""From a position in a split's token stream to its document: number, source id, file and text.

Decides which part of a long document is printed: the tokens around the position.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.checksums import BlockSums
from niels_gpt.cache.documents import bounds, ids_at, source_id
from niels_gpt.cache.formats import Ids, token_dtype_of
from niels_gpt.cache.kind.show import turn_names
from niels_gpt.cache.meta import check_tokenizer, sentinel_names
from niels_gpt.display.decoded import Decoder, decoded_text
from niels_gpt.display.tables import cut, most_of, shown
from niels_gpt.kinds.kind import Cache
from niels_gpt.storage.errors import REBUILD, CacheError, PositionError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import open_regular, path_inside, printable

_MAX_MARKED = 4  # tokens: each byte of a character may be one


def locate(cache: Cache, tokenizer: Decoder | None, *, split: str, position: int, tokens: int) -> str:
    """Return what is at token `position` of a split's stream, as lines of text; an sft example is a document.

    tokenizer: of the cache; None: ids are printed instead of text.
    tokens: the most tokens of the document that are printed; a longer one is cut around the position.
    Raises: CacheError; ValueError for a split or a position that does not exist.
    """
    where: dict[str, Any] = {"split": split, "position": position, "tokens": tokens}
    found = locate_data(cache, tokenizer, **where, names_of=turn_names)
    first, last, size = (found[name] for name in ("first_token", "end_token", "document_tokens"))
    piece = "" if tokenizer is None else f" {found['token_text']!r}"
    part = f", tokens {first:,} to {last:,} of its {size:,}" if last - first < size else ""
    rows = [
        ("token", f"{position:,} of {found['split_tokens']:,} of {cache.path}/{split}: id {found['token_id']}{piece}"),
        (
            cache.kind.unit,
            f"{found['document']:,} of {found['documents']:,}, {size:,} tokens",
        ),
        ("source id", "not recorded" if found["source_id"] is None else found["source_id"]),
        ("offset in it", f"{found['offset_tokens']:,} tokens"),
        ("file", f"{found['file']}, bytes {found['first_byte']:,} to {found['end_byte']:,}"),
        ("ids" if tokenizer is None else "text", f"the token in [[ ]]{part}"),
    ]
    before, at, after = (found[f"text_{name}"] for name in ("before", "at", "after"))
    most = most_of(last - first)
    text = f"{cut(before, most, end=most)}[[{cut(at)}]]{cut(after, most)}"
    text = text.replace("[[\n<|", "\n[[<|")  # a turn begins a line
    text = text.removeprefix("\n") if text.startswith(("\n<|", "\n[[<|")) else text
    lines = [f"{label + ':':14}{printable(cut(value))}" for label, value in rows]
    return "\n".join([*lines, "", shown(text)])


def locate_data(
    cache: Cache,
    tokenizer: Decoder | None,
    *,
    split: str,
    position: int,
    tokens: int | None = None,
    names_of: Callable[[Path, dict[str, Any]], dict[int, str]] = sentinel_names,
) -> dict[str, Any]:
    """Return what `locate` prints, ready for JSON; docs/building.md has the fields.

    tokens: as in `locate`; None: all of the document. names_of: gives the names of sentinels. Raises: as `locate`.
    """
    folder, meta = cache.folder, cache.meta
    if tokenizer is not None:
        check_tokenizer(folder, meta, tokenizer.sha256)
    about = {"kind": cache.kind.name, "split": split, "position": position}
    found, (start, end) = _document_at(cache, split, position)
    # Around the position, and not shorter than tokens where the document starts or ends near it.
    tokens = end - start if tokens is None else tokens
    first = max(start, min(position - tokens // 2, end - tokens))
    ids = ids_at(folder, meta, split, first, min(end, first + tokens))
    token, decode, text = int(ids[position - first]), None, None
    if tokenizer is not None:
        decode = partial(decoded_text, sentinels=names_of(folder, meta), tokenizer=tokenizer)
        text = decoded_text(np.array([token]), sentinel_names(folder, meta), tokenizer)
    parts = dict(zip(("text_before", "text_at", "text_after"), _parts(ids, position - first, decode), strict=True))
    place = {"first_token": first - start, "end_token": first - start + len(ids)}
    return about | found | {"token_id": token, "token_text": text} | place | parts


def _document_at(cache: Cache, split: str, position: int) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return figures of the document at a position, and its first and last token in the split."""
    folder, meta = cache.folder, cache.meta
    starts = bounds(folder, meta, split)
    total = int(starts[-1])
    if not total:
        raise PositionError(f"position {position:,}: {cache.path}/{split} has no token")
    if not 0 <= position < total:
        raise PositionError(
            f"position {position:,}: {cache.path}/{split} has {total:,} tokens, expected 0 to {total - 1:,}"
        )
    number = int(np.searchsorted(starts, position, side="right")) - 1
    start, end = starts[number : number + 2].tolist()
    about, sums = _file(folder, meta, split, position), BlockSums(folder, meta)
    others = [meta[group][split]["name"] for group in ("index", "ids") if split in meta.get(group, {})]
    for path in (path_inside(folder, name) for name in (about["file"], *others)):
        with suppress(FileNotFoundError), open(open_regular(path), "rb") as file:  # what needs it says so
            sums.check_opened(path, file.fileno())  # a file of another version tells of another document
    found = {
        "split_tokens": total,
        "document": number,
        "documents": len(starts) - 1,
        "document_tokens": end - start,
        "source_id": source_id(folder, meta, split, number),
        "offset_tokens": position - start,
    }
    return found | about, (start, end)


def _file(folder: Path, meta: dict[str, Any], split: str, position: int) -> dict[str, Any]:
    for record in meta["shards"][split]:
        if position < record["tokens"]:
            size = token_dtype_of(meta, META_NAME).itemsize
            return {"file": record["name"], "first_byte": size * position, "end_byte": size * (position + 1)}
        position -= record["tokens"]
    raise CacheError(
        folder / META_NAME, f"its shards of {split} hold fewer tokens than its totals say", remedy=REBUILD, code="E201"
    )


def _parts(ids: Ids, place: int, decode: Callable[[NDArray[Any]], str] | None) -> list[str]:
    """Return the text before, at and after the token, or the few tokens that together encode its character; or ids."""
    if decode is None:
        before, after = (" ".join(map(str, part.tolist())) for part in (ids[:place], ids[place + 1 :]))
        return [f"{before} ".lstrip(), str(ids[place]), f" {after}".rstrip()]
    whole, choices = decode(ids), []
    for length in range(1, _MAX_MARKED + 1):
        for first in range(max(0, place - length + 1), min(place, len(ids) - length) + 1):
            choices.append([decode(part) for part in np.split(ids, [first, first + length])])
            if "".join(choices[-1]) == whole:
                return choices[-1]
    return choices[0]
