"""How long a prefill worker has its host's cores at a time while answers run there, and what chunk suits that. Pure.

It lets go between two layers, so chunks stay as large as they are where it has the cores to itself, as long as one layer of a
chunk takes no more than half a slice. A prompt that would miss its target at the answers' steady pace, and need not, has as
much as the answers can bear.
"""

from __future__ import annotations

from math import inf

from moonpool.core.permit import Beside
from moonpool.scheduler.chunk_size import USUAL, StepCost, Work, unhurried

LAYERS_A_SLICE = 2  # at least, of a chunk


class Slices:
    def __init__(self, layers: int, chunk_tokens: int) -> None:
        """``chunk_tokens``: of a chunk at most."""
        self._layers, self._chunk_tokens = layers, chunk_tokens
        self._cost = StepCost()

    def measured(self, start: int, end: int, seconds: float) -> None:
        """Tokens [start, end) of a prompt took ``seconds``, waiting excluded."""
        self._cost.add(Work().with_chunk(start, end), seconds)

    def slice_s(self, beside: Beside, done: int, total: int, due_s: float) -> float:
        """For a prompt of ``total`` tokens, ``done`` of them computed, whose first id is wanted within ``due_s``."""
        room = beside.room
        if room.free or due_s == inf:
            return room.steady_s
        alone_s = self._cost.prompt_seconds(done, total, self._chunk_tokens)
        return room.most_s if alone_s <= due_s < beside.takes_s(alone_s) else room.steady_s

    def chunk_tokens(self, slice_s: float, done: int, *, scored: bool = False) -> int:
        """Of a chunk from token ``done`` on. ``scored``: each of its tokens has a row of logits, so it is no larger one."""
        most = min(self._chunk_tokens, USUAL) if scored else self._chunk_tokens
        if slice_s == inf:
            return unhurried(self._cost, Work(), done, most)
        return min(most, self._cost.tokens_within(slice_s * self._layers / LAYERS_A_SLICE, Work(), done))
