"""How long computing tokens takes here, so that waiting for them to come from elsewhere never takes longer. Pure."""

from __future__ import annotations

KEEP = 0.8  # weight of what is known already against one more measurement
SLACK = 1.2  # a load may take this much longer than computing is expected to: it also spares the other jobs' time
GUESS_S = 1e-3  # a token
MIN_MS = 20  # below this a measurement says little


class Pace:
    """A running mean of seconds per computed token, growing contexts included. Nothing is known before the first one."""

    def __init__(self) -> None:
        self._token_s: float | None = None

    def measured(self, tokens: int, seconds: float) -> None:
        """``tokens`` were computed in ``seconds``, waiting for loads excluded."""
        if tokens <= 0 or seconds <= 0:
            return
        each = seconds / tokens
        self._token_s = each if self._token_s is None else KEEP * self._token_s + (1 - KEEP) * each

    def seconds(self, tokens: int) -> float:
        """How long computing ``tokens`` is expected to take; by ``GUESS_S`` while nothing was measured."""
        return tokens * (GUESS_S if self._token_s is None else self._token_s)

    def limit_ms(self, tokens: int, most_ms: int) -> int:
        """How long ``tokens`` may take to come from elsewhere; ``most_ms`` while nothing was measured, and never more."""
        if self._token_s is None:
            return most_ms
        return min(most_ms, max(MIN_MS, int(SLACK * 1e3 * self._token_s * tokens)))
