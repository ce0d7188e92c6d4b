"""The worker with the smallest predicted TTFT, a fetch from the deepest holder included where that pays."""

from __future__ import annotations

from moonpool.scheduler.choice import decoder_for
from moonpool.scheduler.costs import least
from moonpool.scheduler.policies.early import Early
from moonpool.scheduler.policy import Asked, Choice


class PooledMinTtft(Early):
    name = "pooled_min_ttft"

    def choose(self, asked: Asked) -> Choice | None:
        scores = asked.pooled
        row = least(scores.ttft, asked.prefills, asked.board)
        if row is None:
            return None
        decode = decoder_for(asked, row)
        if decode is None:
            return None
        local, far = (int(blocks) for blocks in scores.covered[:, row])
        holders = asked.held.holders
        if not scores.fetches[row] or not holders:
            return Choice(row, decode, local)
        return Choice(row, decode, far, holders[asked.number % len(holders)])  # equal holders take turns
