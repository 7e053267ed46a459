"""Runs the steps of an attention plan: by torch's flash kernel for CPUs, or block by block through autograd.

Each step computes the softmax over its own keys, and its log-sum-exp. Two results a, b of a query are merged exactly:
lse = log(exp(lse_a) + exp(lse_b)), out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from niels_gpt.prefix_tree.segments_plan import AttentionPlan, Step

_ARGUMENTS = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")
_OF_BACKWARD = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "attn_mask", "scale")


@cache
def has_kernel() -> bool:
    """Return whether this torch has the kernel, a private operator, with the arguments that this module passes."""
    for name, expected in (("", _ARGUMENTS), ("_backward", _OF_BACKWARD)):
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{name}", None)
        if operator is None or tuple(each.name for each in operator.default._schema.arguments) != expected:
            return False
    return True


def for_kernel(plan: AttentionPlan, dtype: torch.dtype) -> AttentionPlan:
    """Return the plan with masks for the kernel: of `dtype`, [1, 1, Q, K], 0 or -inf, added to the scores."""

    def added(step: Step) -> Step:
        if step.mask is None:
            return step
        return step._replace(
            mask=torch.zeros(step.mask.shape, dtype=dtype).masked_fill_(~step.mask, -torch.inf)[None, None]
        )

    return AttentionPlan([added(step) for step in plan.own], plan.above)


class FlashSegments(torch.autograd.Function):
    """Attention of query [T, H, D] over key and value [T, Hk, D], H a multiple of Hk, on a CPU; returns [T, H, D].

    The plan must come from `for_kernel`.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """Run the squares, then merge the rectangles into them."""
        keys, values = (_repeated(each, query.shape[1]) for each in (key, value))
        exact = torch.promote_types(query.dtype, torch.float32)  # bfloat16 is too coarse to add up in
        out = torch.empty(query.shape, dtype=exact)
        lse = torch.empty(query.shape[:2], dtype=exact)
        for step in plan.own:
            part, of_part = _forward(query, keys, values, step, scale)
            _at(out, step).copy_(part)
            _at(lse[..., None], step).copy_(of_part[..., None])
        for step in plan.above:
            part, of_part = _forward(query, keys, values, step, scale)
            into, total = _at(out, step), _at(lse[..., None], step)[..., 0]
            # exp(of_part - merged) is sigmoid(of_part - total): the weight of the part, without an overflow.
            into.lerp_(part.to(exact), torch.sigmoid(of_part - total)[..., None])
            total.copy_(torch.logaddexp(total, of_part))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Add up the gradients of the steps.

        The kernel's backward recomputes the probabilities as exp(score - lse). It gets the merged output and lse in
        place of its own, so a step's probabilities are shares of the whole softmax, and its gradients are exact.
        """
        query, key, value, out, lse = ctx.saved_tensors
        keys, values = (_repeated(each, query.shape[1]) for each in (key, value))
        grad = grad.contiguous()
        of_query = torch.zeros(query.shape, dtype=lse.dtype)
        of_keys, of_values = torch.zeros(query.shape, dtype=lse.dtype), torch.zeros(query.shape, dtype=lse.dtype)
        for step in (*ctx.plan.own, *ctx.plan.above):
            at_queries = (_at(each, step) for each in (grad, query))
            at_keys = (_parts(each[step.keys], step) for each in (keys, values))
            merged = (_at(out, step), _at(lse[..., None], step)[..., 0])
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *at_queries, *at_keys, *merged, 0.0, step.causal, attn_mask=step.mask, scale=ctx.scale
            )
            _at(of_query, step).add_(parts[0])
            for total, part in zip((of_keys, of_values), parts[1:], strict=True):
                _add(total, step, part)
        shape = (len(key), key.shape[1], -1, key.shape[2])
        reduced = (total.view(shape).sum(2).to(key.dtype) for total in (of_keys, of_values))
        return of_query.to(query.dtype), *reduced, None, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention of `FlashSegments` for any device, dtype and value size, block by block through autograd.

    The backward pass recomputes each block: the keys and weights of all blocks would be T x T values.

    plan: from `Segments.blocks`: each row in one block. dropout: rate, drawn for each block. softcap: scores become
    tanh(score / softcap) * softcap. sinks: [H], the score of a key without a value that every query sees.
    """
    above = {step.start: step for step in plan.above}

    def block(step: Step, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        steps = [each for each in (above.get(step.start), step) if each]
        at_keys = (torch.cat([each[one.keys] for one in steps]) for each in (key, value))
        keys, values = (_repeated(each, query.shape[1]).transpose(0, 1) for each in at_keys)
        queries = query[step.start : step.end].transpose(0, 1)
        assert step.mask is not None
        mask = step.mask.to(query.device)
        seen = functional.pad(mask, (keys.shape[1] - mask.shape[1], 0), value=True)
        if softcap is None and sinks is None:
            out = functional.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=seen, dropout_p=dropout, scale=scale
            )[0]
        else:
            weights = probabilities(queries @ keys.transpose(1, 2) * scale, seen, softcap, sinks).to(query.dtype)
            out = functional.dropout(weights, dropout) @ values
        return out.transpose(0, 1)

    rows = (query, key, value)
    drawn = bool(dropout)  # the same draw in both runs of a block
    return torch.cat(
        [checkpoint(block, step, *rows, use_reentrant=False, preserve_rng_state=drawn) for step in plan.own]
    )


def probabilities(scores: Tensor, seen: Tensor | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [..., H, Q, K] over keys, in float32 at least.

    seen: bool, True where a query sees a key; or a number added to each score. A query that sees no key, as in the
    padding of a batch, gets equal weights and no NaN.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min) if seen.dtype == torch.bool else scores + seen
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, extra], -1).softmax(-1)[..., :-1]


def _repeated(keys: Tensor, heads: int) -> Tensor:
    """Return keys [T, Hk, D] as [T, heads, D]."""
    rows, few, size = keys.shape
    return keys[:, :, None].expand(rows, few, heads // few, size).reshape(rows, heads, size)


def _forward(query: Tensor, keys: Tensor, values: Tensor, step: Step, scale: float) -> tuple[Tensor, Tensor]:
    at_keys = (_parts(each[step.keys], step) for each in (keys, values))
    part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _at(query, step), *at_keys, 0.0, step.causal, attn_mask=step.mask, scale=scale
    )
    return part, lse


def _parts(rows: Tensor, step: Step) -> Tensor:
    """Return a view [batch, H, rows, D] of rows [batch * rows, H, D]."""
    return rows.view(step.batch, -1, *rows.shape[1:]).transpose(1, 2)


def _at(rows: Tensor, step: Step) -> Tensor:
    """Return a view [batch, H, rows, D] of the rows of a step in a tensor [T, H, D]."""
    return _parts(rows[step.start : step.end], step)


def _add(total: Tensor, step: Step, part: Tensor) -> None:
    """Add a part [batch, H, keys, D] to the rows of a step's keys."""
    rows = part.transpose(1, 2).flatten(0, 1)
    if isinstance(step.keys, slice):
        total[step.keys] += rows
    else:
        total.index_add_(0, step.keys, rows.to(total.dtype))
