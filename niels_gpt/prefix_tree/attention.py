"""The attention mask of a folded row, and which ways to pass it to a model of transformers are refused as wrong.

    inputs = model_inputs(forest, model)          # a model of transformers, attn_implementation "sdpa" or "eager"
    with guard(forest, model):                    # checks every forward in the block before it runs
        hidden = model.model(**inputs).last_hidden_state   # or model(**inputs).logits

These mistakes raise no error in transformers 5.23: without a mask, repeated positions are read as packed sequences; a
2-D mask of ones becomes a causal mask, which leaks; without positions, tokens are numbered along the flat row; "eager"
adds a boolean mask to the scores; and a 4-D mask switches the sliding window of a model off, so that the mask made here
includes the window.

Masks are dense: T^2 values, computed at each call and not kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from niels_gpt.prefix_tree.architectures import Architecture, AttentionRouteError, architecture, unwrapped
from niels_gpt.prefix_tree.forest import PrefixForest

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
_HIDDEN = -9000.0  # about -1e4 in any dtype: added to scores of up to thousands, it gives a weight of exactly 0
_OTHER_ROUTES = {
    "flash": "takes no mask, and reads repeated positions as packed sequences",
    "flex": "takes a BlockMask, not a tensor",
    "paged": "takes a cache of pages and no mask",
}


# --- the mask ---------------------------------------------------------------------------------------------------------


@dataclass
class AttnMaskSpec:
    """A mask as rectangles of queries and keys, in the form that MagiAttention and nemo-automodel take.

    q_ranges, k_ranges: [start, end) of each rectangle. mask_types: "full", or "causal", aligned at the last query and
    the last key. total_seqlen: tokens of the row. A token sees the union of the rectangles.
    """

    q_ranges: list[list[int]]
    k_ranges: list[list[int]]
    mask_types: list[str]
    total_seqlen: int

    @classmethod
    def causal(cls, seqlen: int) -> AttnMaskSpec:
        """Return the mask of one sequence."""
        return cls.varlen([seqlen])

    @classmethod
    def varlen(cls, seqlens: Sequence[int], causal: bool = True) -> AttnMaskSpec:
        """Return the mask of sequences one after another that do not see each other."""
        ranges = _ranges(seqlens)
        kinds = ["causal" if causal else "full"] * len(ranges)
        return cls([list(r) for r in ranges], [list(r) for r in ranges], kinds, sum(seqlens))

    @classmethod
    def prefix_tree(
        cls, node_lengths: Sequence[int], sample_paths: Sequence[Sequence[int]]
    ) -> tuple[AttnMaskSpec, list[list[list[int]]]]:
        """Return the mask of a tree, and the [start, end) ranges of each sample's nodes from its root.

        For each node of each path: a causal rectangle for itself, then a full one for each ancestor from the root,
        without repetitions. Arguments as in `FoldedRollouts`.

        Raises: ValueError for a path with an unknown or repeated node, and for a node with two parents.
        """
        ranges = _ranges(node_lengths)
        parents: dict[int, int] = {}
        for sample, path in enumerate(sample_paths):
            given = f"sample_paths[{sample}] is {list(path)}"
            if not all(0 <= node < len(ranges) for node in path):
                raise ValueError(f"{given}; expected nodes from 0 to {len(ranges) - 1}")
            if len(set(path)) < len(path):
                raise ValueError(f"{given}; expected each node once, or a token would see later tokens")
            for parent, node in pairwise([-1, *path]):
                if parents.setdefault(node, parent) != parent:
                    raise ValueError(
                        f"{given}, with node {node} below node {parent}, and an earlier path has it below node "
                        f"{parents[node]} (-1: a root); expected one parent for each node"
                    )
        rectangles: dict[tuple[tuple[int, int], tuple[int, int], str], None] = {}  # an ordered set
        for path in sample_paths:
            for depth, node in enumerate(path):
                rectangles[ranges[node], ranges[node], "causal"] = None
                rectangles.update({(ranges[node], ranges[above], "full"): None for above in path[:depth]})
        spec = cls(
            [list(q) for q, _, _ in rectangles],
            [list(k) for _, k, _ in rectangles],
            [kind for _, _, kind in rectangles],
            sum(node_lengths),
        )
        return spec, [[list(ranges[node]) for node in path] for path in sample_paths]

    def fingerprint(self) -> tuple[Any, ...]:
        """Return a hashable value that is equal for equal masks: a key to cache what a backend makes of one."""
        q_ranges, k_ranges = (tuple(map(tuple, ranges)) for ranges in (self.q_ranges, self.k_ranges))
        return (self.total_seqlen, q_ranges, k_ranges, tuple(self.mask_types))

    def dense(self) -> Tensor:
        """Return the mask as bool [T, T], True where query (row) sees key (column)."""
        mask = torch.zeros(self.total_seqlen, self.total_seqlen, dtype=torch.bool)
        for (q, q_end), (k, k_end), kind in zip(self.q_ranges, self.k_ranges, self.mask_types, strict=True):
            part = torch.ones(q_end - q, k_end - k, dtype=torch.bool)
            mask[q:q_end, k:k_end] |= part.tril((k_end - k) - (q_end - q)) if kind == "causal" else part
        return mask


def _ranges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths are {list(lengths)}; expected none below 0")
    return [(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def dense_mask(forest: PrefixForest, *, window: int | None = None) -> Tensor:
    """Return the mask as bool [T, T] on the forest's device, True where query (row) sees key (column).

    A query q sees a key k where k <= q < subtree_end[k], and, with a window of W, where position[q] - position[k] < W:
    a token sees itself and the W - 1 tokens before it in its samples, as in transformers.
    """
    rows = torch.arange(len(forest.subtree_end), device=forest.subtree_end.device)
    allowed = (rows <= rows[:, None]) & (rows[:, None] < forest.subtree_end)
    return allowed if window is None else allowed & _near(forest.position_ids, window)


def _near(positions: Tensor, window: int) -> Tensor:
    """Return bool [T, T]: whether a key's position is less than `window` below the query's."""
    return positions[:, None] < positions + window  # a difference would be int64 [T, T]


# --- as a model takes it ----------------------------------------------------------------------------------------------


def hf_attention_mask(
    forest: PrefixForest, attn_implementation: str | None, dtype: torch.dtype, *, window: int | None = None
) -> Tensor:
    """Return the mask [1, 1, T, T] for an attention implementation of transformers, on the forest's device.

    Bool for "sdpa". For "eager" the mask is added to the scores: of `dtype`, the model's, 0 where a query sees a key
    and the dtype's smallest number elsewhere. `window`: as in `dense_mask`; transformers adds none to such a mask.

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
    as `hf_attention_mask` makes it, the model's sliding window included. Where layers have different windows and a
    sample is longer than one of them, it is a dict of such tensors by layer type, which these models take.

    Raises: AttentionRouteError for a model that cannot be folded, and for attention routes other than "sdpa", "eager".
    """
    traits = _architecture(forest, model)
    positions = forest.position_ids.to(traits.device)
    return {
        "input_ids": forest.input_ids.to(traits.device)[None],
        "position_ids": positions[None],
        "attention_mask": _masks(traits, positions, dense_mask(forest).to(traits.device)),
        "use_cache": False,
    }


def _architecture(forest: PrefixForest, model: nn.Module) -> Architecture:
    lengths = forest.sample_lengths
    return architecture(model, int(lengths.max()), int(lengths.min()), len(forest.input_ids))


def _masks(traits: Architecture, positions: Tensor, allowed: Tensor) -> Tensor | dict[str, Tensor]:
    """Return one mask if it fits all layers, else one for each layer type."""
    windows = _windows(traits, positions)
    masks = {}
    for window in set(windows.values()):
        seen = allowed if window is None else allowed & _near(positions, window)
        masks[window] = _for_route(seen, traits.implementation, traits.dtype)
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {kind: masks[window] for kind, window in windows.items()}


def _windows(traits: Architecture, positions: Tensor) -> dict[str, int | None]:
    """Return the windows by layer type; None for a window that no sample exceeds."""
    longest = int(positions.max()) + 1
    return {kind: None if window is None or longest <= window else window for kind, window in traits.windows.items()}


def check_model_inputs(forest: PrefixForest, model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise AttentionRouteError unless model(**inputs) gives the forest's tokens the values that they have in samples.

    inputs: the arguments of one forward pass by name: equal to what `model_inputs` returns, or with `inputs_embeds`
    [1, T, H] for `input_ids`, or with further arguments that do not act between tokens.
    """
    traits = _architecture(forest, model)
    _refuse_other_routes(traits.implementation)
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
    _check_masks(traits, forest, inputs.get("attention_mask"))


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
    windows = _windows(traits, forest.position_ids)
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
        _check_mask(name, mask, dense_mask(forest, window=window), traits)


def _check_mask(name: str, mask: Any, allowed: Tensor, traits: Architecture) -> None:
    shape = [1, 1, *allowed.shape]
    if mask is None:
        raise _wrong(name, mask, f"{shape}: without a mask, repeated positions are read as packed sequences")
    if not isinstance(mask, Tensor) or list(mask.shape) != shape:
        raise _wrong(name, mask, f"{shape}; transformers turns fewer dimensions into a causal mask, which leaks")
    dtypes = {traits.dtype} if traits.implementation == "eager" else {traits.dtype, torch.bool}
    if mask.dtype not in dtypes:
        why = ', as "eager" adds it to the scores' if traits.implementation == "eager" else ""
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
    """Check each forward of `model` in the block by `check_model_inputs` before it runs, and raise as that does.

    A call of the body alone (`model.base_model`, such as `model.model` of a Llama) is checked too. For a wrapped model
    (torch.compile, DataParallel, PEFT) the arguments of the model inside are checked; if an earlier compiled graph
    skips its hooks, the arguments of the wrapper are checked after the call.

    Raises: AttentionRouteError at once for a model compiled in place by model.compile(), which may skip hooks.
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
        if not torch.compiler.is_compiling():
            running.append(module)
            ran.append(module)
            if len(running) == 1:  # the model checked its arguments before it calls its body
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
        ends = positions[0][(seen.sum(0) == 1) & (seen.sum(1) > 1)] + 1  # lengths of the samples
        longest = int(positions.max()) + 1
        traits = architecture(self.model, longest, int(ends.min()) if len(ends) else longest, rows)
        masks = _masks(traits, positions[0].to(traits.device), seen.to(traits.device))
        inputs = {"input_ids": ids.to(traits.device), "use_cache": False}
        count = torch.arange(rows, device=positions.device)
        if not torch.equal(positions[0], count) or not torch.equal(seen, count <= count[:, None]):
            inputs |= {"position_ids": positions.to(traits.device), "attention_mask": masks}
        logits: Tensor = self.model(**inputs).logits
        return logits


def hf_forward(model: nn.Module) -> HfForward:
    """Return a transformers model as a function of ids [1, T], positions [1, T] and mask bool [1, 1, T, T].

    It returns logits [1, T, V] and has the model as `.model`. The mask is converted to the form that the model takes,
    its sliding windows included. A plain sample (causal mask, positions from 0) is run by its ids alone, so that
    `verify_fold` compares a fold with the model itself, and not with the rules of this module. The function raises
    AttentionRouteError where `model_inputs` does, and for arguments of another form.
    """
    return HfForward(model)
