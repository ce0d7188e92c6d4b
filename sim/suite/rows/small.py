"""The subset for every change: small loads, and targets that hold on them. Shapes rather than published figures.

With the public traces: the whole hit-rate tables of LRU, and beginnings of the traces. Without: a load of our own making.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from moonpool.sim.suite.contenders import BASELINE, LOAD, LOCAL, OURS, OURS_ADMISSION, OURS_FIFO, PAPER, RANDOM
from moonpool.sim.suite.published import LRU_HITS
from moonpool.sim.suite.rows.row import TRACES, Figures, Row, Target, change, figure, near, ratio
from moonpool.sim.suite.settings import CacheRun, ClusterRun, PredictionRun
from moonpool.sim.suite.workload import TraceName, Workload

FIRST = {"conversation": 1_200, "synthetic": 1_200, "made": 1_200}
NODES = {"conversation": 4, "synthetic": 4, "made": 3}  # few: queues build up within the first minutes
SIZES = (1_000_000, 3_000_000, 10_000_000)
OVERLOAD = 2.5


def small_rows(*, traces: bool) -> Iterator[Row]:
    yield Row(
        "small.prediction", "prefill time of each bar of fig. 14 from the nine others: largest error", "Vidur < 0.09",
        (PredictionRun(),), figure("worst"), Target(most=0.08),
    )  # fmt: skip
    if traces:
        for trace in TRACES:
            yield from _lru(trace)
    for trace in TRACES if traces else ("made",):
        yield from _shapes(trace)


def _lru(trace: TraceName) -> Iterator[Row]:
    for size, wanted in zip(SIZES, LRU_HITS[trace], strict=True):
        yield Row(
            f"small.lru.{trace}.{size // 1_000_000}M", f"token hits of one LRU cache of {size / 1e6:g} M tokens, {trace}",
            f"{wanted:.4f}", (CacheRun(workload=Workload(trace=trace), eviction="lru", tokens=size),), figure("hit_rate"),
            near(wanted, 0.005),
        )  # fmt: skip


def _shapes(trace: TraceName) -> Iterator[Row]:
    nodes = NODES[trace]
    prefill = Workload(trace=trace, first=FIRST[trace], one_token=True)
    random, load, local, paper, fifo, ours = (
        one.run(prefill, prefill=nodes, decode=1) for one in (RANDOM, LOAD, LOCAL, PAPER, OURS_FIFO, OURS)
    )
    what = f"{nodes} nodes, first {FIRST[trace]} of {trace}"
    yield Row(
        f"small.ordering.{trace}", f"mean TTFT, random > load > local > global, least ratio, {what}", "1.17 (fig. 5)",
        (random, load, local, paper), _least_step, Target(least=1.0),
    )  # fmt: skip
    yield Row(
        f"small.fifo.{trace}", f"mean TTFT against local minimum TTFT, first come first served in both, {what}", "-",
        (fifo, local), change("mean_ttft_s", 0, 1), Target(most=0.0),
    )  # fmt: skip
    yield Row(
        f"small.own.{trace}", f"mean TTFT against local minimum TTFT, our own order, {what}", "-",
        (ours, local), change("mean_ttft_s", 0, 1), Target(most=-0.05),
    )  # fmt: skip
    whole = Workload(trace=trace, first=FIRST[trace])
    served = OURS.run(whole, prefill=8, decode=8)
    yield Row(
        f"small.tbt.{trace}", f"share of TBT <= 100 ms over the paper's algorithm's, 8P8D, first {FIRST[trace]} of {trace}",
        "1", (served, PAPER.run(whole, prefill=8, decode=8)), ratio("tbt_share", 0, 1), Target(least=0.98),
        beside=(("ours", figure("tbt_share", 0)), ("algorithm1", figure("tbt_share", 1))),
    )  # fmt: skip
    yield from _refusing(trace, served)


def _refusing(trace: TraceName, served: ClusterRun) -> Iterator[Row]:
    fast = served.model_copy(update={"speed": OVERLOAD, "prefill": 4, "decode": 4})
    pair = tuple(
        fast.model_copy(update={"admission": one.name, "admission_settings": one.settings})
        for one in (OURS_ADMISSION, BASELINE)
    )
    what = f"4P4D at {OVERLOAD:g}x, first {FIRST[trace]} of {trace}"
    yield Row(
        f"small.overload.{trace}", f"requests inside both limits over the baseline's, {what}", "-", pair,
        ratio("met_requests", 0, 1), Target(least=1.0),
        beside=(("ours", figure("met_requests", 0)), ("baseline", figure("met_requests", 1))),
    )  # fmt: skip
    yield Row(
        f"small.wasted.{trace}", f"wasted prefill seconds over the baseline's, {what}", "-", pair,
        ratio("wasted_s", 0, 1, floor=1.0), Target(most=0.25),
    )  # fmt: skip


def _least_step(figures: Sequence[Figures]) -> float:
    means = [one["mean_ttft_s"] for one in figures]
    return min(slower / faster for slower, faster in pairwise(means))
