"""Rate limits of one gateway: buckets of requests and tokens, and requests in flight. Pure: ``now`` is an argument.

A bucket holds one minute's worth and fills steadily. Tokens are taken when a request is let in, as far as they are known
then, and put right when it ends: a bucket may go below empty, and what was overdrawn is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

MINUTE_S = 60.0
CONCURRENT_RETRY_S = 1.0  # until one of those in flight has ended, at a guess


@dataclass(frozen=True, slots=True)
class Rates:
    """This gateway's part; 0: no limit."""

    requests: float = 0.0  # per minute
    tokens: float = 0.0  # per minute
    concurrent: int = 0


@dataclass(frozen=True, slots=True)
class Short:
    """What there is not enough of, and for how long at least."""

    what: str
    limit: float
    wait_s: float


class Bucket:
    """``limit`` per minute; it may change at any time, and what was taken stays taken."""

    def __init__(self, now: float) -> None:
        self._taken = 0.0
        self._at = now

    def left(self, limit: float, now: float) -> float:
        self._refill(limit, now)
        return limit - self._taken

    def take(self, amount: float, limit: float, now: float) -> None:
        """Below 0: put back."""
        if limit:
            self._refill(limit, now)
            self._taken = max(0.0, self._taken + amount)

    def wait_s(self, amount: float, limit: float, now: float, held: float = 0.0) -> float:
        """Until ``amount``, of which ``held`` is taken already, can be; of more than a minute's worth, until all is there."""
        lacking = min(amount, limit) - self.left(limit, now) - held
        return max(0.0, lacking) / limit * MINUTE_S

    def full_in_s(self, limit: float, now: float) -> float:
        self._refill(limit, now)
        return self._taken / limit * MINUTE_S

    def _refill(self, limit: float, now: float) -> None:
        self._taken = max(0.0, self._taken - limit / MINUTE_S * max(0.0, now - self._at))
        self._at = max(self._at, now)


class Meter:
    """What one key, or one tenant, has used."""

    def __init__(self, now: float) -> None:
        self.requests, self.tokens = Bucket(now), Bucket(now)
        self.in_flight = 0

    def short(self, rates: Rates, now: float) -> Short | None:
        """Why a request cannot be let in now, as far as is known before its body; None: it can."""
        if rates.concurrent and self.in_flight >= rates.concurrent:
            return Short("concurrent requests", rates.concurrent, CONCURRENT_RETRY_S)
        if rates.requests and (wait_s := self.requests.wait_s(1.0, rates.requests, now)) > 0.0:
            return Short("requests per minute", rates.requests, wait_s)
        return self.short_of_tokens(1.0, rates, now)

    def short_of_tokens(self, amount: float, rates: Rates, now: float, held: float = 0.0) -> Short | None:
        if rates.tokens and (wait_s := self.tokens.wait_s(amount, rates.tokens, now, held)) > 0.0:
            return Short("tokens per minute", rates.tokens, wait_s)
        return None

    def begin(self, rates: Rates, now: float) -> None:
        self.in_flight += 1
        self.requests.take(1.0, rates.requests, now)

    def end(self) -> None:
        self.in_flight -= 1
