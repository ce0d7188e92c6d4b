"""Workers that keep failing attempts although the registry calls them live: left out of placements for a while. Pure.

A gateway judges by its own attempts, since a fault may lie on its own way to the worker, and tells conductors by the exclusions
of each request: so any number of gateways and conductors work together without keeping anything in step.
"""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.core.breaker import Breaker, Pace
from moonpool.core.errors import Reason
from moonpool.core.ids import Incarnation, MemberId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.core.placement import Placement, WorkerRef

PACE = Pace(failures=3, first_s=1.0, longest_s=30.0, probe_s=10.0)
FAULTS = (Reason.PEER_SILENT, Reason.TRANSFER_FAILED, Reason.DIGEST_MISMATCH)  # being busy is none
_Life = tuple[MemberId, Incarnation]


class Suspects:
    """A breaker for each life of a worker and kind of failure. ``now`` is in seconds of one monotonic clock."""

    def __init__(self, pace: Pace = PACE) -> None:
        self._pace = pace
        self._breakers: dict[_Life, dict[Reason, Breaker]] = {}

    def avoid(self, workers: Iterable[Member], now: float) -> tuple[MemberId, ...]:
        """Of these live workers those not to be used now. Where all that are ready of one role would be, none of them is."""
        found: list[MemberId] = []
        by_role: dict[Role, list[Member]] = {}
        for member in workers:
            if member.ready:
                by_role.setdefault(member.role, []).append(member)
        for members in by_role.values():
            bad = [m.id for m in members if not self._allows((m.id, m.incarnation), now)]
            found += bad if len(bad) < len(members) else []
        return tuple(found)

    def placed(self, placement: Placement, now: float) -> None:
        """An attempt begins there: it is the probe of whoever needs one."""
        for breaker in self._of(placement):
            breaker.begin(now)

    def ended(self, placement: Placement, reason: Reason | None, peer: str, now: float, draw: float) -> None:
        """How it ended: ``reason`` why it failed and ``peer`` who failed it, or None and nobody. ``draw``: random in [0, 1)."""
        if reason is None:
            for breaker in self._of(placement):
                breaker.succeeded(now)
            return
        for breaker in self._of(placement):
            breaker.given_up(now)
        guilty = next((worker for worker in _workers(placement) if worker.id == peer), None)
        if guilty is not None and reason in FAULTS:
            kinds = self._breakers.setdefault((guilty.id, guilty.incarnation), {})
            kinds.setdefault(reason, Breaker(self._pace)).failed(now, draw)

    def heard(self, change: MemberChange) -> None:
        """A life that is over, or followed by a newer one, is forgotten."""
        member = change.member
        for life in [life for life in self._breakers if life[0] == member.id]:
            if life[1] < member.incarnation or (life[1] == member.incarnation and change.liveness is not Liveness.LIVE):
                del self._breakers[life]

    def count(self, now: float) -> int:
        """Lives not to be used now."""
        return sum(not self._allows(life, now) for life in self._breakers)

    def _allows(self, life: _Life, now: float) -> bool:
        return all(breaker.allows(now) for breaker in self._breakers.get(life, {}).values())

    def _of(self, placement: Placement) -> list[Breaker]:
        return [b for worker in _workers(placement) for b in self._breakers.get((worker.id, worker.incarnation), {}).values()]


def _workers(placement: Placement) -> tuple[WorkerRef, ...]:
    return (placement.prefill,) if placement.prefill == placement.decode else (placement.prefill, placement.decode)
