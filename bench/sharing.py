"""``moonpool bench sharing``: prompts beside running answers on one machine, in each way of sharing its cores.

A few answers stream; then long prompts come, one as soon as the one before has its first token, and everything is timed as
clients see it. The ways take turns over ``rounds``, each with a cluster of its own:

    both            one worker, prompts and answers in one step, chunks by what the answers can bear
    both_whole      the same with whole chunks, whatever the answers say (engine.gap_ms = 0)
    split           a prefill and a decode worker with one thread each (engine.permit = off)
    split_turns     the same two with all cores, in turns (engine.permit = on)

Keys of the result, for every way ``W`` (medians over the rounds; each round is in ``samples``):

    W_prompt_tok_s                      prompt tokens computed per second beside the answers
    W_ttft_2048_ms, W_ttft_4096_ms      of those prompts (medians)
    W_gap_p50_ms, W_gap_p99_ms          between two pieces of an answer, while prompts are computed
    W_tbt_ms                            mean of the slowest tenth of these gaps: the target that requests carry
    W_alone_ttft_2048_ms                of a prompt while no answers run
    W_alone_gap_p50_ms                  between pieces while no prompts are computed

and ``gap_ms``, ``answers``, ``engine`` (the backend), ``machine``.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from moonpool.bench.asking import BLOCK, ttft_ms
from moonpool.bench.local_cluster import BOTH, SPLIT, local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.cluster.models import local_model
from moonpool.core.errors import ConfigError
from moonpool.loadgen.client import Answer, HttpSender, open_session, served_model
from moonpool.loadgen.clock import MonotonicClock
from moonpool.loadgen.plan import PlannedSend
from moonpool.loadgen.prompts import PromptMaker, token_alphabet
from moonpool.loadgen.record import Outcome, slowest_tenth

WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "both": (BOTH, {}),
    "both_whole": (BOTH, {"engine.gap_ms": "0"}),
    "split": (SPLIT, {"engine.permit": "off"}),
    "split_turns": (SPLIT, {"engine.permit": "on"}),
}
LENGTHS = (2_048, 4_096)
_SHORT, _ANSWER = 128, 3_000  # tokens of the answers' prompts, and more ids than there is time for
_OUTPUT = 4  # ids of the long prompts' own answers
_ALONE_S = 3.0  # of answers by themselves
_SETTLE_S = 0.5
_POOL = str(1 << 30)


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """``prompts``: long ones in each round, of both lengths in turns. ``gap_ms``: what the answers can bear."""

    ways: tuple[str, ...] = tuple(WAYS)
    answers: int = 4
    prompts: int = 6
    gap_ms: float = 100.0
    rounds: int = 1
    model: str = "smollm2"
    engine: str = "auto"

    def check(self) -> None:
        for name in ("answers", "prompts", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is out of range; use 1 or more", param=name)
        for way in self.ways:
            if way not in WAYS:
                raise ConfigError(f"way: {way!r} is unknown; use {', '.join(WAYS)}", param="way")


def sharing(options: SharingOptions, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a cluster that does not start or answer."""
    options.check()
    model_dir, machine = local_model(options.model, say), machine_facts()
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    for _ in range(options.rounds):
        for way in options.ways:
            nodes, settings = WAYS[way]
            common = {"store.pool_bytes": _POOL, "engine.backend": options.engine, "engine.gap_ms": str(options.gap_ms)}
            with local_cluster(nodes, model_dir, common | settings) as cluster:
                samples[way].append(asyncio.run(_round(cluster.url, options)))
            say(f"{way}: " + ", ".join(f"{name} {value:.1f}" for name, value in samples[way][-1].items()))
    return {**figures(samples), "gap_ms": options.gap_ms, "answers": options.answers, "engine": options.engine,
            "machine": machine, "samples": samples}  # fmt: skip


def figures(samples: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """The medians of every way's rounds."""
    return {
        f"{way}_{name}": statistics.median(one[name] for one in rounds)
        for way, rounds in samples.items()
        for name in (rounds[0] if rounds else ())
    }


async def _round(url: str, options: SharingOptions) -> dict[str, float]:
    async with open_session(url, timeout_s=300) as session:
        client = _Client(HttpSender(session, MonotonicClock()), await served_model(session, url))
        for length in (512, *LENGTHS):  # what steps cost is learned, and kernels are loaded
            await client.whole(length)
        await asyncio.sleep(_SETTLE_S)
        alone_ms = ttft_ms(await client.whole(LENGTHS[0]))
        async with asyncio.TaskGroup() as group:
            answers = [Answer() for _ in range(options.answers)]
            running = [group.create_task(client.ask(answer, _SHORT, _ANSWER)) for answer in answers]
            await _streaming(answers, running)
            quiet = await _window(answers, asyncio.sleep(_ALONE_S))
            long: list[tuple[int, Answer]] = []
            busy = await _window(answers, client.one_after_the_other(options.prompts, long))
            for task in running:
                task.cancel()
    return _told(long, busy, quiet, alone_ms)


async def _streaming(answers: Sequence[Answer], running: Sequence[asyncio.Task[None]]) -> None:
    """Until every answer has begun. ConfigError where one has ended instead."""
    while not all(answer.reading.texts for answer in answers):
        if any(task.done() for task in running):
            raise ConfigError(f"bench: an answer ended: {[answer.reason for answer in answers]}", param="bench")
        await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True)
class _Window:
    seconds: float
    gaps_ms: list[float]


async def _window(answers: Sequence[Answer], work: Any) -> _Window:
    """What ``answers`` did while ``work`` was going on."""
    clock = MonotonicClock()
    begun = clock.now()
    await work
    ended = clock.now()
    gaps = [(b - a) * 1e3 for answer in answers for a, b in pairwise(answer.reading.texts) if a >= begun and b <= ended]
    if not gaps:
        raise ConfigError("bench: the answers told nothing while prompts were computed; give fewer prompts", param="prompts")
    return _Window(ended - begun, gaps)


def _told(long: Sequence[tuple[int, Answer]], busy: _Window, quiet: _Window, alone_ms: float) -> dict[str, float]:
    ttfts = {length: [ttft_ms(answer) for asked, answer in long if asked == length] for length in LENGTHS}
    return {
        "prompt_tok_s": sum(length for length, _ in long) / busy.seconds,
        **{f"ttft_{length}_ms": statistics.median(found) for length, found in ttfts.items() if found},
        "gap_p50_ms": statistics.median(busy.gaps_ms),
        "gap_p99_ms": statistics.quantiles(busy.gaps_ms, n=100)[98] if len(busy.gaps_ms) > 1 else busy.gaps_ms[0],
        "tbt_ms": slowest_tenth(busy.gaps_ms) or 0.0,
        "alone_ttft_2048_ms": alone_ms,
        "alone_gap_p50_ms": statistics.median(quiet.gaps_ms),
    }


class _Client:
    """Asks for answers to prompts that were never seen before."""

    def __init__(self, sender: HttpSender, model: str) -> None:
        self._sender, self._model = sender, model
        self._prompts = PromptMaker(token_alphabet(), salt=11)
        self._number = 0

    async def ask(self, answer: Answer, tokens: int, output: int) -> None:
        self._number += 1
        ids = tuple(range(self._number * 1_000, self._number * 1_000 + -(-tokens // BLOCK)))
        content = self._prompts.json_prompt(PlannedSend(0, 0.0, tokens, output, ids, BLOCK, 0, 0))
        rest = {
            "model": self._model, "max_tokens": output, "min_tokens": output, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        await self._sender.send(json.dumps(rest).encode()[:-1] + b',"prompt":' + content + b"}", {}, answer)

    async def whole(self, tokens: int) -> Answer:
        answer = Answer()
        await self.ask(answer, tokens, _OUTPUT)
        if answer.outcome is not Outcome.OK:
            raise ConfigError(f"bench: the server answered {answer.status}: {answer.reason}", param="bench")
        return answer

    async def one_after_the_other(self, count: int, into: list[tuple[int, Answer]]) -> None:
        for number in range(count):
            length = LENGTHS[number % len(LENGTHS)]
            into.append((length, await self.whole(length)))
