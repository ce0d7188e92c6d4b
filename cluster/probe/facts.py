"""What a process knows of its own state, and what its probes say about it. Pure.

*Live* asks whether starting the process anew would help: only standing still with work pending is a no. *Ready* asks whether
it is to be given new work now. The table of docs/operations.md follows from this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moonpool.core.progress import Progress, stuck


class Phase(StrEnum):
    STARTING = "starting"  # it loads, and has not joined the cluster
    SERVING = "serving"
    LEAVING = "leaving"  # asked to end: it finishes or hands over what it has
    CHANGING = "changing life"  # fenced and coming back, or changing its role


@dataclass(frozen=True, slots=True)
class Facts:
    """``missing``: roles without which it has nobody to work with. ``parts``: what of it can stand still by itself."""

    phase: Phase = Phase.STARTING
    missing: tuple[str, ...] = ()
    parts: tuple[Progress, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    good: bool
    words: str


def live(facts: Facts) -> Verdict:
    still = stuck(list(facts.parts))
    if still:
        return Verdict(False, ", ".join(f"{p.name} stands still for {p.still_s:.0f} s" for p in still))
    return Verdict(True, facts.phase.value)


def ready(facts: Facts) -> Verdict:
    alive = live(facts)
    if not alive.good or facts.phase is not Phase.SERVING:
        return Verdict(False, alive.words)
    if facts.missing:
        return Verdict(False, f"missing: {', '.join(facts.missing)}")
    return Verdict(True, facts.phase.value)
