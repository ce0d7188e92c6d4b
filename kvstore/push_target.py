"""A store node as its writers talk to it: control calls, and the current life of its endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from moonpool.core.errors import DeadlinePassed, Failure, MoonpoolError, PeerSilent, Reason
from moonpool.core.ids import Incarnation
from moonpool.core.landing import Landing
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Member
from moonpool.kvstore.transfer.carrier import Endpoint, Sender
from moonpool.wire import pb
from moonpool.wire.channels import dial
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.status import being_cancelled, error_of

CALL_S = 5.0  # a control call that takes longer means a frozen node
LATE_S = 10.0
NOTIFY_S = 10.0  # answered when the slices are verified
NEXT_LIFE_S = 0.5  # how long a broken connection may be the sign of an endpoint that is being made anew


@dataclass(frozen=True, slots=True)
class LandingState:
    """(prompt block, layer) of what is missing, and of that what was rejected. ``known`` is false once it is over."""

    known: bool
    generation: int
    missing: frozenset[tuple[int, int]]
    rejected: frozenset[tuple[int, int]]


class PushTarget:
    """One life of one store node. Event-loop only. Every call raises MoonpoolError: PeerSilent where nobody answers."""

    def __init__(
        self,
        name: str,
        address: str,
        writer: Member,
        layout: KVLayout,
        carriers: Sequence[str],
        sender_for: Callable[[str], Sender],
    ) -> None:
        """``carriers``, best first, are those that reach it; ``sender_for`` gives the sending end of each."""
        self.name = name  # the store node's member id, to exclude when it fails
        self.carriers = tuple(carriers)
        self._sender_for = sender_for
        self.endpoint: Endpoint | None = None
        self.landings = 0  # that are not yet drained: it is kept for them
        self._writer = writer
        self._layout = layout
        self._channel = dial(address)
        self._stub = pb.store_rpc.StoreStub(self._channel)
        self._renewing = asyncio.Lock()

    async def close(self) -> None:
        await self._channel.close()

    async def retire(self) -> None:
        """Nobody pushes to it any more."""
        if self.endpoint is not None:
            self.sender_for(self.endpoint).forget(self.endpoint)
        await self.close()

    def sender_for(self, endpoint: Endpoint) -> Sender:
        return self._sender_for(endpoint.carrier)

    async def _call(self, call: Any, request: Any, timeout: float = CALL_S) -> Any:
        try:
            return await call(request, timeout=timeout)
        except grpc.aio.AioRpcError as e:
            error = error_of(e, self.name)
            if isinstance(error, DeadlinePassed):
                error = PeerSilent(f"{self.name} did not answer within {timeout:g} s", peer=self.name)
            raise error from e
        except grpc.aio.UsageError:  # the channel was closed before
            raise self._no_target() from None
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            # The channel was closed under the call, by whoever needs this target no more: nobody cancelled our caller.
            raise self._no_target() from None

    def _no_target(self) -> PeerSilent:
        return PeerSilent(f"{self.name} is no longer a target", peer=self.name)

    async def grant(self, request: pb.store.GrantRequest) -> Landing:
        request.writer, request.writer_incarnation = self._writer.id, self._writer.incarnation
        to_wire(self._layout, request.layout)
        reply = await self._call(self._stub.Grant, request, CALL_S + LATE_S)  # what is granted must be heard of, and given back
        if reply.HasField("error"):
            raise self._error(reply.error)
        return from_wire(reply.landing, Landing)

    async def state(self, landing: int, wait_s: float) -> LandingState:
        """The answer waits up to ``wait_s`` for the landing to be complete, or a slice of it rejected."""
        request = pb.store.LandingRequest(landing=landing, wait_ms=int(wait_s * 1e3))
        reply = await self._call(self._stub.LandingState, request, CALL_S + wait_s)
        missing = frozenset((one.block, one.layer) for one in reply.missing)
        rejected = frozenset((one.block, one.layer) for one in reply.rejected)
        return LandingState(reply.known, reply.generation, missing, rejected)

    async def drain(self, landing: int) -> None:
        request = pb.store.DrainRequest(landing=landing, writer=self._writer.id, writer_incarnation=self._writer.incarnation)
        await self._call(self._stub.Drain, request)

    async def end(self, landing: int) -> None:
        """For the reader, where it cannot say so itself."""
        await self._call(self._stub.EndLanding, pb.store.LandingRequest(landing=landing))

    async def notify(self, frames: Sequence[bytes]) -> None:
        await self._call(self._stub.Notify, pb.store.NotifyRequest(frames=frames), NOTIFY_S)

    async def endpoint_for(self, incarnation: Incarnation, generation: int) -> Endpoint:
        """The endpoint of this life of the node, ``generation`` or later, connected (or about to be)."""
        async with self._renewing:
            known = self.endpoint
            if known is None or known.incarnation != incarnation or known.generation < generation:
                await self._renew(incarnation)
            assert self.endpoint is not None
            return self.endpoint

    async def endpoint_after(self, lost: Endpoint) -> Endpoint:
        """The next life of an endpoint whose connection broke; the same one, connected anew, where it has no next life."""
        async with self._renewing:
            deadline = time.monotonic() + NEXT_LIFE_S
            while self.endpoint is not None and self.endpoint.agent_name == lost.agent_name:
                endpoint = await self._renew(lost.incarnation)
                if endpoint.agent_name != lost.agent_name or time.monotonic() > deadline:
                    break
                await asyncio.sleep(NEXT_LIFE_S / 20)
            assert self.endpoint is not None
            return self.endpoint

    async def _renew(self, incarnation: Incarnation) -> Endpoint:
        me = self._writer
        request = pb.store.EndpointRequest(carriers=self.carriers, writer=me.id, writer_incarnation=me.incarnation)
        to_wire(self._layout, request.layout)
        reply = await self._call(self._stub.Endpoint, request)
        if reply.HasField("error"):
            raise self._error(reply.error)
        return self.adopt(from_wire(reply, Endpoint), incarnation)

    def adopt(self, endpoint: Endpoint, incarnation: Incarnation) -> Endpoint:
        """``endpoint`` is the newest one known. PeerSilent where it belongs to another life of the node."""
        if endpoint.incarnation != incarnation:
            raise PeerSilent(f"{self.name} was restarted: what it granted before is gone", peer=self.name)
        if self.endpoint is not None and self.endpoint.agent_name != endpoint.agent_name:
            self.sender_for(self.endpoint).forget(self.endpoint)
        sender = self.sender_for(endpoint)
        self.endpoint = endpoint
        sender.connect(endpoint)
        return endpoint

    def _error(self, error: pb.types.Error) -> MoonpoolError:
        return Failure(Reason(error.reason), error.message, error.peer or self.name, error.retry_after_s).to_exception()
