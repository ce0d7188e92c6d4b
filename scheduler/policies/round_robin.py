"""Workers take turns, prefill and decode each by itself, in the order of their names."""

from __future__ import annotations

from moonpool.scheduler.board import Bools
from moonpool.scheduler.policies.early import Early
from moonpool.scheduler.policies.pairing import pair
from moonpool.scheduler.policy import Asked, Choice


class RoundRobin(Early):
    name = "round_robin"

    def choose(self, asked: Asked) -> Choice | None:
        def next_of(rows: Bools) -> int | None:
            (found,) = rows.nonzero()
            return int(found[asked.number % len(found)]) if len(found) else None

        return pair(asked, next_of(asked.prefills), next_of(asked.decodes))
