"""The attention implementation "prefix_tree" of transformers: a folded row without a T x T mask.

    register()
    model.set_attn_implementation("prefix_tree")
    model(input_ids=..., position_ids=..., prefix_tree=Segments.from_forest(forest), use_cache=False)

`model_inputs` does this. The keys of TRL's tree row (`tree_kv_index`, `tree_cu_seqlens_q`, `tree_cu_seqlens_k`) may
stand in place of `prefix_tree`. A forward without either runs as "sdpa" does. On CPUs the attention uses torch's flash
kernel. On other devices, and with softcaps, sinks or dropout, it computes block by block through autograd: the same
numbers, and many small calls for a GPU.

A segment is a node of the forest, in TRL's word. segments_plan.py makes squares and rectangles of the segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from niels_gpt.prefix_tree.architectures import AttentionRouteError, is_sharded, unwrapped, wrappers
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.segments_kernel import FlashSegments, attend, for_kernel, has_kernel, probabilities
from niels_gpt.prefix_tree.segments_plan import BLOCK, AttentionPlan, check_laminar, depths, plan_of
from niels_gpt.storage.errors import TreeError

NAME = "prefix_tree"
_TREE_KEYS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
_of_keys: WeakIdKeyDictionary = WeakIdKeyDictionary()  # segments by tree_kv_index: the layers of a forward share them


class Segments:
    """The structure of a folded row as one array, and the attention plans made from it, which are kept."""

    def __init__(self, subtree_end: Any) -> None:
        """Take int64 [T]: query q sees key k where k <= q < subtree_end[k].

        Raises: TreeError (E801) unless the rows are a forest in depth-first pre-order.
        """
        self.subtree_end = np.asarray(subtree_end, dtype=np.int64)
        check_laminar(self.subtree_end)
        self.calls: list[nn.Module] | None = None  # a list records the modules that got these segments
        self._plans: dict[tuple[int | None, int], AttentionPlan] = {}
        self._of_kernel: dict[tuple[int | None, torch.dtype], AttentionPlan] = {}

    @classmethod
    def from_forest(cls, forest: PrefixForest) -> Segments:
        """Return the segments of a forest, its padding included."""
        return cls(forest.subtree_end.numpy(force=True))

    @classmethod
    def from_mask(cls, mask: Tensor) -> Segments | None:
        """Return the segments of a mask bool [T, T], True where a query (row) sees a key; None if it is no forest."""
        rows = torch.arange(len(mask), device=mask.device)
        ends = len(mask) - mask.flip(0).to(torch.uint8).argmax(0)  # a byte a pair: the last query that sees a key
        if not torch.equal(mask, (rows <= rows[:, None]) & (rows[:, None] < ends)):
            return None
        try:
            return cls(ends.numpy(force=True))
        except ValueError:
            return None

    @classmethod
    def from_tree_keys(cls, kv_index: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Segments:
        """Return the segments of TRL's tree row.

        kv_index: int64 [K], for each segment the rows on its path from the root, its own rows last. cu_seqlens_q,
        cu_seqlens_k: int [S + 1], bounds of the segments in the row and of their paths in kv_index.

        Raises: TreeError (E801) unless each path is the path of an earlier segment, or empty, then the segment's rows.
        """
        kv, cu_q, cu_k = (each.numpy(force=True).astype(np.int64) for each in (kv_index, cu_seqlens_q, cu_seqlens_k))
        _check_bounds(kv, cu_q, cu_k)
        ends = np.empty(int(cu_q[-1]), np.int64)
        path: list[int] = []  # open segments: the one before in the row, and its ancestors
        for segment, (start, end) in enumerate(zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True)):
            keys = kv[cu_k[segment] : cu_k[segment + 1]]
            above = keys[: len(keys) - (end - start)]
            while path and (not len(above) or cu_q[path[-1] + 1] - 1 != above[-1]):
                closed = path.pop()
                ends[cu_q[closed] : cu_q[closed + 1]] = start
            parent = kv[cu_k[path[-1]] : cu_k[path[-1] + 1]] if path else kv[:0]
            if not np.array_equal(above, parent) or not np.array_equal(keys[len(above) :], np.arange(start, end)):
                raise TreeError(
                    f"the keys of segment {segment} (rows {start} to {end}) are not the path of an open segment before "
                    "it and its own rows; expected a tree in depth-first pre-order"
                )
            path.append(segment)
        for closed in path:
            ends[cu_q[closed] : cu_q[closed + 1]] = cu_q[-1]
        return cls(ends)

    def __len__(self) -> int:
        """Return T."""
        return len(self.subtree_end)

    @cached_property
    def longest(self) -> int:
        """Return the tokens of the longest sample."""
        return int(depths(self.subtree_end).max()) + 1

    def plan(self, window: int | None = None) -> AttentionPlan:
        """Return the plan for the flash kernel; a window that no sample exceeds is none."""
        return self._planned(window if window and window < self.longest else None, BLOCK)

    def kernel_plan(self, window: int | None, dtype: torch.dtype) -> AttentionPlan:
        """Return the plan with masks in the kernel's form and dtype."""
        window = window if window and window < self.longest else None
        if (window, dtype) not in self._of_kernel:
            self._of_kernel[window, dtype] = for_kernel(self.plan(window), dtype)
        return self._of_kernel[window, dtype]

    def blocks(self, window: int | None = None, block: int = BLOCK) -> AttentionPlan:
        """Return a plan of only blocks: each row is in one step of `own` and in at most one step of `above`."""
        return self._planned(window or self.longest, block)  # a window puts every row into a block

    def _planned(self, window: int | None, block: int) -> AttentionPlan:
        if (window, block) not in self._plans:
            self._plans[window, block] = plan_of(self.subtree_end, window, block)
        return self._plans[window, block]


def _check_bounds(kv: Any, cu_q: Any, cu_k: Any) -> None:
    for name, each in zip(_TREE_KEYS, (kv, cu_q, cu_k), strict=True):
        if each.ndim != 1:
            raise TreeError(f"{name} has the shape {list(each.shape)}; expected one axis")
    for name, bounds, end in (("q", cu_q, None), ("k", cu_k, len(kv))):
        if len(bounds) < 2 or bounds[0] != 0 or (np.diff(bounds) <= 0).any():
            raise TreeError(f"tree_cu_seqlens_{name} is {bounds.tolist()[:8]}...; expected rising bounds from 0")
        if end is not None and bounds[-1] != end:
            raise TreeError(f"tree_cu_seqlens_{name} ends at {bounds[-1]}; tree_kv_index has {end} values")
    if len(cu_q) != len(cu_k) or (np.diff(cu_k) < np.diff(cu_q)).any():
        raise TreeError("tree_cu_seqlens_k does not fit tree_cu_seqlens_q; expected a path for each segment")
    if kv.min() < 0 or kv.max() >= cu_q[-1]:
        raise TreeError(f"tree_kv_index has rows from {kv.min()} to {kv.max()}; the row has {cu_q[-1]}")


# --- transformers' interfaces -----------------------------------------------------------------------------------------


_COPIES = tuple(getattr(torch.ops.aten, name).default for name in ("alias", "detach", "_to_copy"))


class LateMask(torch.Tensor):
    """A boolean mask [B, 1, Q, K] that is computed at its first use outside this module.

    transformers makes a mask before each forward. For a folded row it would be T x T and unused.
    """

    arguments: dict[str, Any]
    window: int | None
    custom: bool  # whether the model adds rules of its own, such as images that see each other
    made: dict[bool, Tensor | None]  # by whether None may stand for a causal mask; copies share them

    @staticmethod
    def __new__(cls, arguments: dict[str, Any], made: dict[bool, Tensor | None] | None = None) -> LateMask:
        """Take the arguments of transformers' `sdpa_mask`, and masks made from them on the same device."""
        shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        make = torch.Tensor._make_wrapper_subclass
        mask: LateMask = make(cls, shape, dtype=torch.bool, device=arguments.get("device", "cpu"))
        mask.arguments, mask.made = arguments, {} if made is None else made
        mask.window, mask.custom = arguments.get("local_size"), bool(arguments.get("use_vmap"))
        return mask

    def __init__(self, *_: Any) -> None:
        """Everything is done in `__new__`."""

    def computed(self, *, may_skip: bool) -> Tensor | None:
        """Return the mask; where `may_skip`, None if "sdpa" would have none."""
        from transformers.masking_utils import sdpa_mask

        skips = may_skip and bool(self.arguments.get("allow_is_causal_skip", True))
        if skips not in self.made:
            self.made[skips] = sdpa_mask(**{**self.arguments, "allow_is_causal_skip": skips})
        return self.made[skips]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute the mask for every operation but a copy, such as a checkpoint makes."""
        kwargs = kwargs or {}
        if func in _COPIES and not set(kwargs) - {"device", "non_blocking"}:
            mask: LateMask = args[0]
            device = torch.device(kwargs.get("device") or mask.device)
            return cls({**mask.arguments, "device": device}, mask.made if device == mask.device else None)
        args, kwargs = tree_map_only(LateMask, lambda mask: mask.computed(may_skip=False), (args, kwargs))
        return func(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def make_mask(**arguments: Any) -> Tensor | None:
    """Return the mask of "sdpa"; a LateMask where it would be T x T.

    Layers that share keys (Gemma 4) may get the last queries alone, with their rows of the mask. Without a mask nothing
    would tell them from the first queries of a static cache, so these models always get one.
    """
    from transformers.masking_utils import sdpa_mask

    cut = bool(getattr(arguments.get("config"), "num_kv_shared_layers", 0)) and arguments["q_length"] != 1
    needed = cut or not arguments.get("allow_is_causal_skip", True) or arguments.get("local_size") is not None
    whole = arguments["q_length"] == arguments["kv_length"] and arguments.get("attention_mask") is None
    if needed and whole and not arguments.get("allow_is_bidirectional_skip"):
        return LateMask(arguments)
    return sdpa_mask(**{**arguments, "allow_is_causal_skip": False} if cut else arguments)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention [1, T, H, D] of query [1, H, T, D] over key and value [1, Hk, T, D]; without a tree: sdpa.

    Raises: AttentionRouteError (E802) for the tree of another row, for a mask or cache beside it, and for position
        biases.
    """
    segments = segments_of(kwargs)
    if segments is None:
        return _plain(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if segments.calls is not None:
        segments.calls.append(module)
    _check_call(module, segments, query, key, attention_mask, kwargs)
    window = attention_mask.window if isinstance(attention_mask, LateMask) else None
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    queries, keys, values = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if device != "cpu" or not has_kernel() or softcap is not None or sinks is not None or dropout:
        plan = segments.blocks(window, BLOCK if device == "cpu" else 8 * BLOCK)
        out = attend(queries, keys, values, plan, scale, dropout=dropout, softcap=softcap, sinks=sinks)
    else:
        size = value.shape[-1]
        widest = max(size, query.shape[-1])  # zeros change neither scores nor the other values
        if size != query.shape[-1]:
            pads = ((0, widest - each.shape[-1]) for each in (query, key, value))
            wide = zip((queries, keys, values), pads, strict=True)
            queries, keys, values = (nn.functional.pad(each, pad) for each, pad in wide)
        plan = segments.kernel_plan(window, dtype)
        out = FlashSegments.apply(queries, keys, values, plan, scale)[..., :size]  # type: ignore[no-untyped-call]
    return out[None].contiguous(), None


def segments_of(kwargs: Mapping[str, Any]) -> Segments | None:
    """Return the segments of a forward, None without a tree. Reads TRL's keys once for all layers.

    Raises: AttentionRouteError (E802) for values of other types; TreeError (E801) for keys that are no tree.
    """
    given = kwargs.get(NAME)
    if given is not None and not isinstance(given, Segments):
        raise AttentionRouteError(f"prefix_tree is a {type(given).__name__}; expected Segments.from_forest(forest)")
    keys = [kwargs.get(name) for name in _TREE_KEYS]
    if given is not None or all(each is None for each in keys):
        return given
    if not all(isinstance(each, Tensor) for each in keys):
        raise AttentionRouteError(f"{', '.join(_TREE_KEYS)}: expected three tensors, or none of them")
    tensors = [each for each in keys if isinstance(each, Tensor)]
    known = _of_keys.get(tensors[0])  # type: ignore[no-untyped-call]
    if known is None or not all(seen.is_of(each) for seen, each in zip(known[0], tensors, strict=True)):
        known = _of_keys[tensors[0]] = ([_Seen(each) for each in tensors], Segments.from_tree_keys(*tensors))
    found: Segments = known[1]
    return found


class _Seen:
    """A tensor at the time it was read. Held weakly: otherwise `_of_keys` would keep its own keys alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = TensorWeakRef(tensor)
        self._state = tensor.clone() if tensor.is_inference() else tensor._version  # inference tensors count no changes

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the one that was read, and unchanged."""
        if self._tensor() is not tensor:
            return False
        state = self._state
        return torch.equal(state, tensor) if isinstance(state, Tensor) else state == tensor._version


def _check_call(
    module: nn.Module, segments: Segments, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]
) -> None:
    shapes = {tuple(each.shape[:1]) + tuple(each.shape[2:3]) for each in (query, key)}
    if shapes != {(1, len(segments))}:
        raise AttentionRouteError(
            f"queries and keys are {list(query.shape)} and {list(key.shape)}; expected one row of {len(segments)} "
            "tokens, those of prefix_tree, and no cache"
        )
    if mask is not None and (not isinstance(mask, LateMask) or mask.custom):
        raise AttentionRouteError("a mask was given beside prefix_tree, which is the mask; pass attention_mask=None")
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if chunk and mask is not None and len(segments) > chunk:
        raise AttentionRouteError(f"attention chunks of {chunk} tokens are cut along the flat row of {len(segments)}")
    if any(kwargs.get(name) is not None for name in ("indices", "block_indices")):
        raise AttentionRouteError("an indexer chose the keys along the flat row; run the samples unfolded")
    if kwargs.get("position_bias") is not None:
        raise AttentionRouteError("the model adds a bias for each pair of rows to the scores; use backend='dense'")


def _plain(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    mask = mask.computed(may_skip=True) if isinstance(mask, LateMask) else mask
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is None and sinks is None:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out
    keys, values = (repeat_kv(each, query.shape[1] // each.shape[1]) for each in (key, value))
    scores = query @ keys.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
        mask = mask.tril(scores.shape[3] - scores.shape[2])
    weights = nn.functional.dropout(probabilities(scores, mask, softcap, sinks).to(query.dtype), dropout)
    return (weights @ values).transpose(1, 2).contiguous(), None


def register() -> None:
    """Register "prefix_tree" with transformers. Raises: ImportError without it."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)


# --- whether a model can run a folded row by its segments -------------------------------------------------------------


probing: ContextVar[bool] = ContextVar("probing", default=False)  # the guard does not check these forwards
_found: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # why a model cannot; "" if it can


def use_segments(model: nn.Module, *, only_sdpa: bool = True) -> str:
    """Set a model to the attention "prefix_tree" if it can run segments. Returns "", or why it cannot.

    Afterwards a forward without segments still runs as "sdpa" does. Other models stay as they were, and so do the parts
    beside a text model, such as an image encoder. The first call for a model tries it with three tokens.

    only_sdpa: leave models of other implementations than "sdpa" and "prefix_tree" as they are.
    """
    inner: Any = unwrapped(model)
    before = inner.config.get_text_config()._attn_implementation
    if only_sdpa and before not in ("sdpa", NAME):
        return f"its attn_implementation is {before!r}"
    if inner not in _found:
        _found[inner] = _tried(inner, next((module for module in wrappers(model) if is_sharded(module)), inner))
    if not _found[inner] and before != NAME:
        inner.set_attn_implementation(_implementations(inner.config, NAME))
    return _found[inner]


def _tried(model: Any, called: nn.Module) -> str:
    """Return why a model cannot run segments, "" if it can.

    called: the module to call, so that FSDP2 gathers the weights: the model, or the wrapper with fully_shard.
    """
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        return "its attention does not go through AttentionInterface of transformers"
    before = _implementations(model.config)
    modes = [(module, module.training) for module in model.modules()]
    token = probing.set(True)
    try:
        register()
        model.set_attn_implementation(_implementations(model.config, NAME))
        model.eval()
        return _compared(model, called)
    except Exception as error:  # whatever a model does with arguments that it does not know
        why = f": {error}" if isinstance(error, AttentionRouteError) else ""
        return f"a forward of three tokens by segments raised {type(error).__name__}{why}"
    finally:
        model.set_attn_implementation(before)
        for module, mode in modes:
            module.training = mode
        probing.reset(token)


def _implementations(config: Any, text: str | None = None) -> dict[str, Any]:
    """Return the implementations of a config and its parts, in the form of set_attn_implementation.

    text: replaces the implementation of the text model and of the configs that hold it: some models make the masks by
    the outer one.
    """
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    of_text = config.get_text_config()
    return {
        "": text or config._attn_implementation,
        **{
            name: _implementations(part, text if part is of_text or part.get_text_config() is of_text else None)
            for name, part in parts.items()
            if part is not None
        },
    }


@torch.no_grad()
def _compared(model: Any, called: nn.Module) -> str:
    """Compare the samples (0, 1) and (0, 2), folded, with the second one alone. Returns "", or the difference."""
    device = next(model.parameters()).device

    def run(ids: list[int], positions: list[int], **more: Any) -> Tensor:
        at = {"input_ids": ids, "position_ids": positions}
        inputs = {name: torch.tensor([values], device=device) for name, values in at.items()}
        result: Tensor = called(**inputs, use_cache=False, return_dict=True, **more)[0]
        return result[0, -1].float()

    segments = Segments([3, 2, 3])
    segments.calls = []
    folded = run([0, 1, 2], [0, 1, 1], prefix_tree=segments)
    wanted = [module for module in model.modules() if getattr(module, "is_causal", None) is True]
    missed = {type(each).__name__ for each in wanted if all(each is not call for call in segments.calls)}
    if missed or not segments.calls:
        return f"its forward does not pass prefix_tree to {', '.join(sorted(missed)) or 'its attention'}"
    alone = run([0, 2], [0, 1])
    if not bool((folded - alone).abs().max() <= 2e-2 * alone.abs().max().clamp(min=1e-6)):
        return "a folded row of three tokens has other values than its samples"
    return ""
