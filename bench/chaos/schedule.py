"""Which fault strikes when: a pure function of (kinds, minutes, seed).

Every kind comes once per round, the rounds are shuffled. Strikes follow each other at equal distances; ``SIDE_RUN`` of them
in a row fall on the same of the two node ids, so that the other one can serve. Who exactly is struck on a side, and where
a bit flips, is drawn from the strike's own seed when it happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moonpool.bench.chaos.kinds import REGISTRY, Kind
from moonpool.bench.chaos.members import SIDES, possible
from moonpool.bench.chaos.tally import Struck

SIDE_RUN = 5
REST_S = 20.0  # at the end of a run nothing strikes any more
LONG_MINUTES = 10.0
LEAST = 5  # strikes of each kind in a run of LONG_MINUTES or more; 1 in a shorter one
CLOSEST_S = 4.0  # between two strikes of a shorter run: it repeats its kinds where there is time


@dataclass(frozen=True, slots=True)
class Planned:
    """``at_s`` counts from the begin of the load."""

    number: int
    at_s: float
    kind: Kind
    side: str
    hold_s: float
    seed: int


def least(minutes: float) -> int:
    """How often each kind must strike in a run of ``minutes``."""
    return LEAST if minutes >= LONG_MINUTES else 1


def plan(kinds: Sequence[Kind], minutes: float, seed: int, *, warm_s: float = 5.0) -> list[Planned]:
    """Strikes in the order of their times: ``least(minutes)`` of each kind; in a short run more, where time allows."""
    rng = np.random.default_rng(seed)
    span = max(minutes * 60 - warm_s - min(REST_S, minutes * 15), 1.0)
    rounds = max(least(minutes), int(span / (CLOSEST_S * len(kinds))) if kinds else 0)
    if minutes >= LONG_MINUTES:
        rounds = LEAST
    order = [kinds[i] for _ in range(rounds) for i in rng.permutation(len(kinds))]
    step = span / max(len(order), 1)
    first_side = int(rng.integers(2))
    return [
        Planned(
            number=n,
            at_s=warm_s + n * step,
            kind=kind,
            side=SIDES[(n // SIDE_RUN + first_side) % 2],
            hold_s=float(rng.uniform(*kind.hold_s)),
            seed=int(rng.integers(1 << 62)),
        )
        for n, kind in enumerate(order)
    ]


def side_of(planned: Planned) -> str:
    """Empty for the registry, which belongs to neither."""
    return "" if planned.kind.role == REGISTRY else planned.side


def may_strike(planned: Planned, still_open: Sequence[Struck]) -> bool:
    """Whether somebody is left to serve: strikes whose targets are not back yet are all on the same side, and nobody is struck
    who is not back. The registry is struck alone.
    """
    if not still_open:
        return True
    if not side_of(planned) or any(not struck.side for struck in still_open):
        return False
    away = {target for struck in still_open for target in struck.targets}
    return all(struck.side == planned.side for struck in still_open) and not (away & possible(planned.kind, planned.side))
