"""Leaving in order, whatever the role: what a service does for its requests, how long it may take, who goes first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from moonpool.cluster.membership import Membership
from moonpool.core.config import Config
from moonpool.core.errors import NoPath
from moonpool.core.ids import NodeId, Role
from moonpool.core.membership import Liveness, MemberChange

LOOK_S = 0.05
LANDINGS_QUIET_S = 0.4  # none for so long: what was placed before readiness ended has begun
END_S = 15.0  # after it has left in order: what closing a process takes at the most
WORKERS = (Role.PREFILL, Role.DECODE, Role.BOTH)


@runtime_checkable
class Drains(Protocol):
    """A service with requests of others in it. Its process has said already that it is not ready."""

    async def drain(self, limit_s: float) -> None:
        """Takes nothing new; returns once everything is finished or given back in order, soon after ``limit_s`` at the latest.

        May be called again, with another limit, also while an earlier call was cancelled half-way.
        """


def end_s(config: Config, role: Role) -> float:
    """Seconds from the signal to the end of a process of ``role``, at the most. Who ends processes has to wait so long.

    A store node waits for its host's workers and for landings before it moves its blocks away.
    """
    before = config.timing.drain_ms / 1e3 + budget_s(config, role) if role is Role.STORE else 0.0
    return before + budget_s(config, role) + END_S


def budget_s(config: Config, role: Role) -> float:
    """Seconds that a leaving process of ``role`` has to finish what it holds."""
    match role:
        case Role.GATEWAY:
            return config.gateway.drain_ms / 1e3
        case Role.STORE:
            return config.store.drain_ms / 1e3
        case _:
            return config.timing.drain_ms / 1e3


async def drain(service: object, limit_s: float, ended: asyncio.Future[int] | None = None) -> bool:
    """Drains ``service`` where it can be. False: ``ended`` came first, and the process's own end drains it anew."""
    if not isinstance(service, Drains):
        return True
    draining = asyncio.ensure_future(service.drain(limit_s))
    first: set[asyncio.Future[Any]] = {draining} if ended is None else {draining, ended}
    try:
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if draining.done():
            draining.result()
            return True
        return False
    finally:
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)


async def workers_gone(peers: Membership, node: NodeId, settle_s: float, limit_s: float) -> None:
    """Lets the workers of ``node`` that leave, too, go first: what they hand over still goes into this host's pool.

    Who is told to leave at the same time says so within ``settle_s``; who stays ready is not waited for.
    """
    await asyncio.sleep(settle_s if any(_works(c, node) for c in peers.everybody()) else 0.0)
    try:
        await peers.until(lambda: not any(_leaves(c, node) for c in peers.everybody()), limit_s, "end of this host's workers")
    except NoPath:
        pass


async def landings_ended(open_now: Callable[[], float], limit_s: float) -> None:
    """Prompts whose KV lands in a store node that leaves come to their end: it is given no new ones, being not ready."""
    now = time.monotonic()
    end, quiet_since = now + limit_s, now
    while now < end and now - quiet_since < LANDINGS_QUIET_S:
        if open_now():
            quiet_since = now
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()


def _works(change: MemberChange, node: NodeId) -> bool:
    return change.member.node == node and change.member.role in WORKERS and change.liveness is Liveness.LIVE


def _leaves(change: MemberChange, node: NodeId) -> bool:
    return _works(change, node) and not change.member.ready
