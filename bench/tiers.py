"""``moonpool bench tiers``: the same prompt from device pages, from DRAM and from SSD, against computing it.

A cluster of one node with little device memory, little DRAM and an SSD tier is asked over HTTP for one token after a prompt of
2,048 tokens: first when nobody has seen it (cold), again at once (device), after one other prompt has pushed it out of the
device pages (dram), and after as many others as push it out of DRAM, too (ssd). What was read is taken from the store node's
own counters, so a figure cannot come from another tier than it says.

Keys: ``cold_ms``, ``device_ms``, ``dram_ms``, ``ssd_ms`` (medians of TTFT), ``device_vs_cold``, ``dram_vs_cold``,
``ssd_vs_cold``; ``ssd_blocks_read`` of ``blocks`` (least of the samples, for the ssd figure), ``ssd_blocks_read_for_dram``
(most of the samples: 0), ``direct_io`` (whether reads bypassed the page cache), ``samples``, ``machine``.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.bench.asking import BLOCK, AskingClient, ttft_ms
from moonpool.bench.local_cluster import BOTH, LocalCluster, local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.cluster.models import local_model
from moonpool.cluster.survey import Answer, survey
from moonpool.core.config import MIB
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Role
from moonpool.loadgen.client import HttpSender, open_session, served_model
from moonpool.loadgen.clock import MonotonicClock

_TOKENS = 2_048
_PAGES = 40  # one prompt and a little
_POOL = 96 * MIB  # two prompts and a little, of SmolLM2
_OTHERS = 4  # prompts that push one out of DRAM
_SETTLE_S = 0.5  # publishing and demoting go on after an answer


@dataclass(frozen=True, slots=True)
class TierOptions:
    """``path``: a folder on the disk to be measured; empty: a temporary one in the working directory."""

    model: str = "smollm2"
    path: str = ""
    repeats: int = 3


def tiers(options: TierOptions, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a cluster that does not start or answer."""
    if options.repeats < 1:
        raise ConfigError(f"repeats: {options.repeats} is too few; use 1 or more", param="repeats")
    model_dir = local_model(options.model, say)
    machine = machine_facts()
    with tempfile.TemporaryDirectory(prefix="moonpool-tiers-", dir=options.path or Path.cwd()) as folder:
        settings = {
            "model.dtype": "bfloat16",
            "engine.pages": str(_PAGES),
            "store.pool_bytes": str(_POOL),
            "store.ssd_path": folder,
            "store.ssd_bytes": "2GiB",
        }
        with local_cluster(BOTH, model_dir, settings) as cluster:
            found = asyncio.run(_measure(cluster, options.repeats, say))
    return {**figures(found.samples), **found.facts(), "machine": machine, "samples": found.samples}


def figures(samples: dict[str, list[float]]) -> dict[str, float]:
    middle = {name: statistics.median(values) for name, values in samples.items() if name.endswith("_ms")}
    ratios = {f"{tier}_vs_cold": middle[f"{tier}_ms"] / middle["cold_ms"] for tier in ("device", "dram", "ssd")}
    return {**middle, **ratios}


@dataclass(slots=True)
class _Found:
    samples: dict[str, list[float]]
    direct: bool

    def facts(self) -> dict[str, Any]:
        return {
            "tokens": _TOKENS,
            "blocks": _TOKENS // BLOCK,
            "ssd_blocks_read": min(self.samples["ssd_blocks"]),
            "ssd_blocks_read_for_dram": max(self.samples["dram_ssd_blocks"]),
            "direct_io": self.direct,
        }


async def _measure(cluster: LocalCluster, repeats: int, say: Callable[[str], None]) -> _Found:
    samples: dict[str, list[float]] = {}
    async with open_session(cluster.url, timeout_s=300) as session:
        client = AskingClient(HttpSender(session, MonotonicClock()), await served_model(session, cluster.url))
        prompts = iter(range(1, 1 << 20))

        async def ask(prompt: int, name: str | None) -> None:
            before = await _blocks_read(cluster)
            answer = await client.ask(prompt, _TOKENS, 1)
            await asyncio.sleep(_SETTLE_S)
            if name is not None:
                samples.setdefault(f"{name}_ms", []).append(ttft_ms(answer))
                read = await _blocks_read(cluster) - before
                if name in ("dram", "ssd"):
                    samples.setdefault("ssd_blocks" if name == "ssd" else "dram_ssd_blocks", []).append(read)

        for turn in range(repeats + 1):
            keep = turn > 0  # the first turn warms up
            prompt = next(prompts)
            await ask(prompt, "cold" if keep else None)
            await ask(prompt, "device" if keep else None)
            await ask(next(prompts), None)
            await ask(prompt, "dram" if keep else None)
            for _ in range(_OTHERS):
                await ask(next(prompts), None)
            await ask(prompt, "ssd" if keep else None)
            if keep:
                say(", ".join(f"{name} {samples[f'{name}_ms'][-1]:.0f} ms" for name in ("cold", "device", "dram", "ssd")))
    store = await _store(cluster)
    return _Found(samples, store.words.get("ssd_io") == "direct")


async def _store(cluster: LocalCluster) -> Answer:
    return next(a for a in await survey(cluster.registry) if a.change.member.role is Role.STORE)


async def _blocks_read(cluster: LocalCluster) -> float:
    return (await _store(cluster)).numbers.get("ssd_reads_ok", 0.0)
