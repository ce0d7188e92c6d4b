"""The processes of ``bench.handoff``: ``python -m moonpool.bench.handoff_child (store|prefill|read) JSON``.

Each reads one JSON command a line and answers one JSON line; the first line says that it is ready. Instants are
nanoseconds of the machine's one monotonic clock, so those of two processes may be subtracted here.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.core.blocks import BlockHasher, chunk_end, namespace
from moonpool.core.config import Config, EngineConfig, ModelConfig, StoreConfig, TransferConfig
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId, Role
from moonpool.core.landing import Landed, Landing
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.core.request import Attempt, Request, SamplingParams
from moonpool.wire import channels, pb
from moonpool.wire.convert import from_wire, to_wire

STORE, READER = MemberId("store-b"), MemberId("decode-0")
LIFE = Incarnation(1)
Answer = Callable[[dict[str, Any]], None]


def main() -> None:
    role, given = sys.argv[1], json.loads(sys.argv[2])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no answer
    roles = {"store": _store, "prefill": _prefill, "read": _read}
    asyncio.run(roles[role](given, lambda value: print(json.dumps(value), file=out)))
    sys.stderr.flush()
    os._exit(0)  # everything is put away; taking an interpreter with torch apart takes seconds in which the other side waits


async def _commands() -> AsyncIterator[dict[str, Any]]:
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield json.loads(line)


def _member(id: MemberId, role: Role, node: str, layout: KVLayout, address: str = "") -> Member:
    return Member(id, role, NodeId(node), LIFE, address, os.getpid(), layout)


def _layout(given: dict[str, Any]) -> KVLayout:
    from moonpool.cluster.models import kv_layout

    return kv_layout(_config(given), Path(given["model_dir"]))


def _config(given: dict[str, Any]) -> Config:
    return Config(
        model=ModelConfig(path=given["model_dir"]),
        engine=EngineConfig(pages=given["pages"], threads=1),
        store=StoreConfig(pool_bytes=given["pool_bytes"]),
        transfer=TransferConfig(carrier=given["carrier"], ucx_net_devices=given["ucx_net_devices"]),
    )


class _Roll:
    """core.membership.Peers of a cluster in which nobody comes or goes."""

    def __init__(self, members: list[Member]) -> None:
        self._members = {member.id: MemberChange(member, Liveness.LIVE) for member in members}

    def get(self, member: MemberId) -> MemberChange | None:
        return self._members.get(member)

    def live(self, role: Role) -> list[Member]:
        return [change.member for change in self._members.values() if change.member.role is role]

    def store_of(self, node: NodeId) -> Member | None:
        return next((member for member in self.live(Role.STORE) if member.node == node), None)

    def subscribe(self, on_change: Callable[[MemberChange], None]) -> Callable[[], None]:
        for change in self._members.values():
            on_change(change)
        return lambda: None


async def _store(given: dict[str, Any], answer: Answer) -> None:
    """The store node of node b."""
    from moonpool.kvstore.node import StoreNode

    layout = _layout(given)
    server = channels.server()
    port = channels.bind(server, "127.0.0.1:0")
    writers = [_member(MemberId(name), Role.PREFILL, given["writer_node"], layout) for name in given["writers"]]
    reader = _member(READER, Role.DECODE, "b", layout)
    me = _member(STORE, Role.STORE, "b", layout, f"127.0.0.1:{port}")
    node = await StoreNode.start(_config(given), me, layout, _Roll([*writers, reader]))
    node.add_to(server)
    await server.start()
    answer({"address": me.address})
    async for _ in _commands():
        answer({"words": node.words(), "numbers": node.numbers()})
    await node.close()
    await server.stop(0.2)


async def _read(given: dict[str, Any], answer: Answer) -> None:
    """The reader on node b: copies every layer of a landing into its pages, as a decode worker does."""
    from moonpool.kvstore.client import WorkerStore

    layout, landed = _layout(given), asyncio.Queue[Landed]()
    pages = np.zeros((given["pages"], layout.layers, layout.slice_bytes), dtype=np.uint8)
    client = await WorkerStore.connect(
        given["address"],
        _member(READER, Role.DECODE, "b", layout),
        layout,
        on_landed=landed.put_nowait,
        on_failed=lambda failure: print(failure, file=sys.stderr),
        on_lost=lambda: print("the session is lost", file=sys.stderr),
    )
    answer({"ready": True})
    async for command in _commands():
        landing = from_wire(pb.types.Landing.FromString(bytes.fromhex(command["landing"])), Landing)
        slots = {slot.block: slot for slot in landing.slots}
        left = {(block, layer) for block in slots for layer in range(layout.layers)}
        answer({"expecting": len(left)})

        def copy(one: Landed, slots: dict[int, Any] = slots) -> None:
            for block in one.blocks:
                client.read_slice(slots[block].slot, one.layer, pages[block, one.layer], slots[block].valid)

        while left:
            one = await landed.get()
            if one.landing == landing.id:
                await asyncio.to_thread(copy, one)
                left -= {(block, one.layer) for block in one.blocks}
        answer({"runnable": time.monotonic_ns()})
        await client.end_landing(landing.id)
    await client.close()


class _Prefill:
    """Computes prompts on one thread and pushes their layers, as they finish or all of them afterwards."""

    def __init__(self, given: dict[str, Any], answer: Answer) -> None:
        from moonpool.engine.engine import load_engine

        self._given, self._answer = given, answer
        config = _config(given)
        self._chunk = config.engine.prefill_chunk
        self._engine = load_engine(config, Path(given["model_dir"]), threads=1)
        layout = self._layout = self._engine.layout
        self._hasher = BlockHasher(bytes(32), namespace(layout), layout.block_tokens)
        self._store = _member(STORE, Role.STORE, "b", layout, given["address"])
        self._pushers: dict[str, Any] = {}
        self._runs = 0

    def pusher(self, writer: str, throttle: float) -> Any:
        """One life of a sending end per writer: its throttle is fixed."""
        from moonpool.kvstore.pusher import Pusher

        if writer not in self._pushers:
            given = _config(self._given).transfer
            transfer = given.model_copy(update={"throttle_bytes_per_s": throttle})
            me = _member(MemberId(writer), Role.PREFILL, self._given["writer_node"], self._layout)
            self._pushers[writer] = Pusher(me, self._layout, self._engine.kv_bytes, transfer)
        return self._pushers[writer]

    async def run(self, command: dict[str, Any], go: Callable[[], Any]) -> dict[str, Any]:
        """Grant, tell the landing, wait for ``go``, compute, push, drain."""
        self._runs += 1
        rng = np.random.default_rng(command["seed"])
        ids = rng.integers(1_000, min(32_000, self._engine.vocab_size), command["tokens"]).tolist()
        keys = self._hasher.keys(ids)
        request = Request(RequestId(f"bench-{self._runs}"), tuple(ids), SamplingParams(1), bytes(16), tuple(keys))
        landing = await self.pusher(command["writer"], command["throttle"]).grant(
            self._store,
            Attempt(request, 1),
            keys,
            first_block=0,
            tail_valid=len(ids) % self._layout.block_tokens,
            reader=READER,
            reader_incarnation=LIFE,
        )
        self._answer({"landing": to_wire(landing.landing, pb.types.Landing()).SerializeToString().hex()})
        await go()
        instants = await asyncio.to_thread(self._compute, ids, landing, command["layered"])
        drained = await landing.drain()
        failure = None if landing.failure is None else landing.failure.message
        return {**instants, "bytes": drained.bytes_sent, "carrier": drained.carrier, "failure": failure}

    def _compute(self, ids: list[int], landing: Any, layered: bool) -> dict[str, Any]:
        from moonpool.engine.engine import Row

        size, table = self._layout.block_tokens, list(range(-(-len(ids) // self._layout.block_tokens)))
        held: list[tuple[int, int, list[tuple[int, int, int]]]] = []
        instants: dict[str, Any] = {"begun": time.monotonic_ns(), "push_us": []}
        start = chunk = 0
        while start < len(ids):
            end = chunk_end(start, len(ids), self._chunk, size)
            last = end == len(ids)
            blocks = [(i, i, min(size, len(ids) - i * size)) for i in range(start // size, -(-end // size))]

            def on_layer(layer: int, chunk: int = chunk, blocks: list[tuple[int, int, int]] = blocks) -> None:
                instants["last_layer"] = time.monotonic_ns()
                if layered:
                    landing.push_layer(chunk, layer, blocks)
                    instants["push_us"].append((time.monotonic_ns() - instants["last_layer"]) / 1e3)
                else:
                    held.append((chunk, layer, blocks))

            self._engine.forward([Row(ids[start:end], start, table, last)], on_layer=on_layer)
            start, chunk = end, chunk + 1
        instants["ended"] = time.monotonic_ns()
        for one in held:
            landing.push_layer(*one)
        return instants

    async def close(self) -> None:
        for pusher in self._pushers.values():
            await pusher.close()


async def _prefill(given: dict[str, Any], answer: Answer) -> None:
    work = _Prefill(given, answer)
    commands = _commands()
    answer({"ready": True, "token_bytes": work._layout.token_bytes})
    async for command in commands:
        answer(await work.run(command, lambda: anext(commands)))
    await work.close()


if __name__ == "__main__":
    main()
