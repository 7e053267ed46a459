"""Which document goes to val (D5), how many tokens of it still fit, and whether val has the share asked for."""

from __future__ import annotations

import logging
import math
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.build.stream import Mark
from niels_gpt.special_tokens import find_reserved_literal

logger = logging.getLogger(__name__)

SPLITS = ("train", "val")
Document = tuple[str | None, str, str]
"""Split (None: by its text), text, and the id that the source has for it."""

_WHOLE = 1 << 64  # numbers that 8 bytes can be
_HELD_BYTES = 1 << 30  # of documents that wait on disk for the first one of val; in memory up to:
_HELD_IN_MEMORY = 8 << 20
_HELD_DOCUMENTS = 100_000
_HELD_CHANCES = 20  # one stream of e**20 has no val document among so many times 1 / share


def split_keys(texts: Iterable[bytes], seed: int) -> NDArray[np.uint64]:
    """Return the number that decides each text's split: the first 8 bytes, big-endian, of sha256(seed, newline, text).

    texts: in utf-8, lone surrogates by "surrogatepass". Returns uint64 [texts].
    """
    start = sha256(f"{seed}\n".encode())
    digests = []
    for text in texts:
        state = start.copy()
        state.update(text)
        digests.append(state.digest()[:8])
    return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)


class TextSplit:
    """Splits documents by their texts and a seed: neither order nor neighbours nor the tokenizer matters.

    A document is in val if its key (`split_keys`) is below `bound`, which is share * 2**64. Only in a stream of which
    no document with text would be in one of the splits is it another number: the nearest one that gives each split a
    document, train first. So equal texts are in one split there too.
    """

    def __init__(self, share: Fraction | None, seed: int) -> None:
        """share: of the documents that go to val, 0 to 1; None where every document names its split."""
        self.share, self.seed = share, seed
        self.bound = math.ceil((share or 0) * _WHOLE)
        """Keys below it mean val. It is final when the first document has left `settled`."""

    def of(self, key: int) -> str:
        """Return the split of a text by its key. Raises: ValueError where no share of val is known."""
        if self.share is None:
            raise ValueError("a document names no split: expected val_frac, or a bound of the tokens of both splits")
        return "val" if key < self.bound else "train"

    def settled(self, documents: Iterator[tuple[Document, Mark]], folder: Path) -> Iterator[tuple[Document, Mark]]:
        """Pass documents on once `bound` is final, which is when both splits have one, or the stream has ended.

        Documents that wait are in an unnamed file in `folder`: at most 1 GiB, 100,000 documents, and 20 times as many
        as give one to each split on average. Behind these, or a document that names its split, `bound` stays as it is.
        """
        if self.share is None or not 0 < self.bound < _WHOLE:
            yield from documents
            return
        most = min(math.ceil(_HELD_CHANCES / min(self.share, 1 - self.share)), _HELD_DOCUMENTS)
        with tempfile.SpooledTemporaryFile(_HELD_IN_MEMORY, mode="w+b", dir=os.fspath(folder)) as held:
            count = self._hold(documents, held, most)
            held.seek(0)
            for _ in range(count):
                yield pickle.load(held)
        yield from documents

    def _hold(
        self, documents: Iterator[tuple[Document, Mark]], held: tempfile.SpooledTemporaryFile[bytes], most: int
    ) -> int:
        """Write documents until the bound is known, and set it; returns their number."""
        count, lowest, highest = 0, _WHOLE, -1
        for document, mark in documents:
            pickle.dump((document, mark), held)
            count += 1
            split, text, _ = document
            if split is not None:
                return count
            if text and find_reserved_literal(text) is None:  # else it is dropped
                key = int(split_keys([text.encode(errors="surrogatepass")], self.seed)[0])
                lowest, highest = min(lowest, key), max(highest, key)
            if lowest < self.bound <= highest or count == most or held.tell() >= _HELD_BYTES:
                return count
        if highest >= 0:  # train first: the only text goes there
            self.bound = min(max(self.bound, lowest + 1), highest)
        return count


def asked_share(meta: Mapping[str, Any]) -> Fraction | None:
    """Return the share of val that a build was asked for; None where upstream had made the splits, or nothing says."""
    if meta.get("val_frac") is not None:
        return Fraction(float(meta["val_frac"]))
    train, val = (meta.get(f"max_{split}_tokens") for split in SPLITS)
    if train is None or val is None:
        return None
    return Fraction(val, train + val) if train + val else Fraction(0)


def warn_of_share(out_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
    """Log a warning if val's share of the tokens is below half of what was asked for, or above twice as much.

    One document of average length more or less is no reason: it is all that a few documents can do.
    """
    asked, tokens = asked_share(meta), [int(meta["totals"][f"{split}_tokens"]) for split in SPLITS]
    num = sum(int(meta["index"][split]["entries"]) - (meta["kind"] == "pretrain") for split in SPLITS)
    if not asked or num < 2:
        return
    found, one = Fraction(tokens[1], sum(tokens)), Fraction(1, num)
    if not asked / 2 - one <= found <= 2 * asked + one:
        logger.warning(
            "%s: val has %s of %s tokens, %.1f %%, where %.1f %% were asked for. Documents are split whole, so a few "
            "long ones decide the share: cut them into parts, or take another seed",
            os.fspath(out_dir),
            f"{tokens[1]:,}",
            f"{sum(tokens):,}",
            100 * found,
            100 * asked,
        )


@dataclass
class TokenBudget:
    """How many tokens of each split are there, and how many may be."""

    limits: dict[str, int | None]
    """Tokens of each split, at most; None: no bound."""
    used: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Tokens of each split so far."""

    def __post_init__(self) -> None:
        for split, limit in self.limits.items():
            if limit is not None and limit < 0:
                raise ValueError(f"max_{split}_tokens={limit}: expected 0 or more tokens")

    def room(self, split: str) -> int | None:
        """Return the tokens that still fit; None: no bound."""
        limit = self.limits[split]
        return None if limit is None else limit - self.used[split]

    def full(self, split: str) -> bool:
        """Whether not one more token fits."""
        return self.room(split) == 0
