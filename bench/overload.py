"""``moonpool bench overload``: a real local cluster under several times its capacity, with targets.

First the capacity is measured on the cluster itself, with as many requests in flight as keep it busy and no targets; what the
requests of that run took while few were in flight gives the targets. Then requests arrive at random (Poisson) at ``times``
that rate for ``seconds``, each with the targets in its headers; the admission is told to let in up to a chance of 1 % of a
miss. The client counts, and shares the machine's cores with the cluster. At the end, once all is idle, the largest prompt
that fits comes without targets: it must not be refused.

Keys of the result: ``capacity_per_s``, ``offered_per_s``, ``ttft_target_ms``, ``tbt_target_ms``, ``requests``, ``accepted``,
``refused``, ``failed``, ``inside`` and ``inside_share`` (of the accepted ones, both targets met), ``missed_ttft``,
``missed_tbt``, ``inside_per_s`` and its share of the capacity, ``refusal_p50_ms``, ``refusal_p99_ms``, ``refusal_max_ms``,
``retry_after_given`` (share of refusals), ``reasons``, ``accepted_ttft_p50_ms``, ``accepted_ttft_p99_ms``,
``memory_growth_mib`` of each kind of process (means of the last and the second quarter of the run), ``large_prompt_status``,
``busy_after`` (gauges that are not zero when all is over), ``machine``.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from moonpool.bench.local_cluster import LocalCluster, local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.cluster.models import local_model
from moonpool.cluster.survey import survey
from moonpool.core.errors import ConfigError
from moonpool.core.idle import not_idle
from moonpool.core.request import Targets
from moonpool.loadgen.client import HttpSender, open_session, served_model
from moonpool.loadgen.clock import MonotonicClock
from moonpool.loadgen.plan import Plan, PlannedSend
from moonpool.loadgen.prompts import PromptMaker, token_alphabet
from moonpool.loadgen.record import Outcome, RequestRecord
from moonpool.loadgen.replay import Replay, RequestShape

NODES = '[{"name": "a", "prefill": 1}, {"name": "b", "decode": 1, "conductor": 1, "gateway": 1}]'
SETTINGS = {
    "store.pool_bytes": "1 GiB",
    "transfer.carrier": "auto",
    "scheduler.admission_settings": '{"chance": 0.01}',  # what is asked of it below: 99 of 100 inside
}
BLOCK = 64
LENGTHS = (64, 128, 192, 256, 384, 512, 768)  # prompt tokens, equally often
OUTPUTS = (4, 8, 16, 24)
SHARED_BLOCKS, SHARED = 2, 4  # one of four prompts begins with one of four shared texts
IN_FLIGHT = 6  # keep both workers busy
SAMPLE_S = 2.0
SETTLE_S = 10.0
LARGE = 2_048


@dataclass(frozen=True, slots=True)
class OverloadOptions:
    """``slack``: a target is so many times what was usual while the cluster was not crowded."""

    times: float = 5.0
    seconds: float = 60.0
    calibrate: int = 60
    slack: float = 4.0
    seed: int = 1
    model: str = "smollm2"
    launcher: Literal["ray", "process"] = "process"
    settings: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        for name in ("times", "seconds", "slack"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is out of range; use a number above 0", param=name)
        if self.calibrate < 20:
            raise ConfigError(f"calibrate: {self.calibrate} requests say too little; use 20 or more", param="calibrate")


def overload(
    options: OverloadOptions, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a cluster that does not start or answer."""
    options.check()
    model_dir = local_model(options.model, say)
    settings = {**SETTINGS, **options.settings}
    with local_cluster(NODES, model_dir, settings, launcher=options.launcher) as cluster:
        found = asyncio.run(_measure(cluster, options, say))
    return {**found, "machine": machine_facts()}


async def _measure(cluster: LocalCluster, options: OverloadOptions, say: Callable[[str], None]) -> dict[str, Any]:
    async with open_session(cluster.url, timeout_s=300) as session:
        runs = _Runs(HttpSender(session, MonotonicClock()), await served_model(session, cluster.url))
        random = Random(options.seed)
        warm = [*LENGTHS, *LENGTHS]
        await runs.run(sends([0.0] * len(warm), random, warm), cap=1)
        calm = await runs.run(sends([0.0] * (options.calibrate // 3), random), cap=1)
        crowded = await runs.run(sends([0.0] * options.calibrate, random), cap=IN_FLIGHT)
        capacity = rate_of(crowded)
        targets = targets_of(calm, options.slack)
        say(f"capacity {capacity:.2f} requests/s; targets: ttft {targets.ttft_ms:.0f} ms, tbt {targets.tbt_ms:.0f} ms")
        at = arrivals(capacity * options.times, options.seconds, random)
        memory = _Memory(cluster.registry)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(memory.watch())
            records = await runs.run(sends(at, random), targets=targets)
            watching.cancel()
        found = figures(records, capacity, options)
        found |= {"memory_growth_mib": memory.growth(), "large_prompt_status": await runs.large(random)}
        found["busy_after"] = await _busy(cluster.registry)
    return found


class _Runs:
    def __init__(self, sender: HttpSender, model: str) -> None:
        self._sender = sender
        self._model = model
        self._prompts = PromptMaker(token_alphabet(), salt=11)

    async def run(self, planned: Sequence[PlannedSend], *, cap: int = 0, targets: Targets = Targets()) -> list[RequestRecord]:
        shape = RequestShape(self._model, f"overload-{secrets.token_hex(3)}", targets)
        replay = Replay(Plan(tuple(planned)), self._prompts, self._sender, shape, MonotonicClock(), cap=cap)
        await replay.run()
        return replay.records

    async def large(self, random: Random) -> int:
        """Status of the answer to the largest prompt, without targets."""
        await asyncio.sleep(SAMPLE_S)
        (record,) = await self.run(sends([0.0], random, [LARGE]))
        return record.status


def sends(at: Sequence[float], random: Random, lengths: Sequence[int] = ()) -> list[PlannedSend]:
    """One request at each instant, with prompts of their own but for shared beginnings."""
    out = []
    for index, when in enumerate(at):
        tokens = lengths[index] if lengths else random.choice(LENGTHS)
        blocks = -(-tokens // BLOCK)
        own = random.randrange(1 << 40) * 64 + (1 << 20)
        ids = [own + block for block in range(blocks)]
        if random.random() < 0.25 and blocks > SHARED_BLOCKS:
            text = random.randrange(SHARED)
            ids[:SHARED_BLOCKS] = [text * SHARED_BLOCKS + block for block in range(SHARED_BLOCKS)]
        out.append(PlannedSend(index, when, tokens, random.choice(OUTPUTS), tuple(ids), BLOCK, index, 0))
    return out


def arrivals(rate: float, seconds: float, random: Random) -> list[float]:
    """Instants of a Poisson process."""
    at: list[float] = []
    now = random.expovariate(rate)
    while now < seconds:
        at.append(now)
        now += random.expovariate(rate)
    return at


def rate_of(records: Sequence[RequestRecord]) -> float:
    """Answers per second between a tenth and nine tenths of them: neither filling nor emptying counts."""
    ends = sorted(record.ended_s for record in records if record.outcome is Outcome.OK and record.ended_s is not None)
    skipped = len(ends) // 10
    if len(ends) < 10 or ends[-1 - skipped] <= ends[skipped]:
        raise ConfigError(f"bench: {len(ends)} of {len(records)} requests were answered; too few to measure", param="bench")
    return (len(ends) - 2 * skipped - 1) / (ends[-1 - skipped] - ends[skipped])


def targets_of(calm: Sequence[RequestRecord], slack: float) -> Targets:
    """From what the slowest tenth of requests took alone."""
    first = sorted(record.ttft_ms for record in calm if record.ttft_ms is not None)
    gaps = sorted(record.tbt_ms for record in calm if record.tbt_ms is not None)
    if not first or not gaps:
        raise ConfigError("bench: no request was answered with text; nothing to derive targets from", param="bench")
    return Targets(slack * _quantile(first, 0.9), slack * _quantile(gaps, 0.9))


def figures(records: Sequence[RequestRecord], capacity: float, options: OverloadOptions) -> dict[str, Any]:
    accepted = [record for record in records if record.outcome is Outcome.OK]
    refused = [record for record in records if record.outcome is Outcome.REFUSED]
    inside = [record for record in accepted if record.met_targets]
    waits = sorted(record.latency_ms for record in refused if record.latency_ms is not None)
    first = sorted(record.ttft_ms for record in accepted if record.ttft_ms is not None)
    targets = records[0].targets if records else Targets()
    per_s = len(inside) / options.seconds
    return {
        "capacity_per_s": capacity,
        "offered_per_s": len(records) / options.seconds,
        "ttft_target_ms": targets.ttft_ms,
        "tbt_target_ms": targets.tbt_ms,
        "requests": len(records),
        "accepted": len(accepted),
        "refused": len(refused),
        "failed": len(records) - len(accepted) - len(refused),
        "inside": len(inside),
        "inside_share": len(inside) / max(len(accepted), 1),
        "missed_ttft": sum(1 for r in accepted if r.ttft_ms is not None and r.ttft_ms > (targets.ttft_ms or 0.0)),
        "missed_tbt": sum(1 for r in accepted if r.tbt_ms is not None and r.tbt_ms > (targets.tbt_ms or 0.0)),
        "inside_per_s": per_s,
        "inside_over_capacity": per_s / capacity,
        "refusal_p50_ms": _quantile(waits, 0.5),
        "refusal_p99_ms": _quantile(waits, 0.99),
        "refusal_max_ms": waits[-1] if waits else 0.0,
        "retry_after_given": sum(1 for r in refused if r.retry_after_s) / max(len(refused), 1),
        "reasons": dict(Counter(record.reason for record in records if record.outcome is not Outcome.OK)),
        "accepted_ttft_p50_ms": _quantile(first, 0.5),
        "accepted_ttft_p99_ms": _quantile(first, 0.99),
    }


def _quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values; 0 of none."""
    return values[min(int(share * len(values)), len(values) - 1)] if values else 0.0


class _Memory:
    """Resident bytes of every process, sampled."""

    def __init__(self, registry: str) -> None:
        self._registry = registry
        self._samples: dict[str, list[float]] = {}

    async def watch(self) -> None:
        while True:
            for answer in await survey(self._registry):
                if (size := answer.numbers.get("process_resident_bytes")) is not None:
                    self._samples.setdefault(answer.change.member.role.value, []).append(size)
            await asyncio.sleep(SAMPLE_S)

    def growth(self) -> dict[str, float]:
        return {role: growth_mib(samples) for role, samples in sorted(self._samples.items())}


def growth_mib(samples: Sequence[float]) -> float:
    """Mean of the last quarter less that of the second: the first is warm-up."""
    quarter = len(samples) // 4
    if not quarter:
        return 0.0
    return (statistics.fmean(samples[-quarter:]) - statistics.fmean(samples[quarter : 2 * quarter])) / (1 << 20)


async def _busy(registry: str) -> dict[str, float]:
    """What is not idle within ``SETTLE_S``: ``member.gauge`` -> value."""
    until = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        found = {
            f"{answer.change.member.id}.{gauge}": value
            for answer in await survey(registry)
            for gauge, value in not_idle(answer.numbers).items()
        }
        if not found or asyncio.get_running_loop().time() > until:
            return found
        await asyncio.sleep(0.2)
