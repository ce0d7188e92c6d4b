"""Numbers of one replay, from its records. Pure: everything printed, drawn or written to summary.json is computed here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.core.request import Targets
from moonpool.loadgen.record import Outcome, RequestRecord

LAG_EDGES_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
_LAG_ALLOWED_MS = 20.0
_LAG_ALLOWED_SHARE = 0.001  # of the plan's length, where that is more


@dataclass(frozen=True, slots=True)
class Quantiles:
    """``n`` values and where they lie, in ms (nearest rank)."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def quantiles(values: Iterable[float | None]) -> Quantiles | None:
    """None where there is no value: a report then shows nothing rather than zeros."""
    found = sorted(v for v in values if v is not None)
    if not found:
        return None
    return Quantiles(len(found), sum(found) / len(found), rank(found, 0.5), rank(found, 0.9), rank(found, 0.99), found[-1])


def rank(ordered: Sequence[float], q: float) -> float:
    """Nearest-rank quantile of ascending values."""
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)]


@dataclass(frozen=True, slots=True)
class Lag:
    """How far sends fell behind the plan. ``histogram[i]``: sends up to ``edges_ms[i]`` late; its last: later still."""

    edges_ms: tuple[int, ...]
    histogram: tuple[int, ...]
    p50_ms: float
    p99_ms: float
    max_ms: float
    last_ms: float  # of the last send of the plan
    allowed_ms: float
    behind: bool  # the client did not keep to the plan: latencies below describe the client too


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every target they carry, judged on schedule latency; refused and failed ones met none."""

    per_s: float
    met: int
    of: int
    share: float


@dataclass(frozen=True, slots=True)
class Transport:
    """What carried KV, as the cluster says."""

    carrier: str = "unknown"
    ucx_transport: str = "unknown"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the records alone do not say."""

    planned: int
    span_s: float  # from the first to the last planned send
    targets: Targets
    cap: int = 0  # 0: none
    held_back: int = 0
    most_in_flight: int = 0
    outputs_raised: int = 0
    interrupted: bool = False
    transport: Transport = field(default_factory=Transport)
    trace: dict[str, int] = field(default_factory=dict)  # TraceNotes: what reading the trace adjusted
    options: dict[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Summary:
    """The report in numbers. Rates are per second of ``duration_s``: from the first planned send to the last answer's end."""

    planned: int
    sent: int
    ok: int
    refused: int
    failed: int
    cancelled: int
    interrupted: bool
    duration_s: float
    offered_per_s: float | None
    completed_per_s: float
    goodput: Goodput | None  # None: no request carries a target
    targets: Targets
    ttft_ms: Quantiles | None
    schedule_ttft_ms: Quantiles | None
    tbt_ms: Quantiles | None
    tpot_ms: Quantiles | None
    itl_ms: Quantiles | None
    latency_ms: Quantiles | None
    schedule_latency_ms: Quantiles | None
    prompt_tokens: int
    cached_tokens: int
    cached_share: float
    output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    prompt_length_mismatches: int  # the server counted another prompt length than was sent
    output_length_mismatches: int
    without_text: int
    lag: Lag | None
    cap: int
    held_back: int
    longest_cap_wait_ms: float
    most_in_flight: int
    outputs_raised: int
    refusals: dict[str, int]
    retry_after_s: Quantiles | None  # in seconds
    failures: dict[str, int]
    transport: Transport
    trace: dict[str, int]
    options: dict[str, str | int | float | bool | None]


def summarise(records: Sequence[RequestRecord], facts: RunFacts) -> Summary:
    ok = [r for r in records if r.outcome is Outcome.OK]
    refused = [r for r in records if r.outcome is Outcome.REFUSED]
    failed = [r for r in records if r.outcome is Outcome.FAILED]
    duration = max((r.ended_s for r in records if r.ended_s is not None), default=0.0)
    per_s = 1 / duration if duration > 0 else 0.0
    prompt = sum(r.prompt_tokens if r.prompt_tokens is not None else r.input_tokens for r in ok)
    cached = sum(r.cached_tokens or 0 for r in ok)
    output = sum(_output(r) for r in ok)
    return Summary(
        planned=facts.planned,
        sent=sum(r.sent_s is not None for r in records),
        ok=len(ok),
        refused=len(refused),
        failed=len(failed),
        cancelled=sum(r.outcome is Outcome.CANCELLED for r in records),
        interrupted=facts.interrupted,
        duration_s=duration,
        offered_per_s=facts.planned / facts.span_s if facts.span_s > 0 else None,
        completed_per_s=len(ok) * per_s,
        goodput=_goodput(records, per_s),
        targets=facts.targets,
        ttft_ms=quantiles(r.ttft_ms for r in ok),
        schedule_ttft_ms=quantiles(r.schedule_ttft_ms for r in ok),
        tbt_ms=quantiles(r.tbt_ms for r in ok),
        tpot_ms=quantiles(r.tpot_ms for r in ok),
        itl_ms=quantiles(g for r in ok for g in r.gaps_ms),
        latency_ms=quantiles(r.latency_ms for r in ok),
        schedule_latency_ms=quantiles(r.schedule_latency_ms for r in ok),
        prompt_tokens=prompt,
        cached_tokens=cached,
        cached_share=cached / prompt if prompt else 0.0,
        output_tokens=output,
        prompt_tokens_per_s=prompt * per_s,
        output_tokens_per_s=output * per_s,
        prompt_length_mismatches=sum(r.prompt_tokens not in (None, r.input_tokens) for r in ok),
        output_length_mismatches=sum(r.completion_tokens not in (None, r.output_tokens) for r in ok),
        without_text=sum(r.without_text for r in ok),
        lag=lag_of(records, facts.span_s),
        cap=facts.cap,
        held_back=facts.held_back,
        longest_cap_wait_ms=max((r.cap_wait_ms for r in records), default=0.0),
        most_in_flight=facts.most_in_flight,
        outputs_raised=facts.outputs_raised,
        refusals=dict(Counter(r.reason for r in refused).most_common()),
        retry_after_s=quantiles(r.retry_after_s for r in refused),
        failures=dict(Counter(r.reason for r in failed).most_common()),
        transport=facts.transport,
        trace=facts.trace,
        options=facts.options,
    )


def lag_of(records: Sequence[RequestRecord], span_s: float) -> Lag | None:
    """None where nothing was sent."""
    lags = [lag for r in records if (lag := r.lag_ms) is not None]
    if not lags:
        return None
    histogram = [0] * (len(LAG_EDGES_MS) + 1)
    for lag in lags:
        histogram[next((i for i, edge in enumerate(LAG_EDGES_MS) if lag <= edge), len(LAG_EDGES_MS))] += 1
    ordered = sorted(lags)
    allowed = max(_LAG_ALLOWED_MS, _LAG_ALLOWED_SHARE * span_s * 1e3)
    p99 = rank(ordered, 0.99)
    return Lag(
        edges_ms=LAG_EDGES_MS,
        histogram=tuple(histogram),
        p50_ms=rank(ordered, 0.5),
        p99_ms=p99,
        max_ms=ordered[-1],
        last_ms=lags[-1],
        allowed_ms=allowed,
        behind=p99 > allowed or lags[-1] > allowed,
    )


def _goodput(records: Sequence[RequestRecord], per_s: float) -> Goodput | None:
    judged = [good for r in records if (good := r.met_targets) is not None]
    if not judged:
        return None
    met = judged.count(True)
    return Goodput(met * per_s, met, len(judged), met / len(judged))


def _output(record: RequestRecord) -> int:
    if record.completion_tokens is not None:
        return record.completion_tokens
    return len(record.gaps_ms) + (record.first_text_s is not None)
