"""The shape of a model from its config.json: parameters per token, layers and the width of its attention.

The model is built on the meta device, so without weights: nothing is read but the config, no code of the model's
repository runs, and a config with sizes that no model has is refused before transformers reads it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from niels_gpt.prefix_tree.forest import ModelShape
from niels_gpt.storage.errors import TreeError
from niels_gpt.storage.meta_json import printable

_LARGEST = 1 << 28  # of any number that sizes a model
_MOST_BYTES = 4 << 20
_MOST_COUNTED = 10_000  # of anything that is counted, as for each a label, a layer or a head is made
_COUNTS = re.compile(
    r"(^|_)(num|n|layers?|depths?|blocks?|labels?|experts?|stages?|heads?)(_|$)"
    r"(?!.*(size|dim|embd|inner|positions|embeddings|ctx|tokens?|seq|id|theta)(_|$))"
)
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
        _check_file(path)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        _check(text)
        if text is not config and type(text) not in AutoModelForCausalLM._model_mapping:
            raise TreeError(f"the language model of a {config.model_type} cannot be built without its other parts")
        with torch.device("meta"):
            build: Any = AutoModelForCausalLM.from_config
            model = build(text, trust_remote_code=False, attn_implementation="eager")
    except Exception as error:  # any error of the config's class
        reason = printable(" ".join(str(error).split())[:200])
        raise TreeError(f"{path}: no causal language model can be built from it ({reason}). {_REMEDY}") from error
    return shape_of_model(model)


def shape_of_model(model: Any) -> ModelShape:
    """Return the shape of a causal language model of transformers, with weights or without.

    Parameters are those that a token is multiplied with: all matrices but embeddings and the head, which is apart; of
    experts those that are active. The width is that of all query heads together; where values have another width than
    keys, the mean of both. A sliding window is not part of a shape: each layer counts as one of full attention.
    """
    config = model.config.get_text_config()
    experts, active = _experts(config)
    head = model.get_output_embeddings()
    apart = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    apart |= set() if head is None else {id(head.weight)}
    total = 0
    for name, weight in model.named_parameters():
        if id(weight) not in apart and weight.ndim > 1:
            of_experts = experts and ".experts." in name
            total += weight.numel() * active // experts if of_experts else weight.numel()
    of_head = 0 if head is None else head.weight.numel()
    return ModelShape(total, config.num_hidden_layers, _width(config), head_parameters=of_head)


def _width(config: Any) -> int:
    """Return the width of attention: a pair costs as many products for its score and again for its value."""
    heads, values = config.num_attention_heads, getattr(config, "v_head_dim", None)
    keys: list[Any] = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if values and all(keys):
        return int(heads * (sum(keys) + values) // 2)
    return int(heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))


def _experts(config: Any) -> tuple[int, int]:
    """Return how many experts a layer has, and how many a token gets; 0 and 0 without."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(value) for name in names if (value := getattr(config, name, None))), 0)
    active = getattr(config, "num_experts_per_tok", None) or experts
    return experts, min(int(active), experts)


def _check_file(path: Path) -> None:
    """Raise ValueError for a config whose size, or a number in it, no model has: its class may make a list of each."""
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise TreeError(f"it has {size:,} bytes; expected {_MOST_BYTES:,} at most")
    waiting = [("the config", json.loads(path.read_bytes()))]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(name, each) for each in value]
        elif isinstance(value, int):
            most = _MOST_COUNTED if _COUNTS.search(name) else _LARGEST
            if not -most <= value <= most and "theta" not in name:
                raise TreeError(f"{name} is {value:.3g}; expected {most:,} at most")


def _check(config: Any) -> None:
    """Raise ValueError for numbers that no model has."""
    for name, value in config.to_dict().items():
        if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
            raise TreeError(f"{name} is {value:.3g}; expected {_LARGEST:,} at most")
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    experts = _experts(config)[0]
    if not 0 < layers <= _MOST_LAYERS or not 0 < heads <= _LARGEST or not 0 <= experts <= _MOST_EXPERTS:
        raise TreeError(f"it has {layers} layers, {heads} heads and {experts} experts")
    if layers * experts > _BUILT:
        raise TreeError(f"it has {layers} layers of {experts} experts; expected {_BUILT:,} experts at most")
