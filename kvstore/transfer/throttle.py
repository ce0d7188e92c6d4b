"""Token bucket: how long a write of so many bytes has to wait. Pure; the clock is an argument."""

from __future__ import annotations


class TokenBucket:
    """A link of ``bytes_per_s``, with ``burst`` bytes it may run ahead after a pause. Rate 0 means no limit.

    With burst 0 a write is let through once the link would have carried all of it, like the last byte of a
    store-and-forward link: no write is free, however long the link was idle.
    """

    def __init__(self, bytes_per_s: float, burst: float = 0.0) -> None:
        self._rate = bytes_per_s
        self._burst = burst
        self._tokens = burst
        self._last: float | None = None

    def take(self, size: int, now: float) -> float:
        """Book ``size`` bytes at ``now`` (seconds, never decreasing); returns the seconds until they may go."""
        if self._rate <= 0:
            return 0.0
        if self._last is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._last) * self._rate)
        self._last = now
        self._tokens -= size
        return max(0.0, -self._tokens / self._rate)
