"""modded-nanogpt and llm.c: SPLIT_NNNNNN.bin, a header of 1,024 bytes and ids; beside each a .bos.idx.

All numbers are little-endian. The header is int32 [256], 0 unless named:
    ids of 16 bits: 20240520, 1, tokens                  modded-nanogpt, llm.c and NeMo Automodel read it
    ids of 32 bits: 278895051, 1, tokens, 4              the variant of NeMo Automodel, which llm.c does not read;
                                                         with a 2 in place of the 4 it holds ids of 16 bits
    what an import reads too: 20240801, 7, tokens        llm.c, ids of 32 bits
Behind it the ids, uint16 or uint32. `tokens` is an int32, so a file has 2**31 - 1 tokens at most.

SPLIT_NNNNNN.bos.idx: int32 [documents that begin in the file], the place of the first byte of each in the .bin file,
header included: 1024 + bytes of an id * tokens before it. The data processor of NeMo Automodel writes the same, with a
begin-of-text id at each place; a document of ours may begin with any id. The rest of a document that begins in the file
before has no entry. If a place does not fit an int32 the file is left out, and an end-of-document id is the border.
(The reader of NeMo Automodel 0.7.0 takes the places for counts of tokens with `align_to_bos=True`. Remove the .bos.idx
files for it: then it looks for `bos_token` in the ids.)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.exchange.foreign import ForeignFile, ForeignFolder, read_pieces
from niels_gpt.exchange.formats.listing import Listed, chunked, listed, numbers, too_long
from niels_gpt.exchange.output import Output, TokenCache, TokenFile
from niels_gpt.storage.errors import CacheError

_HEADER_BYTES = 1024
_MAGIC, _MAGIC_OF_WIDTH = 20240520, 278895051
_LLAMA_3 = 20240801, 7
HEADERS = ((_MAGIC, 1), (_MAGIC_OF_WIDTH, 1), _LLAMA_3)
"""First two numbers of a file of this format."""
_MAX = np.iinfo(np.int32).max


def write(cache: TokenCache, output: Output) -> None:
    """Write SPLIT_NNNNNN.bin of each shard, and its .bos.idx. Raises: CacheError E220 for a shard of 2**31 tokens."""
    for split in SPLITS:
        for file in cache.files(split):
            stem = f"{split}_{file.number:06d}"
            if file.tokens > _MAX:
                raise too_long(file, "the header of modded-nanogpt counts")
            output.write(f"{stem}.bin", (_header(file), file.ids), [file])
            if _HEADER_BYTES + file.tokens * cache.dtype.itemsize <= _MAX:
                output.write(f"{stem}.bos.idx", _starts(file))
            else:
                output.note("documents_without_a_border", len(file.ends))


def _header(file: TokenFile) -> bytes:
    header, width = np.zeros(_HEADER_BYTES // 4, dtype="<i4"), file.cache.dtype.itemsize
    header[:4] = (_MAGIC, 1, file.tokens, 0) if width == 2 else (_MAGIC_OF_WIDTH, 1, file.tokens, width)
    return header.tobytes()


def _starts(file: TokenFile) -> Iterator[bytes]:
    width, first = file.cache.dtype.itemsize, 0
    for ends in chunked(file.ends):
        starts = np.append(first, ends[:-1]) if first or not file.continues else ends[:-1]
        first = int(ends[-1])
        yield (_HEADER_BYTES + width * starts).astype("<i4").tobytes()


def read(source: Path, *, val_glob: str | None = None, vocab_size: int | None = None) -> ForeignFolder:
    """Look into a folder of .bin files with a header, and their .bos.idx files if there are any."""
    listing = listed(source, ".bin", "modded-nanogpt", val_glob)
    files: list[ForeignFile] = []
    for each in listing.files:
        width, tokens = _checked_header(each)
        if not tokens:
            listing.noticed["empty_files"] += 1
            continue
        ends, continues = None, each.continues
        if index := each.beside(each.name.removesuffix(".bin") + ".bos.idx"):
            starts, ends = _starts_in(index, width, tokens), partial(_ends, index, width, tokens)
            continues = any(file.split == each.split for file in files) and bool(not len(starts) or starts[0])
        pieces = partial(read_pieces, each.path, np.dtype(f"<u{width}"), offset=_HEADER_BYTES)
        files.append(ForeignFile(each.split, each.name, tokens, pieces, ends, continues=continues))
    return listing.folder(files)


def _checked_header(file: Listed) -> tuple[int, int]:
    """Return the bytes of an id, and the number of tokens. Raises: CacheError E221 for another header or size."""
    if file.size < _HEADER_BYTES:
        raise CacheError(file.path, f"{file.size:,} bytes", f"a header of {_HEADER_BYTES:,}", code="E221")
    magic, version, tokens, width = numbers(file.path, "<i4", count=4).tolist()
    known = {(_MAGIC, 1): 2, _LLAMA_3: 4, (_MAGIC_OF_WIDTH, 1): width}.get((magic, version))
    if known not in (2, 4):
        found = f"begins with the numbers {magic}, {version}, {tokens} and {width}"
        raise CacheError(file.path, found, f"{_MAGIC}, 1 and a number of tokens", code="E221")
    if file.size != _HEADER_BYTES + known * tokens:
        found = f"{file.size:,} bytes"
        raise CacheError(file.path, found, f"{_HEADER_BYTES + known * tokens:,} by its header", code="E221")
    return known, tokens


def _starts_in(index: Path, width: int, tokens: int) -> NDArray[np.int64]:
    """Return where documents begin, in tokens. Raises: CacheError E221 unless the places ascend within the file."""
    places = numbers(index, "<i4")
    is_counted = len(places) > 0 and places[0] < _HEADER_BYTES  # tokens, as that reader takes them
    starts = places if is_counted else (places - _HEADER_BYTES) // width
    if np.any(np.diff(starts, prepend=-1) <= 0) or np.any(starts >= tokens):
        raise CacheError(index, f"places that do not ascend to {tokens:,} tokens", code="E221")
    if not is_counted and np.any(places != _HEADER_BYTES + width * starts):
        raise CacheError(index, f"places between two ids of {width} bytes", remedy="Remove it", code="E221")
    return starts


def _ends(index: Path, width: int, tokens: int) -> NDArray[np.int64]:
    starts = _starts_in(index, width, tokens)
    return np.append(starts[starts > 0], np.int64(tokens))
