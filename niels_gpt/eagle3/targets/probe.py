"""What a model does to its last hidden state, found by running a few tokens: which norm, which logits."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from niels_gpt.eagle3.target import _blocks
from niels_gpt.storage.errors import TargetError

RMS = ("rms", "wide_rms", "gemma_rms")
"""Kinds of RMS norm: w * rms(x), rounded before the product; the same, rounded after it, as OLMo 2 and GPT-OSS have it,
which differs in bf16 alone; (1 + w) * rms(x), as Gemma has it."""
_TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of the largest value; float32: 1e-4
_PROBED = 8  # tokens
_EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "norm_eps")


@dataclass(frozen=True)
class Probe:
    """What a model does to a few tokens."""

    pre_norm: Tensor
    """The last block's output [T, H]; a tensor of no element where it has another form."""
    post_norm: Tensor
    """The input of lm_head [T, H]."""
    logits: Tensor
    """[T, V]"""
    norms: list[nn.Module]
    """The modules without children, outside of the blocks, that took the last block's output."""

    @classmethod
    def of(cls, model: nn.Module, *, gain: float = 1.0) -> Probe:
        """Run a few tokens through a model. gain: what the lm_head takes is multiplied by it.

        Raises: ValueError (E705) for a model without an lm_head.
        """
        lm_head = _lm_head(model)
        seen: dict[str, Tensor] = {}
        norms: list[nn.Module] = []
        blocks = _blocks(model)
        inside = {id(module) for block in blocks for module in block.modules()}

        def of_block(_module: nn.Module, _inputs: Any, output: Any) -> None:
            seen["pre"] = output[0] if isinstance(output, tuple) else output

        def of_leaf(module: nn.Module, inputs: Any) -> None:
            if module is lm_head and inputs:
                seen["post"] = inputs[0]
            elif "pre" in seen and inputs and isinstance(inputs[0], Tensor) and inputs[0].shape == seen["pre"].shape:
                norms.extend([module] * torch.equal(inputs[0], seen["pre"]))

        handles = [blocks[-1].register_forward_hook(of_block)]
        if gain != 1.0:  # before the hook that keeps the lm_head's input
            handles.append(lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * gain, *inputs[1:])))
        leaves = (module for module in model.modules() if not any(True for _ in module.children()))
        handles += [leaf.register_forward_pre_hook(of_leaf) for leaf in leaves if id(leaf) not in inside]
        was_training = model.training
        try:
            with torch.inference_mode(False), torch.no_grad():
                logits = _run(model.eval(), lm_head)
        finally:
            model.train(was_training)
            for handle in handles:
                handle.remove()
        if "post" not in seen or seen["post"].dim() != 3:
            found = f"{type(model).__name__}: its lm_head is not called with [B, S, H], so its input cannot be captured"
            raise TargetError(found)
        pre, post = seen.get("pre", logits), seen["post"]
        return cls(pre[0] if pre.shape == post.shape else pre.new_empty(0), post[0], logits[0], norms)


def _lm_head(model: nn.Module) -> Any:
    lm_head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(getattr(lm_head, "weight", None), Tensor):
        found = f"{type(model).__name__}: has no output embeddings, expected a causal language model with an lm_head"
        raise TargetError(found)
    return lm_head


def other_logits(model: nn.Module, error: float) -> ValueError:
    """Return the error for a model whose logits are not those of its head. error: see `difference`."""
    return TargetError(
        f"{type(model).__name__}: its final norm, lm_head, logit scale and softcap give logits that differ from "
        f"the model's by {error:.1e} of the largest one; it does something else to them. A native cache needs a "
        "target whose logits follow from its last hidden state. Produce --format 1 or 2"
    )


def _run(model: nn.Module, lm_head: Any) -> Tensor:
    vocab_size = lm_head.weight.shape[0]
    ids = (torch.arange(_PROBED, device=lm_head.weight.device) + _PROBED).remainder(vocab_size)[None]
    knows_cache = "use_cache" in inspect.signature(model.forward).parameters
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **({"use_cache": False} if knows_cache else {}))
    logits: Tensor = output[0] if isinstance(output, tuple) else output.logits
    return logits


def final_norm(probe: Probe) -> tuple[str, float | None, dict[str, Tensor | None]] | None:
    """Return the kind, eps and weights of the final norm; None where no known one gives the lm_head's input."""
    if not probe.pre_norm.numel():
        return None
    allowed = tolerance(probe.post_norm)
    if torch.equal(probe.pre_norm, probe.post_norm):
        return "none", None, {}
    # Values with a mean distinguish a norm that subtracts it from one that does not; those of a model may have none.
    drawn = torch.randn(probe.pre_norm.shape, generator=torch.Generator().manual_seed(0)) + 0.5
    given, halves = torch.cat((drawn.to(probe.pre_norm), probe.pre_norm)), (slice(_PROBED), slice(_PROBED, None))
    for module in probe.norms:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        stated = [value for name in _EPS_NAMES if isinstance(value := getattr(module, name, None), float)]
        with torch.no_grad():
            made = module(given)
            errors = {
                (kind, eps): max(
                    difference(normed(kind, given, weight, bias, eps)[half], made[half]) for half in halves
                )
                for kind in _kinds(weight, bias)
                for eps in stated[:1] or (1e-5, 1e-6)
            }
        kind, eps = min(errors, key=lambda each: errors[each])
        if errors[kind, eps] <= allowed and difference(made[_PROBED:], probe.post_norm) <= allowed:
            return kind, eps, {"norm": weight, "norm_bias": bias}
    return None


def _kinds(weight: Tensor | None, bias: Tensor | None) -> tuple[str, ...]:
    return ("layer",) if bias is not None else ("layer", "rms") if weight is None else ("layer", *RMS)


def normed(kind: str, states: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None) -> Tensor:
    """Return the normed states; mean and variance are computed in float32."""
    if kind == "none":
        return states
    if kind == "layer":
        return functional.layer_norm(states, states.shape[-1:], weight, bias, eps or 0.0)
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (eps or 0.0))
    if kind == "gemma_rms":
        assert weight is not None
        return (wide * (1.0 + weight.float())).to(states.dtype)
    if kind == "wide_rms":
        assert weight is not None
        return (wide * weight.float()).to(states.dtype)
    scaled = wide.to(states.dtype)
    return scaled if weight is None else (weight * scaled).to(states.dtype)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value; infinite where shapes differ."""
    if found.shape != expected.shape:
        return torch.inf
    wanted = expected.float()
    difference = float((found.float() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    return difference if difference == difference else torch.inf  # NaN


def tolerance(values: Tensor) -> float:
    """Return the difference between two computations of values of this dtype, as a share of the largest."""
    return _TOLERANCES.get(values.dtype, 1e-4)
