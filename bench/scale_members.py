"""Members that only stand in the list: a live cluster then has so many, and every process of it goes through them all.

They live in child processes, whose beats take no time of the client that measures: run as
``python -m moonpool.bench.scale_members REGISTRY FIRST COUNT``, a child says ``ready`` and stays until its input ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from moonpool.bench.local_cluster import LocalCluster
from moonpool.cluster.membership import Membership
from moonpool.cluster.survey import members
from moonpool.core.config import TimingConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member

_BEAT_MS = 2_000
_PER_CHILD = 32
_START_S = 60.0


@asynccontextmanager
async def standing_by(cluster: LocalCluster, count: int) -> AsyncIterator[None]:
    """``count`` more workers of role both, each on a node of its own, that are never ready and so get no work.

    The cluster's ``timing.silent_after_ms`` is above 10 s. ConfigError: they did not join.
    """
    async with AsyncExitStack() as stack:
        for first in range(0, count, _PER_CHILD):
            await stack.enter_async_context(_child(cluster.registry, first, min(_PER_CHILD, count - first)))
        yield


@asynccontextmanager
async def _child(registry: str, first: int, count: int) -> AsyncIterator[None]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "moonpool.bench.scale_members", registry, str(first), str(count),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_START_S):
            said = await child.stdout.readline() if child.stdout is not None else b""
        if said.strip() != b"ready":
            raise ConfigError("bench: members that stand by did not join; their reason is above", param="bench")
        yield
    finally:
        if child.stdin is not None:
            child.stdin.close()
        await child.wait()


async def stand_by(registry: str, first: int, count: int) -> None:
    """Joins, says so, and leaves when standard input ends."""
    real = [change.member for change in await members(registry) if change.liveness is Liveness.LIVE]
    like = next((member for member in real if member.role is Role.BOTH), None)
    if like is None:
        raise ConfigError("bench: the cluster has no worker of role both", param="bench")
    timing = TimingConfig(heartbeat_ms=_BEAT_MS, silent_after_ms=5 * _BEAT_MS)
    joined = [Membership(registry, timing, lambda why, replaced: None) for _ in range(count)]
    try:
        for at, each in enumerate(joined, first):
            await each.join(_phantom(like, at))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await asyncio.gather(*(each.leave() for each in joined))


def _phantom(like: Member, at: int) -> Member:
    """A name of its own: the registry never takes back a life that ended."""
    name = f"standing-by-{os.getpid()}-{at}"
    return replace(like, id=MemberId(name), node=NodeId(name), ready=False, details={})


if __name__ == "__main__":
    asyncio.run(stand_by(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
