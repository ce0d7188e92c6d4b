"""One run, to its figures."""

from __future__ import annotations

import time
from pathlib import Path

from moonpool.core.use import Use
from moonpool.kvstore.eviction.make import make_policy
from moonpool.sim.one_cache import FULL_BLOCKS_ONLY, Cache, turns
from moonpool.sim.suite.cluster_runs import cluster_figures, forced_figures, highest_speed
from moonpool.sim.suite.prediction import leave_one_out, mean_prefill
from moonpool.sim.suite.published import BLOCK_TOKENS, FIG8_S, PREFILL
from moonpool.sim.suite.settings import CacheRun, ClusterRun, ForcedRun, Job, PredictionRun, SpeedRun
from moonpool.sim.suite.workload import load

Figures = dict[str, float]


def measure(job: Job) -> Figures:
    """Figures of the run, with ``wall_s`` and ``cpu_s`` of having made them."""
    begun, used = time.perf_counter(), time.process_time()
    figures = _measured(job)
    return {**figures, "wall_s": time.perf_counter() - begun, "cpu_s": time.process_time() - used}


def _measured(job: Job) -> Figures:
    match job.run:
        case CacheRun():
            return _cache(job.run, job.traces)
        case PredictionRun():
            return _prediction(job.run, job.traces)
        case ClusterRun():
            return cluster_figures(job.run, job.traces)
        case SpeedRun():
            return highest_speed(job.run, job.traces)
        case ForcedRun():
            return forced_figures(job.run, job.traces)


def _cache(run: CacheRun, traces: Path | None) -> Figures:
    rows = load(run.workload, traces)
    cache = Cache(make_policy(run.eviction), run.tokens // BLOCK_TOKENS, BLOCK_TOKENS, whole=run.eviction in FULL_BLOCKS_ONLY)
    hits, saved = 0, 0.0
    for row, turn in zip(rows, turns(rows, BLOCK_TOKENS), strict=True):
        found = cache.request(row, Use(turn=turn, prompt_tokens=row.input_length))
        hits += found
        saved += _prefill(row.input_length, 0) - _prefill(row.input_length, min(found, row.input_length - 1))
    return {"hit_rate": hits / sum(row.input_length for row in rows), "saved_s": saved, "requests": len(rows)}


def _prefill(n: int, p: int) -> float:
    a, b, c, d = PREFILL
    return a + b * (n - p) + c * (n * n - p * p) + d * p


def _prediction(run: PredictionRun, traces: Path | None) -> Figures:
    if run.workload is None:
        errors = leave_one_out()
        return {"worst": float(abs(errors).max()), "mean": float(abs(errors).mean())}
    uncached, cached = mean_prefill(load(run.workload, traces))
    figures = {"no_cache_s": uncached, "cached_s": cached}
    if (published := FIG8_S.get(run.workload.trace)) is not None:
        figures["no_cache_error"] = abs(uncached / published[0] - 1.0)
        figures["cached_error"] = abs(cached / published[1] - 1.0)
    return figures
