"""How many workers should prefill and how many decode, and which one changes its role for that. Pure.

Pressure of a pool: forecast work per worker over what a worker can take and still meet the targets; 1 is the edge. A
prefill pool also has to work off what is queued, and a decode pool what is already resident. The split with the smallest
larger pressure is the best one for these workers. It is moved to when the present one is under pressure, the best one is
clearly better, and both have been so for a while; back again only after a longer while (thresholds, smoothing and dwell
are those one would start from for Mooncake, FAST 2025, whose own switching is described in prose only).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from moonpool.core.errors import InvalidRequest
from moonpool.core.ids import MemberId, Role
from moonpool.core.placement import PlaceRequest
from moonpool.scheduler.actions import SwitchRole
from moonpool.scheduler.board import Board
from moonpool.scheduler.traffic import Forecast, StepCost, Traffic

SWITCHABLE = (Role.PREFILL, Role.DECODE)
LOST_SWITCH_S = 180.0  # a worker asked to switch and not back by then is counted as it is seen
IDLE_PRESSURE = 1e-9


@dataclass(frozen=True, slots=True)
class Settings:
    """``ttft_s`` and ``tbt_s`` count where requests carry no targets of their own."""

    ttft_s: float = 10.0
    tbt_s: float = 0.1
    min_prefill: int = 1
    min_decode: int = 1
    prefill_use: float = 0.8  # share of its time that a prefill worker computes when prompts still wait little
    decode_use: float = 0.85  # share of the TBT target that a step takes when a burst still fits
    trigger: float = 0.7  # pressure of the fuller pool from which switching is thought of
    gain: float = 0.12  # by which the best split's pressure must be smaller, relative
    hold_s: float = 8.0  # for so long before the first switch of a move, where targets are missed as it is
    calm_s: float = 40.0  # where they are not: pressure up to 1
    settle_s: float = 10.0  # between two switches the same way
    dwell_s: float = 60.0  # before one the other way
    ahead_s: float = 30.0  # how far the forecast looks: a drain takes about that long
    catch_up_s: float = 30.0  # what is queued should be worked off in
    at_once: float = 0.34  # of the pool that gives workers away, at most this share at a time
    every_s: float = 2.0
    warm_s: float = 10.0  # of traffic before anything is proposed

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Settings:
        """InvalidRequest naming an unknown one."""
        known = {name: type(value) for name, value in asdict(cls()).items()}
        for name in values:
            if name not in known:
                raise InvalidRequest(f"planner: {name!r} is unknown; use some of {', '.join(known)}", param=name)
        return replace(cls(), **{name: known[name](value) for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class Load:
    """One switchable worker, ready or on its way from one role to the other (then without load)."""

    worker: MemberId
    role: Role
    wait_s: float = 0.0  # prefill: seconds of work it has
    batch: int = 0  # decode: sequences that have their first token
    context_tokens: int = 0  # theirs
    held_tokens: int = 0  # also of those whose prompts are still computed elsewhere: all of them have to drain
    moving: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    prefill: int
    decode: int
    prefill_pressure: float
    decode_pressure: float

    @property
    def pressure(self) -> float:
        return max(self.prefill_pressure, self.decode_pressure)


@dataclass(frozen=True, slots=True)
class Proposal:
    """``switches`` is what to do now; empty with the reason in ``held_back``."""

    now: Split
    best: Split
    needed_prefill: int  # workers that bring each pool's pressure to 1: the size that the forecast wants
    needed_decode: int
    forecast: Forecast
    step: StepCost
    loads: tuple[Load, ...]
    switches: tuple[SwitchRole, ...] = ()
    held_back: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "step": asdict(self.step)}


class Planner:
    """Told of what arrives and finishes; asked on a timer. Remembers only the traffic and its own switches."""

    def __init__(self, settings: Settings | None = None, *, acts: bool = True) -> None:
        """``acts=False``: it proposes when asked and switches nobody on its own."""
        self._acts = acts
        self.settings = settings or Settings()
        self.traffic = Traffic()
        self.switches = 0
        self._ttft_s, self._tbt_s = self.settings.ttft_s, self.settings.tbt_s
        self._moving: dict[MemberId, tuple[Role, float]] = {}
        self._wanted: tuple[Role, float] | None = None  # the role that is short, since when
        self._last: tuple[Role, float] | None = None  # role switched to, when
        self._next_at = 0.0

    def arrived(self, request: PlaceRequest, computed_tokens: int, prefill_s: float, now: float) -> None:
        """A request was placed, refused or told to wait; counted once, at its first attempt. ``prefill_s``: predicted."""
        self.traffic.arrived(request.prompt_tokens, computed_tokens, prefill_s, now)
        if request.targets.ttft_ms is not None:
            self._ttft_s = request.targets.ttft_ms / 1e3
        if request.targets.tbt_ms is not None:
            self._tbt_s = request.targets.tbt_ms / 1e3

    def finished(self, output_tokens: int) -> None:
        """A request was answered to its end."""
        self.traffic.finished(output_tokens)

    def next_at(self) -> float | None:
        return self._next_at if self._acts else None

    def due(self, board: Board, now: float) -> list[SwitchRole]:
        """Switches to make now; to be called at ``next_at``. Calls before that change nothing."""
        if not self._acts or now < self._next_at:
            return []
        self._next_at = now + self.settings.every_s
        proposal = self.propose(board, now)
        for switch in proposal.switches:
            self.began(switch, now)
        return list(proposal.switches)

    def began(self, switch: SwitchRole, now: float) -> None:
        """``switch`` is under way, whoever asked for it."""
        self._moving[switch.worker] = (switch.role, now)
        self._last = (switch.role, now)
        self.switches += 1

    def gave_up(self, worker: MemberId) -> None:
        """Nothing came of the switch of ``worker``: it stays what it is."""
        self._moving.pop(worker, None)

    def propose(self, board: Board, now: float, *, patient: bool = True) -> Proposal:
        """The best split for the traffic that is forecast. ``patient=False`` leaves out hold, settling and dwell times."""
        loads, step = self._loads(board, now), _step_cost(board)
        forecast = self.traffic.ahead(self.settings.ahead_s, step, now)
        demand = _Demand.of(forecast, loads, step, self.settings, self._ttft_s, self._tbt_s)
        present = demand.split(
            sum(load.role is Role.PREFILL for load in loads), sum(load.role is Role.DECODE for load in loads)
        )
        best = self._best(demand, present)
        proposal = Proposal(present, best, *demand.needed, forecast, step, tuple(loads))
        why = self._unsure(board, forecast) or self._not_worth(present, best)
        if why:
            self._wanted = None
            return replace(proposal, held_back=why)
        role = Role.PREFILL if best.prefill > present.prefill else Role.DECODE
        hold_s = self.settings.hold_s if present.pressure > 1.0 else self.settings.calm_s
        if patient and (why := self._impatient(role, hold_s, now)):
            return replace(proposal, held_back=why)
        count = abs(best.prefill - present.prefill)
        return replace(proposal, switches=tuple(self._pick(loads, role, count)))

    # -- what there is -------------------------------------------------------------------------------------------------

    def _loads(self, board: Board, now: float) -> list[Load]:
        """Workers on the board, and those that left it to change their roles."""
        loads = []
        for row, worker in enumerate(board.workers):
            role = worker.member.role
            if role in SWITCHABLE:
                moving = self._moving.get(worker.member.id)
                if moving is not None and moving[0] is role:
                    del self._moving[worker.member.id]
                elif moving is not None and now - moving[1] < LOST_SWITCH_S:
                    continue  # not yet begun
                if role is Role.PREFILL:
                    loads.append(Load(worker.member.id, role, wait_s=max(float(board.busy_until[row]) - now, 0.0)))
                else:
                    decoding = [a for a in worker.attempts if a.output_tokens]  # others still wait for their prompts
                    context, held = (
                        sum(a.prompt_tokens + a.output_tokens for a in some) for some in (decoding, worker.attempts)
                    )
                    loads.append(Load(worker.member.id, role, 0.0, len(decoding), context, held))
        for name, (role, since) in list(self._moving.items()):
            if now - since >= LOST_SWITCH_S:
                del self._moving[name]
            else:
                loads.append(Load(name, role, moving=True))
        return loads

    # -- what would be best --------------------------------------------------------------------------------------------

    def _best(self, demand: _Demand, present: Split) -> Split:
        total, least = present.prefill + present.decode, self.settings
        counts = range(least.min_prefill, total - least.min_decode + 1)
        splits = [demand.split(prefill, total - prefill) for prefill in counts]
        return min(splits, key=lambda s: (s.pressure, abs(s.prefill - present.prefill)), default=present)

    def _unsure(self, board: Board, forecast: Forecast) -> str:
        if forecast.seen_s < self.settings.warm_s:
            return f"traffic was watched for {forecast.seen_s:.0f} s only; {self.settings.warm_s:.0f} s are needed"
        if not forecast.answers:
            return "no request has finished yet: the length of answers is unknown"
        if not (board.prefill_reach[board.split] > 0.0).any() or not (board.step_reach[board.decode_only] > 0.0).any():
            return "how long prefills and decode steps take has not been measured yet"
        return ""

    def _not_worth(self, present: Split, best: Split) -> str:
        if best.prefill == present.prefill:
            return "this split is the best one"
        if present.pressure < self.settings.trigger:
            return f"pressure is {present.pressure:.2f}, below {self.settings.trigger:.2f}"
        if best.pressure > (1.0 - self.settings.gain) * present.pressure:
            return f"pressure would go from {present.pressure:.2f} to {best.pressure:.2f} only"
        return ""

    # -- when, and who -------------------------------------------------------------------------------------------------

    def _impatient(self, role: Role, hold_s: float, now: float) -> str:
        if self._wanted is None or self._wanted[0] is not role:
            self._wanted = (role, now)
        if (since := now - self._wanted[1]) < hold_s:
            return f"wanted for {since:.0f} s; {hold_s:.0f} s are needed"
        if self._last is not None:
            pause = self.settings.settle_s if self._last[0] is role else self.settings.dwell_s
            if (since := now - self._last[1]) < pause:
                return f"the last switch was {since:.0f} s ago; {pause:.0f} s must lie between"
        return ""

    def _pick(self, loads: list[Load], role: Role, count: int) -> list[SwitchRole]:
        """Those that are drained soonest."""
        donors = [load for load in loads if load.role is not role and not load.moving]
        count = min(count, max(1, int(self.settings.at_once * len(donors))))
        donors.sort(key=lambda load: (load.held_tokens, load.wait_s, load.worker))
        return [SwitchRole(load.worker, role) for load in donors[:count]]


@dataclass(frozen=True, slots=True)
class _Demand:
    """Busy workers wanted of either kind, with what one worker of the kind can take."""

    prefill: float
    decode: float
    prefill_take: float
    decode_take: float
    resident_s: float  # per-sequence work of one step over everything that decodes now
    base_s: float
    tbt_s: float

    @classmethod
    def of(
        cls, forecast: Forecast, loads: list[Load], step: StepCost, settings: Settings, ttft_s: float, tbt_s: float
    ) -> _Demand:
        backlog = sum(load.wait_s for load in loads)
        allowed = 0.25 * ttft_s * sum(load.role is Role.PREFILL for load in loads)
        queued = max(backlog - allowed, 0.0) / settings.catch_up_s
        resident = sum(step.per_sequence_s * load.batch + step.per_token_s * load.context_tokens for load in loads)
        limit_s = settings.decode_use * tbt_s
        take = max(1.0 - step.base_s / limit_s, 0.05)  # where a step alone takes the target, no number of workers helps
        return cls(
            forecast.prefill_work + queued, forecast.decode_work, settings.prefill_use, take, resident, step.base_s, limit_s
        )

    def split(self, prefill: int, decode: int) -> Split:
        share = self.resident_s / max(decode, 1)
        resident = (self.base_s + share) / self.tbt_s if self.resident_s else 0.0
        coming = self.decode / (max(decode, 1) * self.decode_take)
        return Split(
            prefill,
            decode,
            self.prefill / (max(prefill, 1) * self.prefill_take) + IDLE_PRESSURE / max(prefill, 1),
            max(coming, resident) + IDLE_PRESSURE / max(decode, 1),
        )

    @property
    def needed(self) -> tuple[int, int]:
        return max(1, math.ceil(self.prefill / self.prefill_take)), max(1, math.ceil(self.decode / self.decode_take))


def _step_cost(board: Board) -> StepCost:
    """The median decode worker's; of all workers where none decodes."""
    rows = board.decode_only if board.decode_only.any() else np.ones_like(board.decode_only)
    if not rows.any():
        return StepCost(0.0, 0.0, 0.0)
    base, sequence, token = (float(x) for x in np.median(board.step_fit[:, rows], axis=1))
    return StepCost(base, sequence, token)
