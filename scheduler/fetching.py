"""What every prefill worker would take for one prompt if it fetched what the deepest holder has, and how it had best do so.

A prompt's blocks beyond what the worker's node holds come in over a link while the worker is busy with others and, layer by
layer, while it computes what comes after them. Where the link is too slow to hide, the worker computes the first of them
itself meanwhile: compute from the front meets the fetch from the back. Where that meeting point lies is tried at a few
places, for all such workers at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moonpool.core.ids import NodeId
from moonpool.scheduler.board import Floats, Ints
from moonpool.scheduler.costs import work_seconds
from moonpool.scheduler.policy import Asked

FRONTS = np.linspace(0.0, 0.9375, 16)[1:, None]  # shares of the missing blocks that are computed instead


@dataclass(frozen=True, slots=True)
class Fetching:
    """Per row: seconds until the first token (infinite where there is nothing to fetch), blocks of the front, source."""

    ttft: Floats
    front: Ints
    source: Ints  # number in ``sources``
    sources: tuple[NodeId, ...]


def fetching(asked: Asked, sources: tuple[NodeId, ...]) -> Fetching | None:
    """None where nobody would fetch anything."""
    board, prompt, held = asked.board, asked.prompt, asked.held
    local = asked.local.covered[0]
    missing = held.anywhere - local
    useful = asked.usable.pooled & (missing > 0)
    if not sources or not useful.any():
        return None
    size = np.maximum(missing, 0) * float(board.block_bytes)
    transfers = np.array([asked.links.seconds(source, size, board.nodes) for source in sources])  # [sources, rows]
    source = transfers.argmin(axis=0)
    transfer = transfers[source, board.numbers]
    work = asked.local.wait + work_seconds(board, prompt, np.maximum(local, held.anywhere), held.own)
    ttft = np.where(useful, np.maximum(work, transfer), np.inf)
    front = np.zeros(len(ttft), np.int64)
    (exposed,) = (useful & (transfer > work)).nonzero()
    if len(exposed):
        _meet(asked, exposed, transfer, ttft, front)
    return Fetching(ttft, front, source, sources)


def _meet(asked: Asked, rows: Ints, transfer: Floats, ttft: Floats, front: Ints) -> None:
    """Write the best front of ``rows``, where it beats none. What comes after it is begun once all is there."""
    size, wait = asked.prompt.block_tokens, asked.local.wait[rows]
    _, b, c, d = asked.board.prefill_fit[:, rows]
    local = asked.local.covered[0][rows]
    missing = asked.held.anywhere - local
    fronts = (FRONTS * missing).astype(np.int64)  # [fronts, rows]
    begin, middle = local * size, (local + fronts) * size
    computed = (middle - begin) * (b + c * (middle + begin))
    left = transfer[rows] * (1.0 - fronts / missing)
    whole = np.full(len(asked.board.names), asked.held.anywhere)
    rest = work_seconds(asked.board, asked.prompt, whole, asked.held.own)[rows] - d * size * fronts
    total = np.maximum(wait + computed, left) + rest
    best, places = total.argmin(axis=0), np.arange(len(rows))
    better = total[best, places] < ttft[rows]
    ttft[rows[better]] = total[best, places][better]
    front[rows[better]] = fronts[best, places][better]
