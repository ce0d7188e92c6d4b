"""Random numbers that depend on a seed and a counter alone: the same decisions in every run, and no state."""

from __future__ import annotations

MASK = (1 << 64) - 1


def draw(seed: int, number: int, below: int) -> int:
    """The ``number``-th draw from [0, below). The mixer of SplitMix64 (Steele, Lea and Flood, 2014); the rest of a division
    by so small a ``below`` is even enough."""
    x = (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xD1B54A32D192ED03) & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    return (x ^ (x >> 31)) % below
