"""``moonpool bench path``: everything around compute, from the socket to the token, on a model that computes about nothing.

A local cluster is asked over HTTP as a client does it. The model is tiny and has the vocabulary and the tokenizer of the
bundled one: prompts are parsed, tokenised, hashed and placed, and ids told, decoded and written as those of a real one.
The *bare* engine is the same model in this process with nothing around it: what a figure exceeds it by is the path.

Keys of the result, for every measured mode M (both, split), L in 2048, 4096, kind K in ids, text, B in 1, 4, 16, 32:

    M_warm_ttft_L_K_ms          a prompt that was asked before, from sending it to the first text
    M_added_L_K_ms              what that is above the bare step which computes its last token
    M_waterfall_L_K             {step: ms}, each the median of its samples; see bench.path_steps
    M_tpot_B_ms, M_tokens_s_B   B requests in flight: time per token of one of them; tokens per second of all
    M_around_B_ms               that time above the bare step of the same batch
    M_cpu_us_token_B            {role: CPU microseconds per token}, client included
    M_messages_token_B, M_events_token_B    on token streams, and events of store nodes, per token
    M_idle_cpu                  {role: share of a core} while nobody asks for anything

Beside them ``bare_step_B_ms``, ``bare_warm_L_ms``, ``repeats``, ``machine``.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moonpool.bench.local_cluster import BOTH, SPLIT, LocalCluster, local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.bench.path_asking import PathClient
from moonpool.bench.path_model import CONTEXT, BareEngine, make_path_model
from moonpool.bench.path_steps import Mode, middle, steps_ms
from moonpool.bench.path_usage import Meter, Usage, Watched
from moonpool.bench.serve import together_ms
from moonpool.cluster.models import local_model
from moonpool.core.config import Config, EngineConfig, ModelConfig
from moonpool.core.errors import ConfigError

LENGTHS = (2_048, 4_096)
KINDS: tuple[Literal["ids", "text"], ...] = ("ids", "text")
BATCHES = (1, 4, 16, 32)
_OUTPUT = 512
_PAGES = 1_024
_BARE_STEPS = 200
_SETTLE_S = 0.2
_IDLE_S = 5.0
_SETTINGS = {"store.pool_bytes": str(256 << 20), "engine.pages": str(_PAGES), "engine.threads": "1"}


@dataclass(frozen=True, slots=True)
class PathOptions:
    """``repeats``: samples per figure, after one that only warms up."""

    mode: Literal["both", "split", "all"] = "all"
    repeats: int = 5
    model: str = "smollm2"  # whose tokenizer it is

    def check(self) -> None:
        if self.mode not in ("both", "split", "all"):
            raise ConfigError(f"mode: {self.mode!r} is unknown; use both, split or all", param="mode")
        if self.repeats < 1:
            raise ConfigError(f"repeats: {self.repeats} is too few; use 1 or more", param="repeats")


def path(options: PathOptions, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a cluster that does not start or answer."""
    options.check()
    real = local_model(options.model, say)
    modes: Sequence[Mode] = ("both", "split") if options.mode == "all" else (options.mode,)
    found: dict[str, Any] = {"repeats": options.repeats, "machine": machine_facts()}
    with tempfile.TemporaryDirectory(prefix="moonpool-path-") as folder:
        model = make_path_model(Path(folder) / "path", real)
        bare = _bare(model, options.repeats)
        found |= bare
        for mode in modes:
            with local_cluster(BOTH if mode == "both" else SPLIT, model, _SETTINGS) as cluster:
                say(f"measuring {mode} at {cluster.url}")
                found |= {
                    f"{mode}_{key}": value for key, value in asyncio.run(_measure(cluster, mode, model, options, bare)).items()
                }
    return found


def _bare(model: Path, repeats: int) -> dict[str, float]:
    config = Config(model=ModelConfig(path=str(model), max_context=CONTEXT), engine=EngineConfig(pages=_PAGES, threads=1))
    engine = BareEngine(config, model, threads=1)
    try:
        engine.steps_s(1, _BARE_STEPS)
        steps = {f"bare_step_{n}_ms": statistics.median(engine.steps_s(n, _BARE_STEPS)) * 1e3 for n in BATCHES}
        return steps | {f"bare_warm_{n}_ms": statistics.median(engine.warm_ms(n, repeats + 1)) for n in LENGTHS}
    finally:
        engine.close()


async def _measure(
    cluster: LocalCluster, mode: Mode, model: Path, options: PathOptions, bare: dict[str, float]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    watched = await Watched.of(cluster.registry, cluster.supervisor)
    meter = Meter(cluster.registry, watched)
    async with PathClient.open(cluster, mode, model) as client:
        for length in LENGTHS:
            for kind in KINDS:
                found |= await _warm(client, mode, length, kind, options.repeats, bare)
        for batch in BATCHES:
            found |= await _per_token(client, meter, batch, options.repeats, bare)
    await asyncio.sleep(_SETTLE_S)
    await meter.begin()
    await asyncio.sleep(_IDLE_S)
    idle = await meter.end()
    found["idle_cpu"] = {role: seconds / idle.seconds for role, seconds in idle.cpu_s.items()}
    return found


async def _warm(
    client: PathClient, mode: Mode, length: int, kind: Literal["ids", "text"], repeats: int, bare: dict[str, float]
) -> dict[str, Any]:
    samples = []
    for repeat in range(repeats + 2):  # the first computes it, the second finds it and still meets code for the first time
        points = await client.life_of(kind, length)
        await asyncio.sleep(_SETTLE_S)
        if repeat > 1:
            samples.append(steps_ms(mode, points))
    steps = middle(samples)
    whole = steps.pop("whole")
    name = f"{length}_{kind}"
    return {
        f"warm_ttft_{name}_ms": whole,
        f"added_{name}_ms": whole - bare[f"bare_warm_{length}_ms"],
        f"waterfall_{name}": steps,
    }


async def _per_token(client: PathClient, meter: Meter, batch: int, repeats: int, bare: dict[str, float]) -> dict[str, Any]:
    taken: list[float] = []
    used: list[Usage] = []
    for repeat in range(repeats + 1):
        await meter.begin()
        answers = await asyncio.gather(*(client.ask(batch * 1_000 + repeat * 100 + row, _OUTPUT) for row in range(batch)))
        usage = await meter.end()
        await asyncio.sleep(_SETTLE_S)
        if repeat:
            taken.append(together_ms(answers))
            used.append(usage)
    tpot = statistics.median(taken)
    tokens = sum(one.tokens for one in used)
    return {
        f"tpot_{batch}_ms": tpot,
        f"tokens_s_{batch}": batch * 1e3 / tpot,
        f"around_{batch}_ms": tpot - bare[f"bare_step_{batch}_ms"],
        f"cpu_us_token_{batch}": {role: sum(one.cpu_s[role] for one in used) / tokens * 1e6 for role in used[0].cpu_s},
        f"messages_token_{batch}": sum(one.messages for one in used) / tokens,
        f"events_token_{batch}": sum(one.events for one in used) / tokens,
    }
