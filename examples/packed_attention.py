"""Pieces of one row that do not see each other, in a stock model of transformers: docs/packing.md explains it.

    python examples/packed_attention.py cache/sample/sft/oasst1

Prints how far the logits of the pieces of a batch are from those that each of them has alone: with the mask and the
positions of the batch, and without the mask. On a GPU with flash_attn installed it does the same by FlashAttention.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from niels_gpt.sampling import Batch, PackedStream, block_causal_mask


def small_llama(vocab_size: int, attention: str, dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    """Return a Llama of two layers with random weights, the same in each call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(device=device, dtype=dtype).eval()


def masked(batch: Batch, dtype: torch.dtype) -> dict[str, Any]:
    """Return a model's arguments for a batch, of attention "sdpa" or "eager"."""
    mask = block_causal_mask(batch.cu_seqlens, (len(batch.x), batch.x.shape[1]), dtype=dtype)
    return {"position_ids": batch.position_ids, "attention_mask": mask, "use_cache": False}


def variable_lengths(batch: Batch) -> dict[str, Any]:
    """Return a model's arguments for a batch, of attention "flash_attention_2"; no mask is made."""
    lengths = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
    longest = {"max_length_q": batch.max_seqlen, "max_length_k": batch.max_seqlen}
    return {"position_ids": batch.position_ids, **lengths, **longest, "use_cache": False}


@torch.no_grad()
def alone(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Return the logits of each segment, run by itself: [B * T, vocabulary]."""
    assert batch.cu_seqlens is not None
    segments = batch.x.view(-1).split(batch.cu_seqlens.diff().tolist())
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in segments])


@torch.no_grad()
def apart(model: LlamaForCausalLM, batch: Batch, **arguments: Any) -> float:
    """Return the largest difference of a logit of the batch and of its segment alone."""
    together = model(input_ids=batch.x, **arguments).logits.flatten(0, 1)
    return float((together - alone(model, batch)).abs().max())


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print and return the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", help="a pretrain or sft cache")
    parser.add_argument("--T", type=int, default=256, help="tokens of a row")
    options = parser.parse_args(arguments)
    stream = PackedStream(options.cache, split="train", T=options.T, global_batch_size=4, seed=0)
    vocab_size, batch = stream.split.vocab_size, next(iter(stream))
    assert batch.cu_seqlens is not None and batch.documents is not None
    for begin, tokens, number in zip(batch.cu_seqlens, batch.cu_seqlens.diff(), batch.documents, strict=False):
        piece = "padding" if number < 0 else f"of document {number}"
        print(f"row {begin // options.T}, from {begin % options.T}: {tokens} tokens {piece}")
    found = {}
    for attention, dtype in (("sdpa", torch.float32), ("sdpa", torch.float64), ("eager", torch.float32)):
        model = small_llama(vocab_size, attention, dtype, "cpu")
        found[f"{attention}, {str(dtype)[6:]}"] = apart(model, batch, **masked(batch, dtype))
        found[f"{attention}, {str(dtype)[6:]}, without the mask"] = apart(model, batch)
    print(f"for FlashAttention: cu_seqlens={batch.cu_seqlens.tolist()}, max_seqlen={batch.max_seqlen}")
    if torch.cuda.is_available() and find_spec("flash_attn"):
        model = small_llama(vocab_size, "flash_attention_2", torch.bfloat16, "cuda")
        moved = batch.to("cuda")
        found["flash_attention_2, bfloat16"] = apart(model, moved, **variable_lengths(moved))
    for how, difference in found.items():
        print(f"{how}: {difference:.0e}")
    return found


if __name__ == "__main__":
    main()
