"""Counts, over all lives of the gateways, how many requests needed more than one attempt, as their metrics tell."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

PERIOD_S = 0.5
ATTEMPTS, REQUESTS = "moonpool_gateway_attempts_total", "moonpool_gateway_requests_total"


class Further:
    """``seen`` is the number of attempts beyond every request's first one. What a killed gateway had not told is missed."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = urls
        self._last: dict[str, float] = {}
        self.seen = 0

    async def watch(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
            while True:
                await asyncio.gather(*(self._ask(session, url) for url in set(self._urls.values())))
                await asyncio.sleep(PERIOD_S)

    async def _ask(self, session: aiohttp.ClientSession, url: str) -> None:
        try:
            async with session.get(f"{url}/metrics") as answer:
                further = further_attempts(await answer.text())
        except (aiohttp.ClientError, TimeoutError):
            return
        before = self._last.get(url, 0.0)
        self.seen += round(max(0.0, further - before))
        self._last[url] = max(further, before)


def further_attempts(text: str) -> float:
    """Attempts less the requests that ended in ``text``, a gateway's metrics."""
    sums = {ATTEMPTS: 0.0, REQUESTS: 0.0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
    return sums[ATTEMPTS] - sums[REQUESTS]
