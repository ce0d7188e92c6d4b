"""From a prefill row and a decode row to a choice that reuses what the prefill worker and its node have."""

from __future__ import annotations

from moonpool.scheduler.board import Ints
from moonpool.scheduler.costs import least
from moonpool.scheduler.policy import Asked, Choice


def pair(asked: Asked, prefill: int | None, decode: int | None) -> Choice | None:
    """A worker of role both is paired with itself, whatever ``decode`` is."""
    if prefill is not None and asked.board.both[prefill]:
        decode = prefill
    if prefill is None or decode is None:
        return None
    return Choice(prefill, decode, asked.local_blocks(prefill))


def fewest(asked: Asked, load: Ints) -> int | None:
    """The decode worker with the fewest sequences."""
    return least(load.astype(float), asked.decodes, asked.board, tie=0.0)
