"""``moonpool bench serve``: a served model over HTTP against plain ``transformers`` on the same machine, in the same run.

Every figure of ours is measured from an HTTP client that streams (prompts as token ids, end-of-text ignored), so it contains
gateway, conductor, hand-off and stream. The other side is ``transformers`` ``generate`` with its KV cache, sdpa attention and
every core, in a child process. The two take turns, sample by sample, so that a machine that speeds up or slows down does so
for both; each figure is the median of its samples, and every sample is in the result.

Keys of the result, for every measured mode ``M`` (``both``: one worker with every core; ``split``: a prefill and a decode
worker on two nodes, one thread each), B in 1, 4, 16 and L in 512, 2048:

    M_ttft_L_ms                     to the first text, prompt never seen before
    M_warm_ttft_L_ms                the same prompt again
    M_warm_cached_L                 prompt tokens the server then reports as cached (least of the samples)
    M_warm_over_cold_ttft_L         their ratio
    M_tpot_B_ms                     time per token while B requests of 128 prompt tokens decode together
    M_transformers_ttft_L_ms, M_transformers_tpot_B_ms          the other side, in that mode's turns
    M_ttft_L_vs_transformers, M_tpot_B_vs_transformers          ours / theirs: below 1 is faster

and without a prefix those of ``both`` (of ``split`` where only that was measured). Beside them: ``mode``, ``model``,
``dtype``, ``transformers_threads``, ``machine`` (see bench.machine), ``peer`` ("not given": bench.serve_peer compares with
another server, if there is one) and ``samples``: {M: {figure: [each value]}}.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from moonpool.bench.asking import AskingClient, ttft_ms
from moonpool.bench.local_cluster import BOTH, SPLIT, local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.bench.our_side import engine_settings
from moonpool.bench.transformers_side import OtherSide, transformers_side
from moonpool.cluster.models import local_model
from moonpool.core.errors import ConfigError
from moonpool.loadgen.client import Answer, HttpSender, open_session, served_model
from moonpool.loadgen.clock import MonotonicClock

LENGTHS = (512, 2_048)
BATCHES = (1, 4, 16)
_PROMPT = 128  # tokens of the prompts of the decode figures
_OUTPUT = 128
_LEAST_TOGETHER = 16  # tokens each request must emit while all of the batch decode
_SETTLE_S = 0.3  # between two turns: the side that just worked has then stopped spinning and publishing
_POOL = str(1 << 30)
_QUIET_LOAD = 0.5

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """``repeats``: samples per figure, after one that only warms up."""

    mode: Literal["both", "split", "all"] = "all"
    model: str = "smollm2"
    repeats: int = 3
    launcher: Literal["ray", "process"] = "process"
    carrier: str = "auto"
    engine: str = "auto"

    def check(self) -> None:
        if self.mode not in ("both", "split", "all"):
            raise ConfigError(f"mode: {self.mode!r} is unknown; use both, split or all", param="mode")
        if self.repeats < 1:
            raise ConfigError(f"repeats: {self.repeats} is too few; use 1 or more", param="repeats")


def serve(options: ServeOptions, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a side that does not start or answer."""
    options.check()
    model_dir = local_model(options.model, say)
    machine = machine_facts()
    threads = int(str(machine["cores"]))
    if float(str(machine["load_1_min"])) > _QUIET_LOAD:
        say(
            f"warning: load {machine['load_1_min']}: something else is computing here, and OpenMP threads that wait for one"
            " another then lose far more than their share; figures and ratios of this run mean little"
        )
    samples: dict[str, Samples] = {}
    for mode in ("both", "split") if options.mode == "all" else (options.mode,):
        nodes = BOTH if mode == "both" else SPLIT
        settings = {
            "model.dtype": "bfloat16",
            **engine_settings(options.engine),
            "store.pool_bytes": _POOL,
            "transfer.carrier": options.carrier,
        }
        with local_cluster(nodes, model_dir, settings, launcher=options.launcher) as cluster:
            with transformers_side(model_dir, threads) as other:
                say(f"measuring {mode} at {cluster.url}")
                samples[mode] = asyncio.run(measure(cluster.url, other, options.repeats, say))
    facts = {"mode": options.mode, "model": options.model, "dtype": "bfloat16", "transformers_threads": threads}
    facts |= {"engine": options.engine, "peer": "not given"}
    return {**facts, "machine": machine, **figures(samples), "samples": samples}


def figures(samples: dict[str, Samples]) -> dict[str, float]:
    """Medians and ratios of every mode, prefixed with it, and those of the first mode again without a prefix."""
    out: dict[str, float] = {}
    for position, (mode, found) in enumerate(samples.items()):
        made = _figures_of(found)
        out.update({f"{mode}_{key}": value for key, value in made.items()})
        if position == 0:
            out.update(made)
    return out


def _figures_of(found: Samples) -> dict[str, float]:
    middle = {name: statistics.median(values) for name, values in found.items()}
    out: dict[str, float] = {}
    for length in LENGTHS:
        out[f"warm_cached_{length}"] = min(found[f"warm_cached_{length}"])
        out[f"warm_over_cold_ttft_{length}"] = middle[f"warm_ttft_{length}_ms"] / middle[f"ttft_{length}_ms"]
    for name, value in middle.items():
        if name.endswith("_ms"):
            out[name] = value
        if (theirs := middle.get(f"transformers_{name}")) is not None:
            out[f"{name.removesuffix('_ms')}_vs_transformers"] = value / theirs
    return out


async def measure(url: str, other: OtherSide, repeats: int, say: Callable[[str], None]) -> Samples:
    """All samples of one server and of ``other``, taken in turns."""
    async with open_session(url, timeout_s=300) as session:
        client = AskingClient(HttpSender(session, MonotonicClock()), await served_model(session, url))
        turns = _Turns(client, other)
        for length in LENGTHS:
            for repeat in range(repeats + 1):
                await turns.first_token(length, keep=repeat > 0)
            say(turns.words(f"ttft_{length}_ms"))
        for batch in BATCHES:
            for repeat in range(repeats + (batch == 1)):  # the first kind of step is warmed up, the others are alike
                await turns.per_token(batch, keep=repeat > 0 or batch != 1)
            say(turns.words(f"tpot_{batch}_ms"))
    return turns.samples


class _Turns:
    """Ours, theirs, ours, theirs: one sample of each per call. Theirs blocks the event loop: nothing of ours runs meanwhile."""

    def __init__(self, client: AskingClient, other: OtherSide) -> None:
        self._client = client
        self._other = other
        self._turn = 0
        self.samples: Samples = {}

    def words(self, name: str) -> str:
        ours, theirs = (statistics.median(self.samples[n]) for n in (name, f"transformers_{name}"))
        return f"{name} {ours:.1f}, transformers {theirs:.1f}, ratio {ours / theirs:.2f}"

    async def first_token(self, length: int, *, keep: bool) -> None:
        self._turn += 1
        cold = await self._client.ask(self._turn, length, 4)
        await asyncio.sleep(_SETTLE_S)
        warm = await self._client.ask(self._turn, length, 4)
        await asyncio.sleep(_SETTLE_S)
        theirs = self._other.first_token_ms(length, self._turn)
        await asyncio.sleep(_SETTLE_S)
        if keep:
            self._add(f"ttft_{length}_ms", ttft_ms(cold))
            self._add(f"warm_ttft_{length}_ms", ttft_ms(warm))
            self._add(f"warm_cached_{length}", float(warm.reading.cached_tokens or 0))
            self._add(f"transformers_ttft_{length}_ms", theirs)

    async def per_token(self, batch: int, *, keep: bool) -> None:
        self._turn += 1
        asked = [self._client.ask(self._turn * 1_000 + row, _PROMPT, _OUTPUT) for row in range(batch)]
        ours = together_ms(await asyncio.gather(*asked))
        await asyncio.sleep(_SETTLE_S)
        theirs = self._other.per_token_ms(batch, _PROMPT, _OUTPUT, self._turn)
        await asyncio.sleep(_SETTLE_S)
        if keep:
            self._add(f"tpot_{batch}_ms", ours)
            self._add(f"transformers_tpot_{batch}_ms", theirs)

    def _add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)


def together_ms(answers: list[Answer]) -> float:
    """Time per token of one request while all of ``answers`` were decoding: from the last first text to the first last one.

    A piece of text may hold several tokens; each counts for as many as the request's pieces hold on average.
    """
    begin = max(a.reading.texts[0] for a in answers)
    end = min(a.reading.texts[-1] for a in answers)
    tokens = []
    for answer in answers:
        texts = answer.reading.texts
        per_piece = (answer.reading.completion_tokens or len(texts)) / len(texts)
        tokens.append(sum(begin < t <= end for t in texts) * per_piece)
    if min(tokens) < _LEAST_TOGETHER:
        raise ConfigError(
            f"bench: the {len(answers)} requests decoded together for {min(tokens):.0f} tokens only, {_LEAST_TOGETHER} needed",
            param="bench",
        )
    return (end - begin) * 1e3 / statistics.fmean(tokens)
