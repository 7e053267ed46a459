"""What a model of transformers gets of a batch: labels that it shifts itself, so that it learns the next token."""

import pytest
import torch
from support.tiny_texts import TINY_TEXTS

from niels_gpt.cache import build_pretrain_cache
from niels_gpt.sampling import EpochStream, PackedStream

pytest.importorskip("transformers", reason="the extra `eagle3` brings it")


@pytest.fixture(scope="module")
def split(tmp_path_factory, tiny_tokenizer):
    """The train split of a cache of 77 short texts."""
    folder = tmp_path_factory.mktemp("labels") / "cache"
    how = {"shard_bytes": 1 << 20, "seed": 0, "shuffle_buffer": None, "max_train_tokens": 100_000, "max_val_tokens": 0}
    build_pretrain_cache(TINY_TEXTS, folder, tokenizer=tiny_tokenizer, **how)
    return folder / "train"


def packed(split, **changed):
    return PackedStream(split.parent, **{"split": "train", "T": 24, "global_batch_size": 4, "seed": 0, **changed})


def llama(vocab_size):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, initializer_range=0.1, **sizes))


@pytest.mark.parametrize("kind", ["packed", "windows"])
def test_the_loss_of_a_model_is_that_of_y(split, tiny_tokenizer, kind):
    stream = packed(split) if kind == "packed" else EpochStream(split, T=24, global_batch_size=4, seed=0)
    model = llama(tiny_tokenizer.vocab_size).double()
    for batch in (next(stream_) for stream_ in [iter(stream)] for _ in range(3)):
        inputs = batch.for_transformers(dtype=torch.float64)
        assert inputs["input_ids"].shape == inputs["labels"].shape == (4, 25)
        assert inputs["labels"][:, 1:].equal(batch.y) and inputs["input_ids"][:, :-1].equal(batch.x)
        has_last = batch.y[:, -1] != -100
        assert inputs["input_ids"][has_last, -1].equal(batch.y[has_last, -1])
        assert ("attention_mask" in inputs) == ("position_ids" in inputs) == (kind == "packed")
        with torch.no_grad():
            found = model(**inputs)
        expected = torch.nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), batch.y.flatten())
        assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
        if kind == "packed":
            assert inputs["position_ids"][:, :-1].equal(batch.position_ids)
