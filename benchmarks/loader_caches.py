"""The caches that loaders.py reads: letters at random as ids of 16 or 32 bits, in so many shards."""

from pathlib import Path

import numpy as np
import torch
from loader_sft import ASST, EOT

from niels_gpt.cache import build_pretrain_cache
from niels_gpt.tokenizers.protocol import token_dtype

SHARDS = (1, 100, 1_000)
TEXT = 100_000  # tokens of one text


class Letters:
    """A tokenizer of ASCII letters: the readers do not care where ids come from."""

    vocab_size = 300

    def encode(self, text: str, /) -> list[int]:
        """Return one id for each letter."""
        return list(text.encode())

    def special_token_ids(self) -> dict[str, int]:
        """Return four ids that no letter has."""
        return {"sys": 1, "usr": 2, "asst": ASST, "eot": EOT}


class ManyIds(Letters):
    """The same letters with the largest ids of a vocabulary as large as Llama 3's: ids of 32 bits."""

    vocab_size = 128_256
    more = vocab_size - Letters.vocab_size

    def encode(self, text: str, /) -> list[int]:
        """Return one id for each letter."""
        ids: list[int] = (np.frombuffer(text.encode(), dtype=np.uint8) + np.int64(self.more)).tolist()
        return ids

    def special_token_ids(self) -> dict[str, int]:
        """Return four ids that no letter has."""
        return {name: self.more + id for name, id in super().special_token_ids().items()}


def build(root: Path, shards: int, tokens: int, tokenizer: Letters | None = None) -> Path:
    """Build the cache with so many shards, unless it is there; return its train split."""
    tokenizer = tokenizer or Letters()
    token_bytes = token_dtype(tokenizer.vocab_size).itemsize
    split = root / f"{shards}_of_{token_bytes}_bytes" / "train"
    if split.exists():
        return split
    generator = torch.Generator().manual_seed(0)
    texts = (bytes(torch.randint(97, 123, (TEXT,), generator=generator).tolist()) for _ in range(tokens // TEXT))
    build_pretrain_cache(
        (text.decode() for text in texts),
        split.parent,
        tokenizer=tokenizer,
        max_train_tokens=tokens,
        max_val_tokens=0,
        shard_bytes=token_bytes * (tokens // shards),
        seed=0,
        shuffle_buffer=None,
    )
    return split
