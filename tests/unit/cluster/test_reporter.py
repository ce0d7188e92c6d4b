"""Reports to conductors that come and go while they are on their way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.deaf_server import deaf_server
from support.scripted_cluster import Membership

from moonpool.cluster import reporter as module
from moonpool.cluster.reporter import Reporter
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, StepTiming, WorkerReport
from moonpool.wire import pb


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


class Changing(Worker):
    def __init__(self) -> None:
        self.said = WorkerReport(MemberId("prefill-0"), Incarnation(1), (), 1, 1)

    def report(self) -> WorkerReport:
        return self.said


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(conductor, free pages) of every report; none is made by itself."""
    monkeypatch.setattr(module, "PERIOD_S", 3_600.0)
    monkeypatch.setattr(module, "STILL_S", 3_600.0)
    found: list[tuple[str, int]] = []

    async def send(self: Reporter, conductor: MemberId, address: str, message: pb.types.WorkerReport) -> None:
        found.append((conductor, message.free_pages))

    monkeypatch.setattr(Reporter, "_send", send)
    return found


async def test_the_same_is_not_said_again_and_again_of_a_worker_that_does_nothing(sent: list[tuple[str, int]]) -> None:
    peers, worker = Membership(), Changing()
    peers.say(conductor("conductor-0", "nowhere:1"))
    reporter = Reporter(worker, peers)  # type: ignore[arg-type]
    for _ in range(3):
        await reporter._look()
    assert sent == [("conductor-0", 1)]
    worker.said = replace(worker.said, free_pages=0)
    await reporter._look()
    assert sent[1:] == [("conductor-0", 0)]
    peers.say(conductor("conductor-1", "nowhere:2"))
    await reporter._look()
    assert sent[2:] == [("conductor-0", 0), ("conductor-1", 0)]
    await reporter.report()  # asked for
    assert len(sent) == 6
    await reporter.close()


async def test_what_happens_is_said_however_much_it_looks_like_what_happened_before(sent: list[tuple[str, int]]) -> None:
    peers, worker = Membership(), Changing()
    worker.said = replace(worker.said, steps=(StepTiming(1, 100, 0.01),))
    peers.say(conductor("conductor-0", "nowhere:1"))
    reporter = Reporter(worker, peers)  # type: ignore[arg-type]
    for _ in range(3):
        await reporter._look()
    assert len(sent) == 3
    await reporter.close()
