"""Which models of transformers can be folded, so that a token has the same values in a folded row as in its samples.

A model can be folded if tokens act on each other through attention alone, and its forward takes the mask and the
positions. A model that mixes tokens in another way (a recurrent state, a convolution along the row, n-grams of ids)
mixes branches, and one that numbers positions itself numbers them wrongly: both are refused. The rules read the config
and the signature of `forward`; transformers is not imported. The tests hold them against every causal language model of
transformers 5.23 that a generic config can build, with default options: they accept no model with wrong values. For
other models or options use `verify_fold`.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.errors import CodedError

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
_STATEFUL_NAMES = ("mamba", "rwkv", "xlstm", "retnet", "hyena", "recurrent", "linear_attention")
_WINDOW_BY_ROUTE = ("moshi", "kyutai_speech_to_text")
_OF_OTHER_HEADS = ("classifier", "summary")  # their dropout belongs to heads that a language model does not have
_CAUSAL_WITHOUT_FLAG = ("codegen", "doge", "xglm")  # the other models set is_causal in each attention module
_WRAPPERS = ("_orig_mod", "module", "pretrained_model")  # torch.compile; DataParallel and its like; TRL's value heads


class AttentionRouteError(CodedError, ValueError, code="E802"):
    """A model, or a way to run it, that would silently give a folded row other values than its samples have."""


@dataclass(frozen=True)
class Architecture:
    """The properties of a model that decide its mask."""

    implementation: str  # config._attn_implementation
    dtype: torch.dtype  # of the parameters, and of an additive mask
    device: torch.device  # of the inputs
    windows: dict[str, int | None]  # by layer type: how many positions a token sees, itself included; None for all
    takes_dict: bool  # whether it accepts a mask per layer type
    width: int  # of the hidden states


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model of transformers inside torch.compile, DistributedDataParallel, FSDP, PEFT or TRL."""
    return wrappers(model)[-1]


def wrappers(model: nn.Module) -> list[nn.Module]:
    """Return a model and the models inside it, outermost first; the last is `unwrapped(model)`."""
    for name in _WRAPPERS:
        if isinstance(inner := getattr(model, name, None), nn.Module):
            return [model, *wrappers(inner)]
    if callable(base := getattr(model, "get_base_model", None)):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise AttentionRouteError(
                f"{type(model).__name__} puts learned tokens before the row, which moves every position and the mask. "
                "Use an adapter that does not change the row, such as LoRA, or run the samples unfolded"
            )
        return [model, *wrappers(base())]
    return [model]


def is_sharded(module: nn.Module) -> bool:
    """Return whether fully_shard (FSDP2) was applied: it changes the class of a module and adds no wrapper."""
    return any(of_class.__name__ == "FSDPModule" for of_class in type(module).__mro__)


def architecture(model: nn.Module, longest: int, shortest: int, rows: int) -> Architecture:
    """Return the properties of a model that decide its mask.

    Args:
        model: a causal language model of transformers, or its body; may be wrapped.
        longest, shortest: tokens of the longest and the shortest sample.
        rows: tokens of the folded row.

    Raises: AttentionRouteError (E802) for a model that cannot be folded, with the reason.
    Warns: W801 if dropout is active: folded and unfolded values then agree in expectation only.
    """
    model = unwrapped(model)
    config: Any = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) is None:
        raise AttentionRouteError(
            f"{type(model).__name__} has no config._attn_implementation; expected a model of transformers. For another "
            "model, give its attention dense_mask(forest) and forest.position_ids, and check it by verify_fold"
        )
    reason = next(_reasons(model, config, longest, shortest, rows), None)
    if reason is not None:
        raise AttentionRouteError(f"{type(model).__name__} cannot be folded: {reason}. Run its samples unfolded")
    _warn_of_dropout(model)
    text = config.get_text_config()
    window = _declared(text, "sliding_window")
    kinds = _declared(text, "layer_types")
    return Architecture(
        implementation=text._attn_implementation,
        dtype=next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()),
        device=next(model.parameters()).device,
        windows={kind: window if kind == "sliding_attention" else None for kind in kinds} if kinds else {"": window},
        takes_dict=bool(kinds),
        width=getattr(text, "hidden_size", 1024),  # a usual one, where a config has no such name
    )


def _declared(config: Any, name: str) -> Any:
    """Return a value of a config; None if its class does not declare the name, as then no code reads it."""
    value, of_class = getattr(config, name, None), type(config)
    declared = {*dir(of_class), *getattr(of_class, "attribute_map", ()), *inspect.signature(of_class).parameters}
    if value is None or name in declared:
        return value
    try:
        computed = getattr(of_class(), name, None)  # some classes compute it from other values
    except Exception:  # the class needs arguments: trust the value
        return value
    return None if computed is None else value


def _reasons(model: nn.Module, config: Any, longest: int, shortest: int, rows: int) -> Iterator[str]:
    """Yield the reasons why a model cannot be folded."""
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        yield "it has cross-attention, whose encoder states belong to one sample"
    text = config.get_text_config()
    yield from _attention_reasons(model, text, longest, rows)
    yield from _position_reasons(model, text, longest, shortest, rows)
    yield from _mixing_reasons(model, text, rows)
    if getattr(text, "output_router_logits", False):
        yield (
            "output_router_logits adds a loss that counts how many tokens go to an expert, and a shared prompt counts "
            "once; set config.output_router_logits = False to fold it without that loss"
        )
    if not _says_causal(model) and text.model_type not in _CAUSAL_WITHOUT_FLAG:
        yield "none of its modules has is_causal = True, so its attention may look ahead"


def _says_causal(model: nn.Module) -> bool:
    return any(getattr(module, "is_causal", None) is True for module in model.modules())


def _attention_reasons(model: nn.Module, text: Any, longest: int, rows: int) -> Iterator[str]:
    if getattr(text, "is_causal", True) is False:
        yield "config.is_causal is False, so its attention looks ahead"
    if getattr(text, "is_decoder", True) is False and not _says_causal(model):  # GPT-NeoX has False, and causal modules
        yield "config.is_decoder is False, so its attention looks ahead"
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        yield "config.use_bidirectional_attention is set, so its attention looks ahead"
    kinds = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    chunk = getattr(text, "attention_chunk_size", None)
    if isinstance(chunk, int) and rows <= chunk:
        kinds.discard("chunked_attention")  # the whole row is in the first chunk
    if kinds - _ATTENTION_LAYERS:
        yield (
            f"it has layers of type {', '.join(sorted(kinds - _ATTENTION_LAYERS))}, which no mask controls "
            "(recurrent states, chunks and indexers follow the flat row); expected full_attention and "
            "sliding_attention only"
        )
    if chunk and rows > chunk:
        yield f"config.attention_chunk_size is {chunk}, and chunks are cut along the flat row, which has {rows} tokens"
    if text.model_type in _WINDOW_BY_ROUTE and longest > (getattr(text, "sliding_window", None) or longest):
        yield f"config.sliding_window is {text.sliding_window}, which its code applies on flash attention only"


def _position_reasons(model: nn.Module, text: Any, longest: int, shortest: int, rows: int) -> Iterator[str]:
    taken = inspect.signature(model.forward).parameters
    for name in ("position_ids", "attention_mask"):
        if name not in taken:
            yield f"its forward takes no {name}"
    scale = getattr(text, "floor_scale", None)
    if getattr(text, "attn_temperature_tuning", False) and scale and rows >= scale:
        yield f"config.floor_scale is {scale}, and its factor follows the flat row, which has {rows} tokens"
    if getattr(text, "alibi", False):
        yield "config.alibi is set, and its bias is counted along the flat row"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and "position" in name:
            yield f"{name} counts positions from padding_idx + 1, but position_ids count from 0"
    window = getattr(text, "window_size", None)
    if "local" in getattr(text, "attention_layers", ()) and isinstance(window, int) and rows > window:
        yield f"its local layers see {window} tokens of the flat row, which has {rows}"
    yield from _rotary_reasons(text, longest, shortest)


def _rotary_reasons(text: Any, longest: int, shortest: int) -> Iterator[str]:
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]:
        kind = rope.get("rope_type", "default")
        if kind != "longrope" and "dynamic" not in kind:
            continue
        original = rope.get("original_max_position_embeddings") if kind == "longrope" else None
        limit = original or text.max_position_embeddings  # "dynamic" uses only the config's limit
        if longest > limit and shortest < (limit + 1 if kind == "longrope" else longest):
            yield (
                f"its {kind} rotary angles depend on the longest sample of the row: {longest} tokens, more than the "
                f"{limit} of the original model, while the shortest, of {shortest}, has other angles when run alone"
            )


def _mixing_reasons(model: nn.Module, text: Any, rows: int) -> Iterator[str]:
    kind = str(getattr(text, "model_type", ""))
    if kind == "doge" and rows > text.keep_window_size:
        yield f"it keeps the best {text.keep_window_size} keys of the flat row, which has {rows} tokens"
    if kind == "doge" and text.is_moe:
        yield "config.is_moe is set, and its experts depend on the other tokens of the row"
    if any(name in kind for name in _STATEFUL_NAMES):
        yield f"a {kind} carries a state along the row, across the borders of branches"
    if kind.startswith("blt") or getattr(text, "ngram_size", None):
        yield "it reads groups of neighbouring ids of the row, across the borders of branches"
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and "audio" not in name and "vision" not in name:
            yield f"{name} is a convolution along the row, across the borders of branches"


def _warn_of_dropout(model: nn.Module) -> None:
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    rates = {name: rate for name, rate in vars(text).items() if re.search("drop|jitter", name)}
    drawn = [name for name, rate in rates.items() if _is_rate(rate) and not name.startswith(_OF_OTHER_HEADS)]
    drawn += [name for name, part in model.named_modules() if isinstance(part, nn.Dropout) and part.training and part.p]
    if drawn and any(module.training for module in model.modules()):
        text = (
            f"dropout or other noise is active ({', '.join(drawn[:3])}): a token that several samples share gets one "
            "draw, but one for each sample when unfolded. The values agree in expectation only; call model.eval() or "
            "set the rates to 0 to compare them"
        )
        warnings.warn(CodedWarning("W801", text), stacklevel=4)


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
