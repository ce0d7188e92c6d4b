"""What a run adds up to: how every request ended, how soon each fault was over, and whether the run is a good one. Pure.

``lost`` is the unforgivable end: the client got neither a whole answer nor an error. A broken connection counts as
``gateway_connections_cut`` where the gateway at its other end was being struck, since nobody can finish what a dead
process was saying; the client asks the other gateway, which is a request of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

SERVICE_TARGET_MS = 10_000.0
CAPACITY_TARGET_MS = 30_000.0


class End(StrEnum):
    COMPLETED = "completed"  # every id is the oracle's
    WRONG = "wrong"
    REFUSED = "refused"  # a clean error: 429, 503 or 504, or an error event of that meaning in a stream
    BROKEN = "internal_errors"  # any other error
    CANCELLED = "cancelled"  # by the client, on purpose; what came before was right
    CUT = "gateway_connections_cut"
    LOST = "lost"


BAD = (End.WRONG, End.LOST, End.BROKEN)


@dataclass(frozen=True, slots=True)
class Ended:
    """One request. Times are seconds since the load began."""

    number: int
    gateway: str
    sent_s: float
    ended_s: float
    end: End
    first_s: float | None = None  # its first id
    why: str = ""


@dataclass(slots=True)
class Struck:
    """One fault that was injected. ``side`` is empty for what belongs to no node id."""

    number: int
    kind: str
    side: str
    targets: tuple[str, ...]
    at_s: float
    healed_s: float | None = None
    restored_s: float | None = None  # its targets live and ready again
    hit: str = ""


@dataclass(frozen=True, slots=True)
class Spread:
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Nearest rank; zeros for no values."""
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0)
        at = [ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * q) // 100) - 1))] for q in (50, 99)]
        return cls(round(at[0], 1), round(at[1], 1), round(ordered[-1], 1))

    def json(self) -> dict[str, float]:
        return {"p50": self.p50, "p99": self.p99, "max": self.max}


@dataclass(slots=True)
class Tally:
    """``leaks``: one line for each thing that a process, a file system or the cluster still holds at the end."""

    ended: list[Ended] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # kind -> why it could not strike here
    planned: Counter[str] = field(default_factory=Counter)
    leaks: list[str] = field(default_factory=list)
    resumed: int = 0
    least: int = 1

    def count(self, end: End) -> int:
        return sum(one.end is end for one in self.ended)

    def injected(self) -> Counter[str]:
        return Counter(one.kind for one in self.struck)

    def too_few(self) -> dict[str, int]:
        """Kinds that were meant to strike and did so less than ``least`` times."""
        done = self.injected()
        return {kind: done[kind] for kind in self.planned if kind not in self.skipped and done[kind] < self.least}

    def faults(self) -> list[str]:
        """Why the run is a bad one; empty for a good one."""
        found = [f"{name}: {n}" for name, n in ((end.value, self.count(end)) for end in BAD) if n]
        found += [f"leaked: {len(self.leaks)}"] if self.leaks else []
        found += [f"{kind} struck {n} of {self.least} times" for kind, n in sorted(self.too_few().items())]
        return found


def service_restored_ms(struck: Sequence[Struck], ended: Sequence[Ended]) -> dict[int, float]:
    """By strike: until the first id (or the end) of the first request sent after it that was completed, and until the last
    request was refused of those for which it is the nearest strike before they were sent, or the first one during their
    life. A strike after which nothing was completed has no value.
    """
    refused: dict[int, float] = {}
    for one in ended:
        if one.end is End.REFUSED and (cause := cause_of(one, struck)) is not None:
            refused[cause.number] = max(refused.get(cause.number, 0.0), one.ended_s)
    good = sorted((one.sent_s, one.first_s or one.ended_s) for one in ended if one.end is End.COMPLETED)
    found: dict[int, float] = {}
    for strike in struck:
        firsts = [first for sent, first in good if sent >= strike.at_s]
        if firsts:
            over = max(min(firsts), refused.get(strike.number, 0.0))
            found[strike.number] = (over - strike.at_s) * 1e3
    return found


def cause_of(one: Ended, struck: Sequence[Struck]) -> Struck | None:
    """The strike that a request's refusal is put down to."""
    during = [s for s in struck if one.sent_s <= s.at_s <= one.ended_s]
    before = [s for s in struck if s.at_s < one.sent_s]
    return min(during, key=lambda s: s.at_s) if during else max(before, key=lambda s: s.at_s, default=None)


def capacity_restored_ms(struck: Sequence[Struck]) -> dict[int, float]:
    """By strike: from its end (a kill ends at once) until its targets were live and ready again."""
    return {
        s.number: max(0.0, s.restored_s - s.healed_s) * 1e3
        for s in struck
        if s.restored_s is not None and s.healed_s is not None
    }


def refused_late(struck: Sequence[Struck], ended: Sequence[Ended]) -> int:
    """Requests refused although no fault held then, nor within SERVICE_TARGET_MS before."""
    window = SERVICE_TARGET_MS / 1e3

    def excused(t: float) -> bool:
        return any(s.at_s <= t <= max(s.at_s, s.healed_s or s.at_s) + window for s in struck)

    return sum(one.end is End.REFUSED and not excused(one.ended_s) for one in ended)


def longest_gap_ms(ended: Sequence[Ended], until_s: float) -> float:
    """The longest time of the load in which no request was completed: an outage, whatever it is put down to."""
    times = [0.0, *sorted(one.ended_s for one in ended if one.end is End.COMPLETED and one.ended_s <= until_s), until_s]
    return max((b - a for a, b in pairwise(times)), default=0.0) * 1e3


def figures(tally: Tally, load_s: float) -> dict[str, object]:
    """The report: the names of the table and of the JSON document."""
    service, capacity = service_restored_ms(tally.struck, tally.ended), capacity_restored_ms(tally.struck)
    ends: Mapping[str, int] = {end.value: tally.count(end) for end in End}
    return {
        "faults_injected": dict(sorted(tally.injected().items())),
        "faults_injected_total": len(tally.struck),
        "faults_skipped": dict(sorted(tally.skipped.items())),
        "requests_sent": len(tally.ended),
        "completed": ends["completed"],
        "resumed": tally.resumed,
        "refused": ends["refused"],
        "refused_because_of_fault_outside_windows": refused_late(tally.struck, tally.ended),
        "cancelled": ends["cancelled"],
        "gateway_connections_cut": ends["gateway_connections_cut"],
        "internal_errors": ends["internal_errors"],
        "wrong": ends["wrong"],
        "lost": ends["lost"],
        "leaked": len(tally.leaks),
        "leaks": tally.leaks,
        "service_restored_ms": Spread.of(list(service.values())).json(),
        "service_not_restored": len(tally.struck) - len(service),
        "capacity_restored_ms": Spread.of(list(capacity.values())).json(),
        "capacity_not_restored": len(tally.struck) - len(capacity),
        "longest_gap_ms": round(longest_gap_ms(tally.ended, load_s), 1),
        "targets": {"service_restored_ms_p99": SERVICE_TARGET_MS, "capacity_restored_ms_max": CAPACITY_TARGET_MS},
        "failures": tally.faults(),
    }
