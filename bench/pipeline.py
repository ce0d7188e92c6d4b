"""``moonpool bench pipeline``: one long prompt over two prefill workers, each its span of it, beside one worker alone.

A local cluster of three nodes, two with a prefill worker of one thread, one with the decode worker, all on the compiled
engine. The same prompt is computed by one worker and by both, in turns; placements are made by hand. The cut is that of the
conductor (``scheduler.spans``), by costs fitted to three prompts of one worker.

Keys of the result (times in ms, medians over ``repeats``):

    one_ttft_ms, group_ttft_ms
    factor                  one over group
    predicted_factor        by what one worker takes for each span (the second with the first one cached), and one layer's lag
    first_span_ms, second_span_ms, cut_tokens, tokens
    same_kv                 the decode host's pool has the same digests of all layers of all blocks after both
    same_ids
    samples, alone          every run; spans that were computed alone after all: 0 unless something failed
    machine
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.bench.direct import Direct, Run
from moonpool.bench.local_cluster import local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.cluster.models import local_model
from moonpool.core.errors import ConfigError
from moonpool.scheduler.spans import Seat, cut

TOKENS = 8_000
NODES = '[{"name": "a", "prefill": 1}, {"name": "b", "prefill": 1}, {"name": "c", "decode": 1, "conductor": 1, "gateway": 1}]'
_OUTPUT = 8
_IDS = (1_000, 40_000)  # of prompts
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    tokens: int = TOKENS
    repeats: int = 3
    model: str = "smollm2"
    engine: str = "compiled"
    carrier: str = "auto"

    def check(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats: {self.repeats} is too few; use 1 or more", param="repeats")
        if self.tokens < 256:
            raise ConfigError(f"tokens: {self.tokens} is too short a prompt for two spans; use 256 or more", param="tokens")


def pipeline(options: PipelineOptions, say: Say = lambda line: print(line, file=sys.stderr)) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a cluster that does not start or answer."""
    options.check()
    model = local_model(options.model, say)
    with tempfile.TemporaryDirectory(prefix="moonpool-pipeline-") as folder:
        key = Path(folder) / "hash.key"
        settings = {
            "model.dtype": "bfloat16",
            "engine.backend": options.engine,
            "engine.threads": "1",
            "engine.permit": "off",
            "engine.pages": str(options.tokens // 64 + 16),
            "store.pool_bytes": str(512 << 20),
            "timing.kill_after_ms": "0",  # this process reads the pool, and is no member
            "transfer.carrier": options.carrier,
            "cluster.key_file": str(key),
        }
        with local_cluster(NODES, model, settings) as cluster:
            return asyncio.run(_measure(cluster.registry, key, options, say))


async def _measure(registry: str, key: Path, options: PipelineOptions, say: Say) -> dict[str, Any]:
    draw = random.Random(8)
    prompt = draw.choices(range(*_IDS), k=options.tokens)
    async with Direct.open(registry, key) as direct:
        end = await _cut(direct, draw, options.tokens, say)
        head = prompt[: end * direct.layout.block_tokens]
        samples: dict[str, list[float]] = {"first_span": [], "second_span": [], "one": [], "group": []}
        same_kv = same_ids = True
        for repeat in range(options.repeats + 1):
            one, kv = await _cold(direct, prompt, say)
            group, group_kv = await _cold(direct, prompt, say, ends=[end])
            same_kv &= kv == group_kv and len(kv) == options.tokens // direct.layout.block_tokens
            same_ids &= one.ids == group.ids
            await direct.forget()
            first = await direct.ask(head, 1)
            second = await direct.ask(prompt, 1)
            if repeat:  # the first one warms up
                for name, run in (("first_span", first), ("second_span", second), ("one", one), ("group", group)):
                    samples[name].append(run.ttft_s)
        alone = await direct.counted("spans_alone_count")
        return figures(samples, direct.layout.layers) | {
            "tokens": options.tokens,
            "cut_tokens": len(head),
            "same_kv": same_kv,
            "same_ids": same_ids,
            "alone": alone,
            "samples": {name: [seconds * 1e3 for seconds in runs] for name, runs in samples.items()},
            "machine": machine_facts(),
        }


async def _cold(direct: Direct, prompt: Sequence[int], say: Say, *, ends: Sequence[int] = ()) -> tuple[Run, list[bytes]]:
    await direct.forget()
    run = await direct.ask(prompt, _OUTPUT, ends=ends)
    say(f"{len(ends) + 1} worker(s): first id after {run.ttft_s * 1e3:.0f} ms")
    return run, await direct.digests(prompt)


async def _cut(direct: Direct, draw: random.Random, tokens: int, say: Say) -> int:
    """The block before which the first span ends: seconds a + b n + c n^2 through what one worker takes for three prompts."""
    lengths = [tokens // 4, tokens // 2, tokens]
    await direct.ask(draw.choices(range(*_IDS), k=lengths[0]), 1)
    taken = [(await direct.ask(draw.choices(range(*_IDS), k=n), 1)).ttft_s for n in lengths]
    a, b, c = np.linalg.solve(np.vander(lengths, 3, increasing=True).astype(float), np.array(taken))
    seat = Seat(0.0, max(float(a), 0.0), max(float(b), 1e-9), max(float(c), 0.0))
    size = direct.layout.block_tokens
    bounds = cut(0, tokens, size, [seat, seat], direct.layout.layers)
    if bounds is None:
        raise ConfigError(f"tokens: {tokens} are too few for two spans of blocks of {size} tokens", param="tokens")
    say(f"one worker: {taken[-1] * 1e3:.0f} ms; spans of {bounds[1]} and {tokens - bounds[1]} tokens")
    return bounds[1] // size


def figures(samples: dict[str, list[float]], layers: int) -> dict[str, float]:
    """Of ``samples`` in seconds; see the module for the keys."""
    first, second, one, group = (statistics.median(samples[name]) for name in ("first_span", "second_span", "one", "group"))
    predicted = one / (max(first, second) + first / layers)
    return {
        "one_ttft_ms": one * 1e3,
        "group_ttft_ms": group * 1e3,
        "factor": one / group,
        "predicted_factor": predicted,
        "first_span_ms": first * 1e3,
        "second_span_ms": second * 1e3,
    }
