"""OLMo-core and the Dolma toolkit: SPLIT_NNNNN.npy, ids without a header, SPLIT_NNNNN.csv.gz, and label masks.

    SPLIT_NNNNN.npy             uint16 or uint32 [tokens], little-endian; the bytes of our shard. In spite of its name
                                it has no header of numpy. Its readers take `dtype=NumpyDatasetDType.uint32` for uint32
    SPLIT_NNNNN.csv.gz          a line for each document: START,END in tokens of this file, END the first one behind it
    label_mask/SPLIT_NNNNN.npy  bool [tokens], one byte each: whether the token carries loss; of an sft cache alone.
                                OLMo-core finds it by `label_mask_paths`, in the order of `paths`
The gzip file is one member: 1f 8b 08 00, four zeros (no time), 00 ff, the deflated lines of level 6, CRC-32 and length.
A document that lies in two shards is two documents. The fixed-length dataset of OLMo-core needs no borders. The packed
ones look for its end-of-document id in local files unless `use_array_if_local=False`, which reads the .csv.gz: without
it they lose what is behind the last such id of a file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from niels_gpt.cache.formats import SPLITS
from niels_gpt.interop.foreign import ForeignFolder
from niels_gpt.interop.formats.chunks import spans
from niels_gpt.interop.output import Output
from niels_gpt.interop.token_cache import TokenCache, TokenFile
from niels_gpt.storage.errors import CacheError

_MASKS = "label_mask"
_GZIP_HEADER = b"\x1f\x8b\x08\x00" + bytes(4) + b"\x00\xff"  # no name, no time, no system


def write(cache: TokenCache, output: Output) -> None:
    """Link each shard as SPLIT_NNNNN.npy, and write its .csv.gz, and the label mask of an sft cache."""
    for split in SPLITS:
        for file in cache.files(split):
            stem = f"{split}_{file.number:05d}"
            output.place(f"{stem}.npy", file)
            output.write(f"{stem}.csv.gz", _gzip(_lines(file)))
            if cache.kind == "sft":
                output.write(f"{_MASKS}/{stem}.npy", (loss.view("u1") for loss in file.loss()))
            output.note("documents_cut_between_files", int(file.continues))


def _lines(file: TokenFile) -> Iterator[bytes]:
    for some in spans(file.ends):
        yield "".join(f"{start},{end}\n" for start, end in some.tolist()).encode()


def _gzip(content: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a gzip file without a name and a time: the same content gives the same bytes."""
    packer, crc, size = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS), 0, 0
    yield _GZIP_HEADER
    for part in content:
        crc, size = zlib.crc32(part, crc), size + len(part)
        yield packer.compress(part)
    yield packer.flush() + struct.pack("<II", crc, size % 2**32)


def read(source: Path, *, val_glob: str | None = None, vocab_size: int | None = None) -> ForeignFolder:
    """Look into a folder of .npy files without a header."""
    raise CacheError(source, "cannot be imported yet", code="E221")
