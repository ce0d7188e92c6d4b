"""``moonpool bench cancels``: requests cancelled at random in every window of their lives, on a live cluster of real processes.

Clients close their connections, or the requests' deadlines pass, while other clients want their answers and compare them
with an oracle's. In which window each cancellation struck is read from the instants that the processes stamped. Afterwards
every gauge must be at its idle value, and no process may have more threads, sockets or files than before; a burst far above
capacity and a giant prompt in a flood of tiny ones come last.

The keys of the report: ``windows`` cancellations by window; ``faults`` what must not be, in words: none means good.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moonpool.bench.cancels.clients import Clients, Seen
from moonpool.bench.cancels.hostile import burst, giant_in_a_flood
from moonpool.bench.cancels.oracle import known_answers
from moonpool.bench.cancels.scenes import BLOCK, SCENES, Asks, Scene, next_scene
from moonpool.bench.cancels.watching import Watch, pausing
from moonpool.bench.local_cluster import LocalCluster, local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.bench.tiny_model import TINY_CONTEXT, TINY_IDS, make_tiny_model
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Role
from moonpool.core.windows import Window
from moonpool.loadgen.client import open_session

IDS = (1, TINY_IDS)
SHARE = 20  # of the cancellations at least one in so many strikes in each window
GIVE_UP = 2.0  # times the cancellations asked for, while some window still lacks its share
KEPT = 0.12  # share of requests that want their answers
IDLE_S = 15.0
GROWTH = 6  # handles that a process may have more: connections that gRPC happens to have open
SETTINGS = {
    "model.name": "tiny",
    "model.dtype": "float32",
    "engine.block_tokens": str(BLOCK),
    "engine.pages": "512",
    "engine.prefill_chunk": "32",
    "engine.threads": "1",
    "store.pool_bytes": "64 MiB",
    "store.region_bytes": "16 MiB",
    "transfer.carrier": "tcp",
    "transfer.throttle_bytes_per_s": "3000000",
    "scheduler.policy_settings": '{"lookahead_s": 0.2}',  # requests wait in a prefill worker's queue, too
    "timing.silent_after_ms": "10000",
    "timing.kill_after_ms": "0",
    "cluster.max_restarts": "0",
}


@dataclass(frozen=True, slots=True)
class CancelsOptions:
    """``decodes``: decode workers. ``turn``: cancellations of one scene before the next one is chosen."""

    count: int = 10_000
    seed: int = 1
    decodes: int = 2
    turn: int = 120
    settings: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        if self.count < len(Window) * SHARE:
            raise ConfigError(f"count: {self.count} is too few; use {len(Window) * SHARE} or more", param="count")

    @property
    def share(self) -> int:
        return self.count // SHARE

    def nodes(self) -> str:
        return f'[{{"name": "a", "prefill": 2}}, {{"name": "b", "decode": {self.decodes}, "conductor": 1, "gateway": 1}}]'


def cancels(options: CancelsOptions, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a cluster that does not start."""
    options.check()
    with tempfile.TemporaryDirectory(prefix="moonpool-cancels-") as folder:
        model_dir = make_tiny_model(Path(folder))
        known = known_answers(model_dir, options.seed, 24, IDS)
        settings = {**SETTINGS, "cluster.key_file": f"{folder}/hash.key", **options.settings}
        with local_cluster(options.nodes(), model_dir, settings) as cluster:
            found = asyncio.run(_measure(cluster, Asks(options.seed, IDS, known, TINY_CONTEXT), options, say))
    return {**found, "machine": machine_facts()}


async def _measure(cluster: LocalCluster, asks: Asks, options: CancelsOptions, say: Callable[[str], None]) -> dict[str, Any]:
    at, seen, begun = urlsplit(cluster.url), Seen(), time.monotonic()
    async with open_session(cluster.url, timeout_s=120) as session, Watch.open(cluster.registry) as watch:
        clients = Clients(at.hostname or "", at.port or 0, session, asks.random, seen)
        run = _Run(watch, clients, asks, options)
        before = await run.warm()
        busy = await run.all(say)
        hostile = await burst(clients, asks, watch) | await giant_in_a_flood(clients, asks, TINY_CONTEXT)
        busy = busy or await watch.idle(IDLE_S)
        grown = await _grown(watch, before)
        seconds = time.monotonic() - begun
    return _report(watch, seen, busy, grown, options, seconds) | hostile


async def _grown(watch: Watch, before: dict[str, float]) -> dict[str, float]:
    """Handles that are more than before, after connections that are merely kept for a while had time to close."""
    until = time.monotonic() + IDLE_S
    while True:
        after = await watch.handles()
        grown = {name: value - before[name] for name, value in after.items() if value - before[name] > GROWTH}
        if not grown or time.monotonic() > until:
            return grown
        await asyncio.sleep(0.5)


class _Run:
    def __init__(self, watch: Watch, clients: Clients, asks: Asks, options: CancelsOptions) -> None:
        self._watch, self._clients, self._asks, self._options = watch, clients, asks, options

    async def warm(self) -> dict[str, float]:
        """Every path once, so that what is made on first use is there: handles of each process, idle."""
        for ask in self._asks.warming():
            await self._clients.ask(ask)
        for scene in SCENES:
            await self._scene(scene, max(8, min(32, self._options.count // 100)))
        await self._settle()
        return await self._watch.handles()

    async def all(self, say: Callable[[str], None]) -> dict[str, float]:
        """Scenes until there were cancellations enough in all windows; what is not idle at the end."""
        options, watch, turn = self._options, self._watch, min(self._options.turn, self._options.share)
        watch.struck.clear()
        busy: dict[str, float] = {}
        while not busy:
            done = watch.struck.total()
            short = [w for w in Window if watch.struck[w] < options.share]
            if (done >= options.count and not short) or done >= GIVE_UP * options.count:
                break
            scene = next_scene(watch.struck)
            await self._scene(scene, turn)
            busy, found = await self._settle()
            say(f"{scene.aim:<10} {dict(sorted((w.value, n) for w, n in found.items()))} of {watch.struck.total()}")
        return busy

    async def _scene(self, scene: Scene, cuts: int) -> None:
        """``cuts`` requests that are cut, and others beside them."""
        left = [cuts]
        async with pausing(scene.pause, self._watch, self._asks.random), asyncio.TaskGroup() as group:
            forgetting = group.create_task(self._forget(scene))
            clients = [group.create_task(self._client(scene, left)) for _ in range(scene.clients)]
            await asyncio.wait(clients)
            forgetting.cancel()

    async def _client(self, scene: Scene, left: list[int]) -> None:
        while left[0] > 0:
            if self._asks.random.random() < KEPT:
                await self._clients.ask(self._asks.kept())
            else:
                left[0] -= 1
                await self._clients.ask(self._asks.cut(scene, self._clients.first_s))

    async def _forget(self, scene: Scene) -> None:
        while scene.forget:
            await self._watch.forget_pages()
            await asyncio.sleep(0.1)

    async def _settle(self) -> tuple[dict[str, float], dict[Window, int]]:
        busy = await self._watch.idle(IDLE_S)
        await self._watch.read()
        return busy, self._watch.tally()


def _report(
    watch: Watch, seen: Seen, busy: dict[str, float], grown: dict[str, float], options: CancelsOptions, seconds: float
) -> dict[str, Any]:
    held = sorted(watch.held_s)
    short = [f"{w}: {watch.struck[w]} of {options.share}" for w in Window if watch.struck[w] < options.share]
    faults = {
        "windows_short": short,
        "wrong": seen.wrong[:5],
        "odd_ends": seen.odd[:5],
        "busy_after": [f"{name} {value:g}" for name, value in busy.items()],
        "grown": [f"{name} +{value:g}" for name, value in grown.items()],
    }
    return {
        "cancels": watch.struck.total(),
        "seed": options.seed,
        "windows": {w.value: watch.struck[w] for w in Window},
        "cancels_when_over": watch.too_late,
        "wrong": len(seen.wrong),
        "odd_ends": len(seen.odd),
        **{f"clients_{name}": value for name, value in sorted(seen.counts.items())},
        "held_ms_p50": 1e3 * held[len(held) // 2] if held else 0.0,
        "held_ms_p99": 1e3 * held[len(held) * 99 // 100] if held else 0.0,
        "held_ms_max": 1e3 * held[-1] if held else 0.0,
        "gauges_busy_after": len(busy),
        "processes": len(watch.members),
        "decode_workers": len(watch.of(Role.DECODE)),
        "seconds": seconds,
        "faults": {name: found for name, found in faults.items() if found},
    }
