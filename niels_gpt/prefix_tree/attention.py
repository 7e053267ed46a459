"""The mask of a folded row, as the attention of a model takes it; a way that would be silently wrong is refused.

    inputs = model_inputs(forest, model)          # a model of transformers, attn_implementation "sdpa" or "eager"
    with guard(forest, model):                    # every forward in here is checked before it runs
        hidden = model.model(**inputs).last_hidden_state   # or model(**inputs).logits

What goes wrong without an error in transformers 5.23: without a mask, positions that begin again are taken for packed
sequences; a 2-D mask of ones becomes a causal one, and leaks; without positions the flat row counts; "eager" adds a
boolean mask to the scores; and a mask of four dimensions switches a model's sliding window off, which is why the window
is part of the mask here.

Masks are dense, T^2 values, made when asked for and not kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from niels_gpt.prefix_tree.architectures import Architecture, AttentionRouteError, architecture, unwrapped
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.masks import AttnMaskSpec, dense_mask, near

__all__ = [
    "AttentionRouteError",
    "AttnMaskSpec",
    "check_model_inputs",
    "dense_mask",
    "guard",
    "hf_attention_mask",
    "hf_forward",
    "model_inputs",
]

_USE = 'use attn_implementation="sdpa" or "eager" (model.set_attn_implementation("sdpa"))'
_HIDDEN = -9000.0  # -1e4 in any dtype; what is added so has a weight of exactly 0 beside scores of up to thousands
_OTHER_ROUTES = {
    "flash": "takes no mask, and takes positions that begin again for packed sequences",
    "flex": "takes a BlockMask, not a tensor",
    "paged": "takes a cache of pages and no mask",
}


def hf_attention_mask(
    forest: PrefixForest, attn_implementation: str | None, dtype: torch.dtype, *, window: int | None = None
) -> Tensor:
    """Return the mask [1, 1, T, T] for one attention route of transformers, on the forest's device.

    Bool for "sdpa". For "eager" of `dtype`, the model's: 0 where a query sees a key and the dtype's smallest number
    elsewhere, to be added to the scores. `window`: as in `dense_mask`; transformers adds none to such a mask.

    Raises: AttentionRouteError for any other route, and for a dtype that is not floating.
    """
    return _for_route(dense_mask(forest, window=window), attn_implementation, dtype)


def _for_route(allowed: Tensor, implementation: str | None, dtype: torch.dtype) -> Tensor:
    _refuse_other_routes(implementation)
    if implementation == "sdpa":
        return allowed[None, None]
    if not dtype.is_floating_point:
        raise AttentionRouteError(
            f'a mask for "eager" is added to the scores; got {dtype}, expected the model\'s dtype'
        )
    added = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return added.masked_fill_(~allowed, torch.finfo(dtype).min)[None, None]


def _refuse_other_routes(implementation: str | None) -> None:
    if implementation not in ("sdpa", "eager"):
        known = (why for name, why in _OTHER_ROUTES.items() if name in str(implementation))
        why = next(known, "is not known here, and may leave the mask out")
        raise AttentionRouteError(f"attn_implementation={implementation!r} {why}: {_USE}")


def model_inputs(forest: PrefixForest, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of a forward pass, as model(**inputs), on the model's device.

    `input_ids` and `position_ids` are int64 [1, T], `use_cache` is False, and `attention_mask` is a tensor [1, 1, T, T]
    as `hf_attention_mask` makes it, the model's sliding window included; where layers have different windows and a
    sample is longer than one of them, it is a dict of such tensors by layer type, which these models take.

    Raises: AttentionRouteError for a model that cannot be folded, and for attention routes other than "sdpa", "eager".
    """
    found = _architecture(forest, model)
    positions = forest.position_ids.to(found.device)
    return {
        "input_ids": forest.input_ids.to(found.device)[None],
        "position_ids": positions[None],
        "attention_mask": _masks(found, positions, dense_mask(forest).to(found.device)),
        "use_cache": False,
    }


def _architecture(forest: PrefixForest, model: nn.Module) -> Architecture:
    lengths = forest.sample_lengths
    return architecture(model, int(lengths.max()), int(lengths.min()), len(forest.input_ids))


def _masks(found: Architecture, positions: Tensor, allowed: Tensor) -> Tensor | dict[str, Tensor]:
    """Return one mask for all layers where it can be, else one for each layer type."""
    windows = _windows(found, positions)
    masks = {}
    for window in set(windows.values()):
        seen = allowed if window is None else allowed & near(positions, window)
        masks[window] = _for_route(seen, found.implementation, found.dtype)
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {kind: masks[window] for kind, window in windows.items()}


def _windows(found: Architecture, positions: Tensor) -> dict[str, int | None]:
    """Return the windows by layer type, without those that no sample is longer than."""
    longest = int(positions.max()) + 1
    return {kind: None if window is None or longest <= window else window for kind, window in found.windows.items()}


def check_model_inputs(forest: PrefixForest, model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise AttentionRouteError unless model(**inputs) gives the forest's tokens the values that they have in samples.

    inputs: the arguments of one forward pass by name. What `model_inputs` returns passes; so does whatever equals it,
    `inputs_embeds` [1, T, H] in the place of `input_ids`, and further arguments that change nothing between tokens.
    """
    found = _architecture(forest, model)
    _refuse_other_routes(found.implementation)
    _check_arguments(inputs)
    rows = len(forest.input_ids)
    ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
    given = ids if embeds is None else embeds
    if not isinstance(given, Tensor) or given.shape[:2] != (1, rows):
        raise _wrong("input_ids", given, f"the forest's, [1, {rows}]: one row, with all its groups")
    if embeds is None and not torch.equal(given[0], forest.input_ids.to(given.device)):
        raise _wrong("input_ids", given, "the forest's own, which these are not")
    positions = inputs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != (1, rows):
        raise _wrong(
            "position_ids", positions, f"forest.position_ids[None], [1, {rows}]; without them the flat row counts"
        )
    if not torch.equal(positions[0], forest.position_ids.to(positions.device)):
        raise _wrong("position_ids", positions, "the forest's own, where every branch goes on from its parent")
    _check_masks(found, forest, inputs.get("attention_mask"))


def _wrong(name: str, found: Any, expected: str) -> AttentionRouteError:
    what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    return AttentionRouteError(f"{name} is {what}; expected {expected}. model_inputs(forest, model) makes all of them")


def _check_arguments(inputs: Mapping[str, Any]) -> None:
    refused = {
        "past_key_values": "a cache belongs to one sequence; pass none",
        "use_cache": "a cache of a folded row cannot be continued; pass use_cache=False",
        "encoder_hidden_states": "encoder states belong to one sample; run the samples unfolded",
        "output_router_logits": "its loss counts a shared prompt once; pass output_router_logits=False",
    }
    for name, why in refused.items():
        if inputs.get(name) is not None and inputs[name] is not False:
            raise AttentionRouteError(f"{name} was given: {why}")
    if inputs.get("labels") is not None and inputs.get("shift_labels") is None:
        raise AttentionRouteError(
            "labels was given: the model's own loss shifts them along the flat row, so that the last token of a branch "
            "would predict the first one of the next branch. Use folded_cross_entropy of niels_gpt.prefix_tree.edges"
        )


def _check_masks(found: Architecture, forest: PrefixForest, given: Any) -> None:
    windows = _windows(found, forest.position_ids)
    if isinstance(given, Mapping):
        if not found.takes_dict or not set(given) >= set(windows):
            kinds = f"a dict with {sorted(windows)}" if found.takes_dict else "a tensor, the model has no layer types"
            raise _wrong("attention_mask", given, f"{kinds}; it has {sorted(given)}")
        masks = [(f"attention_mask[{kind!r}]", given[kind], window) for kind, window in windows.items()]
    elif len(set(windows.values())) > 1:
        raise _wrong("attention_mask", given, f"a dict, as layers see different windows: {windows}")
    else:
        masks = [("attention_mask", given, next(iter(windows.values())))]
    for name, mask, window in masks:
        _check_mask(name, mask, dense_mask(forest, window=window), found)


def _check_mask(name: str, mask: Any, allowed: Tensor, found: Architecture) -> None:
    shape = [1, 1, *allowed.shape]
    if mask is None:
        raise _wrong(name, mask, f"{shape}: with none, positions that begin again are taken for packed sequences")
    if not isinstance(mask, Tensor) or list(mask.shape) != shape:
        raise _wrong(name, mask, f"{shape}; transformers makes a causal mask of fewer dimensions, and it leaks")
    dtypes = {found.dtype} if found.implementation == "eager" else {found.dtype, torch.bool}
    if mask.dtype not in dtypes:
        why = ', as "eager" adds it to the scores' if found.implementation == "eager" else ""
        raise _wrong(name, mask, f"{' or '.join(map(str, dtypes))}{why}")
    seen, allowed = mask[0, 0], allowed.to(mask.device)
    wrong = seen != allowed if mask.dtype == torch.bool else torch.where(allowed, seen != 0, seen > _HIDDEN)
    if bool(wrong.any()):
        q, k = wrong.nonzero()[0].tolist()
        must = "must see" if bool(allowed[q, k]) else "must not see"
        if mask.dtype != torch.bool:
            must = f"has {float(seen[q, k]):g}, expected {'0' if bool(allowed[q, k]) else '-1e4 or less'}, as it {must}"
        raise _wrong(name, mask, f"the forest's; {int(wrong.sum())} pairs differ, first: row {q} {must} row {k}")


@contextmanager
def guard(forest: PrefixForest, model: nn.Module) -> Iterator[None]:
    """Check every forward of `model` in the block by `check_model_inputs` before it runs; raises as that does.

    A call of the body alone (`model.base_model`, as `model.model` of a Llama) is checked too. Of a wrapped model
    (torch.compile, DataParallel, PEFT) the arguments are checked where they arrive, at the model inside; where a graph
    that was compiled earlier leaves that out, those of the wrapper are checked after the call.

    Raises: AttentionRouteError at once for a model compiled in place, by model.compile(), which may leave hooks out.
    """
    inner = unwrapped(model)
    body = getattr(inner, "base_model", None)
    checked = [inner] if not isinstance(body, nn.Module) or body is inner else [inner, body, unwrapped(body)]
    if any(getattr(module, "_compiled_call_impl", None) for module in (model, *checked)):
        raise AttentionRouteError(
            f"{type(inner).__name__} was compiled in place by model.compile(), and its graph may leave the check out; "
            "use torch.compile(model), or call check_model_inputs yourself"
        )
    running: list[nn.Module] = []
    ran: list[nn.Module] = []

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = inspect.signature(unwrapped(module).forward).parameters
        check_model_inputs(forest, module, {**dict(zip(names, args, strict=False)), **kwargs})

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            running.append(module)
            ran.append(module)
            if len(running) == 1:  # what the model hands to its body need not be checked again
                check(module, args, kwargs)

    def leave(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            running.pop()

    def arrived(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        if not ran:
            check(module, args, kwargs)
        ran.clear()

    with ExitStack() as hooks:
        for module in dict.fromkeys(checked):
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        if model is not inner:
            hooks.callback(model.register_forward_pre_hook(lambda *_: ran.clear()).remove)
            hooks.callback(model.register_forward_hook(arrived, with_kwargs=True).remove)
        yield


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
        ends = positions[0][(seen.sum(0) == 1) & (seen.sum(1) > 1)] + 1  # lengths; those of one token are like padding
        longest = int(positions.max()) + 1
        found = architecture(self.model, longest, int(ends.min()) if len(ends) else longest, rows)
        masks = _masks(found, positions[0].to(found.device), seen.to(found.device))
        inputs = {"input_ids": ids.to(found.device), "use_cache": False}
        count = torch.arange(rows, device=positions.device)
        if not torch.equal(positions[0], count) or not torch.equal(seen, count <= count[:, None]):
            inputs |= {"position_ids": positions.to(found.device), "attention_mask": masks}
        logits: Tensor = self.model(**inputs).logits
        return logits


def hf_forward(model: nn.Module) -> HfForward:
    """Return a transformers model as a function of ids [1, T], positions [1, T] and mask bool [1, 1, T, T].

    It returns logits [1, T, V], and has the model as `.model`. The mask is brought into the form of the model's route,
    its sliding windows included. One plain sample, whose mask is causal and whose positions count from 0, is run as
    anyone would run it, by its ids alone: so `verify_fold` compares a fold with the model itself, and not with the
    rules here. The function raises AttentionRouteError where `model_inputs` does, and for arguments of another form.
    """
    return HfForward(model)
