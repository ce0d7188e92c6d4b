"""What is kept of every request of a replay, and how latencies follow from it.

Two clocks' worth of latency, both in ms: *service* latency counts from the moment the request was really sent,
*schedule* latency from the moment the plan wanted it sent. They differ by the client's own lag; a client that cannot
keep up (or is capped) would hide a slow server behind good service latencies, so judgements use the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from moonpool.core.request import Targets


class Outcome(StrEnum):
    OK = "ok"
    REFUSED = "refused"  # 429 or 503
    FAILED = "failed"  # another status, a broken stream, a time-out
    CANCELLED = "cancelled"  # by the user, who stopped the replay


@dataclass(slots=True)
class RequestRecord:
    """One request. ``*_s`` are seconds after the start of the replay, ``*_ms`` durations; None: it did not happen."""

    index: int
    row: int
    loop: int
    request_id: str
    planned_s: float
    input_tokens: int
    output_tokens: int  # asked for
    targets: Targets
    outcome: Outcome = Outcome.CANCELLED
    sent_s: float | None = None
    ended_s: float | None = None
    cap_wait_ms: float = 0.0  # part of the lag: held back by the cap on requests in flight
    status: int = 0
    reason: str = ""  # error code or message of a refusal or a failure
    retry_after_s: float | None = None
    first_text_s: float | None = None
    last_text_s: float | None = None
    gaps_ms: list[float] = field(default_factory=list)  # between pieces of text
    without_text: bool = False  # answered, but never with text: its first token counts from its end
    prompt_tokens: int | None = None  # as the server counted
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def lag_ms(self) -> float | None:
        return _ms(self.planned_s, self.sent_s)

    @property
    def ttft_ms(self) -> float | None:
        return _ms(self.sent_s, self.first_text_s)

    @property
    def schedule_ttft_ms(self) -> float | None:
        return _ms(self.planned_s, self.first_text_s)

    @property
    def latency_ms(self) -> float | None:
        return _ms(self.sent_s, self.ended_s)

    @property
    def schedule_latency_ms(self) -> float | None:
        return _ms(self.planned_s, self.ended_s)

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first, by the server's count of tokens where it gives one."""
        after_first = self.completion_tokens - 1 if self.completion_tokens is not None else len(self.gaps_ms)
        span = _ms(self.first_text_s, self.last_text_s)
        return span / after_first if span is not None and after_first > 0 and self.gaps_ms else None

    @property
    def tbt_ms(self) -> float | None:
        return slowest_tenth(self.gaps_ms)

    @property
    def met_targets(self) -> bool | None:
        """Whether it met every target it carries; None where it carries none. An answer of one token has no TBT to miss."""
        ttft, tbt = self.targets.ttft_ms, self.targets.tbt_ms
        if ttft is None and tbt is None:
            return None
        if self.outcome is not Outcome.OK:
            return False
        first, gaps = self.schedule_ttft_ms, self.tbt_ms
        return (ttft is None or (first is not None and first <= ttft)) and (tbt is None or gaps is None or gaps <= tbt)


def slowest_tenth(gaps: Sequence[float]) -> float | None:
    """Mean of the slowest 10 % of gaps, at least one of them (TBT of a request); None without gaps."""
    if not gaps:
        return None
    count = math.ceil(len(gaps) / 10)
    return sum(sorted(gaps)[-count:]) / count


def _ms(earlier: float | None, later: float | None) -> float | None:
    return None if earlier is None or later is None else (later - earlier) * 1e3
