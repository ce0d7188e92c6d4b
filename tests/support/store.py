"""A store node on loopback with real gRPC, workers of its host, and a writer that fills landings through the mapping."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from moonpool.core.config import Config
from moonpool.core.digests import slice_digest
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.landing import Landed, Landing, LandingSlot, PushNotice, Region, SliceNotice
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.kvstore import slices
from moonpool.kvstore.client import LandingFailure, WorkerStore
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.regions import map_region
from moonpool.wire import channels, pb
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.frames import encode_notice

LAYOUT = KVLayout("ab" * 16, layers=3, kv_heads=2, head_dim=4, dtype="float32", block_tokens=16)
REGION_BYTES = 1 << 20


def block_keys(name: str, n: int) -> list[bytes]:
    return [f"{name}{i}".encode().ljust(16, b".")[:16] for i in range(n)]


def block_bytes(key: bytes) -> NDArray[np.uint8]:
    """[block_bytes] of a block's content, the same for everybody."""
    return np.random.default_rng(list(key)).integers(0, 255, LAYOUT.block_bytes, dtype=np.uint8)


async def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Looks every 10 ms: it is the node's own timers and threads that decide when."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never came true: {what}")


class Roll:
    """core.membership.Peers, told by the test."""

    def __init__(self) -> None:
        self._known: dict[MemberId, MemberChange] = {}
        self._listeners: list[Callable[[MemberChange], None]] = []

    def say(self, member: Member, liveness: Liveness = Liveness.LIVE, proof: str = "the test says so") -> None:
        change = MemberChange(member, liveness, "" if liveness is Liveness.LIVE else proof)
        known = self._known.get(member.id)
        if known is None or known.member.incarnation <= member.incarnation:
            self._known[member.id] = change
        for listener in list(self._listeners):
            listener(change)

    def get(self, member: MemberId) -> MemberChange | None:
        return self._known.get(member)

    def live(self, role: Role) -> list[Member]:
        return [c.member for c in self._known.values() if c.liveness is Liveness.LIVE and c.member.role is role]

    def store_of(self, node: NodeId) -> Member | None:
        return next((m for m in self.live(Role.STORE) if m.node == node), None)

    def subscribe(self, on_change: Callable[[MemberChange], None]) -> Callable[[], None]:
        for change in self._known.values():
            on_change(change)
        self._listeners.append(on_change)
        return lambda: self._listeners.remove(on_change)


def member(id: str, role: Role, node: str, *, incarnation: int = 1, address: str = "", pid: int = 0) -> Member:
    return Member(MemberId(id), role, NodeId(node), Incarnation(incarnation), address, pid or os.getpid(), LAYOUT)


def config(folder: Path, *, slots: int = 16, **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "store": {"pool_bytes": slots * LAYOUT.slot_bytes, "region_bytes": REGION_BYTES, "directory": str(folder)},
        "cluster": {"name": f"t{os.getpid()}", "state_dir": str(folder), "key_file": str(folder / "hash.key")},
        "transfer": {"carrier": "segment"},
        "timing": {"heartbeat_ms": 50, "silent_after_ms": 400, "kill_after_ms": 0},
    }
    for name, given in sections.items():
        values[name] = values.get(name, {}) | given
    return Config.model_validate(values)


@asynccontextmanager
async def store_node(settings: Config, roll: Roll, node: str = "a", **parts: Any) -> AsyncIterator[StoreNode]:
    """A started node that serves on a loopback port and is on the roll."""
    server = channels.server()
    port = server.add_insecure_port("127.0.0.1:0")
    me = member(f"store-{node}", Role.STORE, node, address=f"127.0.0.1:{port}")
    try:
        started = await StoreNode.start(settings, me, LAYOUT, roll, **parts)
        started.add_to(server)
        await server.start()
        roll.say(me)
        try:
            yield started
        finally:
            await started.close()
    finally:
        await server.stop(0.2)


@dataclass
class Heard:
    """What a worker's session told it."""

    landed: list[Landed] = field(default_factory=list)
    failed: list[LandingFailure] = field(default_factory=list)
    lost: list[bool] = field(default_factory=list)


@asynccontextmanager
async def worker(
    node: StoreNode, id: str = "decode-0", role: Role = Role.DECODE, incarnation: int = 1
) -> AsyncIterator[tuple[WorkerStore, Heard]]:
    heard = Heard()
    client = await WorkerStore.connect(
        node.member.address,
        member(id, role, node.member.node, incarnation=incarnation),
        LAYOUT,
        on_landed=heard.landed.append,
        on_failed=heard.failed.append,
        on_lost=lambda: heard.lost.append(True),
        timing=node.config.timing,
    )
    try:
        yield client, heard
    finally:
        await client.close()


class MappedWriter:
    """Writes landings through the mapped files and announces them with ``Notify``, as a same-host writer does."""

    def __init__(self, address: str, me: Member) -> None:
        self.me = me
        self._channel = grpc.aio.insecure_channel(address)
        self.stub: Any = pb.store_rpc.StoreStub(self._channel)
        self.regions: dict[int, NDArray[np.uint8]] = {}

    async def open(self) -> None:
        reply = await self.stub.Endpoint(pb.store.EndpointRequest(layout=to_wire(LAYOUT, pb.types.KVLayout())))
        self.regions = {r.number: map_region(from_wire(r, Region)) for r in reply.regions}

    async def close(self) -> None:
        self.regions.clear()
        await self._channel.close()

    async def ask(self, request: str, keys: Sequence[bytes], **fields: Any) -> Any:
        ask = pb.store.GrantRequest(
            request=request,
            writer=self.me.id,
            writer_incarnation=self.me.incarnation,
            keys=keys,
            layout=to_wire(LAYOUT, pb.types.KVLayout()),
            **{"attempt": 1} | fields,
        )
        return await self.stub.Grant(ask)

    async def grant(self, request: str, keys: Sequence[bytes], **fields: Any) -> Landing:
        reply = await self.ask(request, keys, **fields)
        assert not reply.error.reason, reply.error.message
        return from_wire(reply.landing, Landing)

    def write(self, slot: LandingSlot, layer: int, content: NDArray[np.uint8]) -> SliceNotice:
        """Put one layer of ``content`` [block_bytes] into ``slot``; what to announce."""
        region = self.regions[slot.slot.region]
        data = slices.slice_of(LAYOUT, content, 0, layer)
        target = slices.slice_of(LAYOUT, region, slot.slot.offset, layer)
        for offset, length in LAYOUT.pieces(slot.valid):
            target[offset : offset + length] = data[offset : offset + length]
        digest = slice_digest(LAYOUT, data, slot.slot.key, layer, slot.valid)
        return SliceNotice(slot.slot.region, slot.slot.offset, slot.valid, digest)

    def frame(self, landing: Landing, layer: int, pieces: Sequence[SliceNotice], chunk: int = 0) -> bytes:
        return encode_notice(PushNotice(landing.id, landing.request, landing.attempt, chunk, layer, tuple(pieces)))

    async def notify(self, *frames: bytes) -> None:
        await self.stub.Notify(pb.store.NotifyRequest(frames=frames))

    async def push(self, landing: Landing, layers: Sequence[int] = range(LAYOUT.layers)) -> None:
        for layer in layers:
            pieces = [self.write(slot, layer, block_bytes(slot.slot.key)) for slot in landing.slots]
            await self.notify(self.frame(landing, layer, pieces))

    async def drain(self, landing: Landing) -> None:
        await self.stub.Drain(
            pb.store.DrainRequest(landing=landing.id, writer=self.me.id, writer_incarnation=self.me.incarnation)
        )


@asynccontextmanager
async def writer(
    node: StoreNode, id: str = "prefill-0", on_node: str = "b", incarnation: int = 1
) -> AsyncIterator[MappedWriter]:
    opened = MappedWriter(node.member.address, member(id, Role.PREFILL, on_node, incarnation=incarnation))
    await opened.open()
    try:
        yield opened
    finally:
        await opened.close()
