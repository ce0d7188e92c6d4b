"""Rows about the whole cluster of 16 nodes: decoding, overload, the split into roles, narrow links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonpool.sim.suite.contenders import BASELINE, EARLY, EARLY_PREDICTED, OURS, OURS_ADMISSION, PAPER, Admission, Contender
from moonpool.sim.suite.published import FIG13_MEAN_TTFT_S, FIG13_RECOMPUTE_S, FIG15
from moonpool.sim.suite.rows.row import SEEDS, TRACES, Figures, Row, Target, Value, always, figure, mean_of, near, ratio
from moonpool.sim.suite.settings import ClusterRun, ForcedRun
from moonpool.sim.suite.workload import TraceName, Workload

TBT_SHARE = {"conversation": 0.97, "synthetic": 0.996}
PAPER_TBT_SHARE = {"conversation": 0.966, "synthetic": 0.996}
SPEEDS = (1.0, 1.15)
SPLIT_TTFT_S = 10.0  # fig. 15's limit
SPLIT_BY, SPLIT_TBT_BY = 0.05, 0.15
BANDWIDTH_BY = 0.25
NARROW_GBPS, NARROW_S = 24, 1.7
COMPRESSED = {"raw": 1.0, "fp8": 0.5, "int8": 0.508}  # bytes of a token's KV over two-byte values, scales included
OVERLOADS = (1.5, 2.0, 2.5)
JUDGED_OVERLOAD = 2.0
WASTED, SWING, MET_STRETCH = 0.10, 0.5, 1.02
EARLY_CUTS = (0.6, 0.95)  # of the baseline's wasted prefill; the paper's about 0.8
FALSE_REJECTS, FALSE_ACCEPTS = 0.03, 0.05
SWITCHED = 0.98
STARTS = (3, 5, 11, 13)  # prefill nodes of 16
FIXED = {5: "0.777 fixed", 11: "0.861 fixed"}
REPLAY_S = 30.0


def serving_rows() -> Iterator[Row]:
    for trace in TRACES:
        yield from _tbt(trace)
    yield from _split()
    yield from _bandwidth()
    for trace in TRACES:
        yield from _overload(trace)
    for trace in TRACES:
        yield from _forced(trace)
    for trace in TRACES:
        yield from _switching(trace)
    yield Row(
        "simulator.conversation", "seconds of one core for the whole conversation trace on 16 nodes", "-",
        (_run(OURS, "conversation"),), figure("cpu_s"), Target(most=REPLAY_S), beside=(("wall_s", figure("wall_s")),),
    )  # fmt: skip


def _tbt(trace: TraceName) -> Iterator[Row]:
    """With our admission, and whoever it refuses has missed; beside it, nobody refused."""
    for speed in SPEEDS:
        refusing = _refusing(OURS_ADMISSION, trace, speed)
        runs = (refusing, refusing.model_copy(update={"decode_slope": "single"}), _run(OURS, trace, speed=speed))
        yield Row(
            f"tbt.{trace}.{speed:g}x", f"share of all with TBT <= 100 ms, 8P8D, replay speed {speed:g}, {trace}",
            f"{PAPER_TBT_SHARE[trace]} (paper, 1x)", runs, figure("tbt_share_of_all"), Target(least=TBT_SHARE[trace]),
            beside=(
                ("mean_tbt_s", figure("mean_tbt_s")), ("mean_ttft_s", figure("mean_ttft_s")), ("refused", figure("refused")),
                ("single_sequence_slope", figure("tbt_share_of_all", 1)),
                ("nobody_refused", figure("tbt_share", 2)), ("nobody_refused.mean_ttft_s", figure("mean_ttft_s", 2)),
            ),
        )  # fmt: skip
    shuffled = tuple(_refusing(OURS_ADMISSION, trace, 1.0, seed) for seed in SEEDS)
    yield Row(
        f"tbt.{trace}.shuffled", f"share of all with TBT <= 100 ms, 8P8D, replay speed 1, mean of three shuffles, {trace}",
        f"{PAPER_TBT_SHARE[trace]} (paper)", shuffled, mean_of("tbt_share_of_all"), Target(least=TBT_SHARE[trace]),
    )  # fmt: skip


def _split() -> Iterator[Row]:
    runs = {
        prefill: _run(PAPER, "synthetic", prefill=prefill).model_copy(update={"ttft_limit_s": SPLIT_TTFT_S})
        for prefill in FIG15
    }
    for prefill, (effective, ttft_s, _) in FIG15.items():
        yield Row(
            f"fig15.effective.{prefill}P{16 - prefill}D", f"share inside 10 s and 100 ms, {prefill}P{16 - prefill}D, synthetic",
            f"{effective}", (runs[prefill],), figure("effective"), near(effective, SPLIT_BY),
            beside=(("mean_ttft_s", figure("mean_ttft_s")), ("published_ttft_s", always(ttft_s))),
        )  # fmt: skip
    yield Row(
        "fig15.tbt", "mean TBT of the seven splits of fig. 15, largest relative error, synthetic", "0.0315 to 0.0583 s",
        tuple(runs.values()), _worst_tbt, Target(most=SPLIT_TBT_BY),
    )  # fmt: skip


def _worst_tbt(figures: Sequence[Figures]) -> float:
    return max(abs(one["mean_tbt_s"] / tbt - 1.0) for one, (_, _, tbt) in zip(figures, FIG15.values(), strict=True))


def _bandwidth() -> Iterator[Row]:
    def run(one: Contender, gbps: int, kv_bytes: float = 1.0) -> ClusterRun:
        return _run(one, "synthetic").model_copy(update={"link_bytes_per_s": gbps * 1e9 / 8, "kv_bytes": kv_bytes})

    widest = max(FIG13_MEAN_TTFT_S)
    for gbps, published in FIG13_MEAN_TTFT_S.items():
        if gbps != widest:
            wanted = published / FIG13_MEAN_TTFT_S[widest]
            yield Row(
                f"fig13.{gbps}", f"mean TTFT and hand-off at {gbps} Gbps over those at {widest}, algorithm 1, synthetic",
                f"{wanted:.2f}", (run(PAPER, gbps), run(PAPER, widest)), ratio("mean_joined_s", 0, 1),
                near(wanted, BANDWIDTH_BY * wanted),
                beside=(("with_handoff_s", figure("mean_joined_s")), ("mean_ttft_s", figure("mean_ttft_s"))),
            )  # fmt: skip
    runs = tuple(run(OURS, NARROW_GBPS, size) for size in COMPRESSED.values())
    yield Row(
        f"narrow.{NARROW_GBPS}", f"mean TTFT at {NARROW_GBPS} Gbps, fetched or computed, KV in one byte, synthetic",
        f"5.09 s raw, {FIG13_RECOMPUTE_S} s recomputed", runs, _best_compressed, Target(most=NARROW_S),
        beside=tuple((f"{name}_s", figure("mean_ttft_s", at)) for at, name in enumerate(COMPRESSED))
        + tuple((f"{name}.with_handoff_s", figure("mean_joined_s", at)) for at, name in enumerate(COMPRESSED)),
    )  # fmt: skip


def _best_compressed(figures: Sequence[Figures]) -> float:
    return min(one["mean_ttft_s"] for one in figures[1:])


def _overload(trace: TraceName) -> Iterator[Row]:
    at = f"8P8D, replay speed {JUDGED_OVERLOAD:g}, {trace}"
    ours, baseline, early = (_refusing(one, trace, JUDGED_OVERLOAD) for one in (OURS_ADMISSION, BASELINE, EARLY))
    runs = (ours, baseline, early, _refusing(EARLY_PREDICTED, trace, JUDGED_OVERLOAD))
    yield Row(
        f"overload.wasted.{trace}", f"wasted prefill seconds over the baseline's, {at}", "0.2 (early rejection)", runs,
        ratio("wasted_s", 0, 1, floor=1.0), Target(most=WASTED), beside=_four("wasted_s") + _four("refused"),
    )  # fmt: skip
    for stretch, least in ((False, 1.0), (True, MET_STRETCH)):
        yield Row(
            f"overload.requests.{trace}" + _suffix(stretch), f"requests inside both limits, over the baseline's, {at}", "1",
            runs, ratio("met_requests", 0, 1), Target(least=least), stretch, _four("met_requests"),
        )  # fmt: skip
    yield Row(
        f"overload.tokens.{trace}", f"tokens of requests inside both limits, over the baseline's, {at}", "1", runs,
        ratio("met_tokens", 0, 1), Target(least=1.0), beside=_four("met_tokens"),
    )  # fmt: skip
    if trace == "conversation":  # on the synthetic trace decoding is never short: early rejection refuses as the baseline does
        yield Row(
            f"overload.early.{trace}", f"wasted prefill that early rejection saves, of the baseline's, {at}", "about 0.8",
            runs, lambda f: 1.0 - f[2]["wasted_s"] / max(f[1]["wasted_s"], 1e-9), Target(*EARLY_CUTS),
            beside=_four("wasted_s") + _four("refused"),
        )  # fmt: skip
        yield Row(
            f"overload.swing.{trace}", f"swing of the pools' load, over early rejection's, {at}", "1", runs,
            ratio("swing", 0, 2), Target(most=SWING), beside=_four("swing"),
        )  # fmt: skip
    yield from _overload_shuffled(trace)
    yield _overload_table(trace)


def _overload_shuffled(trace: TraceName) -> Iterator[Row]:
    runs = tuple(_refusing(one, trace, JUDGED_OVERLOAD, seed) for seed in SEEDS for one in (OURS_ADMISSION, BASELINE))
    judged = (
        ("wasted_s", 1.0, Target(most=WASTED)),
        ("met_requests", 0.0, Target(least=1.0)),
        ("met_tokens", 0.0, Target(least=1.0)),
    )
    for name, floor, target in judged:
        yield Row(
            f"overload.{name.removesuffix('_s').removeprefix('met_')}.{trace}.shuffled",
            f"{name.replace('_', ' ')} over the baseline's, sum of three shuffles, replay speed {JUDGED_OVERLOAD:g}, {trace}",
            "-", runs, _sums(name, floor), target,
        )  # fmt: skip


def _overload_table(trace: TraceName) -> Row:
    """Rejections, waste and what was met at every speed, for the report; judged by what ours meets at its worst speed."""
    ways = {"baseline": BASELINE, "early": EARLY, "early_predicted": EARLY_PREDICTED, "ours": OURS_ADMISSION}
    names = ("refused", "wasted_s", "met_requests", "met_tokens", "swing")
    cells = [(speed, way) for speed in OVERLOADS for way in ways]
    return Row(
        f"overload.table.{trace}", f"requests inside both limits over the baseline's, least of 1.5x, 2x, 2.5x, 8P8D, {trace}",
        "-", tuple(_refusing(ways[way], trace, speed) for speed, way in cells),
        lambda f: min(f[at + 3]["met_requests"] / f[at]["met_requests"] for at in range(0, len(f), len(ways))),
        Target(least=1.0),
        beside=tuple((f"{speed:g}x.{way}.{name}", figure(name, at)) for at, (speed, way) in enumerate(cells) for name in names),
    )  # fmt: skip


def _forced(trace: TraceName) -> Iterator[Row]:
    runs = (ForcedRun(base=_refusing(OURS_ADMISSION, trace, JUDGED_OVERLOAD)),)
    for name, most in (("false_rejects", FALSE_REJECTS), ("false_accepts", FALSE_ACCEPTS)):
        yield Row(
            f"{name}.{trace}", f"{name.replace('_', ' ')}, of 200 sampled, replay speed {JUDGED_OVERLOAD:g}, {trace}", "-",
            runs, figure(name), Target(most=most), beside=(("sampled", figure("sampled")),),
        )  # fmt: skip


def _switching(trace: TraceName) -> Iterator[Row]:
    for prefill in STARTS:
        fixed = _run(OURS, trace, prefill=prefill)
        if trace == "synthetic":
            fixed = fixed.model_copy(update={"ttft_limit_s": SPLIT_TTFT_S})
        yield Row(
            f"switching.{trace}.{prefill}P{16 - prefill}D",
            f"share inside both limits of what comes after 120 s, roles switched from {prefill}P{16 - prefill}D, {trace}",
            FIXED.get(prefill, "-") if trace == "synthetic" else "-",
            (fixed.model_copy(update={"planner": True}), fixed),
            figure("effective_after_120s"),
            Target(least=SWITCHED),
            beside=(("fixed", figure("effective_after_120s", 1)), ("switches", figure("switches"))),
        )


def _run(
    one: Contender, trace: TraceName, *, prefill: int = 8, speed: float = 1.0, seed: int | None = None,
    decode_slope: str = "served",
) -> ClusterRun:  # fmt: skip
    run = one.run(Workload(trace=trace, shuffle=seed), prefill=prefill, decode=16 - prefill)
    return run.model_copy(update={"speed": speed, "decode_slope": decode_slope})


def _refusing(admission: Admission, trace: TraceName, speed: float, seed: int | None = None) -> ClusterRun:
    run = _run(admission.contender, trace, speed=speed, seed=seed)
    return run.model_copy(update={"admission": admission.name, "admission_settings": admission.settings})


def _four(name: str) -> tuple[tuple[str, Value], ...]:
    ways = ("ours", "baseline", "early", "early_predicted")
    return tuple((f"{way}.{name}", figure(name, at)) for at, way in enumerate(ways))


def _sums(name: str, floor: float) -> Value:
    return lambda figures: sum(one[name] for one in figures[::2]) / max(sum(one[name] for one in figures[1::2]), floor)


def _suffix(stretch: bool) -> str:
    return ".stretch" if stretch else ""
