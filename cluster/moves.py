"""Copies, prefetches and coolings that a conductor wants: asked of the store nodes, a few at a time, never waited for.

All of it is advice. What does not fit into the queue is dropped, what fails is counted and logged; whether blocks came
shows in the store nodes' events.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Any

import grpc
import grpc.aio
import structlog

from moonpool.cluster.leadership import Leads
from moonpool.core.errors import MoonpoolError, NoPath
from moonpool.core.ids import NodeId
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Member, Peers
from moonpool.core.use import Use
from moonpool.scheduler.actions import Cool, Prefetch, Replicate
from moonpool.wire import pb
from moonpool.wire.channels import dial
from moonpool.wire.convert import to_wire
from moonpool.wire.status import error_of

Move = Replicate | Prefetch | Cool

QUEUED = 64
BLOCKS = 4_096  # of one move
DEADLINE_S = 10.0
GRACE_S = 2.0
COOL_S = 2.0
log = structlog.get_logger(__name__)


class Moves:
    """Event-loop only. ``at_once`` 0: nothing is moved. Who does not lead leaves it to the one that does."""

    def __init__(self, peers: Peers, at_once: int, leads: Leads) -> None:
        self._peers, self._leads = peers, leads
        self._at_once = at_once
        self._queue: deque[Move] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._channels: dict[NodeId, tuple[str, grpc.aio.Channel]] = {}
        self.counts: Counter[str] = Counter()

    def numbers(self) -> dict[str, float]:
        names = ("asked", "done", "failed", "dropped", "left")
        return {
            "moves_running": float(len(self._running)),
            "moves_queued": float(len(self._queue)),
            "moves_blocks": float(self.counts["blocks"]),
            "moves_bytes": float(self.counts["bytes"]),
            **{f"moves_{name}": float(self.counts[name]) for name in names},
            **{f"moves_{kind}": float(self.counts[kind]) for kind in ("replicate", "prefetch", "cool")},
        }

    def take(self, move: Move) -> None:
        self.counts["asked"] += 1
        if not self._leads.term():
            self.counts["left"] += 1
            return
        if not self._at_once or len(self._queue) >= QUEUED or not move.keys:
            self.counts["dropped"] += 1
            return
        self._queue.append(move)
        self._go_on()

    async def close(self) -> None:
        self._queue.clear()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for _, channel in self._channels.values():
            await channel.close()

    def _go_on(self) -> None:
        while self._queue and len(self._running) < self._at_once:
            task = asyncio.create_task(self._run(self._queue.popleft()), name="move")
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._go_on()

    async def _run(self, move: Move) -> None:
        kind = type(move).__name__.lower()
        node = move.target if isinstance(move, Replicate) else move.node
        try:
            store, layout, stub = await self._store(node)
            term = self._leads.term()
            if not term:  # not any more
                self.counts["left"] += 1
                return
            match move:
                case Replicate():
                    await self._replicate(stub, layout, move, term)
                case Prefetch():
                    await self._prefetch(stub, layout, move, term)
                case Cool():
                    await stub.Cool(pb.store.KeysRequest(keys=move.keys[:BLOCKS], term=term), timeout=COOL_S)
        except grpc.aio.AioRpcError as e:
            self._failed(kind, node, error_of(e, f"store node {node}"))
        except MoonpoolError as e:
            self._failed(kind, node, e)
        else:
            self.counts["done"] += 1
            self.counts[kind] += 1
            log.info("moved", kind=kind, node=node, store=store.id, blocks=len(move.keys))

    def _failed(self, kind: str, node: NodeId, error: MoonpoolError) -> None:
        self.counts["failed"] += 1
        log.warning("move failed", kind=kind, node=node, error=error.message)

    async def _replicate(self, stub: Any, layout: KVLayout, move: Replicate, term: int) -> None:
        request = pb.store.ReplicateRequest(keys=move.keys[:BLOCKS], node=move.source, term=term)
        request.deadline_ms = int(DEADLINE_S * 1e3)
        to_wire(layout, request.layout)
        to_wire(Use(), request.use)
        self._came(await stub.Replicate(request, timeout=DEADLINE_S + GRACE_S))

    async def _prefetch(self, stub: Any, layout: KVLayout, move: Prefetch, term: int) -> None:
        request = pb.store.WarmRequest(keys=move.keys[:BLOCKS], deadline_ms=int(DEADLINE_S * 1e3), term=term)
        to_wire(layout, request.layout)
        to_wire(Use(), request.use)
        self._came(await stub.Warm(request, timeout=DEADLINE_S + GRACE_S))

    def _came(self, reply: Any) -> None:
        self.counts["blocks"] += reply.blocks
        self.counts["bytes"] += reply.bytes

    async def _store(self, node: NodeId) -> tuple[Member, KVLayout, Any]:
        """NoPath: no live store node there, or one that serves no model."""
        store = self._peers.store_of(node)
        if store is None or store.layout is None:
            raise NoPath(f"node: no store node with a model is live on {node}", retry_after_s=1.0)
        known = self._channels.get(node)
        if known is None or known[0] != store.address:
            if known is not None:
                await known[1].close()
            self._channels[node] = (store.address, dial(store.address))
        return store, store.layout, pb.store_rpc.StoreStub(self._channels[node][1])
