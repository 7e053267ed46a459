"""Which models of transformers give the tokens of a folded row the values that they have in their samples.

A model does if a token reaches another one through attention alone, the mask of that attention is the caller's, and
positions are the caller's too. What mixes tokens in another way (a recurrent state, a convolution along the row, an
n-gram of ids) runs across the borders of branches, and what counts positions by itself takes the wrong ones: such
models are refused. The rules read the config and the signature of `forward`; transformers is not imported. They were
checked with tiny models of every causal language model of transformers 5.23 that can be made in a general way: none is
taken that gives wrong values. For any other model, `verify_fold` is the proof.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
_STATEFUL_NAMES = ("mamba", "rwkv", "xlstm", "retnet", "hyena", "recurrent", "linear_attention")
_WINDOW_BY_ROUTE = ("moshi", "kyutai_speech_to_text")
_WRAPPERS = ("_orig_mod", "module")  # torch.compile; DataParallel, DistributedDataParallel and their like


class AttentionRouteError(ValueError):
    """This model, or this way to run it, would give a folded row other values than its samples have, silently."""


@dataclass(frozen=True)
class Architecture:
    """What the mask of a model depends on."""

    implementation: str  # config._attn_implementation
    dtype: torch.dtype  # of the parameters, and of an additive mask
    device: torch.device  # of the inputs
    windows: dict[str, int | None]  # by layer type: how many positions a token sees, itself included; None for all
    takes_dict: bool  # a mask per layer type may be given


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, DistributedDataParallel and PEFT, whose forward tells what it takes."""
    for name in _WRAPPERS:
        if isinstance(inner := getattr(model, name, None), nn.Module):
            return unwrapped(inner)
    if callable(base := getattr(model, "get_base_model", None)):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise AttentionRouteError(
                f"{type(model).__name__} puts learned tokens before the row, which moves every position and the mask. "
                "Use an adapter that leaves the row as it is, such as LoRA, or run the samples unfolded"
            )
        return unwrapped(base())
    return model


def architecture(model: nn.Module, longest: int, shortest: int, rows: int) -> Architecture:
    """Return what the mask of a model depends on.

    Args:
        model: a causal language model of transformers, or its body; may be wrapped.
        longest, shortest: tokens of the longest and the shortest sample.
        rows: tokens of the folded row.

    Raises: AttentionRouteError for a model that cannot be folded, with the reason.
    Warns: where dropout is active: folded and unfolded then agree in expectation only.
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
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    return Architecture(
        implementation=text._attn_implementation,
        dtype=next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()),
        device=next(model.parameters()).device,
        windows={kind: window if kind == "sliding_attention" else None for kind in kinds} if kinds else {"": window},
        takes_dict=bool(kinds),
    )


def _reasons(model: nn.Module, config: Any, longest: int, shortest: int, rows: int) -> Iterator[str]:
    """Yield why a model cannot be folded; nothing where it can."""
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        yield "it has cross-attention, whose encoder states belong to one sample"
    text = config.get_text_config()
    yield from _attention_reasons(model, text, longest)
    yield from _position_reasons(model, text, longest, shortest, rows)
    yield from _mixing_reasons(model, text)
    if getattr(text, "output_router_logits", False):
        yield (
            "output_router_logits adds a loss that counts how many tokens go to an expert, and a shared prompt counts "
            "once; set config.output_router_logits = False to fold it without that loss"
        )


def _attention_reasons(model: nn.Module, text: Any, longest: int) -> Iterator[str]:
    if getattr(text, "is_causal", True) is False:
        yield "config.is_causal is False, so its attention looks ahead"
    if getattr(text, "is_decoder", True) is False and not any(
        getattr(m, "is_causal", 0) is True for m in model.modules()
    ):
        yield "config.is_decoder is False, so its attention looks ahead"  # GPT-NeoX has False too, and causal modules
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        yield "config.use_bidirectional_attention is set, so its attention looks ahead"
    kinds = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    if kinds - _ATTENTION_LAYERS:
        yield (
            f"it has layers of type {', '.join(sorted(kinds - _ATTENTION_LAYERS))}, which do not follow a mask between "
            "tokens alone (recurrent states, chunks and indexers go by the flat row); expected full_attention and "
            "sliding_attention only"
        )
    if getattr(text, "attention_chunk_size", None):
        yield "config.attention_chunk_size is set, and chunks are cut by the flat row"
    if text.model_type in _WINDOW_BY_ROUTE and longest > (getattr(text, "sliding_window", None) or longest):
        yield f"config.sliding_window is {text.sliding_window}, which its code applies on flash attention only"


def _position_reasons(model: nn.Module, text: Any, longest: int, shortest: int, rows: int) -> Iterator[str]:
    taken = inspect.signature(model.forward).parameters
    for name in ("position_ids", "attention_mask"):
        if name not in taken:
            yield f"its forward takes no {name}"
    if getattr(text, "alibi", False):
        yield "config.alibi is set, and its bias is counted along the flat row"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and "position" in name:
            yield f"{name} counts positions from padding_idx + 1, and position_ids from 0 would be other ones"
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
        limit = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if longest > limit and shortest < (limit + 1 if kind == "longrope" else longest):
            yield (
                f"its {kind} rotary angles depend on the longest sample of the row: {longest} tokens, more than the "
                f"{limit} of the original model, while the shortest has {shortest} and would have other angles alone"
            )


def _mixing_reasons(model: nn.Module, text: Any) -> Iterator[str]:
    kind = str(getattr(text, "model_type", ""))
    if any(name in kind for name in _STATEFUL_NAMES):
        yield f"a {kind} carries a state along the row, across the borders of branches"
    if kind.startswith("blt") or getattr(text, "ngram_size", None):
        yield "it reads groups of neighbouring ids of the row, across the borders of branches"
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and "audio" not in name and "vision" not in name:
            yield f"{name} is a convolution along the row, across the borders of branches"


def _warn_of_dropout(model: nn.Module) -> None:
    def drops(module: nn.Module) -> bool:
        rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        return module.training and isinstance(rate, float) and rate > 0

    if any(map(drops, model.modules())):
        warnings.warn(
            "dropout is active: a token that several samples share gets one draw, and each of them would get its own "
            "unfolded. The values agree in expectation only; call model.eval() or set dropout to 0 to compare them",
            stacklevel=4,
        )
