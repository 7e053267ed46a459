"""The attention mask of a folded row: dense, as rectangles, as a model of transformers takes it, as a BlockMask.

Dense masks have T^2 values. They are computed at each call and not kept. The BlockMask of FlexAttention is computed in
closed form, without T^2 values:

    key block kb, query block qb, kb < qb, qb having the rows q_lo to q_hi:
    visible    max of subtree_end over kb > q_lo
    full       min of subtree_end over kb > q_hi

A block of the diagonal is visible and not full, and the last block of queries is not full if it is cut off. With a
window, a pair must also be near. All pairs of two blocks are near if the extremes of their positions are. For one near
pair it is enough to look at the queries of qb up to the last one with an ancestor in kb: one of their windows must
begin in kb or before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from niels_gpt.prefix_tree.architectures import Architecture, AttentionRouteError, architecture
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.storage.errors import TreeError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


_USE = 'use attn_implementation="sdpa" or "eager" (model.set_attn_implementation("sdpa"))'
HIDDEN = -9000.0  # about -1e4 in any dtype: added to scores of up to thousands, it gives a weight of exactly 0
_OTHER_ROUTES = {
    "flash": "takes no mask, and reads repeated positions as packed sequences",
    "flex": "takes a BlockMask, not a tensor",
    "paged": "takes a cache of pages and no mask",
}


@dataclass
class AttnMaskSpec:
    """A mask as rectangles of queries and keys, in the form of MagiAttention and nemo-automodel.

    q_ranges, k_ranges: [start, end) of each rectangle. mask_types: "full"; or "causal", aligned at the last query and
    the last key. total_seqlen: tokens of the row. A token sees the union of the rectangles.
    """

    q_ranges: list[list[int]]
    k_ranges: list[list[int]]
    mask_types: list[str]
    total_seqlen: int

    @classmethod
    def prefix_tree(
        cls, node_lengths: Sequence[int], sample_paths: Sequence[Sequence[int]]
    ) -> tuple[AttnMaskSpec, list[list[list[int]]]]:
        """Return the mask of a tree, and the [start, end) ranges of each sample's nodes from its root.

        For each node of each path: a causal rectangle for itself, then a full one for each ancestor from the root,
        without repetitions. Arguments as in `FoldedRollouts`.

        Raises: TreeError (E801) for a path with an unknown or repeated node, and for a node with two parents.
        """
        ranges = _ranges(node_lengths)
        parents: dict[int, int] = {}
        for sample, path in enumerate(sample_paths):
            given = f"sample_paths[{sample}] is {list(path)}"
            if not all(0 <= node < len(ranges) for node in path):
                raise TreeError(f"{given}; expected nodes from 0 to {len(ranges) - 1}")
            if len(set(path)) < len(path):
                raise TreeError(f"{given}; expected each node once, or a token would see later tokens")
            for parent, node in pairwise([-1, *path]):
                if parents.setdefault(node, parent) != parent:
                    raise TreeError(
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

    def dense(self) -> Tensor:
        """Return the mask as bool [T, T], True where query (row) sees key (column)."""
        mask = torch.zeros(self.total_seqlen, self.total_seqlen, dtype=torch.bool)
        for (q, q_end), (k, k_end), kind in zip(self.q_ranges, self.k_ranges, self.mask_types, strict=True):
            part = torch.ones(q_end - q, k_end - k, dtype=torch.bool)
            mask[q:q_end, k:k_end] |= part.tril((k_end - k) - (q_end - q)) if kind == "causal" else part
        return mask


def _ranges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    if any(length < 0 for length in lengths):
        raise TreeError(f"lengths are {list(lengths)}; expected none below 0")
    return [(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def dense_mask(forest: PrefixForest, *, window: int | None = None) -> Tensor:
    """Return the mask as bool [T, T] on the forest's device, True where query (row) sees key (column).

    A query q sees a key k where k <= q < subtree_end[k], and, with a window of W, where position[q] - position[k] < W:
    a token sees itself and the W - 1 tokens before it in its samples, as in transformers.
    """
    rows = torch.arange(len(forest.subtree_end), device=forest.subtree_end.device)
    allowed = (rows <= rows[:, None]) & (rows[:, None] < forest.subtree_end)
    return allowed if window is None else allowed & near(forest.position_ids, window)


def near(positions: Tensor, window: int) -> Tensor:
    """Return bool [T, T]: whether a key's position is less than `window` below the query's."""
    return positions[:, None] < positions + window  # a difference would be int64 [T, T]


# --- as a model takes it ----------------------------------------------------------------------------------------------


def hf_attention_mask(
    forest: PrefixForest, attn_implementation: str | None, dtype: torch.dtype, *, window: int | None = None
) -> Tensor:
    """Return the mask [1, 1, T, T] for an attention implementation of transformers, on the forest's device.

    "sdpa" and "prefix_tree" take bool, True where a query sees a key. "eager" adds the mask to the scores: `dtype`, the
    model's, 0 where a query sees a key and the smallest number of the dtype elsewhere. `window`: as in `dense_mask`;
    transformers adds no window to such a mask.

    Raises: AttentionRouteError (E802) for any other route, and for a dtype that is not floating.
    """
    return for_route(dense_mask(forest, window=window), attn_implementation, dtype)


def for_route(allowed: Tensor, implementation: str | None, dtype: torch.dtype) -> Tensor:
    """Return a mask bool [T, T] in the form of an attention implementation; see `hf_attention_mask`."""
    refuse_other_routes(implementation)
    if implementation in ("sdpa", "prefix_tree"):
        return allowed[None, None]
    if not dtype.is_floating_point:
        raise AttentionRouteError(
            f'a mask for "eager" is added to the scores; got {dtype}, expected the model\'s dtype'
        )
    added = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return added.masked_fill_(~allowed, torch.finfo(dtype).min)[None, None]


def refuse_other_routes(implementation: str | None) -> None:
    """Raise AttentionRouteError unless an attention implementation takes a dense mask."""
    if implementation not in ("sdpa", "eager", "prefix_tree"):
        known = (why for name, why in _OTHER_ROUTES.items() if name in str(implementation))
        why = next(known, "is not known here, and may leave the mask out")
        raise AttentionRouteError(f"attn_implementation={implementation!r} {why}: {_USE}")


def architecture_of(forest: PrefixForest, model: nn.Module) -> Architecture:
    """Return the properties of a model that decide the mask of a forest. Refuses and warns like `architecture`."""
    lengths = forest.sample_lengths
    return architecture(model, int(lengths.max()), int(lengths.min()), len(forest.input_ids))


def masks_of(traits: Architecture, positions: Tensor, allowed: Tensor) -> Tensor | dict[str, Tensor]:
    """Return one mask if it fits all layers, else one for each layer type."""
    windows = windows_of(traits, positions)
    masks = {}
    for window in set(windows.values()):
        seen = allowed if window is None else allowed & near(positions, window)
        masks[window] = for_route(seen, traits.implementation, traits.dtype)
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {kind: masks[window] for kind, window in windows.items()}


# --- masks made here, so that a check need not compute them again -----------------------------------------------------

# By mask, weakly: its forest, its window, and the version counters of both. So a check of a mask costs no T^2 values.
_made: Any = WeakIdKeyDictionary()


def remember(forest: PrefixForest, traits: Architecture, masks: Tensor | dict[str, Tensor]) -> None:
    """Note that masks of `masks_of` belong to a forest, for as long as no tensor of either is changed in place."""
    windows = windows_of(traits, forest.position_ids)
    for kind, window in windows.items():
        mask = masks[kind] if isinstance(masks, dict) else masks
        if (versions := _versions(forest, mask)) is not None:
            _made[mask] = (weakref.ref(forest), window, versions)


def is_remembered(forest: PrefixForest, mask: Tensor, window: int | None) -> bool:
    """Return whether a mask is an object that `model_inputs` made for this forest and window, and is unchanged.

    A change in place raises the version counter of a tensor, also through a view. Only writes through `mask.data` or
    memory shared with numpy do not.
    """
    found = _made.get(mask)
    return found is not None and (found[0](), *found[1:]) == (forest, window, _versions(forest, mask))


def _versions(forest: PrefixForest, mask: Tensor) -> tuple[int, ...] | None:
    """Return the version counters of a mask and its forest; None in inference mode, where tensors have none."""
    tensors = (mask, forest.subtree_end, forest.position_ids)
    return None if any(each.is_inference() for each in tensors) else tuple(each._version for each in tensors)


def windows_of(traits: Architecture, positions: Tensor) -> dict[str, int | None]:
    """Return the windows by layer type; None for a window that no sample exceeds."""
    longest = int(positions.max()) + 1
    return {kind: None if window is None or longest <= window else window for kind, window in traits.windows.items()}


# --- FlexAttention's BlockMask in closed form -------------------------------------------------------------------------


def block_mask(
    forest: PrefixForest, *, block_size: int = 128, window: int | None = None, forward_only: bool = False
) -> BlockMask:
    """Return the mask of a forest for `flex_attention`, [1, 1, T, T] in blocks, on the forest's device.

    Equals `create_block_mask` of the same rule, in T + (T / block_size)^2 steps and values in place of T^2. A row of
    131,072 tokens has 1,024 x 1,024 blocks of 128.

    Args:
        forest: on the device of the model: `BlockMask.to` does not move the tensors that the mask captures.
        block_size: rows and columns of a block; 128 is what FlexAttention's kernels expect.
        window: as in `dense_mask`.
        forward_only: make the mask on a CPU too, where FlexAttention runs forward but not backward.

    Raises:
        TreeError (E801): the forest is on a CPU and not forward_only; block_size or window is below 1.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if block_size < 1 or (window is not None and window < 1):
        raise TreeError(f"block_size is {block_size} and window {window}; expected at least 1, or no window")
    device, rows = forest.input_ids.device, len(forest.input_ids)
    if device.type == "cpu" and not forward_only:
        raise TreeError(
            "the forest is on the CPU, where FlexAttention has no backward pass; expected forest.to('cuda'). To train "
            'on a CPU use the attention "prefix_tree" or "sdpa"; to run forward only, pass forward_only=True'
        )
    blocks = -(-rows // block_size)
    extra = torch.arange(rows, blocks * block_size, device=device)
    ends, positions = torch.cat([forest.subtree_end, extra + 1]), pad(forest.position_ids, (0, len(extra)))
    visible, full = _blocks(ends.view(blocks, block_size), rows)
    if window is not None:
        begins = pad(window_begins(forest, window) // block_size, (0, len(extra)), value=blocks)
        visible &= _in_window(begins.view(blocks, block_size), ends.view(blocks, block_size))
        high, low = positions.view(blocks, block_size).amax(1), positions.view(blocks, block_size).amin(1)
        full &= high[:, None] - low < window

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # The captured arrays are as long as the blocks: kernels ask for rows after the last one too.
        seen = (k <= q) & (q < ends[k])
        return seen if window is None else seen & (positions[q] < positions[k] + window)

    partial, whole = _ordered(visible & ~full), _ordered(full)
    return BlockMask.from_kv_blocks(*partial, *whole, block_size, mask_mod, (rows, rows))


def block_masks(forest: PrefixForest, traits: Architecture) -> Any:
    """Return one `block_mask` if it fits all layers of a model of "flex_attention", else a dict by layer type.

    Raises: AttentionRouteError (E802) for a model on a CPU.
    """
    if traits.device.type == "cpu":
        raise AttentionRouteError(
            'attn_implementation="flex_attention" takes a BlockMask, and on a CPU FlexAttention has no backward pass: '
            'use attn_implementation="sdpa" (model.set_attn_implementation("sdpa"))'
        )
    there, windows = forest.to(traits.device), windows_of(traits, forest.position_ids)
    masks = {window: block_mask(there, window=window) for window in set(windows.values())}
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {kind: masks[window] for kind, window in windows.items()}


def _blocks(ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return which blocks have a visible pair, and which have visible pairs only: bool [query blocks, key blocks].

    ends: [blocks, block_size], subtree_end.
    """
    blocks, size = ends.shape
    block = torch.arange(blocks, device=ends.device)
    first, last = (block * size)[:, None], (block * size + size - 1)[:, None]
    before, same = block < block[:, None], block == block[:, None]
    visible = same | (before & (ends.amax(1) > first))
    full = (before & (ends.amin(1) > last)) | (same & (size == 1))
    return visible, full & (last < rows)


def _in_window(begins: Tensor, ends: Tensor) -> Tensor:
    """Return whether a visible block has a pair within the window: bool [query blocks, key blocks].

    begins: [blocks, block_size], the block in which the window of each query begins.
    """
    blocks, size = begins.shape
    # A query with an ancestor in kb sees one there if its window begins in kb or before. The queries of qb with such an
    # ancestor are a beginning of qb: those up to `last`, where the longest subtree of kb ends.
    earliest = begins.cummin(1).values
    block = torch.arange(blocks, device=begins.device)
    last = (ends.amax(1) - 1 - (block * size)[:, None]).clamp(0, size - 1)  # [blocks of queries, of keys]
    return earliest.gather(1, last) <= block


def window_begins(forest: PrefixForest, window: int) -> Tensor:
    """Return the first row that each row sees within a window, int64 [T]: an ancestor, or the row itself."""
    device = forest.input_ids.device
    begins = torch.arange(len(forest.input_ids), device=device)
    wanted = (forest.position_ids - (window - 1)).clamp(min=0)  # positions
    starts, depths = forest.node_starts, forest.position_ids[forest.node_starts]
    left = torch.arange(forest.num_tokens, device=device)  # rows whose window begins above the nodes in `nodes`
    nodes = torch.arange(len(starts), device=device).repeat_interleave(forest.node_lengths)
    while len(left):
        inside = wanted[left] >= depths[nodes]
        begins[left[inside]] = (starts - depths)[nodes[inside]] + wanted[left[inside]]
        left, nodes = left[~inside], forest.node_parents[nodes[~inside]]
    return begins


def _ordered(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, and all key blocks with these first: int32."""
    order = dense.int().argsort(stable=True, dim=-1, descending=True).int()
    return dense.sum(-1, dtype=torch.int32)[None, None], order[None, None]
