"""Store nodes in processes of their own that join, leave, freeze and die, as the others and the conductor see it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.store import LAYOUT, block_bytes, block_keys, member, until
from support.store_process import Processes, gone, store_processes

from moonpool.cluster.conductor import ConductorService
from moonpool.core.ids import NodeId, Role
from moonpool.core.membership import Liveness, MemberChange
from moonpool.core.placement import Placement, PlaceRequest, Segment, Source
from moonpool.kvstore import slices
from moonpool.kvstore.client import WorkerStore
from moonpool.wire import pb

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
KEYS = block_keys("k", 6)
AT_B, NOWHERE = (Segment(0, 6, Source.FETCH, NodeId("b")),), (Segment(0, 6, Source.RECOMPUTE),)


async def publish(client: WorkerStore, keys: Sequence[bytes]) -> None:
    assert await client.publish([(key, block_bytes(key)) for key in keys]) == len(keys)


async def fetch(s: Processes, client: WorkerStore, source: str, limit_ms: int = 1_000) -> tuple[int, float]:
    """(right blocks that came, seconds)."""
    known = s.peers.store_of(NodeId(source))
    began = time.monotonic()
    fetched = await client.fetch(KEYS, NodeId(source), known.address if known else "127.0.0.1:1", limit_ms)
    seconds = time.monotonic() - began
    into = np.empty(LAYOUT.slice_bytes, np.uint8)
    for slot in fetched.ticket.slots:
        client.read_slice(slot, 0, into, LAYOUT.block_tokens)
        assert (into == slices.slice_of(LAYOUT, block_bytes(slot.key), 0, 0)).all()
    await client.unpin(fetched.ticket)
    return len(fetched.ticket.slots), seconds


@asynccontextmanager
async def conductor(s: Processes) -> AsyncIterator[ConductorService]:
    """It hears of the store nodes from the registry; its workers are made up."""
    service = await ConductorService.start(s.settings, member("conductor-0", Role.CONDUCTOR, "a"), s.peers)
    for role in (Role.PREFILL, Role.DECODE):
        service.conductor.observe(MemberChange(member(f"{role}-0", role, "a"), Liveness.LIVE), 0.0)
    try:
        yield service
    finally:
        await service.close()


def segments(service: ConductorService) -> tuple[Segment, ...]:
    answer = service.conductor.place(PlaceRequest("r", 1, tuple(KEYS), len(KEYS) * LAYOUT.block_tokens, 4), 0.0)
    assert isinstance(answer, Placement), answer
    return tuple(replace(segment, move=False) for segment in answer.segments)


async def test_a_terminated_node_moves_its_blocks_out_before_it_is_gone(tmp_path: Path) -> None:
    async with store_processes(tmp_path, "a", "b") as s:
        async with s.worker("b", "decode-b") as author:
            await publish(author, KEYS)
        s.signal("b", signal.SIGTERM)
        await until(lambda: any(gone(c) and c.member.id == "store-b" for c in s.changes), "it left", 20)
        told = [c.member.ready for c in s.changes if c.member.id == "store-b" and not gone(c)]
        assert told[0] and not told[-1], "it said at once that it takes nothing new"
        assert "moved out: 6 blocks (24.0 KiB) saved, 0 (0.0 MiB) not" in s.log("b")
        async with s.worker("a", "decode-a") as reader:
            assert await reader.lookup(KEYS) == 6
            assert (await fetch(s, reader, "b"))[0] == 6, "from where they are now"
        assert (await s.numbers("a"))["bytes_landed"] >= 6 * LAYOUT.block_bytes
        assert list(tmp_path.glob("moonpool+*+b+*")) == []


async def test_a_node_that_was_told_to_move_out_is_not_ready_and_goes_on_reading_until_it_is_stopped(tmp_path: Path) -> None:
    async with store_processes(tmp_path, "a", "b") as s, s.worker("b", "decode-b") as author:
        await publish(author, KEYS)
        assert s.member("b").ready
        async with grpc.aio.insecure_channel(s.member("b").address) as channel:
            reply = await pb.store_rpc.StoreStub(channel).MoveOut(pb.store.MoveOutRequest(deadline_ms=5_000))
        assert (reply.blocks_saved, reply.blocks_left) == (6, 0)
        await until(lambda: not s.member("b").ready, "everybody knows")
        assert await author.lookup(KEYS) == 6
        assert await author.publish([(key, block_bytes(key)) for key in block_keys("n", 2)]) == 0


async def test_nodes_that_are_all_terminated_at_once_end_without_waiting_for_one_another(tmp_path: Path) -> None:
    async with store_processes(tmp_path, "a", "b") as s:
        for node in ("a", "b"):
            async with s.worker(node, f"decode-{node}") as author:
                await publish(author, block_keys(node, 6))
        for node in ("a", "b"):
            s.signal(node, signal.SIGTERM)
        async with asyncio.timeout(8):
            codes = await asyncio.gather(*(asyncio.to_thread(s.children[node].wait) for node in ("a", "b")))
        assert codes == [128 + signal.SIGTERM] * 2
        assert all("moved out" in s.log(node) for node in ("a", "b"))


async def test_a_frozen_node_costs_a_fetch_its_deadline_and_is_forgotten_until_it_comes_back(tmp_path: Path) -> None:
    async with store_processes(tmp_path, "a", "b") as s, conductor(s) as service, s.worker("a", "decode-a") as reader:
        async with s.worker("b", "decode-b") as author:
            await publish(author, KEYS)
        await until(lambda: segments(service) == AT_B, "the conductor knows what it holds")
        frozen = s.member("b")
        s.signal("b", signal.SIGSTOP)
        blocks, seconds = await fetch(s, reader, "b", 500)
        assert blocks == 0
        assert seconds < 5
        await until(lambda: not s.live("b"), "it counts as silent")
        assert segments(service) == NOWHERE
        blocks, seconds = await fetch(s, reader, "b", 8_000)
        assert blocks == 0
        assert seconds < 6, "nobody waits for it any more"
        await publish(reader, block_keys("x", 6))
        s.signal("b", signal.SIGCONT)
        await until(lambda: s.live("b") and s.member("b").incarnation > frozen.incarnation, "it is back as a new life", 30)
        assert (await fetch(s, reader, "b"))[0] == 0, "empty"
        async with asyncio.timeout(5):
            while (await s.numbers("a"))["slots_fenced"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_killed_node_is_forgotten_and_one_that_joins_is_known_without_a_restart(tmp_path: Path) -> None:
    async with store_processes(tmp_path, "a", "b") as s, conductor(s) as service, s.worker("a", "decode-a") as reader:
        async with s.worker("b", "decode-b") as author:
            await publish(author, KEYS)
        await until(lambda: segments(service) == AT_B, "the conductor knows what it holds")
        s.signal("b", signal.SIGKILL)
        blocks, seconds = await fetch(s, reader, "b", 8_000)
        assert blocks == 0
        assert seconds < 6, "a broken connection is no reason to wait"
        await until(lambda: segments(service) == NOWHERE, "its blocks are forgotten")
        await s.start("b")
        async with s.worker("b", "decode-b") as author:
            await publish(author, KEYS)
        await until(lambda: segments(service) == AT_B, "the conductor knows the new one")
        assert (await fetch(s, reader, "b"))[0] == 6
