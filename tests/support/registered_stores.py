"""A registry and store nodes on loopback that know each other through it; bytes between them go over the memory carrier."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from moonpool.cluster.membership import Membership
from moonpool.cluster.registry import Registry
from moonpool.core.config import Config
from moonpool.core.ids import Role
from moonpool.core.use import Use
from moonpool.kvstore.fetching import Moved, PushOrder
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.pusher import Pusher
from moonpool.kvstore.transfer.memory import Faults, MemoryNetwork
from moonpool.wire import channels
from support.store import LAYOUT, block_bytes, config, member, worker

T = TypeVar("T")


@dataclass
class StoreCluster:
    registry: str
    settings: Config
    nodes: dict[str, StoreNode] = field(default_factory=dict)

    async def publish(
        self, node: str, keys: Sequence[bytes], parent: bytes | None = None, tenant: str = "default", *, values: bool = False
    ) -> None:
        """``values``: finite numbers that a codec can take, not any bytes."""
        async with worker(self.nodes[node], f"author-{node}") as (client, _):
            blocks = [(key, block_bytes(key) & 0x3F if values else block_bytes(key)) for key in keys]
            assert await client.publish(blocks, parent, Use(tenant)) == len(keys)


@asynccontextmanager
async def store_cluster(
    folder: Path, names: Sequence[str] = ("a", "b"), *, slots: int = 16, hash_key_id: str = "", **sections: dict[str, Any]
) -> AsyncIterator[StoreCluster]:
    settings = config(folder, slots=slots, **{"transfer": {"carrier": "memory"}, **sections})
    registry, network = Registry(settings.timing), MemoryNetwork(Faults())
    async with AsyncExitStack() as stack:
        address = await registry.start("127.0.0.1")
        stack.push_async_callback(registry.close)
        made = StoreCluster(address, settings)
        for name in names:
            made.nodes[name] = await stack.enter_async_context(_node(made, name, network, hash_key_id))
        yield made


@asynccontextmanager
async def _node(cluster: StoreCluster, name: str, network: MemoryNetwork, hash_key_id: str) -> AsyncIterator[StoreNode]:
    pushers: list[Pusher] = []

    async def push(order: PushOrder) -> Moved:
        if not pushers:
            views, transfer = node.regions.views, cluster.settings.transfer
            pushers.append(
                Pusher(node.member, LAYOUT, views, transfer, senders=lambda _, __, given, ___: network.sender(given))
            )
        drained = await pushers[0].push_blocks(order.landing, order.targets, order.target_address, order.layout, order.blocks)
        return Moved(drained.bytes_sent, drained.carrier)

    server = channels.server()
    port = server.add_insecure_port("127.0.0.1:0")
    me = replace(member(f"store-{name}", Role.STORE, name, address=f"127.0.0.1:{port}"), model="toy", hash_key_id=hash_key_id)
    peers = Membership(cluster.registry, cluster.settings.timing, lambda why, replaced: None)
    try:
        node = await StoreNode.start(
            cluster.settings,
            me,
            LAYOUT,
            peers,
            receivers=lambda _, who, heard: [network.receiver(who, heard("memory"))],
            push=push,
        )
        node.add_to(server)
        await server.start()
        await peers.join(me)
        try:
            yield node
        finally:
            for pusher in pushers:
                await pusher.close()
            await node.close()
    finally:
        await peers.leave()
        await server.stop(0.2)


class Beside:
    """Runs coroutines on an event loop in a thread of its own, for tests of programs that have theirs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="beside")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def store_cluster_beside(folder: Path, *given: Any, **more: Any) -> Iterator[tuple[StoreCluster, Beside]]:
    """``store_cluster`` for programs that run event loops of their own."""
    beside = Beside()
    try:
        scope = store_cluster(folder, *given, **more)
        cluster = beside.run(scope.__aenter__())
        try:
            yield cluster, beside
        finally:
            beside.run(scope.__aexit__(None, None, None))
    finally:
        beside.close()
