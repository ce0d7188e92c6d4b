"""What a simulation tells: one record per request, counters, the load over time, and the figures made of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class RequestOutcome:
    """Seconds and tokens. ``row``: place in the rows given. None: did not happen."""

    row: int
    arrived: float
    prompt_tokens: int
    output_tokens: int  # wanted
    cached_tokens: int = 0
    ttft_s: float | None = None
    tbt_s: float | None = None  # mean of the slowest tenth of the gaps; None for answers of one token
    refused: str | None = None  # reason code
    refused_at: float | None = None
    failed: str | None = None  # reason code of an attempt after which there was no other
    ended: float | None = None  # last token
    prefill_s: float = 0.0  # computing its prompt, all attempts
    wasted_s: float = 0.0  # of that, for attempts that gave no answer
    waited_s: float = 0.0  # between arrival and the begin of its prefill
    handoff_s: float = 0.0  # between the first token and the first step in the batch
    attempts: int = 0
    prefill: str = ""  # worker
    decode: str = ""
    predicted_ttft_s: float = 0.0
    predicted_tbt_s: float = 0.0
    turn: int = 1

    @property
    def served(self) -> bool:
        return self.ended is not None

    def met(self, ttft_s: float, tbt_s: float) -> bool:
        return self.served and (self.ttft_s or 0.0) <= ttft_s and (self.tbt_s or 0.0) <= tbt_s


@dataclass(slots=True)
class Load:
    """One look at the cluster. Loads are predicted latency over its target, mean over the workers of a stage."""

    at: float
    waiting: int  # requests whose prefill has not begun, in the conductor or at workers
    prefilling: int
    decoding: int  # sequences in batches
    prefill_load: float
    decode_load: float
    prefill_workers: int
    decode_workers: int


@dataclass(slots=True)
class Outcome:
    requests: list[RequestOutcome]
    ttft_target_s: float
    tbt_target_s: float
    counters: Counter[str] = field(default_factory=Counter)
    load: list[Load] = field(default_factory=list)
    leaks: dict[str, float] = field(default_factory=dict)  # what is still held at the end; all 0 in a sound run
    ended: float = 0.0

    def figures(self) -> dict[str, float]:
        """Flat and JSON-able; shares are of all requests, times of those served."""
        total = len(self.requests)
        ttft = np.sort([r.ttft_s for r in self.requests if r.ttft_s is not None and r.refused is None])
        tbt = np.sort([r.tbt_s for r in self.requests if r.tbt_s is not None and r.refused is None])
        begun = [r for r in self.requests if r.ttft_s is not None and r.refused is None]
        prompt = sum(r.prompt_tokens for r in begun)
        met = [r for r in self.requests if r.met(self.ttft_target_s, self.tbt_target_s)]
        out = {
            "requests": float(total),
            "served": float(sum(r.served for r in self.requests)),
            "refused": float(sum(r.refused is not None for r in self.requests)),
            "failed": float(sum(r.failed is not None for r in self.requests)),
            "hit_share": sum(r.cached_tokens for r in begun) / prompt if prompt else 0.0,
            "prefill_s": sum(r.prefill_s for r in self.requests),
            "wasted_prefill_s": sum(r.wasted_s for r in self.requests),
            "met": float(len(met)),
            "met_share": len(met) / total if total else 0.0,
            "met_tokens": float(sum(r.prompt_tokens + r.output_tokens for r in met)),
            "met_output_tokens": float(sum(r.output_tokens for r in met)),
            "ttft_5s_share": share(ttft, 5.0, total),
            "ttft_met_share": share(ttft, self.ttft_target_s, total),
            "tbt_met_share": share(tbt, self.tbt_target_s, len(tbt)),
            "waited_mean_s": _mean([r.waited_s for r in begun]),
            "seconds": self.ended,
        }
        for name, values in (("ttft", ttft), ("tbt", tbt)):
            out |= quantiles(name, values)
        return out | {name: float(value) for name, value in sorted(self.counters.items())}


def quantiles(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    """Mean, median, p90, p99 and maximum of sorted ``values``; 0 where there are none."""
    if not len(values):
        return {f"{name}_{what}_s": 0.0 for what in ("mean", "p50", "p90", "p99", "max")}
    at = {f"{name}_p{q}_s": float(values[min(int(q / 100 * len(values)), len(values) - 1)]) for q in (50, 90, 99)}
    return {f"{name}_mean_s": float(values.mean()), **at, f"{name}_max_s": float(values[-1])}


def share(values: NDArray[np.float64], limit: float, total: int) -> float:
    return float((values <= limit).sum()) / total if total else 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
