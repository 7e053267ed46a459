"""The target of the sample: a small Llama of random weights, written locally, so that a first run downloads nothing."""

from __future__ import annotations

import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor

from niels_gpt.storage import fileio
from niels_gpt.storage.fileio import canonical_json
from niels_gpt.tokenizers.files import MODEL_NAME, TOKENIZER_JSON

if TYPE_CHECKING:
    from niels_gpt.tokenizers.protocol import FullTokenizer

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def write_small_target(folder: str | os.PathLike[str], tokenizer: FullTokenizer, *, seed: int = 0) -> Path:
    """Write an untrained Llama of 8 layers, with a tokenizer that has the sentinels beside it; return the folder.

    Hidden size 64, vocabulary of the tokenizer. Equal arguments give equal bytes on any machine; torch's global
    generators are not used. The folder is complete or absent; an existing one is not written again.
    Raises: FileExistsError where the folder holds something else.
    """
    final = Path(folder).absolute()
    config = _small_config(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _drawn(shape, generator) for name, shape in _small_shapes(config).items()}
    files = {
        CONFIG: canonical_json(config),
        WEIGHTS: save(weights, metadata={"format": "pt"}),
        TOKENIZER_JSON if tokenizer.kind == "huggingface" else MODEL_NAME: Path(tokenizer.model_path).read_bytes(),
    }
    if not final.exists():
        temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")
        try:
            fileio.make_dir(temporary)
            for name, content in files.items():
                fileio.write_bytes(temporary / name, content)
            fileio.rename(temporary, final)
        except BaseException as error:
            fileio.remove(temporary)
            if not isinstance(error, OSError) or not final.exists():  # else another process was first
                raise
    if {path.name: path.read_bytes() for path in final.iterdir() if path.is_file()} != files:
        raise FileExistsError(f"{final}: holds something else than this small target. Remove it, or name another")
    return final


def _small_config(tokenizer: FullTokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.special_token_ids()["eot"],
    }


def _small_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    wide, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm": (wide,),
        "post_attention_layernorm": (wide,),
        "self_attn.q_proj": (wide, wide),
        "self_attn.k_proj": (keys, wide),
        "self_attn.v_proj": (keys, wide),
        "self_attn.o_proj": (wide, wide),
        "mlp.gate_proj": (inner, wide),
        "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner),
    }
    blocks = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in block.items()
    }
    ends = {"model.embed_tokens": (vocab, wide), "model.norm": (wide,), "lm_head": (vocab, wide)}
    return {**blocks, **{f"{name}.weight": shape for name, shape in ends.items()}}


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return ones for a norm; else numbers of mean 0 and variance 1 / inputs, computed without exp or log."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float32)
    return (torch.rand(shape, dtype=torch.float32, generator=generator) - 0.5) * math.sqrt(12 / shape[1])
