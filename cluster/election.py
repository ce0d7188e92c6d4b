"""Which conductor acts in the background: the embedded registry's part, and each conductor's own. Pure.

One at a time holds a lease, numbered by a term that only grows. Whose lease may have ended does nothing: it counts by its own
clock, from before it asked. And whoever hears of a newer term refuses older ones (``core.terms``). So one that was frozen and
wakes does nothing, whether or not it noticed. (C. Gray, D. Cheriton, "Leases", SOSP 1989.)
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.ids import Incarnation, MemberId


@dataclass(frozen=True, slots=True)
class Lead:
    """What a registry answers who asks to lead: who does, in which term, and for how long the asker may (0.0: not)."""

    leader: MemberId | None
    incarnation: Incarnation
    term: int
    lease_s: float


NOBODY = Lead(None, Incarnation(0), 0, 0.0)


class Election:
    """Grants the lease. ``lease_s``: how long each lasts, unless it is renewed.

    A registry that has just begun may have granted a lease in a life that it forgot: so for a whole lease it renews whoever
    holds one (``held``) and grants none. Then the first to ask gets the next term after all that anybody has heard of.
    """

    def __init__(self, lease_s: float, now: float) -> None:
        self._lease_s = lease_s
        self._grant_from = now + lease_s
        self._term = 0
        self._holder: tuple[MemberId, Incarnation] | None = None
        self._until = 0.0

    def ask(self, member: MemberId, incarnation: Incarnation, known: int, held: int, now: float) -> Lead:
        """``known``: the newest term that the asker has heard of. ``held``: the one whose lease it still has, 0: none."""
        asker = (member, incarnation)
        newest = max(self._term, known)
        if now >= self._until:
            self._holder = None
        if self._holder is None and held and held == newest:
            self._grant(asker, held, now)
        elif self._holder is None and now >= self._grant_from:
            self._grant(asker, newest + 1, now)
        elif self._holder == asker:
            self._until = now + self._lease_s
        self._term = max(self._term, newest)
        if self._holder is None:
            return Lead(None, Incarnation(0), self._term, 0.0)
        return Lead(*self._holder, self._term, self._lease_s if self._holder == asker else 0.0)

    def ended(self, member: MemberId, incarnation: Incarnation) -> None:
        """That life is over for certain: it left, or its death is proved. One merely silent may still act: its lease runs."""
        if self._holder == (member, incarnation):
            self._holder = None

    def _grant(self, asker: tuple[MemberId, Incarnation], term: int, now: float) -> None:
        self._holder, self._term, self._until = asker, term, now + self._lease_s


class Tenure:
    """A conductor's own part: whether it leads now. ``now`` is in seconds of its monotonic clock."""

    def __init__(self) -> None:
        self._said = NOBODY
        self._until = 0.0

    def told(self, said: Lead, asked_at: float) -> None:
        self._said = said
        self._until = asked_at + said.lease_s

    def term(self, life: Incarnation | None, now: float) -> int:
        """In which it leads, as ``life``; 0: it does not. None: its life is over, and so is what that held."""
        return self._said.term if life == self._said.incarnation and now < self._until else 0

    @property
    def leader(self) -> MemberId | None:
        """As last heard."""
        return self._said.leader
