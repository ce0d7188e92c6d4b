"""What the user sees while a replay runs: a live table on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from moonpool.loadgen.clock import Clock
from moonpool.loadgen.record import Outcome
from moonpool.loadgen.replay import Replay
from moonpool.loadgen.summary import Quantiles, quantiles

_TABLE_EVERY_S = 0.5
_LINE_EVERY_S = 5.0


async def watch(replay: Replay, clock: Clock, span_s: float, out: TextIO = sys.stderr) -> None:
    """Show ``replay`` until cancelled; the last state is shown once more at the end."""
    console = Console(file=out)
    if not console.is_terminal:
        await _lines(replay, clock, span_s, out)
        return
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(table(replay, clock.now(), span_s), refresh=True)
                await clock.sleep(_TABLE_EVERY_S)
        finally:
            live.update(table(replay, clock.now(), span_s), refresh=True)


async def _lines(replay: Replay, clock: Clock, span_s: float, out: TextIO) -> None:
    while True:
        await clock.sleep(_LINE_EVERY_S)
        print(line(replay, clock.now(), span_s), file=out, flush=True)


def line(replay: Replay, now: float, span_s: float) -> str:
    """One line of progress, for logs."""
    p, recent = replay.progress, replay.progress.recent
    parts = [
        f"{_elapsed(replay, now):.0f} of about {span_s:.0f} s",
        f"sent {p.sent}/{p.planned}",
        f"in flight {p.in_flight}",
        f"done {p.outcomes[Outcome.OK]}",
        f"refused {p.outcomes[Outcome.REFUSED]}",
        f"failed {p.outcomes[Outcome.FAILED]}",
    ]
    if ttft := quantiles(r.schedule_ttft_ms for r in recent):
        parts.append(f"TTFT p50 {ttft.p50:.0f} ms")
    if tbt := quantiles(r.tbt_ms for r in recent):
        parts.append(f"TBT p50 {tbt.p50:.0f} ms")
    return ", ".join(parts)


def table(replay: Replay, now: float, span_s: float) -> Table:
    p, recent = replay.progress, list(replay.progress.recent)
    shown = Table(title=f"replay: {_elapsed(replay, now):.0f} of about {span_s:.0f} s", title_justify="left", min_width=62)
    shown.add_column("")
    for name in ("p50", "p90", "p99"):
        shown.add_column(name, justify="right")
    shown.add_row("TTFT (ms)", *_cells(quantiles(r.schedule_ttft_ms for r in recent)))
    shown.add_row("TBT (ms)", *_cells(quantiles(r.tbt_ms for r in recent)))
    shown.add_row("TPOT (ms)", *_cells(quantiles(r.tpot_ms for r in recent)))
    shown.add_row("lag (ms)", *_cells(quantiles(r.lag_ms for r in recent)))
    outcomes = p.outcomes
    judged = sum(outcomes.values()) - outcomes[Outcome.CANCELLED]
    targets = any(r.met_targets is not None for r in recent)
    met = f", {p.met} of {judged} met their targets" if targets else ""
    held = f", {p.held_back} held back by the cap" if p.held_back else ""
    shown.caption = (
        f"sent {p.sent}/{p.planned}, in flight {p.in_flight}, done {outcomes[Outcome.OK]}, "
        f"refused {outcomes[Outcome.REFUSED]}, failed {outcomes[Outcome.FAILED]}{met}{held}"
    )
    return shown


def _elapsed(replay: Replay, now: float) -> float:
    return max(now - replay.start, 0.0)


def _cells(found: Quantiles | None) -> list[str]:
    return [f"{v:.0f}" for v in (found.p50, found.p90, found.p99)] if found else ["-", "-", "-"]
