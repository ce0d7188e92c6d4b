"""Was it right to refuse? Sampled refused requests are let in alone, each in a world of its own, to see what becomes of them.

The simulation forks at the refusal (the process itself: a copy of everything, sharing its memory): the child lets the
request in, and stops when all who were in the system then have ended. The parent goes on as if nothing had happened and so
knows what would have become of the same requests without the forced one.

Later requests are accepted or refused as in the parent ("as before": was there room that nobody took?), or anew by the
admission, which sees the forced one ("adapt": under steady overload it then refuses somebody else in its place, and any
single request can be served).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from moonpool.core.errors import Bug, Reason
from moonpool.core.placement import Finished, Refusal
from moonpool.loadgen.trace import TraceRow
from moonpool.scheduler.admission.policy import Admission
from moonpool.scheduler.choice import Option
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policy import Asked, Policy
from moonpool.sim.cluster import SimCluster
from moonpool.sim.outcome import Outcome, RequestOutcome
from moonpool.sim.run import Bursts, Simulation

Others = Literal["as before", "adapt"]


@dataclass(frozen=True, slots=True)
class Forced:
    """``row`` was refused and let in alone. ``missed``: those in the system then, or accepted and ended since, that missed a
    target with it in; ``harmed``: of these, who met both without it. ``company``: how many were in the system."""

    row: int
    met: bool
    missed: tuple[int, ...]
    harmed: tuple[int, ...]
    company: int

    @property
    def false(self) -> bool:
        """It and all that were accepted stay inside their targets: refusing it helped nobody."""
        return self.met and not self.missed

    @property
    def harmless(self) -> bool:
        """The same, but not counting whom others made miss: stricter on the refusal."""
        return self.met and not self.harmed


@dataclass(slots=True)
class ForcedOutcome:
    base: Outcome
    forced: list[Forced] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Shares. ``false_rejects`` and ``harmless_rejects`` are of sampled refusals, ``false_accepts`` of all accepted."""
        accepted = [r for r in self.base.requests if r.refused is None]
        wrong = sum(not _met(r, self.base) for r in accepted)
        sampled = len(self.forced)
        return {
            "sampled": float(sampled),
            "refused": float(len(self.base.requests) - len(accepted)),
            "false_rejects": sum(f.false for f in self.forced) / sampled if sampled else 0.0,
            "harmless_rejects": sum(f.harmless for f in self.forced) / sampled if sampled else 0.0,
            "forced_met": sum(f.met for f in self.forced) / sampled if sampled else 0.0,
            "false_accepts": wrong / len(accepted) if accepted else 0.0,
        }


def force_refused(
    rows: Sequence[TraceRow],
    cluster: SimCluster,
    *,
    policy: Callable[[], Policy],
    admission: Callable[[], Admission],
    samples: int = 200,
    speed: float = 1.0,
    bursts: Bursts = "released",
    seed: int = 0,
    others: Others = "as before",
    at_once: int = 1,
) -> ForcedOutcome:
    """``policy`` and ``admission`` make fresh ones: the trace is run twice, first to learn who is refused. ``seed`` draws the
    samples among them; ``at_once`` children run beside each other."""
    first = _Forking(rows, cluster, policy(), admission(), speed, bursts).run()
    refused = [r.row for r in first.requests if r.refused is not None]
    chosen = np.random.default_rng(seed).permutation(refused)[:samples].tolist()
    turned_away = frozenset(refused) if others == "as before" else None
    forking = _Forking(rows, cluster, policy(), admission(), speed, bursts, frozenset(chosen), turned_away, at_once)
    base = forking.run()
    told = forking.children.finish()
    out = ForcedOutcome(base)
    for row in sorted(told):
        company, missed, met = told[row]
        harmed = tuple(one for one in missed if _met(base.requests[one], base))
        out.forced.append(Forced(row, met, tuple(missed), harmed, company))
    return out


def _met(request: RequestOutcome, outcome: Outcome) -> bool:
    return request.met(outcome.ttft_target_s, outcome.tbt_target_s)


class _Children:
    """At most ``limit`` at a time; each tells what it saw through a pipe, and ends."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[int, tuple[int, int]] = {}  # row -> process, pipe
        self._told: dict[int, tuple[int, list[int], bool]] = {}

    def fork(self, row: int) -> int | None:
        """In the child, where to write; None in the parent."""
        while len(self._open) >= self._limit:
            self._collect(next(iter(self._open)))
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(read)
            return write
        os.close(write)
        self._open[row] = process, read
        return None

    def finish(self) -> dict[int, tuple[int, list[int], bool]]:
        """By row: how many were in the system, who of them missed, whether the forced one met its targets."""
        for row in list(self._open):
            self._collect(row)
        return self._told

    def _collect(self, row: int) -> None:
        process, pipe = self._open.pop(row)
        with os.fdopen(pipe, "rb") as end:
            text = end.read()
        os.waitpid(process, 0)
        if not text:
            raise Bug(f"the simulation in which request {row} was forced in ended without a word")
        company, missed, met = json.loads(text)
        self._told[row] = company, missed, met


class _Forking(Simulation):
    def __init__(
        self,
        rows: Sequence[TraceRow],
        cluster: SimCluster,
        policy: Policy,
        admission: Admission,
        speed: float,
        bursts: Bursts,
        chosen: frozenset[int] = frozenset(),
        turned_away: frozenset[int] | None = None,
        at_once: int = 1,
    ) -> None:
        """``chosen``: rows to force in. ``turned_away``: rows that children refuse, and no others; None: as they see fit."""
        self.children = _Children(at_once)
        self._turned_away = None if turned_away is None else {f"r{row}" for row in turned_away}
        self._chosen = {f"r{row}": row for row in chosen}
        self._awaited: set[int] | None = None  # in a child: rows that have not ended
        self._row = self._write = -1
        self._company, self._forked_at = 0, 0.0
        forcing = _Forcing(admission, self._force, self._as_before)
        conductor = Conductor(policy=policy, admission=forcing, rule=cluster.rule)
        super().__init__(rows, cluster, conductor, speed, bursts)

    def run(self) -> Outcome:
        try:
            return super().run()
        finally:
            if self._awaited is not None:  # a child that gets here has failed: its parent learns from the empty pipe
                os._exit(1)

    def _as_before(self, request: str) -> bool | None:
        """In a child whose later decisions are fixed: whether ``request`` was accepted. None: to be decided."""
        return None if self._awaited is None or self._turned_away is None else request not in self._turned_away

    def _force(self, request: str) -> bool:
        """Whether ``request``, about to be refused, is let in after all: in the child that is made for it."""
        row = None if self._awaited is not None else self._chosen.pop(request, None)
        if row is None:
            return False
        write = self.children.fork(row)
        if write is None:
            return False
        self._awaited = {r.row for r in self.outcome.requests if r.arrived <= self.clock.now and _open(r)} | {row}
        self._company, self._row, self._write, self._forked_at = len(self._awaited) - 1, row, write, self.clock.now
        return True

    def _ended(self) -> None:
        super()._ended()
        if self._awaited is None:
            return
        self._awaited = {row for row in self._awaited if _open(self.outcome.requests[row])}
        if not self._awaited:
            self._tell()

    def _tell(self) -> None:
        """The child's last word."""
        requests = self.outcome.requests
        since = (r for r in requests if r.row != self._row and (r.ended or -1.0) >= self._forked_at)
        missed = [r.row for r in since if not _met(r, self.outcome)]
        text = json.dumps((self._company, missed, _met(requests[self._row], self.outcome)))
        os.write(self._write, text.encode())
        os._exit(0)


def _open(request: RequestOutcome) -> bool:
    return request.ended is None and request.refused is None and request.failed is None


class _Forcing:
    """``admission``, overruled where ``force`` or ``as_before`` says so."""

    def __init__(self, admission: Admission, force: Callable[[str], bool], as_before: Callable[[str], bool | None]) -> None:
        self.name = admission.name
        self._admission = admission
        self._force = force
        self._as_before = as_before

    def admit(self, asked: Asked, option: Option) -> Refusal | None:
        before = self._as_before(asked.request.request)
        if before is not None:
            return None if before else Refusal(Reason.OVERLOADED, "refused as before", 1.0)
        refusal = self._admission.admit(asked, option)
        if refusal is not None and self._force(asked.request.request):
            return None
        return refusal

    def recheck(self, asked: Asked, option: Option) -> Refusal | None:
        return self._admission.recheck(asked, option)

    def finished(self, done: Finished, now: float) -> None:
        self._admission.finished(done, now)
