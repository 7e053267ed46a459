"""The attention mask of a folded row, and which ways to pass it to a model of transformers are refused as wrong.

    inputs = model_inputs(forest, model)          # a model of transformers, attn_implementation "sdpa" or "eager"
    with guard(forest, model):                    # checks every forward in the block before it runs
        hidden, head = body_forward(model, forest)   # of heads.py, through any wrapper; or model(**inputs).logits

By default a model of "sdpa" is set to "prefix_tree" (backends/segments.py), which computes the pairs of the forest and
runs every other forward as "sdpa" does. "eager" gets a dense mask: T^2 values, computed at each call and not kept.

These mistakes raise no error in transformers 5.23: without mask and segments, repeated positions are read as packed
sequences; a 2-D mask of ones becomes a causal mask, which leaks; without positions, tokens are numbered along the flat
row; "eager" adds a boolean mask to the scores; and a 4-D mask switches the sliding window of a model off, so that the
mask made here includes the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from niels_gpt.prefix_tree.backends.architectures import AttentionRouteError, architecture
from niels_gpt.prefix_tree.backends.block_mask import block_mask, block_masks
from niels_gpt.prefix_tree.backends.checks import check_model_inputs, guard
from niels_gpt.prefix_tree.backends.masks import (
    AttnMaskSpec,
    architecture_of,
    dense_mask,
    hf_attention_mask,
    masks_of,
    remember,
)
from niels_gpt.prefix_tree.backends.segments import NAME, Segments
from niels_gpt.prefix_tree.backends.segments_probe import use_segments
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.storage.errors import TreeError

__all__ = [
    "AttentionRouteError",
    "AttnMaskSpec",
    "Segments",
    "block_mask",
    "check_model_inputs",
    "dense_mask",
    "guard",
    "hf_attention_mask",
    "hf_forward",
    "model_inputs",
    "use_segments",
]


Backend = Literal["auto", "prefix_tree", "dense"]


def model_inputs(forest: PrefixForest, model: nn.Module, *, backend: Backend = "auto") -> dict[str, Any]:
    """Return the arguments of a forward pass, as model(**inputs), on the model's device.

    `input_ids` and `position_ids` are int64 [1, T], `use_cache` is False. By segments, `attention_mask` is None and
    `prefix_tree` is the forest's `Segments`. Else `attention_mask` is a tensor [1, 1, T, T] as `hf_attention_mask`
    makes it, the model's sliding window included. Where layers have different windows and a sample is longer than one
    of them, it is a dict of such tensors by layer type, which these models take. A model of "flex_attention" on a GPU
    gets a `block_mask` in place of each tensor, which `guard` cannot check, and refuses.

    backend: "prefix_tree": by segments; sets the model's attn_implementation to "prefix_tree". "dense": by a mask.
        "auto": by segments where the attn_implementation is "sdpa" or "prefix_tree", the model can run them, and it is
        on a CPU: for GPUs segments are many small calls.

    A whole model that is pickled after this runs in a process that has called `register()` of backends/segments.py, or
    after `model.set_attn_implementation("sdpa")`.

    Raises: AttentionRouteError for a model that cannot be folded, for attention routes other than "sdpa", "eager",
        "prefix_tree" and, on a GPU, "flex_attention", and for the backend "prefix_tree" where the model cannot run
        segments, with the reason.
    """
    if backend not in get_args(Backend):
        raise TreeError(f"backend is {backend!r}; expected one of {', '.join(get_args(Backend))}")
    traits = architecture_of(forest, model)
    positions = forest.position_ids.to(traits.device)
    inputs: dict[str, Any] = {
        "input_ids": forest.input_ids.to(traits.device)[None],
        "position_ids": positions[None],
        "attention_mask": None,
        "use_cache": False,
    }
    if traits.implementation == "flex_attention" and backend == "auto":
        return {**inputs, "attention_mask": block_masks(forest, traits)}
    why_not = "a mask was chosen"
    if backend == "prefix_tree" or (backend == "auto" and traits.device.type == "cpu"):
        why_not = use_segments(model, only_sdpa=backend == "auto")
    if why_not and backend == "prefix_tree":
        raise AttentionRouteError(f"{type(model).__name__} cannot run segments: {why_not}. Use backend='dense'")
    if why_not:
        inputs["attention_mask"] = masks_of(traits, positions, dense_mask(forest).to(traits.device))
        remember(forest, traits, inputs["attention_mask"])
    else:
        inputs[NAME] = Segments.from_forest(forest)
    return inputs


@dataclass(frozen=True)
class HfForward:
    """What `hf_forward` returns: a function of ids [1, T], positions [1, T] and mask bool [1, 1, T, T]."""

    model: nn.Module

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return logits [1, T, V]."""
        rows = ids.shape[-1]
        if ids.shape != (1, rows) or positions.shape != (1, rows) or mask.shape != (1, 1, rows, rows):
            shapes = [list(tensor.shape) for tensor in (ids, positions, mask)]
            raise AttentionRouteError(f"ids, positions, mask are {shapes}; expected [1, T], [1, T], [1, 1, T, T]")
        if mask.dtype != torch.bool:
            raise AttentionRouteError(f"mask is {mask.dtype}; expected bool, True where a query sees a key")
        seen = mask[0, 0].to(positions.device)
        ends = positions[0][(seen.sum(0) == 1) & (seen.sum(1) > 1)] + 1  # lengths of the samples
        longest = int(positions.max()) + 1
        traits = architecture(self.model, longest, int(ends.min()) if len(ends) else longest, rows)
        inputs: dict[str, Any] = {"input_ids": ids.to(traits.device), "use_cache": False}
        count = torch.arange(rows, device=positions.device)
        if not torch.equal(positions[0], count) or not torch.equal(seen, count <= count[:, None]):
            segments = (
                Segments.from_mask(seen) if traits.implementation == NAME and not use_segments(self.model) else None
            )
            if segments is None:
                masks = masks_of(traits, positions[0].to(traits.device), seen.to(traits.device))
            inputs |= {"position_ids": positions.to(traits.device)}
            inputs |= {"attention_mask": masks} if segments is None else {NAME: segments}
        logits: Tensor = self.model(**inputs).logits
        return logits


def hf_forward(model: nn.Module) -> HfForward:
    """Return a transformers model as a function of ids [1, T], positions [1, T] and mask bool [1, 1, T, T].

    It returns logits [1, T, V] and has the model as `.model`. The mask is converted to the form that the model takes,
    its sliding windows included: to segments, if the model is set to "prefix_tree" and the mask is that of a forest.
    A plain sample (causal mask, positions from 0) is run by its ids alone, so that `verify_fold` compares a fold
    with the model itself, and not with the rules of this module. The function raises AttentionRouteError where
    `model_inputs` does, and for arguments of another form.
    """
    return HfForward(model)
