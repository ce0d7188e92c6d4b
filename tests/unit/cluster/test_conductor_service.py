from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from support.scripted_cluster import LAYOUT, Membership

from moonpool.cluster.conductor import ConductorService
from moonpool.cluster.leadership import Leads
from moonpool.core.config import Config, TimingConfig
from moonpool.core.events import BlockChange, BlockEvent, EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, PrefillTiming, WorkerReport
from moonpool.core.placement import Finished, Placement, PlaceRequest, Source
from moonpool.core.request import Targets
from moonpool.wire import channels, frames, pb
from moonpool.wire.convert import from_wire, to_wire

KEYS = tuple(bytes([i]).ljust(16, b"k") for i in range(6))
LIFE = Incarnation(1)


def member(name: str, role: Role, node: str, address: str = "host:1", life: int = LIFE) -> Member:
    return Member(MemberId(name), role, NodeId(node), Incarnation(life), address, 1, layout=LAYOUT)


def snapshot(node: str, number: int, *keys: bytes, life: int = LIFE) -> bytes:
    return frames.encode_snapshot(IndexSnapshot(node, Incarnation(life), number, ((Tier.G2, keys),)))


def stored(node: str, number: int, *keys: bytes, tier: Tier = Tier.G2, life: int = LIFE) -> bytes:
    event = BlockEvent(BlockChange.STORED, tier, keys)
    return frames.encode_events(EventBatch(node, Incarnation(life), number, (event,)))


@dataclass
class ScriptedStore(pb.store_rpc.StoreServicer):
    """Says on its Watch stream what a test puts into ``say``; None ends the call. ``asked``: what watchers wanted."""

    say: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    asked: asyncio.Queue[tuple[int, int]] = field(default_factory=asyncio.Queue)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""

    async def Watch(
        self, request: pb.store.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.store.WatchMessage]:
        self.asked.put_nowait((request.incarnation, request.next_number))
        try:
            while (frame := await self.say.get()) is not None:
                yield pb.store.WatchMessage(frame=frame)
        finally:
            self.left.set()

    async def asked_for(self) -> tuple[int, int]:
        async with asyncio.timeout(10):
            return await self.asked.get()


class Watched(ConductorService):
    """Tells when it has heard something of a store node."""

    def __init__(self, config: Config, member: Member, peers: Membership, *, leads: Leads | None = None) -> None:
        self.heard = asyncio.Event()
        super().__init__(config, member, peers, leads=leads)

    def _heard(self, event: EventBatch | IndexSnapshot) -> bool:
        self.heard.set()
        return super()._heard(event)


@dataclass
class Bench:
    service: Watched
    peers: Membership
    stub: pb.conductor_rpc.ConductorStub
    stores: dict[str, ScriptedStore]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.service.heard.clear()
                await self.service.heard.wait()

    async def place(self, request: str = "r", keys: tuple[bytes, ...] = KEYS, tokens: int = 100, **asked: object) -> Placement:
        reply = await self._ask(PlaceRequest(request, 1, keys, tokens, 8, **asked))  # type: ignore[arg-type]
        assert reply.WhichOneof("kind") == "placement", reply
        return from_wire(reply.placement, Placement)

    async def refused(self, **asked: object) -> pb.types.Error:
        reply = await self._ask(PlaceRequest("r", 1, KEYS, 100, 8, **asked))  # type: ignore[arg-type]
        assert reply.WhichOneof("kind") == "refusal", reply
        return reply.refusal

    async def _ask(self, request: PlaceRequest) -> pb.conductor.PlaceReply:
        (reply,) = [one async for one in self.stub.Place(to_wire(request, pb.conductor.PlaceRequest()))]
        answer: pb.conductor.PlaceReply = reply
        return answer

    async def report(self, **values: object) -> None:
        report = WorkerReport(MemberId("prefill-0"), LIFE, **values)  # type: ignore[arg-type]
        await self.stub.Report(to_wire(report, pb.types.WorkerReport()))

    def known(self, blocks: int) -> Callable[[], bool]:
        return lambda: self.service.numbers()["blocks_indexed"] == blocks


@asynccontextmanager
async def bench(*nodes: str, silent_after_ms: int = 1_000) -> AsyncIterator[Bench]:
    """A conductor over real gRPC, one scripted store per node, prefill-0 on the first node and decode-0 on the last."""
    servers = []
    stores = {}
    for node in nodes:
        store, server = ScriptedStore(), channels.server()
        pb.store_rpc.add_StoreServicer_to_server(store, server)
        store.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stores[node], servers = store, [*servers, server]
    peers = Membership()
    config = Config(timing=TimingConfig(silent_after_ms=silent_after_ms))
    peers.say(member("prefill-0", Role.PREFILL, nodes[0]))
    service = await Watched.start(config, member("conductor-0", Role.CONDUCTOR, nodes[0]), peers)
    server = channels.server()
    service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    peers.say(member("decode-0", Role.DECODE, nodes[-1]))
    for node, store in stores.items():
        peers.say(member(f"store-{node}", Role.STORE, node, store.address))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Bench(service, peers, pb.conductor_rpc.ConductorStub(channel), stores)
    await service.close()
    for one in (server, *servers):
        await one.stop(None)


async def test_placements_follow_the_blocks_that_store_nodes_tell_of() -> None:
    async with bench("a", "b") as b:
        assert await b.stores["b"].asked_for() == (LIFE, 0)
        b.stores["b"].say.put_nowait(snapshot("b", 7, *KEYS[:2]))
        b.stores["b"].say.put_nowait(stored("b", 8, *KEYS[2:4]))
        await b.until(b.known(4))
        placement = await b.place()
        assert (placement.prefill.id, placement.decode.id) == ("prefill-0", "decode-0")
        assert [(s.first, s.count, s.source, s.node) for s in placement.segments] == [
            (0, 4, Source.FETCH, "b"),
            (4, 2, Source.RECOMPUTE, None),
        ]
        assert b.service.numbers()["store_watches_connected"] == 1


async def test_a_snapshot_above_the_usual_message_limit_arrives() -> None:
    async with bench("a") as b:
        store = b.stores["a"]
        await store.asked_for()
        store.say.put_nowait(snapshot("a", 1, *(i.to_bytes(16, "little") for i in range(300_000))))
        async with asyncio.timeout(10):
            while not b.known(300_000)():  # noqa: ASYNC110  it is taken in by parts
                await asyncio.sleep(0.01)


async def test_a_gap_is_answered_by_watching_anew_from_a_snapshot() -> None:
    async with bench("a") as b:
        store = b.stores["a"]
        assert await store.asked_for() == (LIFE, 0)
        store.say.put_nowait(snapshot("a", 3, KEYS[0]))
        store.say.put_nowait(stored("a", 9, KEYS[1]))
        assert await store.asked_for() == (LIFE, 0)
        store.say.put_nowait(snapshot("a", 9, *KEYS))
        await b.until(lambda: b.service.conductor.next_number(NodeId("a"), LIFE) == 10)
        assert b.service.numbers()["event_gaps"] == 1
        ((first, count, source, node),) = [(s.first, s.count, s.source, s.node) for s in (await b.place()).segments]
        assert (first, count, source, node) == (0, 6, Source.FETCH, "a")


async def test_an_empty_batch_that_names_a_later_number_shows_the_gap() -> None:
    async with bench("a") as b:
        store = b.stores["a"]
        await store.asked_for()
        store.say.put_nowait(snapshot("a", 3, KEYS[0]))
        store.say.put_nowait(frames.encode_events(EventBatch("a", LIFE, 4, ())))
        store.say.put_nowait(frames.encode_events(EventBatch("a", LIFE, 6, ())))
        assert await store.asked_for() == (LIFE, 0)


async def test_a_stream_that_says_nothing_is_taken_up_anew() -> None:
    async with bench("a", silent_after_ms=50) as b:
        store = b.stores["a"]
        await store.asked_for()
        store.say.put_nowait(snapshot("a", 3, KEYS[0]))
        assert await store.asked_for() == (LIFE, 4)


async def test_a_cut_stream_is_taken_up_where_it_ended() -> None:
    async with bench("a") as b:
        store = b.stores["a"]
        await store.asked_for()
        store.say.put_nowait(snapshot("a", 3, KEYS[0]))
        store.say.put_nowait(stored("a", 4, KEYS[1]))
        store.say.put_nowait(None)
        assert await store.asked_for() == (LIFE, 5)
        store.say.put_nowait(stored("a", 5, KEYS[2]))
        await b.until(b.known(3))


@pytest.mark.parametrize(
    "frame",
    [b"", b"\x02\x01garbage", b"\x09\x09", frames.encode_events(EventBatch("other", LIFE, 1, ()))],
    ids=["empty", "malformed", "unknown kind", "another node's"],
)
async def test_a_bad_frame_ends_the_call_and_nothing_else(frame: bytes) -> None:
    async with bench("a") as b:
        store = b.stores["a"]
        await store.asked_for()
        store.say.put_nowait(frame)
        await store.asked_for()
        store.say.put_nowait(snapshot("a", 1, KEYS[0]))
        await b.until(b.known(1))
        assert b.service.numbers()["store_watch_bad_frames"] == 1


async def test_a_restarted_store_is_watched_anew_and_a_lost_one_no_longer() -> None:
    async with bench("a") as b:
        store = b.stores["a"]
        await store.asked_for()
        store.say.put_nowait(snapshot("a", 3, *KEYS))
        await b.until(b.known(6))
        b.peers.say(member("store-a", Role.STORE, "a", store.address, life=2))
        assert (await b.place()).segments[0].source is Source.RECOMPUTE
        assert await store.asked_for() == (2, 0)
        store.left.clear()
        store.say.put_nowait(snapshot("a", 0, KEYS[0], life=2))
        await b.until(lambda: b.service.conductor.next_number(NodeId("a"), Incarnation(2)) == 1)
        b.peers.say(member("store-a", Role.STORE, "a", store.address, life=2), Liveness.SILENT)
        await store.left.wait()
        assert b.service.numbers()["store_watches_connected"] == 0
        refusal = await b.refused()
        assert refusal.reason == "no_path"
        assert "store node" in refusal.message


async def test_an_unreachable_store_is_tried_again_until_it_answers() -> None:
    async with bench("a") as b:
        await b.stores["a"].asked_for()
        server = channels.server()
        store = ScriptedStore()
        pb.store_rpc.add_StoreServicer_to_server(store, server)
        port = server.add_insecure_port("127.0.0.1:0")
        b.peers.say(member("store-b", Role.STORE, "b", f"127.0.0.1:{port}"))  # bound, but not serving yet
        await server.start()
        assert await store.asked_for() == (LIFE, 0)
        store.say.put_nowait(snapshot("b", 1, KEYS[0]))
        await b.until(b.known(1))
        b.peers.say(member("store-b", Role.STORE, "b", f"127.0.0.1:{port}"), Liveness.GONE)
        await server.stop(None)


async def test_reports_bring_estimates_and_device_blocks() -> None:
    async with bench("a") as b:
        timings = tuple(PrefillTiming(n, 0, n / 1_000) for n in (50, 100, 200, 400))
        await b.report(prefills=timings, g1_frames=(stored("prefill-0", 1, *KEYS[:3], tier=Tier.G1),))
        placement = await b.place(tokens=400)
        assert placement.segments[0].source is Source.REUSE
        assert placement.segments[0].count == 3
        assert placement.predicted_ttft_ms == pytest.approx(400 - 3 * LAYOUT.block_tokens, rel=0.1)
        await b.report(g1_frames=(stored("prefill-0", 9, KEYS[0], tier=Tier.G1),))
        assert (await b.place()).segments[0].count == 1, "after a gap only what is told from then on is claimed"
        refusal = await b.refused(targets=Targets(ttft_ms=1.0))
        assert refusal.reason == "targets_missed"
        assert refusal.retry_after_s > 0


async def test_finished_releases_the_booking_and_explain_tells_the_story() -> None:
    async with bench("a") as b:
        placement = await b.place("story")
        assert b.service.numbers()["bookings"] == 1
        done = Finished("story", 1, placement.booking, 120.0, 15.0, 8, 64)
        await b.stub.Finished(to_wire(done, pb.conductor.FinishedRequest()))
        assert b.service.numbers()["bookings"] == 0
        reply = await b.stub.Explain(pb.conductor.ExplainRequest(request="story"))
        told = json.loads(reply.json)
        assert reply.found
        assert told["conductor"] == "conductor-0"
        assert told["decisions"][0]["actual"]["ttft_ms"] == 120.0
        assert not (await b.stub.Explain(pb.conductor.ExplainRequest(request="nobody"))).found


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (pb.conductor.PlaceRequest(request="r"), "prompt_tokens"),
        (pb.conductor.PlaceRequest(request="r", prompt_tokens=64, keys=[b"short"]), "keys"),
        (pb.conductor.PlaceRequest(request="r", prompt_tokens=1, keys=[b"k" * 16] * 2), "keys"),
    ],
)
async def test_a_malformed_request_is_refused_by_field(request_: pb.conductor.PlaceRequest, named: str) -> None:
    async with bench("a") as b:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await b.stub.Place(request_).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in (caught.value.details() or "")


@pytest.mark.parametrize("frame", [b"nonsense", stored("decode-0", 1, KEYS[0], tier=Tier.G1)])
async def test_device_events_that_are_malformed_or_of_another_worker_are_refused(frame: bytes) -> None:
    async with bench("a") as b:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await b.report(g1_frames=(frame,))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
