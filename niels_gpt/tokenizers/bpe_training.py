"""Train a byte-level BPE tokenizer.json on the texts that a SentencePiece model would be trained on.

Equal texts give equal bytes, whatever the number of threads: counts of words are sums, and of two pairs that are
equally frequent the one with the smaller ids is merged first. Every text comes back from its ids: there are 256 tokens
of one byte, and nothing is normalized.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS
from niels_gpt.tokenizers.huggingface import MAX_OPENED_IDS
from niels_gpt.tokenizers.training_texts import TrainingTexts

MIN_VOCAB_SIZE: Final = len(SPECIAL_TOKENS) + 256
"""The sentinels and the bytes."""
MIN_FREQUENCY: Final = 2
"""A pair that occurs once is not merged."""

SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pre-tokenizer, a regular expression whose matches are never merged with each other. It is Llama 3's, which is
GPT-4's for nearly all text: English contractions; a word with the character before it; one to three digits; signs with
the line ends behind them; runs of white space, without the last blank before a word."""


def train_model(texts: TrainingTexts, vocab_size: int) -> bytes:
    """Return the bytes of a tokenizer.json with the sentinels as ids 0 to 3.

    vocab_size: all ids, the sentinels and the 256 bytes included; fewer if the texts have too few pairs.
    Raises: ValueError for a bad vocab_size, or no text; errors of the texts unchanged.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_OPENED_IDS:
        expected = f"{MIN_VOCAB_SIZE} (four sentinels and 256 bytes) to {MAX_OPENED_IDS:,}"
        raise ValueError(f"vocab_size={vocab_size}: expected {expected}")
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
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


def describe_model(model: bytes) -> dict[str, Any]:
    """Return what tokenizer_meta.json says of a model of `train_model`."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_buffer(model)
    ids = {name: tokenizer.token_to_id(token) for name, token in zip(SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS, strict=True)}
    return {
        "vocab_size": int(tokenizer.get_vocab_size(with_added_tokens=True)),
        "special_tokens": list(SPECIAL_TOKENS),
        "special_token_ids": ids,
        "model_sha256": hashlib.sha256(model).hexdigest(),
        "tokenizers_version": str(tokenizers.__version__),
        "split": SPLIT,
        "min_frequency": MIN_FREQUENCY,
    }
