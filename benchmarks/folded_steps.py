"""One step of a small Llama on a group of rollouts, folded and unfolded, for prefix_tree.py and tools/gpu_checks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from niels_gpt.prefix_tree.attention import Backend, model_inputs
from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs, sample_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest

VOCAB = 512


def folded_logprobs(model: Any, head: Any, forest: PrefixForest, edges: LossEdges, backend: Backend = "auto") -> Tensor:
    """Return the log-prob of every completion token, sample by sample [M]; shared tokens are computed once.

    head: `logits_head(model)`, made once for all steps.
    """
    hidden = model.model(**model_inputs(forest, model, backend=backend)).last_hidden_state
    return sample_logprobs(edge_logprobs(hidden, edges, head), edges)


def unfolded_logprobs(model: Any, group: tuple[list[int], list[list[int]]]) -> Tensor:
    """Return the same from a causal batch, padded on the right, that repeats the prompt for each completion."""
    prompt, completions = group
    samples = [torch.tensor(prompt + completion) for completion in completions]
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    rows = [states[len(prompt) - 1 : len(sample) - 1] for states, sample in zip(hidden, samples, strict=True)]
    targets = torch.cat([sample[len(prompt) :] for sample in samples])
    return -torch.nn.functional.cross_entropy(model.lm_head(torch.cat(rows)), targets, reduction="none")


def tiny_llama(seed: int) -> Any:
    """Return a Llama of 4 layers and width 128 with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2**16,
    )
    return LlamaForCausalLM(config)


def gradients(model: Any, loss: Tensor) -> Tensor:
    """Return all gradients of a loss as one vector."""
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])
