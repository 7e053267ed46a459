"""logits_head: a model's head as a function of hidden states, for losses that need the logits of some rows only.

For most models of transformers this is `model.lm_head`. But Gemma 2 caps its logits after it, and Cohere and Granite
scale them. The factor has another name in each config, and one name multiplies in some models and divides in others. So
the right function is found by comparing with the logits that the model itself returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from niels_gpt.prefix_tree.backends.architectures import AttentionRouteError, unwrapped

_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def logits_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function from hidden states [rows, H] of the model's body to the model's logits [rows, V].

    It is the product with the output embeddings, and the factor or cap of the config that reproduces the model's logits
    for two tokens, which are run once.

    Raises:
        AttentionRouteError: the model has no output embeddings, or computes its logits in another way.
    """
    inner: Any = unwrapped(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    body = getattr(inner, "base_model", inner)
    if head is None or body is inner:
        raise AttentionRouteError(
            f"{type(inner).__name__} has no output embeddings; expected a causal language model of transformers. Pass "
            "logits to the loss, or your own head"
        )
    for hidden, logits in _two_tokens(inner, body):
        for candidate in _candidates(head, inner.config.get_text_config()):
            computed = candidate(hidden)
            limit = 1e-5 if computed.dtype in (torch.float32, torch.float64) else 1e-2
            if bool((computed - logits).abs().max() <= limit * logits.abs().max()):
                return candidate
    raise AttentionRouteError(
        f"the logits of {type(inner).__name__} are not its output embeddings times its hidden states, nor that with a "
        f"factor ({', '.join(_FACTORS)}) or final_logit_softcapping of its config. Pass logits, or your own head"
    )


@torch.no_grad()
def _two_tokens(model: nn.Module, body: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return hidden states [2, H] and logits [2, V] of the ids 1 and 2; [] if the model does not call its body."""
    seen: list[Any] = []
    handle = body.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    try:
        out = model(input_ids=torch.tensor([[1, 2]], device=next(model.parameters()).device), use_cache=False)
    finally:
        handle.remove()
    return [(hidden[0], out.logits[0]) for hidden in seen[-1:]]


def _candidates(head: nn.Module, config: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    cap = getattr(config, "final_logit_softcapping", None)
    given = [getattr(config, name, None) for name in _FACTORS]
    factors = [value for value in given if isinstance(value, int | float) and value not in (0, 1)]
    if not cap and not factors:
        yield head
        return
    for factor in [1.0, *factors, *(1 / value for value in factors)]:

        def logits(hidden: Tensor, factor: float = factor) -> Tensor:
            scaled: Tensor = head(hidden) * factor
            return torch.tanh(scaled / cap) * cap if cap else scaled

        yield logits
