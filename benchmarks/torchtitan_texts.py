"""English documents as a cache and as text, and the tokenizer.json of both: for torchtitan, which tokenizes itself."""

from __future__ import annotations

import json
import random
from pathlib import Path

import niels_gpt.data.sample
from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.tokenizer import load_tokenizer


class Texts:
    """Documents of joined sentences of the bundled sample, of 700 tokens on average."""

    def __init__(self, folder: Path, tokens: int) -> None:
        """Make them in a folder, with ids below 2,000."""
        self.folder, self.tokenizer = folder, folder / "tokenizer"
        sample = Path(niels_gpt.data.sample.__file__).parent / "HuggingFaceFW" / "fineweb-edu" / "train-00000.jsonl"
        sentences = [part for line in sample.read_text().splitlines() for part in json.loads(line)["text"].split(". ")]
        draw = random.Random(0)
        self.documents = [". ".join(draw.choices(sentences, k=draw.randint(5, 60))) for _ in range(tokens // 500)]
        self._train()
        self.cache = folder / "cache"
        build_pretrain(
            ((None, text) for text in self.documents),
            self.cache,
            tokenizer=load_tokenizer(self.tokenizer),
            max_train_tokens=tokens,
            max_val_tokens=0,
            shard_bytes=1 << 24,
            seed=0,
            shuffle_buffer=None,
        )

    def _train(self) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=2000,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(self.documents, trainer)
        self.tokenizer.mkdir()
        tokenizer.save(str(self.tokenizer / "tokenizer.json"))
        (self.tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
