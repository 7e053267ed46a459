"""Print decoded documents and examples with the supervised tokens marked, and the document at a position.

Decides where printed text is cut, and which part of a long document is printed: the tokens around the position.
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
from niels_gpt.cache.documents import bounds, example_bounds, ids_at, mask_of, source_id, tokens_of
from niels_gpt.cache.formats import SPLITS, Ids, token_dtype_of
from niels_gpt.cache.meta import check_tokenizer, sentinel_names
from niels_gpt.display.decoded import Decoder, decoded_text, is_special_token, runs
from niels_gpt.display.tables import cut, most_of, shown
from niels_gpt.kinds.kind import Cache
from niels_gpt.kinds.rows import parts_by_loss
from niels_gpt.storage.errors import REBUILD, CacheError, PositionError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import open_regular, path_inside, printable

_SUPERVISED, _REST, _SENTINEL, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[36m", "\x1b[0m"  # green, dim, cyan
_LEGEND = f"{_SUPERVISED}supervised{_PLAIN}  {_REST}not supervised{_PLAIN}  {_SENTINEL}<|sentinel|>{_PLAIN}"
_LEGEND_PLAIN = "supervised tokens are in [[ ]]"
_WINDOW = 200  # tokens
_MAX_MARKED = 4  # tokens: each byte of a character may be one


def show_window(cache: Cache, tokenizer: Decoder, split: str, position: int, num_tokens: int, color: bool) -> str:
    """Return a heading and the text of a pretrain split from token `position` on.

    Sentinels have their short names, such as <|eot|>, other special tokens their literals; both are cyan.
    Raises: CacheError for damage, another tokenizer, or a stub; ValueError for a split or position that does not exist.
    """
    _refuse(cache, tokenizer)
    ids, found = _window(cache.folder, cache.meta, split, position, num_tokens)
    head = "tokens {position:,} to {end_position:,} of {split_tokens:,}, in {file}".format(**found)
    return _headed(cache, split, head, _document(ids, sentinel_names(cache.folder, cache.meta), tokenizer, color))


def window_data(cache: Cache, tokenizer: Decoder, split: str, position: int, num_tokens: int | None) -> dict[str, Any]:
    """Return the content of `show_window`, ready for JSON. num_tokens: most tokens; None: 200."""
    num_tokens = _WINDOW if num_tokens is None else num_tokens
    _refuse(cache, tokenizer)
    ids, found = _window(cache.folder, cache.meta, split, position, num_tokens)
    return found | {"text": decoded_text(ids, sentinel_names(cache.folder, cache.meta), tokenizer)}


def show_example(cache: Cache, tokenizer: Decoder, split: str, row: int, num_tokens: int, color: bool) -> str:
    """Return a heading and an example of an sft split; each turn begins a line.

    Supervised tokens are green, the others dim; without color, supervised tokens are in [[ ]].
    Raises: CacheError for damage, another tokenizer, or a stub; ValueError for a split or position that does not exist.
    """
    _refuse(cache, tokenizer)
    ids, mask, found = _example(cache.folder, cache.meta, split, row)
    head = "example {example:,} of {examples:,}, {tokens:,} tokens, {supervised_tokens:,} supervised".format(**found)
    head += f", the first {num_tokens:,} below" * (len(ids) > num_tokens)
    names = turn_names(cache.folder, cache.meta)
    return _headed(cache, split, head, _chat(ids[:num_tokens], mask[:num_tokens], names, tokenizer, color))


def example_data(cache: Cache, tokenizer: Decoder, split: str, row: int, num_tokens: int | None) -> dict[str, Any]:
    """Return the content of `show_example`, ready for JSON, with its parts by loss. num_tokens: None: all."""
    _refuse(cache, tokenizer)
    ids, mask, found = _example(cache.folder, cache.meta, split, row)
    ids, mask, names = ids[:num_tokens], mask[:num_tokens], sentinel_names(cache.folder, cache.meta)
    text = {"text": decoded_text(ids, names, tokenizer)}
    return found | text | {"parts": parts_by_loss(ids, mask, names, tokenizer)}


def _refuse(cache: Cache, tokenizer: Decoder) -> None:
    """Raise CacheError if another tokenizer produced the ids, or E207 for a stub."""
    check_tokenizer(cache.folder, cache.meta, tokenizer.sha256)
    if cache.is_stub:
        raise CacheError(cache.path / META_NAME, "built is false, so there is nothing to show", code="E207")


def _headed(cache: Cache, split: str, head: str, text: str) -> str:
    return f"{printable(cut(f'{cache.shown}/{split}: {head}'))}\n{text}"


def check_piece(cache: Cache, tokenizer: Decoder | None, split: str, num_tokens: int) -> None:
    """Raise ValueError or CacheError unless the tokenizer can show a piece of the split."""
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
    starts = example_bounds(folder, meta, split)
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
    """Return a legend and an example with its supervised tokens marked. names: from `turn_names`.

    Special tokens of a chat template are coloured like sentinels, or as supervised if they are.
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
    """Return the short names of sentinels. A role's name begins with a line end, so that each turn begins a line."""
    return {token: name if name == "<|eot|>" else f"\n{name}" for token, name in sentinel_names(folder, meta).items()}


# --- from a position to its document ----------------------------------------------------------------------------------


def locate(cache: Cache, tokenizer: Decoder | None, *, split: str, position: int, tokens: int) -> str:
    """Return the document or example at token `position` of a split, as lines of text.

    tokenizer: of the cache; None: print ids instead of text.
    tokens: most tokens of the document to print; a longer document is cut around the position.
    Raises: CacheError for damage or another tokenizer; ValueError for a split or position that does not exist.
    """
    where: dict[str, Any] = {"split": split, "position": position, "tokens": tokens}
    found = locate_data(cache, tokenizer, **where, names_of=turn_names)
    first, last, size = (found[name] for name in ("first_token", "end_token", "document_tokens"))
    piece = "" if tokenizer is None else f" {found['token_text']!r}"
    part = f", tokens {first:,} to {last:,} of its {size:,}" if last - first < size else ""
    rows = [
        ("token", f"{position:,} of {found['split_tokens']:,} of {cache.shown}/{split}: id {found['token_id']}{piece}"),
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
    """Return the content of `locate`, ready for JSON; docs/building.md lists the fields.

    tokens: most tokens of the document; None: all. names_of: returns the names of sentinels.
    Raises: CacheError for damage or another tokenizer; ValueError for a split or position that does not exist.
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
    """Return figures about the document at a position, and its first and last token in the split."""
    folder, meta = cache.folder, cache.meta
    starts = bounds(folder, meta, split)
    total = int(starts[-1])
    if not total:
        raise PositionError(f"position {position:,}: {cache.shown}/{split} has no token")
    if not 0 <= position < total:
        raise PositionError(
            f"position {position:,}: {cache.shown}/{split} has {total:,} tokens, expected 0 to {total - 1:,}"
        )
    number = int(np.searchsorted(starts, position, side="right")) - 1
    start, end = starts[number : number + 2].tolist()
    about, sums = _file(folder, meta, split, position), BlockSums(folder, meta)
    others = [meta[group][split]["name"] for group in ("index", "ids") if split in meta.get(group, {})]
    names = [about["file"], *others] if sums.mount is None else []  # at a URL each block is compared when it arrives
    for path in (path_inside(folder, name) for name in names):
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
    """Return the text before, at and after the token, or the few tokens that encode its character; else ids."""
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
