"""Train a SentencePiece tokenizer: equal texts in equal order give an equal model, byte for byte (PR-01; D7).

    trained = train_tokenizer(["a text", "another"], vocab_size=16_000)
    write_tokenizer(trained, "artifacts/tokenizer")

With normalization "identity" the model is lossless: decode(encode(x)) == x for every text without U+2581, which marks a
space in SentencePiece. Other normalizations use SentencePiece's defaults for the dummy prefix and runs of whitespace,
and are not lossless.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from niels_gpt.progress import Progress
from niels_gpt.special_tokens import SPECIAL_TOKENS, find_reserved_literal
from niels_gpt.storage.codes import coded
from niels_gpt.storage.fileio import canonical_json, write_bytes
from niels_gpt.tokenizer import TokenizerPaths, sentinel_ids

LOG = logging.getLogger(__name__)

MAX_VOCAB_SIZE: Final = 1 << 16
"""Ids that fit the uint16 tokens of a cache (D18)."""

MAX_PIECE_BYTES: Final = 4_000
"""Utf-8 bytes of a training piece; SentencePiece drops longer ones than its max_sentence_length, 4,192."""

MODEL_TYPES: Final = ("unigram", "bpe")
NORMALIZATIONS: Final = ("identity", "nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")

_SKIP_MARK = "\u2585"  # SentencePiece's mark for the unknown; it drops training pieces that contain it
_SPACE_MARK = "\u2581"


@dataclass(frozen=True, slots=True)
class TrainedTokenizer:
    """A model as bytes, and the content of its tokenizer_meta.json."""

    model: bytes
    meta: dict[str, Any]


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int = 16_000,
    seed: int = 42,
    model_type: str = "unigram",
    normalization: str = "identity",
    character_coverage: float = 0.9999,
    max_bytes: int | None = None,
    trained_on: str | Sequence[str] | None = None,
    progress: Progress | None = None,
) -> TrainedTokenizer:
    """Train on texts, one document each, read once; SentencePiece keeps all of them in memory.

    vocab_size: all ids, including sentinels, 256 byte pieces and 3 control pieces. If the texts do not give so many,
        the vocabulary is as large as possible, a warning is logged, and the meta has both sizes.
    seed: recorded only (PR-01). Training on all sentences, in order, on one thread draws no random numbers.
    max_bytes: utf-8 bytes to read at most; the last document is truncated there. None: no limit.
    trained_on: the name of the texts in the meta.
    progress: called with documents read, utf-8 bytes read, and max_bytes.
    Documents with a reserved literal are dropped and counted (D6). Errors of `texts` are raised unchanged.
    Raises: ValueError for a bad argument, a vocabulary too small for its characters, or no text to train on.
    """
    _check_arguments(vocab_size, model_type, normalization, character_coverage, max_bytes)
    feed = _Feed(texts, max_bytes=max_bytes, progress=progress)
    options = _options(vocab_size, model_type, normalization, character_coverage)
    model = _run(feed, options)
    meta = {
        **_describe_model(model),
        **feed.counts,
        "share_seen": feed.counts["bytes_seen"] / feed.counts["bytes_given"],
        "inputs_sha256": feed.digest.hexdigest(),
        "requested_vocab_size": vocab_size,
        "seed": seed,
        "model_type": model_type,
        "normalization": normalization,
        "lossless": normalization == "identity",
        "character_coverage": character_coverage,
        "max_bytes": max_bytes,
        "trained_on": trained_on if trained_on is None or isinstance(trained_on, str) else list(trained_on),
    }
    if meta["vocab_size"] < vocab_size and trained_on != "sample":  # which is small on purpose
        text = "the texts allow a vocabulary of %d ids only, %d were asked for"
        LOG.warning(text, meta["vocab_size"], vocab_size, extra={"code": "W408"})
    return TrainedTokenizer(model, meta)


def write_tokenizer(trained: TrainedTokenizer, out_dir: str | os.PathLike[str]) -> TokenizerPaths:
    """Write spm.model and then tokenizer_meta.json, each atomically, into a folder, which is made if absent."""
    os.makedirs(out_dir, exist_ok=True)
    paths = TokenizerPaths.in_folder(out_dir)
    write_bytes(paths.model_path, trained.model)
    write_bytes(paths.meta_path, canonical_json(trained.meta))
    return paths


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


class _Feed:
    """The texts for the trainer, counted and hashed."""

    def __init__(self, texts: Iterable[str], *, max_bytes: int | None, progress: Progress | None) -> None:
        self.counts = {
            "documents": 0,
            "documents_with_reserved_literal": 0,
            "documents_with_u2581": 0,
            "pieces": 0,
            "bytes_given": 0,
            "bytes_seen": 0,
        }
        self.digest = hashlib.sha256()
        self.error: BaseException | None = None
        self._texts = texts
        self._max_bytes = max_bytes
        self._full = False
        self._progress = progress

    def pieces(self) -> Iterator[str]:
        """Yield the training pieces; keeps an error of the texts, which SentencePiece turns into a RuntimeError."""
        try:
            for text in self._texts:
                yield from self._document(text)
                if self._progress is not None:
                    self._progress(self.counts["documents"], self.counts["bytes_given"], self._max_bytes)
                if self._full:
                    return
        except GeneratorExit:
            raise
        except BaseException as error:
            self.error = error
            raise

    def _document(self, text: str) -> Iterator[str]:
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
        if find_reserved_literal(text) is not None:
            self.counts["documents_with_reserved_literal"] += 1
            return
        for piece in training_pieces(text):
            # SentencePiece strips line ends after a piece, ignores NUL, and skips empty pieces.
            seen = len(_utf8(piece.rstrip("\r\n").replace("\0", "")))
            if seen:
                self.counts["pieces"] += 1
                self.counts["bytes_seen"] += seen
                yield piece


def _options(vocab_size: int, model_type: str, normalization: str, character_coverage: float) -> dict[str, Any]:
    lossless = normalization == "identity"
    return {
        "vocab_size": vocab_size,
        "model_type": model_type,
        "user_defined_symbols": list(SPECIAL_TOKENS),
        "normalization_rule_name": normalization,
        "add_dummy_prefix": not lossless,
        "remove_extra_whitespaces": not lossless,
        "byte_fallback": True,
        "character_coverage": character_coverage,
        "hard_vocab_limit": False,  # too little text gives a smaller vocabulary instead of an error
        "num_threads": 1,  # the number of threads changes the pieces
        "input_sentence_size": 0,  # all sentences: a sample would be random
        "shuffle_input_sentence": False,
        "max_sentence_length": 4_192,
        "minloglevel": 3,  # no report on stderr; errors are exceptions anyway
    }


def _run(feed: _Feed, options: dict[str, Any]) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    try:
        # An iterator and a writer: file names would become part of the model.
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=feed.pieces(), model_writer=model, **options)
    except RuntimeError as error:
        if feed.error is not None:
            raise feed.error from None
        raise coded("E406", _explained(error, feed, options)) from error
    return model.getvalue()


def _explained(error: RuntimeError, feed: _Feed, options: dict[str, Any]) -> Exception:
    counts = feed.counts
    if counts["pieces"] == 0:
        return ValueError(
            f"nothing to train a tokenizer on: {counts['documents']} documents of {counts['bytes_given']} bytes, "
            f"{counts['documents_with_reserved_literal']} of them left out for a reserved literal. Give it more text"
        )
    too_small = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
    if too_small:
        return ValueError(
            f"vocab_size={options['vocab_size']} is too small: sentinels, control pieces, bytes and the characters "
            f"that character_coverage={options['character_coverage']} asks for need {too_small[1]}. "
            "Ask for more than that, or for a lower coverage"
        )
    return ValueError(f"SentencePiece could not train on {counts['pieces']} pieces of text: {error}")


def _describe_model(model: bytes) -> dict[str, Any]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return {
        "vocab_size": int(processor.vocab_size()),
        "special_tokens": list(SPECIAL_TOKENS),
        "special_token_ids": sentinel_ids(processor, special_tokens=SPECIAL_TOKENS, where="the trained model"),
        "model_sha256": hashlib.sha256(model).hexdigest(),
        "sentencepiece_version": str(sentencepiece.__version__),
    }


def _check_arguments(
    vocab_size: int, model_type: str, normalization: str, character_coverage: float, max_bytes: int | None
) -> None:
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size={vocab_size}: expected 1 to {MAX_VOCAB_SIZE}, as cache tokens are uint16")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type={model_type!r}: expected one of {', '.join(MODEL_TYPES)}")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r}: expected one of {', '.join(NORMALIZATIONS)}")
    if not 0.0 < character_coverage <= 1.0:
        raise ValueError(f"character_coverage={character_coverage}: expected more than 0 and at most 1")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes}: expected None or at least 1")
