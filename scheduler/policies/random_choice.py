"""Any prefill worker and any decode worker, each as likely as the next."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.scheduler.board import Bools
from moonpool.scheduler.policies.draws import draw
from moonpool.scheduler.policies.early import Early
from moonpool.scheduler.policies.pairing import pair
from moonpool.scheduler.policy import Asked, Choice


@dataclass(frozen=True)
class RandomChoice(Early):
    name = "random"

    seed: float = 0.0

    def choose(self, asked: Asked) -> Choice | None:
        def one_of(rows: Bools, counter: int) -> int | None:
            (found,) = rows.nonzero()
            return int(found[draw(int(self.seed), counter, len(found))]) if len(found) else None

        return pair(asked, one_of(asked.prefills, 2 * asked.number), one_of(asked.decodes, 2 * asked.number + 1))
