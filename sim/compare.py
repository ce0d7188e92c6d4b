"""Several simulations of the same requests side by side: a table and one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moonpool.sim.outcome import Outcome

COLUMNS = (
    ("TTFT mean", "ttft_mean_s"), ("p50", "ttft_p50_s"), ("p90", "ttft_p90_s"), ("p99", "ttft_p99_s"), ("max", "ttft_max_s"),
    ("<= 5 s", "ttft_5s_share"), ("TBT p90", "tbt_p90_s"), ("hits", "hit_share"), ("refused", "refused"),
    ("wasted s", "wasted_prefill_s"), ("in targets", "met_share"),
)  # fmt: skip


def compared(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, float]]:
    """Figures of every simulation, JSON-able."""
    return {name: outcome.figures() for name, outcome in outcomes.items()}


def table(outcomes: Mapping[str, Outcome]) -> str:
    """One line a simulation; seconds, shares and counts."""
    cells: list[Sequence[str]] = [("", *(title for title, _ in COLUMNS))]
    for name, figures in compared(outcomes).items():
        cells.append((name, *(_shown(figures[key]) for _, key in COLUMNS)))
    widths = [max(len(row[at]) for row in cells) for at in range(len(COLUMNS) + 1)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    )


def draw(folder: Path, outcomes: Mapping[str, Outcome]) -> Path:
    """compared.png in ``folder``."""
    from moonpool.sim.pictures import draw_compared

    return draw_compared(folder / "compared.png", outcomes)


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= 1_000 or value == int(value) else f"{value:.3g}"
