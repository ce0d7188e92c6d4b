"""Reports to conductors that come and go while they are on their way."""

from __future__ import annotations

import asyncio

import pytest
from support.deaf_server import deaf_server
from support.scripted_cluster import Membership

from moonpool.cluster import reporter as module
from moonpool.cluster.reporter import Reporter
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, WorkerReport


class Worker:
    def report(self) -> WorkerReport:
        return WorkerReport(MemberId("prefill-0"), Incarnation(1), (), 1, 1)


def conductor(name: str, address: str) -> Member:
    return Member(MemberId(name), Role.CONDUCTOR, NodeId("a"), Incarnation(1), address, 1)


async def test_a_channel_closed_under_a_report_does_not_end_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.01)
    peers = Membership()
    async with deaf_server() as (address, called):
        first = conductor("conductor-0", address)
        peers.say(first)
        reporter = Reporter(Worker(), peers)  # type: ignore[arg-type]
        await asyncio.wait_for(called.get(), 5.0)
        peers.say(first, Liveness.GONE)
        await reporter.report()  # as when device pages are cleared, beside the periodic one
        peers.say(conductor("conductor-1", address))
        await asyncio.wait_for(called.get(), 5.0)
        await reporter.close()
