"""Where a thread keeps what attention works on. Rows are (query, query head of the group), query by query."""

from __future__ import annotations

from numba import njit

from moonpool.engine.compiled import tiles
from moonpool.engine.compiled.features import QUERY_ROWS
from moonpool.engine.compiled.lanes import INLINE

KEY_BLOCK = 128  # keys that are packed together
SCORE_ROWS = 96  # rows whose scores with a block there is room for


def scratch_bytes(head_dim: int) -> int:
    """Of one thread; in the order of the functions below."""
    return _END * 4 + QUERY_ROWS * head_dim * (2 + 4 + 4) + KEY_BLOCK * head_dim * 4 + tiles.TILE_KEYS * head_dim * 2 + 64


# Offsets in float32 that do not depend on the head's size.
SCORES = 0  # float32 [SCORE_ROWS, KEY_BLOCK]
WEIGHTS = SCORES + SCORE_ROWS * KEY_BLOCK  # bf16 [SCORE_ROWS, KEY_BLOCK]
HIGHEST = WEIGHTS + SCORE_ROWS * KEY_BLOCK // 2  # float32 [QUERY_ROWS], of a range
TOTAL = HIGHEST + QUERY_ROWS  # float32 [QUERY_ROWS], of a range
ALL_HIGHEST = TOTAL + QUERY_ROWS  # of all ranges so far
ALL_TOTAL = ALL_HIGHEST + QUERY_ROWS
BLOCK_HIGHEST = ALL_TOTAL + QUERY_ROWS  # of a block
_END = BLOCK_HIGHEST + QUERY_ROWS


@njit(**INLINE)
def queries(scratch):
    return scratch + 4 * _END


@njit(**INLINE)
def sums(scratch, dim):
    return queries(scratch) + QUERY_ROWS * dim * 2


@njit(**INLINE)
def all_sums(scratch, dim):
    return sums(scratch, dim) + QUERY_ROWS * dim * 4


@njit(**INLINE)
def keys(scratch, dim):
    return all_sums(scratch, dim) + QUERY_ROWS * dim * 4


@njit(**INLINE)
def values(scratch, dim):
    return keys(scratch, dim) + KEY_BLOCK * dim * 2


@njit(**INLINE)
def tail(scratch, dim):
    return values(scratch, dim) + KEY_BLOCK * dim * 2
