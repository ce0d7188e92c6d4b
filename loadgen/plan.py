"""From trace rows to planned sends: every scaling option of a replay, in one pure place.

Time: the first row goes out at 0; the rest keep their distances, divided by ``speed``. ``loops`` repeats the trace,
each pass one *period* after the one before; a period is the span plus one mean gap, so the passes join without a
pile-up, and it is divided by ``speed`` like everything else.

Size: a block of the trace becomes ``block_tokens`` prompt tokens; a partly filled last block shrinks in proportion,
rounded up, so the number of blocks never changes. Outputs are divided by ``output_divisor``, rounded down, at least 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.core.errors import ConfigError
from moonpool.loadgen.trace import Trace, TraceRow

_LONE_ROW_PERIOD_MS = 1_000.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a trace is turned into a plan. ``block_tokens`` 0 keeps the trace's own block size; ``limit`` 0 keeps all rows."""

    speed: float = 1.0
    block_tokens: int = 0
    output_divisor: int = 1
    limit: int = 0
    loops: int = 1
    spread: bool = False  # rows of one timestamp go out evenly over the gap to the next one, instead of all at once

    def check(self) -> None:
        """ConfigError for a value that cannot be meant."""
        if not 0 < self.speed < float("inf"):
            raise ConfigError(
                f"speed: {self.speed} is not a speed-up; use a number above 0 (2 replays twice as fast)", param="speed"
            )
        for name, value, least in (
            ("block_tokens", self.block_tokens, 0),
            ("output_divisor", self.output_divisor, 1),
            ("limit", self.limit, 0),
            ("loops", self.loops, 1),
        ):
            if value < least:
                raise ConfigError(f"{name}: {value} is too small; use {least} or more", param=name)


@dataclass(frozen=True, slots=True)
class PlannedSend:
    """One request to come: ``at_s`` seconds after the start of the replay."""

    index: int
    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    block_tokens: int  # prompt tokens of every block but a partly filled last one
    row: int
    loop: int


@dataclass(frozen=True, slots=True)
class Plan:
    sends: tuple[PlannedSend, ...]
    outputs_raised: int = 0  # rows whose scaled output was below one token

    @property
    def span_s(self) -> float:
        return self.sends[-1].at_s if self.sends else 0.0


def plan_sends(trace: Trace, scaling: Scaling) -> Plan:
    """Every send of a replay, in order of time."""
    scaling.check()
    rows = trace.rows[: scaling.limit] if scaling.limit else trace.rows
    if not rows:
        return Plan(())
    offsets = _offsets_ms(rows, scaling.spread)
    period = _period_ms(rows)
    block = scaling.block_tokens or trace.block_tokens
    sends: list[PlannedSend] = []
    raised = 0
    for loop in range(scaling.loops):
        for row, offset in zip(rows, offsets, strict=True):
            output = row.output_length // scaling.output_divisor
            raised += output < 1
            sends.append(
                PlannedSend(
                    index=len(sends),
                    at_s=(offset + loop * period) / 1e3 / scaling.speed,
                    input_tokens=scaled_length(row.input_length, trace.block_tokens, block),
                    output_tokens=max(output, 1),
                    hash_ids=row.hash_ids,
                    block_tokens=block,
                    row=row.row,
                    loop=loop,
                )
            )
    return Plan(tuple(sends), raised)


def scaled_length(tokens: int, from_block: int, to_block: int) -> int:
    """``tokens`` at ``to_block`` tokens a block instead of ``from_block``; the number of blocks stays the same."""
    whole, rest = divmod(tokens, from_block)
    return whole * to_block + -(-rest * to_block // from_block)


def _period_ms(rows: Sequence[TraceRow]) -> float:
    span = rows[-1].timestamp_ms - rows[0].timestamp_ms
    return span + span / (len(rows) - 1) if span > 0 else _LONE_ROW_PERIOD_MS


def _offsets_ms(rows: Sequence[TraceRow], spread: bool) -> list[float]:
    """Milliseconds after the first row. A spread group fills the gap to the next timestamp; the last one, the gap before it."""
    first = rows[0].timestamp_ms
    if not spread:
        return [r.timestamp_ms - first for r in rows]
    starts = [i for i, r in enumerate(rows) if i == 0 or r.timestamp_ms != rows[i - 1].timestamp_ms]
    out: list[float] = []
    gap = 0.0
    for position, start in enumerate(starts):
        at = rows[start].timestamp_ms
        if position + 1 < len(starts):
            end = starts[position + 1]
            gap = rows[end].timestamp_ms - at
        else:
            end = len(rows)
        out.extend(at - first + gap * k / (end - start) for k in range(end - start))
    return out
