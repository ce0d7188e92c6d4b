"""Small request traces for the simulator, drawn with a seed: conversations that grow, prompts nobody repeats."""

from __future__ import annotations

import numpy as np

from moonpool.loadgen.trace import TraceRow
from moonpool.sim.cluster import SimCluster, read_cluster

BLOCK = 512


def conversations(n: int, *, seed: int = 0, every_s: float = 0.5, tokens: int = 6_000, answers: int = 60) -> list[TraceRow]:
    """``n`` requests, one each ``every_s`` on average; two thirds go on with a conversation. All share their first block."""
    draw = np.random.default_rng(seed)
    fresh = 1
    open_: list[list[int]] = []
    rows: list[TraceRow] = []
    at = 0.0
    for number in range(n):
        at += float(draw.exponential(every_s))
        if open_ and draw.random() < 0.66:
            ids = open_[int(draw.integers(len(open_)))]
        else:
            ids = [0]
            open_.append(ids)
        for _ in range(1 + int(draw.exponential(tokens / BLOCK / 2))):
            ids.append(fresh)
            fresh += 1
        tail = int(draw.integers(1, BLOCK))
        fresh += 1
        length = len(ids) * BLOCK + tail
        rows.append(TraceRow(at * 1e3, length, 1 + int(draw.exponential(answers)), (*ids, fresh), number + 1))
        fresh += 1
    return rows


def small_cluster(**values: object) -> SimCluster:
    """Two prefill and two decode nodes with room for little."""
    base = read_cluster("llama70b_8p8d").resized(prefill=2, decode=2)
    prefill, decode = base.groups
    groups = (
        prefill.model_copy(update={"pool_tokens": 200_000, "device_tokens": 200_000}),
        decode.model_copy(update={"pool_tokens": 200_000, "device_tokens": 200_000}),
    )
    return base.changed(**{"groups": groups, **values})
