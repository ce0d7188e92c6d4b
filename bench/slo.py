"""Which requests of a replay met their targets, TTFT and TPOT, and what follows from it. Pure.

A request met them if it was answered in full, its first text came within the TTFT target of its planned time, and its mean
time per token after the first is within the TPOT target (an answer of one token has none to miss). Refused and failed
requests met none. Goodput counts them per second from the first planned send to the last answer's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moonpool.bench.sides import ratio
from moonpool.loadgen.record import Outcome, RequestRecord
from moonpool.loadgen.summary import lag_of, quantiles


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float = 4.0
    tpot_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Verdict:
    """One replay of one side. ``slo_prompt_tokens``: prompt tokens of the requests that met their targets."""

    requests: int
    answered: int
    refused: int
    failed: int
    met: int
    slo_share: float  # of all requests
    goodput_per_s: float
    slo_prompt_tokens: int
    duration_s: float
    cached_share: float  # of the prompt tokens of answered requests
    ttft_ms: dict[str, float]  # p50, p90, p99 of answered requests, from the planned send
    tpot_ms: dict[str, float]
    missed_ttft: int  # answered, but late
    missed_tpot: int
    send_lag_p99_ms: float  # of the client


def met(record: RequestRecord, slo: Slo) -> bool:
    if record.outcome is not Outcome.OK:
        return False
    return not (_late(record, slo) or _slow(record, slo))


def judge(records: Sequence[RequestRecord], slo: Slo, span_s: float) -> Verdict:
    """``span_s``: from the first to the last planned send."""
    answered = [record for record in records if record.outcome is Outcome.OK]
    good = [record for record in records if met(record, slo)]
    duration = max((record.ended_s for record in records if record.ended_s is not None), default=0.0)
    prompt = sum(record.input_tokens for record in answered)
    lag = lag_of(records, span_s)
    return Verdict(
        requests=len(records),
        answered=len(answered),
        refused=sum(record.outcome is Outcome.REFUSED for record in records),
        failed=sum(record.outcome is Outcome.FAILED for record in records),
        met=len(good),
        slo_share=len(good) / max(len(records), 1),
        goodput_per_s=len(good) / duration if duration > 0 else 0.0,
        slo_prompt_tokens=sum(record.input_tokens for record in good),
        duration_s=duration,
        cached_share=sum(record.cached_tokens or 0 for record in answered) / max(prompt, 1),
        ttft_ms=_quantiles([record.schedule_ttft_ms for record in answered]),
        tpot_ms=_quantiles([record.tpot_ms for record in answered]),
        missed_ttft=sum(_late(record, slo) for record in answered),
        missed_tpot=sum(_slow(record, slo) for record in answered),
        send_lag_p99_ms=lag.p99_ms if lag is not None else 0.0,
    )


def rate_name(rate: float) -> str:
    """0.62 -> ``062``."""
    return f"{rate:.2f}".replace(".", "")


def compared_verdicts(ours: Mapping[float, Sequence[Verdict]], theirs: Mapping[float, Sequence[Verdict]]) -> dict[str, Any]:
    """By rate R the sums over the rounds that both sides have: ``goodput_R_vs_peer`` and the rest; see bench.replay.

    ``spread``: least and most of each ratio over the rounds. ``slo_prompt_tokens_vs_peer`` is the lowest of all rates.
    """
    out: dict[str, Any] = {}
    spread: dict[str, list[float]] = {}
    tokens: list[float] = []
    for rate, mine in ours.items():
        pairs = list(zip(mine, theirs.get(rate, ()), strict=False))
        if not pairs:
            continue
        name = rate_name(rate)
        for figure, read in (
            (f"goodput_{name}", lambda verdict: verdict.goodput_per_s),
            (f"slo_share_{name}", lambda verdict: verdict.slo_share),
            (f"slo_prompt_tokens_{name}", lambda verdict: float(verdict.slo_prompt_tokens)),
        ):
            a, b = [read(first) for first, _ in pairs], [read(second) for _, second in pairs]
            out[figure], out[f"peer_{figure}"] = sum(a) / len(a), sum(b) / len(b)
            out[f"{figure}_vs_peer"] = ratio(sum(a), sum(b))
            each = [found for x, y in zip(a, b, strict=True) if (found := ratio(x, y)) is not None]
            if each:
                spread[f"{figure}_vs_peer"] = [min(each), max(each)]
        if (one := out[f"slo_prompt_tokens_{name}_vs_peer"]) is not None:
            tokens.append(one)
    return {**out, "slo_prompt_tokens_vs_peer": min(tokens) if tokens else None, "spread": spread}


def as_json(verdicts: Mapping[float, Sequence[Verdict]]) -> dict[str, list[dict[str, Any]]]:
    return {f"{rate:g}": [asdict(verdict) for verdict in each] for rate, each in verdicts.items()}


def _late(record: RequestRecord, slo: Slo) -> bool:
    first = record.schedule_ttft_ms
    return first is None or first > slo.ttft_s * 1e3


def _slow(record: RequestRecord, slo: Slo) -> bool:
    each = record.tpot_ms
    return each is not None and each > slo.tpot_s * 1e3


def _quantiles(values: Sequence[float | None]) -> dict[str, float]:
    found = quantiles(values)
    return {} if found is None else {"p50": found.p50, "p90": found.p90, "p99": found.p99}
