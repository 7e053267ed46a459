"""A folder of another tool as an import reads it: files of tokens, where documents end in each, and which carry loss.

A format's module reads sizes, headers and borders and checks them; it reads no tokens before an import asks for them.
Folders come from strangers: no link is followed, nothing is executed, and sizes are bounded before memory is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ForeignFile:
    """One file of tokens of another tool, which becomes one shard of a cache."""

    split: str
    """train or val."""
    name: str
    """Its path below the source's folder: documents are named NAME#NUMBER."""
    tokens: int
    """Tokens in it, more than 0."""
    pieces: Callable[[], Iterator[NDArray[Any]]]
    """Yields its ids in order: arrays of any integer dtype, a few MiB each."""
    ends: Callable[[], NDArray[np.int64]] | None
    """Returns where each document ends, in tokens of this file: int64 [documents], ascending strictly, the last is
    `tokens`. None: the format has no borders, and the end-of-document id decides."""
    token_file: Path | None = None
    """A regular file that holds exactly these ids, little-endian, of `itemsize` bytes each: it may be linked."""
    itemsize: int = 0
    """Bytes of an id in `token_file`, 2 or 4."""
    loss: Callable[[], Iterator[NDArray[np.bool_]]] | None = None
    """Yields which tokens carry loss, in order; None: the format says nothing of it."""
    ids: Callable[[], Iterator[str]] | None = None
    """Yields the names of the documents, where the format has names; None: NAME#NUMBER."""
    continues: bool = False
    """Whether its first document begins in the file before, as the manifest of an export says."""


@dataclass(frozen=True)
class ForeignFolder:
    """All that an import needs to know of a folder."""

    files: list[ForeignFile]
    """Those of train in their order, then those of val."""
    tokenizer: str | None = None
    """The name or path of the tokenizer that the folder itself names; no library opens it unasked."""
    vocab_size: int | None = None
    """As the folder says; None where it says nothing."""
    document_end: int | None = None
    """The id that ends each document, as the folder says."""
    manifest: Mapping[str, Any] | None = None
    """Of an export of this project, checked; None without one."""
    noticed: Mapping[str, int] = field(default_factory=dict)
    """What was left out or changed on the way, by reason, counted: goes to meta.json."""
