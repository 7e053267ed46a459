"""nanoGPT: train.bin and val.bin, ids end to end without a header, and meta.pkl with the vocabulary's size.

Its trainer reads uint16 (`np.memmap(..., dtype=np.uint16)`). Ids of 32 bits need that line changed to np.uint32.
The files have no borders: a document ends with its end-of-document id. Nothing says how wide the ids are either: an
import takes the width of the vocabulary.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from niels_gpt.cache.formats import SPLITS
from niels_gpt.exchange.foreign import ForeignFolder
from niels_gpt.exchange.formats.listing import listed, numbers
from niels_gpt.exchange.formats.modded_nanogpt import HEADERS
from niels_gpt.exchange.output import Output, TokenCache
from niels_gpt.storage.errors import CacheError


def write(cache: TokenCache, output: Output) -> None:
    """Write SPLIT.bin: a link if the split is one shard, else the shards end to end."""
    for split in SPLITS:
        files = cache.files(split)
        if len(files) == 1:
            output.place(f"{split}.bin", files[0])
        elif files:
            output.write(f"{split}.bin", (file.ids for file in files), files)
    output.write("meta.pkl", [pickle.dumps({"vocab_size": cache.vocab_size}, protocol=4)])


def read(source: Path, *, val_glob: str | None = None, vocab_size: int | None = None) -> ForeignFolder:
    """Look into a folder with train.bin and val.bin. Does not open meta.pkl, because opening a pickle runs it."""
    listing = listed(source, ".bin", "nanogpt", val_glob)
    for each in listing.files:
        if each.size >= 8 and tuple(numbers(each.path, "<i4", count=2).tolist()) in HEADERS:
            remedy = "Pass --from modded-nanogpt"
            raise CacheError(each.path, "has a header", "only ids, as nanoGPT reads them", remedy, code="E221")
    width = listing.width(vocab_size) or 2
    return listing.folder([each.plain(width) for each in listing.files])
