"""A store node, its host's workers and a writer, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.store import LAYOUT, Roll, block_bytes, block_keys, config, member, store_node, until, worker, writer

from moonpool.core.errors import ConfigError, DigestMismatch, InvalidRequest, LayoutMismatch, PeerSilent, Reason
from moonpool.core.events import BlockChange
from moonpool.core.ids import Incarnation, NodeId, Role
from moonpool.core.landing import Ticket
from moonpool.core.membership import Liveness
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.node import StoreNode
from moonpool.wire import pb
from moonpool.wire.convert import to_wire
from moonpool.wire.frames import decode_events, decode_snapshot


async def test_blocks_published_by_a_worker_are_found_pinned_and_read_back(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, _):
        keys = block_keys("k", 3)
        assert await client.publish([(key, block_bytes(key)) for key in keys]) == 3
        assert await client.lookup([*keys, b"x" * 16]) == 3
        ticket = await client.pin([*keys, b"x" * 16])
        assert [slot.key for slot in ticket.slots] == keys
        page = np.empty(LAYOUT.block_bytes, np.uint8)
        for layer in range(LAYOUT.layers):
            start = layer * LAYOUT.slice_bytes
            client.read_slice(ticket.slots[1], layer, page[start : start + LAYOUT.slice_bytes], LAYOUT.block_tokens)
        assert (page == block_bytes(keys[1])).all()
        await client.unpin(ticket)
        await client.unpin(ticket)
        assert node.numbers()["pins"] == 0


async def test_a_pushed_prompt_lands_is_relayed_and_sealed(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, heard), writer(node) as pusher:
        keys = block_keys("p", 2)
        landing = await pusher.grant("r1", keys, tail_valid=5, reader="decode-0", reader_incarnation=1)
        assert [slot.block for slot in landing.slots] == [0, 1, 2]
        await pusher.push(landing)
        await until(lambda: len(heard.landed) == LAYOUT.layers, "all layers relayed")
        assert {(one.layer, one.blocks) for one in heard.landed} == {(layer, (0, 1, 2)) for layer in range(LAYOUT.layers)}
        tail = landing.slots[2]
        into = np.empty(LAYOUT.slice_bytes, np.uint8)
        client.read_slice(tail.slot, 0, into, tail.valid)
        assert not into.reshape(4, 16, 16)[:, 5:].any()
        assert await client.lookup(keys) == 2
        await pusher.drain(landing)
        await client.end_landing(landing.id)
        await client.end_landing(landing.id)
        assert node.numbers()["slots_sealed"] == 2
        assert node.numbers()["slots_free"] == 14
        assert node.numbers()["pins"] == 0


async def test_a_worker_that_leaves_takes_its_pins_with_it(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node:
        async with worker(node) as (client, _):
            keys = block_keys("k", 2)
            await client.publish([(key, block_bytes(key)) for key in keys])
            await client.pin(keys)
            assert node.numbers()["pidfds"] == 1
        await until(lambda: node.numbers()["sessions"] == 0, "the session ended")
        assert node.numbers()["pins"] == 0
        assert node.numbers()["tickets"] == 0


async def test_a_bad_slice_is_counted_left_missing_and_lands_when_pushed_again(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, heard), writer(node) as pusher:
        landing = await pusher.grant("r1", block_keys("p", 1), reader="decode-0", reader_incarnation=1)
        (slot,) = landing.slots
        right = block_bytes(slot.slot.key)
        wrong = right.copy()
        wrong[LAYOUT.slice_bytes + 3] ^= 1
        notice = pusher.write(slot, 1, right)
        pusher.write(slot, 1, wrong)
        await pusher.notify(pusher.frame(landing, 1, [notice]))
        await pusher.push(landing, layers=[0, 2])
        state = await pusher.stub.LandingState(pb.store.LandingRequest(landing=landing.id, wait_ms=5000))
        assert state.known
        assert [(one.block, one.layer) for one in state.rejected] == [(0, 1)]
        assert [(one.block, one.layer) for one in state.missing] == [(0, 1)]
        assert node.numbers()["digest_mismatches_landing"] == 1
        assert await client.lookup(block_keys("p", 1)) == 0
        await pusher.push(landing, layers=[1])
        assert await client.lookup(block_keys("p", 1)) == 1
        await pusher.push(landing)  # duplicates change nothing
        await until(lambda: len(heard.landed) == 3, "each layer is told once")
        assert node.numbers()["slices_repeated"] == 3


async def test_notices_of_nobody_are_ignored_and_malformed_ones_refused(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, writer(node) as pusher:
        landing = await pusher.grant("r1", block_keys("p", 1))
        right = pusher.frame(landing, 0, [pusher.write(landing.slots[0], 0, block_bytes(landing.slots[0].slot.key))])
        await pusher.notify(pusher.frame(replace(landing, id=99), 0, []), pusher.frame(replace(landing, attempt=2), 0, []))
        assert node.numbers()["notices_ignored"] == 2
        for frame in (b"", b"\1\1garbage", right[:-1], right + b"x", bytes(1 << 20)):
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await pusher.notify(frame)
            assert e.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert node.numbers()["notices_malformed"] == 5
        await pusher.notify(right)
        assert node.numbers()["bytes_landed_segment"] == LAYOUT.slice_bytes


async def test_grants_are_refused_by_name_and_grant_nothing(tmp_path: Path) -> None:
    roll = Roll()
    async with store_node(config(tmp_path, slots=4), roll) as node, writer(node) as pusher:
        full = await pusher.ask("r1", block_keys("p", 5))
        assert full.error.reason == Reason.BUSY
        assert "5 slots needed, 4 free" in full.error.message
        unheard = await pusher.ask("r1", block_keys("p", 1), reader="decode-0", reader_incarnation=1)
        assert unheard.error.reason == Reason.BUSY
        other = to_wire(replace(LAYOUT, layers=LAYOUT.layers + 1), pb.types.KVLayout())
        mismatch = await pusher.stub.Grant(pb.store.GrantRequest(request="r", writer="p", layout=other))
        assert mismatch.error.reason == Reason.LAYOUT_MISMATCH
        assert f"layers {LAYOUT.layers} here, {LAYOUT.layers + 1} at p" in mismatch.error.message
        for bad in (
            {"keys": [b"short"]},
            {"keys": [b"k" * 16] * 2},
            {"keys": [], "tail_valid": 16},
            {"keys": [], "parent": b"short"},
        ):
            refused = await pusher.ask("r1", **bad)
            assert refused.error.reason == Reason.INVALID_REQUEST
        roll.say(replace(pusher.me, incarnation=Incarnation(2)))
        assert (await pusher.ask("r1", block_keys("p", 1))).error.reason == Reason.PEER_SILENT
        assert node.numbers()["slots_free"] == 4


async def test_a_worker_of_another_layout_node_or_hash_key_is_refused_with_both_values(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node:
        node.member = node.lives._member = replace(node.member, hash_key_id="aa")
        me = member("decode-0", Role.DECODE, "a")
        for wrong, error, words in (
            (replace(me, layout=replace(LAYOUT, block_tokens=32)), LayoutMismatch, "block_tokens 16 here, 32 at decode-0"),
            (replace(me, node=NodeId("b")), InvalidRequest, "decode-0 is on b, this store node on a"),
            (replace(me, hash_key_id="bb"), LayoutMismatch, "hash key aa here, bb at decode-0"),
        ):
            with pytest.raises(error, match=words):
                await WorkerStore.connect(
                    node.member.address, wrong, LAYOUT, on_landed=print, on_failed=print, on_lost=lambda: None
                )
        assert node.numbers()["sessions"] == 0


async def test_nobody_there_is_an_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(PeerSilent, match=r"127\.0\.0\.1:1"):
        await WorkerStore.connect(
            "127.0.0.1:1",
            member("decode-0", Role.DECODE, "a"),
            LAYOUT,
            on_landed=print,
            on_failed=print,
            on_lost=lambda: None,
        )


async def test_a_silent_worker_loses_its_pins_and_its_landings_are_fenced_until_their_writer_drains(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, writer(node) as pusher:
        async with worker(node) as (client, heard):
            await client.publish([(key, block_bytes(key)) for key in block_keys("k", 2)])
            await client.pin(block_keys("k", 2))
            landing = await pusher.grant("r1", block_keys("p", 2), reader="decode-0", reader_incarnation=1)
            client._session._beat_s = 60.0  # it no longer beats, but its stream stays open
            await until(lambda: bool(heard.lost), "the node ended the session")
            with pytest.raises(PeerSilent):
                await client.pin(block_keys("k", 2))
            numbers = node.numbers()
            assert (numbers["pins"], numbers["tickets"], numbers["slots_fenced"]) == (0, 0, 2)
            await pusher.push(landing)
            assert node.numbers()["notices_ignored"] == 3
            await pusher.drain(landing)
            assert node.numbers()["slots_fenced"] == 0


async def test_a_process_that_was_frozen_itself_blames_nobody(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, heard):
        time.sleep(1.0)  # noqa: ASYNC251 the whole loop stands still, as in a stopped process
        await asyncio.sleep(0.3)
        assert not heard.lost
        assert await client.lookup(block_keys("k", 1)) == 0


async def test_a_writer_said_to_be_silent_fails_its_readers_and_its_slots_wait_for_the_remake(tmp_path: Path) -> None:
    roll = Roll()
    async with store_node(config(tmp_path, slots=4), roll) as node, worker(node) as (client, heard), writer(node) as pusher:
        roll.say(pusher.me)
        landing = await pusher.grant("r1", block_keys("p", 3), reader="decode-0", reader_incarnation=1)
        await pusher.push(landing, layers=[0])
        roll.say(pusher.me, Liveness.SILENT)
        await until(lambda: bool(heard.failed), "the reader hears")
        assert heard.failed[0].landing == landing.id
        assert heard.failed[0].error.reason is Reason.PEER_SILENT
        assert heard.failed[0].error.peer == "prefill-0"
        await client.end_landing(landing.id)
        assert node.numbers()["slots_fenced"] == 3
        assert not (await pusher.stub.LandingState(pb.store.LandingRequest(landing=landing.id))).known
        async with writer(node, "prefill-1") as second:
            roll.say(second.me)
            await second.grant("r1", block_keys("p", 3), attempt=2)  # makes the endpoint anew for room
        assert node.numbers()["endpoint_remakes"] == 1
        assert node.numbers()["endpoint_generation"] == 2
        assert node.numbers()["slots_fenced"] == 0


async def test_a_writer_that_maps_the_region_stays_fenced_whatever_the_endpoint_does(tmp_path: Path) -> None:
    roll = Roll()
    async with store_node(config(tmp_path, slots=4), roll) as node, writer(node, on_node="a") as pusher:
        roll.say(pusher.me)
        await pusher.grant("r1", block_keys("p", 3))
        roll.say(pusher.me, Liveness.SILENT)
        assert node.numbers()["slots_fenced"] == 3
        await pusher.stub.RemakeEndpoint(pb.types.Empty())
        assert node.numbers()["slots_fenced"] == 3
        roll.say(pusher.me, Liveness.GONE)
        assert node.numbers()["slots_fenced"] == 0


async def test_a_newer_life_ends_the_older_ones_session_and_claims(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, heard):
        stub = client._stub
        await stub.Reserve(pb.store.KeysRequest(session=client._number, keys=block_keys("k", 2)))
        assert node.numbers()["slots_reserved"] == 2
        async with worker(node, incarnation=2):
            await until(lambda: bool(heard.lost), "the older life hears that it is over")
            assert node.numbers()["slots_reserved"] + node.numbers()["slots_fenced"] == 0
            assert node.numbers()["pidfds"] == 1
            with pytest.raises(PeerSilent, match="has a newer life"):
                async with worker(node, incarnation=1):
                    pass


async def test_a_process_that_comes_back_under_a_new_number_is_not_taken_for_its_own_successor(tmp_path: Path) -> None:
    """It fell silent, dropped everything and joined anew: the older life is over, and nobody is killed for it."""
    settings = config(tmp_path, timing={"kill_after_ms": 5_000})
    async with store_node(settings, Roll()) as node, worker(node) as (client, heard):
        await client._stub.Reserve(pb.store.KeysRequest(session=client._number, keys=block_keys("k", 2)))
        for session in node.sessions:
            node.sessions.end(session, "no beat")
        await until(lambda: bool(heard.lost), "the older life hears that it is over")
        assert node.numbers()["slots_fenced"] == 2
        async with worker(node, incarnation=2) as (again, _):
            assert node.numbers()["slots_fenced"] == 0
            assert node.numbers()["pidfds"] == 1
            assert await again.lookup(block_keys("k", 2)) == 0


async def test_publishing_skips_quietly_what_is_there_and_what_finds_no_room(tmp_path: Path) -> None:
    async with store_node(config(tmp_path, slots=4), Roll()) as node, worker(node) as (client, _):
        keys = block_keys("k", 6)
        blocks = [(key, block_bytes(key)) for key in keys]
        assert await client.publish(blocks[:2]) == 2
        ticket = await client.pin(keys)
        assert await client.publish(blocks) == 2
        assert await client.publish(blocks[5:], parent=keys[4]) == 0
        assert client.counted["published_sealed"] == 2
        assert client.counted["published_full"] == 2
        assert client.counted["published_no_parent"] == 1
        await client.unpin(ticket)
        assert node.numbers()["slots_reserved"] == 0


async def test_sixteen_workers_that_store_one_prefix_at_once_keep_one_copy(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, AsyncExitStack() as stack:
        clients = [(await stack.enter_async_context(worker(node, f"decode-{i}")))[0] for i in range(16)]
        blocks = [(key, block_bytes(key)) for key in block_keys("k", 4)]
        stored = await asyncio.gather(*(client.publish(blocks) for client in clients))
        assert sum(stored) == 4
        assert node.numbers()["slots_sealed"] == 4
        assert node.numbers()["slots_reserved"] == 0
        assert await clients[0].lookup(block_keys("k", 4)) == 4


async def test_a_cancelled_publish_gives_its_slots_back_and_a_cancelled_pin_its_ticket(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, _):
        blocks = [(key, block_bytes(key)) for key in block_keys("k", 4)]
        for delay_ms in (0, 1, 2, 4, 8):
            publishing = asyncio.create_task(client.publish(blocks))
            await asyncio.sleep(delay_ms / 1e3)
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
        await until(lambda: node.numbers()["slots_reserved"] == 0, "nothing stays reserved")
        await client.publish(blocks)
        for delay_ms in (0, 1, 2, 4):
            pinning = asyncio.create_task(client.pin(block_keys("k", 4)))
            await asyncio.sleep(delay_ms / 1e3)
            pinning.cancel()
            if isinstance(ticket := (await asyncio.gather(pinning, return_exceptions=True))[0], Ticket):
                await client.unpin(ticket)
        await until(lambda: node.numbers()["pins"] == 0, "nothing stays pinned")


async def test_a_reader_whose_copy_is_wrong_quarantines_the_block(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, _):
        keys = block_keys("k", 3)
        await client.publish([(key, block_bytes(key)) for key in keys])
        ticket = await client.pin(keys)
        slot = ticket.slots[1]
        client.regions[slot.region][slot.offset + 7] ^= 1
        into = np.empty(LAYOUT.slice_bytes, np.uint8)
        client.read_slice(ticket.slots[0], 0, into, 16)
        with pytest.raises(DigestMismatch, match="layer 0 of block"):
            client.read_slice(slot, 0, into, 16)
        with pytest.raises(DigestMismatch):  # right bytes in the wrong place
            client.read_slice(replace(ticket.slots[0], key=keys[2]), 0, into, 16)
        await client.quarantine(slot.key, 0, "decode")
        assert await client.lookup(keys) == 1
        await client.unpin(ticket)
        assert node.numbers()["slots_sealed"] == 1
        assert node.numbers()["digest_mismatches_decode"] == 1


@pytest.mark.parametrize(("how", "filled"), [({"engine": {"poison": True}}, 0xFF), ({"security": {"zeroise": True}}, 0)])
async def test_freed_slots_are_overwritten_where_asked_for(tmp_path: Path, how: dict[str, Any], filled: int) -> None:
    async with store_node(config(tmp_path, **how), Roll()) as node, worker(node) as (client, _):
        await client.publish([(key, block_bytes(key)) for key in block_keys("k", 1)])
        (slot,) = (await client.pin(block_keys("k", 1))).slots
        await client._stub.Clear(pb.store.KeysRequest())
        assert (client.regions[slot.region][slot.offset : slot.offset + 64] != filled).any(), "it is pinned"
        await client.quarantine(slot.key, 0, "decode")
        await client.close()
        await until(lambda: node.numbers()["slots_free"] == 16, "the pin ended with the session")
        assert (node.regions.views[slot.region][slot.offset : slot.offset + LAYOUT.slot_bytes] == filled).all()


async def test_events_reach_a_subscriber_over_the_wire(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, _):
        await client.publish([(key, block_bytes(key)) for key in block_keys("k", 2)])
        stream = client._stub.Watch(pb.store.WatchRequest())
        shot = decode_snapshot((await stream.read()).frame)
        assert shot.entries[0][1] == tuple(block_keys("k", 2))
        await client.quarantine(block_keys("k", 2)[1], 0, "decode")
        batch = decode_events((await stream.read()).frame)
        assert batch.number == shot.number + 1
        assert batch.events[0].change is BlockChange.REMOVED
        stream.cancel()
        await until(lambda: node.numbers()["watchers"] == 0, "the subscriber is forgotten")


async def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    for settings, words in (
        (config(tmp_path, transfer={"carrier": "memory"}), "transfer.carrier"),
        (config(tmp_path, store={"pool_bytes": 1 << 60}), "store.pool_bytes"),
        (config(tmp_path, cluster={"state_dir": "/proc/nowhere"}), "cluster.state_dir"),
    ):
        with pytest.raises(ConfigError, match=words):
            await StoreNode.start(settings, member("store-a", Role.STORE, "a"), LAYOUT, Roll())
        assert list(tmp_path.iterdir()) == []


async def test_a_node_that_leaves_tells_its_workers(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with store_node(config(tmp_path), Roll()) as node:
            client, heard = await stack.enter_async_context(worker(node))
            await client.publish([(key, block_bytes(key)) for key in block_keys("k", 1)])
            ticket = await client.pin(block_keys("k", 1))
        await until(lambda: bool(heard.lost), "the session is over")
        into = np.empty(LAYOUT.slice_bytes, np.uint8)
        client.read_slice(ticket.slots[0], 0, into, 16)  # what is mapped stays mapped
        with pytest.raises(PeerSilent):
            await client.lookup(block_keys("k", 1))
        await client.unpin(ticket)
    assert list(tmp_path.glob("moonpool+*")) == []
