"""``moonpool bench fairness``: what one tenant's flood does to another one's time to first token.

A quiet tenant asks now and then; a flooding one has ``times`` as many requests on the way all the time. In a simulated
cluster (two prefill, two decode nodes, a drawn trace) and on a live local one with a tiny random model the quiet tenant is
measured alone, beside the flood, and, as the control, beside the flood when both are one tenant. The live client shares the
machine's cores with the cluster.

Keys of the result, below ``simulated`` and ``live``: ``alone_ttft_ms``, ``beside_flood_ttft_ms``, ``one_tenant_ttft_ms`` (means
of the quiet one), ``ratio`` (beside over alone), ``ratio_one_tenant``, ``quiet_requests``, ``flood_requests``,
``quiet_refused``. Then ``machine``.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from moonpool.bench.local_cluster import SPLIT, local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.bench.tiny_model import TINY_IDS, make_tiny_model
from moonpool.cluster.gateway.tenants.file import edit_book, mint
from moonpool.core.errors import ConfigError
from moonpool.loadgen.client import open_session
from moonpool.loadgen.trace import TraceRow
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.policies.make import make_policy
from moonpool.sim.cluster import read_cluster
from moonpool.sim.run import simulate

QUIET, FLOOD = "quiet", "flood"
SIM_BLOCK = 512
SIM_EVERY_S = 4.0
SIM_BLOCKS = (8, 16, 24)  # of a prompt, equally often
PROMPTS, OUTPUT = (200, 400, 600), 4  # tokens, live
PAUSE_S = 0.05  # of the quiet client between two requests
SETTINGS = {
    "model.dtype": "float32",
    "engine.block_tokens": "16",
    "engine.page_bytes": str(16 << 20),
    "store.pool_bytes": str(64 << 20),
    "store.region_bytes": str(8 << 20),
    "timing.request_budget_ms": "600000",
}


@dataclass(frozen=True, slots=True)
class FairnessOptions:
    times: int = 10
    requests: int = 30  # of the quiet tenant, in each run
    live: bool = True
    seed: int = 1

    def check(self) -> None:
        for name in ("times", "requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is out of range; use 1 or more", param=name)


def fairness(
    options: FairnessOptions, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a cluster that does not start or answer."""
    options.check()
    found: dict[str, Any] = {"simulated": simulated(options)}
    say(f"simulated: {found['simulated']['ratio']:.2f} times as long as alone")
    if options.live:
        found["live"] = _live(options, say)
    return {**found, "machine": machine_facts()}


# -- simulated ---------------------------------------------------------------------------------------------------------


def simulated(options: FairnessOptions) -> dict[str, float]:
    quiet = _rows(options.requests, SIM_EVERY_S, Random(options.seed), 0)
    flood = _rows(options.requests * options.times, SIM_EVERY_S / options.times, Random(options.seed + 1), 1 << 40)
    both = sorted([(row, QUIET) for row in quiet] + [(row, FLOOD) for row in flood], key=lambda one: one[0].timestamp_ms)
    alone = _quiet_ttfts([(row, QUIET) for row in quiet], apart=True)
    return _told(alone, _quiet_ttfts(both, apart=True), _quiet_ttfts(both, apart=False), len(flood), 0)


def _rows(count: int, every_s: float, random: Random, first: int) -> list[TraceRow]:
    rows, at = [], 0.0
    for number in range(count):
        at += random.expovariate(1.0 / every_s)
        blocks = random.choice(SIM_BLOCKS)
        ids = tuple(range(first + number * 1_000, first + number * 1_000 + blocks))
        rows.append(TraceRow(at * 1e3, blocks * SIM_BLOCK, 40, ids, number + 1))
    return rows


def _quiet_ttfts(rows: Sequence[tuple[TraceRow, str]], *, apart: bool) -> list[float]:
    cluster = read_cluster("llama70b_8p8d").resized(prefill=2, decode=2)
    tenants = [tenant if apart else FLOOD for _, tenant in rows]
    traced = [row for row, _ in rows]
    outcome = simulate(traced, cluster, policy=make_policy("moonpool"), admission=make_admission("none"), tenants=tenants)
    found = [one.ttft_s for one, (_, tenant) in zip(outcome.requests, rows, strict=True) if tenant == QUIET]
    return [ttft_s * 1e3 for ttft_s in found if ttft_s is not None]


# -- live --------------------------------------------------------------------------------------------------------------


def _live(options: FairnessOptions, say: Callable[[str], None]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-fairness-") as folder:
        model = make_tiny_model(Path(folder) / "tiny")
        keys, tokens = [], {}
        for name in (QUIET, FLOOD):
            kept, tokens[name] = mint()
            keys.append({"name": name, "tenant": name, **kept})
        file = Path(folder) / "keys.toml"
        edit_book(file, lambda book: {"keys": keys})
        settings = {**SETTINGS, "model.name": "tiny", "security.api_keys_file": str(file)}
        with local_cluster(SPLIT, model, settings) as cluster:
            return asyncio.run(_measure(cluster.url, tokens, options, say))


async def _measure(url: str, tokens: dict[str, str], options: FairnessOptions, say: Callable[[str], None]) -> dict[str, float]:
    async with open_session(url, timeout_s=600) as session:
        client = _Client(session, tokens, Random(options.seed))
        await client.ask_all(QUIET, options.requests)  # what prompts cost here is learned
        alone = await client.ask_all(QUIET, options.requests)
        flood = [asyncio.create_task(client.flood()) for _ in range(options.times)]
        try:
            await client.flooded(2 * options.times)
            beside = await client.ask_all(QUIET, options.requests)
            one = await client.ask_all(FLOOD, options.requests)
        finally:
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
        told = _told(alone, beside, one, client.flood_ended, client.refused)
        say(f"live: {told['ratio']:.2f} times as long as alone, {told['ratio_one_tenant']:.2f} where both are one tenant")
        return told


class _Client:
    def __init__(self, session: aiohttp.ClientSession, tokens: dict[str, str], random: Random) -> None:
        self._session, self._tokens, self._random = session, tokens, random
        self._more = asyncio.Event()
        self.flood_ended = 0
        self.refused = 0

    async def ask_all(self, tenant: str, count: int) -> list[float]:
        """Times to first token in milliseconds, one request after the other."""
        found = []
        for _ in range(count):
            ttft_ms = await self._ask(tenant)
            if ttft_ms is None:
                self.refused += 1
            else:
                found.append(ttft_ms)
            await asyncio.sleep(PAUSE_S)
        if not found:
            raise ConfigError("bench: no request of the quiet tenant was answered; nothing to measure", param="bench")
        return found

    async def flood(self) -> None:
        while True:
            if await self._ask(FLOOD) is None:
                await asyncio.sleep(PAUSE_S)
            self.flood_ended += 1
            self._more.set()

    async def flooded(self, count: int) -> None:
        """Until so many of the flood's requests have ended."""
        while self.flood_ended < count:
            self._more.clear()
            await self._more.wait()

    async def _ask(self, tenant: str) -> float | None:
        """None: refused."""
        prompt = [self._random.randrange(TINY_IDS) for _ in range(self._random.choice(PROMPTS))]
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        headers = {"authorization": f"Bearer {self._tokens[tenant]}", "content-type": "application/json"}
        sent = time.monotonic()
        async with self._session.post("v1/completions", data=json.dumps(body), headers=headers) as response:
            if response.status != 200:
                return None
            await response.content.readline()
            first = time.monotonic()
            await response.read()
            return (first - sent) * 1e3


def _told(
    alone: Sequence[float], beside: Sequence[float], one: Sequence[float], flood_requests: int, refused: int
) -> dict[str, float]:
    a, b, c = (statistics.fmean(ttfts) for ttfts in (alone, beside, one))
    return {
        "alone_ttft_ms": a,
        "beside_flood_ttft_ms": b,
        "one_tenant_ttft_ms": c,
        "ratio": b / a,
        "ratio_one_tenant": c / a,
        "quiet_requests": len(beside),
        "flood_requests": flood_requests,
        "quiet_refused": refused,
    }
