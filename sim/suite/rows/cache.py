"""Rows without a cluster: foretold prefill times, and one cache that every request goes through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonpool.sim.suite.published import FIG8_S, LRU_HITS, LRU_SAVED_S, NODE_TOKENS
from moonpool.sim.suite.rows.row import SEEDS, TRACES, Figures, Row, Target, figure, near
from moonpool.sim.suite.settings import CacheRun, PredictionRun
from moonpool.sim.suite.workload import TraceName, Workload

SIZES = (1_000_000, 3_000_000, 10_000_000)
HITS = {"conversation": (0.115, 0.190, 0.312), "synthetic": (0.152, 0.345, 0.640)}
HITS_STRETCH = {"conversation": (0.119, 0.197, 0.315), "synthetic": (0.162, 0.365, 0.643)}
SAVED = {"conversation": (3_450.0, 3_590.0), "synthetic": (3_050.0, 3_190.0)}  # seconds: target, stretch
OUR_EVICTION = "hazard"
LEAST_OF_LRU = 0.995


def cache_rows() -> Iterator[Row]:
    yield from _predictions()
    for trace in TRACES:
        yield from _lru(trace)
    for trace in TRACES:
        yield from _eviction(trace)
        yield from _not_below_lru(trace)


def _predictions() -> Iterator[Row]:
    yield Row(
        "prediction.fig14", "prefill time of each bar of fig. 14 from the nine others: largest error", "Vidur < 0.09",
        (PredictionRun(),), figure("worst"), Target(most=0.08),
    )  # fmt: skip
    for trace in TRACES:
        for name, at in (("no_cache", 0), ("cached", 1)):
            yield Row(
                f"prediction.fig8.{trace}.{name}",
                f"mean prefill time of fig. 8, {trace}, {name.replace('_', ' ')}: error of a fit to fig. 14",
                f"{FIG8_S[trace][at]} s",
                (PredictionRun(workload=Workload(trace=trace)),),
                figure(f"{name}_error"),
                Target(most=0.08),
                beside=(("seconds", figure(f"{name}_s")),),
            )


def _lru(trace: TraceName) -> Iterator[Row]:
    for at, size in enumerate(SIZES):
        wanted = LRU_HITS[trace][at]
        yield Row(
            f"hits.lru.{trace}.{size // 1_000_000}M", f"token hits of one LRU cache of {size / 1e6:g} M tokens, {trace}",
            f"{wanted:.4f}", (_run(trace, "lru", size),), figure("hit_rate"), near(wanted, 0.005),
        )  # fmt: skip


def _eviction(trace: TraceName) -> Iterator[Row]:
    for stretch, wanted in ((False, HITS), (True, HITS_STRETCH)):
        for at, size in enumerate(SIZES):
            yield Row(
                f"eviction.hits.{trace}.{size // 1_000_000}M" + _suffix(stretch),
                f"token hits of {OUR_EVICTION} eviction, {size / 1e6:g} M tokens, {trace}",
                f"LRU {LRU_HITS[trace][at]:.4f}",
                (_run(trace, OUR_EVICTION, size),),
                figure("hit_rate"),
                Target(least=wanted[trace][at]),
                stretch,
            )
        yield Row(
            f"eviction.saved.{trace}.3M" + _suffix(stretch), f"prefill seconds saved, 3 M tokens, {trace}",
            f"LRU {LRU_SAVED_S[trace]:.0f}", (_run(trace, OUR_EVICTION, NODE_TOKENS),), figure("saved_s"),
            Target(least=SAVED[trace][stretch]), stretch,
        )  # fmt: skip


def _not_below_lru(trace: TraceName) -> Iterator[Row]:
    for name, seeds in (("", (None,)), (".shuffled", SEEDS)):
        pairs = tuple(
            _run(trace, eviction, size, seed) for seed in seeds for size in SIZES for eviction in (OUR_EVICTION, "lru")
        )
        yield Row(
            f"eviction.over_lru.{trace}{name}",
            f"hits of {OUR_EVICTION} over LRU's, worst of 1, 3, 10 M{' and three shuffles' if name else ''}, {trace}",
            "1", pairs, _worst_ratio, Target(least=LEAST_OF_LRU),
        )  # fmt: skip


def _worst_ratio(figures: Sequence[Figures]) -> float:
    return min(ours["hit_rate"] / lru["hit_rate"] for ours, lru in zip(figures[::2], figures[1::2], strict=True))


def _run(trace: TraceName, eviction: str, tokens: int, seed: int | None = None) -> CacheRun:
    return CacheRun(workload=Workload(trace=trace, shuffle=seed), eviction=eviction, tokens=tokens)


def _suffix(stretch: bool) -> str:
    return ".stretch" if stretch else ""
