"""Dynamo's KV router by its published cost, in blocks, smallest first, and its defaults.

    prefill_load_scale x max(0, blocks to compute at the worker, this prompt's included - credit) + decode_blocks
    credit = device_credit x blocks in the worker's pages + host_credit x those in its node's pool beyond them

A prefill pool has no decode blocks and a decode pool gives no credit, so that decode workers are compared by the blocks
they decode. Nothing is fetched from other nodes; equal costs are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moonpool.scheduler.board import Bools, Floats
from moonpool.scheduler.policies.draws import draw
from moonpool.scheduler.policies.early import Early
from moonpool.scheduler.policies.pairing import pair
from moonpool.scheduler.policy import Asked, Choice


@dataclass(frozen=True)
class DynamoCost(Early):
    name = "dynamo_cost"

    prefill_load_scale: float = 1.0
    device_credit: float = 1.0
    host_credit: float = 0.75
    seed: float = 0.0

    def choose(self, asked: Asked) -> Choice | None:
        board, held, size = asked.board, asked.held, asked.prompt.block_tokens
        raw = (board.to_compute + asked.prompt.tokens) / size
        credit = self.device_credit * held.own + self.host_credit * (asked.local.covered[0] - held.own)
        decode_blocks = np.where(board.both, board.context / size, 0.0)
        cost = self.prefill_load_scale * np.maximum(raw - credit, 0.0) + decode_blocks
        prefill = self._lowest(cost, asked.prefills, 2 * asked.number)
        return pair(asked, prefill, self._lowest(board.context / size, asked.decodes, 2 * asked.number + 1))

    def _lowest(self, cost: Floats, rows: Bools, counter: int) -> int | None:
        if not rows.any():
            return None
        (tied,) = (rows & (cost == cost[rows].min())).nonzero()
        return int(tied[draw(int(self.seed), counter, len(tied))])
