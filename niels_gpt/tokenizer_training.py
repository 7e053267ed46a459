"""Train a tokenizer: equal texts in equal order give an equal model, byte for byte (PR-01; D7).

    trained = train_tokenizer(["a text", "another"], vocab_size=16_000)
    write_tokenizer(trained, "artifacts/tokenizer")
    trained = train_tokenizer(["a text", "another"], kind="bpe", vocab_size=128_000)

kind "sentencepiece" gives a SentencePiece model, "bpe" a byte-level BPE tokenizer.json (tokenizers/bpe_training.py).

SentencePiece: with normalization "identity" the model is lossless: decode(encode(x)) == x for every text without
U+2581, which marks a space in SentencePiece. Other normalizations use SentencePiece's defaults for the dummy prefix and
runs of whitespace, and are not lossless.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.storage.errors import InTheWay, TokenizerError
from niels_gpt.storage.fileio import canonical_json, write_bytes
from niels_gpt.tokenizer import TokenizerPaths, sentinel_ids
from niels_gpt.tokenizers.files import MODEL_NAME, TOKENIZER_JSON
from niels_gpt.tokenizers.training_texts import MAX_PIECE_BYTES, TrainingTexts, training_pieces
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
"""Of a SentencePiece model that is trained here: ids that fit tokens of 16 bits (D18)."""

TRAINED_KINDS: Final = ("sentencepiece", "bpe")
MODEL_TYPES: Final = ("unigram", "bpe")
NORMALIZATIONS: Final = ("identity", "nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")


@dataclass(frozen=True, slots=True)
class TrainedTokenizer:
    """The bytes of spm.model or tokenizer.json, and the content of its tokenizer_meta.json."""

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
    """Train on texts, one document each, read once; SentencePiece keeps all of them in memory, bpe each word once.

    kind: of TRAINED_KINDS. For bpe model_type, normalization and character_coverage must keep their defaults.
    vocab_size: all ids, including sentinels, 256 byte pieces and 3 control pieces (bpe: none). If the texts do not
        give so many, the vocabulary is as large as possible, a warning is logged, and the meta has both sizes.
    seed: recorded only (PR-01). Training on all sentences, in order, on one thread draws no random numbers.
    max_bytes: utf-8 bytes to read at most; the last document is truncated there. None: no limit.
    trained_on: the name of the texts in the meta.
    progress: called with documents read, utf-8 bytes read, and max_bytes.
    Documents with a reserved literal are dropped and counted (D6). Errors of `texts` are raised unchanged.
    Raises: ValueError for a bad argument, a vocabulary too small for its characters, or no text to train on.
    """
    _check_arguments(kind, vocab_size, model_type, normalization, character_coverage, max_bytes)
    feed = TrainingTexts(texts, max_bytes=max_bytes, progress=progress)
    if kind == "bpe":
        from niels_gpt.tokenizers import bpe_training

        model = bpe_training.train_model(feed, vocab_size)
        about = bpe_training.describe_model(model)
        model_type, character_coverage = "bpe", 1.0
    else:
        model = _run(feed, _options(vocab_size, model_type, normalization, character_coverage))
        about = _describe_model(model)
    meta = {
        **about,
        **feed.counts,
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
    """Write the model and then tokenizer_meta.json, each atomically, into a folder, which is made if absent.

    Raises: FileExistsError where the folder has a model of the other kind, which would make its kind unclear.
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


def _run(feed: TrainingTexts, options: dict[str, Any]) -> bytes:
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
    kind: str, vocab_size: int, model_type: str, normalization: str, character_coverage: float, max_bytes: int | None
) -> None:
    if kind not in TRAINED_KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(TRAINED_KINDS)}")
    if kind == "bpe" and (model_type, normalization, character_coverage) != ("unigram", "identity", 0.9999):
        raise ValueError("model_type, normalization and character_coverage are of kind='sentencepiece', not of 'bpe'")
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
