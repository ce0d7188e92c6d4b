"""Prompts that a decode worker computes itself: short ones, and those that are cached where it is.

No hand-off, no queue of a prefill worker; in exchange the running sequences wait for a chunk of the prompt in each of a
few steps. So it is worth it when little is left to compute, and allowed where a step with a chunk in it still meets the
time between tokens that is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moonpool.core.gaps import STEADY_SHARE
from moonpool.scheduler.costs import least, work_seconds
from moonpool.scheduler.policy import Asked, Choice

LEAST_S = 1e-3  # for a prompt in a step, where the step alone takes all the time there is


@dataclass(frozen=True, slots=True)
class Limits:
    """``chunk_tokens``: computed in one step; ``max_tokens``: more are never computed beside running sequences.

    ``gap_s``: longest time between tokens that running sequences are asked to bear where the request names no target.
    ``paced``: workers cut chunks so that a step takes its steady share of that time.
    """

    chunk_tokens: int = 512
    max_tokens: int = 2_048
    gap_s: float = 0.1
    paced: bool = False


@dataclass(frozen=True, slots=True)
class Colocated:
    """Decode worker ``row`` computes the prompt itself: seconds to the first token, and of the longest step meanwhile."""

    row: int
    until: int  # leading blocks in its own pages or its node's pool
    computed_tokens: int
    work_s: float
    ttft_s: float
    gap_s: float
    sure: bool

    @property
    def choice(self) -> Choice:
        return Choice(self.row, self.row, self.until)


def colocated(asked: Asked, limits: Limits = Limits()) -> Colocated | None:
    """The decode worker that would have the first token soonest; None where none may compute the prompt."""
    board, prompt = asked.board, asked.prompt
    rows = asked.usable.decodes & board.decode_only & asked.decode.roomy
    if not rows.any():
        return None
    local = asked.local.covered[0]
    computed = prompt.tokens - np.minimum(local * prompt.block_tokens, prompt.tokens - 1)  # the last token always is
    work = work_seconds(board, prompt, local, asked.held.own)
    step = asked.decode.tbt
    target_ms = asked.request.targets.tbt_ms
    limit_s = limits.gap_s if target_ms is None else target_ms / 1e3
    chunks = -(-computed // limits.chunk_tokens)
    if limits.paced:
        left_s = np.maximum(STEADY_SHARE * limit_s - step, LEAST_S)  # of each step, for the prompt
        chunks = np.maximum(chunks, np.ceil(work / left_s))
    wait = np.maximum(board.busy_until - asked.now, 0.0)  # other prompts that it computes
    ttft = wait + work + chunks * step + asked.overhead_s
    gap = (step + work / chunks) * (1.0 + np.maximum(board.step_spread, board.prefill_spread))
    bearable = step * (1.0 + board.step_spread) <= STEADY_SHARE * limit_s if limits.paced else gap <= limit_s
    rows &= (computed <= limits.max_tokens) & bearable
    row = least(ttft, rows, board)
    if row is None:
        return None
    sure = bool(computed[row] <= board.prefill_reach[row])
    return Colocated(row, int(local[row]), int(computed[row]), float(work[row]), float(ttft[row]), float(gap[row]), sure)
