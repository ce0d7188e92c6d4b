"""Early rejection based on prediction (Mooncake technical report): the decode load of the moment t1 when this prefill will
be done, were every answer to take the same time t_d.

    batch(t1) = sequences whose decode began after t1 - t_d
              + accepted requests whose prefill ends before t1 (and which then decode for t_d)  + this one

The load is the mean predicted TBT over the decode workers. t_d is the running mean of what answers took. Only what this
conductor accepted is known to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.placement import Finished, Refusal
from moonpool.scheduler.admission.baseline import DEPARTURE_S, Baseline
from moonpool.scheduler.admission.loads import Load, drained_s, prefill_load, refusal, step_load
from moonpool.scheduler.choice import Option
from moonpool.scheduler.policy import Asked

FIRST_DECODE_S = 30.0  # t_d until an answer has ended
REMEMBERED = 20_000  # accepted requests that have not ended


@dataclass(frozen=True, slots=True)
class _Accepted:
    at: float
    first_token_at: float  # predicted
    tokens: int


class EarlyPredicted(Baseline):
    name = "early_predicted"

    def __init__(self, limit: float = 1.0) -> None:
        super().__init__(limit)
        self.decode_s = FIRST_DECODE_S
        self._ended = 0
        self._accepted: dict[tuple[str, int], _Accepted] = {}

    def admit(self, asked: Asked, option: Option) -> Refusal | None:
        t1 = asked.now + option.ttft.likely
        loads = [prefill_load(asked, option), self._decode_load(asked, option, t1)]
        decode_s = DEPARTURE_S if loads[1].value > self.limit else 0.0
        refused = refusal(loads, self.limit, max(drained_s(asked, option), decode_s))
        if refused is None:
            key = asked.request.request, asked.request.attempt
            self._accepted[key] = _Accepted(asked.now, t1, asked.prompt.tokens)
            if len(self._accepted) > REMEMBERED:
                del self._accepted[next(iter(self._accepted))]
        return refused

    def recheck(self, asked: Asked, option: Option) -> Refusal | None:
        refused = super().recheck(asked, option)
        if refused is not None:
            self._accepted.pop((asked.request.request, asked.request.attempt), None)
        return refused

    def _decode_load(self, asked: Asked, option: Option, t1: float) -> Load:
        there = [a.tokens for a in self._accepted.values() if t1 - self.decode_s < a.first_token_at <= t1]
        workers = max(1, int((asked.usable.decodes | asked.usable.both).sum()))
        batch, context = len(there) / workers + 1, sum(there) / workers + asked.prompt.tokens
        return step_load(asked, option.decode, batch, context, f"in {t1 - asked.now:.1f} s, mean of {workers} decode workers")

    def finished(self, done: Finished, now: float) -> None:
        accepted = self._accepted.pop((done.request, done.attempt), None)
        if accepted is None or done.outcome != "ok" or done.output_tokens < 2:
            return
        took = max(now - accepted.at - done.ttft_ms / 1e3, 0.0)
        self._ended += 1
        self.decode_s += (took - self.decode_s) / self._ended
