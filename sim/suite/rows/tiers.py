"""Rows about nodes with an SSD tier. Nothing is decoded; scored by mean TTFT, since the faster choice is to compute a part."""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.sim.suite.contenders import OURS_FIFO
from moonpool.sim.suite.published import HIT_CEILING
from moonpool.sim.suite.rows.row import TRACES, Row, Target, change, figure, ratio, share
from moonpool.sim.suite.settings import ClusterRun
from moonpool.sim.suite.workload import TraceName, Workload

SSD_TOKENS = 30_000_000
SMALL_TOKENS = 300_000
HITS = 0.98
TTFT = {5: -0.14, 6: -0.06, 8: -0.02}
SMALL = {"conversation": 1.10, "synthetic": 1.30}
HIDDEN = 0.8


def tier_rows() -> Iterator[Row]:
    for trace in TRACES:
        for nodes, most in TTFT.items():
            both, small, without = _run(trace, nodes), _small(trace, nodes), _run(trace, nodes, ssd=0)
            what = f"{nodes} nodes, SSD of 30 M tokens at 5 GB/s, {trace}"
            yield Row(
                f"ssd.hits.{trace}.{nodes}", f"token hits over the most there is, DRAM 3 M, {what}", "-", (both, without),
                share("hit_rate", HIT_CEILING[trace]), Target(least=HITS),
                beside=(("hits", figure("hit_rate")), ("without_ssd", figure("hit_rate", 1))),
            )  # fmt: skip
            yield Row(
                f"ssd.ttft.{trace}.{nodes}", f"mean TTFT against DRAM 3 M alone, {what}", "-", (both, without),
                change("mean_ttft_s", 0, 1), Target(most=most),
                beside=(("ours_s", figure("mean_ttft_s")), ("dram_s", figure("mean_ttft_s", 1))),
            )  # fmt: skip
            yield Row(
                f"ssd.small.{trace}.{nodes}", f"mean TTFT of DRAM 0.3 M over that of DRAM 3 M alone, {what}", "-",
                (small, without), ratio("mean_ttft_s", 0, 1), Target(most=SMALL[trace]),
                beside=(("ours_s", figure("mean_ttft_s")), ("dram_s", figure("mean_ttft_s", 1))),
            )  # fmt: skip
            yield Row(
                f"ssd.hidden.{trace}.{nodes}", f"share of SSD reading behind computing or queueing, DRAM 0.3 M, {what}", "-",
                (small,), figure("ssd_hidden"), Target(least=HIDDEN),
            )  # fmt: skip


def _run(trace: TraceName, nodes: int, *, ssd: int = SSD_TOKENS) -> ClusterRun:
    run = OURS_FIFO.run(Workload(trace=trace, one_token=True), prefill=nodes, decode=1)
    return run.model_copy(update={"ssd_tokens": ssd})


def _small(trace: TraceName, nodes: int) -> ClusterRun:
    return _run(trace, nodes).model_copy(update={"pool_tokens": SMALL_TOKENS})
