"""block_mask: FlexAttention's BlockMask of a folded row in closed form, without a mask of T x T values.

    key block kb, query block qb, kb < qb, qb having the rows q_lo to q_hi:
    visible    max of subtree_end over kb > q_lo
    full       min of subtree_end over kb > q_hi

A block of the diagonal is visible and not full, and the last block of queries is not full if it is cut off. With a
window, a pair must also be near: all pairs are if the extremes of their positions are; one is if the last query of qb
that has an ancestor in kb, or one before it, has its window begin in kb or before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from niels_gpt.prefix_tree.backends.architectures import Architecture, AttentionRouteError
from niels_gpt.prefix_tree.backends.masks import windows_of
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.storage.errors import TreeError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def block_mask(
    forest: PrefixForest, *, block_size: int = 128, window: int | None = None, forward_only: bool = False
) -> BlockMask:
    """Return the mask of a forest for `flex_attention`, [1, 1, T, T] in blocks, on the forest's device.

    Equal to `create_block_mask` of the same rule, in T + (T / block_size)^2 steps and values in place of T^2. A row of
    131,072 tokens has 1,024 x 1,024 blocks of 128.

    Args:
        forest: on the device of the model: `BlockMask.to` does not move what the rule of a mask has captured.
        block_size: rows and columns of a block; 128 is what FlexAttention's kernels expect.
        window: as in `dense_mask`.
        forward_only: make the mask on a CPU too, where FlexAttention runs forward but not backward.

    Raises:
        ValueError: the forest is on a CPU and not forward_only; block_size or window is below 1.
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
        # The captured arrays are as long as the blocks: kernels ask for rows behind the last one too.
        seen = (k <= q) & (q < ends[k])
        return seen if window is None else seen & (positions[q] < positions[k] + window)

    partial, whole = _ordered(visible & ~full), _ordered(full)
    return BlockMask.from_kv_blocks(*partial, *whole, block_size, mask_mod, (rows, rows))


def block_masks(forest: PrefixForest, traits: Architecture) -> Any:
    """Return the `block_mask` that fits all layers of a model of "flex_attention", else a dict of one by layer type.

    Raises: AttentionRouteError for a model on a CPU.
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
    """Return which blocks have a pair that sees, and which see in all pairs: bool [blocks of queries, of keys]."""
    blocks, size = ends.shape
    block = torch.arange(blocks, device=ends.device)
    first, last = (block * size)[:, None], (block * size + size - 1)[:, None]
    before, same = block < block[:, None], block == block[:, None]
    visible = same | (before & (ends.amax(1) > first))
    full = (before & (ends.amin(1) > last)) | (same & (size == 1))
    return visible, full & (last < rows)


def _in_window(begins: Tensor, ends: Tensor) -> Tensor:
    """Return bool [blocks of queries, of keys]: whether a visible block has a pair within the window.

    begins: [blocks, block_size] the block in which the window of each query begins. A query whose window begins in an
    earlier block than kb, or in kb, sees all its ancestors in kb; the queries that have one are those up to the last.
    """
    blocks, size = begins.shape
    earliest = begins.cummin(1).values  # of the queries of a block up to each one
    block = torch.arange(blocks, device=begins.device)
    last = (ends.amax(1) - 1 - (block * size)[:, None]).clamp(0, size - 1)  # [blocks of queries, of keys]
    return earliest.gather(1, last) <= block


def window_begins(forest: PrefixForest, window: int) -> Tensor:
    """Return the first row that each row sees within a window, int64 [T]: an ancestor, or the row itself."""
    device = forest.input_ids.device
    begins = torch.arange(len(forest.input_ids), device=device)
    wanted = (forest.position_ids - (window - 1)).clamp(min=0)  # positions
    starts, depths = forest.node_starts, forest.position_ids[forest.node_starts]
    left = torch.arange(forest.num_tokens, device=device)  # rows whose ancestor is above the nodes looked at
    nodes = torch.arange(len(starts), device=device).repeat_interleave(forest.node_lengths)
    while len(left):
        inside = wanted[left] >= depths[nodes]
        begins[left[inside]] = (starts - depths)[nodes[inside]] + wanted[left[inside]]
        left, nodes = left[~inside], forest.node_parents[nodes[~inside]]
    return begins


def _ordered(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each query block has, and their numbers, those it has not at the end: int32."""
    order = dense.int().argsort(stable=True, dim=-1, descending=True).int()
    return dense.sum(-1, dtype=torch.int32)[None, None], order[None, None]
