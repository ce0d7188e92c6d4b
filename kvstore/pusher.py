"""The writer's side of landings, shared by prefill workers (pages) and store nodes (regions, for pushes to other nodes)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moonpool.core.config import TransferConfig
from moonpool.core.device_memory import DeviceMemory
from moonpool.core.errors import MoonpoolError, TransferFailed
from moonpool.core.handoff import Drained
from moonpool.core.ids import Incarnation, MemberId
from moonpool.core.landing import Landing, LandingSlot, SlotRef
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Member
from moonpool.core.request import Attempt
from moonpool.kvstore.push_landing import PushLanding
from moonpool.kvstore.push_target import PushTarget
from moonpool.kvstore.sealing.keys import KvKey
from moonpool.kvstore.transfer.carrier import Endpoint, ReadsDevice, Sender
from moonpool.kvstore.transfer.choose import (
    MakeSender,
    carriers_for,
    make_sender,
    pick,
    rdma_usable,
    reaching,
)
from moonpool.kvstore.transfer.sealable import require_sealable
from moonpool.wire import pb
from moonpool.wire.convert import to_wire

__all__ = ["PushLanding", "Pusher"]

KEPT_TARGETS = 64  # store nodes whose connection is kept; the least recently used one goes first


class Pusher:
    """Event-loop only. ``source`` is what it pushes from, and must stay mapped until ``close`` has returned.

    A worker gives its page tensor, [pages, layers, slice_bytes] contiguous uint8, and pushes with ``push_layer``. A store
    node gives its mapped regions, a flat uint8 array per region number, and pushes with ``push_blocks``. With a ``key``
    what leaves this host is encrypted.
    """

    def __init__(
        self,
        member: Member,
        layout: KVLayout,
        source: NDArray[np.uint8] | Sequence[NDArray[np.uint8]],
        config: TransferConfig,
        *,
        senders: MakeSender | None = None,
        key: KvKey | None = None,
        in_device: DeviceMemory | None = None,
    ) -> None:
        """``in_device``: where ``source`` lies on a GPU, too; a carrier that can reads it there, and says so."""
        self._member = member
        self._layout = layout
        self._config = config
        self._make_sender = senders or partial(make_sender, key=key)
        self._sealed = key is not None
        memories = [source] if isinstance(source, np.ndarray) else source
        self._memories = tuple(_flat(memory) for memory in memories)
        self._in_device = in_device
        self._senders: dict[str, Sender] = {}
        self._targets: dict[tuple[str, Incarnation], PushTarget] = {}  # by address and life; oldest use first
        self._loop: asyncio.AbstractEventLoop | None = None

    def prepare(self) -> None:
        """Make the sending end for other nodes ahead of the first grant (the first UCX agent takes half a second)."""
        if self._sealed:
            require_sealable(self._config)
        elif self._config.carrier == "ucx" or (self._config.carrier == "auto" and rdma_usable(self._config)):
            self._loop = asyncio.get_running_loop()
            self._sender("ucx")

    async def grant(
        self,
        store: Member,
        attempt: Attempt,
        keys: Sequence[bytes],
        *,
        first_block: int,
        tail_valid: int,
        reader: MemberId,
        reader_incarnation: Incarnation,
        parent: bytes | None = None,
    ) -> PushLanding:
        """Ask ``store`` for slots for ``keys`` (whole blocks from ``first_block`` on) and an unfinished last block.

        ``parent`` is the key of block ``first_block - 1``: without it nothing of a later start gets findable. ``reader``
        hears of what lands. Busy: not now; LayoutMismatch; PeerSilent: the store node does not answer; ConfigError: no
        carrier reaches it.
        """
        carriers = carriers_for(self._config, self._member.node, store.node, sealed=self._sealed)
        target = await self._target(carriers, store.id, store.address, store.incarnation)
        request = pb.store.GrantRequest(
            request=attempt.request.id,
            attempt=attempt.number,
            reader=reader,
            reader_incarnation=reader_incarnation,
            keys=keys,
            first_block=first_block,
            tail_valid=tail_valid,
            parent=parent or b"",
        )
        to_wire(attempt.request.use, request.use)
        before = target.endpoint
        return await self._open(target, await target.grant(request), self._layout, before)

    async def push_blocks(
        self,
        landing: Landing,
        offered: Sequence[Endpoint],
        address: str,
        layout: KVLayout,
        blocks: Sequence[tuple[SlotRef, LandingSlot]],
    ) -> Drained:
        """Push sealed slots of our regions into slots of ``landing`` at the node of ``address``; returns when drained.

        The caller pins the sources meanwhile. TransferFailed, PeerSilent: after draining what could be. ConfigError: no
        carrier that is ``offered`` can be used here.
        """
        carriers = carriers_for(self._config, self._member.node, landing.node, sealed=self._sealed)
        target = await self._target(carriers, landing.node, address, landing.incarnation)
        try:
            endpoint = pick(target.carriers, offered)
        except MoonpoolError:
            await target.drain(landing.id)
            raise
        known = target.endpoint
        if known is None or (known.generation <= endpoint.generation and known.agent_name != endpoint.agent_name):
            target.adopt(endpoint, landing.incarnation)
        work = await self._open(target, landing, layout, endpoint)
        pairs = [(to.block, source) for source, to in blocks]
        for layer in range(layout.layers):
            try:
                await asyncio.to_thread(work.push_slots, 0, layer, pairs)
            except BaseException:  # nobody else would say that this writer is through
                await work.cancel()
                raise
        drained = await work.drain()
        if work.failure is not None:
            raise work.failure.to_exception()
        return drained

    async def _open(self, target: PushTarget, landing: Landing, layout: KVLayout, before: Endpoint | None) -> PushLanding:
        """``landing``, connected or about to be; given back where its node's endpoint is not to be had.

        ``before`` was described before or with the landing: whatever has freed the landing's slots since (its reader left,
        and the endpoint was made anew or this writer cut off) has ended that endpoint, too. Any other may outlive the
        landing, so it is asked for.
        """
        try:
            endpoint = await target.endpoint_for(landing.incarnation, landing.generation)
            if endpoint != before and not (await target.state(landing.id, 0.0)).known:
                raise TransferFailed(f"landing {landing.id} is over at {target.name}", peer=target.name)
        except MoonpoolError:
            with suppress(MoonpoolError):  # the node fences the slots when it finds this writer gone
                await target.drain(landing.id)
            raise
        return PushLanding(landing, layout, self._memories, target, endpoint)

    async def _target(self, carriers: Sequence[str], name: str, address: str, incarnation: Incarnation) -> PushTarget:
        self._loop = asyncio.get_running_loop()
        if "ucx" in carriers:
            carriers = await asyncio.to_thread(reaching, self._config, carriers, address)
        key = (address, incarnation)
        target = self._targets.pop(key, None)
        if target is None:
            if len(carriers) == 1:
                self._sender(carriers[0])  # what cannot work here is refused before anything is granted
            target = PushTarget(name, address, self._member, self._layout, carriers, self._sender)
        self._targets[key] = target
        await self._retire_targets(address, incarnation)
        return target

    async def _retire_targets(self, address: str, incarnation: Incarnation) -> None:
        """Former lives of the node at ``address``, and those used longest ago where there are too many."""
        for key, target in list(self._targets.items()):
            former = key[0] == address and key[1] != incarnation
            if target.landings == 0 and (former or len(self._targets) > KEPT_TARGETS):
                del self._targets[key]
                await target.retire()

    def _sender(self, carrier: str) -> Sender:
        if carrier not in self._senders:
            sender = self._make_sender(carrier, self._member, self._config, self._notify)
            try:
                if self._in_device is not None and isinstance(sender, ReadsDevice):
                    sender.read_from(self._in_device)
                sender.register(self._memories)
            except BaseException:
                sender.close()
                raise
            self._senders[carrier] = sender
        return self._senders[carrier]

    def _notify(self, endpoint: Endpoint, frames: Sequence[bytes]) -> Future[None]:
        """From the segment carrier's thread: the frames by the node's Notify call, made on our loop."""
        for target in tuple(self._targets.values()):
            if target.endpoint is not None and target.endpoint.incarnation == endpoint.incarnation:
                assert self._loop is not None
                try:
                    return asyncio.run_coroutine_threadsafe(target.notify(frames), self._loop)
                except RuntimeError:  # the loop is closed
                    break
        gone: Future[None] = Future()
        gone.set_exception(TransferFailed(f"node {endpoint.node} is no longer a target", peer=endpoint.node))
        return gone

    def bytes_sent(self) -> int:
        """Payload and notice bytes of all carriers since the start, what was pushed again included."""
        return sum(sender.bytes_sent() for sender in self._senders.values())

    def sent_by_carrier(self) -> dict[str, int]:
        """``bytes_sent`` by the carriers used so far."""
        return {name: sender.bytes_sent() for name, sender in self._senders.items()}

    def carriers(self) -> str:
        """The carriers used so far and what really carried their bytes, as in ``ucx (tcp), segment (mmap)``."""
        return ", ".join(f"{name} ({sender.transport_used()})" for name, sender in sorted(self._senders.items()))

    async def close(self) -> None:
        """After every landing has ended. Blocks no loop: what is posted is polled to its end in the carriers' threads."""
        senders = list(self._senders.values())
        await asyncio.gather(*(asyncio.to_thread(sender.close) for sender in senders))
        for target in self._targets.values():
            await target.close()
        self._targets.clear()


def _flat(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """``memory`` as one flat view; ValueError where that would be a copy."""
    if not memory.flags.c_contiguous:
        raise ValueError(f"source memory of shape {memory.shape} is not contiguous: a carrier would read a copy")
    return memory.reshape(-1)
