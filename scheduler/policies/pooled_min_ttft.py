"""The worker with the smallest predicted TTFT, a fetch from the deepest holder included where that pays."""

from __future__ import annotations

from moonpool.scheduler.actions import Action
from moonpool.scheduler.choice import decoder_for
from moonpool.scheduler.costs import least
from moonpool.scheduler.policy import Asked, Choice, Waiting


class PooledMinTtft:
    name = "pooled_min_ttft"
    late = False
    lookahead_s = 0.0
    wait_cap_s = float("inf")

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

    def key(self, waiting: Waiting) -> float:
        return waiting.arrived

    def ahead(self, asked: Asked, choice: Choice) -> list[Action]:
        return []

    def follow_up(self, asked: Asked, choice: Choice) -> list[Action]:
        return []
