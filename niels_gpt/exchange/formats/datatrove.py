"""datatrove: SPLIT/NNNNN.ds, ids without a header, and beside each .ds.index, .ds.metadata and .ds.loss.

One folder a split, because DatatroveFolderDataset reads every .ds file below the folder that it is given: give it
DEST/train. All numbers are little-endian.
    NNNNN.ds           uint16 or uint32 [tokens]; the bytes of our shard. Its readers take `token_size=4` for uint32
    NNNNN.ds.index     uint64 [documents]: where each document ends, in tokens of this file
    NNNNN.ds.loss      bool [tokens], one byte each: whether the token carries loss; only of an sft cache
    NNNNN.ds.metadata  UTF-8, three lines without a last line end: the tokenizer's name, "|" and the bytes of an id; the
                       tokens; the tokens in three digits, such as "1.50 kT"
The tokenizer's name is "niels_gpt:" and the first 12 digits of `tokenizer_sha256`; in a cache that was imported, the
name that was in its files. A document that lies in two shards is two documents.
An import needs no file but .ds: without the others the borders are end-of-document ids, and the vocabulary tells how
wide the ids are.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.exchange.foreign import ForeignFolder
from niels_gpt.exchange.formats.listing import Listed, checked_ends, chunked, listed, loss_of, numbers
from niels_gpt.exchange.output import Output, TokenCache
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import read_regular

_UNKNOWN = "Unknown Tokenizer"
_MAX_NAME = 200


def write(cache: TokenCache, output: Output) -> None:
    """Link each shard as SPLIT/NNNNN.ds. Write its .ds.index, .ds.metadata, and .ds.loss for an sft cache."""
    for split in SPLITS:
        for file in cache.files(split):
            name = f"{split}/{file.number:05d}.ds"
            output.place(name, file)
            output.write(f"{name}.index", (some.astype("<u8") for some in chunked(file.ends)))
            output.write(f"{name}.metadata", [_metadata(cache, file.tokens)])
            if cache.kind.has_loss:
                output.write(f"{name}.loss", (loss.view("u1") for loss in file.loss()))
            output.note("documents_cut_between_files", int(file.continues))


def _metadata(cache: TokenCache, tokens: int) -> bytes:
    """Return the bytes that datatrove's TokenizedFile.write_final_metadata writes, with humanize 4.16."""
    width, sha256 = cache.dtype.itemsize, cache.meta.get("tokenizer_sha256")
    named = (cache.meta.get("imported") or {}).get("tokenizer")
    if not isinstance(named, str) or not named.isprintable() or "|" in named or not 0 < len(named) <= _MAX_NAME:
        named = f"niels_gpt:{sha256[:12]}" if sha256 else f"{_UNKNOWN}|{width}"
    return f"{named}|{width}\n{tokens}\n{_metric(tokens)}".encode()


def _metric(tokens: int) -> str:
    """Return a count in three digits with a prefix, like `humanize.metric(tokens, unit="T")`."""
    exponent = math.floor(math.log10(tokens)) if tokens else 0
    value, digits = tokens / 10 ** (exponent // 3 * 3), 2 - exponent % 3
    if round(value, digits) >= 10 ** (exponent % 3 + 1):  # 9.999 is 10.0
        value, exponent = value / (1000 if exponent % 3 == 2 else 1), exponent + 1
        digits = 2 - exponent % 3
    return f"{value:.{digits}f} {['', *'kMGTPEZYRQ'][exponent // 3]}T"


def read(source: Path, *, val_glob: str | None = None, vocab_size: int | None = None) -> ForeignFolder:
    """Look into a folder of .ds files. Raises: CacheError E221 if nothing tells the width of the ids."""
    listing, tokenizer, files = listed(source, ".ds", "datatrove", val_glob), set[str](), []
    for each in listing.files:
        index, about = each.beside(f"{each.name}.index"), each.beside(f"{each.name}.metadata")
        named, width, stated = _read_metadata(about) if about is not None else (None, None, None)
        width = width or listing.width(None) or _width_by_index(each, index) or listing.width(vocab_size) or 2
        tokenizer |= {named} if named is not None else set()
        tokens, more = each.tokens_of(width), dict[str, Any]()
        if stated not in (None, tokens):
            raise CacheError(each.path, f"{tokens:,} tokens", f"{stated:,} by {each.name}.metadata", code="E221")
        if index is not None:
            _ends(index, tokens, listing.noticed)
            more["ends"] = partial(_ends, index, tokens, None)
        if loss := each.beside(f"{each.name}.loss"):
            more["loss"] = loss_of(loss, tokens)
        files.append(each.plain(width, **more))
    return listing.folder(files, tokenizer.pop() if len(tokenizer) == 1 else None)


def _read_metadata(path: Path) -> tuple[str | None, int, int | None]:
    """Return the tokenizer's name, the bytes of an id, and the tokens; None for each that is unknown.

    Raises: CacheError E221 for a malformed file.
    """
    first, stated, *_ = [*read_regular(path, 1 << 16).decode(errors="replace").split("\n"), ""]
    name, bar, width = first.rpartition("|")
    if not bar or width not in ("2", "4"):
        raise CacheError(path, f"begins with {first!r:.80}", "the tokenizer's name, | and 2 or 4", code="E221")
    tokens = int(stated) if stated.isascii() and stated.isdigit() and len(stated) < 20 else None
    return None if name.startswith(_UNKNOWN) else name, int(width), tokens


def _width_by_index(file: Listed, index: Path | None) -> int | None:
    ends = numbers(index, "<i8")[-1:].tolist() if index is not None else []
    return next((width for width in (2, 4) if ends == [file.size / width]), None)


def _ends(index: Path, tokens: int, noticed: Counter[str] | None) -> NDArray[np.int64]:
    return checked_ends(numbers(index, "<i8"), tokens, index, noticed)
