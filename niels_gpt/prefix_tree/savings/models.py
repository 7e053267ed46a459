"""The shape of a model from its config.json: parameters per token, layers and the width of its attention.

The model is built on the meta device, so without weights: nothing is read but the config, no code of the model's
repository runs, and a config with sizes that no model has is refused before anything is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from niels_gpt.prefix_tree.forest import ModelShape
from niels_gpt.storage.meta_json import printable

_LARGEST = 1 << 28  # of any number that sizes a model
_MOST_LAYERS, _MOST_EXPERTS = 1_000, 10_000  # they decide how many modules are built
_BUILT = 100_000  # modules of experts, layers times experts
_REMEDY = "Give --parameters, --layers and --d-model instead"


def shape_of(folder: Path) -> ModelShape:
    """Return the shape of the model whose config.json is in a folder.

    Raises: ValueError if transformers cannot build such a causal language model, or its sizes are absurd;
        FileNotFoundError without a config.json; ImportError without transformers.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError("--model needs transformers: pip install 'niels-gpt[eagle3]'") from error
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, expected the config of a transformers model")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
        _check(config)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except Exception as error:  # any error of the config's class
        reason = printable(" ".join(str(error).split())[:200])
        raise ValueError(f"{path}: no causal language model can be built from it ({reason}). {_REMEDY}") from error
    return shape_of_model(model)


def shape_of_model(model: Any) -> ModelShape:
    """Return the shape of a causal language model of transformers, with weights or without.

    Parameters are those that a token is multiplied with: all matrices, the head too, but not the embeddings of ids; of
    experts those that are active. The width is that of all query heads together.
    """
    config = model.config.get_text_config()
    experts, active = _experts(config)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    total = embedding.numel() if head is not None and head.weight is embedding else 0
    for name, weight in model.named_parameters():
        if weight is not embedding and weight.ndim > 1:
            of_experts = experts and ".experts." in name
            total += weight.numel() * active // experts if of_experts else weight.numel()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return ModelShape(parameters=total, layers=config.num_hidden_layers, d_model=width)


def _experts(config: Any) -> tuple[int, int]:
    """Return how many experts a layer has, and how many a token gets; 0 and 0 without."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(value) for name in names if (value := getattr(config, name, None))), 0)
    active = getattr(config, "num_experts_per_tok", None) or experts
    return experts, min(int(active), experts)


def _check(config: Any) -> None:
    """Raise ValueError for numbers that no model has."""
    for name, value in config.to_dict().items():
        if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
            raise ValueError(f"{name} is {value:.3g}; expected {_LARGEST:,} at most")
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    experts = _experts(config)[0]
    if not 0 < layers <= _MOST_LAYERS or not 0 < heads <= _LARGEST or not 0 <= experts <= _MOST_EXPERTS:
        raise ValueError(f"it has {layers} layers, {heads} heads and {experts} experts")
    if layers * experts > _BUILT:
        raise ValueError(f"it has {layers} layers of {experts} experts; expected {_BUILT:,} experts at most")
