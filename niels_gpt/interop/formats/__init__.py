"""The formats of other tools, one module each: `write` makes their files of a cache, `read` looks into their files.

nanogpt.py       train.bin and val.bin: ids without a header
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from niels_gpt.interop.foreign import ForeignFolder
from niels_gpt.interop.formats import nanogpt
from niels_gpt.interop.output import Output
from niels_gpt.interop.token_cache import TokenCache


@dataclass(frozen=True)
class Format:
    """One format."""

    name: str
    """As --to and --from name it."""
    about: str
    """A line for --help."""
    write: Callable[[TokenCache, Output], None]
    """Write a cache. Raises: CacheError E220 for a cache that the format cannot hold."""
    read: Callable[[Path], ForeignFolder]
    """Look into a folder or file. Raises: FileNotFoundError; CacheError E221 for what is not of this format."""
    has_loss: bool = False
    """Whether it holds which tokens carry loss: only then an sft cache is written."""


FORMATS = {
    each.name: each
    for each in (Format("nanogpt", "train.bin and val.bin, ids without a header", nanogpt.write, nanogpt.read),)
}
"""Every format by its name."""
