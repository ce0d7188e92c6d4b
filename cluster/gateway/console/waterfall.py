"""One request's life in all processes, laid on the clock of its gateway. Pure.

Instants are seconds of each machine's own monotonic clock. Processes of one host share one; another host's is shifted so that
the instants which two processes have in common meet: exact to about the time that a message takes between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from moonpool.cluster.probe.catalogue.steps import steps_of, told
from moonpool.core.ids import Role
from moonpool.core.lifetime import Instant, Lifetime, Try

# Each happens once, and both ends of a call stamp it at about the same time.
_MEETINGS = (Instant.ADMITTED, Instant.QUEUED, Instant.LANDING_GRANTED, Instant.FIRST_TOKEN)
_ORDER = (Role.GATEWAY, Role.DECODE, Role.BOTH, Role.PREFILL, Role.STORE)


@dataclass(frozen=True, slots=True)
class Part:
    """What one process remembers of one attempt; of the gateway, of all of them. ``host``: whose clock it is."""

    member: str
    role: Role
    node: str
    host: str
    attempt: int
    life: Lifetime


def waterfall(gateway: Part, others: Iterable[Part], now: float | None = None) -> dict[str, Any]:
    """JSON-able; times in ms after the request's arrival. ``now``, of the gateway's clock, where it is still under way."""
    parts = [gateway, *sorted(others, key=lambda part: (part.attempt, _ORDER.index(part.role), part.member))]
    shifts = _shifts(parts, gateway.life.tries)
    origin = gateway.life.at[Instant.ARRIVED]
    rows = [_row(part, shifts[part.host] - origin, part.host != gateway.host) for part in parts]
    if now is not None:
        rows[0]["steps"] += _open_step(gateway, origin, now)
    ends = [at for row in rows for at in (*(s["end_ms"] for s in row["steps"]), *(i["at_ms"] for i in row["instants"]))]
    return {"rows": rows, "tries": [_try(one, origin, now) for one in gateway.life.tries], "ms": max(ends, default=0.0)}


def _row(part: Part, shift: float, moved: bool) -> dict[str, Any]:
    def ms(at: float) -> float:
        return round((at + shift) * 1e3, 3)

    steps = [
        {"name": step.name, "number": step.number, "text": step.text, "begin_ms": ms(begin), "end_ms": ms(end), "open": False}
        for step, begin, end in told(part.role, part.life)
    ]
    instants = sorted((at, instant.value) for instant, at in part.life.at.items())
    return {
        "member": part.member,
        "role": part.role.value,
        "node": part.node,
        "attempt": part.attempt,
        "moved": moved,  # from another host's clock
        "steps": steps,
        "instants": [{"name": name, "at_ms": ms(at)} for at, name in instants],
    }


def _open_step(gateway: Part, origin: float, now: float) -> list[dict[str, Any]]:
    """The one that the gateway is in now."""
    life = gateway.life.at
    for step in steps_of(Role.GATEWAY):
        begin = next((life[instant] for instant in step.begins if instant in life), None)
        if begin is not None and step.ends not in life:
            times = {"begin_ms": round((begin - origin) * 1e3, 3), "end_ms": round((now - origin) * 1e3, 3)}
            return [{"name": step.name, "number": step.number, "text": step.text, **times, "open": True}]
    return []


def _try(one: Try, origin: float, now: float | None) -> dict[str, Any]:
    end = one.ended or now
    return {
        "attempt": one.number,
        "begin_ms": round((one.begun - origin) * 1e3, 3),
        "end_ms": None if end is None else round((end - origin) * 1e3, 3),
        "facts": dict(one.facts),
    }


def _shifts(parts: Sequence[Part], tries: Sequence[Try]) -> dict[str, float]:
    """Seconds to add to each host's instants; the first part's host is the one whose clock counts."""
    shifts = {parts[0].host: 0.0}
    while left := [part for part in parts if part.host not in shifts]:
        settled = [part for part in parts if part.host in shifts]
        gaps: dict[str, list[float]] = {}
        for part in left:
            gaps.setdefault(part.host, []).extend(_gaps(part, settled, shifts))
        host, found = max(gaps.items(), key=lambda one: len(one[1]))
        shifts[host] = fmean(found) if found else _by_attempt(next(p for p in left if p.host == host), tries, parts[0])
    return shifts


def _gaps(part: Part, settled: Iterable[Part], shifts: Mapping[str, float]) -> list[float]:
    return [
        other.life.at[instant] + shifts[other.host] - part.life.at[instant]
        for other in settled
        for instant in _MEETINGS
        if instant in part.life.at and instant in other.life.at and _same(part, other)
    ]


def _same(part: Part, other: Part) -> bool:
    """The gateway's instants are those of its first attempt."""
    first = 1 if Role.GATEWAY in (part.role, other.role) else part.attempt
    return all(one.role is Role.GATEWAY or one.attempt == first for one in (part, other))


def _by_attempt(part: Part, tries: Sequence[Try], gateway: Part) -> float:
    """Nothing in common: it begins with its attempt."""
    begun = next((one.begun for one in tries if one.number == part.attempt), gateway.life.at[Instant.ARRIVED])
    return begun - min(part.life.at.values(), default=begun)
