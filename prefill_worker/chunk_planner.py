"""Which prompt a prefill worker computes next, and how far each step goes. Pure: ``now`` is an argument.

One job computes at a time, to its end. Every waiting job has a *standing*: its time of arrival, moved back by ``age_ms``
for every time it was skipped because no landing was granted; its *age* is the time since then. In order ``fifo`` the
smallest standing goes first. In order ``shortest`` it is the smallest predicted work less ``age_weight`` times the age, and
a job older than ``wait_cap_s`` goes before all younger ones, by standing.

A refused job lets the others pass until its next try; after ``MAX_SKIPS`` refusals no job of its lane (the store node that
grants) passes it any more, so a big prompt among an endless stream of small ones starts as soon as the landings granted
before it have ended.

Where jobs of several tenants wait, each tenant's go in that order and the tenants in turn (``core.fairness``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Literal

from moonpool.core.blocks import chunk_end
from moonpool.core.errors import Bug, Busy
from moonpool.core.fairness import FairClock, in_turn
from moonpool.core.use import DEFAULT_TENANT

MAX_SKIPS = 8
FIRST_RETRY_S = 0.02  # a refused landing is asked for again after this, doubling up to LAST_RETRY_S
LAST_RETRY_S = 0.32

JobKey = tuple[str, int]  # (request id, attempt)
Order = Literal["fifo", "shortest"]


class Stage(StrEnum):
    WAITING = "waiting"
    ASKING = "asking"  # its landing is being asked for; nothing is computed
    COMPUTING = "computing"


@dataclass(slots=True)
class _Entry:
    total: int  # tokens of prompt and ids already emitted
    lane: str
    work: float  # predicted when it came, seconds (or any unit that all jobs share)
    arrived: float
    order: int
    tenant: str
    weight: float
    stage: Stage = Stage.WAITING
    skips: int = 0
    retry_at: float = 0.0
    done: int = 0  # tokens whose KV exists


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, end)``; ``last`` when the next id is sampled from its final token."""

    number: int
    start: int
    end: int
    last: bool


class ChunkPlanner:
    """Bounded queue of jobs and the chunks of the one that computes."""

    def __init__(
        self,
        *,
        queue_limit: int,
        age_ms: int,
        chunk_tokens: int,
        block_tokens: int,
        order: Order = "fifo",
        age_weight: float = 0.1,
        wait_cap_s: float = inf,
        span_tokens: int | None = None,
    ) -> None:
        """``age_weight``: units of predicted work that a second of waiting is worth; with 0 only the cap ends a long wait.

        ``span_tokens``: of one pass at most where a worker waits for all of it; None: as ``chunk_tokens``.
        """
        self._queue_limit = queue_limit
        self._age_s = age_ms / 1000
        self._shortest = order == "shortest"
        self._age_weight = age_weight
        self._wait_cap_s = wait_cap_s
        self.chunk_tokens = chunk_tokens
        self.span_tokens = span_tokens or chunk_tokens
        self._block_tokens = block_tokens
        self._jobs: dict[JobKey, _Entry] = {}
        self._current: JobKey | None = None
        self._order = 0
        self._chunks = 0
        self._clock = FairClock()

    @property
    def current(self) -> JobKey | None:
        """The job that computes, or whose landing is being asked for."""
        return self._current

    @property
    def queued(self) -> int:
        """Jobs of which nothing is computed yet."""
        return sum(1 for entry in self._jobs.values() if entry.stage is not Stage.COMPUTING)

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(
        self,
        key: JobKey,
        total: int,
        lane: str,
        now: float,
        work: float | None = None,
        *,
        tenant: str = DEFAULT_TENANT,
        weight: float = 1.0,
    ) -> None:
        """Queue a job of ``total`` tokens (at least one). Busy when the queue is full.

        ``work`` is how long computing it is predicted to take here, what is reused taken off; None: its tokens, for a
        planner that never hears of seconds. ``weight``: of the tenant, where tenants compete.
        """
        if key in self._jobs:
            raise Bug(f"chunk planner: {key[0]} attempt {key[1]} is queued already")
        if self.queued >= self._queue_limit:
            raise Busy(
                f"{self.queued} prompts wait here, timing.queue_limit is {self._queue_limit}; place the request elsewhere"
            )
        self._order += 1
        if not any(entry.tenant == tenant for entry in self._jobs.values()):
            self._clock.join(tenant)
        work = float(total) if work is None else work
        self._jobs[key] = _Entry(total, lane, work, now, self._order, tenant, weight if weight > 0.0 else 1.0)

    def next(self, now: float) -> JobKey | None:
        """The job whose landing shall be asked for now; None when one is under way, or none may be tried yet."""
        if self._current is not None:
            return None
        for key, entry in self._in_turn(self._candidates(now)):
            if entry.retry_at <= now:
                entry.stage = Stage.ASKING
                self._current = key
                return key
        return None

    def next_at(self) -> float | None:
        """When ``next`` has something to offer at the earliest; None while a job is under way or nobody waits."""
        if self._current is not None:
            return None
        return min((entry.retry_at for _, entry in self._candidates(-inf)), default=None)  # the same set at any time

    def refused(self, key: JobKey, now: float) -> None:
        """No landing for ``key`` now: it gains seniority and the next job is taken."""
        entry = self._entry(key, Stage.ASKING)
        entry.stage = Stage.WAITING
        entry.retry_at = now + min(FIRST_RETRY_S * 2 ** min(entry.skips, MAX_SKIPS), LAST_RETRY_S)
        entry.skips += 1
        self._current = None

    def granted(self, key: JobKey, start: int) -> None:
        """The landing is there: chunks begin at token ``start``, everything before it is reused."""
        entry = self._entry(key, Stage.ASKING)
        if not 0 <= start < entry.total:
            raise Bug(f"chunk planner: {key[0]} attempt {key[1]} starts at {start} of {entry.total} tokens")
        entry.stage = Stage.COMPUTING
        entry.done = start
        self._clock.serve(entry.tenant, entry.work, entry.weight)
        self._chunks = 0

    def restart(self, key: JobKey, start: int) -> None:
        """A part of the reused prefix is lost: compute from ``start`` on."""
        entry = self._entry(key, Stage.COMPUTING)
        if not 0 <= start <= entry.done:
            raise Bug(f"chunk planner: {key[0]} attempt {key[1]} cannot restart at {start}, {entry.done} tokens are done")
        entry.done = start

    def skip(self, key: JobKey, start: int) -> None:
        """What lies before token ``start`` came from elsewhere meanwhile: go on there."""
        entry = self._entry(key, Stage.COMPUTING)
        if not entry.done <= start < entry.total:
            raise Bug(f"chunk planner: {key[0]} attempt {key[1]} is at {entry.done} of {entry.total}, no skip to {start}")
        entry.done = start

    def done(self, key: JobKey) -> int:
        """Tokens of the running job whose KV exists."""
        return self._entry(key, Stage.COMPUTING).done

    def chunk(self, key: JobKey, until: int | None = None, tokens: int | None = None, *, one_pass: bool = False) -> Chunk:
        """What to compute next of the running job; not beyond token ``until``, a block border, where one is given.

        At most ``tokens``, or the rest of a block, where the cores are shared. ``one_pass``: as much as one pass may take,
        for whoever waits for every layer of all of it.
        """
        entry = self._entry(key, Stage.COMPUTING)
        most = self.chunk_tokens if tokens is None else min(tokens, self.chunk_tokens)
        most = self.span_tokens if one_pass else most
        end = chunk_end(entry.done, entry.total, most, self._block_tokens)
        if until is not None and entry.done < until:
            end = min(end, until)
        return Chunk(self._chunks, entry.done, end, end == entry.total)

    def computed(self, key: JobKey, chunk: Chunk) -> None:
        """``chunk`` is in pages."""
        entry = self._entry(key, Stage.COMPUTING)
        if (chunk.number, chunk.start) != (self._chunks, entry.done):
            raise Bug(
                f"chunk planner: {key[0]} attempt {key[1]} computed {chunk}, expected number {self._chunks} at {entry.done}"
            )
        entry.done = chunk.end
        self._chunks += 1

    def remaining(self, key: JobKey) -> int:
        """Tokens of ``key`` still to compute; 0 for a job that is not here (any more)."""
        entry = self._jobs.get(key)
        return entry.total - entry.done if entry else 0

    def waiting(self, now: float) -> list[tuple[JobKey, float]]:
        """Jobs that wait, as they will be taken while no landing is refused, each with its predicted work."""
        rank = self._by_work if self._shortest else self._by_standing
        found = [(rank(e, now), key, e.work) for key, e in self._jobs.items() if e.stage is Stage.WAITING]
        return [(key, work) for _, key, work in sorted(found, key=lambda item: item[0])]

    def leave(self, key: JobKey) -> None:
        """Finished, failed or cancelled, in any stage. A second time is a no-op."""
        self._jobs.pop(key, None)
        if self._current == key:
            self._current = None

    def _in_turn(self, candidates: Iterator[tuple[JobKey, _Entry]]) -> Iterator[tuple[JobKey, _Entry]]:
        lines: dict[str, list[tuple[JobKey, _Entry]]] = {}
        for one in candidates:
            lines.setdefault(one[1].tenant, []).append(one)
        return in_turn(self._clock, lines, lambda one: one[1].work / one[1].weight)

    def _candidates(self, now: float) -> Iterator[tuple[JobKey, _Entry]]:
        """Waiting jobs, the next one first, without those behind one of their lane that nobody passes.

        Their set does not depend on ``now``: a job of a closed lane that the cap moves up still stands behind the closed one.
        """
        rank = self._by_work if self._shortest else self._by_standing
        waiting = [(rank(entry, now), key, entry) for key, entry in self._jobs.items() if entry.stage is Stage.WAITING]
        waiting.sort(key=lambda item: item[0])
        closed: set[str] = set()
        for _, key, entry in waiting:
            if entry.lane in closed:
                continue
            if entry.skips >= MAX_SKIPS:
                closed.add(entry.lane)
            yield key, entry

    def _standing(self, entry: _Entry) -> float:
        return entry.arrived - entry.skips * self._age_s

    def _by_standing(self, entry: _Entry, now: float) -> tuple[int, float, int]:
        return (0, self._standing(entry), entry.order)

    def _by_work(self, entry: _Entry, now: float) -> tuple[int, float, int]:
        """Those that nobody of their lane passes, those older than the cap, the others."""
        standing = self._standing(entry)
        if entry.skips >= MAX_SKIPS:
            return (0, standing, entry.order)
        if now - standing >= self._wait_cap_s:
            return (1, standing, entry.order)
        return (2, entry.work + self._age_weight * standing, entry.order)  # less age_weight * now, which all share

    def _entry(self, key: JobKey, stage: Stage) -> _Entry:
        entry = self._jobs.get(key)
        if entry is None or entry.stage is not stage:
            raise Bug(f"chunk planner: {key[0]} attempt {key[1]} is {entry.stage if entry else 'not here'}, not {stage}")
        return entry
