"""Refuses what a sure prediction, its spread included, says will miss a target."""

from __future__ import annotations

from moonpool.core.errors import Reason
from moonpool.core.placement import Finished, Refusal
from moonpool.scheduler.choice import Option
from moonpool.scheduler.policy import Asked

MIN_RETRY_S = 0.1


class Certain:
    name = "certain"

    def admit(self, asked: Asked, option: Option) -> Refusal | None:
        targets, names, retry_s = asked.request.targets, asked.board.names, MIN_RETRY_S
        parts = []
        if targets.ttft_ms is not None and option.ttft.misses(targets.ttft_ms):
            over_s = option.ttft.high - targets.ttft_ms / 1e3
            parts.append(
                f"predicted time to first token {option.ttft.likely * 1e3:.0f} ms (up to {option.ttft.high * 1e3:.0f} ms), "
                f"target {targets.ttft_ms:.0f} ms; {option.wait_s * 1e3:.0f} ms of it is waiting at {names[option.prefill]}"
            )
            if over_s > option.wait_s:
                parts[-1] += ", and an idle worker would miss it too: raise the target or shorten the prompt"
            retry_s = max(retry_s, min(over_s, option.wait_s))
        if targets.tbt_ms is not None and option.tbt.misses(targets.tbt_ms):
            parts.append(
                f"predicted time between tokens {option.tbt.likely * 1e3:.0f} ms (up to {option.tbt.high * 1e3:.0f} ms) at "
                f"{names[option.decode]}, target {targets.tbt_ms:.0f} ms"
            )
            retry_s = max(retry_s, _first_departure_s(asked, option))
        return Refusal(Reason.TARGETS_MISSED, "; ".join(parts), retry_s) if parts else None

    def recheck(self, asked: Asked, option: Option) -> Refusal | None:
        return None

    def finished(self, done: Finished, now: float) -> None:
        pass


def _first_departure_s(asked: Asked, option: Option) -> float:
    """Seconds until the next sequence reaches its last possible token at the decode worker."""
    left = [attempt.remaining_tokens for attempt in asked.board.workers[option.decode].attempts]
    return min(left, default=0) * option.tbt.likely
