"""Body and head of a model apart: body_forward returns hidden states, and the head for the few rows with a loss.

    hidden, head = body_forward(model, forest)     # model: wrapped or not
    logp = edge_logprobs(hidden, edges, head)      # the head runs on the rows that predict a target, in chunks

It calls the wrapper itself, once, so that hooks run and DistributedDataParallel and FSDP reduce the gradients. A call
of the body inside (`ddp.module.model(...)`) gives the same loss, but each rank keeps its own gradients.

For most models of transformers the head is `model.lm_head`. But Gemma 2 caps its logits afterwards, and Cohere and
Granite scale them. The factor has another name in each config, and one name multiplies in some models and divides in
others. So the head is found by comparison with logits that the model itself returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from niels_gpt.prefix_tree.architectures import AttentionRouteError, is_sharded, wrappers
from niels_gpt.prefix_tree.attention import Backend, model_inputs
from niels_gpt.prefix_tree.forest import PrefixForest

_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


class Body(NamedTuple):
    """The result of `body_forward`."""

    hidden: Tensor  # [T, H], the last hidden states of the row, with gradient
    head: Callable[[Tensor], Tensor]  # from hidden states [rows, H] to the model's logits [rows, V]


def body_forward(model: nn.Module, forest: PrefixForest, *, backend: Backend = "auto", **inputs: Any) -> Body:
    """Run a folded row through a model, wrapped or not, and return its last hidden states and its head.

    The forward pass computes the logits of one row only. The head has the model's own weights, and their gradients are
    reduced with the others. Every rank must call the head before `backward`, as `edge_logprobs` does.

    Args:
        model: a causal language model of transformers, also in DistributedDataParallel, torch.compile or a model of
            PEFT, or sharded by fully_shard.
        backend: as in `model_inputs`.
        inputs: further arguments of the forward pass; they replace arguments of `model_inputs`.

    Raises:
        AttentionRouteError (E802): `model_inputs` refuses the model; it has no output embeddings, or computes its
            logits in another way; or the wrapper does not return the hidden states, as a model compiled in place.
    """
    inner, body, head = _parts(model)
    arguments = {**model_inputs(forest, model, backend=backend), "return_dict": True, **inputs}
    with ExitStack() as hooks:
        hooks.callback(body.register_forward_hook(_hand_out).remove)
        if "logits_to_keep" in inspect.signature(inner.forward).parameters:
            # The last row, by its index: given the number 1, Gemma 4 runs some layers only on that row.
            last = len(forest.input_ids) - 1
            arguments["logits_to_keep"] = torch.tensor([last], device=arguments["position_ids"].device)
        else:
            hooks.callback(head.register_forward_pre_hook(_last_row).remove)
        out = model(**arguments)
    states, logits = getattr(out, "hidden_states", None), getattr(out, "logits", None)
    if not states or logits is None or states[-1].shape[:2] != (1, len(forest.input_ids)):
        raise AttentionRouteError(
            f"{type(model).__name__} returned no hidden states of its body ({type(out).__name__}): "
            f"{_why_none(model, out)}. Pass the logits of model(**model_inputs(forest, model)) to the loss"
        )
    hidden = states[-1][0]
    run = _gathered([*wrappers(model), head])
    return Body(hidden, _matching(inner, run, [(hidden[-1:].detach(), logits[0, -1:].detach())]))


def _why_none(model: nn.Module, out: Any) -> str:
    if isinstance(out, tuple):
        return "it returned a tuple; call body_forward without return_dict=False"
    if any(getattr(module, "_compiled_call_impl", None) for module in wrappers(model)):
        return "it was compiled before, in place, and its graph skips the hook of its body"
    return "its forward leaves them out, or does not call its body"


def _hand_out(module: nn.Module, args: Any, output: Any) -> None:
    """Put the last hidden states of the body into its output, so that the model hands them to its wrappers.

    They must be in the output of a wrapper: FSDP hooks these tensors to reduce gradients, and DistributedDataParallel
    finds the used parameters by them. The hook has no state, so that torch.compile can trace it.
    """
    if hasattr(output, "last_hidden_state") and hasattr(output, "hidden_states"):
        output["hidden_states"] = (*(output.hidden_states or ()), output.last_hidden_state)


def _last_row(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the head one row: what logits_to_keep does, for models without it."""
    return (args[0][:, -1:], *args[1:])


def _gathered(modules: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    """Return the head, the last of these modules, as a function that calls no collective operation.

    Ranks have different numbers of rows, and so of chunks. A head with fully_shard would gather its weights and reduce
    their gradients for each chunk, and ranks with fewer chunks would hang. So this gathers the weights once, until the
    backward pass, and runs the head without those hooks; the end of the backward pass reduces.
    """
    head: Any = modules[-1]
    sharded: list[Any] = [module for module in modules if is_sharded(module)]
    for module in sharded:
        module.unshard()  # nothing to do for a root, unless it was told to reshard after the forward pass
    if not sharded:
        return head  # type: ignore[no-any-return]
    call = head.forward if is_sharded(head) else head

    def run(hidden: Tensor) -> Tensor:
        logits: Tensor = call(hidden.to(head.weight.dtype))  # a MixedPrecisionPolicy may have cast the hidden states
        return logits

    return run


def logits_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function from hidden states [rows, H] of the model's body to the model's logits [rows, V].

    It is the product with the output embeddings, with the factor or cap of the config that reproduces the model's
    logits. To find it, the model runs two tokens once. In training use `body_forward`, which needs no such run.

    Raises:
        AttentionRouteError (E802): the model has no output embeddings, or computes its logits in another way; or
            fully_shard was applied to them: ranks with different numbers of chunks would hang.
    """
    inner, body, head = _parts(model)
    if is_sharded(head):
        raise AttentionRouteError(
            f"fully_shard was applied to the output embeddings of {type(inner).__name__}, and ranks that call them "
            "different numbers of times hang. Use the head that body_forward(model, forest) returns"
        )
    return _matching(inner, head, _two_tokens(inner, body))


def _parts(model: nn.Module) -> tuple[Any, nn.Module, nn.Module]:
    """Return the model inside its wrappers, its body, and its output embeddings."""
    inner: Any = wrappers(model)[-1]
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    body = getattr(inner, "base_model", inner)
    if head is None or body is inner:
        raise AttentionRouteError(
            f"{type(inner).__name__} has no output embeddings; expected a causal language model of transformers. Pass "
            "logits to the loss, or your own head"
        )
    return inner, body, head


@torch.no_grad()
def _matching(
    model: Any, head: Callable[[Tensor], Tensor], seen: list[tuple[Tensor, Tensor]]
) -> Callable[[Tensor], Tensor]:
    """Return the head that turns the hidden states [rows, H] that were seen into their logits [rows, V]."""
    for hidden, logits in seen:
        for candidate in _candidates(head, model.config.get_text_config()):
            computed = candidate(hidden)
            limit = 1e-5 if computed.dtype in (torch.float32, torch.float64) else 1e-2
            if bool((computed - logits).abs().max() <= limit * logits.abs().max()):
                return candidate
    raise AttentionRouteError(
        f"the logits of {type(model).__name__} are not its output embeddings times its hidden states, nor that with a "
        f"factor ({', '.join(_FACTORS)}) or final_logit_softcapping of its config; or its dropout is active. Pass "
        "logits, or your own head"
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


def _candidates(head: Callable[[Tensor], Tensor], config: Any) -> Iterator[Callable[[Tensor], Tensor]]:
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
