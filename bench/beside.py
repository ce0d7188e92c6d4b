"""One server's figures, and two servers' in turns: the samples of ``moonpool bench serve --peer-python``. See serve_peer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from moonpool.bench.asking import AskingClient, ttft_ms
from moonpool.bench.serve import together_ms
from moonpool.bench.sides import Samples, geometric_mean, ours_first
from moonpool.core.errors import ConfigError
from moonpool.loadgen.client import Answer

LENGTHS = (512, 2_048, 4_096)
WARM = (2_048, 4_096)
BATCHES = (1, 4, 16)
PROMPT = 128
OUTPUT = 128
IN_FLIGHT = 32
_WAVES = 2
SETTLE_S = 0.4  # after an answer a side still publishes blocks, and its threads have not yet gone to sleep
_PROMPTS_APART = 1_000  # of the prompts of one sample

Measure = Callable[[AskingClient, int], Awaitable[dict[str, float]]]  # the number makes its prompts its own


@dataclass(slots=True)
class Side:
    """``alone()`` holds while it is measured: whatever the other side would burn is held back."""

    client: AskingClient
    alone: Callable[[], AbstractContextManager[None]] = nullcontext
    settle_s: float = SETTLE_S
    samples: Samples = field(default_factory=dict)

    async def take(self, measure: Measure, number: int, *, keep: bool) -> None:
        with self.alone():
            found = await measure(self.client, number)
            await asyncio.sleep(self.settle_s)
        if keep:
            for name, value in found.items():
                self.samples.setdefault(name, []).append(value)


def first_token(length: int, settle_s: float = SETTLE_S) -> Measure:
    """``ttft_L_ms`` of a prompt never seen, and of the same again (``warm_ttft_L_ms``, ``warm_cached_L``)."""

    async def measure(client: AskingClient, number: int) -> dict[str, float]:
        found = {f"ttft_{length}_ms": ttft_ms(await client.ask(number * _PROMPTS_APART, length, 4))}
        if length in WARM:
            await asyncio.sleep(settle_s)
            warm = await client.ask(number * _PROMPTS_APART, length, 4)
            found[f"warm_ttft_{length}_ms"] = ttft_ms(warm)
            found[f"warm_cached_{length}"] = float(warm.reading.cached_tokens or 0)
        return found

    return measure


def per_token(batch: int) -> Measure:
    """``tpot_B_ms`` while B requests of 128 prompt tokens decode together."""

    async def measure(client: AskingClient, number: int) -> dict[str, float]:
        asked = [client.ask(number * _PROMPTS_APART + row, PROMPT, OUTPUT) for row in range(batch)]
        return {f"tpot_{batch}_ms": together_ms(await asyncio.gather(*asked))}

    return measure


async def throughput(client: AskingClient, number: int) -> dict[str, float]:
    """``out_tok_s_32``: output tokens per second with 32 requests in flight, two waves of them, prompts included."""
    rows = iter(range(IN_FLIGHT * _WAVES))

    async def keep_asking() -> list[Answer]:
        return [await client.ask(number * _PROMPTS_APART + row, PROMPT, OUTPUT) for row in rows]

    began = time.perf_counter()
    answers = [answer for each in await asyncio.gather(*(keep_asking() for _ in range(IN_FLIGHT))) for answer in each]
    taken = time.perf_counter() - began
    return {f"out_tok_s_{IN_FLIGHT}": sum(answer.reading.completion_tokens or 0 for answer in answers) / taken}


MEASURES: tuple[Measure, ...] = (
    *(first_token(length) for length in LENGTHS),
    *(per_token(batch) for batch in BATCHES),
    throughput,
)


async def take_turns(ours: Side, theirs: Side, turns: int, say: Callable[[str], None]) -> None:
    """``turns`` samples of every figure of both sides, after one that only warms up."""
    for turn in range(turns + 1):
        for at, measure in enumerate(MEASURES):
            number = turn * len(MEASURES) + at + 1
            for side in (ours, theirs) if ours_first(turn) else (theirs, ours):
                await side.take(measure, number, keep=turn > 0)
        say(f"turn {turn} of {turns}: {last_words(ours.samples, theirs.samples)}" if turn else "both are warm")


async def score_of(client: AskingClient) -> tuple[float, dict[str, float]]:
    """How slow a server is at everything measured here (geometric mean of times, smaller is better), from one sample each."""
    side = Side(client)
    for at, measure in enumerate(MEASURES):
        await side.take(measure, 1_000 + at, keep=False)
        await side.take(measure, 2_000 + at, keep=True)
    found = {name: values[0] for name, values in side.samples.items()}
    return score(found), found


def score(found: Mapping[str, float]) -> float:
    """ConfigError where nothing was measured."""
    times = [value for name, value in found.items() if name.endswith("_ms")]
    times += [1e3 / value for name, value in found.items() if name.startswith("out_tok_s")]
    if not times:
        raise ConfigError("bench: the peer gave no figures to choose its chunk budget by", param="peer")
    return geometric_mean(times)


def best_budget(scores: Mapping[int, float]) -> int:
    """The smallest budget among the fastest."""
    return min(scores, key=lambda budget: (scores[budget], budget))


def last_words(ours: Samples, theirs: Samples) -> str:
    """The last sample of each figure, ours over theirs."""
    shown: Sequence[str] = [name for name in ours if not name.startswith("warm_cached")]
    return ", ".join(f"{name} {ours[name][-1]:.4g} / {theirs[name][-1]:.4g}" for name in shown if theirs.get(name))
