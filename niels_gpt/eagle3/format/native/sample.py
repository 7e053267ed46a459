"""One sample of a cache in the native form, as it is stored: raw, unshifted and unpadded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.eagle3.format.native.rows import target_positions


@dataclass(frozen=True, eq=False)
class NativeSample:
    """L tokens, the auxiliary states of the first A positions, and R target rows, at the positions `positions`."""

    input_ids: NDArray[np.uint32]
    """[L]"""
    loss_mask: NDArray[np.bool_]
    """[L]"""
    aux_hidden_states: torch.Tensor
    """[A, K, H] of the stored dtype: outputs of K blocks at the positions 0 to A - 1; A is the last target row's
    position, or 0 without any."""
    aux_scales: torch.Tensor | None
    """float32 [A, K] where the auxiliary states are float8_e4m3fn: a value times its scale; None elsewhere."""
    last_hidden_states: torch.Tensor
    """[R, H] of the stored dtype"""
    log_normalizers: torch.Tensor
    """float32 [R]: logsumexp over all logits of the target"""
    argmax_ids: torch.Tensor
    """int64 [R]: the target's most probable token"""

    @property
    def positions(self) -> NDArray[np.int64]:
        """The positions of the target rows, rising: int64 [R]."""
        return target_positions(self.loss_mask)
