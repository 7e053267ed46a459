"""A tiny Llama of transformers that is float64 throughout, for parity below what float32 inside a model allows.

A stock Llama in float64 computes its norms and its rotary angles in float32, which costs it 1e-8 in log-probs and 1e-7
in gradients. Its "eager" attention has a float32 softmax too; "sdpa" has not.
"""

import pytest
import torch

pytest.importorskip("transformers", reason="a Llama to test with needs the extra eagle3")

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class _Norm(LlamaRMSNorm):
    def forward(self, hidden_states):
        variance = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


class _Rotary(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        angles = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos(), both.sin()


def float64_llama(seed=0, **sizes):
    """Return a LlamaForCausalLM with random weights on "sdpa": 3 layers, 4 query and 2 key heads, 97 ids."""
    config = LlamaConfig(**{**SIZES, "attn_implementation": "sdpa", **sizes})
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval().double()
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.__class__ = _Norm
        elif isinstance(module, LlamaRotaryEmbedding):
            module.__class__ = _Rotary
    return model
