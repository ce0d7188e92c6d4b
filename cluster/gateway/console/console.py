"""What the console shows, as JSON: bounded in size, and asked for no more often than the cluster likes."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from moonpool import __version__
from moonpool.cluster.gateway.console.lookup import Lookup
from moonpool.cluster.gateway.console.shared import SharedAnswer, SharedAnswers
from moonpool.cluster.gateway.endpoints import Endpoints
from moonpool.cluster.overview.picture import Look, picture
from moonpool.cluster.overview.poll import Poller
from moonpool.core.ids import MemberId
from moonpool.core.membership import Liveness, Member, MemberChange, Peers

CLUSTER_S, REQUESTS_S, REQUEST_S = 1.0, 0.5, 1.0  # how old answers may be
FORGET_S = 600.0  # a member that is gone is shown for so long
OVER_S = 4.0  # rates are over about so long
STALE_S = 15.0  # after so long without a console, they begin anew
MOST_MEMBERS = 1_000  # asked and shown
MOST_FLIGHTS, MOST_ENDED = 200, 100


class Console:
    """One event loop. Nobody asks, nothing is done: the cluster is looked at only while a console is open."""

    def __init__(self, cluster: str, me: Member, peers: Peers, endpoints: Endpoints) -> None:
        self._cluster, self._me, self._endpoints = cluster, me, endpoints
        self._now = asyncio.get_running_loop().time
        self._known: dict[MemberId, tuple[float, MemberChange]] = {}
        self._poller = Poller()
        self._looks: deque[Look] = deque(maxlen=16)
        lookup = Lookup(me, peers, endpoints)

        async def request(name: str) -> bytes:
            return _json(await lookup.of(name))

        self.cluster = SharedAnswer(self._picture, CLUSTER_S)
        self.requests = SharedAnswer(self._requests, REQUESTS_S)
        self.request = SharedAnswers(request, REQUEST_S)
        self._unsubscribe = peers.subscribe(self._heard)

    def _heard(self, change: MemberChange) -> None:
        self._known[change.member.id] = self._now(), change

    def _members(self) -> list[MemberChange]:
        old = self._now() - FORGET_S
        self._known = {
            name: (at, change) for name, (at, change) in self._known.items() if at > old or change.liveness is not Liveness.GONE
        }
        found = sorted((change for _, change in self._known.values()), key=lambda c: (c.liveness is Liveness.GONE, c.member.id))
        return found[:MOST_MEMBERS]

    async def _picture(self) -> bytes:
        members, begun = self._members(), self._now()
        answers = await self._poller.look(members)
        look = Look(self._now(), tuple(answers))
        before = self._before(look)
        self._looks.append(look)
        about = {
            "cluster": self._cluster,
            "gateway": self._me.id,
            "version": __version__,
            "asked_ms": round((look.at - begun) * 1e3, 1),
            "left_out": max(len(self._known) - len(members), 0),
            "at": time.time(),
        }
        return await asyncio.to_thread(_drawn, before, look, about)  # a large cluster makes a large page

    def _before(self, look: Look) -> Look | None:
        """The look that rates are taken from: the newest one that is old enough, else the oldest of this sitting."""
        while self._looks and (
            look.at - self._looks[0].at > STALE_S or (len(self._looks) > 1 and look.at - self._looks[1].at > OVER_S)
        ):
            self._looks.popleft()
        return self._looks[0] if self._looks else None

    async def _requests(self) -> bytes:
        endpoints = self._endpoints
        flights, ended = endpoints.flights(MOST_FLIGHTS), endpoints.recent.newest(MOST_ENDED)
        told = {
            "gateway": self._me.id,
            "at": time.time(),
            "in_flight": endpoints.in_flight,
            "flights": [asdict(one) for one in flights],
            "ended": [asdict(one) for one in ended],
        }
        return _json(told)

    async def close(self) -> None:
        self._unsubscribe()
        for answer in (self.cluster, self.requests, self.request):
            await answer.close()
        await self._poller.close()


def _drawn(before: Look | None, look: Look, about: dict[str, Any]) -> bytes:
    return _json({**about, **asdict(picture(before, look))})


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
