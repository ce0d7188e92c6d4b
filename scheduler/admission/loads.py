"""The load of a stage: predicted latency over its target (Mooncake technical report). 1 is the edge."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.errors import Reason
from moonpool.core.placement import Refusal
from moonpool.scheduler.choice import Option
from moonpool.scheduler.policy import Asked

MIN_RETRY_S, MAX_RETRY_S = 0.1, 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """``value`` 0: the request carries no target, or nothing sure can be said. ``text`` names the numbers."""

    value: float = 0.0
    text: str = ""


def prefill_load(asked: Asked, option: Option) -> Load:
    target_ms = asked.request.targets.ttft_ms
    if target_ms is None or not option.ttft.sure:
        return Load()
    ms = option.ttft.likely * 1e3
    worker = asked.board.names[option.prefill]
    return Load(
        ms / target_ms,
        f"predicted time to first token {ms:.0f} ms, target {target_ms:.0f} ms; {option.wait_s * 1e3:.0f} ms of it is waiting "
        f"at {worker}",
    )


def decoding(asked: Asked, row: int) -> tuple[int, int]:
    """Sequences that row ``row`` is producing tokens for right now, and their context tokens; this request left out."""
    running = [a for a in asked.board.workers[row].attempts if a.output_tokens > 0 and a.request != asked.request.request]
    return len(running), sum(a.prompt_tokens + a.output_tokens for a in running)


def step_load(asked: Asked, row: int, batch: float, context: float, when: str) -> Load:
    """Of a decode step with this request among ``batch`` sequences of ``context`` tokens."""
    target_ms, board = asked.request.targets.tbt_ms, asked.board
    if target_ms is None or context > board.step_reach[row]:
        return Load()
    a, b, c = (float(x) for x in board.step_fit[:, row])
    ms = (a + b * batch + c * context) * 1e3
    return Load(ms / target_ms, f"predicted time between tokens {ms:.0f} ms {when}, target {target_ms:.0f} ms")


def refusal(loads: list[Load], limit: float, retry_s: float) -> Refusal | None:
    """Where one is above ``limit``."""
    over = [load for load in loads if load.value > limit]
    if not over:
        return None
    text = "; ".join(f"{load.text}, load {load.value:.2f} above {limit:.2f}" for load in over)
    return Refusal(Reason.TARGETS_MISSED, text, min(max(retry_s, MIN_RETRY_S), MAX_RETRY_S))


def drained_s(asked: Asked, option: Option) -> float:
    """Seconds until enough of the prefill queue has drained for this request."""
    target_ms = asked.request.targets.ttft_ms
    return 0.0 if target_ms is None else max(0.0, min(option.ttft.likely - target_ms / 1e3, option.wait_s))
