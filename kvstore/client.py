"""A worker's session with the store node of its host: pins, fetches, publishing, and reading slots through the mapping."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from moonpool.core.config import TimingConfig
from moonpool.core.errors import Failure, MoonpoolError, PeerSilent, Reason, TransferFailed
from moonpool.core.ids import Incarnation, NodeId, RequestId
from moonpool.core.landing import Landed, Region, SlotRef, Ticket
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Member
from moonpool.core.use import Use
from moonpool.kvstore import slices
from moonpool.kvstore.agent import hand_over
from moonpool.kvstore.claims import Reserved
from moonpool.kvstore.client_session import Session
from moonpool.kvstore.regions import map_region
from moonpool.wire import pb
from moonpool.wire.channels import dial
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.status import being_cancelled, error_of

CALL_S = 10.0  # a control call that takes longer means a frozen node
FETCH_GRACE_S = 1.0  # for the answer of a fetch that used its whole deadline
LATE_S = 10.0  # beyond a caller's patience: an answer that grants something must not be lost, so it is heard and undone
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LandingFailure:
    """No more of this landing will come; what was ``Landed`` stays good until the reader ends it.

    ``error`` is None where all has come: of interest only to a reader that was never told of this landing.
    """

    landing: int
    request: RequestId
    attempt: int
    error: Failure | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Leading blocks that are now local, pinned by ``ticket``; ``bytes`` of them had to be moved, by ``carrier``."""

    ticket: Ticket
    bytes: int
    carrier: str


class WorkerStore:
    """Made by ``connect``. Methods are for the event loop, except ``read_slice``, which any thread may call.

    Every call raises ``PeerSilent`` once the session is over: pins, landings and reservations went with it.
    """

    def __init__(
        self,
        address: str,
        layout: KVLayout,
        on_landed: Callable[[Landed], None],
        on_failed: Callable[[LandingFailure], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.address = address
        self.layout = layout
        self.regions: dict[int, NDArray[np.uint8]] = {}
        self.incarnation = Incarnation(0)  # of the store node
        self.counted: Counter[str] = Counter()
        self._on_landed, self._on_failed, self._on_lost = on_landed, on_failed, on_lost
        self._welcome: asyncio.Future[pb.store.Welcome] = asyncio.get_running_loop().create_future()
        self._session: Session
        self._number = 0
        self._over: MoonpoolError | None = None  # why no more calls are made
        self._closed = False
        self._channel = dial(address)
        self._stub: Any = pb.store_rpc.StoreStub(self._channel)
        self._copier = ThreadPoolExecutor(1, "store copy")
        self._background: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls,
        address: str,
        member: Member,
        layout: KVLayout,
        *,
        on_landed: Callable[[Landed], None],
        on_failed: Callable[[LandingFailure], None],
        on_lost: Callable[[], None],
        timing: TimingConfig | None = None,
    ) -> WorkerStore:
        """Open a session, map the regions, hand the node our pidfd.

        Callbacks run on the event loop. ``on_lost``: the session broke; connecting again is the caller's business.
        LayoutMismatch: refused for good. PeerSilent, TransferFailed: not now.
        """
        beat_s = (timing or TimingConfig()).heartbeat_ms / 1e3
        client = cls(address, layout, on_landed, on_failed, on_lost)
        client._session = Session(address, member, beat_s, client._receive, client._ended)
        try:
            async with asyncio.timeout(CALL_S):
                welcome = await client._welcome
            client._number = welcome.session
            client.incarnation = Incarnation(welcome.incarnation)
            await asyncio.to_thread(client._settle_in, welcome)
        except BaseException as e:
            client._on_lost = lambda: None
            await client.close()
            if isinstance(e, TimeoutError):
                raise PeerSilent(f"the store node at {address} did not answer within {CALL_S:g} s") from e
            raise
        return client

    def _settle_in(self, welcome: pb.store.Welcome) -> None:
        for message in welcome.regions:
            region = from_wire(message, Region)
            self.regions[region.number] = map_region(region)
        if welcome.agent_socket:
            hand_over(welcome.agent_socket, welcome.session)

    def _receive(self, message: pb.store.StoreMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "welcome" and not self._welcome.done():
            self._welcome.set_result(message.welcome)
        elif kind == "landed":
            self._on_landed(from_wire(message.landed, Landed))
        elif kind == "failed":
            failed = message.failed
            error = None
            if failed.HasField("error"):
                told = failed.error
                error = Failure(Reason(told.reason), told.message, told.peer, told.retry_after_s)
            self._on_failed(LandingFailure(failed.landing, RequestId(failed.request), failed.attempt, error))

    def _ended(self, error: MoonpoolError) -> None:
        if self._over is not None:
            return
        self._over = error
        if not self._welcome.done():
            self._welcome.set_exception(error)
        else:
            self._on_lost()

    async def close(self) -> None:
        """Leave. What is being published is finished or given back first; views of regions die with their last user."""
        if self._closed:
            return
        self._closed = True
        await self._put_away()
        self._over = self._over or PeerSilent(f"the session with the store node at {self.address} was closed")
        await self._session.close()
        await self._channel.close()
        await asyncio.to_thread(self._copier.shutdown)
        if not self._welcome.done():
            self._welcome.cancel()
        self.regions.clear()

    async def _put_away(self) -> None:
        """What is being given back, unless the node takes too long: then the end of the session does it."""
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=CALL_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _call(self, method: Callable[..., Awaitable[T]], request: object, timeout_s: float = CALL_S) -> T:
        if self._over is not None:
            raise PeerSilent(self._over.message, peer=self.address)
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as e:
            raise error_of(e, f"the store node at {self.address}") from e
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            # ``close`` ended the channel under the call: our caller was not cancelled and must not believe so.
            raise PeerSilent(f"the session with the store node at {self.address} was closed", peer=self.address) from None

    def _keys(self, keys: Sequence[bytes], use: Use = Use(), parent: bytes | None = None) -> pb.store.KeysRequest:
        asked = pb.store.KeysRequest(session=self._number, keys=keys, layout=self.layout.fingerprint, parent=parent or b"")
        to_wire(use, asked.use)
        return asked

    async def _or_undo(
        self,
        method: Callable[..., Awaitable[T]],
        request: object,
        undo: Callable[[T], Awaitable[object]],
        limit_s: float = CALL_S,
    ) -> T:
        """A call whose effect must not be left behind where our caller is cancelled, or out of patience, while it runs.

        The call itself goes on for ``LATE_S`` more: a node that was slow may have granted what nobody would hear of.
        """
        task = asyncio.ensure_future(self._call(method, request, limit_s + LATE_S))
        try:
            await asyncio.wait({task}, timeout=limit_s)
        except asyncio.CancelledError:
            self._later(self._undo(task, undo))
            raise
        if not task.done():
            self._later(self._undo(task, undo))
            raise PeerSilent(f"the store node at {self.address} did not answer within {limit_s:g} s", peer=self.address)
        return task.result()

    async def _undo(self, task: Awaitable[T], undo: Callable[[T], Awaitable[object]]) -> None:
        try:
            await undo(await task)
            self.counted["undone"] += 1
        except MoonpoolError:
            self.counted["undo_failed"] += 1  # the node undoes it when the session ends

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks this host holds. Pins nothing: a later ``pin`` may answer fewer."""
        reply = await self._call(self._stub.Lookup, self._keys(keys))
        return int(reply.blocks)

    async def pin(self, keys: Sequence[bytes], use: Use = Use(), load_ms: int = 0) -> Ticket:
        """A ticket on the leading blocks this host holds in DRAM, maybe none. ``unpin`` it, also when it is empty.

        Those it holds in lower tiers only are brought into DRAM first, as far as ``load_ms`` allows.
        """
        asked = self._keys(keys, use)
        asked.load_ms = load_ms
        reply = await self._or_undo(self._stub.Pin, asked, self._unpin, CALL_S + load_ms / 1e3)
        return from_wire(reply.ticket, Ticket)

    async def unpin(self, ticket: Ticket) -> None:
        """End a ticket. Again is a no-op; so is one whose session is over."""
        if ticket.slots and self._over is None:
            await self._call(self._stub.Unpin, pb.store.UnpinRequest(session=self._number, ticket=ticket.id))

    async def _unpin(self, reply: pb.store.PinReply | pb.store.FetchReply) -> None:
        await self.unpin(from_wire(reply.ticket, Ticket))

    async def fetch(
        self, keys: Sequence[bytes], node: NodeId, address: str, deadline_ms: int, use: Use = Use(), *, move: bool = False
    ) -> Fetched:
        """Bring what this host lacks of ``keys`` from the store node ``node`` at ``address``; fewer may come, or none.

        ``move``: once they came, that node's copies are the first to be evicted there.
        """
        request = pb.store.FetchRequest(
            session=self._number, keys=keys, node=node, address=address, deadline_ms=deadline_ms, move=move
        )
        to_wire(self.layout, request.layout)
        to_wire(use, request.use)
        reply = await self._or_undo(self._stub.Fetch, request, self._unpin, deadline_ms / 1e3 + FETCH_GRACE_S)
        return Fetched(from_wire(reply.ticket, Ticket), reply.bytes, reply.carrier)

    async def end_landing(self, landing: int) -> None:
        """The reader is through with a landing, copied or given up. Again is a no-op; so is one whose session is over."""
        if self._over is None:
            await self._call(self._stub.EndLanding, pb.store.LandingRequest(landing=landing))

    async def quarantine(self, key: bytes, layer: int, place: str) -> None:
        """Our private copy of ``key`` failed its digest at ``place`` (a short stable name: it becomes a counter)."""
        await self._call(self._stub.Quarantine, pb.store.QuarantineRequest(key=key, layer=layer, place=place))

    async def publish(
        self, blocks: Sequence[tuple[bytes, NDArray[np.uint8]]], parent: bytes | None = None, use: Use = Use()
    ) -> int:
        """Store whole blocks: (key, [block_bytes] view of a page that the caller holds until this returns).

        ``blocks`` follow one another; ``parent`` is the key of the block before the first, None where that begins its
        sequence. Blocks that are there, on their way, or find no room are skipped and counted. Returns newly stored ones.
        """
        if not blocks:
            return 0
        reply = await self._or_undo(self._stub.Reserve, self._keys([key for key, _ in blocks], use, parent), self._abandon)
        by_key = dict(blocks)
        work = []
        for one in reply.reservations:
            self.counted[f"published_{one.state}"] += 1
            if one.state == Reserved.NEW:
                work.append((one.id, from_wire(one.slot, SlotRef), by_key[one.key]))
        if not work:
            return 0
        request = pb.store.SealRequest(session=self._number, reservations=[id for id, _, _ in work])
        await self._copy(reply, [(slot, page) for _, slot, page in work])
        await self._or_undo(self._stub.Seal, request, _nothing)
        return len(work)

    def ended(self, use: Use, output_tokens: int) -> None:
        """A request was answered: a hint for eviction, not waited for, and lost if the session is."""
        if self._over is None:
            self._later(self._tell_ended(use, output_tokens))

    async def _tell_ended(self, use: Use, output_tokens: int) -> None:
        asked = pb.store.EndedRequest(output_tokens=output_tokens)
        to_wire(use, asked.use)
        with suppress(MoonpoolError):
            await self._call(self._stub.Ended, asked)

    async def _copy(self, reply: pb.store.ReserveReply, work: list[tuple[SlotRef, NDArray[np.uint8]]]) -> None:
        """In a thread. A cancelled caller still waits for it: the pages are the caller's again afterwards."""
        copying = asyncio.get_running_loop().run_in_executor(self._copier, partial(self._fill, work))
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            while not copying.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([copying])
            self._later(self._undo(_done(reply), self._abandon))
            raise
        except BaseException:
            await self._abandon(reply)
            raise

    def _fill(self, work: list[tuple[SlotRef, NDArray[np.uint8]]]) -> None:
        for slot, page in work:
            slices.fill(self.layout, self._region(slot), slot.offset, slot.key, page)

    async def _abandon(self, reply: pb.store.ReserveReply) -> None:
        ids = [one.id for one in reply.reservations if one.state == Reserved.NEW]
        if ids and self._over is None:
            await self._call(self._stub.Abandon, pb.store.SealRequest(session=self._number, reservations=ids))

    def _region(self, slot: SlotRef) -> NDArray[np.uint8]:
        region = self.regions.get(slot.region)
        if region is None or not 0 <= slot.offset <= len(region) - self.layout.slot_bytes:
            raise TransferFailed(f"slot at region {slot.region} offset {slot.offset} is not in any mapped region")
        return region

    def read_slice(self, slot: SlotRef, layer: int, into: NDArray[np.uint8], valid: int) -> None:
        """Copy one layer of ``slot`` into ``into`` [slice_bytes], then verify that private copy. Any thread may call it.

        DigestMismatch: what was copied is not (slot.key, layer). Call ``quarantine``, and treat the block as missing.
        """
        slices.read(self.layout, self._region(slot), slot.offset, layer, slot.key, valid, into)


async def _done(value: T) -> T:
    return value


async def _nothing(_: object) -> None:
    pass
