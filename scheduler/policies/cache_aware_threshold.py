"""SGLang's router, policy ``cache_aware``, with the defaults of its command line.

Out of balance, (max - min) > ``balance_abs`` and max > ``balance_rel`` x min requests in flight: the shortest queue. Else
the worker that has most of the prompt, where that is more than ``cache_threshold`` of it; else the least loaded one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moonpool.scheduler.costs import least
from moonpool.scheduler.policies.early import Early
from moonpool.scheduler.policies.pairing import fewest, pair
from moonpool.scheduler.policy import Asked, Choice


@dataclass(frozen=True)
class CacheAwareThreshold(Early):
    name = "cache_aware_threshold"

    cache_threshold: float = 0.3
    balance_abs: float = 64.0
    balance_rel: float = 1.5

    def choose(self, asked: Asked) -> Choice | None:
        board, rows = asked.board, asked.prefills
        if not rows.any():
            return None
        load = board.load[rows]
        spread = load.max() - load.min() > self.balance_abs and load.max() > self.balance_rel * load.min()
        has = np.where(rows, asked.local.covered[0], -1)
        matched = int(has.max()) * asked.prompt.block_tokens / asked.prompt.tokens
        if not spread and matched > self.cache_threshold:
            row: int | None = int(has.argmax())
        else:
            row = least(board.load.astype(float), rows, board, tie=0.0)
        return pair(asked, row, fewest(asked, board.batch))
