"""OLMo-core and the Dolma toolkit: SPLIT_NNNNN.npy, ids without a header, SPLIT_NNNNN.csv.gz, and label masks.

    SPLIT_NNNNN.npy             uint16 or uint32 [tokens], little-endian; the bytes of our shard. In spite of its name
                                it has no header of numpy. Its readers take `dtype=NumpyDatasetDType.uint32` for uint32
    SPLIT_NNNNN.csv.gz          a line for each document: START,END in tokens of this file, END the first one after it
    label_mask/SPLIT_NNNNN.npy  bool [tokens], one byte each: whether the token carries loss; only of an sft cache.
                                OLMo-core finds it by `label_mask_paths`, in the order of `paths`
The gzip file is one member: 1f 8b 08 00, four zeros (no time), 00 ff, the deflated lines of level 6, CRC-32 and length.
A document that lies in two shards is two documents. The fixed-length dataset of OLMo-core needs no borders. The packed
ones look for its end-of-document id in local files, and lose the tokens after the last such id of a file. With
`use_array_if_local=False` they read the .csv.gz instead.
An import also takes masks as open-instruct names them (labels_mask_X.npy of token_ids_X.npy), and leaves out more
columns of a line. Where neither .csv.gz nor manifest tells how wide the ids are, the vocabulary does.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.exchange.foreign import ForeignFolder
from niels_gpt.exchange.formats.listing import Listed, listed, loss_of, spans
from niels_gpt.exchange.output import Output, TokenCache, TokenFile
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import open_regular

_MASKS, _MASK_PREFIX, _IDS_PREFIX = "label_mask", "labels_mask_", "token_ids_"
_NUMPY = b"\x93NUMPY"
_MAX_LINE, _LINES = 1 << 12, 1 << 12
_GZIP_HEADER = b"\x1f\x8b\x08\x00" + bytes(4) + b"\x00\xff"  # no name, no time, no system


def write(cache: TokenCache, output: Output) -> None:
    """Link each shard as SPLIT_NNNNN.npy. Write its .csv.gz, and the label mask of an sft cache."""
    for split in SPLITS:
        for file in cache.files(split):
            stem = f"{split}_{file.number:05d}"
            output.place(f"{stem}.npy", file)
            output.write(f"{stem}.csv.gz", _gzip(_lines(file)))
            if cache.kind.has_loss:
                output.write(f"{_MASKS}/{stem}.npy", (loss.view("u1") for loss in file.loss()))
            output.note("documents_cut_between_files", int(file.continues))


def _lines(file: TokenFile) -> Iterator[bytes]:
    for some in spans(file.ends):
        yield "".join(f"{start},{end}\n" for start, end in some.tolist()).encode()


def _gzip(content: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a gzip file without name and time: the same content gives the same bytes."""
    packer, crc, size = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS), 0, 0
    yield _GZIP_HEADER
    for part in content:
        crc, size = zlib.crc32(part, crc), size + len(part)
        yield packer.compress(part)
    yield packer.flush() + struct.pack("<II", crc, size % 2**32)


def read(source: Path, *, val_glob: str | None = None, vocab_size: int | None = None) -> ForeignFolder:
    """Look into a folder of .npy files without a header, with their .csv.gz files and label masks if there are any."""
    listing, files = listed(source, ".npy", "olmo", val_glob, _is_no_mask), []
    for each in listing.files:
        borders, more = each.beside(each.name.removesuffix(".npy") + ".csv.gz"), dict[str, Any]()
        with open(open_regular(each.path), "rb") as file:
            if file.read(len(_NUMPY)) == _NUMPY:
                raise CacheError(each.path, "has a header of numpy", "only ids, as OLMo-core reads them", code="E221")
        width = listing.width(None) or _width_by_borders(each, borders) or listing.width(vocab_size) or 2
        tokens = each.tokens_of(width)
        if borders is not None:
            _ends(borders, tokens, listing.noticed)
            more["ends"] = partial(_ends, borders, tokens, None)
        if mask := next(filter(None, map(each.beside, _mask_names(each.name))), None):
            more["loss"] = loss_of(mask, tokens)
        files.append(each.plain(width, **more))
    return listing.folder(files)


def _width_by_borders(file: Listed, borders: Path | None) -> int | None:
    lines = _read_lines(borders, file.size) if borders is not None else ()
    last = max((int(some[-1, 1]) for some in lines), default=0)
    return next((width for width in (2, 4) if last * width == file.size), None)


def _is_no_mask(name: str) -> bool:
    folder, _, file = f"/{name}".rpartition("/")
    return not (folder.endswith(f"/{_MASKS}") or file.startswith(_MASK_PREFIX))


def _mask_names(name: str) -> list[str]:
    """Return where the label mask of a token file may lie: our name, and the name of open-instruct."""
    folder, slash, file = name.rpartition("/")
    found = [f"{folder}{slash}{_MASKS}/{file}"]
    if file.startswith(_IDS_PREFIX):
        found.append(f"{folder}{slash}{_MASK_PREFIX}{file.removeprefix(_IDS_PREFIX)}")
    return found


def _read_lines(path: Path, tokens: int) -> Iterator[NDArray[np.int64]]:
    """Yield the start and end of each document, in pieces: int64 [some documents, 2].

    tokens: of the file; bounds the lines, because a small file may unpack to many. Raises: CacheError E221.
    """
    left = 2 * tokens + _LINES
    try:
        with open(open_regular(path), "rb") as raw, gzip.GzipFile(fileobj=raw) as file:
            while lines := [line for line in (file.readline(_MAX_LINE) for _ in range(_LINES)) if line]:
                if (left := left - len(lines)) < 0:
                    raise CacheError(path, "more lines than documents", f"{tokens:,} tokens at most", code="E221")
                flat = [int(part) for line in lines for part in line.split(b",", 2)[:2]]
                yield np.array(flat, dtype=np.int64).reshape(len(lines), 2)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, OverflowError) as error:
        if isinstance(error, CacheError):
            raise
        raise CacheError(path, f"no lines START,END ({error})"[:200], code="E221") from error


def _ends(borders: Path, tokens: int, noticed: Counter[str] | None) -> NDArray[np.int64]:
    """Return where documents end, in tokens. Tokens between documents are a document too, and counted."""
    parts, last, between = [np.zeros(0, dtype=np.int64)], 0, 0
    for some in _read_lines(borders, tokens):
        flat = np.append(last, some.ravel())
        if np.any(np.diff(flat) < 0) or flat[-1] > tokens:
            raise CacheError(borders, "documents that overlap or end behind", f"{tokens:,} tokens", code="E221")
        between += int((flat[1::2] - flat[:-1:2]).sum())
        if noticed is not None:
            noticed["empty_documents"] += int((flat[1::2] == flat[2::2]).sum())
        parts.append(np.unique(flat[1:]))
        last = int(flat[-1])
    if noticed is not None:
        noticed["tokens_between_documents"] += between + tokens - last
    ends = np.unique(np.append(np.concatenate(parts), tokens))
    return ends[ends > 0]
