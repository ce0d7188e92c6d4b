"""Which process of a cluster to strike, and whether it is back."""

from __future__ import annotations

import asyncio
import time

from moonpool.core.membership import Liveness
from support.cluster import LocalCluster

PREFILLS = ("prefill-0", "prefill-1")


async def busy_prefill(cluster: LocalCluster) -> str:
    """A prefill worker in the middle of a job that is pushing layers."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        numbers = await asyncio.to_thread(cluster.numbers)
        for name in PREFILLS:
            running = numbers.get(name, {}).get("requests_running")
            if running and numbers["store-b"]["slots_reserved"] and numbers["store-b"]["landings_open"]:
                return name
        await asyncio.sleep(0.02)
    raise AssertionError(f"no prefill worker began\n{cluster.log()}")


def live_again(cluster: LocalCluster, name: str, incarnation: int) -> bool:
    """As a later life than ``incarnation``."""
    change = cluster.changes()[name]
    return change.liveness is Liveness.LIVE and change.member.incarnation > incarnation and change.member.ready
