"""What every prefill worker would take for one prompt if it fetched what the deepest holder has, and how it had best do so.

A prompt's blocks beyond what the worker's node holds come in over a link while the worker is busy with others or computes
the first of them itself: compute from the front meets the fetch from the back. Where that meeting point lies is tried at a
few places, for all workers at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moonpool.core.ids import NodeId
from moonpool.scheduler.board import Floats, Ints
from moonpool.scheduler.costs import work_seconds
from moonpool.scheduler.policy import Asked

FRONTS = np.linspace(0.0, 0.9375, 16)[:, None]  # shares of the missing blocks that may be computed instead


@dataclass(frozen=True, slots=True)
class Fetching:
    """Per row: seconds until the first token (infinite where there is nothing to fetch), blocks of the front, source."""

    ttft: Floats
    front: Ints
    source: Ints  # number in ``sources``
    sources: tuple[NodeId, ...]


def fetching(asked: Asked, sources: tuple[NodeId, ...]) -> Fetching:
    rows = len(asked.board.names)
    ttft, front, which = np.full(rows, np.inf), np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for number, source in enumerate(sources):
        seconds, blocks = _from(asked, source)
        better = seconds < ttft
        ttft[better], front[better], which[better] = seconds[better], blocks[better], number
    return Fetching(ttft, front, which, sources)


def _from(asked: Asked, source: NodeId) -> tuple[Floats, Ints]:
    board, prompt, held = asked.board, asked.prompt, asked.held
    local, size = asked.local.covered[0], prompt.block_tokens
    missing = np.maximum(held.anywhere - local, 0)
    rows = board.numbers
    whole = asked.links.seconds(source, (missing * board.block_bytes).astype(float), board.nodes)  # [rows]
    if not (whole > asked.local.wait).any():  # nothing comes in later than the worker begins
        front = np.zeros((1, len(rows)), np.int64)
    else:
        front = np.floor(FRONTS * missing).astype(np.int64)  # [fronts, rows]
    begin, middle = local * size, (local + front) * size
    _, b, c, d = board.prefill_fit
    computed = b * (middle - begin) + c * (middle * middle - begin * begin)
    transfer = whole * (1.0 - front / np.maximum(missing, 1))
    rest = work_seconds(board, prompt, np.maximum(local, held.anywhere), held.own) - d * size * front
    total = np.maximum(asked.local.wait + computed, transfer) + rest
    total[0] = np.maximum(asked.local.wait + rest[0], transfer[0])  # without a front the rest is computed layer by layer
    best = total.argmin(axis=0)
    useful = asked.usable.pooled & (missing > 0)
    return np.where(useful, total[best, rows], np.inf), front[best, rows]
