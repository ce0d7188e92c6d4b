"""Loads that want to break it: a burst far above capacity, and one giant prompt in a flood of tiny ones."""

from __future__ import annotations

import asyncio
import time

from moonpool.bench.cancels.clients import Clients
from moonpool.bench.cancels.scenes import Ask, Asks
from moonpool.bench.cancels.watching import Watch

BURST, BURST_TOKENS = 300, 900
FLOOD_CLIENTS = 8
QUIET_S = 15.0


async def burst(clients: Clients, asks: Asks, watch: Watch) -> dict[str, float]:
    """300 long prompts at once, a pause, then one request: each ends in an answer or a refusal, the last one in an answer."""
    begun = time.monotonic()
    ends = await asyncio.gather(*(clients.end_of(asks.fresh(BURST_TOKENS, 4)) for _ in range(BURST)))
    seconds = time.monotonic() - begun
    await watch.idle(QUIET_S)
    await clients.ask(asks.kept())
    return {
        "burst_answered": ends.count("answered"),
        "burst_refused": ends.count("refused"),
        "burst_odd": len(ends) - ends.count("answered") - ends.count("refused"),
        "burst_s": seconds,
    }


async def giant_in_a_flood(clients: Clients, asks: Asks, context: int) -> dict[str, float]:
    """The largest prompt there is while tiny ones keep coming: it is answered, and so are they."""
    over, small = asyncio.Event(), [0]

    async def flood() -> None:
        while not over.is_set():
            small[0] += await clients.end_of(asks.fresh(8, 2)) == "answered"

    floods = [asyncio.create_task(flood()) for _ in range(FLOOD_CLIENTS)]
    begun = time.monotonic()
    end = await clients.end_of(Ask(asks.fresh(context - 8, 4).prompt, 4, False))
    seconds = time.monotonic() - begun
    over.set()
    await asyncio.gather(*floods)
    return {"giant_answered": float(end == "answered"), "giant_s": seconds, "small_beside_giant": float(small[0])}
