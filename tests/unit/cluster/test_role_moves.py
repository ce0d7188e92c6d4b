"""What a conductor's process does about roles: it asks workers, and says what it would ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.cluster_of_members import split
from support.leading import Leading
from support.workers import Crowd, member

from moonpool.cluster.admin import Admin
from moonpool.cluster.role_moves import RoleMoves, make_planner
from moonpool.core.config import SchedulerConfig
from moonpool.core.errors import Busy, InvalidRequest, NoPath
from moonpool.core.ids import MemberId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.scheduler.actions import SwitchRole
from moonpool.scheduler.planner import Planner
from moonpool.wire import channels, pb

TO_DECODE = SwitchRole(MemberId("prefill-0"), Role.DECODE)


class Asked:
    """A worker's process as far as its admin service goes."""

    def __init__(self) -> None:
        self.switches: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
        self.busy = False
        self.terms: list[int] = []
        self.member = member("prefill-0", Role.PREFILL, None)

    def check_term(self, term: int) -> None:
        self.terms.append(term)

    def switch(self, role: str, drain_s: float) -> None:
        if self.busy:
            raise Busy("prefill-0 is not ready: it starts, ends or switches already", peer="prefill-0")
        self.switches.put_nowait((role, drain_s))


@asynccontextmanager
async def worker() -> AsyncIterator[tuple[Asked, Member]]:
    asked = Asked()

    async def report() -> None:
        pass

    def nothing() -> None:
        pass

    admin = Admin(lambda: asked.member, lambda: None, report, nothing, nothing, dict, asked.switch, asked.check_term)
    server = channels.server()
    pb.admin_rpc.add_AdminServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield asked, member("prefill-0", Role.PREFILL, None, address=f"127.0.0.1:{port}")
    finally:
        await server.stop(0)


async def test_a_worker_is_asked_and_says_why_it_does_not() -> None:
    async with worker() as (asked, prefill):
        moves = RoleMoves(Crowd([prefill]), MemberId("conductor-0"), Leading())
        assert await moves.begin(TO_DECODE) == ""
        assert await asked.switches.get() == ("decode", 0.0)
        asked.busy = True
        assert "not ready" in await moves.begin(TO_DECODE)
        assert moves.switches == 1
        await moves.close()


async def test_of_several_conductors_the_leading_one_acts() -> None:
    async with worker() as (asked, prefill):
        crowd, leads, follows = Crowd([prefill]), Leading(3), Leading(0)
        second, first = RoleMoves(crowd, MemberId("conductor-1"), follows), RoleMoves(crowd, MemberId("conductor-0"), leads)
        planner = Planner()
        planner.began(TO_DECODE, 1.0)
        board = split(2, 2).conductor._view.board
        second.take(TO_DECODE, planner)
        assert planner.propose(board, 2.0).now.prefill == 2, "what another conductor does is not counted here"
        first.take(TO_DECODE, planner)
        await asyncio.wait_for(asked.switches.get(), 5.0)
        leads.now, follows.now = 0, 4
        second.take(TO_DECODE, planner)
        await asyncio.wait_for(asked.switches.get(), 5.0)
        first.take(TO_DECODE, planner)
        assert asked.switches.empty()
        assert asked.terms == [3, 4]
        await first.close()
        await second.close()


async def test_a_worker_that_is_gone_is_not_asked() -> None:
    crowd = Crowd()
    moves = RoleMoves(crowd, MemberId("conductor-0"), Leading())
    assert await moves.begin(TO_DECODE) == "prefill-0: not a live member"
    unreachable = member("prefill-0", Role.PREFILL, None, address="127.0.0.1:1")
    crowd.tell(MemberChange(unreachable, Liveness.LIVE))
    assert (await moves.begin(TO_DECODE)).startswith("prefill-0: ")
    assert moves.switches == 0


async def test_a_switch_that_was_asked_for_is_counted_by_the_planner() -> None:
    async with worker() as (asked, prefill):
        conductor = split(2, 2, taught=True).conductor
        conductor.planner = Planner(acts=False)
        moves = RoleMoves(Crowd([prefill]), MemberId("conductor-0"), Leading())
        shown = await moves.rebalance(conductor, apply=False, wanted={}, now=100.0)
        assert shown["switches"] == [] and shown["begun"] == {} and shown["held_back"]
        told = await moves.rebalance(conductor, apply=True, wanted={"prefill-0": "decode"}, now=100.0)
        assert told["begun"] == {"prefill-0": ""}
        assert conductor.planner.switches == 1
        after = await moves.rebalance(conductor, apply=False, wanted={}, now=101.0)
        assert (after["now"]["prefill"], after["now"]["decode"]) == (1, 3)
        assert not asked.switches.empty()
        with pytest.raises(InvalidRequest, match="prefill-0=both: use prefill or decode"):
            await moves.rebalance(conductor, apply=True, wanted={"prefill-0": "both"}, now=102.0)


async def test_where_roles_are_fixed_nobody_plans() -> None:
    assert make_planner(SchedulerConfig(roles="fixed")) is None
    moves = RoleMoves(Crowd(), MemberId("conductor-0"), Leading())
    with pytest.raises(InvalidRequest, match="set it to ask or auto"):
        await moves.rebalance(split().conductor, apply=False, wanted={}, now=0.0)


def test_only_an_automatic_planner_acts_on_its_own() -> None:
    asks, acts = make_planner(SchedulerConfig()), make_planner(SchedulerConfig(roles="auto", planner_settings={"dwell_s": 5.0}))
    assert asks is not None and asks.next_at() is None
    assert acts is not None and acts.next_at() is not None
    assert acts.settings.dwell_s == 5.0
    with pytest.raises(InvalidRequest, match="'dwell' is unknown"):
        make_planner(SchedulerConfig(planner_settings={"dwell": 5.0}))


async def test_a_conductor_that_does_not_lead_shows_what_it_would_do_and_does_not_do_it() -> None:
    conductor = split(2, 2, taught=True).conductor
    conductor.planner = Planner(acts=False)
    moves = RoleMoves(Crowd(), MemberId("conductor-1"), Leading(0))
    assert (await moves.rebalance(conductor, apply=False, wanted={}, now=100.0))["begun"] == {}
    with pytest.raises(NoPath, match=r"conductor-1 does not lead \(conductor-0 does\)"):
        await moves.rebalance(conductor, apply=True, wanted={}, now=100.0)
