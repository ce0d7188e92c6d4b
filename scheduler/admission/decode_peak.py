"""The longest decode step to be expected around the time when an accepted prompt joins its batch.

Over [t1, t1 + window], t1 = the end of its prefill: everybody in the batch has grown by then, accepted prefills have landed,
and nobody is taken to have left. That room falls free is true, but under load others arrive before t1 and take it; counting
on it lets prompts with long prefills book room that shorter ones are given first, and swings the pools.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.scheduler.policy import Asked


@dataclass(frozen=True, slots=True)
class Peak:
    """Seconds of a step: with this prompt alone in the batch, and with everybody; where that is more context than the estimate
    covers, at least as long as with what it does cover. ``sure``: there is an estimate."""

    alone_s: float
    full_s: float
    sure: bool


def decode_peak(asked: Asked, row: int, first_token_s: float, window_s: float, pace_s: float) -> Peak:
    """``first_token_s``: from now until t1. ``pace_s``: a step by which the batch grows; fixed, so that a busier worker is
    never predicted to be faster."""
    board, tokens = asked.board, asked.prompt.tokens
    a, b, c = (float(x) for x in board.step_fit[:, row])
    attempts = board.workers[row].attempts
    batch = int(board.batch[row]) + 1.0
    others = max(1, int((board.decode_only | board.both).sum()))  # who waits for a prefill worker goes to any of them
    batch += asked.waiting / others
    grown = (len(attempts) * first_token_s + batch * window_s) / pace_s
    context = int(board.context[row]) + asked.waiting_tokens / others + tokens + grown
    reach = float(board.step_reach[row])
    alone = a + b + c * min(tokens + window_s / pace_s, reach)
    return Peak(alone, a + b * batch + c * min(context, reach), reach > 0.0)
