"""Whether to fetch from a node: one from which nothing came several times in a row is a miss at once, for a while."""

from __future__ import annotations

import random
from collections.abc import Callable

from moonpool.core.breaker import Breaker, Pace
from moonpool.core.errors import DeadlinePassed, MoonpoolError, PeerSilent
from moonpool.core.ids import Role
from moonpool.core.membership import Peers
from moonpool.kvstore.claims import Life

PACE = Pace(failures=2, first_s=0.5, longest_s=10.0, probe_s=5.0)


class Sources:
    """A breaker for each life of another node. ``not_tried`` counts fetches that were not begun."""

    def __init__(self, peers: Peers, clock: Callable[[], float]) -> None:
        self._peers, self._clock = peers, clock
        self._breakers: dict[Life, Breaker] = {}
        self.not_tried = 0

    def begin(self, source: Life) -> bool:
        """Whether a fetch may be tried. How it went is to be said by ``ended``."""
        breaker, now = self._breaker(source), self._clock()
        if not breaker.allows(now):
            self.not_tried += 1
            return False
        breaker.begin(now)
        return True

    def ended(self, source: Life, error: MoonpoolError | None) -> None:
        """Only silence is held against it: a full pool here, or a bad block there, says nothing about the way to it."""
        breaker, now = self._breaker(source), self._clock()
        if error is None:
            breaker.succeeded(now)
        elif isinstance(error, PeerSilent | DeadlinePassed):
            breaker.failed(now, random.random())
        else:
            breaker.given_up(now)

    def _breaker(self, source: Life) -> Breaker:
        """Those of lives that are over are forgotten when a new one comes."""
        if source not in self._breakers:
            live = {Life(one.id, one.incarnation) for one in self._peers.live(Role.STORE)}
            self._breakers = {life: breaker for life, breaker in self._breakers.items() if life in live}
            self._breakers[source] = Breaker(PACE)
        return self._breakers[source]
