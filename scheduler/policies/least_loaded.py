"""The prefill worker with the least predicted work before it and the decode worker with the fewest sequences: the load
balancing that Mooncake (FAST 2025, fig. 5) compares with. What is cached counts for nothing."""

from __future__ import annotations

from moonpool.scheduler.costs import least
from moonpool.scheduler.policies.early import Early
from moonpool.scheduler.policies.pairing import fewest, pair
from moonpool.scheduler.policy import Asked, Choice


class LeastLoaded(Early):
    name = "least_loaded"

    def choose(self, asked: Asked) -> Choice | None:
        board = asked.board
        return pair(asked, least(asked.local.wait, asked.prefills, board, tie=0.0), fewest(asked, board.batch))
