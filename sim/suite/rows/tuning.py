"""The grid that constants were chosen on: the same for every contender, on sessions shuffled by a seed that is not reported.

Rows without targets: they show what each choice gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moonpool.sim.suite.contenders import LOCAL, OURS, PAPER, TUNING_SEED, Contender
from moonpool.sim.suite.rows.row import TRACES, Row, Target, figure
from moonpool.sim.suite.workload import Workload

NODES = 6
FIRST = 4_000
AGES = (0.05, 0.1, 0.2, 0.4)
THRESHOLDS = (1.0, 2.0, 4.0)
BALANCES = (4.0, 16.0, 64.0)
PATIENCE = (0.0, 0.02, 0.05)


def tuning_rows() -> Iterator[Row]:
    for trace in TRACES:
        for name, one in _grid():
            run = one.run(Workload(trace=trace, shuffle=TUNING_SEED, first=FIRST, one_token=True), prefill=NODES, decode=1)
            yield Row(
                f"tuning.{name}.{trace}", f"mean TTFT, {NODES} nodes, first {FIRST} of {trace} shuffled by {TUNING_SEED}", "-",
                (run,), figure("mean_ttft_s"), Target(),
                beside=(
                    ("p99_ttft_s", figure("p99_ttft_s")), ("max_ttft_s", figure("max_ttft_s")), ("hits", figure("hit_rate")),
                ),
            )  # fmt: skip


def _grid() -> Iterator[tuple[str, Contender]]:
    yield "local_min_ttft.fifo", LOCAL
    for age in AGES:
        yield f"local_min_ttft.age={age:g}", replace(LOCAL, order="shortest", age=age)
    for value in THRESHOLDS:
        yield f"algorithm1.threshold={value:g}", replace(PAPER, settings={"balancing_threshold": value})
    for age in AGES:
        yield f"algorithm1.age={age:g}", replace(PAPER, order="shortest", age=age)
    for value in BALANCES:
        yield f"cache_aware.balance={value:g}", Contender("cache_aware_threshold", {"balance_abs": value})
    for eviction in ("lru", "hazard"):
        for age in AGES:
            yield f"moonpool.{eviction}.age={age:g}", replace(OURS, settings={"age": age}, eviction=eviction)
    for value in PATIENCE:
        yield f"moonpool.patience={value:g}", replace(OURS, settings={"patience": value})
