"""How much may wait to be computed, whatever its targets: memory and patience are finite."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.errors import Reason
from moonpool.core.placement import Refusal
from moonpool.scheduler.admission.headroom import Withheld
from moonpool.scheduler.admission.loads import MAX_RETRY_S, MIN_RETRY_S
from moonpool.scheduler.choice import Option
from moonpool.scheduler.policy import Asked


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """``tokens`` of prompts not computed yet and ``requests`` on prefill workers, in the whole cluster. Whatever its size,
    a prompt is let into an empty queue."""

    tokens: float
    requests: float

    def refuse(self, asked: Asked, option: Option, withheld: Withheld) -> Refusal | None:
        board, rows = asked.board, asked.usable.prefills
        queued = int(board.to_compute[rows].sum()) + asked.waiting_tokens
        jobs = int(board.load[rows].sum()) + asked.waiting
        if queued == 0:
            return None
        new, left = asked.prompt.tokens - option.cached_tokens, 1.0 - withheld.share
        why = f"; {withheld.text}" if withheld.text else ""
        if queued + new > self.tokens * left:
            over = queued + new - self.tokens * left
            text = (
                f"{queued} prompt tokens wait to be computed and this one adds {new}, queued_tokens is {self.tokens:.0f}{why}"
            )
            return Refusal(Reason.OVERLOADED, text, self._drained_s(asked, option, over / queued))
        if jobs + 1 > self.requests * left:
            text = f"{jobs} requests wait for or hold prefill workers, queued_requests is {self.requests:.0f}{why}"
            return Refusal(Reason.OVERLOADED, text, self._drained_s(asked, option, 1.0 / jobs))
        return None

    def _drained_s(self, asked: Asked, option: Option, share: float) -> float:
        """Until ``share`` of what is queued is computed, at the pace that the worker chosen predicts for its own queue."""
        return min(max(option.wait_s * min(share, 1.0), MIN_RETRY_S), MAX_RETRY_S)
