"""Token hit rates of the eviction policies on a request trace, in one prefix cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moonpool.core.use import Use
from moonpool.kvstore.eviction.make import make_policy
from moonpool.loadgen.trace import read_trace
from moonpool.sim.one_cache import FULL_BLOCKS_ONLY, Cache, turns

POLICIES = ("lru", "lfu", "length_aware", "s3fifo", "hazard")
SIZES = (1_000_000, 3_000_000, 10_000_000)


def evict(
    *, trace: str, policies: Sequence[str] = POLICIES, sizes: Sequence[int] = SIZES, requests: int | None = None
) -> dict[str, Any]:
    """Share of prompt tokens found in a cache of ``sizes`` tokens, by policy; ``requests``: only the first so many."""
    read = read_trace(Path(trace))
    rows, block = read.rows[:requests], read.block_tokens
    uses = [Use(turn=turn, prompt_tokens=row.input_length) for row, turn in zip(rows, turns(rows, block), strict=True)]
    figures: dict[str, Any] = {"trace": Path(trace).name, "requests": len(rows), "block_tokens": block}
    for name in policies:
        for size in sizes:
            begun = time.perf_counter()
            cache = Cache(make_policy(name), size // block, block, whole=name in FULL_BLOCKS_ONLY)
            hits = sum(cache.request(row, use) for row, use in zip(rows, uses, strict=True))
            figures[f"{name}_{size / 1e6:g}M"] = hits / sum(row.input_length for row in rows)
            print(f"{name} {size}: {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    return figures
