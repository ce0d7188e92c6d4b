"""Pictures of a replay, as PNG files. No window system is needed: figures are drawn on Agg canvases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from moonpool.loadgen.record import Outcome, RequestRecord
from moonpool.loadgen.summary import Summary, rank

_SIZE = (8.0, 4.8)
_DPI = 130
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#2563a8", "#d9822b", "#3a8f5c", "#b8383d", "#6b7280"
_STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "font.size": 11.0}
_BINS = 40
_TIME_BINS = 30
_LEGEND_CHARACTERS = 92  # in one line below the axes
_REASONS = (_RED, _ORANGE, _BLUE, "#8e5ea2", _GREY)
_QUANTILES = (0.5, 0.9, 0.99)
_TAIL = 0.995  # a distribution's picture ends here; what lies beyond is counted in its title


def draw_figures(folder: Path, records: Sequence[RequestRecord], summary: Summary) -> list[Path]:
    """ttft.png, tbt.png, goodput.png (throughput.png without targets), cache_hits.png, refusals.png."""
    ok = [r for r in records if r.outcome is Outcome.OK]
    drawings: list[tuple[str, Callable[[Any], None]]] = [
        ("ttft.png", lambda figure: _ttft(figure, ok, summary)),
        ("tbt.png", lambda figure: _tbt(figure, ok, summary)),
        ("goodput.png" if summary.goodput else "throughput.png", lambda figure: _over_time(figure, records, summary)),
        ("cache_hits.png", lambda figure: _cache(figure, ok, summary)),
        ("refusals.png", lambda figure: _refusals(figure, records)),
    ]
    paths = []
    with matplotlib.rc_context(_STYLE):
        for name, draw in drawings:
            figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
            FigureCanvasAgg(figure)
            draw(figure)
            figure.savefig(folder / name)
            paths.append(folder / name)
    return paths


def _ttft(figure: Any, ok: Sequence[RequestRecord], summary: Summary) -> None:
    values = [v for r in ok if (v := r.schedule_ttft_ms) is not None]
    _distribution(figure, values, summary.targets.ttft_ms, "Time to first token (TTFT), from the planned send")


def _tbt(figure: Any, ok: Sequence[RequestRecord], summary: Summary) -> None:
    values = [v for r in ok if (v := r.tbt_ms) is not None]
    _distribution(
        figure, values, summary.targets.tbt_ms, "Time between tokens (TBT): mean of each request's slowest 10 % of gaps"
    )


def _distribution(figure: Any, values_ms: Sequence[float], target_ms: float | None, title: str) -> None:
    """Above, how many requests had which latency; below, the share that had at most that. One x axis for both."""
    if not values_ms:
        _nothing(figure, title, "no request got that far")
        return
    ordered = sorted(values_ms)
    seconds = max(ordered[-1], target_ms or 0) >= 2_000
    unit, per_ms = ("s", 1e-3) if seconds else ("ms", 1.0)
    end = rank(ordered, _TAIL) if len(ordered) >= 1 / (1 - _TAIL) else ordered[-1]
    beyond = sum(v > end for v in ordered)
    shown = [v * per_ms for v in ordered if v <= end]
    right = max(end, (target_ms or 0) * 1.02 if target_ms is not None and target_ms <= 4 * end else 0) * per_ms * 1.04 or 1.0
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    above.hist(shown, bins=min(_BINS, max(8, len(shown) // 2)), range=(0, right), color=_BLUE, edgecolor="white", linewidth=0.6)
    above.set_ylabel("requests")
    above.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    below.step([0, *shown], [0, *((i + 1) / len(ordered) for i in range(len(shown)))], where="post", color=_BLUE)
    below.set_ylim(0, 1.05)
    below.set_ylabel("share at most")
    below.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    below.set_xlim(0, right)
    below.set_xlabel(f"latency ({unit})")
    for q in _QUANTILES:
        below.axhline(q, color=_GREY, linewidth=0.5, alpha=0.4)
    remark = f"{len(ordered)} requests: " + ", ".join(
        f"p{q * 100:.0f} {_short(rank(ordered, q) * per_ms)} {unit}" for q in _QUANTILES
    )
    if beyond:
        remark += f"; {beyond} beyond the right edge, at most {_short(ordered[-1] * per_ms)} {unit}"
    _head(above, title, remark)
    if target_ms is not None:
        _mark_target(above, below, ordered, target_ms, per_ms, unit)


def _mark_target(above: Any, below: Any, ordered: Sequence[float], target_ms: float, per_ms: float, unit: str) -> None:
    met = sum(v <= target_ms for v in ordered) / len(ordered)
    words = f"target {_short(target_ms * per_ms)} {unit}\n{met:.0%} within"
    at, right = target_ms * per_ms, above.get_xlim()[1]
    above.set_ylim(top=above.get_ylim()[1] * 1.25)  # room for the words above the bars
    if at > right:
        above.text(0.995, 0.98, words + " (beyond the right edge)", transform=above.transAxes, ha="right", va="top", color=_RED)
        return
    for axes in (above, below):
        axes.axvline(at, color=_RED, linestyle="--", linewidth=1.4)
    side, shift = ("right", -5) if at > right / 2 else ("left", 5)
    above.annotate(
        words, (at, 1), xycoords=("data", "axes fraction"), xytext=(shift, -3), textcoords="offset points",
        ha=side, va="top", color=_RED, fontsize=10,
    )  # fmt: skip


def _over_time(figure: Any, records: Sequence[RequestRecord], summary: Summary) -> None:
    """Arrivals per second, stacked by what became of them: the lowest layer is the goodput."""
    judged = summary.goodput is not None
    kinds: dict[str, tuple[str, Callable[[RequestRecord], bool]]] = {
        ("met every target" if judged else "completed"): (_GREEN, _is_good),
        "completed, target missed": (_ORANGE, lambda r: r.outcome is Outcome.OK and not _is_good(r)),
        "refused": (_RED, lambda r: r.outcome is Outcome.REFUSED),
        "failed or cancelled": (_GREY, lambda r: r.outcome in (Outcome.FAILED, Outcome.CANCELLED)),
    }
    layers = {name: (color, [r.planned_s for r in records if belongs(r)]) for name, (color, belongs) in kinds.items()}
    title = "Goodput over time" if judged else "Throughput over time"
    if not records:
        _nothing(figure, title, "nothing was sent")
        return
    axes = figure.subplots()
    end = max(r.planned_s for r in records)
    width = _nice_width(end / _TIME_BINS)
    _stacked(axes, {name: layer for name, layer in layers.items() if layer[1]}, end, width, 1 / width)
    remark = f"completed {summary.completed_per_s:.2f} requests/s over {summary.duration_s:.0f} s"
    if summary.goodput:
        g = summary.goodput
        remark = f"goodput {g.per_s:.2f} requests/s: {g.met} of {g.of} requests met every target; {remark}"
    _head(axes, title, remark)
    axes.set_ylabel("requests/s")
    axes.set_xlabel("planned arrival (s from the start)")


def _is_good(record: RequestRecord) -> bool:
    return record.outcome is Outcome.OK and record.met_targets is not False


def _stacked(axes: Any, layers: dict[str, tuple[str, list[float]]], end: float, width: float, each: float) -> None:
    """A histogram over time in bins of ``width`` s, one colour per layer; the legend lies below, where it covers nothing."""
    count = max(math.floor(end / width) + 1, 1)
    edges = [i * width for i in range(count + 1)]
    values = [times for _, times in layers.values()]
    axes.hist(
        values, bins=edges, weights=[[each] * len(v) for v in values], stacked=True,
        color=[color for color, _ in layers.values()], label=list(layers), edgecolor="white", linewidth=0.4,
    )  # fmt: skip
    axes.set_xlim(0, edges[-1])
    columns = max(_LEGEND_CHARACTERS // (max(map(len, layers)) + 6), 1)
    axes.figure.legend(loc="outside lower center", ncols=min(columns, len(layers)), frameon=False, fontsize=10)


def _nice_width(seconds: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... seconds; tenths for a short replay."""
    if seconds <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(seconds))
    return max(next(scale * step for step in (1, 2, 5, 10) if scale * step >= seconds * 0.999), 0.1)


def _cache(figure: Any, ok: Sequence[RequestRecord], summary: Summary) -> None:
    """Each request's cached share, and the share of all prompt tokens so far."""
    known = sorted((r for r in ok if r.cached_tokens is not None and r.prompt_tokens), key=lambda r: r.planned_s)
    title = "Prompt tokens found in the cache"
    if not known:
        _nothing(figure, title, "the server reports no cached tokens")
        return
    axes = figure.subplots()
    times = [r.planned_s for r in known]
    cached = prompt = 0
    so_far = []
    for r in known:
        cached += r.cached_tokens or 0
        prompt += r.prompt_tokens or 0
        so_far.append(cached / prompt)
    shares = [(r.cached_tokens or 0) / (r.prompt_tokens or 1) for r in known]
    dense = len(known) > 500
    axes.scatter(
        times,
        shares,
        s=10 if dense else 28,
        alpha=0.25 if dense else 0.7,
        color=_BLUE,
        linewidths=0,
        label="one request",
        clip_on=False,
    )
    axes.step(times, so_far, where="post", color=_ORANGE, linewidth=2, label="all prompt tokens so far")
    axes.set_ylim(0, 1)
    axes.set_xlim(0, max(times[-1], 1e-3) * 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_ylabel("cached share of the prompt")
    axes.set_xlabel("planned arrival (s from the start)")
    remark = f"{summary.cached_tokens:,} of {summary.prompt_tokens:,} prompt tokens cached ({summary.cached_share:.1%})"
    _head(axes, title, remark)
    axes.grid(axis="y", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10)


def _refusals(figure: Any, records: Sequence[RequestRecord]) -> None:
    """Refused arrivals, by reason; rare reasons together."""
    refused = [r for r in records if r.outcome is Outcome.REFUSED]
    title = "Refused requests over time"
    if not refused:
        _nothing(figure, title, f"none of {len(records)} requests was refused")
        return
    common = [reason for reason, _ in Counter(r.reason for r in refused).most_common(len(_REASONS) - 1)]
    layers: dict[str, tuple[str, list[float]]] = {}
    for r in refused:
        name = (r.reason[:40] or "no reason given") if r.reason in common else "other reasons"
        layers.setdefault(name, (_REASONS[len(layers) % len(_REASONS)], []))[1].append(r.planned_s)
    axes = figure.subplots()
    end = max(r.planned_s for r in records)
    width = _nice_width(end / _TIME_BINS)
    _stacked(axes, layers, end, width, 1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    remark = f"{len(refused)} of {len(records)} requests refused ({len(refused) / len(records):.0%})"
    _head(axes, title, remark)
    axes.set_ylabel(f"refused requests per {width:g} s")
    axes.set_xlabel("planned arrival (s from the start)")


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1_000 else f"{value:,.0f}"


def _head(axes: Any, title: str, remark: str) -> None:
    """A title and, smaller, the figures in words. They take no part in the layout: a long line must not squeeze the axes."""
    axes.set_title(title, fontsize=12, pad=26)
    axes.annotate(
        remark, (0, 1), xycoords="axes fraction", xytext=(0, 8), textcoords="offset points", fontsize=9.5, color=_GREY
    ).set_in_layout(False)


def _nothing(figure: Any, title: str, why: str) -> None:
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_title(title, fontsize=12)
    axes.text(0.5, 0.5, why, ha="center", va="center", color=_GREY, fontsize=13, transform=axes.transAxes)
