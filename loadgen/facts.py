"""What a trace holds, in numbers: printed after generating or reading one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.loadgen.trace import TraceRow


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """``ideal_hit_share``: share of prompt tokens an unbounded cache would find, a partly filled last block included."""

    requests: int
    span_s: float
    distinct_timestamps: int
    mean_input: float
    largest_input: int
    mean_output: float
    distinct_blocks: int
    ideal_hit_share: float


def trace_facts(rows: Sequence[TraceRow], block_tokens: int) -> TraceFacts:
    """Facts of at least one row, in time order."""
    seen: set[int] = set()
    hit = 0
    for row in rows:
        matched = next((i for i, h in enumerate(row.hash_ids) if h not in seen), len(row.hash_ids))
        hit += min(matched * block_tokens, row.input_length)
        seen.update(row.hash_ids)
    total = sum(r.input_length for r in rows)
    return TraceFacts(
        requests=len(rows),
        span_s=(rows[-1].timestamp_ms - rows[0].timestamp_ms) / 1e3,
        distinct_timestamps=len({r.timestamp_ms for r in rows}),
        mean_input=total / len(rows),
        largest_input=max(r.input_length for r in rows),
        mean_output=sum(r.output_length for r in rows) / len(rows),
        distinct_blocks=len(seen),
        ideal_hit_share=hit / total,
    )
