"""The gate: whose request this is, and whether it may come in now. One loop owns it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime

from moonpool.cluster.gateway.tenants.book import Access, Keys, Limits
from moonpool.cluster.gateway.tenants.caller import ANYBODY, Caller
from moonpool.cluster.gateway.tenants.meters import Meter, Rates, Short
from moonpool.core.errors import Forbidden, Overloaded, RateLimited

PART_OF_FREE = 2.0  # times its weight and what is left free: as many places one tenant may hold where there are several
SPARE_METERS = 256


class Ticket:
    """What one visit holds at its meters, until ``end``."""

    def __init__(self, caller: Caller, metered: list[tuple[str, Meter, Rates]], clock: Callable[[], float]) -> None:
        self.caller = caller
        self._metered = metered
        self._clock = clock
        self._reserved = 0
        self._open = False

    def begin(self) -> None:
        """RateLimited where a limit does not allow the request, which then counts nowhere."""
        now = self._clock()
        for whose, meter, rates in self._metered:
            if (short := meter.short(rates, now)) is not None:
                raise _limited(whose, short)
        for _, meter, rates in self._metered:
            meter.begin(rates, now)
        self._open = True

    def reserve(self, tokens: int) -> None:
        """Take ``tokens`` in place of what was taken before. RateLimited where there are not so many."""
        now, more = self._clock(), tokens - self._reserved
        for whose, meter, rates in self._metered:
            if more > 0 and (short := meter.short_of_tokens(tokens, rates, now, held=self._reserved)) is not None:
                raise _limited(whose, short)
        self._take(more)

    def end(self, used: int) -> None:
        """The visit is over and took ``used`` tokens. Once; more calls do nothing."""
        if self._open:
            self._open = False
            self._take(used - self._reserved)
            for _, meter, _ in self._metered:
                meter.end()

    def _take(self, more: int) -> None:
        now = self._clock()
        for _, meter, rates in self._metered:
            meter.tokens.take(more, rates.tokens, now)
        self._reserved += more

    def headers(self) -> dict[str, str]:
        """The tightest limits there are, in OpenAI's names."""
        now, out = self._clock(), {}
        for kind in ("requests", "tokens"):
            found = []
            for _, meter, rates in self._metered:
                bucket, limit = (meter.requests, rates.requests) if kind == "requests" else (meter.tokens, rates.tokens)
                if limit:
                    found.append((bucket.left(limit, now), limit, bucket.full_in_s(limit, now)))
            if found:
                left, limit, full_s = min(found)
                out[f"x-ratelimit-limit-{kind}"] = str(max(1, int(limit)))
                out[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(left)))
                out[f"x-ratelimit-reset-{kind}"] = f"{full_s:.3f}s"
        return out


class Gate:
    """``keys``: the newest ones; None: there are none, and everybody may come. ``gateways``: how many are live, each of
    which enforces an equal part of every limit."""

    def __init__(
        self, keys: Callable[[], Keys] | None, gateways: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = keys
        self._gateways = gateways
        self._clock = clock
        self._meters: dict[tuple[str, str], Meter] = {}
        self._held: dict[tuple[str, str], int] = {}  # places in flight, by model and tenant

    @property
    def tenants(self) -> tuple[str, ...]:
        """Those of the file; none without one."""
        return self._keys().book.tenant_names if self._keys is not None else ()

    def caller(self, authorization: str | None, needs: Access) -> Caller:
        """Unauthorised without a good key, Forbidden where its roles lack what is needed."""
        if self._keys is None:
            return ANYBODY
        keys = self._keys()
        key = keys.holder(authorization, datetime.now(UTC))
        if needs not in key.roles:
            has = ", ".join(key.roles) or "none"
            raise Forbidden(f"Authorization: this needs role {needs}; API key {key.name!r} has {has}", param="authorization")
        return Caller.of(key, keys.book.tenant(key.tenant))

    def caller_named(self, tenant: str) -> Caller:
        """Whom ``tenant`` of the file stands for, without any key; empty: nobody in particular."""
        if self._keys is None or not tenant:
            return Caller(tenant) if tenant else ANYBODY
        known = self._keys().book.tenant(tenant)
        return Caller(tenant, weight=known.weight, region=known.region, models=known.models)

    def ticket(self, caller: Caller) -> Ticket:
        """Not begun yet: its headers tell the limits also of who is refused."""
        if self._keys is None:
            return Ticket(caller, [], self._clock)
        book, metered = self._keys().book, []
        key = next((key for key in book.keys if key.name == caller.name), None)
        limits: tuple[tuple[str, str, Limits | None], ...] = (
            ("API key", caller.name, key),
            ("tenant", caller.tenant, book.tenant(caller.tenant)),
        )
        for kind, name, limit in limits:
            rates = self._part(limit) if limit is not None else Rates()
            if rates != Rates():
                metered.append((f"{kind} {name!r}", self._meter(kind, name), rates))
        return Ticket(caller, metered, self._clock)

    def _part(self, limits: Limits) -> Rates:
        n = max(1, self._gateways())
        return Rates(limits.requests_per_minute / n, limits.tokens_per_minute / n, math.ceil(limits.concurrent / n))

    def _meter(self, kind: str, name: str) -> Meter:
        meter = self._meters.get((kind, name))
        if meter is None:
            self._forget()
            meter = self._meters[kind, name] = Meter(self._clock())
        return meter

    def _forget(self) -> None:
        """Names that have left the file, once there are many."""
        assert self._keys is not None  # nothing is metered without
        book = self._keys().book
        if len(self._meters) > 2 * len(book.keys) + SPARE_METERS:
            known = {key.name for key in book.keys}.union(book.tenant_names)
            self._meters = {who: one for who, one in self._meters.items() if who[1] in known or one.in_flight}

    def take_places(self, caller: Caller, n: int, limit: int, model: str = "") -> None:
        """``n`` of the ``limit`` places in flight of ``model``. Overloaded where all are taken, or the tenant has its part.

        Each model has places of its own: one whose requests wait takes none of another's.
        Where there are several tenants, one may hold no more than ``PART_OF_FREE`` times its weight and what is left free
        (a dynamic threshold: Choudhury and Hahne, 1998), so that a flood leaves places for the others. ``n`` together get
        what they would get one by one; a single one of who holds nothing is never too many.
        """
        total = sum(held for (of, _), held in self._held.items() if of == model)
        mine = self._held.get((model, caller.tenant), 0)
        if total + n > limit:
            raise Overloaded(
                f"gateway: {total} of {limit} requests in flight (timing.queue_limit); try again later", retry_after_s=1.0
            )
        part = PART_OF_FREE * caller.weight * (limit - total - n + 1)
        if len(self.tenants) > 1 and mine + n > max(1.0, part):
            raise Overloaded(
                f"gateway: tenant {caller.tenant!r} would have {mine + n} of {limit} requests in flight (timing.queue_limit), "
                "more than its part where there are others; try again later, or with fewer prompts",
                retry_after_s=1.0,
            )
        self._held[model, caller.tenant] = mine + n

    def leave_places(self, caller: Caller, n: int, model: str = "") -> None:
        left = self._held.get((model, caller.tenant), 0) - n
        if left > 0:
            self._held[model, caller.tenant] = left
        else:
            self._held.pop((model, caller.tenant), None)


def _limited(whose: str, short: Short) -> RateLimited:
    return RateLimited(
        f"rate limit: {whose} has used up its {short.limit:g} {short.what} at this gateway; "
        f"try again in {max(short.wait_s, 0.001):.3g} s",
        retry_after_s=short.wait_s,
    )
