"""Tiny causal language models of transformers, of any architecture, built from a config with random weights."""

import random

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from niels_gpt.prefix_tree.forest import PrefixForest

WINDOW = 6  # of models with a sliding window
VOCAB = 97
_draw = random.Random(0)
_PROMPT, _TURN, *_REPLIES = ([_draw.randrange(3, VOCAB) for _ in range(length)] for length in (9, 5, 6, 4, 7, 1))
SAMPLES = [
    [*_PROMPT, *_TURN, *_REPLIES[0]],
    [*_PROMPT, *_TURN, *_REPLIES[1]],
    [*_PROMPT, *_REPLIES[2]],
    [*_PROMPT, *_REPLIES[3]],
]
"""Two levels; each longer than the window."""
FOREST = PrefixForest.from_sequences(SAMPLES).padded(8)
LONG = PrefixForest.from_sequences([[*range(VOCAB)] * 5, [*range(VOCAB - 1)] * 5])
"""So many rows, 869, that "auto" takes segments; for FOREST it takes a mask."""
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
"""Changes to a config: layers with and without a window."""
_SIZES = {
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], VOCAB),
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim", "dim_model"], 32),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dim_ff", "decoder_ffn_dim"], 48),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "max_window_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], 64),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "laurel_rank"], 4),
    **dict.fromkeys(["head_dim", "dim_head", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"], 8),
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "hidden_size_per_layer_input", "lru_width"], 8),
    **dict.fromkeys(["mamba_n_heads", "mamba_d_head", "mamba_d_state", "num_heads", "state_size", "ssm_state_size"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "mamba_num_heads", "mamba_head_dim"], 8),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads"], 2),
    **dict.fromkeys(["linear_num_value_heads", "index_n_heads", "eos_token_id", "mamba_expand"], 2),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "bos_token_id"], 1),
    **dict.fromkeys(["mamba_n_groups", "n_groups"], 1),
    **dict.fromkeys(["pad_token_id", "num_kv_shared_layers"], 0),
    **dict.fromkeys(["dropout", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0),
    **dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0),
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "initializer_range": 0.2,
}


def tiny_config(model_type, **changes):
    """Return a config of some hundred thousand parameters at most; `changes` come on top of the small sizes."""
    default = transformers.CONFIG_MAPPING[model_type]().get_text_config()
    sizes = {name: size for name, size in _SIZES.items() if _has(default, name)}
    if "kv_lora_rank" in sizes:  # latent attention: as many key heads as heads, of a size of their own
        sizes = {**sizes, "num_key_value_heads": 4, "head_dim": sizes["qk_rope_head_dim"]}
    return type(default)(**{**sizes, **changes})


def _has(config, name):
    of_class = getattr(type(config), name, None)
    if isinstance(of_class, property) and of_class.fset is None:
        return False
    try:
        return hasattr(config, name)
    except Exception:  # some raise an error of their own for what layers have apart
        return True


def tiny_model(model_type, attn="sdpa", **changes):
    """Return a model in eval mode, its weights from a fixed seed and large enough to tell right from wrong."""
    return from_config(tiny_config(model_type, **changes), attn)


def from_config(config, attn):
    """Return what `tiny_model` does, from a config."""
    of_type = (CLASSES[name] for name in CLASSES if transformers.CONFIG_MAPPING[name] is type(config))
    torch.manual_seed(0)
    model = getattr(transformers, next(of_type))._from_config(config, attn_implementation=attn).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return model


def logprobs(model, **inputs):
    """Return log-probabilities [T, V] of a row."""
    with torch.no_grad():
        return model(**inputs).logits[0].log_softmax(dim=-1)


def alone(model, forest):
    """Return log-probabilities of every token of every sample, each sample run by itself as anyone would."""
    return torch.cat([logprobs(model, input_ids=torch.tensor([sample])) for sample in forest.samples()])


def error(model, forest, inputs):
    """Return the largest difference between the log-probabilities of a folded row and of the samples alone."""
    return float((logprobs(model, **inputs)[forest.sample_rows] - alone(model, forest)).abs().max())


def without(name):
    """Return a function that leaves one of a model's inputs out."""
    return lambda inputs: {key: value for key, value in inputs.items() if key != name}
