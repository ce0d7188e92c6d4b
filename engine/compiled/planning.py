"""Who attends to what in one step: rows of tokens become tasks, the heaviest first.

A unit is a block of queries of one row with one K/V head. A unit that is more than a share of all the work is split into
ranges of keys, so that a single long row still keeps every thread busy; what it computes stays the same, bit by bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moonpool.engine.compiled.attention import KEY_RANGE
from moonpool.engine.compiled.features import QUERY_ROWS
from moonpool.engine.compiled.lanes import FLAGS

_PARTS = 4  # units heavier than 1 / (threads * this) of all work are split


def most_tasks(tokens: int, kv_heads: int, longest: int, threads: int) -> int:
    """An upper bound for a step of ``tokens`` tokens, none of them beyond position ``longest``."""
    return tokens * kv_heads + _most_split(threads) * ranges_of(longest)


def most_partials(head_dim: int, longest: int, threads: int) -> int:
    """float32 that split units may need."""
    return _most_split(threads) * ranges_of(longest) * QUERY_ROWS * (head_dim + 2)


def ranges_of(keys: int) -> int:
    return -(-keys // KEY_RANGE)


def _most_split(threads: int) -> int:
    return threads * _PARTS


@njit(**FLAGS)
def place_tokens(starts, counts, offsets, tables, page_bytes, block_tokens, row_bytes, positions, places):
    """Position of every token of the batch, and where its rows go in a page layer. All arrays int64."""
    at = 0
    for i in range(len(starts)):
        for position in range(starts[i], starts[i] + counts[i]):
            page = tables[offsets[i] + position // block_tokens]
            positions[at] = position
            places[at] = page * page_bytes + position % block_tokens * row_bytes
            at += 1


@njit(**FLAGS)
def plan_tasks(starts, counts, offsets, kv_heads, group, head_dim, threads, tasks, merges):
    """Fill ``tasks`` and ``merges``; returns (tasks, merges, float32 of partial results)."""
    block = max(QUERY_ROWS // group, 1)
    everything = np.int64(0)
    for i in range(len(starts)):
        for begin in range(0, counts[i], block):
            n = min(block, counts[i] - begin)
            everything += (starts[i] + begin + n) * n * kv_heads
    share = everything // (threads * _PARTS)
    made, merged, partial, token = 0, 0, 0, 0
    for i in range(len(starts)):
        for begin in range(0, counts[i], block):
            n = min(block, counts[i] - begin)
            end = starts[i] + begin + n
            split = threads > 1 and end > KEY_RANGE and end * n > share
            for head in range(kv_heads):
                if split:
                    merge = merges[merged]
                    merge.token, merge.count, merge.head = token + begin, n, head
                    merge.ranges, merge.partial = (end + KEY_RANGE - 1) // KEY_RANGE, partial
                    merged += 1
                for key in range(0, end, KEY_RANGE if split else end):
                    task = tasks[made]
                    task.token, task.count, task.position, task.head = token + begin, n, starts[i] + begin, head
                    task.begin, task.end = key, min(key + KEY_RANGE, end) if split else end
                    task.table, task.partial = offsets[i], -1
                    if split:
                        task.partial = partial
                        partial += n * group * (head_dim + 2)
                    made += 1
        token += counts[i]
    return made, merged, partial


def heaviest_first(tasks: NDArray[Any]) -> NDArray[np.int64]:
    """Indices of ``tasks`` by falling work."""
    return np.argsort((tasks["begin"] - tasks["end"]) * tasks["count"], kind="stable")
