"""Runs a folded row through a model of transformers: the arguments of a forward pass, and their checks.

    inputs = model_inputs(forest, model)          # a model of transformers, attn_implementation "sdpa" or "eager"
    with guard(forest, model):                    # checks every forward in the block before it runs
        hidden, head = body_forward(model, forest)   # of heads.py, through any wrapper; or model(**inputs).logits

By default a model of "sdpa" on a CPU gets a dense mask for a short row: T^2 values, computed at each call and not kept.
For a longer row it is set to "prefix_tree" (segments.py), which computes the pairs of the forest and runs every other
forward as "sdpa" does. "eager" gets a dense mask at any length.

These mistakes raise no error in transformers 5.23: without mask and segments, repeated positions are read as packed
sequences; a 2-D mask of ones becomes a causal mask, which leaks; without positions, tokens are numbered along the flat
row; "eager" adds a boolean mask to the scores; and a 4-D mask switches off the sliding window of a model, so the masks
made here include the window.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from niels_gpt.prefix_tree.architectures import (
    Architecture,
    AttentionRouteError,
    architecture,
    is_sharded,
    unwrapped,
    wrappers,
)
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.masks import (
    HIDDEN,
    AttnMaskSpec,
    architecture_of,
    block_mask,
    block_masks,
    dense_mask,
    hf_attention_mask,
    is_remembered,
    masks_of,
    refuse_other_routes,
    remember,
    windows_of,
)
from niels_gpt.prefix_tree.segments import NAME, Segments, probing, segments_of, use_segments
from niels_gpt.prefix_tree.segments_plan import dense_is_faster
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
    `prefix_tree` is the forest's `Segments`. Otherwise `attention_mask` is the tensor [1, 1, T, T] of
    `hf_attention_mask` with the model's sliding window. Where layers have different windows and a sample is longer than
    one of them, it is a dict of such tensors by layer type. A model of "flex_attention" on a GPU gets a `block_mask` in
    place of each tensor, which `guard` refuses, as it cannot check it.

    backend: "prefix_tree": by segments; sets the model's attn_implementation to "prefix_tree". "dense": by a mask.
        "auto": by segments where the attn_implementation is "sdpa" or "prefix_tree", the model can run them, it is on a
        CPU, as on GPUs segments are many small calls, and the row is not so short that a mask is faster
        (`segments_plan.dense_is_faster`).

    To run a model that was pickled after this call, first call `segments.register()` in the new process, or
    `model.set_attn_implementation("sdpa")`.

    Raises: AttentionRouteError (E802), with the reason, for a model that cannot be folded; for attention routes other
        than "sdpa", "eager", "prefix_tree" and, on a GPU, "flex_attention"; and for backend="prefix_tree" where the
        model cannot run segments. TreeError (E801) for another backend.
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
    short = dense_is_faster(len(forest.input_ids), traits.width)
    if backend == "prefix_tree" or (backend == "auto" and traits.device.type == "cpu" and not short):
        why_not = use_segments(model, only_sdpa=backend == "auto")
    if why_not and backend == "prefix_tree":
        raise AttentionRouteError(f"{type(model).__name__} cannot run segments: {why_not}. Use backend='dense'")
    if why_not:
        inputs["attention_mask"] = masks_of(traits, positions, dense_mask(forest).to(traits.device))
        remember(forest, traits, inputs["attention_mask"])
    else:
        inputs[NAME] = Segments.from_forest(forest)
    return inputs


@dataclass(eq=False)
class HfForward:
    """A model of transformers as a function of ids, positions and mask; see `hf_forward`."""

    model: nn.Module
    route: str = field(default="", init=False)  # of the last row: "by segments", "under a mask"; "": a plain sample

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
        self.route = ""
        count = torch.arange(rows, device=positions.device)
        if not torch.equal(positions[0], count) or not torch.equal(seen, count <= count[:, None]):
            segments = (
                Segments.from_mask(seen) if traits.implementation == NAME and not use_segments(self.model) else None
            )
            if segments is None:
                masks = masks_of(traits, positions[0].to(traits.device), seen.to(traits.device))
            inputs |= {"position_ids": positions.to(traits.device)}
            inputs |= {"attention_mask": masks} if segments is None else {NAME: segments}
            self.route = "under a mask" if segments is None else "by segments"
        logits: Tensor = self.model(**inputs).logits
        return logits


def hf_forward(model: nn.Module) -> HfForward:
    """Return a model of transformers as a function of ids [1, T], positions [1, T] and mask bool [1, 1, T, T].

    The function returns logits [1, T, V]; `.model` is the model. It converts the mask to the form that the model takes,
    sliding windows included: to segments if the model is set to "prefix_tree" and the mask is a forest. `.route` says
    how the last row ran. To check segments, first call `use_segments(model)`: short rows leave a model of "sdpa" as it
    is. It runs a plain sample (causal mask, positions from 0) only by its ids, so that `verify_fold` compares a fold
    with the model itself and not with the rules of this module. It raises AttentionRouteError (E802) where
    `model_inputs` does, and for arguments of another form.
    """
    return HfForward(model)


# --- the arguments of a forward pass, checked before it runs ----------------------------------------------------------


def check_model_inputs(forest: PrefixForest, model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise AttentionRouteError (E802) unless model(**inputs) gives each token the values that it has in its samples.

    inputs: the arguments of one forward pass by name: equal to the result of `model_inputs`, or with `inputs_embeds`
    [1, T, H] in place of `input_ids`, or with further arguments that do not act between tokens.
    """
    traits = architecture_of(forest, model)
    refuse_other_routes(traits.implementation)
    _check_arguments(inputs)
    rows = len(forest.input_ids)
    ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
    given = ids if embeds is None else embeds
    if not isinstance(given, Tensor) or given.shape[:2] != (1, rows):
        raise _wrong("input_ids", given, f"the forest's, [1, {rows}]: one row with all groups")
    if embeds is None and not torch.equal(given[0], forest.input_ids.to(given.device)):
        raise _wrong("input_ids", given, "forest.input_ids, and the values differ")
    positions = inputs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != (1, rows):
        raise _wrong(
            "position_ids",
            positions,
            f"forest.position_ids[None], [1, {rows}]; without them the flat row counts",
        )
    if not torch.equal(positions[0], forest.position_ids.to(positions.device)):
        raise _wrong("position_ids", positions, "forest.position_ids, where each branch continues from its parent")
    if not _by_segments(traits, forest, inputs):
        _check_masks(traits, forest, inputs.get("attention_mask"))


def _by_segments(traits: Architecture, forest: PrefixForest, inputs: Mapping[str, Any]) -> bool:
    """Return whether the mask of these inputs is the forest's segments. Raises for segments of another tree."""
    try:
        given = segments_of(inputs)
    except ValueError as error:
        raise AttentionRouteError(f"the keys of the tree differ from the keys of the forest: {error}") from error
    if given is None:
        return False
    if traits.implementation != NAME:
        raise _wrong(
            NAME, given, f'none, as attn_implementation {traits.implementation!r} ignores it; set "prefix_tree"'
        )
    if inputs.get("attention_mask") is not None:
        raise _wrong("attention_mask", inputs["attention_mask"], "none beside prefix_tree, which is the mask")
    if not np.array_equal(given.subtree_end, forest.subtree_end.numpy(force=True)):
        raise _wrong(NAME, given, "Segments.from_forest(forest); these belong to another tree")
    return True


def _wrong(name: str, given: Any, expected: str) -> AttentionRouteError:
    what = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    return AttentionRouteError(f"{name} is {what}; expected {expected}. model_inputs(forest, model) makes all of them")


def _check_arguments(inputs: Mapping[str, Any]) -> None:
    refused = {
        "past_key_values": "a cache belongs to one sequence; pass None",
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


def _check_masks(traits: Architecture, forest: PrefixForest, given: Any) -> None:
    windows = windows_of(traits, forest.position_ids)
    if isinstance(given, Mapping):
        if not traits.takes_dict or not set(given) >= set(windows):
            kinds = f"a dict with {sorted(windows)}" if traits.takes_dict else "a tensor, the model has no layer types"
            raise _wrong("attention_mask", given, f"{kinds}; it has {sorted(given)}")
        masks = [(f"attention_mask[{kind!r}]", given[kind], window) for kind, window in windows.items()]
    elif len(set(windows.values())) > 1:
        raise _wrong("attention_mask", given, f"a dict, as layers see different windows: {windows}")
    else:
        masks = [("attention_mask", given, next(iter(windows.values())))]
    for name, mask, window in masks:
        _check_mask(name, mask, forest, window, traits)


def _check_mask(name: str, mask: Any, forest: PrefixForest, window: int | None, traits: Architecture) -> None:
    shape = [1, 1, len(forest.input_ids), len(forest.input_ids)]
    if mask is None:
        raise _wrong(name, mask, f"{shape}: without a mask, repeated positions are read as packed sequences")
    if not isinstance(mask, Tensor) or list(mask.shape) != shape:
        raise _wrong(name, mask, f"{shape}; transformers turns fewer dimensions into a causal mask, which leaks")
    dtypes = {traits.dtype} if traits.implementation == "eager" else {traits.dtype, torch.bool}
    if mask.dtype not in dtypes:
        why = ', as "eager" adds it to the scores' if traits.implementation == "eager" else ""
        raise _wrong(name, mask, f"{' or '.join(map(str, dtypes))}{why}")
    if is_remembered(forest, mask, window):
        return
    seen, allowed = mask[0, 0], dense_mask(forest, window=window).to(mask.device)
    wrong = seen != allowed if mask.dtype == torch.bool else torch.where(allowed, seen != 0, seen > HIDDEN)
    if bool(wrong.any()):
        q, k = wrong.nonzero()[0].tolist()
        must = "must see" if bool(allowed[q, k]) else "must not see"
        if mask.dtype != torch.bool:
            must = f"has {float(seen[q, k]):g}, expected {'0' if bool(allowed[q, k]) else '-1e4 or less'}, as it {must}"
        raise _wrong(name, mask, f"the forest's; {int(wrong.sum())} pairs differ, first: row {q} {must} row {k}")


@contextmanager
def guard(forest: PrefixForest, model: nn.Module) -> Iterator[None]:
    """Check each forward of `model` in the block by `check_model_inputs`, before it runs.

    Also checks a call of only the body (`model.base_model`, such as `model.model` of a Llama). In a wrapped model
    (torch.compile, DataParallel, PEFT) it checks the arguments of the model inside; if an earlier compiled graph skips
    its hooks, it checks the arguments of the wrapper after the call.

    Where a wrapper reduces gradients over ranks (DistributedDataParallel, FSDP), the guard refuses a call of the model
    or body inside while gradients are on: they would not be reduced. `body_forward` calls the wrapper.

    Raises: AttentionRouteError (E802) in the block for wrong arguments; at once for a model compiled in place by
        model.compile(), which may skip hooks.
    """
    inner = unwrapped(model)
    body = getattr(inner, "base_model", None)
    checked = [inner] if not isinstance(body, nn.Module) or body is inner else [inner, body, unwrapped(body)]
    if any(getattr(module, "_compiled_call_impl", None) for module in (model, *checked)):
        raise AttentionRouteError(
            f"{type(inner).__name__} was compiled in place by model.compile(), and its graph may skip the check; "
            "use torch.compile(model), or call check_model_inputs yourself"
        )
    running: list[nn.Module] = []
    ran: list[nn.Module] = []

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = inspect.signature(unwrapped(module).forward).parameters
        check_model_inputs(forest, module, {**dict(zip(names, args, strict=False)), **kwargs})

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and not probing.get():
            running.append(module)
            ran.append(module)
            if len(running) == 1:  # the model checked its arguments before it calls its body
                check_reduced(module)
                check(module, args, kwargs)

    def leave(*_: Any) -> None:
        if not torch.compiler.is_compiling() and not probing.get():
            running.pop()

    def arrived(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        if not ran and not probing.get():
            check(module, args, kwargs)
        ran.clear()

    with ExitStack() as hooks:
        check_reduced = hooks.enter_context(_reducing(model))
        for module in dict.fromkeys(checked):
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        if model is not inner:
            hooks.callback(model.register_forward_pre_hook(lambda *_: ran.clear()).remove)
            hooks.callback(model.register_forward_hook(arrived, with_kwargs=True).remove)
        yield


@contextmanager
def _reducing(model: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
    """Yield a function that raises if a module is called past the wrapper that would reduce its gradients."""
    chain = wrappers(model)
    last = next((place for place, module in enumerate(chain) if _reduces(module)), None)
    inside: list[nn.Module] = []

    def check(module: nn.Module) -> None:
        if last is None or inside or not torch.is_grad_enabled() or is_sharded(module):
            return
        reducer = chain[last]
        if getattr(reducer, "require_backward_grad_sync", True):  # False in no_sync(), where nothing is reduced yet
            what = "the model that fully_shard was applied to" if is_sharded(reducer) else type(reducer).__name__
            raise AttentionRouteError(
                f"{type(module).__name__} was called, and not {what}: its gradients would not be reduced, and each "
                "rank would train only on its own samples. Use hidden, head = body_forward(model, forest) of "
                "niels_gpt.prefix_tree.heads, or call the wrapper; to evaluate, use torch.no_grad()"
            )

    with ExitStack() as hooks:
        for module in chain[: 0 if last is None else last + 1]:
            hooks.callback(module.register_forward_pre_hook(lambda module, _: inside.append(module)).remove)
            hooks.callback(module.register_forward_hook(lambda *_: inside.clear(), always_call=True).remove)
        yield check


def _reduces(module: nn.Module) -> bool:
    names = {of_class.__name__ for of_class in type(module).__mro__}
    return is_sharded(module) or bool(names & {"DistributedDataParallel", "FullyShardedDataParallel"})
