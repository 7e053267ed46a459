"""The formats of other tools, one module each: `write` exports a cache, `read` looks into a folder.

nanogpt.py         train.bin and val.bin: ids without a header
modded_nanogpt.py  .bin files with a header
megatron.py        pairs of .bin and .idx
datatrove.py       .ds with .ds.index and .ds.metadata
olmo.py            .npy without a header, and .csv.gz
hf.py              parquet files of `datasets`; reads any rows with input_ids
litdata.py         a folder for each split, with chunk-0-N.bin and index.json
listing.py         lists the token files of a folder: splits, order, companions; shared pieces of the writers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from niels_gpt.exchange.foreign import ForeignFolder
from niels_gpt.exchange.formats import datatrove, hf, litdata, megatron, modded_nanogpt, nanogpt, olmo
from niels_gpt.exchange.names import MASK_NAMES
from niels_gpt.exchange.output import Output, TokenCache


class Read(Protocol):
    """Type of a function that looks into a folder or file."""

    def __call__(self, source: Path, *, val_glob: str | None = None, vocab_size: int | None = None) -> ForeignFolder:
        """Describe a folder or file. Checks headers, sizes and borders, and reads no ids.

        val_glob: pattern for the files of val; see `foreign.split_of`. vocab_size: tells the width of ids if no file
            does.
        Raises: FileNotFoundError; CacheError E221 for anything but this format.
        """


@dataclass(frozen=True)
class Format:
    """One format. `Kind.formats` tells which kinds of cache it can hold."""

    name: str
    """Value of --to and --from."""
    about: str
    """Line for --help."""
    write: Callable[[TokenCache, Output], None]
    """Writes a cache. Raises: CacheError E220 if the format cannot hold it."""
    read: Read
    """Looks into a folder or file."""
    masks: tuple[str, ...] = ()
    """Names that a mask of the tokens that carry loss may have."""


_ALL = (
    Format("nanogpt", "train.bin and val.bin, ids without a header", nanogpt.write, nanogpt.read),
    Format("modded-nanogpt", ".bin files with a header, of llm.c too", modded_nanogpt.write, modded_nanogpt.read),
    Format("megatron", "pairs of .bin and .idx of Megatron-LM", megatron.write, megatron.read),
    Format("datatrove", ".ds files with .ds.index and .ds.loss", datatrove.write, datatrove.read),
    Format("olmo", ".npy and .csv.gz files of OLMo-core, with label masks", olmo.write, olmo.read),
    Format("hf", "parquet files of datasets: input_ids, labels, position_ids", hf.write, hf.read, MASK_NAMES),
    Format("litdata", "chunks of litdata for its TokensLoader, a folder a split", litdata.write, litdata.read),
)
FORMATS = {each.name: each for each in _ALL}
"""All formats by name."""
