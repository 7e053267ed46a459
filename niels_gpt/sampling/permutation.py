"""A pseudo-random permutation of 0 .. N - 1, computed for any single index from a few keys: the order of an epoch.

A balanced Feistel network over the next domain of an even number of bits, 4 ** h >= N, walked until the result is below
N (cycle walking). Eight rounds; round i maps the halves (left, right) to (right, left ^ F), where F is the lower h bits
of mix(right + mix(keys[i] + tweak)), and `mix` is the finalizer of SplitMix64. This is a format: if it changes, a saved
position means another sample, and STREAM_VERSION in epochs.py must be raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ROUNDS = 8
_SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def random_keys(seed: int, count: int, *, purpose: int = 0) -> NDArray[np.uint64]:
    """Return `count` keys, uint64 [count], drawn from a torch.Generator with that seed.

    torch's CPU generator uses only the lower 32 bits of a seed; the upper ones are hashed and added.
    purpose: another purpose gives other keys for the same seed.
    Raises: ValueError for a seed that torch.Generator does not accept.
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed={seed!r}: expected an integer from -2**63 to 2**64 - 1")
    generator = torch.Generator().manual_seed(seed)
    drawn: NDArray[np.int64] = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).numpy()
    rest = mix(np.array([seed % 2**64 >> 32, purpose], dtype=np.uint64))  # mix(0) is 0
    keys: NDArray[np.uint64] = drawn.view(np.uint64) + rest[0] + rest[1]
    return keys


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a bijective hash of each 64-bit number; every bit of the input affects every bit of the result."""
    mixed = values ^ (values >> _SHIFTS[0])
    mixed *= _FACTORS[0]
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _FACTORS[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


def permute(
    indices: NDArray[np.int64], size: int, keys: NDArray[np.uint64], tweaks: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the image of each index under the permutation of 0 .. size - 1 given by `keys` and its tweak: int64 [n].

    indices: [n], each from 0 to size - 1. keys: uint64 [ROUNDS]. tweaks: [n] or [1], such as the number of the epoch.
    The same keys and tweak always give the same permutation.
    """
    # Any single index, without a stored order: ranks, workers and a resumed run agree by the keys, in O(1) memory. The
    # domain is less than 4 * size, so a walk takes under four steps on average.
    half = max(1, (int(size - 1).bit_length() + 1) // 2)
    low, high = (int(tweaks.min()), int(tweaks.max())) if len(tweaks) else (0, 0)
    if (high - low + 1) << half + 2 <= len(indices):  # F of every half, looked up, takes a third of the time or less
        tables = _tables(keys, low, high, half)
        tags = tweaks - low << half
        return _walked(indices, size, tags, lambda values, tags: _looked_up(values, tables, tags, half))
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    round_keys = mix(keys[:, None] + tweaks.astype(np.uint64))
    return _walked(indices.astype(np.uint64), size, round_keys, lambda values, of: _encrypted(values, of, bits, mask))


def _walked(values: Any, size: int, tweaks: Any, encrypted: Callable[[Any, Any], Any]) -> NDArray[np.int64]:
    """Return encrypted(values, tweaks), repeated until each is below size. tweaks: [..., n], or [..., 1] for all."""
    images: NDArray[Any] = encrypted(values, tweaks)
    outside = (images >= size).nonzero()[0]
    while len(outside):  # at most three quarters of them, so that this ends soon
        images[outside] = walked = encrypted(images[outside], tweaks if tweaks.shape[-1] == 1 else tweaks[..., outside])
        outside = outside[walked >= size]
    return images.astype(np.int64, copy=False)


def _encrypted(
    values: NDArray[np.uint64], round_keys: NDArray[np.uint64], bits: np.uint64, mask: np.uint64
) -> NDArray[np.uint64]:
    left, right = values >> bits, values & mask
    for key in round_keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return (left << bits) | right


def _tables(keys: NDArray[np.uint64], low: int, high: int, half: int) -> NDArray[np.int64]:
    """Return F of each round, tweak from low to high, and half: int64 [ROUNDS, tweaks * 2 ** half]."""
    round_keys = mix(keys[:, None] + np.arange(low, high + 1).astype(np.uint64))
    halves = np.arange(2**half, dtype=np.uint64)
    hashed = mix(round_keys[:, :, None] + halves) & halves[-1]
    tables: NDArray[np.int64] = hashed.reshape(len(keys), -1).view(np.int64)
    return tables


def _looked_up(values: NDArray[np.int64], tables: NDArray[np.int64], tags: NDArray[np.int64], half: int) -> Any:
    """Return the same as `_encrypted`. tags: the tweak of each value, in bits above a half, which rounds keep."""
    mask = 2**half - 1
    left, right = values >> half | tags, values & mask | tags
    for table in tables:
        left, right = right, left ^ table.take(right)
    return (left & mask) << half | right & mask
