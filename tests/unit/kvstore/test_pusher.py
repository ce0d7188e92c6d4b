"""A pusher, a store node and a reader, in one process with real gRPC: the memory carrier goes wrong on order."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.store import LAYOUT, Heard, Roll, block_bytes, block_keys, config, member, store_node, until, worker

from moonpool.core.config import TransferConfig
from moonpool.core.errors import Busy, ConfigError, LayoutMismatch, PeerSilent, Reason, TransferFailed
from moonpool.core.ids import Incarnation, MemberId, RequestId, Role
from moonpool.core.landing import Landing
from moonpool.core.membership import Liveness, Member
from moonpool.core.request import Attempt, Request, SamplingParams
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.push_target import PushTarget
from moonpool.kvstore.pusher import Pusher, PushLanding
from moonpool.kvstore.transfer.memory import Faults, MemoryNetwork
from moonpool.wire import pb

TAIL = 5  # valid tokens of the unfinished block
PAGES = 8
READER = MemberId("decode-0")


def attempt(name: str = "r1", number: int = 1) -> Attempt:
    request = Request(RequestId(name), (1,), SamplingParams(max_tokens=1), bytes(16), ())
    return Attempt(request, number)


@dataclass
class Scene:
    node: StoreNode
    pusher: Pusher
    pages: NDArray[np.uint8]  # [PAGES, layers, slice_bytes]: block i of a prompt lies in page PAGES - 1 - i
    client: WorkerStore
    heard: Heard
    keys: list[bytes]
    me: Member

    async def grant(self, name: str = "r1", keys: list[bytes] | None = None, tail: int = TAIL) -> PushLanding:
        return await self.pusher.grant(
            self.node.member,
            attempt(name),
            self.keys if keys is None else keys,
            first_block=0,
            tail_valid=tail,
            reader=READER,
            reader_incarnation=Incarnation(1),
        )

    def push(self, landing: PushLanding, layers: range = range(LAYOUT.layers)) -> None:
        """As the compute thread does."""
        valid = {slot.block: slot.valid for slot in landing.landing.slots}
        for layer in layers:
            landing.push_layer(
                0, layer, [(block, PAGES - 1 - block, valid.get(block, 16)) for block in range(len(self.keys) + 1)]
            )

    def require_all_bytes(self, landing: PushLanding) -> None:
        """Every valid byte of every granted slot, as a reader takes it: copied, then checked."""
        into = np.empty(LAYOUT.slice_bytes, np.uint8)
        for slot in landing.landing.slots:
            for layer in range(LAYOUT.layers):
                self.client.read_slice(slot.slot, layer, into, slot.valid)
                page = self.pages[PAGES - 1 - slot.block, layer]
                for offset, length in LAYOUT.pieces(slot.valid):
                    assert (into[offset : offset + length] == page[offset : offset + length]).all()

    async def require_idle(self, landing: PushLanding) -> None:
        await self.client.end_landing(landing.landing.id)
        numbers = self.node.numbers()
        assert numbers["receiver_open"] == 0
        assert numbers["slots_fenced"] == 0
        assert numbers["slots_reserved"] == 0
        assert numbers["pins"] == 0


@asynccontextmanager
async def scene(
    folder: Path, faults: Faults | None = None, *, carrier: str = "memory", stall_s: float = 5.0
) -> AsyncIterator[Scene]:
    network = MemoryNetwork(faults or Faults())
    roll = Roll()
    settings = config(folder, transfer={"carrier": carrier})
    me = member("prefill-0", Role.PREFILL, "a" if carrier == "segment" else "b")
    roll.say(me)
    pages = np.random.default_rng(3).integers(0, 255, (PAGES, LAYOUT.layers, LAYOUT.slice_bytes), dtype=np.uint8)
    parts = {} if carrier == "segment" else {"receivers": lambda _, who, heard: [network.receiver(who, heard("memory"))]}
    async with store_node(settings, roll, **parts) as node, worker(node) as (client, heard):
        if carrier == "segment":
            pusher = Pusher(me, LAYOUT, pages, settings.transfer)
        else:
            pusher = Pusher(
                me, LAYOUT, pages, settings.transfer, senders=lambda _, __, given, ___: network.sender(given, stall_s=stall_s)
            )
        try:
            yield Scene(node, pusher, pages, client, heard, block_keys("p", 3), me)
        finally:
            await pusher.close()


@pytest.mark.parametrize("carrier", ["memory", "segment"])
async def test_a_pushed_prompt_with_a_tail_lands_whole_and_is_sealed(tmp_path: Path, carrier: str) -> None:
    async with scene(tmp_path, carrier=carrier) as s:
        landing = await s.grant()
        await asyncio.to_thread(s.push, landing)
        drained = await landing.drain()
        assert landing.failure is None
        await until(lambda: len(s.heard.landed) == LAYOUT.layers, "all layers relayed")
        assert {(one.layer, one.blocks) for one in s.heard.landed} == {(layer, (0, 1, 2, 3)) for layer in range(LAYOUT.layers)}
        s.require_all_bytes(landing)
        valid = 3 * LAYOUT.block_bytes + TAIL * LAYOUT.token_bytes
        assert valid < drained.bytes_sent < valid + 300 * LAYOUT.layers
        assert drained.bytes_sent == s.pusher.bytes_sent()
        assert drained.carrier == carrier
        assert await s.client.lookup(s.keys) == 3
        await s.require_idle(landing)


@pytest.mark.parametrize(
    "faults",
    [
        Faults(drop=frozenset({1})),
        Faults(drop=frozenset(range(LAYOUT.layers))),
        Faults(duplicate=frozenset({0, 2})),
        Faults(reorder=frozenset({0, 1})),
        Faults(reorder=frozenset({2})),
        Faults(corrupt=frozenset({0})),
        Faults(corrupt=frozenset(range(LAYOUT.layers))),
        Faults(cut=frozenset({1})),
        Faults(delay_s=0.02),
        Faults(drop=frozenset({0}), duplicate=frozenset({1}), corrupt=frozenset({2})),
    ],
    ids=str,
)
async def test_a_fault_that_happens_once_ends_in_a_complete_landing(tmp_path: Path, faults: Faults) -> None:
    async with scene(tmp_path, faults) as s:
        landing = await s.grant()
        await asyncio.to_thread(s.push, landing)
        await asyncio.wait_for(landing.drain(), 20)
        assert landing.failure is None
        s.require_all_bytes(landing)
        await until(lambda: {block for one in s.heard.landed for block in one.blocks} == {0, 1, 2, 3}, "all blocks relayed")
        await s.client.end_landing(landing.landing.id)
        if faults.cut:  # the broken connection may have left bytes behind: fenced until the endpoint is made anew
            assert s.node.numbers()["slots_fenced"] > 0
            await s.node.remake()
        await s.require_idle(landing)


@pytest.mark.parametrize("seed", range(6))
async def test_any_mix_of_faults_ends_complete_or_failed_in_bounded_time_with_the_pages_free(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)

    def some() -> frozenset[int]:
        return frozenset(number for number in range(40) if chance.random() < 0.15)

    faults = Faults(drop=some(), duplicate=some(), reorder=some(), corrupt=some(), cut=frozenset(sorted(some())[:1]))
    async with scene(tmp_path, faults) as s:
        landings = [await s.grant(f"r{i}", block_keys(f"k{i}", 2), 0) for i in range(3)]
        for layer in range(LAYOUT.layers):
            for landing in landings:
                await asyncio.to_thread(s.push, landing, range(layer, layer + 1))
        await asyncio.wait_for(asyncio.gather(*(landing.drain() for landing in landings)), 30)
        for landing in landings:
            if landing.failure is None:
                s.require_all_bytes(landing)
            await s.client.end_landing(landing.landing.id)
        await s.node.remake()
        numbers = s.node.numbers()
        assert numbers["slots_fenced"] == numbers["slots_reserved"] == numbers["pins"] == numbers["receiver_open"] == 0


async def test_a_slice_that_lands_wrong_every_time_fails_the_landing_in_bounded_time(tmp_path: Path) -> None:
    async with scene(tmp_path, Faults(corrupt=frozenset(range(100)))) as s:
        landing = await s.grant()
        await asyncio.to_thread(s.push, landing)
        await asyncio.wait_for(landing.drain(), 20)
        assert landing.failure is not None
        assert landing.failure.reason is Reason.TRANSFER_FAILED
        assert landing.failure.peer == s.node.member.id
        await s.require_idle(landing)


async def test_an_endpoint_made_anew_in_the_middle_gets_the_rest_under_the_same_attempt(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        landing = await s.grant()
        await asyncio.to_thread(s.push, landing, range(1))
        await s.node.remake()
        await asyncio.to_thread(s.push, landing, range(1, LAYOUT.layers))
        await landing.drain()
        assert landing.failure is None
        s.require_all_bytes(landing)
        await s.require_idle(landing)
        again = await s.grant("r2", block_keys("q", 2), 0)  # the pusher knows the new endpoint by now
        assert again.landing.generation == 2
        await again.cancel()


async def test_a_landing_that_ended_before_its_writer_found_the_next_endpoint_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path) as s:
        first = await s.grant("r1", s.keys, 0)
        asked = PushTarget.grant

        async def grant(target: PushTarget, request: pb.store.GrantRequest) -> Landing:
            """Its reader leaves, the slots are freed by a new endpoint, and another landing of this writer finds that one."""
            landing = await asked(target, request)
            await s.client.end_landing(landing.id)
            old = target.endpoint
            assert old is not None
            await s.node.remake()
            await target.endpoint_after(old)
            return landing

        monkeypatch.setattr(PushTarget, "grant", grant)
        with pytest.raises(TransferFailed, match="is over"):
            await s.grant("r2", block_keys("q", 2), 0)
        await first.cancel()
        await s.require_idle(first)


async def test_a_reader_hears_of_a_whole_landing_when_its_writer_is_through(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.client.publish([(key, block_bytes(key)) for key in s.keys])
        drained = await s.grant("r1", s.keys, 0)
        assert not drained.landing.slots, "the node holds all of it"
        await drained.cancel()
        died = await s.grant("r2", s.keys, 0)
        s.node.peers.say(s.me, Liveness.GONE, "killed")
        await until(lambda: len(s.heard.failed) == 2, "word of both")
        assert [(f.landing, f.error) for f in s.heard.failed] == [(drained.landing.id, None), (died.landing.id, None)]
        for failed in s.heard.failed:
            await s.client.end_landing(failed.landing)
        await s.require_idle(drained)


async def test_a_target_that_takes_nothing_fails_the_landing_and_its_slots_stay_fenced(tmp_path: Path) -> None:
    async with scene(tmp_path, Faults(park=frozenset({1})), stall_s=0.3) as s:
        landing = await s.grant()
        await asyncio.to_thread(s.push, landing)
        await asyncio.wait_for(landing.drain(), 10)
        assert landing.failure is not None
        assert landing.failure.reason is Reason.PEER_SILENT
        await s.client.end_landing(landing.landing.id)
        assert s.node.numbers()["slots_fenced"] == 4
        await s.node.remake()
        assert s.node.numbers()["slots_fenced"] == 0


async def test_cancelling_drains_what_is_posted_and_posts_nothing_more(tmp_path: Path) -> None:
    async with scene(tmp_path, Faults(delay_s=0.1)) as s:
        landing = await s.grant()
        await asyncio.to_thread(s.push, landing)
        drained = await landing.cancel()
        assert drained.bytes_sent < 3 * LAYOUT.block_bytes
        assert landing.failure is None
        s.push(landing)  # too late: nothing is queued
        assert await landing.drain() == drained
        await s.require_idle(landing)
        assert s.node.numbers()["slots_free"] == 16


async def test_blocks_that_the_node_holds_are_not_sent_again(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.client.publish([(key, block_bytes(key)) for key in s.keys[:2]])
        landing = await s.grant()
        assert [slot.block for slot in landing.landing.slots] == [2, 3]
        await asyncio.to_thread(s.push, landing)
        drained = await landing.drain()
        assert drained.bytes_sent < LAYOUT.block_bytes + TAIL * LAYOUT.token_bytes + 300 * LAYOUT.layers
        s.require_all_bytes(landing)
        await s.require_idle(landing)


async def test_a_landing_is_refused_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        with pytest.raises(Busy):
            await s.grant(keys=block_keys("x", 17), tail=0)
        other = Pusher(s.me, type(LAYOUT)("cd" * 16, 3, 2, 4, "float32", 16), s.pages, TransferConfig(carrier="memory"))
        with pytest.raises(ConfigError, match="inside one process"):
            await other.grant(
                s.node.member, attempt(), s.keys, first_block=0, tail_valid=0, reader=READER, reader_incarnation=Incarnation(1)
            )
        wrong = Pusher(s.me, type(LAYOUT)("cd" * 16, 3, 2, 4, "float32", 16), s.pages, TransferConfig(carrier="segment"))
        with pytest.raises(ConfigError, match="does not reach"):
            await wrong.grant(
                s.node.member, attempt(), s.keys, first_block=0, tail_valid=0, reader=READER, reader_incarnation=Incarnation(1)
            )
        assert s.node.numbers()["slots_free"] == 16


async def test_a_writer_of_another_layout_is_refused(tmp_path: Path) -> None:
    async with scene(tmp_path, carrier="segment") as s:
        other = Pusher(s.me, replace(LAYOUT, block_tokens=32), s.pages, TransferConfig())
        with pytest.raises(LayoutMismatch, match="block_tokens 16 here, 32 at"):
            await other.grant(
                s.node.member, attempt(), s.keys, first_block=0, tail_valid=0, reader=READER, reader_incarnation=Incarnation(1)
            )
        await other.close()


async def test_a_node_that_is_not_there_is_peer_silent_at_once(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        gone = member("store-z", Role.STORE, "z", address="127.0.0.1:9")
        with pytest.raises(PeerSilent):
            await s.pusher.grant(
                gone, attempt(), s.keys, first_block=0, tail_valid=0, reader=READER, reader_incarnation=Incarnation(1)
            )


async def test_no_thread_is_left_when_a_pusher_has_closed(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    for carrier in ("memory", "segment"):
        (tmp_path / carrier).mkdir()
        async with scene(tmp_path / carrier, carrier=carrier) as s:
            landing = await s.grant()
            await asyncio.to_thread(s.push, landing)
            await landing.drain()
            assert s.pusher.carriers().startswith(carrier)
    left = {thread.name for thread in threading.enumerate()} - before
    assert not {name for name in left if "send" in name or "copy" in name}
