"""Arithmetic on pieces: bounds, order, neighbours. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import Bug
from moonpool.core.landing import Region
from moonpool.kvstore.transfer.carrier import LENGTH, MEMORY, OFFSET, REGION, TARGET, Endpoint, Pieces

MAX_REGIONS = 1 << 16


class Extents:
    """Where numbered stretches of memory begin and how long they are, as lookup tables by number (length 0: none)."""

    def __init__(self, begins: Mapping[int, int], sizes: Mapping[int, int]) -> None:
        count = max(begins, default=-1) + 1
        if not 0 <= min(begins, default=0) <= count <= MAX_REGIONS:
            raise Bug(f"region numbers {sorted(begins)[:4]}... are outside 0 to {MAX_REGIONS - 1}")
        self.begin = np.zeros(count, dtype=np.int64)
        self.size = np.zeros(count, dtype=np.int64)
        for number, begin in begins.items():
            self.begin[number] = begin
            self.size[number] = sizes[number]

    def require(self, number: NDArray[np.int64], offset: NDArray[np.int64], length: NDArray[np.int64], what: str) -> None:
        """Bug, naming the first piece that does not lie wholly inside its stretch."""
        known = (number >= 0) & (number < len(self.size))
        limit = np.where(known, self.size[np.where(known, number, 0)], 0) if len(self.size) else np.zeros_like(number)
        bad = (offset < 0) | (length <= 0) | (offset > limit - length)
        if bad.any():
            i = int(bad.argmax())
            raise Bug(
                f"piece {i}: {int(length[i])} bytes at {int(offset[i])} leave {what} {int(number[i])} ({int(limit[i])} bytes)"
            )


def memory_extents(memories: Sequence[NDArray[np.uint8]]) -> Extents:
    """Source memories by their place in ``memories``; they must be flat and contiguous (ValueError)."""
    for i, m in enumerate(memories):
        if m.ndim != 1 or m.dtype != np.uint8 or not m.flags.c_contiguous:
            raise ValueError(f"memory {i}: flat contiguous uint8 is needed, not {m.dtype} of shape {m.shape}")
    return Extents({i: m.ctypes.data for i, m in enumerate(memories)}, {i: m.size for i, m in enumerate(memories)})


def endpoint_extents(target: Endpoint) -> Extents:
    """The target's regions by number, at their addresses in the receiver."""
    if len(target.bases) != len(target.regions):
        raise Bug(f"endpoint {target.agent_name}: {len(target.bases)} addresses for {len(target.regions)} regions")
    return Extents({r.number: base for r, base in zip(target.regions, target.bases, strict=True)}, region_sizes(target.regions))


def region_sizes(regions: Sequence[Region]) -> dict[int, int]:
    return {r.number: r.size for r in regions}


def require_inside(pieces: Pieces, memories: Extents, regions: Extents) -> None:
    """Bug unless every piece reads inside its memory and writes inside its region."""
    memories.require(pieces[:, MEMORY], pieces[:, OFFSET], pieces[:, LENGTH], "source memory")
    regions.require(pieces[:, REGION], pieces[:, TARGET], pieces[:, LENGTH], "region")


def coalesce(pieces: Pieces) -> Pieces:
    """The same bytes in as few pieces as possible: sorted by source, neighbours on both sides joined.

    A carrier pays by the piece (over TCP 64 joined pieces take half the time of 64 single ones).
    """
    if len(pieces) < 2:
        return pieces
    pieces = pieces[np.lexsort((pieces[:, OFFSET], pieces[:, MEMORY]))]
    before, after = pieces[:-1], pieces[1:]
    joined = (
        (before[:, MEMORY] == after[:, MEMORY])
        & (before[:, REGION] == after[:, REGION])
        & (before[:, OFFSET] + before[:, LENGTH] == after[:, OFFSET])
        & (before[:, TARGET] + before[:, LENGTH] == after[:, TARGET])
    )
    if not joined.any():
        return pieces
    heads = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    out = pieces[heads].copy()
    out[:, LENGTH] = np.add.reduceat(pieces[:, LENGTH], heads)
    return out
