"""One side of ``bench.between``: a store node and a reader of its host. ``python -m moonpool.bench.between_child JSON``."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.cluster.membership import Membership
from moonpool.core.config import Config
from moonpool.core.errors import DigestMismatch
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.landing import SlotRef
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Member
from moonpool.kvstore import slices
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.node import StoreNode
from moonpool.wire import channels

LAYOUT = KVLayout("be" * 16, layers=8, kv_heads=4, head_dim=128, dtype="bfloat16", block_tokens=64)  # 1 MiB blocks
PROMPT = 64  # blocks of one sequence
DEADLINE_MS = 60_000


def main() -> None:
    given = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no answer
    asyncio.run(_run(given, lambda value: print(json.dumps(value), file=out)))


def sequence(number: int) -> list[bytes]:
    return [hashlib.blake2b(f"{number}.{i}".encode(), digest_size=16).digest() for i in range(PROMPT)]


def content(key: bytes) -> NDArray[np.uint8]:
    """[block_bytes] that follow from the key alone."""
    words = np.random.Generator(np.random.SFC64(int.from_bytes(key, "little"))).integers(
        0, 1 << 63, LAYOUT.block_bytes // 8, dtype=np.int64
    )
    return words.view(np.uint8)


def _config(given: dict[str, Any]) -> Config:
    pool = given["bytes"] // LAYOUT.block_bytes * LAYOUT.slot_bytes
    return Config.model_validate(
        {
            "store": {"pool_bytes": pool + pool // 16 + (64 << 20)},
            "cluster": {"name": f"between-{os.getppid()}", "state_dir": given["folder"]},
            "transfer": {"carrier": given["carrier"], "ucx_tls": "tcp", "ucx_net_devices": "lo"},
        }
    )


async def _run(given: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    config, node = _config(given), NodeId(given["node"])
    server = channels.server()
    address = f"127.0.0.1:{channels.bind(server, '127.0.0.1:0')}"
    life = Incarnation(time.time_ns())
    me = Member(MemberId(f"store-{node}"), Role.STORE, node, life, address, os.getpid(), LAYOUT)
    peers = Membership(given["registry"], config.timing, lambda why, replaced: None)
    store = await StoreNode.start(config, me, LAYOUT, peers)
    store.add_to(server)
    await server.start()
    await peers.join(me)
    reader = Member(MemberId(f"reader-{node}"), Role.PREFILL, node, life, "", os.getpid(), LAYOUT)
    client = await WorkerStore.connect(
        address, reader, LAYOUT, on_landed=lambda _: None, on_failed=lambda _: None, on_lost=lambda: None
    )
    side = _Commands(client, peers, store, given["bytes"] // (PROMPT * LAYOUT.block_bytes))
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            answer(await getattr(side, command.pop("do"))(**command))
    finally:
        await client.close()
        await store.close()
        await peers.leave()
        await server.stop(0.2)


class _Commands:
    def __init__(self, client: WorkerStore, peers: Membership, store: StoreNode, sequences: int) -> None:
        self._client = client
        self._peers = peers
        self._store = store
        self._sequences = max(1, sequences)

    async def words(self) -> dict[str, Any]:
        return {"carriers_sent": "", **self._store.words()}

    async def fill(self) -> dict[str, Any]:
        stored = 0
        for number in range(self._sequences):
            blocks = [(key, content(key)) for key in sequence(number)]
            stored += await self._client.publish(blocks)
        return {"blocks": stored, "bytes": stored * LAYOUT.block_bytes}

    async def fetch(self, source: str, blocks: int) -> dict[str, Any]:
        await self._peers.until(lambda: self._peers.store_of(NodeId(source)) is not None, 10.0, f"store node {source}")
        store = self._peers.store_of(NodeId(source))
        assert store is not None
        begun = time.perf_counter()
        for number in range(blocks // PROMPT):
            fetched = await self._client.fetch(sequence(number), store.node, store.address, DEADLINE_MS)
            await self._client.unpin(fetched.ticket)
        return {"seconds": time.perf_counter() - begun}

    async def check(self, blocks: int) -> dict[str, Any]:
        missing = wrong = 0
        for number in range(blocks // PROMPT):
            keys = sequence(number)
            ticket = await self._client.pin(keys)
            missing += len(keys) - len(ticket.slots)
            wrong += await asyncio.to_thread(self._wrong, ticket.slots)
            await self._client.unpin(ticket)
        return {"missing": missing, "wrong": wrong}

    def _wrong(self, slots: Sequence[SlotRef]) -> int:
        return sum(not self._is_right(slot) for slot in slots)

    def _is_right(self, slot: SlotRef) -> bool:
        expected = content(slot.key)
        copy = np.empty(LAYOUT.slice_bytes, np.uint8)
        try:
            for layer in range(LAYOUT.layers):
                self._client.read_slice(slot, layer, copy, LAYOUT.block_tokens)
                if not np.array_equal(copy, slices.slice_of(LAYOUT, expected, 0, layer)):
                    return False
        except DigestMismatch:
            return False
        return True


if __name__ == "__main__":
    main()
