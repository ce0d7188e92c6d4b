"""Early rejection (Mooncake technical report): both stages tested on arrival, decode as it is then.

The decode load is one prefill time old when the request comes to join: the two pools swing in anti-phase.
"""

from __future__ import annotations

from moonpool.core.placement import Refusal
from moonpool.scheduler.admission.baseline import DEPARTURE_S, Baseline, decode_load
from moonpool.scheduler.admission.loads import drained_s, prefill_load, refusal
from moonpool.scheduler.choice import Option
from moonpool.scheduler.policy import Asked


class Early(Baseline):
    name = "early"

    def admit(self, asked: Asked, option: Option) -> Refusal | None:
        loads = [prefill_load(asked, option), decode_load(asked, option)]
        decode_s = DEPARTURE_S if loads[1].value > self.limit else 0.0
        return refusal(loads, self.limit, max(drained_s(asked, option), decode_s))
