"""Bytes in words for operators."""

from __future__ import annotations


def sized(n: int) -> str:
    """``n`` bytes in MiB, or in KiB where that would be nearly none of them."""
    return f"{n / (1 << 20):.1f} MiB" if n == 0 or n >= 1 << 20 else f"{n / (1 << 10):.1f} KiB"
