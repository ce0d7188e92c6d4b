"""The conductor's process under a policy that binds late: open calls, the timer, callers that leave, other conductors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from support.scripted_cluster import LAYOUT, Membership

from moonpool.cluster.conductor import ConductorService
from moonpool.core.config import Config, SchedulerConfig
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import LiveAttempt, Liveness, Member, PrefillTiming, WorkerReport
from moonpool.core.placement import Finished, PlaceRequest
from moonpool.wire import channels, pb
from moonpool.wire.convert import to_wire

LIFE = Incarnation(1)
PREFILLS = ("prefill-0", "prefill-1")


def member(name: str, role: Role, node: str = "a") -> Member:
    return Member(MemberId(name), role, NodeId(node), LIFE, "127.0.0.1:1", 1, layout=LAYOUT)


def asked(name: str, tokens: int = 100) -> pb.conductor.PlaceRequest:
    return to_wire(PlaceRequest(name, 1, (), tokens, 8), pb.conductor.PlaceRequest())


@dataclass
class Bench:
    """``calls`` are kept alive: a call that nobody holds is cancelled."""

    service: ConductorService
    peers: Membership
    stub: pb.conductor_rpc.ConductorStub
    calls: list[grpc.aio.UnaryStreamCall[pb.conductor.PlaceRequest, pb.conductor.PlaceReply]] = field(default_factory=list)
    left: bool = False

    async def leave(self) -> None:
        if not self.left:
            self.left = True
            await self.service.close()

    def report(self, worker: str, *attempts: LiveAttempt, speed: float = 1e-3) -> None:
        """``attempts`` are all it holds; it computes a token in ``speed`` seconds."""
        timings = tuple(PrefillTiming(n, 0, n * speed) for n in (50, 100, 200, 400))
        self.service._observe(WorkerReport(MemberId(worker), LIFE, attempts, 100, 100, timings))

    def busy(self, worker: str, tokens: int) -> None:
        self.report(worker, LiveAttempt(f"other-{worker}", 1, tokens, tokens))

    def free(self, worker: str) -> None:
        self.report(worker)

    async def ask(self, name: str, tokens: int = 100) -> tuple[int, str]:
        """(number of the call, kind of its first word)."""
        self.calls.append(self.stub.Place(asked(name, tokens)))
        return len(self.calls) - 1, await self.next(len(self.calls) - 1)

    async def next(self, call: int) -> str:
        async with asyncio.timeout(5):
            reply = await self.calls[call].read()
        return reply.WhichOneof("kind") if reply is not grpc.aio.EOF else "end"

    def number(self, name: str) -> float:
        return self.service.numbers()[name]

    async def until(self, name: str, value: float) -> None:
        async with asyncio.timeout(5):
            while self.number(name) != value:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def bench(**scheduler: object) -> AsyncIterator[Bench]:
    peers = Membership()
    settings = SchedulerConfig.model_validate({"policy": "moonpool", "admission": "none", **scheduler})
    for name in PREFILLS:
        peers.say(member(name, Role.PREFILL))
    service = await ConductorService.start(Config(scheduler=settings), member("conductor-0", Role.CONDUCTOR), peers)
    peers.say(member("store-a", Role.STORE))
    peers.say(member("decode-0", Role.DECODE))
    server = channels.server()
    service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        made = Bench(service, peers, pb.conductor_rpc.ConductorStub(channel))
        for name in PREFILLS:
            made.free(name)
        yield made
        for call in made.calls:
            call.cancel()
        await made.leave()
    await server.stop(None)


async def test_a_request_waits_while_all_are_busy_and_is_bound_by_the_report_that_frees_one() -> None:
    async with bench() as b:
        for name in PREFILLS:
            b.busy(name, 50_000)
        call, word = await b.ask("waits")
        assert word == "waiting"
        assert (b.number("waiting"), b.number("bookings")) == (1, 0)
        b.free("prefill-1")
        assert [await b.next(call), await b.next(call)] == ["placement", "end"]
        assert (b.number("waiting"), b.number("bookings")) == (0, 1)
        told = b.service.conductor.explain("waits")
        assert told is not None
        (decision,) = told["decisions"]
        assert decision["placed"]["prefill"]["id"] == "prefill-1"
        assert decision["waited_ms"] > 0


async def test_the_timer_binds_when_the_estimate_says_that_a_worker_is_about_to_be_free() -> None:
    async with bench() as b:
        for name in PREFILLS:
            b.busy(name, 300)  # 0.3 s, and no report comes when it is over
        call, word = await b.ask("waits")
        assert word == "waiting"
        assert await b.next(call) == "placement"


async def test_a_caller_that_leaves_takes_its_request_out_of_the_queue() -> None:
    async with bench() as b:
        for name in PREFILLS:
            b.busy(name, 50_000)
        first, _ = await b.ask("leaves")
        second, _ = await b.ask("stays")
        b.calls[first].cancel()
        await b.until("waiting", 1)
        b.free("prefill-0")
        assert await b.next(second) == "placement"
        await b.until("bookings", 1)


async def test_a_caller_that_leaves_at_the_instant_of_its_answer_leaves_nothing_booked() -> None:
    class Context:
        async def write(self, reply: pb.conductor.PlaceReply) -> None:
            pass

    async with bench() as b:
        for name in PREFILLS:
            b.busy(name, 50_000)
        call = asyncio.create_task(b.service.Place(asked("leaves"), Context()))
        await b.until("waiting", 1)
        await asyncio.sleep(0)
        b.free("prefill-0")
        assert b.number("bookings") == 1
        call.cancel()  # it has its answer, and has not run since
        await asyncio.gather(call, return_exceptions=True)
        assert (b.number("waiting"), b.number("bookings")) == (0, 0)


async def test_an_attempt_asked_for_again_ends_the_older_call_and_is_answered_once() -> None:
    async with bench() as b:
        for name in PREFILLS:
            b.busy(name, 50_000)
        older, _ = await b.ask("again")
        newer, word = await b.ask("again")
        assert word == "waiting"
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await b.next(older)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert b.number("waiting") == 1
        b.free("prefill-0")
        assert await b.next(newer) == "placement"
        assert b.number("bookings") == 1


async def test_a_conductor_that_leaves_sends_those_who_wait_elsewhere() -> None:
    async with bench() as b:
        for name in PREFILLS:
            b.busy(name, 50_000)
        call, _ = await b.ask("waits")
        await b.leave()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await b.next(call)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_conductor_that_drains_sends_on_who_waits_and_who_comes() -> None:
    async with bench() as b:
        for name in PREFILLS:
            b.busy(name, 50_000)
        call, _ = await b.ask("waits")
        draining = asyncio.create_task(b.service.drain(5.0))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await b.next(call)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await b.ask("comes")
        await draining
        assert ended.value.code() is refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await b.until("waiting", 0)


async def test_waiting_requests_hear_when_the_last_worker_is_lost() -> None:
    async with bench() as b:
        for name in PREFILLS:
            b.busy(name, 50_000)
        call, _ = await b.ask("waits")
        for name in PREFILLS:
            b.peers.say(member(name, Role.PREFILL), Liveness.GONE, "killed")
        assert await b.next(call) == "refusal"
        await b.until("waiting", 0)


async def test_more_than_the_queue_holds_are_refused_at_once() -> None:
    async with bench(max_waiting=2) as b:
        for name in PREFILLS:
            b.busy(name, 50_000)
        assert [(await b.ask(f"r{i}"))[1] for i in range(3)] == ["waiting", "waiting", "refusal"]
        assert b.number("refusals_overloaded") == 1


async def test_a_conductor_that_never_placed_them_keeps_off_workers_that_others_load() -> None:
    async with bench() as b:
        b.report("prefill-0", *(LiveAttempt(f"of-another-{i}", 1, 4_000, 4_000) for i in range(20)))
        placed = [await b.ask(f"mine-{i}", tokens=50) for i in range(10)]
        assert placed[0][1] == "placement"
        for i in range(10):
            told = b.service.conductor.explain(f"mine-{i}")
            assert told is not None
            where = told["decisions"][0].get("placed")
            assert where is None or where["prefill"]["id"] == "prefill-1"
            b.service._over(Finished(f"mine-{i}", 1, 0))
            b.free("prefill-1")


async def test_bookings_of_a_conductor_whose_gateway_died_end_by_reports() -> None:
    async with bench() as b:
        call, word = await b.ask("lost")
        assert word == "placement"
        assert await b.next(call) == "end"
        assert b.number("bookings") == 1
        b.service.conductor.observe(WorkerReport(MemberId("decode-0"), LIFE, (), 100, 100), b.service._clock() + 30)
        assert b.number("bookings") == 0
