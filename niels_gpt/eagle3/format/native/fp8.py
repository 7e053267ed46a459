"""Auxiliary states in eight bits: float8_e4m3fn, with one float32 scale for each token and layer.

A value is the stored number times its scale. The scale maps the row's largest magnitude to 448, the largest number of
float8_e4m3fn. So a value is off by at most 1/16 of itself, or, far below the row's largest, by 2**-18 of the largest.
"""

from __future__ import annotations

import torch

_LARGEST = 448.0  # torch.finfo(torch.float8_e4m3fn).max


def quantized(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states as float8_e4m3fn [..., H], and their scales, float32 [...].

    states: [..., H] of any float dtype, on any device. A row of zeros has the scale 0.
    Raises: ValueError for values that are not finite.
    """
    values = states.float()
    scales = values.abs().amax(dim=-1) / _LARGEST
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("hidden states with values that are not finite: expected finite ones, to be stored as fp8")
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    scaled = (values / divisors.unsqueeze(-1)).clamp_(-_LARGEST, _LARGEST)  # a cast of what is above would give NaN
    return scaled.to(torch.float8_e4m3fn), scales


def dequantized(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return the states [..., H] of a dtype: the product in float32, rounded once.

    values: float8_e4m3fn [..., H]. scales: float32 [...].
    """
    return values.float().mul_(scales.unsqueeze(-1)).to(dtype)
