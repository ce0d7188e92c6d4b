"""Decisions as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Told = dict[str, Any]
PREFILL = ("ttft_ms", "ttft_high_ms", "wait_ms", "work_ms", "cached_tokens", "own_blocks", "node_blocks")
DECODE = ("tbt_ms", "batch", "context_tokens")


def request_text(told: Told) -> str:
    head = f"{told['request']}, decided by {told['conductor']}"
    return "\n\n".join([head, *(_decision(one) for one in told["decisions"])])


def decision_line(told: Told) -> str:
    """One decision on one line: what was asked, where it went, predicted and actual time to first token."""
    asked, predicted, actual = told["asked"], told.get("predicted"), told["actual"]
    parts = [f"{told['request']:<34} {asked['prompt_tokens']:>7} tokens", f"{_outcome(told):<28}"]
    if predicted is not None:
        parts.append(f"ttft {predicted['ttft_ms']:.0f}{'' if predicted['ttft_sure'] else '?'} ms")
    if actual is not None and actual["ttft_ms"] > 0:
        parts.append(f"was {actual['ttft_ms']:.0f} ms, {actual['outcome']}")
    return "  " + "  ".join(parts)


def _decision(told: Told) -> str:
    asked = told["asked"]
    lines = [
        f"attempt {asked['attempt']}: {asked['prompt_tokens']} prompt tokens in {asked['blocks']} whole blocks, at most "
        f"{asked['max_tokens']} output tokens; policy {told['policy']}, admission {told['admission']}",
        f"  {_outcome(told)}" + (f", after waiting {told['waited_ms']:.0f} ms" if told["waited_ms"] >= 1 else ""),
    ]
    if told.get("refused") is not None:
        lines.append(f"  {told['refused']['message']}; try again after {told['refused']['retry_after_s']:.1f} s")
    if told.get("judged"):
        lines.append(
            "  judged: " + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in told["judged"].items())
        )
    lines += _sources(told)
    if "prefill_candidates" in told:
        lines += _table(told["prefill_candidates"], PREFILL, told["prefill_considered"], "prefill")
    if "decode_candidates" in told:
        lines += _table(told["decode_candidates"], DECODE, told["decode_considered"], "decode")
    return "\n".join([*lines, *_times(told)])


def _outcome(told: Told) -> str:
    if (placed := told.get("placed")) is not None:
        workers = [share["worker"] for share in told.get("group", ())] or [placed["prefill"]["id"]]
        return f"placed on {' + '.join(workers)} -> {placed['decode']['id']}"
    if (refused := told.get("refused")) is not None:
        return f"refused: {refused['reason']}"
    return "still waiting for a worker"


def _sources(told: Told) -> list[str]:
    held, placed, transfer = told["held"], told.get("placed"), told.get("transfer")
    lines = []
    if held["deepest_blocks"]:
        lines.append(f"  held by a pool: {held['deepest_blocks']} leading blocks at {', '.join(held['holders'])}")
    if placed is not None and placed["segments"]:
        parts = [f"{s['count']} {s['source']}{' from ' + s['node'] if s['node'] else ''}" for s in placed["segments"]]
        lines.append(f"  blocks: {', '.join(parts)}")
    if transfer is not None and transfer["source"]:
        meanwhile = f", {transfer['computed_meanwhile']} computed meanwhile" if transfer["computed_meanwhile"] else ""
        lines.append(
            f"  transfer: {transfer['blocks']} blocks from {transfer['source']} in {transfer['ms']:.0f} ms{meanwhile}, "
            f"{transfer['flows_under_way']} other flows"
        )
    for share in told.get("group", ()):
        lines.append(
            f"  computed together: tokens {share['begin']} to {share['end']} at {share['worker']}, "
            f"from {share['begins_ms']:.0f} to {share['ends_ms']:.0f} ms"
        )
    return lines


def _table(rows: Sequence[Told], columns: Sequence[str], considered: int, what: str) -> list[str]:
    """The chosen one first, marked; the others by their first column."""
    width = max((len(row["worker"]) for row in rows), default=0)
    heads = [column.removesuffix("_ms") + (" ms" if column.endswith("_ms") else "") for column in columns]
    lines = ["    " + what.ljust(width) + "".join(f"{head.replace('_', ' '):>15}" for head in heads)]
    for number, row in enumerate(rows):
        mark = "  * " if number == 0 else "    "
        lines.append(mark + row["worker"].ljust(width) + "".join(f"{_cell(row[column]):>15}" for column in columns))
    if considered > len(rows):
        lines.append(f"    and {considered - len(rows)} more")
    return lines


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _times(told: Told) -> list[str]:
    predicted, actual = told.get("predicted"), told["actual"]
    lines: list[str] = []
    if predicted is not None:
        sure = "" if predicted["ttft_sure"] else " (not sure yet)"
        lines.append(
            f"  predicted  ttft {predicted['ttft_ms']:.0f} ms, up to {predicted['ttft_high_ms']:.0f}{sure}; "
            f"tbt {predicted['tbt_ms']:.1f} ms, up to {predicted['tbt_high_ms']:.1f}; "
            f"{predicted['cached_tokens']} tokens cached"
        )
    if actual is not None:
        lines.append(
            f"  actual     ttft {actual['ttft_ms']:.0f} ms; tbt {actual['tbt_ms']:.1f} ms; "
            f"{actual['cached_tokens']} tokens cached, {actual['output_tokens']} generated; {actual['outcome']}"
        )
    if told["regret_ms"] is not None:
        lines.append(f"  regret     {told['regret_ms']:.0f} ms later than the best candidate was predicted to be")
    return lines


def comparison_text(figures: Told) -> str:
    lines = [
        f"{figures['decisions']} decisions of {figures['conductor']} under {figures['recorded_policy']}, "
        f"against {figures['policy']}:",
        f"  {figures['differ']} differ, {figures['refused']} were refused, {figures['compared']} can be compared",
    ]
    if figures["compared"]:
        names = ("recorded_ttft_ms", "other_ttft_ms", "predicted_gain_ms", "actual_ttft_ms")
        lines += [f"  {name:<20}{_spread(figures[name])}" for name in names if figures[name]]
    if figures["cut"] or figures["index_resets"]:
        lines.append("  the record begins in the middle: blocks stored before are unknown to both sides")
    lines += _differences(figures["largest_differences"])
    return "\n".join(lines)


def _spread(values: Told) -> str:
    return "".join(f"{name} {values[name]:>10.1f}  " for name in ("mean", "p50", "p90"))


def _differences(worst: Iterable[Told]) -> list[str]:
    lines = []
    for one in worst:
        mine, other = one["recorded"], one["other"]
        lines.append(
            f"  {one['request']:<34} {mine['prefill']}/{mine['cached_blocks']} -> {other['prefill']}/{other['cached_blocks']}: "
            f"{one['recorded_ttft_ms']:.0f} -> {one['other_ttft_ms']:.0f} ms predicted"
        )
    return ["  largest differences (worker/blocks cached):", *lines] if lines else []
