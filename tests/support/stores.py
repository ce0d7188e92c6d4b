"""Several store nodes in one process with real gRPC between them, a worker at each, bytes over the memory carrier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.core.landing import Ticket
from moonpool.core.membership import Member
from moonpool.kvstore import slices
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.fetching import Moved, PushOrder
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.pusher import Pusher
from moonpool.kvstore.transfer.carrier import OnNotices, Receiver, Sender
from moonpool.kvstore.transfer.memory import Faults, MemoryNetwork
from support.store import LAYOUT, Heard, Roll, block_bytes, block_keys, config, store_node, until, worker

IDLE = ("landings_open", "pins", "slots_reserved", "slots_fenced", "fetches_open", "receiver_open")

__all__ = ["Stores", "block_keys", "stores", "until"]


@dataclass
class Stores:
    roll: Roll
    network: MemoryNetwork
    sender: Callable[[Sender], Sender]
    receiver: Callable[[MemoryNetwork, Member, OnNotices], Receiver]
    nodes: dict[str, StoreNode] = field(default_factory=dict)
    workers: dict[str, WorkerStore] = field(default_factory=dict)
    heard: dict[str, Heard] = field(default_factory=dict)
    orders: list[PushOrder] = field(default_factory=list)  # every push that a node made
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # pushes wait for it

    async def publish(self, node: str, keys: Sequence[bytes], parent: bytes | None = None) -> None:
        stored = await self.workers[node].publish([(key, block_bytes(key)) for key in keys], parent)
        assert stored == len(keys)

    async def fetch(self, here: str, keys: Sequence[bytes], there: str, deadline_ms: int = 20_000) -> Ticket:
        """As a reader at ``here``, which unpins at once."""
        member = self.nodes[there].member
        fetched = await self.workers[here].fetch(keys, member.node, member.address, deadline_ms)
        await self.workers[here].unpin(fetched.ticket)
        return fetched.ticket

    async def require_right(self, node: str, keys: Sequence[bytes]) -> None:
        """All of ``keys`` are at ``node``, and every byte of them is right."""
        reader = self.workers[node]
        ticket = await reader.pin(keys)
        assert [slot.key for slot in ticket.slots] == list(keys)
        into = np.empty(LAYOUT.slice_bytes, np.uint8)
        for slot in ticket.slots:
            for layer in range(LAYOUT.layers):
                reader.read_slice(slot, layer, into, LAYOUT.block_tokens)
                assert (into == slices.slice_of(LAYOUT, block_bytes(slot.key), 0, layer)).all()
        await reader.unpin(ticket)

    async def require_idle(self) -> None:
        for name, node in self.nodes.items():
            await until(lambda node=node: not any(node.numbers()[gauge] for gauge in IDLE), f"node {name} is idle")


@asynccontextmanager
async def stores(
    folder: Path,
    *names: str,
    faults: Faults = Faults(),
    slots: int = 16,
    sender: Callable[[Sender], Sender] = lambda made: made,
    receiver: Callable[[MemoryNetwork, Member, OnNotices], Receiver] = MemoryNetwork.receiver,
    **sections: dict[str, Any],
) -> AsyncIterator[Stores]:
    """``sender`` may wrap every sending end, ``receiver`` makes every receiving end."""
    settings = config(folder, **{"slots": slots, "transfer": {"carrier": "memory"}} | sections)
    made = Stores(Roll(), MemoryNetwork(faults), sender, receiver)
    made.gate.set()
    async with AsyncExitStack() as stack:
        for name in names:
            await _open(made, stack, settings, name)
        yield made


async def _open(made: Stores, stack: AsyncExitStack, settings: Any, name: str) -> None:
    pushers: list[Pusher] = []

    async def close() -> None:
        for pusher in pushers:
            await pusher.close()

    async def push(order: PushOrder) -> Moved:
        """As the node's own, but over the network of this test, and when the gate is open."""
        made.orders.append(order)
        await made.gate.wait()
        if not pushers:
            node = made.nodes[name]
            senders = lambda _, __, given, ___: made.sender(made.network.sender(given))  # noqa: E731
            pushers.append(Pusher(node.member, LAYOUT, node.regions.views, settings.transfer, senders=senders))
        drained = await pushers[0].push_blocks(order.landing, order.targets, order.target_address, order.layout, order.blocks)
        return Moved(drained.bytes_sent, drained.carrier)

    parts = {"receivers": lambda _, who, heard: [made.receiver(made.network, who, heard("memory"))], "push": push}
    made.nodes[name] = await stack.enter_async_context(store_node(settings, made.roll, name, **parts))
    stack.push_async_callback(close)
    made.workers[name], made.heard[name] = await stack.enter_async_context(worker(made.nodes[name], f"decode-{name}"))
