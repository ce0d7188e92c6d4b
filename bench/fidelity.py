"""``moonpool bench fidelity``: the same trace on a real local cluster and in the simulator, fitted on another trace.

Trace A is replayed on the cluster; the conductor's record of it gives the estimates exactly as the conductor learned them
(seconds of prefill by tokens computed, cached and loaded, of a decode step by batch and context, how far single measurements
stray, and what lies between a worker's first token and the gateway). Trace B, of other sessions, is then replayed on the
cluster and simulated with those estimates, under the same policy and without refusals.

Keys of the result: for ``ttft`` and ``tbt`` (mean of the slowest tenth of a request's gaps) and q in 50, 90:
``live_ttft_p50_ms``, ``simulated_ttft_p50_ms``, ``ttft_p50_error`` (of the live figure), and so on; ``requests``,
``answered``, ``live_cached_share``, ``simulated_cached_share``, ``fits``, ``picture`` (where a folder is given), ``machine``.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moonpool.bench.local_cluster import SPLIT, LocalCluster, local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.cluster.explaining import save_record
from moonpool.cluster.models import local_model
from moonpool.cluster.record_file import read_record
from moonpool.cluster.survey import survey
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Role
from moonpool.core.membership import PrefillTiming, StepTiming, WorkerReport
from moonpool.loadgen.client import HttpSender, open_session, served_model
from moonpool.loadgen.clock import MonotonicClock
from moonpool.loadgen.generate import GeneratorConfig, generate_trace
from moonpool.loadgen.plan import Scaling, plan_sends
from moonpool.loadgen.prompts import PromptMaker, token_alphabet
from moonpool.loadgen.record import Outcome as Ending
from moonpool.loadgen.record import RequestRecord
from moonpool.loadgen.replay import Replay, RequestShape
from moonpool.loadgen.trace import Trace, TraceRow
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.estimates import PrefillEstimate, StepEstimate
from moonpool.scheduler.policies.make import make_policy
from moonpool.scheduler.recording import Entry
from moonpool.sim.cluster import DecodeCost, Group, Link, PrefillCost, SimCluster, SimModel, TargetsS
from moonpool.sim.outcome import Outcome, RequestOutcome
from moonpool.sim.pictures import draw_compared
from moonpool.sim.run import simulate

POOL_BYTES = 1 << 30
PAGE_BYTES = 512 << 20
BLOCK = 64
CHUNK = 512
QUANTILES = (50, 90)
LINK_BYTES_PER_S = 1e9  # loopback; what is pushed while layers compute hardly shows
MOST_NOISE = 0.5
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """``slower``: how much slower than the generator's own times both traces are replayed. ``out``: folder of the picture."""

    requests: int = 60
    slower: float = 1.0
    seeds: tuple[int, int] = (1, 2)
    policy: str = "moonpool"
    model: str = "smollm2"
    launcher: Literal["ray", "process"] = "process"
    out: str = ""

    def check(self) -> None:
        if self.requests < 20:
            raise ConfigError(f"requests: {self.requests} say little at the 90th percentile; use 20 or more", param="requests")
        if not self.slower > 0:
            raise ConfigError(f"slower: {self.slower} is out of range; use a number above 0", param="slower")


@dataclass(frozen=True, slots=True)
class Fits:
    """Seconds. ``noise``: sigma of the logarithm of measured over predicted prefill time."""

    prefill: tuple[float, ...]
    step: tuple[float, ...]
    overhead_s: float
    noise: float


def fidelity(
    options: FidelityOptions, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a cluster that does not start or answer."""
    options.check()
    model_dir = local_model(options.model, say)
    settings = {
        "store.pool_bytes": str(POOL_BYTES),
        "engine.page_bytes": str(PAGE_BYTES),
        "engine.prefill_chunk": str(CHUNK),
        "scheduler.policy": options.policy,
        "scheduler.admission": "none",
    }
    traces = [generate_trace(GeneratorConfig(requests=options.requests, seed=seed)) for seed in options.seeds]
    with local_cluster(SPLIT, model_dir, settings, launcher=options.launcher) as cluster:
        fits, records = asyncio.run(_live(cluster, traces, options, say))
    say(f"fitted: {fits}")
    simulated = simulate(
        traces[1],
        simulated_cluster(fits),
        policy=make_policy(options.policy),
        admission=make_admission("none"),
        speed=1.0 / options.slower,
    )
    found = figures(records, simulated)
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        found["picture"] = str(draw_compared(folder / "fidelity.png", {"live": as_outcome(records), "simulated": simulated}))
    return {**found, "fits": asdict(fits), "machine": machine_facts()}


async def _live(
    cluster: LocalCluster, traces: Sequence[Sequence[TraceRow]], options: FidelityOptions, say: Callable[[str], None]
) -> tuple[Fits, list[RequestRecord]]:
    """Estimates from the first trace, records of the second."""
    say(f"trace A: {len(traces[0])} requests")
    await _replay(cluster, traces[0], options, salt=options.seeds[0])
    fits = await _fits(cluster)
    say(f"trace B: {len(traces[1])} requests")
    return fits, await _replay(cluster, traces[1], options, salt=options.seeds[1])


async def _replay(
    cluster: LocalCluster, rows: Sequence[TraceRow], options: FidelityOptions, *, salt: int
) -> list[RequestRecord]:
    """``salt``: other prompts for every trace, so that none finds the cache of the one before."""
    async with open_session(cluster.url, timeout_s=600) as session:
        shape = RequestShape(await served_model(session, cluster.url), f"fidelity-{secrets.token_hex(3)}")
        plan = plan_sends(Trace(tuple(rows), BLOCK), Scaling(speed=1.0 / options.slower))
        prompts = PromptMaker(token_alphabet(), salt=salt)
        replay = Replay(plan, prompts, HttpSender(session, MonotonicClock()), shape, MonotonicClock())
        await replay.run()
    await asyncio.sleep(SETTLE_S)  # the last reports
    return replay.records


async def _fits(cluster: LocalCluster) -> Fits:
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        path = Path(folder) / "record.jsonl"
        await save_record(cluster.registry, path)
        _, entries = read_record(path)
    numbers = [answer.numbers for answer in await survey(cluster.registry) if answer.change.member.role is Role.CONDUCTOR]
    return fits_of(entries, numbers[0].get("first_token_overhead_seconds", 0.0) if numbers else 0.0)


def fits_of(entries: Sequence[Entry], overhead_s: float) -> Fits:
    """What a conductor that heard these reports believes. ConfigError: they hold too few measurements."""
    reports = [entry.said for entry in entries if isinstance(entry.said, WorkerReport)]
    prefills: list[PrefillTiming] = [timing for report in reports for timing in report.prefills]
    steps: list[StepTiming] = [timing for report in reports for timing in report.steps]
    prefill, step = PrefillEstimate(), StepEstimate()
    for timing in prefills:
        prefill.add(timing)
    for measured in steps:
        step.add(measured)
    if not (prefill.fit.sure and step.fit.sure):
        raise ConfigError(f"bench: {len(prefills)} prefills and {len(steps)} steps were measured; too few", param="bench")
    prefill_ratios = [timing.seconds / float(_features(timing) @ np.array(prefill.fit.coefficients)) for timing in prefills]
    step_ratios = [t.seconds / float(np.dot((1.0, t.batch, t.context_tokens), step.fit.coefficients)) for t in steps]
    low, high = np.quantile(np.log(prefill_ratios), (0.16, 0.84))
    noise = float(np.clip((high - low) / 2.0, 0.0, MOST_NOISE))
    return Fits(
        _centred(prefill.fit.coefficients, prefill_ratios), _centred(step.fit.coefficients, step_ratios), overhead_s, noise
    )


def _features(timing: PrefillTiming) -> NDArray[np.float64]:
    n, p = timing.prompt_tokens, min(timing.cached_tokens, timing.prompt_tokens)
    return np.array((1.0, n - p, n * n - p * p, timing.loaded_tokens), np.float64)


def _centred(coefficients: Sequence[float], ratios: Sequence[float]) -> tuple[float, ...]:
    """So that half of what was measured lies above: fits of relative errors lean to the fast side where much strays."""
    middle = float(np.median(ratios))
    return tuple(middle * one for one in coefficients)


def simulated_cluster(fits: Fits) -> SimCluster:
    """The local cluster as the simulator sees it: one prefill worker and one decode worker on two nodes."""
    layers, heads, width = 30, 3, 64
    byte_per_token = 2 * 2 * layers * heads * width
    pool, device = POOL_BYTES // byte_per_token, PAGE_BYTES // byte_per_token
    a, b, c, d = fits.prefill
    base, sequence, token = fits.step
    return SimCluster(
        groups=(
            Group(role="prefill", count=1, pool_tokens=pool, device_tokens=device),
            Group(role="decode", count=1, pool_tokens=pool, device_tokens=device),
        ),
        model=SimModel(name="local", layers=layers, kv_bytes_per_token=byte_per_token, block_tokens=BLOCK),
        prefill=PrefillCost(a=a, b=max(b, 1e-9), c=c, d=d, chunk_tokens=CHUNK),
        decode=DecodeCost(base_s=max(base, 1e-6), per_sequence_s=sequence, per_token_s=token, max_batch=32),
        link=Link(bytes_per_s=LINK_BYTES_PER_S, latency_s=1e-3),
        keep="decode",
        targets=TargetsS(sent=False),
        post_prefill_s=fits.overhead_s,
        promised_output=64,
        noise=fits.noise,
    )


def as_outcome(records: Sequence[RequestRecord]) -> Outcome:
    """Live records in the simulator's terms, for one picture of both."""
    outcome = Outcome([], TargetsS().ttft_s, TargetsS().tbt_s)
    for record in records:
        if record.outcome is Ending.OK and record.sent_s is not None:
            one = RequestOutcome(record.row, record.sent_s, record.input_tokens, record.output_tokens)
            one.cached_tokens = record.cached_tokens or 0
            one.ttft_s, one.tbt_s, one.ended = _seconds(record.ttft_ms), _seconds(record.tbt_ms), record.ended_s
            outcome.requests.append(one)
    return outcome


def figures(records: Sequence[RequestRecord], simulated: Outcome) -> dict[str, Any]:
    live = as_outcome(records)
    out: dict[str, Any] = {"requests": len(records), "answered": len(live.requests)}
    for name in ("ttft", "tbt"):
        sides = [_sorted(outcome, f"{name}_s") for outcome in (live, simulated)]
        for q in QUANTILES:
            real, model = (float(np.quantile(side, q / 100)) if len(side) else 0.0 for side in sides)
            out[f"live_{name}_p{q}_ms"] = real * 1e3
            out[f"simulated_{name}_p{q}_ms"] = model * 1e3
            out[f"{name}_p{q}_error"] = model / real - 1.0 if real else 0.0
    for side, outcome in (("live", live), ("simulated", simulated)):
        tokens = sum(one.prompt_tokens for one in outcome.requests)
        out[f"{side}_cached_share"] = sum(one.cached_tokens for one in outcome.requests) / max(tokens, 1)
    return out


def _sorted(outcome: Outcome, field: str) -> list[float]:
    return sorted(value for one in outcome.requests if (value := getattr(one, field)) is not None)


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3
