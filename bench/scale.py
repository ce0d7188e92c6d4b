"""``moonpool bench scale``: what a request costs beside its compute, as workers, blocks and prompts grow. Without a peer.

Keys, microseconds or milliseconds at the median, each with the ratio of the largest over the smallest size:

    workers_N_us, N in 1, 4, 16, 64          everything a conductor does for one request (place it, hear of its blocks, of its
                                             worker, of its end) with N nodes of role both, each with two requests in flight
    workers_64_over_1
    index_N_us, N in 1k, 10k, 100k, 1000k    the same at 16 workers with N blocks in the index
    index_1000k_over_1k
    pool_N_us, N in 1k, 16k, 128k            everything a full pool of N blocks does for one prompt of 24 blocks
    pool_128k_over_1k
    length_L_ms, L in 512, 2048, 8192, 32768     to the first text of a prompt that was asked before, over HTTP, on a model that
                                             computes about nothing (2 layers of width 64), role both
    length_L_cpu_ms, length_L_cpu_by_role    CPU of all processes of the cluster for it, what they burn anyway taken off
    length_L_cpu_us_per_1k                   CPU for each 1,024 tokens that a prompt is longer than the shortest
    length_32768_over_512, length_32768_over_512_cpu
    members_N_ms, members_N_cpu_ms           512 tokens over HTTP while N workers are in the cluster's list, of which one works;
                                             members_64_over_1, members_64_over_1_cpu

A prompt's ids are parsed, hashed and matched, so its cost grows with its length; per token it must not.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.bench.asking import AskingClient, ttft_ms
from moonpool.bench.local_cluster import BOTH, LocalCluster, local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.bench.path_usage import CLIENT, Watched
from moonpool.bench.scale_members import standing_by
from moonpool.bench.scale_parts import deciding_us, pool_us
from moonpool.bench.tiny_model import make_tiny_model
from moonpool.core.errors import ConfigError
from moonpool.loadgen.client import HttpSender, open_session, served_model
from moonpool.loadgen.clock import MonotonicClock

WORKERS = (1, 4, 16, 64)
INDEXED = (1_000, 10_000, 100_000, 1_000_000)
POOLED = (1_000, 16_000, 128_000)
LENGTHS = (512, 2_048, 8_192, 32_768)
_INDEX_WORKERS = 16
_WORKERS_INDEX = 50_000
_OUTPUT = 2
_IDS = 32_768
_IDLE_S = 4.0
_SETTLE_S = 0.3
MEMBERS = (1, 16, 64)
_SETTINGS = {
    "model.dtype": "float32",
    "engine.page_bytes": "256MiB",
    "store.pool_bytes": "256MiB",
    "engine.threads": "1",
    "timing.silent_after_ms": "20000",  # members that stand by beat slowly
}
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """``rounds``: requests per figure of the parts. ``repeats``: requests per length. ``live``: also lengths, on a cluster."""

    rounds: int = 1_000
    repeats: int = 20
    live: bool = True
    lengths: tuple[int, ...] = LENGTHS

    def check(self) -> None:
        for name, value in (("rounds", self.rounds), ("repeats", self.repeats)):
            if value < 1:
                raise ConfigError(f"{name}: {value} is too few; use 1 or more", param=name)


def scale(options: ScaleOptions, say: Say) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a cluster that does not start or answer."""
    options.check()
    machine = machine_facts()
    say(f"this takes about {'2 minutes' if options.live else 'a minute'}")
    found: dict[str, float] = {}
    for workers in WORKERS:
        found[f"workers_{workers}_us"] = deciding_us(workers, _WORKERS_INDEX, options.rounds)
    say(f"conductor: {found}")
    for blocks in INDEXED:
        found[f"index_{blocks // 1_000}k_us"] = deciding_us(_INDEX_WORKERS, blocks, options.rounds)
    for blocks in POOLED:
        found[f"pool_{blocks // 1_000}k_us"] = pool_us(blocks, options.rounds)
    say(f"pool: { {name: value for name, value in found.items() if name.startswith('pool')} }")
    by_role: dict[str, dict[str, float]] = {}
    if options.live:
        with tempfile.TemporaryDirectory(prefix="moonpool-scale-") as folder:
            model = make_tiny_model(Path(folder) / "tiny", _IDS, max(options.lengths) + 1_024)
            with local_cluster(BOTH, model, _SETTINGS) as cluster:
                lived, by_role = asyncio.run(_live(cluster, options, say))
        found |= lived
    return {**found, **ratios(found), **by_role, "rounds": options.rounds, "repeats": options.repeats, "machine": machine}


def ratios(found: dict[str, float]) -> dict[str, float]:
    """The largest size over the smallest of each kind that was measured."""
    out: dict[str, float] = {}
    for kind, unit, sizes in (
        ("workers", "us", [str(n) for n in WORKERS]),
        ("index", "us", [f"{n // 1_000}k" for n in INDEXED]),
        ("pool", "us", [f"{n // 1_000}k" for n in POOLED]),
        ("length", "ms", [str(n) for n in LENGTHS]),
        ("length", "cpu_ms", [str(n) for n in LENGTHS]),
        ("members", "ms", [str(n) for n in MEMBERS]),
        ("members", "cpu_ms", [str(n) for n in MEMBERS]),
    ):
        measured = [(size, found[name]) for size in sizes if (name := f"{kind}_{size}_{unit}") in found]
        if len(measured) > 1 and measured[0][1] > 0:
            (least, low), (most, high) = measured[0], measured[-1]
            out[f"{kind}_{most}_over_{least}{'' if unit != 'cpu_ms' else '_cpu'}"] = high / low
    return out


async def _live(cluster: LocalCluster, options: ScaleOptions, say: Say) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    out: dict[str, float] = {}
    by_role: dict[str, dict[str, float]] = {}
    async with open_session(cluster.url, timeout_s=600) as session:
        client = AskingClient(HttpSender(session, MonotonicClock()), await served_model(session, cluster.url))
        warm = _Warm(client, await Watched.of(cluster.registry, cluster.supervisor), options.repeats)
        await client.ask(0, 512, _OUTPUT)
        for at, length in enumerate(options.lengths, 1):
            out[f"length_{length}_ms"], used = await warm.request(at, length)
            out[f"length_{length}_cpu_ms"], by_role[f"length_{length}_cpu_by_role"] = sum(used.values()), used
            say(f"{length} tokens: {out[f'length_{length}_ms']:.2f} ms, CPU {out[f'length_{length}_cpu_ms']:.2f} ms")
        for members in MEMBERS:
            async with standing_by(cluster, members - 1):
                out[f"members_{members}_ms"], used = await warm.request(1, options.lengths[0])
                out[f"members_{members}_cpu_ms"], by_role[f"members_{members}_cpu_by_role"] = sum(used.values()), used
            say(f"{members} members: {out[f'members_{members}_ms']:.2f} ms, CPU {out[f'members_{members}_cpu_ms']:.2f} ms")
    return out | per_1k(out, options.lengths), by_role


@dataclass(frozen=True, slots=True)
class _Warm:
    """Prompts that were asked before: what is left is the path."""

    client: AskingClient
    watched: Watched
    repeats: int

    async def request(self, prompt: int, length: int) -> tuple[float, dict[str, float]]:
        """Median ms to the first text, and ms of CPU by role, less what a role burns while nobody asks."""
        for _ in range(3):  # the first may compute it, the others are warm already
            await self.client.ask(prompt, length, _OUTPUT)
        await asyncio.sleep(_SETTLE_S)
        idle = await self._cpu_per_s()
        before, began = self.watched.cpu_s(), time.monotonic()
        taken = [ttft_ms(await self.client.ask(prompt, length, _OUTPUT)) for _ in range(self.repeats)]
        seconds = time.monotonic() - began
        spent = {role: used - before[role] - idle[role] * seconds for role, used in self.watched.cpu_s().items()}
        return statistics.median(taken), {
            role: max(used, 0.0) * 1e3 / self.repeats for role, used in spent.items() if role != CLIENT
        }

    async def _cpu_per_s(self) -> dict[str, float]:
        before, began = self.watched.cpu_s(), time.monotonic()
        await asyncio.sleep(_IDLE_S)
        return {role: (used - before[role]) / (time.monotonic() - began) for role, used in self.watched.cpu_s().items()}


def per_1k(found: dict[str, float], lengths: tuple[int, ...]) -> dict[str, float]:
    """CPU of each 1,024 tokens above the shortest prompt, microseconds."""
    least = lengths[0]
    return {
        f"length_{length}_cpu_us_per_1k": (found[f"length_{length}_cpu_ms"] - found[f"length_{least}_cpu_ms"])
        * 1e3
        / ((length - least) / 1_024)
        for length in lengths[1:]
    }
