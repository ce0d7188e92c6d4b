"""The report of a replay: a folder of files, and the same in words."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moonpool.core.errors import ConfigError
from moonpool.loadgen.figures import draw_figures
from moonpool.loadgen.record import RequestRecord
from moonpool.loadgen.summary import Quantiles, Summary


def write_report(folder: Path, records: Sequence[RequestRecord], summary: Summary) -> list[Path]:
    """Write requests.jsonl, summary.json, summary.txt and the pictures into ``folder``; the files written, in that order."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        requests, numbers, words = folder / "requests.jsonl", folder / "summary.json", folder / "summary.txt"
        with requests.open("w") as f:
            f.writelines(json.dumps(as_json(r)) + "\n" for r in records)
        numbers.write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n")
        words.write_text(in_words(summary) + "\n")
        return [requests, numbers, words, *draw_figures(folder, records, summary)]
    except OSError as e:
        raise ConfigError(f"report: cannot write to {folder}: {e.strerror}; give a writable folder", param="report") from e


def as_json(record: RequestRecord) -> dict[str, Any]:
    """A record as one JSON object: what was measured, then what follows from it."""
    derived = {
        "lag_ms": record.lag_ms,
        "ttft_ms": record.ttft_ms,
        "schedule_ttft_ms": record.schedule_ttft_ms,
        "tbt_ms": record.tbt_ms,
        "tpot_ms": record.tpot_ms,
        "latency_ms": record.latency_ms,
        "schedule_latency_ms": record.schedule_latency_ms,
    }
    measured = dataclasses.asdict(record)
    return {k: _rounded(v) for k, v in {**measured, **derived, "met_targets": record.met_targets}.items()}


def in_words(summary: Summary) -> str:
    """The printed summary."""
    s = summary
    lines = [
        f"requests   {s.planned} planned, {s.sent} sent: {s.ok} ok, {s.refused} refused, {s.failed} failed"
        + (f", {s.cancelled} cancelled" if s.cancelled else "")
        + (" (stopped by the user)" if s.interrupted else ""),
        f"time       {s.duration_s:.1f} s; offered {_rate(s.offered_per_s)}, completed {_rate(s.completed_per_s)}",
        *_goodput_lines(s),
        f"tokens     {s.prompt_tokens} prompt ({s.cached_share:.1%} cached), {s.output_tokens} output; "
        f"{s.prompt_tokens_per_s:.0f} + {s.output_tokens_per_s:.0f} tokens/s",
        "",
        *_latency_lines(s),
        "",
        *_remark_lines(s),
        f"transport  carrier {s.transport.carrier}"
        + (f", UCX transport {s.transport.ucx_transport}" if "ucx" in s.transport.carrier else ""),
    ]
    return "\n".join(lines)


def _rate(value: float | None) -> str:
    return "all at once" if value is None else f"{value:.2f} requests/s"


def _goodput_lines(s: Summary) -> list[str]:
    if s.goodput is None:
        return []
    wanted = [
        f"{name} at most {value / 1e3:g} s"
        for name, value in (("TTFT", s.targets.ttft_ms), ("TBT", s.targets.tbt_ms))
        if value is not None
    ]
    g = s.goodput
    return [f"goodput    {g.per_s:.2f} requests/s: {g.met} of {g.of} ({g.share:.0%}) had {' and '.join(wanted)}"]


def _latency_lines(s: Summary) -> list[str]:
    rows: list[tuple[str, Quantiles | None]] = [
        ("TTFT from the plan", s.schedule_ttft_ms),
        ("TTFT from the send", s.ttft_ms),
        ("TBT (slowest tenth)", s.tbt_ms),
        ("TPOT", s.tpot_ms),
        ("ITL", s.itl_ms),
        ("whole answer, from the plan", s.schedule_latency_ms),
        ("whole answer, from the send", s.latency_ms),
    ]
    lines = [f"{'ms':<28}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max"))]
    for name, q in rows:
        cells = [f"{v:>10.1f}" for v in (q.mean, q.p50, q.p90, q.p99, q.max)] if q else [f"{'-':>10}"] * 5
        lines.append(f"{name:<28}" + "".join(cells))
    return lines


def _remark_lines(s: Summary) -> list[str]:
    lines = []
    if s.lag is not None:
        lag = s.lag
        lines.append(
            f"lag        p50 {lag.p50_ms:.1f}, p99 {lag.p99_ms:.1f}, max {lag.max_ms:.1f}, last send {lag.last_ms:.1f} ms"
        )
        if lag.behind:
            lines.append(f"           WARNING: the client was more than {lag.allowed_ms:.0f} ms behind the plan")
    if s.cap:
        held = f"held back {s.held_back} requests, up to {s.longest_cap_wait_ms:.0f} ms" if s.held_back else "never reached"
        loop = "; NOT an open loop" if s.held_back else ""
        lines.append(f"cap        {s.cap} requests in flight, {held}{loop}")
    if s.refusals:
        lines.append("refused    " + _reasons(s.refusals))
        if s.retry_after_s:
            lines.append(
                f"           told to retry after {s.retry_after_s.p50:.1f} s (median), at most {s.retry_after_s.max:.1f} s"
            )
    if s.failures:
        lines.append("failed     " + _reasons(s.failures))
    for count, what in (
        (s.prompt_length_mismatches, "answers counted another prompt length than was sent"),
        (s.output_length_mismatches, "answers had another length than was asked for"),
        (s.without_text, "answers had no text; their first token counts from their end"),
        (s.outputs_raised, "outputs were raised to one token"),
    ):
        if count:
            lines.append(f"note       {count} {what}")
    adjusted = {name.replace("_", " "): n for name, n in s.trace.items() if n}
    if adjusted:
        lines.append("trace      " + ", ".join(f"{name}: {n}" for name, n in adjusted.items()))
    return lines


def _reasons(counts: dict[str, int], top: int = 5) -> str:
    shown = ", ".join(f"{n} x {reason or 'no reason given'}" for reason, n in list(counts.items())[:top])
    return shown + (f" and {len(counts) - top} more" if len(counts) > top else "")


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
