"""datatrove: SPLIT/NNNNN.ds, ids without a header, and beside each .ds.index, .ds.metadata and .ds.loss.

One folder a split, because DatatroveFolderDataset reads every .ds file below the folder that it is given: give it
DEST/train. All numbers are little-endian.
    NNNNN.ds           uint16 or uint32 [tokens]; the bytes of our shard. Its readers take `token_size=4` for uint32
    NNNNN.ds.index     uint64 [documents]: where each document ends, in tokens of this file
    NNNNN.ds.loss      bool [tokens], one byte each: whether the token carries loss; of an sft cache alone
    NNNNN.ds.metadata  UTF-8, three lines without a last line end: the tokenizer's name, "|" and the bytes of an id; the
                       tokens; the tokens in three digits, such as "1.50 kT"
The tokenizer's name is "niels_gpt:" and the first 12 digits of `tokenizer_sha256`; in a cache that was imported, the
name that was in its files. A document that lies in two shards is two documents.
"""

from __future__ import annotations

import math
from pathlib import Path

from niels_gpt.cache.formats import SPLITS
from niels_gpt.interop.foreign import ForeignFolder
from niels_gpt.interop.formats.chunks import chunked
from niels_gpt.interop.output import Output
from niels_gpt.interop.token_cache import TokenCache
from niels_gpt.storage.errors import CacheError

_UNKNOWN = "Unknown Tokenizer"
_MAX_NAME = 200


def write(cache: TokenCache, output: Output) -> None:
    """Link each shard as SPLIT/NNNNN.ds, and write its .ds.index, .ds.metadata, and .ds.loss of an sft cache."""
    for split in SPLITS:
        for file in cache.files(split):
            name = f"{split}/{file.number:05d}.ds"
            output.place(name, file)
            output.write(f"{name}.index", (some.astype("<u8") for some in chunked(file.ends)))
            output.write(f"{name}.metadata", [_metadata(cache, file.tokens)])
            if cache.kind == "sft":
                output.write(f"{name}.loss", (loss.view("u1") for loss in file.loss()))
            output.note("documents_cut_between_files", int(file.continues))


def _metadata(cache: TokenCache, tokens: int) -> bytes:
    """Return what datatrove's TokenizedFile.write_final_metadata writes, with humanize 4.16."""
    width, sha256 = cache.dtype.itemsize, cache.meta.get("tokenizer_sha256")
    named = (cache.meta.get("imported") or {}).get("tokenizer")
    if not isinstance(named, str) or not named.isprintable() or "|" in named or not 0 < len(named) <= _MAX_NAME:
        named = f"niels_gpt:{sha256[:12]}" if sha256 else f"{_UNKNOWN}|{width}"
    return f"{named}|{width}\n{tokens}\n{_metric(tokens)}".encode()


def _metric(tokens: int) -> str:
    """Return a count in three digits with a prefix, as `humanize.metric(tokens, unit="T")`."""
    exponent = math.floor(math.log10(tokens)) if tokens else 0
    value, digits = tokens / 10 ** (exponent // 3 * 3), 2 - exponent % 3
    if round(value, digits) >= 10 ** (exponent % 3 + 1):  # 9.999 is 10.0
        value, exponent = value / (1000 if exponent % 3 == 2 else 1), exponent + 1
        digits = 2 - exponent % 3
    return f"{value:.{digits}f} {['', *'kMGTPEZYRQ'][exponent // 3]}T"


def read(source: Path, *, val_glob: str | None = None, vocab_size: int | None = None) -> ForeignFolder:
    """Look into a folder of .ds files."""
    raise CacheError(source, "cannot be imported yet", code="E221")
