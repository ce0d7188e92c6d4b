"""Pictures of simulations, as PNG files: first tokens, gaps, and the load over time, of one outcome or of several overlaid.

No window system is needed: figures are drawn on Agg canvases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from moonpool.core.errors import ConfigError
from moonpool.sim.outcome import Outcome

_DPI = 130
_COLOURS = ("#2563a8", "#d9822b", "#3a8f5c", "#b8383d", "#8e5ea2", "#6b7280", "#1b9e9e", "#c2a500")
_LINES = ("-", "--", "-.", ":")
_GREY = "#6b7280"
_STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "font.size": 11.0}
_LEAST_S = {"ttft": 0.05, "tbt": 0.01}  # the logarithmic axes begin here


def draw_outcome(folder: Path, outcome: Outcome) -> list[Path]:
    """ttft.png, tbt.png and load.png of one simulation. ConfigError where ``folder`` cannot be written."""
    named = {"": outcome}
    return [
        _save(folder / "ttft.png", (8.0, 4.8), lambda figure: _shares(figure.subplots(), named, "ttft")),
        _save(folder / "tbt.png", (8.0, 4.8), lambda figure: _shares(figure.subplots(), named, "tbt")),
        _save(folder / "load.png", (8.0, 6.4), lambda figure: _stages(figure, outcome)),
    ]


def draw_compared(path: Path, outcomes: Mapping[str, Outcome]) -> Path:
    """One picture of several simulations: shares of TTFT and TBT, what waits, and the load of both stages."""

    def draw(figure: Any) -> None:
        (ttft, tbt), (waiting, load) = figure.subplots(2, 2)
        _shares(ttft, outcomes, "ttft")
        _shares(tbt, outcomes, "tbt")
        _over_time(waiting, outcomes, "requests whose prefill has not begun", lambda at: at.waiting)
        _over_time(
            load, outcomes, "load of the busier stage: latency over its target", lambda at: max(at.prefill_load, at.decode_load)
        )
        load.axhline(1.0, color=_GREY, linewidth=0.8)
        lines, names = ttft.get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=min(len(outcomes), 4), frameon=False)

    return _save(path, (13.0, 8.6), draw)


def _shares(axes: Any, outcomes: Mapping[str, Outcome], what: str) -> None:
    """Share of all requests with at most so much; a refused request never arrives there."""
    for at, (name, outcome) in enumerate(outcomes.items()):
        times = [(r.ttft_s if what == "ttft" else r.tbt_s) for r in outcome.requests if r.refused is None]
        known = np.sort(np.array([t for t in times if t is not None]))
        wanted = sum(what == "ttft" or r.output_tokens > 1 for r in outcome.requests)
        share = np.arange(1, len(known) + 1) / max(wanted, 1)
        axes.step(known, share, where="post", label=name, **_line(at))
    first = next(iter(outcomes.values()), None)
    if first is not None:
        limit = first.ttft_target_s if what == "ttft" else first.tbt_target_s
        axes.axvline(limit, color=_GREY, linewidth=0.9, linestyle=":")
        axes.annotate(f"target {limit:g} s", (limit, 0.02), rotation=90, ha="right", va="bottom", color=_GREY, fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(left=_LEAST_S[what])
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    words = {"ttft": "Time to first token", "tbt": "Time between tokens, mean of a request's slowest tenth"}[what]
    axes.set_title(words, fontsize=11)
    axes.set_ylabel("share of requests with at most so much")
    axes.set_xlabel("seconds")
    axes.grid(alpha=0.25)


def _over_time(axes: Any, outcomes: Mapping[str, Outcome], title: str, value: Callable[[Any], float]) -> None:
    for at, (name, outcome) in enumerate(outcomes.items()):
        axes.plot([one.at for one in outcome.load], [value(one) for one in outcome.load], label=name, **_line(at))
    axes.set_title(title[0].upper() + title[1:], fontsize=11)
    axes.set_xlabel("seconds of the replay")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)


def _stages(figure: Any, outcome: Outcome) -> None:
    above, below = figure.subplots(2, 1, sharex=True)
    times = [one.at for one in outcome.load]
    loads: Sequence[tuple[str, list[float]]] = (
        ("prefill", [one.prefill_load for one in outcome.load]),
        ("decode", [one.decode_load for one in outcome.load]),
    )
    for at, (name, values) in enumerate(loads):
        above.plot(times, values, label=name, **_line(at))
    above.axhline(1.0, color=_GREY, linewidth=0.8)
    above.set_title("Load of the stages: predicted latency over its target", fontsize=11)
    above.legend(frameon=False, ncols=2)
    counts: Sequence[tuple[str, list[int]]] = (
        ("waiting", [one.waiting for one in outcome.load]),
        ("decoding", [one.decoding for one in outcome.load]),
    )
    for at, (name, numbers) in enumerate(counts):
        below.plot(times, numbers, label=name, **_line(at))
    below.set_title("Requests", fontsize=11)
    below.set_xlabel("seconds of the replay")
    below.legend(frameon=False, ncols=2)
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)


def _line(at: int) -> dict[str, Any]:
    return {"color": _COLOURS[at % len(_COLOURS)], "linestyle": _LINES[at // len(_COLOURS) % len(_LINES)], "linewidth": 1.6}


def _save(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
            FigureCanvasAgg(figure)
            draw(figure)
            figure.savefig(path)
    except OSError as e:
        raise ConfigError(f"output: cannot write {path}: {e.strerror}; give a writable folder", param="output") from e
    return path
