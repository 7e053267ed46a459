"""The texts that a tokenizer is trained on: counted, hashed, without those that hold a reserved literal."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

from niels_gpt.special_tokens import find_reserved_literal
from niels_gpt.storage.errors import TokenizerError
from niels_gpt.work import Progress

MAX_PIECE_BYTES: Final = 4_000
"""Utf-8 bytes of a training piece; SentencePiece drops longer ones than its max_sentence_length, 4,192."""

_LONG_WORD = re.compile("|".join(rf"{kind}{{{MAX_PIECE_BYTES},}}" for kind in (r"[^\W\d_]", r"[^\w\s]", r"\s", "_")))
"""What may be a word of bpe, such as a gene: the time that its training takes grows with the square of its length."""
_SKIP_MARK = "\u2585"  # SentencePiece's mark for the unknown; it drops training pieces that contain it
_SPACE_MARK = "\u2581"


def training_pieces(text: str) -> Iterator[str]:
    """Yield the training pieces of a text: at most MAX_PIECE_BYTES each, without U+2585; joined they are the text.

    Split before a line feed if possible, because SentencePiece strips line ends from the end of a piece but not from
    its start; else between two characters.
    """
    for part in text.split(_SKIP_MARK):
        data = _utf8(part)
        start = 0
        while len(data) - start > MAX_PIECE_BYTES:
            end = _cut(data, start)
            yield data[start:end].decode()
            start = end
        if start < len(data):
            yield data[start:].decode()


def _cut(data: bytes, start: int) -> int:
    limit = start + MAX_PIECE_BYTES
    # From start + 2, so that no piece is only a line end.
    end = data.rfind(b"\n", start + 2, limit + 1)
    if end >= 0:
        return end - 1 if data[end - 1 : end] == b"\r" and end - 1 > start else end
    while data[limit] & 0xC0 == 0x80:  # inside a character
        limit -= 1
    return limit


def _utf8(text: str) -> bytes:
    # A lone surrogate, which utf-8 cannot encode, becomes a question mark.
    return text.encode("utf-8", "replace")


class TrainingTexts:
    """The texts for one training; read once, by `pieces` or by `documents`."""

    def __init__(self, texts: Iterable[str], *, max_bytes: int | None, progress: Progress | None) -> None:
        """max_bytes: utf-8 bytes to read at most; the last text is truncated there."""
        self.counts = {
            "documents": 0,
            "documents_with_reserved_literal": 0,
            "documents_with_u2581": 0,
            "bytes_given": 0,
            "bytes_seen": 0,
        }
        self.digest = hashlib.sha256()
        self.error: BaseException | None = None
        """An error of the texts, which the libraries turn into one of theirs."""
        self._texts = texts
        self._max_bytes = max_bytes
        self._full = False
        self._progress = progress

    def pieces(self) -> Iterator[str]:
        """Yield the texts as SentencePiece takes them, in training pieces, which are counted too."""
        self.counts["pieces"] = 0
        for text in self._documents():
            for piece in training_pieces(text):
                # SentencePiece strips line ends after a piece, ignores NUL, and skips empty pieces.
                if seen := len(_utf8(piece.rstrip("\r\n").replace("\0", ""))):
                    self.counts["pieces"] += 1
                    self.counts["bytes_seen"] += seen
                    yield piece

    def documents(self) -> Iterator[str]:
        """Yield whole texts; one that is empty is left out, and words of thousands of letters are cut."""
        for text in self._documents():
            if text:
                self.counts["bytes_seen"] += len(data := _utf8(text))
                text, step = data.decode(), MAX_PIECE_BYTES
                words = _LONG_WORD.finditer(text)
                cuts = [at for word in words for at in range(word.start() + step, word.end(), step)]
                yield from (text[begin:end] for begin, end in pairwise([0, *cuts, len(text)]))

    def nothing_usable(self) -> Exception:
        """Return the error of a training without a text."""
        counts = self.counts
        text = (
            f"nothing to train a tokenizer on: {counts['documents']} documents of {counts['bytes_given']} bytes, "
            f"{counts['documents_with_reserved_literal']} of them left out for a reserved literal. Give it more text"
        )
        return TokenizerError(text, code="E406")

    def _documents(self) -> Iterator[str]:
        try:
            for text in self._texts:
                if (kept := self._kept(text)) is not None:
                    yield kept
                if self._progress is not None:
                    self._progress(self.counts["documents"], self.counts["bytes_given"], self._max_bytes)
                if self._full:
                    return
        except GeneratorExit:
            raise
        except BaseException as error:
            self.error = error
            raise

    def _kept(self, text: str) -> str | None:
        """Count a text; return what is read of it, None for one with a reserved literal."""
        data = _utf8(text)
        if self._max_bytes is not None and len(data) >= self._max_bytes - self.counts["bytes_given"]:
            self._full = True
            text = data[: self._max_bytes - self.counts["bytes_given"]].decode("utf-8", "ignore")  # at a character
            data = _utf8(text)
        # With its length, or two texts would have the hash of their concatenation.
        self.digest.update(len(data).to_bytes(8, "little") + data)
        self.counts["documents"] += 1
        self.counts["documents_with_u2581"] += _SPACE_MARK in text
        self.counts["bytes_given"] += len(data)
        if find_reserved_literal(text) is None:
            return text
        self.counts["documents_with_reserved_literal"] += 1
        return None
