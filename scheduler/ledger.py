"""What each tenant has used lately of compute, KV memory and links, and who has had more than its fair share. Pure.

Use decays by half in ``half_life_s``: an idle tenant is soon forgiven. A tenant's share is that of its dominant resource
(Ghodsi et al., Dominant Resource Fairness, NSDI 2011): of each resource the use over what the cluster offers in that
time, and of these the largest, relative to the busiest resource. The fair share is the tenant's weight over the weights
of all who used anything worth naming lately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.core.errors import InvalidRequest

TENANTS = 1_024
REBASE = 64  # half lives until use is expressed in a new unit
ACTIVE = 1e-3  # of the busiest resource: who used less counts as absent, and who comes back owes nothing


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of prefill and decode compute, bytes of KV written, bytes moved between nodes. Or a rate: all that per second."""

    compute_s: float = 0.0
    kv_bytes: float = 0.0
    link_bytes: float = 0.0

    def values(self) -> tuple[float, float, float]:
        return self.compute_s, self.kv_bytes, self.link_bytes


class TenantLedger:
    """One conductor's book.

    All use decays alike, so it is kept in units that grow with time, each charge in the unit of its moment: nothing has to
    be touched while time passes, and shares can be compared as they stand.
    """

    def __init__(
        self,
        offers: Cost | None = None,
        *,
        half_life_s: float = 60.0,
        weights: Mapping[str, float] | None = None,
        limit: int = TENANTS,
    ) -> None:
        """``offers``: what the cluster offers a second; a resource of which it offers nothing never dominates.

        InvalidRequest naming a half life or weight that is not above 0.
        """
        self._weights = dict(weights or {})
        if not half_life_s > 0.0:
            raise InvalidRequest(f"half_life_s is {half_life_s}; give seconds above 0", param="half_life_s")
        for name, weight in self._weights.items():
            if not (weight > 0.0 and math.isfinite(weight)):
                raise InvalidRequest(f"the weight of tenant {name!r} is {weight}; give a number above 0", param="weights")
        self._offers = offers or Cost(1.0)
        self._half_life_s = half_life_s
        self._limit = limit
        self._base = 0.0  # when the unit was 1
        self._used: dict[str, tuple[float, float, float]] = {}  # least recently charged first
        self._dominant: dict[str, float] = {}
        self._total = (0.0, 0.0, 0.0)

    def __len__(self) -> int:
        return len(self._used)

    def offer(self, offers: Cost) -> None:
        """Workers came or went."""
        if offers != self._offers:
            self._offers = offers
            self._dominant = {name: self._dominance(used) for name, used in self._used.items()}

    def weigh(self, tenant: str, weight: float) -> None:
        """``weight`` counts from now on; what is not above 0 is 1: somebody of an older version said nothing."""
        if weight > 0.0 and weight != self._weights.get(tenant, 1.0):
            self._weights[tenant] = weight

    def charge(self, tenant: str, cost: Cost, now: float) -> None:
        """A negative cost gives back what was charged too much; nobody's use falls below 0."""
        if now - self._base > REBASE * self._half_life_s:
            self._rebase(now)
        unit = 2.0 ** ((now - self._base) / self._half_life_s)
        old = self._used.pop(tenant, (0.0, 0.0, 0.0))
        a, b, c = (max(0.0, used + new * unit) for used, new in zip(old, cost.values(), strict=True))
        self._set(tenant, old, (a, b, c))
        if len(self._used) > self._limit:
            oldest = next(iter(self._used))
            self._set(oldest, self._used.pop(oldest), (0.0, 0.0, 0.0))
            del self._used[oldest], self._dominant[oldest]

    def used(self, tenant: str, now: float) -> Cost:
        left = 0.5 ** ((now - self._base) / self._half_life_s)
        a, b, c = self._used.get(tenant, (0.0, 0.0, 0.0))
        return Cost(a * left, b * left, c * left)

    def share(self, tenant: str) -> float:
        """From 0 to 1: of the busiest resource, as much as the tenant's dominant one amounts to."""
        busiest = self._dominance(self._total)
        return self._dominant.get(tenant, 0.0) / busiest if busiest > 0.0 else 0.0

    def fair_share(self, tenant: str) -> float:
        """Of ``tenant`` among all who are active, itself included."""
        least = ACTIVE * self._dominance(self._total)
        mine = self._weights.get(tenant, 1.0)
        others = sum(self._weights.get(name, 1.0) for name, use in self._dominant.items() if use > least and name != tenant)
        return mine / (mine + others)

    def over(self, tenant: str) -> float:
        """Share over fair share: above 1, others had less than they may have because of this tenant."""
        return self.share(tenant) / self.fair_share(tenant)

    def _set(self, tenant: str, old: tuple[float, float, float], new: tuple[float, float, float]) -> None:
        a, b, c = (max(0.0, total - was + now) for total, was, now in zip(self._total, old, new, strict=True))
        self._total = a, b, c
        self._used[tenant] = new
        self._dominant[tenant] = self._dominance(new)

    def _dominance(self, used: tuple[float, float, float]) -> float:
        pairs = zip(used, self._offers.values(), strict=True)
        return max((use / offered for use, offered in pairs if offered > 0.0), default=0.0)

    def _rebase(self, now: float) -> None:
        """A new unit, before the old one overflows; what has shrunk to nothing is forgotten, rounding errors with it."""
        left = 0.5 ** ((now - self._base) / self._half_life_s)
        self._base = now
        self._used = {name: (a * left, b * left, c * left) for name, (a, b, c) in self._used.items()}
        self._dominant = {name: use * left for name, use in self._dominant.items()}
        a, b, c = (sum(parts) for parts in zip(*self._used.values(), strict=True)) if self._used else (0.0, 0.0, 0.0)
        self._total = a, b, c
