"""The attention mask of rows that hold several segments: each token sees its own segment, up to itself.

    model(
        input_ids=batch.x,
        position_ids=batch.position_ids,
        attention_mask=block_causal_mask(batch.cu_seqlens, batch.x.shape, dtype=model.dtype),
        use_cache=False,
    )

is for models of transformers with attention "sdpa" or "eager". FlashAttention takes the segments in place of a mask:

    cu, longest = batch.cu_seqlens, batch.max_seqlen
    flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)    # q, k, v: [B * T, heads, size of a head]
    model(
        input_ids=batch.x,
        position_ids=batch.position_ids,
        cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=longest, max_length_k=longest,
        use_cache=False,
    )

These go wrong without an error in transformers 5.23. position_ids without a mask are read as packed rows by many
models, but not with use_cache=True, which is the default, not by FlashAttention with more than one row, and not by
gpt_oss, OPT, Falcon and MPT. "eager" adds a boolean mask to the scores. A mask of four dimensions switches a sliding
window off. And no mask keeps segments apart in recurrent layers (Mamba, the linear attention of Qwen3-Next).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from niels_gpt.storage.meta_json import checked_int, shortened


def block_causal_mask(
    cu_seqlens: Tensor | None,
    shape: tuple[int, int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
) -> Tensor:
    """Return `dtype` [B, 1, T, T] on the device of cu_seqlens: 0 where token i sees token j, else the least number.

    It is added to the scores, as every model of transformers does with a mask of four dimensions. With dtype=torch.bool
    it is True where i sees j, only for `scaled_dot_product_attention`: "eager" attention would add 1 for True.
    Padding is a segment as others are, so that each token sees one token at least.
    It takes B * T * T elements of `dtype`, and one more byte for each while it is made: 1.1 GB for 8 rows of 8,192 in
    bfloat16, and 1.6 GB meanwhile. FlashAttention takes no such memory.

    cu_seqlens: int [K + 1], as in a batch: where segments begin, row after row, and B * T; no segment crosses two rows.
    shape: (B, T); None: one row of all tokens.
    dtype: the model's; "sdpa" also takes float32 with any model, and refuses other differences.
    sliding_window: i sees only its last `sliding_window` tokens, itself included. A mask of four dimensions replaces
        the window of a model of transformers: pass `config.sliding_window` where all of its layers have one; where some
        have, pass {"full_attention": mask, "sliding_attention": mask with the window} as attention_mask.
    Raises: ValueError for other numbers, which it reads from the device.
    """
    starts = _checked_starts(cu_seqlens, shape)
    rows, T = shape or (1, int(starts[-1]))
    if starts.is_cpu and sliding_window is None and dtype != torch.bool:
        return _filled(starts.tolist(), rows, T, dtype)
    begins = torch.repeat_interleave(starts[:-1], starts.diff()).view(rows, T) % max(T, 1)
    tokens = torch.arange(T, device=starts.device)
    if sliding_window is not None:
        begins = begins.maximum(tokens - checked_int("sliding_window", sliding_window, 1) + 1)
    sees = tokens >= begins[:, None, :, None]
    sees &= tokens <= tokens[:, None]
    if dtype == torch.bool:
        return sees
    mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
    return mask.masked_fill_(sees.logical_not_(), torch.finfo(dtype).min)


def _filled(starts: list[int], rows: int, T: int, dtype: torch.dtype) -> Tensor:
    """Return the mask, written once: the least number, and 0 in each segment. Of one row, a tenth of the time."""
    mask = torch.full((rows, 1, T, T), torch.finfo(dtype).min, dtype=dtype)
    for begin, end in pairwise(starts):
        row, first = divmod(begin, T)
        of_segment = slice(first, first + end - begin)
        mask[row, 0, of_segment, of_segment].triu_(1)
    return mask


def _checked_starts(cu_seqlens: Tensor | None, shape: tuple[int, int] | None) -> Tensor:
    """Return cu_seqlens as int64. Raises: ValueError unless it is the segments of rows of that shape."""
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: None, expected batch.cu_seqlens of PackedStream or EpochStream(documents=True)")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        found = f"{str(cu_seqlens.dtype).removeprefix('torch.')} {list(cu_seqlens.shape)}"
        raise ValueError(f"cu_seqlens: {found}, expected int32 or int64 [segments + 1]")
    starts = cu_seqlens.to(torch.int64)
    numbers = starts.tolist()
    if numbers[0] or any(one >= other for one, other in pairwise(numbers)):
        raise ValueError(f"cu_seqlens: {shortened(numbers)}, expected numbers that begin at 0 and ascend")
    rows, T = shape or (1, numbers[-1])
    if numbers[-1] != rows * T:
        raise ValueError(f"cu_seqlens: ends at {numbers[-1]}, expected {rows * T}, the tokens of {rows} rows of {T}")
    if missing := set(range(0, rows * T, max(T, 1))).difference(numbers):
        row = min(missing) // T
        raise ValueError(f"cu_seqlens: no segment begins with row {row}, at {row * T}: a segment lies in one row")
    return starts
