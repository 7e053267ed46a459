"""Numbers as people read them: 14,225, 5.8M; 512 B, 32 KiB, 1.5 GiB."""

from __future__ import annotations

_EXACT = 100_000
_TOKENS = ((10**9, "B"), (10**6, "M"), (10**3, "k"))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def count_text(count: float) -> str:
    """Return a count: exact below 100,000, else three digits and k, M or B (10**9)."""
    if abs(count) < _EXACT:
        return f"{count:,.0f}"
    size, unit = next((size, unit) for size, unit in _TOKENS if round(abs(count) / size, 2) >= 1)
    return f"{float(f'{count / size:.3g}'):,g}{unit}"


def number_of(count: int, thing: str) -> str:
    """Return a rounded count and the thing counted: "1 cache", "205M tokens"."""
    return f"{count_text(count)} {thing}{'' if count == 1 else 's'}"


def many(count: int, thing: str) -> str:
    """Return a count with every digit and the thing counted: "1 node", "250,000 nodes"."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def share_text(share: float) -> str:
    """Return a share from 0 to 1 as per cent with three digits: "0.4 %", "72.8 %"."""
    return f"{float(f'{100 * share:.3g}'):,g} %"


def size_text(num_bytes: int) -> str:
    """Return a number of bytes with a binary unit and at most one decimal: "512 B", "1.5 GiB"."""
    size, unit = float(num_bytes), 0
    while round(size, 1) >= 1024 and unit < len(_BYTES) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.1f}".removesuffix(".0") + f" {_BYTES[unit]}"
