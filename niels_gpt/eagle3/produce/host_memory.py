"""A GPU's tensors brought to the CPU: into pinned memory, which torch keeps and gives to the next batch.

New memory of the CPU gets its pages one by one while it is filled, which takes longer than the copy itself: so a native
cache took as long again as the target's forward passes. Pinned memory is as large as the batches that wait for the
writer, rounded up to powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU; one that is there already is returned itself."""
    if not tensor.is_cuda:
        return tensor.cpu()
    return empty_on_cpu(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def empty_on_cpu(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory of the CPU for what comes from a device; its values are unset."""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")
