"""Algorithm 1 of Mooncake (FAST 2025): for every prefill worker either its own match or, where the best match anywhere is
more than ``balancing_threshold`` times as long, that one and the time to copy it; then queued work and prefill time are
added, and the smallest sum wins. The copy stays: that is how hot prefixes spread. The decode worker is the least loaded.

The threshold is not published; 1, 2 and 4 make no difference on the public traces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moonpool.scheduler.choice import decoder_for
from moonpool.scheduler.costs import least, work_seconds
from moonpool.scheduler.policies.early import Early
from moonpool.scheduler.policy import Asked, Choice


@dataclass(frozen=True)
class Algorithm1(Early):
    name = "algorithm1"

    balancing_threshold: float = 1.0

    def choose(self, asked: Asked) -> Choice | None:
        board, held = asked.board, asked.held
        own = asked.local.covered[0]
        copies = np.zeros(len(own), bool)
        source = held.holders[asked.number % len(held.holders)] if held.holders else None  # equal holders take turns
        move = np.zeros(len(own))
        if source is not None:
            copies = asked.usable.pooled & (held.anywhere > own) & (held.anywhere > self.balancing_threshold * own)
            whole = asked.links.seconds(source, held.anywhere * board.block_bytes, board.nodes)
            move = np.where(copies, whole * (1.0 - own / held.anywhere), 0.0)
        use = np.where(copies, held.anywhere, own)
        ttft = move + asked.local.wait + work_seconds(board, asked.prompt, use, held.own)
        row = least(ttft, asked.prefills, board, tie=0.0)
        decode = None if row is None else decoder_for(asked, row)
        if row is None or decode is None:
            return None
        return Choice(row, decode, int(use[row]), source if copies[row] else None)
