"""Landings and fetches by every carrier between nodes: store nodes and writers of this process, over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.store import LAYOUT, Roll, block_bytes, block_keys, config, member, store_node, until, worker
from support.toll_gate import Toll, TollGate

from moonpool.core.config import TransferConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId, Role
from moonpool.core.landing import LandingSlot
from moonpool.core.membership import Liveness, Member
from moonpool.core.request import Attempt, Request, SamplingParams
from moonpool.kvstore.claims import Life
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.push_target import LandingState
from moonpool.kvstore.pusher import Pusher, PushLanding
from moonpool.kvstore.transfer import tcp_wire
from moonpool.kvstore.transfer.carrier import Endpoint, Receiver
from moonpool.kvstore.transfer.choose import NoticesOf
from moonpool.kvstore.transfer.tcp_receiver import TcpReceiver

TAIL = 5
PAGES = np.random.default_rng(5).integers(0, 255, (8, LAYOUT.layers, LAYOUT.slice_bytes), dtype=np.uint8)


@pytest.fixture(params=["tcp", "ucx"])
def carrier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def pusher_of(roll: Roll, node: StoreNode, name: str = "prefill-0") -> AsyncIterator[Pusher]:
    me = member(name, Role.PREFILL, "z")
    roll.say(me)
    one = Pusher(me, LAYOUT, PAGES, node.config.transfer)
    one.prepare()
    try:
        yield one
    finally:
        await one.close()


async def grant(pusher: Pusher, node: StoreNode, name: str, keys: list[bytes], tail: int) -> PushLanding:
    request = Request(RequestId(name), (1,), SamplingParams(max_tokens=1), bytes(16), ())
    return await pusher.grant(
        node.member,
        Attempt(request, 1),
        keys,
        first_block=0,
        tail_valid=tail,
        reader=MemberId("decode-0"),
        reader_incarnation=Incarnation(1),
    )


def push(landing: PushLanding, layers: range = range(LAYOUT.layers)) -> None:
    for layer in layers:
        landing.push_layer(0, layer, [(slot.block, slot.block, slot.valid) for slot in landing.landing.slots])


async def test_prompts_with_tails_land_and_what_really_carried_them_is_named(tmp_path: Path, carrier: str) -> None:
    roll = Roll()
    settings = config(tmp_path, transfer={"carrier": carrier})
    async with store_node(settings, roll) as node, worker(node) as (client, heard), pusher_of(roll, node) as pusher:
        landings = [await grant(pusher, node, f"r{i}", block_keys(f"k{i}", 2), TAIL) for i in range(3)]
        for landing in landings:
            await asyncio.to_thread(push, landing)
        into = np.empty(LAYOUT.slice_bytes, np.uint8)
        for landing in landings:
            drained, id = await landing.drain(), landing.landing.id
            assert landing.failure is None
            assert drained.carrier == carrier
            await until(
                lambda id=id: sum(one.landing == id for one in heard.landed) == LAYOUT.layers, "its reader hears of all"
            )
            for slot in landing.landing.slots:
                for layer in range(LAYOUT.layers):
                    client.read_slice(slot.slot, layer, into, slot.valid)
                    for offset, length in LAYOUT.pieces(slot.valid):
                        assert (into[offset : offset + length] == PAGES[slot.block, layer, offset : offset + length]).all()
            await client.end_landing(id)
        assert len(heard.landed) == 3 * LAYOUT.layers
        assert pusher.carriers() == f"{carrier} (tcp)"
        assert node.words()["carrier"] == carrier
        assert node.words().get("ucx_transport", "tcp") == "tcp"
        assert node.numbers()[f"bytes_landed_{carrier}"] > 0
        assert node.numbers()["receiver_open"] == 0
        assert node.numbers()["slots_reserved"] == 0


async def test_an_endpoint_made_anew_under_load_loses_nothing(tmp_path: Path, carrier: str) -> None:
    roll = Roll()
    settings = config(tmp_path, slots=64, transfer={"carrier": carrier})
    async with store_node(settings, roll) as node, worker(node) as (client, _), pusher_of(roll, node) as pusher:
        landings = [await grant(pusher, node, f"r{i}", block_keys(f"k{i}", 7), TAIL) for i in range(4)]
        for i, landing in enumerate(landings):
            await asyncio.to_thread(push, landing)
            if i in (0, 2):
                await node.remake()
        for landing in landings:
            await asyncio.wait_for(landing.drain(), 30)
            assert landing.failure is None
            assert await client.lookup([slot.slot.key for slot in landing.landing.slots[:-1]]) == 7
            await client.end_landing(landing.landing.id)
        assert node.generation == 3
        assert node.numbers()["slots_fenced"] == 0
        assert node.numbers()["slots_reserved"] == 0


async def test_blocks_are_fetched_from_another_node(tmp_path: Path, carrier: str) -> None:
    roll = Roll()
    settings = config(tmp_path, transfer={"carrier": carrier})
    async with store_node(settings, roll, "a") as here, store_node(settings, roll, "b") as there:
        async with worker(here) as (client, _), worker(there, "decode-1") as (other, _):
            keys = block_keys("k", 3)
            await other.publish([(key, block_bytes(key)) for key in keys])
            fetched = await client.fetch(keys, NodeId("b"), there.member.address, 10_000)
            assert [slot.key for slot in fetched.ticket.slots] == keys
            assert fetched.carrier == carrier
            assert 3 * LAYOUT.block_bytes < fetched.bytes < 3 * LAYOUT.block_bytes + LAYOUT.layers * 400
            block = np.empty(LAYOUT.block_bytes, np.uint8)
            for slot in fetched.ticket.slots:
                for layer in range(LAYOUT.layers):
                    start = layer * LAYOUT.slice_bytes
                    client.read_slice(slot, layer, block[start : start + LAYOUT.slice_bytes], LAYOUT.block_tokens)
                assert (block == block_bytes(slot.key)).all()
            await client.unpin(fetched.ticket)
            assert here.numbers()["slots_reserved"] == 0
            assert here.numbers()["receiver_open"] == 0
            assert there.numbers()["pins"] == 0


async def test_shared_memory_lanes_between_node_ids_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll = Roll()
    async with store_node(config(tmp_path), roll) as node:
        pusher = Pusher(
            member("prefill-0", Role.PREFILL, "z"), LAYOUT, PAGES, config(tmp_path, transfer={"carrier": "ucx"}).transfer
        )
        monkeypatch.setenv("UCX_TLS", "all")
        with pytest.raises(ConfigError, match="ucx_tls: 'all' between two node ids on one machine"):
            await grant(pusher, node, "r", block_keys("k", 1), 0)
        assert node.numbers()["slots_free"] == 16


async def test_two_nodes_left_to_choose_speak_plain_sockets_where_there_is_no_rdma(tmp_path: Path) -> None:
    roll = Roll()
    settings = config(tmp_path, transfer={"carrier": "auto"})
    async with store_node(settings, roll) as node, worker(node), pusher_of(roll, node) as pusher:
        landing = await grant(pusher, node, "r", block_keys("k", 2), TAIL)
        await asyncio.to_thread(push, landing)
        assert (await landing.drain()).carrier == "tcp"
        assert landing.failure is None


async def test_a_carrier_asked_for_by_name_that_the_node_lacks_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    roll = Roll()
    async with store_node(config(tmp_path, transfer={"carrier": "tcp"}), roll) as node, worker(node) as (client, heard):
        me = member("prefill-0", Role.PREFILL, "z")
        roll.say(me)
        pusher = Pusher(me, LAYOUT, PAGES, config(tmp_path, transfer={"carrier": "ucx"}).transfer)
        with pytest.raises(ConfigError, match="can use ucx, node a has tcp"):
            await grant(pusher, node, "r", block_keys("k", 2), 0)
        await pusher.close()
        await until(lambda: bool(heard.failed), "its reader hears that nothing will come")
        await client.end_landing(heard.failed[0].landing)
        assert node.numbers()["slots_free"] == 16


async def test_blocks_are_not_fetched_by_a_carrier_that_one_side_lacks(tmp_path: Path) -> None:
    roll = Roll()
    here_only, there_only = (config(tmp_path, transfer={"carrier": name}) for name in ("tcp", "ucx"))
    async with store_node(here_only, roll, "a") as here, store_node(there_only, roll, "b") as there:
        async with worker(here) as (client, _), worker(there, "decode-1") as (other, _):
            keys = block_keys("k", 3)
            await other.publish([(key, block_bytes(key)) for key in keys])
            fetched = await client.fetch(keys, NodeId("b"), there.member.address, 10_000)
            assert fetched.ticket.slots == () and fetched.bytes == 0
            numbers = here.numbers()
            assert numbers["slots_free"] == 16 and numbers["fetches_failed"] == 1


async def test_room_is_made_by_cutting_off_the_silent_writer_and_nobody_else(tmp_path: Path) -> None:
    roll = Roll()
    settings = config(tmp_path, slots=8, transfer={"carrier": "tcp"})
    async with store_node(settings, roll) as node, worker(node) as (client, _):
        async with pusher_of(roll, node, "prefill-0") as silent, pusher_of(roll, node, "prefill-1") as well:
            lost = await grant(silent, node, "lost", block_keys("a", 4), 0)
            await asyncio.to_thread(push, lost, range(1))
            first = await grant(well, node, "first", block_keys("b", 4), 0)
            await asyncio.to_thread(push, first, range(1))
            endpoint = first._endpoint
            roll.say(member("prefill-0", Role.PREFILL, "z"), Liveness.SILENT)
            await client.end_landing(lost.landing.id)
            second = await grant(well, node, "second", block_keys("c", 4), 0)  # there is room only for it where lost was
            await asyncio.to_thread(push, second)
            await asyncio.to_thread(push, first, range(1, LAYOUT.layers))
            for landing in (first, second):
                await landing.drain()
                assert landing.failure is None and landing._endpoint is endpoint
                require_bytes(node, landing)
            ask = lost._target.state

            async def ask_late(landing: int, wait_s: float) -> LandingState:
                """It has a new endpoint by now, and goes on computing before it hears that its landing is over."""
                await asyncio.to_thread(push, lost, range(2, 3))
                return await ask(landing, wait_s)

            lost._target.state = ask_late  # type: ignore[method-assign]
            PAGES[:] += 1  # so that what it sends now differs from what lies there
            await asyncio.to_thread(push, lost, range(1, 2))  # it awakes, and goes on
            await until(lambda: lost.failure is not None, "it hears that its landing is over")
            await lost.drain()
            await asyncio.to_thread(pushed_to_the_end, lost)
            PAGES[:] -= 1
            lost._target.state = ask  # type: ignore[method-assign]
            assert lost.failure is not None
            for landing in (first, second):
                require_bytes(node, landing)
                await client.end_landing(landing.landing.id)
            numbers = node.numbers()
            assert (numbers["writers_cut"], numbers["endpoint_remakes"], numbers["slots_fenced"]) == (1, 0, 0)
            roll.say(member("prefill-0", Role.PREFILL, "z"))  # it counts as live again
            again = await grant(silent, node, "again", block_keys("d", 4), 0)
            await asyncio.to_thread(push, again)
            await again.drain()
            assert again.failure is None
            require_bytes(node, again)


def pushed_to_the_end(landing: PushLanding) -> None:
    """Each push is done, failed, or withdrawn before it began."""
    for one in landing._pushes:
        with suppress(CancelledError):
            one.future.exception(5)


def require_bytes(node: StoreNode, landing: PushLanding) -> None:
    for slot in landing.landing.slots:
        require_slot(node, slot)


def require_slot(node: StoreNode, slot: LandingSlot) -> None:
    at = slot.slot.offset
    held = node.regions.views[slot.slot.region][at : at + LAYOUT.block_bytes].reshape(LAYOUT.layers, -1)
    assert (held == PAGES[slot.block]).all()


class Gated(TcpReceiver):
    """Reached through a gate only."""

    gate: TollGate

    def describe(self, writer: Life | None = None) -> Endpoint:
        real = super().describe(writer)
        return replace(real, metadata=replace(tcp_wire.Address.decode(real.metadata), port=self.gate.port).encode())


@pytest.mark.parametrize("toll", [Toll(up=3_000), Toll(down=10), Toll(up=0), Toll(up=20_000)], ids=str)
async def test_a_connection_that_breaks_while_a_landing_is_filled_is_mended_and_its_slots_serve_again(
    tmp_path: Path, toll: Toll
) -> None:
    roll, made = Roll(), list[Gated]()

    def receivers(_: TransferConfig, who: Member, heard: NoticesOf) -> list[Receiver]:
        made.append(Gated(who, heard("tcp")))
        return list(made)

    settings = config(tmp_path, slots=8, transfer={"carrier": "tcp"})
    async with store_node(settings, roll, receivers=receivers) as node, worker(node) as (client, _):
        address = tcp_wire.Address.decode(TcpReceiver.describe(made[0]).metadata)
        with TollGate(address.host, address.port, toll) as gate:
            made[0].gate = gate
            async with pusher_of(roll, node) as pusher:
                for name in ("first", "second", "third"):
                    landing = await grant(pusher, node, name, block_keys(name, 7), TAIL)
                    await asyncio.to_thread(push, landing)
                    await asyncio.wait_for(landing.drain(), 10)
                    assert landing.failure is None
                    for slot in landing.landing.slots[:-1]:
                        require_slot(node, slot)
                    await client.end_landing(landing.landing.id)
        assert node.numbers()["endpoint_remakes"] == 0
