"""The formats of other tools, one module each: `write` makes their files of a cache, `read` looks into their files.

nanogpt.py         train.bin and val.bin: ids without a header
modded_nanogpt.py  .bin files with a header
megatron.py        pairs of .bin and .idx
datatrove.py       .ds with .ds.index and .ds.metadata
olmo.py            .npy without a header, and .csv.gz
hf.py              parquet files of `datasets`; rows with input_ids, as they are read
litdata.py         a folder a split, with chunk-0-N.bin and index.json
listing.py         the token files of a folder: splits, order, what lies beside them; what several of them write alike
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from niels_gpt.exchange.foreign import ForeignFolder
from niels_gpt.exchange.formats import datatrove, hf, litdata, megatron, modded_nanogpt, nanogpt, olmo
from niels_gpt.exchange.output import Output, TokenCache


class Read(Protocol):
    """Look into a folder or file."""

    def __call__(self, source: Path, *, val_glob: str | None = None, vocab_size: int | None = None) -> ForeignFolder:
        """Return what is there; its headers, sizes and borders are checked, and no ids are read.

        val_glob: as of `foreign.split_of`. vocab_size: of the ids; tells how wide they are where no file says it.
        Raises: FileNotFoundError; CacheError E221 for what is not of this format.
        """


@dataclass(frozen=True)
class Format:
    """One format. Which kinds it can hold, the kinds say: `Kind.formats`."""

    name: str
    """As --to and --from name it."""
    about: str
    """A line for --help."""
    write: Callable[[TokenCache, Output], None]
    """Write a cache. Raises: CacheError E220 for a cache that the format cannot hold."""
    read: Read
    """Look into a folder or file."""


_ALL = (
    Format("nanogpt", "train.bin and val.bin, ids without a header", nanogpt.write, nanogpt.read),
    Format("modded-nanogpt", ".bin files with a header, of llm.c too", modded_nanogpt.write, modded_nanogpt.read),
    Format("megatron", "pairs of .bin and .idx of Megatron-LM", megatron.write, megatron.read),
    Format("datatrove", ".ds files with .ds.index and .ds.loss", datatrove.write, datatrove.read),
    Format("olmo", ".npy and .csv.gz files of OLMo-core, with label masks", olmo.write, olmo.read),
    Format("hf", "parquet files of datasets: input_ids, labels, position_ids", hf.write, hf.read),
    Format("litdata", "chunks of litdata for its TokensLoader, a folder a split", litdata.write, litdata.read),
)
FORMATS = {each.name: each for each in _ALL}
"""Every format by its name."""
