"""Prefill seconds foretold for jobs that the fit has not seen: the bars of fig. 8, and each bar of fig. 14 from the others.

    T(n, p) = a + b (n - p) + c (n^2 - p^2) + d p + e [p > 0]

``d`` is what the host's published link takes and is not fitted; ``e`` is what no overlap hides of a cached prefix: looking it
up and loading its first layer. Least squares of relative errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.loadgen.trace import TraceRow
from moonpool.sim.one_cache import TRUNK_FANOUT
from moonpool.sim.suite.published import (
    BLOCK_TOKENS,
    FIG14_CACHED_S,
    FIG14_TOKENS,
    FIG14_UNCACHED_S,
    HOST_LINK,
    KV_BYTES_PER_TOKEN,
)

Vector = NDArray[np.float64]
SHARED_TOKENS = 880  # of the conversation trace's common prompt; its ids see the first block of it only
HALF_BLOCK = BLOCK_TOKENS // 2
CACHED_SHARE = 0.95


def bars() -> tuple[Vector, Vector, Vector]:
    """Prompt tokens, cached tokens and seconds of fig. 14's ten bars."""
    tokens = np.array(FIG14_TOKENS, np.float64)
    return (
        np.concatenate([tokens, tokens]),
        np.concatenate([0.0 * tokens, CACHED_SHARE * tokens]),
        np.array([*FIG14_UNCACHED_S, *FIG14_CACHED_S]),
    )


def fitted(n: Vector, p: Vector, seconds: Vector) -> Vector:
    """(a, b, c, e)."""
    left = _features(n, p) / seconds[:, None]
    right = (seconds - _load(p)) / seconds
    return np.asarray(np.linalg.lstsq(left, right, rcond=None)[0])


def foretold(fit: Vector, n: Vector, p: Vector) -> Vector:
    return np.asarray(_features(n, p) @ fit + _load(p))


def leave_one_out() -> Vector:
    """Relative errors of fig. 14's bars, each foretold from the nine others."""
    n, p, seconds = bars()
    out = np.empty(len(n))
    for i in range(len(n)):
        others = np.arange(len(n)) != i
        fit = fitted(n[others], p[others], seconds[others])
        out[i] = foretold(fit, n[i : i + 1], p[i : i + 1])[0] / seconds[i] - 1.0
    return out


def mean_prefill(rows: Sequence[TraceRow]) -> tuple[float, float]:
    """Mean foretold seconds a request, without a cache and with one that keeps everything, from a fit to fig. 14 alone."""
    fit = fitted(*bars())
    n = np.array([row.input_length for row in rows], np.float64)
    p = np.array(finest_hits(rows), np.float64)
    return float(foretold(fit, n, 0.0 * p).mean()), float(foretold(fit, n, p).mean())


def finest_hits(rows: Sequence[TraceRow]) -> list[int]:
    """Cached tokens of each request if everything were kept, in blocks finer than the trace's.

    The published cache curves end .03 above what ids of 512 tokens can see. A request that goes on exactly where an earlier
    prompt ended finds that prompt's unfinished block too; one that leaves it earlier finds half a block more on average; one
    that shares only the common first block finds the whole common prompt.
    """
    first = [row.hash_ids[0] for row in rows if row.hash_ids]
    common = first[0] if first and first.count(first[0]) > max(TRUNK_FANOUT, len(rows) // 2) else None
    owner: dict[int, TraceRow] = {}
    hits = []
    for row in rows:
        match = next((k for k, one in enumerate(row.hash_ids) if one not in owner), len(row.hash_ids))
        found = match * BLOCK_TOKENS
        if 0 < match < len(row.hash_ids):
            parent = owner[row.hash_ids[match - 1]]
            if match == 1 and row.hash_ids[0] == common:
                found = SHARED_TOKENS
            elif match == parent.input_length // BLOCK_TOKENS:
                found = parent.input_length
            else:
                found += HALF_BLOCK
        owner.update(dict.fromkeys(row.hash_ids, row))
        hits.append(min(found, row.input_length - 1))
    return hits


def _features(n: Vector, p: Vector) -> Vector:
    return np.stack([np.ones_like(n), n - p, n * n - p * p, (p > 0).astype(np.float64)], axis=-1)


def _load(p: Vector) -> Vector:
    return p * (KV_BYTES_PER_TOKEN / HOST_LINK)
