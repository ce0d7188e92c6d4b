"""One store node: a host's share of the pool, the target of every push, and the host's agent.

This is the shell: clock, threads, sessions and processes around ``Pool``, which decides. All of it runs on one event
loop; digests are computed in threads. Its gRPC face is ``service``, moving blocks between nodes is ``fetching``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import structlog

from moonpool.core.config import Config
from moonpool.core.errors import Busy, Failure, InvalidRequest, LayoutMismatch, MoonpoolError, PeerSilent, TransferFailed
from moonpool.core.ids import Incarnation, MemberId
from moonpool.core.landing import Landed, Landing
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange, Peers, WorkerReport
from moonpool.kvstore.agent import Agent, socket_path
from moonpool.kvstore.claims import LandingAsk, Life
from moonpool.kvstore.fetching import Fetcher, Moved, Push, PushOrder
from moonpool.kvstore.node_sessions import NodeSession, Sessions
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.pusher import Pusher
from moonpool.kvstore.regions import OwnRegions, Progress
from moonpool.kvstore.slots import SlotMap
from moonpool.kvstore.transfer.carrier import Endpoint, OnNotices, Receiver
from moonpool.kvstore.verify import Verifier
from moonpool.kvstore.watch import Watchers
from moonpool.wire import pb
from moonpool.wire.convert import to_wire

REMAKE_PAUSE_S = 1.0  # between two automatic remakes of the endpoint: each one disconnects every healthy sender
POISON = 0xFF  # as bfloat16 or float32: NaN
MakeReceiver = Callable[[Config, Member, OnNotices], Receiver | None]
OnGone = Callable[[MemberId, Incarnation, str], None]
log = structlog.get_logger(__name__)


def make_receiver(config: Config, member: Member, on_notices: OnNotices) -> Receiver | None:
    """The carrier for writers of other nodes; None where only mapped segments are wanted."""
    if config.transfer.carrier == "segment":
        return None
    from moonpool.kvstore.transfer.ucx_receiver import UcxReceiver

    return UcxReceiver(member, config.transfer, on_notices)


class StoreNode:
    """Made by ``start``. Event-loop only."""

    def __init__(
        self,
        config: Config,
        member: Member,
        layout: KVLayout,
        peers: Peers,
        regions: OwnRegions,
        on_gone: OnGone | None,
        push: Push | None,
    ) -> None:
        self.config = config
        self.member = member
        self.layout = layout
        self.peers = peers
        self.regions = regions
        self.on_gone = on_gone
        self.clock = time.monotonic
        self.slots = SlotMap(layout.slot_bytes, regions.slots_per_region, self._poison if config.engine.poison else None)
        self.pool = Pool(member.node, member.incarnation, self.slots, layout.layers, layout.block_tokens)
        self.verifier = Verifier(self.pool, layout, regions.views, self.clock, self._tell_landed, self.changed)
        self.watchers = Watchers(member.node, member.incarnation, self._snapshot)
        self.sessions = Sessions(config.timing.silent_after_ms / 1e3, self.clock, self._session_ended)
        self.agent = Agent(socket_path(config.state_dir(Path.home()), member.node), self.sessions.life, self._proved_dead)
        self.pusher = Pusher(member, layout, regions.views, config.transfer)
        self.fetcher = Fetcher(self, push or self._push)
        self.receiver: Receiver | None = None
        self.remakes = 0
        self._opened = 0  # how often the receiver was opened and not idled
        self._generation = 1  # without a receiver
        self._remaking = asyncio.Lock()
        self._remade_at = float("-inf")
        self._flush: asyncio.Handle | None = None
        self._silent: dict[Life, asyncio.TimerHandle | None] = {}
        self._unsubscribe: Callable[[], None] = lambda: None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @classmethod
    async def start(
        cls,
        config: Config,
        member: Member,
        layout: KVLayout,
        peers: Peers,
        *,
        on_gone: OnGone | None = None,
        progress: Progress | None = None,
        receiver: MakeReceiver = make_receiver,
        push: Push | None = None,
    ) -> StoreNode:
        """Allocates and touches the pool (in a thread, with ``progress``), then listens for its host's workers.

        ``on_gone(member, incarnation, proof)`` hears of proved deaths of local workers. ``push`` moves blocks to another
        node (by default over the carrier that reaches it). ConfigError: too little memory, an unusable folder, a carrier
        that cannot start.
        """
        regions = await asyncio.to_thread(OwnRegions.create, config.store, config.cluster.name, member.node, layout, progress)
        node = cls(config, member, layout, peers, regions, on_gone, push)
        try:
            await node._start(receiver)
        except BaseException:
            await node.close()
            raise
        return node

    async def _start(self, receiver: MakeReceiver) -> None:
        loop = asyncio.get_running_loop()
        self.agent.start()

        def on_notices(frames: Sequence[bytes]) -> None:
            loop.call_soon_threadsafe(self._notices, list(frames))

        self.receiver = await asyncio.to_thread(receiver, self.config, self.member, on_notices)
        if self.receiver is not None:
            await asyncio.to_thread(self.receiver.register, self.regions.files, self.regions.views)
        self.spawn(self.sessions.watch())
        self._unsubscribe = self.peers.subscribe(self._peer_changed)

    def add_to(self, server: Any) -> None:
        """Serve ``proto/store.proto`` on a ``grpc.aio`` server."""
        from moonpool.kvstore.service import StoreService

        pb.store_rpc.add_StoreServicer_to_server(StoreService(self), server)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Work that outlives the call that began it, and that ``close`` ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # The pool changed.

    def changed(self) -> None:
        """Call after every change of the pool: keeps the receiver polling while it must, and sends events soon."""
        self._poll_as_needed()
        if self._flush is None and not self._closed:
            self._flush = asyncio.get_running_loop().call_soon(self._send_events)

    def _send_events(self) -> None:
        self._flush = None
        self.watchers.publish(self.pool.take_events())

    def _snapshot(self) -> Any:
        self._send_events_now()
        return self.pool.snapshot()

    def _send_events_now(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
        self._send_events()

    def _poll_as_needed(self) -> None:
        """The receiver is open once for every landing with a remote writer that is not known to be frozen."""
        if self.receiver is None:
            return
        wanted = sum(c.ask.remote and c.writer_open and c.ask.writer not in self._silent for c in self.pool.landings)
        while self._opened < wanted:
            self.receiver.open()
            self._opened += 1
        while self._opened > wanted:
            self.receiver.idle()
            self._opened -= 1

    def _poison(self, slot: int) -> None:
        ref = self.slots.ref(slot, b"")
        self.regions.views[ref.region][ref.offset : ref.offset + self.layout.slot_bytes] = POISON

    # Landings.

    async def grant(self, ask: LandingAsk) -> Landing:
        """Busy where slots lack; if making the endpoint anew would free some, that is done first (not too often)."""
        try:
            landing = self.pool.landings.grant(ask, self.clock())
        except Busy:
            if not self.pool.waiting_for_remake or self.clock() - self._remade_at < REMAKE_PAUSE_S:
                raise
            log.info("endpoint_remade_for_room", slots=self.pool.waiting_for_remake)
            await self.remake()
            landing = self.pool.landings.grant(ask, self.clock())
        self.changed()
        return landing

    def is_remote(self, writer: Life) -> bool:
        """Whether ``writer`` reaches our slots only through the carrier. One of unknown whereabouts may map them."""
        if self.sessions.of(writer) is not None:
            return False
        known = self.peers.get(writer.member)
        return known is not None and known.member.incarnation == writer.incarnation and known.member.node != self.member.node

    def reader(self, life: Life) -> int:
        """The session of a landing's reader. Busy where it has none: it would never hear of what lands."""
        session = self.sessions.of(life)
        if session is None:
            raise Busy(f"{life.member} has no session with the store node of {self.member.node}", peer=life.member)
        return session.number

    def require_live(self, life: Life) -> None:
        """PeerSilent for a life that is over or silent: whatever it still asks for comes too late."""
        known = self.peers.get(life.member)
        if known is None:
            return
        if known.member.incarnation > life.incarnation:
            raise PeerSilent(f"{life.member} has a newer life, {known.member.incarnation}", peer=life.member)
        if known.member.incarnation == life.incarnation and known.liveness is not Liveness.LIVE:
            raise PeerSilent(f"{life.member} counts as {known.liveness}: {known.proof}", peer=life.member)

    def drained(self, landing: int, writer: Life) -> None:
        claim = self.pool.landings.get(landing)
        if not self.pool.landings.drained(landing, writer, self.clock()) or claim is None:
            return
        if claim.incomplete and claim.reader_open and not claim.fenced:
            failure = TransferFailed(f"{writer.member} ended landing {landing} before all of it had landed", peer=writer.member)
            self.sessions.tell_failed(claim.ask.reader, claim.landing, Failure.of(failure))
        self.verifier.pulse()
        self.changed()

    def end_landing(self, landing: int) -> None:
        if self.pool.landings.end(landing, self.clock()):
            self.verifier.pulse()
            self.changed()

    def _notices(self, frames: list[bytes]) -> None:
        for frame in frames:
            self.spawn(self._notice(frame))

    async def _notice(self, frame: bytes) -> None:
        try:
            await self.verifier.take(frame)
        except InvalidRequest as e:
            log.warning("notice_refused", error=e.message)

    def _tell_landed(self, reader: int | None, landed: Landed) -> None:
        self.sessions.tell(reader, pb.store.StoreMessage(landed=to_wire(landed, pb.types.Landed())))

    async def _push(self, order: PushOrder) -> Moved:
        drained = await self.pusher.push_blocks(order.landing, order.target, order.target_address, order.blocks)
        return Moved(drained.bytes_sent, drained.carrier)

    # The carrier's endpoint.

    @property
    def generation(self) -> int:
        return self._generation if self.receiver is None else self.receiver.describe().generation

    async def endpoint(self) -> Endpoint:
        """The current life of the endpoint; while it is made anew, the next one."""
        async with self._remaking:
            return self._endpoint()

    def _endpoint(self) -> Endpoint:
        if self.receiver is not None:
            return self.receiver.describe()
        files = tuple(self.regions.files)
        return Endpoint(self.member.node, self.member.incarnation, self._generation, "segment", "", b"", (), files)

    async def remake(self) -> Endpoint:
        """Destroy the endpoint and make it anew: slots fenced before are free then. Healthy senders connect again."""
        async with self._remaking:
            fenced = self.pool.fenced_remote()
            if self.receiver is not None:
                await self.receiver.remake()
            else:
                self._generation += 1
            self._remade_at = self.clock()
            self.remakes += 1
            self.pool.endpoint_remade(fenced, self.clock())
            self.verifier.pulse()
            self.changed()
            return self._endpoint()

    # Lives.

    def admit(self, member: Member) -> NodeSession:
        """Open the session of a local worker. LayoutMismatch, InvalidRequest or PeerSilent where it does not belong here."""
        if member.node != self.member.node:
            raise InvalidRequest(
                f"{member.id} is on node {member.node}; this is the store node of {self.member.node}", param="node"
            )
        if member.layout is None:
            raise LayoutMismatch(f"{member.id} names no KV layout; the store node has {self.layout.fingerprint}")
        self.layout.require_same(member.layout, member.id)
        mine, theirs = self.member.hash_key_id, member.hash_key_id
        if mine and theirs and mine != theirs:
            raise LayoutMismatch(f"hash key {mine} here, {theirs} at {member.id}; start both with the same cluster.key_file")
        life = Life(member.id, member.incarnation)
        self.require_live(life)
        for other in self.sessions:
            if other.member.id == member.id and other.member.incarnation > member.incarnation:
                raise PeerSilent(f"{member.id} has a newer life, {other.member.incarnation}", peer=member.id)
        self._replace_older(member)
        return self.sessions.open(member)

    def _replace_older(self, member: Member) -> None:
        """A newer life ends the older ones. Their death is taken as proved, unless a pidfd of another process says no."""
        for session in self.sessions:
            if session.life.member == member.id and session.life.incarnation < member.incarnation:
                self.sessions.end(session, f"{member.id} has a newer life")
                if session.member.pid == member.pid:
                    self.agent.forget(session.life)  # it dropped everything before it came back under a new number
        for life in self.pool.lives() | self.agent.lives():
            if life.member == member.id and life.incarnation < member.incarnation:
                if not self.agent.knows(life):
                    self._gone(life, "replaced by a newer life")
                elif self.config.timing.kill_after_ms:
                    self.agent.kill(life)

    def _session_ended(self, session: NodeSession) -> None:
        if session.why is not None:
            log.warning("session_ended", member=session.member.id, why=session.why.message)
        self.pool.session_ended(session.number, self.clock())
        self.verifier.pulse()
        self.changed()

    def _proved_dead(self, life: Life) -> None:
        proof = "its pidfd at the host's agent"
        self._gone(life, proof)
        if self.on_gone is not None:
            self.on_gone(life.member, life.incarnation, proof)

    def _peer_changed(self, change: MemberChange) -> None:
        life = Life(change.member.id, change.member.incarnation)
        if life.member == self.member.id:
            return
        if change.liveness is Liveness.LIVE:
            self._forget_silence(life)
            self._replace_older(change.member)
        elif change.liveness is Liveness.GONE and not self.agent.knows(life):
            self._gone(life, change.proof)
        else:  # silent, or said to be gone while its process still runs here: that has to end first
            self._fall_silent(life, change.proof)

    def _fall_silent(self, life: Life, proof: str) -> None:
        if life not in self._silent:
            wait_ms = self.config.timing.kill_after_ms
            kill = asyncio.get_running_loop().call_later(wait_ms / 1e3, self._kill, life) if wait_ms else None
            self._silent[life] = kill
        broken = self.pool.writer_silent(life, self.clock())
        self._fail(broken, PeerSilent(f"{life.member} fell silent: {proof}", peer=life.member))
        session = self.sessions.of(life)
        if session is not None:
            self.sessions.end(session, f"{life.member} fell silent: {proof}")

    def _kill(self, life: Life) -> None:
        if self.agent.kill(life):
            log.warning("killed", member=life.member, incarnation=life.incarnation)

    def _forget_silence(self, life: Life) -> None:
        timer = self._silent.pop(life, None)
        if timer is not None:
            timer.cancel()

    def _gone(self, life: Life, proof: str) -> None:
        self._forget_silence(life)
        broken = self.pool.writer_gone(life, self.clock())
        self._fail(broken, PeerSilent(f"{life.member} is gone: {proof}", peer=life.member))
        session = self.sessions.of(life)
        if session is not None:
            self.sessions.end(session, f"{life.member} is gone: {proof}")

    def _fail(self, broken: list[Landing], error: MoonpoolError) -> None:
        for landing in broken:
            claim = self.pool.landings.get(landing.id)
            if claim is not None and claim.reader_open:
                self.sessions.tell_failed(claim.ask.reader, landing, Failure.of(error))
        self.verifier.pulse()
        self.changed()

    # core.membership.Service

    def numbers(self) -> dict[str, float]:
        receiver = self.receiver
        return (
            self.pool.numbers()
            | {
                "sessions": len(self.sessions),
                "watchers": len(self.watchers),
                "watchers_cut": self.watchers.cut,
                "pidfds": self.agent.watched,
                "hand_overs_refused": self.agent.refused,
                "slices_pending": self.verifier.pending,
                "bytes_landed": self.verifier.bytes_landed,
                "endpoint_remakes": self.remakes,
                "endpoint_generation": self.generation,
                "receiver_open": 0 if receiver is None else self._opened,
                "pool_bytes": self.slots.total * self.layout.slot_bytes,
            }
            | self.fetcher.numbers()
        )

    def words(self) -> dict[str, str]:
        out = {"layout": self.layout.fingerprint, "agent_socket": str(self.agent.path)}
        if self.receiver is not None:
            out |= {"carrier": self.receiver.carrier, "ucx_transport": self.receiver.transport_used()}
        else:
            out["carrier"] = "segment"
        if sent := self.pusher.carriers():
            out["carriers_sent"] = sent
        return out

    def report(self) -> WorkerReport | None:
        return None

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._unsubscribe()
        for timer in self._silent.values():
            if timer is not None:
                timer.cancel()
        for session in self.sessions:
            self.sessions.end(session, f"the store node of {self.member.node} is leaving")
        self.watchers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._flush is not None:
            self._flush.cancel()
        self.agent.close()
        await self.fetcher.close()
        await self.pusher.close()
        if self.receiver is not None:
            await asyncio.to_thread(self.receiver.close)
        await self.verifier.close()
        await asyncio.to_thread(self.regions.close)
