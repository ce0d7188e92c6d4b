"""Carries out what a planner of roles decides: asks workers to switch, and says what it would decide."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from math import inf
from typing import Any

import grpc

from moonpool.cluster.leadership import Leads
from moonpool.cluster.role_switch import SWITCHABLE
from moonpool.core.config import SchedulerConfig
from moonpool.core.errors import InvalidRequest, NoPath
from moonpool.core.ids import MemberId, Role
from moonpool.core.membership import Liveness, Peers
from moonpool.scheduler.actions import SwitchRole
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.planner import Planner, Settings
from moonpool.wire import pb
from moonpool.wire.channels import dial
from moonpool.wire.status import why_unreachable

TIMEOUT_S = 3.0
log = logging.getLogger(__name__)


class RoleMoves:
    """``own``: this conductor. Where several live, only the leading one acts: two would switch twice as many."""

    def __init__(self, peers: Peers, own: MemberId, leads: Leads) -> None:
        self._peers, self._own, self._leads = peers, own, leads
        self._tasks: set[asyncio.Task[None]] = set()
        self.switches = 0

    def take(self, action: SwitchRole, planner: Planner) -> None:
        """Begin it, if this conductor leads; ``planner``, whose wish it was, hears where nothing comes of it."""
        if not self._leads.term():
            planner.gave_up(action.worker)
            return
        task = asyncio.create_task(self._carry_out(action, planner), name=f"switch-{action.worker}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, action: SwitchRole, planner: Planner) -> None:
        if why := await self.begin(action):
            log.warning("no switch to %s: %s", action.role.value, why)
            planner.gave_up(action.worker)

    async def begin(self, action: SwitchRole) -> str:
        """Ask the worker to switch. Empty, or why it does not."""
        change = self._peers.get(action.worker)
        if change is None or change.liveness is not Liveness.LIVE:
            return f"{action.worker}: not a live member"
        async with dial(change.member.address) as channel:
            request = pb.admin.SwitchRoleRequest(role=action.role.value, term=self._leads.term())
            try:
                await pb.admin_rpc.AdminStub(channel).SwitchRole(request, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as e:
                unreachable = e.code() is grpc.StatusCode.UNAVAILABLE
                return f"{action.worker}: {why_unreachable(e.details()) if unreachable else e.details()}"
        self.switches += 1
        return ""

    async def rebalance(self, conductor: Conductor, *, apply: bool, wanted: Mapping[str, str], now: float) -> dict[str, Any]:
        """The proposal as JSON, and what became of each switch that was begun (empty: under way).

        ``wanted`` (worker -> role) is done instead of what is proposed. InvalidRequest where no planner looks at roles; NoPath
        where it is to be applied and another conductor leads.
        """
        if apply and not self._leads.term():
            leader = self._leads.leader() or "none yet"
            raise NoPath(f"conductor: {self._own} does not lead ({leader} does); ask that one", retry_after_s=1.0)
        proposal = conductor.rebalance(now, patient=False)
        if proposal is None:
            raise InvalidRequest("scheduler.roles: fixed, so nobody plans roles here; set it to ask or auto", param="roles")
        switches = asked_switches(wanted) or proposal.switches
        begun = {}
        for switch in switches if apply else ():
            begun[switch.worker] = await self.begin(switch)
            if not begun[switch.worker]:
                conductor.switching(switch, now)
        chosen = [{"worker": s.worker, "role": s.role.value} for s in switches]
        return {"conductor": self._own, **proposal.to_json(), "switches": chosen, "begun": begun}

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def asked_switches(wanted: Mapping[str, str]) -> tuple[SwitchRole, ...]:
    """InvalidRequest where a role is none that workers switch to."""
    for worker, role in wanted.items():
        if role not in [r.value for r in SWITCHABLE]:
            raise InvalidRequest(f"switch: {worker}={role}: use prefill or decode", param="switch")
    return tuple(SwitchRole(MemberId(worker), Role(role)) for worker, role in wanted.items())


def make_planner(scheduler: SchedulerConfig) -> Planner | None:
    """As ``scheduler.roles`` says. InvalidRequest naming an unknown setting."""
    if scheduler.roles == "fixed":
        return None
    return Planner(planner_settings(scheduler), acts=scheduler.roles == "auto")


def planner_settings(scheduler: SchedulerConfig) -> Settings:
    """InvalidRequest naming an unknown setting, or one that is negative."""
    for name, value in scheduler.planner_settings.items():
        if not 0.0 <= value < inf:
            raise InvalidRequest(f"scheduler.planner_settings: {name} is {value}; give 0 or more", param=name)
    try:
        return Settings.of(scheduler.planner_settings)
    except InvalidRequest as e:
        raise InvalidRequest(f"scheduler.planner_settings: {e.message}", param=e.param) from e
