"""What share of the cluster's capacity a request may not take: kept for higher priorities and for tenants who had less.

Capacity here is what load takes up: the part of a latency that is there because others are. A request alone in the
cluster meets no headroom at all, whoever sends it.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.placement import PlaceRequest
from moonpool.scheduler.ledger import TenantLedger

MOST = 0.8  # withheld at most: nobody is shut out of an idle cluster
PRIORITIES = 64  # told apart


@dataclass(frozen=True, slots=True)
class Withheld:
    """``text``: why, naming the numbers; empty where nothing is withheld."""

    share: float = 0.0
    text: str = ""

    def over_target(self, alone_s: float, full_s: float, target_s: float) -> float:
        """Predicted latency over its target, were the capacity that others take up smaller by what is withheld."""
        return (alone_s + max(full_s - alone_s, 0.0) / (1.0 - self.share)) / target_s


class Headroom:
    def __init__(self, ledger: TenantLedger, *, reserve: float, fair: float, seen_s: float) -> None:
        """``reserve``: share kept for each priority above, if it was seen in the last ``seen_s``. ``fair``: share withheld
        from a tenant that had twice its fair share or more; proportionally less from one in between."""
        self._ledger = ledger
        self._reserve = reserve
        self._fair = fair
        self._seen_s = seen_s
        self._seen: dict[int, float] = {}  # priority -> when last

    def of(self, request: PlaceRequest, now: float) -> Withheld:
        self._seen.pop(request.priority, None)
        self._seen[request.priority] = now
        if len(self._seen) > PRIORITIES:
            del self._seen[next(iter(self._seen))]
        above = sum(priority > request.priority and now - at <= self._seen_s for priority, at in self._seen.items())
        reserved = self._reserve * above
        over = self._ledger.over(request.tenant) if self._fair > 0.0 else 0.0
        unfair = self._fair * min(max(over - 1.0, 0.0), 1.0)
        share = min(reserved + unfair, MOST)
        parts = []
        if reserved > 0.0:
            parts.append(f"{100 * reserved:.0f} % of capacity is kept from priority {request.priority} for {above} above it")
        if unfair > 0.0:
            parts.append(
                f"{100 * unfair:.0f} % is kept from tenant {request.tenant!r}, which lately had {over:.2f} times its fair share"
            )
        return Withheld(share, " and ".join(parts))
