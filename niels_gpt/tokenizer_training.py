"""Train a tokenizer: equal texts in equal order give an equal model, byte for byte (PR-01; D7).

    trained = train_tokenizer(["a text", "another"], vocab_size=16_000)
    write_tokenizer(trained, "artifacts/tokenizer")
    trained = train_tokenizer(["a text", "another"], kind="bpe", vocab_size=128_000)

kind "sentencepiece" gives a SentencePiece model, "bpe" a byte-level BPE tokenizer.json.

SentencePiece: with normalization "identity" the model is lossless: decode(encode(x)) == x for every text without
U+2581, its mark for a space. Other normalizations add SentencePiece's dummy prefix and shorten runs of white space.
BPE: every text comes back from its ids, since there are 256 tokens of one byte and nothing is normalized. The number of
threads changes no byte: counts of words are sums, and of two equally frequent pairs the one with smaller ids is merged.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS, find_reserved_literal
from niels_gpt.storage.errors import InTheWay, TokenizerError
from niels_gpt.storage.fileio import canonical_json, write_bytes
from niels_gpt.tokenizer import TokenizerPaths, sentinel_ids
from niels_gpt.tokenizers.files import MODEL_NAME, TOKENIZER_JSON
from niels_gpt.work import Progress

__all__ = [
    "MAX_PIECE_BYTES",
    "MAX_TRAINED_PIECES",
    "MODEL_TYPES",
    "NORMALIZATIONS",
    "TRAINED_KINDS",
    "TrainedTokenizer",
    "train_tokenizer",
    "training_pieces",
    "write_tokenizer",
]

LOG = logging.getLogger(__name__)

MAX_TRAINED_PIECES: Final = 1 << 16
"""The most pieces of a SentencePiece model that is trained here: their ids fit 16 bits (D18)."""

TRAINED_KINDS: Final = ("sentencepiece", "bpe")
MODEL_TYPES: Final = ("unigram", "bpe")
NORMALIZATIONS: Final = ("identity", "nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")
_MIN_BPE_IDS: Final = len(SPECIAL_TOKENS) + 256
"""The sentinels and the bytes."""
_MIN_FREQUENCY: Final = 2
"""A pair that occurs once is not merged."""
_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Merges stay within a match of this regular expression. It is Llama 3's pre-tokenizer, which for nearly all text is
GPT-4's: English contractions; a word with the character before it; one to three digits; signs with the line ends behind
them; runs of white space without the last blank before a word."""
MAX_PIECE_BYTES: Final = 4_000
"""UTF-8 bytes of a training piece. SentencePiece drops pieces over its max_sentence_length, 4,192."""

_LONG_WORD = re.compile("|".join(rf"{kind}{{{MAX_PIECE_BYTES},}}" for kind in (r"[^\W\d_]", r"[^\w\s]", r"\s", "_")))
"""A very long word, such as a gene. BPE training takes time that grows with the square of a word's length."""
_SKIP_MARK = "\u2585"  # SentencePiece's mark for the unknown; pieces that contain it are dropped
_SPACE_MARK = "\u2581"


@dataclass(frozen=True, slots=True)
class TrainedTokenizer:
    """The bytes of spm.model or tokenizer.json, and the content of tokenizer_meta.json."""

    model: bytes
    meta: dict[str, Any]


def train_tokenizer(
    texts: Iterable[str],
    *,
    kind: str = "sentencepiece",
    vocab_size: int = 16_000,
    seed: int = 42,
    model_type: str = "unigram",
    normalization: str = "identity",
    character_coverage: float = 0.9999,
    max_bytes: int | None = None,
    trained_on: str | Sequence[str] | None = None,
    progress: Progress | None = None,
) -> TrainedTokenizer:
    """Train a tokenizer on texts, one document each, which are read once.

    SentencePiece keeps all texts in memory, BPE each word once. Documents with a reserved literal are dropped and
    counted (D6).

    kind: sentencepiece or bpe. For bpe, model_type, normalization and character_coverage must keep their defaults.
    vocab_size: all ids: sentinels, 256 byte pieces and, for SentencePiece, 3 control pieces included. If the texts give
        fewer, the vocabulary is as large as possible, warning W408 is logged, and the meta has both sizes.
    seed: only recorded (PR-01). Training on all sentences, in order, on one thread draws no random numbers.
    max_bytes: stop after this many UTF-8 bytes, in the middle of a document; None for no limit.
    trained_on: the name of the texts in the meta.
    progress: called with documents read, UTF-8 bytes read, and max_bytes.
    Raises: ValueError for a bad argument; TokenizerError E406 if the vocabulary is too small for the characters, or
        there is no text; errors of `texts` unchanged.
    """
    _check_arguments(kind, vocab_size, model_type, normalization, character_coverage, max_bytes)
    feed = TrainingTexts(texts, max_bytes=max_bytes, progress=progress)
    if kind == "bpe":
        model = _train_bpe(feed, vocab_size)
        about = _bpe_facts(model)
        model_type, character_coverage = "bpe", 1.0
    else:
        model = _train_sentencepiece(feed, _options(vocab_size, model_type, normalization, character_coverage))
        about = _sentencepiece_facts(model)
    meta = {
        **about,
        **feed.counts,
        "special_tokens": list(SPECIAL_TOKENS),
        "model_sha256": hashlib.sha256(model).hexdigest(),
        "tokenizer_kind": "huggingface" if kind == "bpe" else "sentencepiece",
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
    """Write the model and then tokenizer_meta.json, each atomically; make the folder if it is absent.

    Raises: InTheWay E504 if the folder has a model of the other kind, which would make its kind unclear.
    """
    paths = TokenizerPaths.in_folder(out_dir, trained.meta["tokenizer_kind"])
    other = ({MODEL_NAME, TOKENIZER_JSON} - {paths.model_path.name}).pop()
    if os.path.lexists(paths.model_path.with_name(other)):
        text = f"{out_dir}: has a {other} already; a folder holds one tokenizer. Name another folder, or move it away"
        raise InTheWay(text)
    os.makedirs(out_dir, exist_ok=True)
    write_bytes(paths.model_path, trained.model)
    write_bytes(paths.meta_path, canonical_json(trained.meta))
    return paths


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


def _train_sentencepiece(feed: TrainingTexts, options: dict[str, Any]) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    try:
        # An iterator and a writer: file names would become part of the model.
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=feed.pieces(), model_writer=model, **options)
    except RuntimeError as error:
        if feed.error is not None:
            raise feed.error from None
        raise _explained(error, feed, options) from error
    return model.getvalue()


def _explained(error: RuntimeError, feed: TrainingTexts, options: dict[str, Any]) -> Exception:
    counts = feed.counts
    if not counts["bytes_seen"]:
        return feed.nothing_usable()
    too_small = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
    if too_small:
        return TokenizerError(
            f"vocab_size={options['vocab_size']} is too small: sentinels, control pieces, bytes and the characters "
            f"that character_coverage={options['character_coverage']} asks for need {too_small[1]}. "
            "Ask for more than that, or for a lower coverage",
            code="E406",
        )
    return TokenizerError(f"SentencePiece could not train on {counts['pieces']} pieces of text: {error}", code="E406")


def _sentencepiece_facts(model: bytes) -> dict[str, Any]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return {
        "vocab_size": int(processor.vocab_size()),
        "special_token_ids": sentinel_ids(processor, special_tokens=SPECIAL_TOKENS, where="the trained model"),
        "sentencepiece_version": str(sentencepiece.__version__),
    }


def _check_arguments(
    kind: str, vocab_size: int, model_type: str, normalization: str, character_coverage: float, max_bytes: int | None
) -> None:
    if kind not in TRAINED_KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(TRAINED_KINDS)}")
    if kind == "bpe" and (model_type, normalization, character_coverage) != ("unigram", "identity", 0.9999):
        raise ValueError("model_type, normalization and character_coverage need kind='sentencepiece', not 'bpe'")
    if kind == "sentencepiece" and not 1 <= vocab_size <= MAX_TRAINED_PIECES:
        raise ValueError(f"vocab_size={vocab_size}: expected 1 to {MAX_TRAINED_PIECES}")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type={model_type!r}: expected one of {', '.join(MODEL_TYPES)}")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r}: expected one of {', '.join(NORMALIZATIONS)}")
    if not 0.0 < character_coverage <= 1.0:
        raise ValueError(f"character_coverage={character_coverage}: expected more than 0 and at most 1")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes}: expected None or at least 1")


def _train_bpe(texts: TrainingTexts, vocab_size: int) -> bytes:
    """Return the bytes of a tokenizer.json with the sentinels as ids 0 to 3. Raises: ImportError with 1.0."""
    from niels_gpt.tokenizers.library import MAX_OPENED_IDS, is_fast, needs_classic  # not above: it imports numpy

    if is_fast():
        raise needs_classic("training a byte-level BPE needs a trainer")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if not _MIN_BPE_IDS <= vocab_size <= MAX_OPENED_IDS:
        expected = f"{_MIN_BPE_IDS} (four sentinels and 256 bytes) to {MAX_OPENED_IDS:,}"
        raise ValueError(f"vocab_size={vocab_size}: expected {expected}")
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_SPLIT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    try:
        tokenizer.train_from_iterator(texts.documents(), trainer)
    except Exception:
        if texts.error is not None:
            raise texts.error from None
        raise
    if not texts.counts["bytes_seen"]:
        raise texts.nothing_usable()
    return str(tokenizer.to_str()).encode() + b"\n"


def _bpe_facts(model: bytes) -> dict[str, Any]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_buffer(model)
    ids = {name: tokenizer.token_to_id(token) for name, token in zip(SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS, strict=True)}
    return {
        "vocab_size": int(tokenizer.get_vocab_size(with_added_tokens=True)),
        "special_token_ids": ids,
        "tokenizers_version": str(tokenizers.__version__),
        "split": _SPLIT,
        "min_frequency": _MIN_FREQUENCY,
    }


def training_pieces(text: str) -> Iterator[str]:
    """Yield the training pieces of a text, of at most MAX_PIECE_BYTES; joined they are the text without U+2585.

    A text is split before a line feed if possible, since SentencePiece strips line ends from the end of a piece but not
    from its start; else between two characters.
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
    """The texts of one training, read once by `pieces` or `documents`: counted, hashed, without reserved literals."""

    def __init__(self, texts: Iterable[str], *, max_bytes: int | None, progress: Progress | None) -> None:
        """max_bytes: stop after this many UTF-8 bytes, in the middle of a text."""
        self.counts = {
            "documents": 0,
            "documents_with_reserved_literal": 0,
            "documents_with_u2581": 0,
            "bytes_given": 0,
            "bytes_seen": 0,
        }
        self.digest = hashlib.sha256()
        self.error: BaseException | None = None
        """An error that `texts` raised; the libraries would raise one of their own instead."""
        self._texts = texts
        self._max_bytes = max_bytes
        self._full = False
        self._progress = progress

    def pieces(self) -> Iterator[str]:
        """Yield and count training pieces, as SentencePiece takes them."""
        self.counts["pieces"] = 0
        for text in self._documents():
            for piece in training_pieces(text):
                # SentencePiece strips line ends after a piece, ignores NUL, and skips empty pieces.
                if seen := len(_utf8(piece.rstrip("\r\n").replace("\0", ""))):
                    self.counts["pieces"] += 1
                    self.counts["bytes_seen"] += seen
                    yield piece

    def documents(self) -> Iterator[str]:
        """Yield texts that are not empty; words of thousands of letters are cut."""
        for text in self._documents():
            if text:
                self.counts["bytes_seen"] += len(data := _utf8(text))
                text, step = data.decode(), MAX_PIECE_BYTES
                words = _LONG_WORD.finditer(text)
                cuts = [at for word in words for at in range(word.start() + step, word.end(), step)]
                yield from (text[begin:end] for begin, end in pairwise([0, *cuts, len(text)]))

    def nothing_usable(self) -> Exception:
        """Return the error for a training without any text."""
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
        """Count a text; return the part within `max_bytes`, None for a text with a reserved literal."""
        data = _utf8(text)
        if self._max_bytes is not None and len(data) >= self._max_bytes - self.counts["bytes_given"]:
            self._full = True
            text = data[: self._max_bytes - self.counts["bytes_given"]].decode("utf-8", "ignore")  # at a character
            data = _utf8(text)
        # The length too, else two texts would have the hash of their concatenation.
        self.digest.update(len(data).to_bytes(8, "little") + data)
        self.counts["documents"] += 1
        self.counts["documents_with_u2581"] += _SPACE_MARK in text
        self.counts["bytes_given"] += len(data)
        if find_reserved_literal(text) is None:
            return text
        self.counts["documents_with_reserved_literal"] += 1
        return None
