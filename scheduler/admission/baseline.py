"""The two stages tested one after the other (Mooncake technical report): prefill load on arrival, decode load only once
the prefill is done. What is refused then was computed for nothing."""

from __future__ import annotations

from moonpool.core.placement import Finished, Refusal
from moonpool.scheduler.admission.loads import Load, decoding, drained_s, prefill_load, refusal, step_load
from moonpool.scheduler.choice import Option
from moonpool.scheduler.policy import Asked

DEPARTURE_S = 1.0  # about how often a sequence leaves a full batch


class Baseline:
    name = "baseline"

    def __init__(self, limit: float = 1.0) -> None:
        """``limit``: the load of a stage from which on it refuses."""
        self.limit = limit

    def admit(self, asked: Asked, option: Option) -> Refusal | None:
        return refusal([prefill_load(asked, option)], self.limit, drained_s(asked, option))

    def recheck(self, asked: Asked, option: Option) -> Refusal | None:
        return refusal([decode_load(asked, option)], self.limit, DEPARTURE_S)

    def finished(self, done: Finished, now: float) -> None:
        pass


def decode_load(asked: Asked, option: Option) -> Load:
    """Of the decode worker as it is now, with this request in its batch; what is still being prefilled does not count."""
    batch, context = decoding(asked, option.decode)
    name = asked.board.names[option.decode]
    return step_load(asked, option.decode, batch + 1, context + asked.prompt.tokens, f"at {name} now")
