"""One picture of two sides' replays: the share of requests with at most so long a first token, and so long a time per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from moonpool.bench.slo import Slo
from moonpool.core.errors import ConfigError
from moonpool.loadgen.record import Outcome, RequestRecord

_COLOURS = {"ours": "#2563a8", "peer": "#d9822b"}
_GREY = "#6b7280"
_STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "font.size": 11.0}

Runs = Mapping[str, Mapping[float, Sequence[Sequence[RequestRecord]]]]  # side -> rate -> rounds -> records


def draw_replays(path: Path, runs: Runs, slo: Slo) -> Path:
    """A row for every rate, TTFT left, TPOT right, a line for every round. ConfigError: it cannot be written."""
    rates = sorted({rate for side in runs.values() for rate in side})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=(12.0, 4.4 * max(len(rates), 1)), dpi=130, layout="constrained")
            FigureCanvasAgg(figure)
            for row, axes in zip(rates, figure.subplots(max(len(rates), 1), 2, squeeze=False), strict=False):
                _shares(axes[0], runs, row, "schedule_ttft_ms", slo.ttft_s, f"TTFT at {row:g} requests/s")
                _shares(axes[1], runs, row, "tpot_ms", slo.tpot_s, f"TPOT at {row:g} requests/s")
            figure.savefig(path)
    except OSError as e:
        raise ConfigError(f"out: cannot write {path}: {e.strerror}; give a writable folder", param="out") from e
    return path


def _shares(axes: Any, runs: Runs, rate: float, what: str, target_s: float, title: str) -> None:
    """A request that was refused or failed never arrives: its line ends below one."""
    for side, rounds in runs.items():
        for at, records in enumerate(rounds.get(rate, ())):
            known = sorted(ms / 1e3 for r in records if r.outcome is Outcome.OK and (ms := getattr(r, what)) is not None)
            share = [(i + 1) / max(len(records), 1) for i in range(len(known))]
            axes.step(known, share, where="post", color=_COLOURS[side], linewidth=1.3, alpha=0.8, label="" if at else side)
    axes.axvline(target_s, color=_GREY, linewidth=0.9, linestyle=":")
    axes.annotate(f"target {target_s:g} s", (target_s, 0.02), rotation=90, ha="right", va="bottom", color=_GREY, fontsize=9)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("seconds")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_title(f"{title}: share of all requests with at most so much", fontsize=11)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, loc="upper left")
