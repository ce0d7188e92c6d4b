"""One store node: a host's share of the pool, the target of every push, and the host's agent.

This is the shell around ``Pool``, which decides: clock, threads and files. Everything runs on one event loop; digests
are computed in threads. Its parts: ``service`` (gRPC face), ``lives`` (sessions, silence, deaths), ``receiving`` (the
carrier's endpoint), ``verify`` (landed slices), ``fetching`` (blocks from node to node), ``watch`` (block events).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from moonpool.core.blocks import load_hash_key
from moonpool.core.config import Config
from moonpool.core.errors import Busy, Failure, InvalidRequest, TransferFailed
from moonpool.core.events import IndexSnapshot
from moonpool.core.landing import Landed, Landing
from moonpool.core.layout import KVLayout
from moonpool.core.lifetime import Lives as Lifetimes
from moonpool.core.membership import Member, Peers, WorkerReport
from moonpool.core.use import Use
from moonpool.kvstore.agent import socket_path
from moonpool.kvstore.claims import LandingAsk, Life
from moonpool.kvstore.compressing import Compressor
from moonpool.kvstore.eviction.make import make_policy
from moonpool.kvstore.fetching import Fetcher, Moved, Push, PushOrder
from moonpool.kvstore.library.host_face import HostFace
from moonpool.kvstore.library.objects import names_key
from moonpool.kvstore.lives import Lives, OnGone
from moonpool.kvstore.lower_tiers import LowerTiers
from moonpool.kvstore.node_lock import NodeLock
from moonpool.kvstore.node_sessions import NodeSession, Sessions
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.pusher import Pusher
from moonpool.kvstore.receiving import Receiving
from moonpool.kvstore.regions import OwnRegions, Progress
from moonpool.kvstore.replication.leaving import Leaving, MovedOut
from moonpool.kvstore.replication.spreading import Spreader
from moonpool.kvstore.sealing.keys import KvKeys, kv_keys
from moonpool.kvstore.slots import SlotMap
from moonpool.kvstore.transfer.carrier import Endpoint, OnNotices
from moonpool.kvstore.transfer.choose import MakeReceivers, make_receivers
from moonpool.kvstore.verify import Verifier
from moonpool.kvstore.watch import Watchers
from moonpool.wire import pb
from moonpool.wire.convert import to_wire

log = structlog.get_logger(__name__)


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
        lower: LowerTiers,
        lock: NodeLock,
        keys: KvKeys | None = None,
    ) -> None:
        self.config = config
        self.member = member
        self.layout = layout
        self.peers = peers
        self.regions = regions
        self.clock = time.monotonic
        self._freed_byte = config.freed_byte
        wipe = None if self._freed_byte is None else self._wipe
        self.slots = SlotMap([region.size for region in regions.files], wipe, self._move)
        store = config.store
        self.pool = Pool(
            member.node,
            member.incarnation,
            self.slots,
            make_policy(store.eviction),
            make_policy(store.eviction) if lower.has_ssd else None,
            quotas=store.quotas,
            hard_pin_share=store.hard_pin_share,
            soft_pin_share=store.soft_pin_share,
            on_layout=self._new_layout,
        )
        self.lower = lower
        self._lock = lock
        self._key = None if keys is None else keys.current
        self.verifier = Verifier(self.pool, regions.views, self.clock, self._tell_landed, self.changed)
        self.watchers = Watchers(member.node, member.incarnation, self._snapshot)
        self.receiving = Receiving(member, self.pool, self.clock)
        self.sessions = Sessions(config.timing.silent_after_ms / 1e3, self.clock, self._session_ended)
        agent_path = socket_path(config.state_dir(Path.home()), member.node)
        self.lives = Lives(
            member,
            config.timing,
            peers,
            self.pool,
            self.sessions,
            agent_path,
            self.clock,
            self.changed,
            on_gone,
            self.receiving.cut,
        )
        self.pusher = Pusher(member, layout, regions.views, config.transfer, key=self._key)
        self.fetcher = Fetcher(self, push or self._push)
        self.compressor = Compressor(self)
        self.spreader = Spreader(self, config.store.replicate_after)
        self.leaving = Leaving(self)
        self.host_face: HostFace | None = None
        self._flush: asyncio.Handle | None = None
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
        receivers: MakeReceivers | None = None,
        push: Push | None = None,
    ) -> StoreNode:
        """Allocates and touches the pool (in a thread, with ``progress``), then listens for its host's workers.

        ``on_gone(member, incarnation, proof)`` hears of proved deaths of local workers. ``push`` moves blocks to another
        node (by default over the carrier that reaches it). ConfigError: too little memory, an unusable folder, a carrier
        that cannot start, another process that is this node.
        """
        async with AsyncExitStack() as opened:
            lock = NodeLock.take(config.state_dir(Path.home()), member.node)
            opened.callback(lock.release)
            keys = await asyncio.to_thread(kv_keys, config, Path.home())
            # Its folder is checked before memory is taken.
            lower = await LowerTiers.open(config.store, member.node, [layout], keys, zeroise=config.security.zeroise)
            opened.push_async_callback(lower.close)
            regions = await asyncio.to_thread(
                OwnRegions.create,
                config.store,
                config.cluster.name,
                member.node,
                layout,
                progress,
                config.security.zeroise,
            )
            opened.pop_all()
        node = cls(config, member, layout, peers, regions, on_gone, push, lower, lock, keys)
        try:
            await node._start(receivers or partial(make_receivers, key=node._key))
        except BaseException:
            await node.close()
            raise
        return node

    async def _start(self, receivers: MakeReceivers) -> None:
        loop = asyncio.get_running_loop()
        self.pool.register(self.layout)
        me = Life(self.member.id, self.member.incarnation)
        self.lower.start(self.pool, self.regions.views, me, self.clock, self.changed)

        def notices_of(carrier: str) -> OnNotices:
            def on_notices(frames: Sequence[bytes]) -> None:
                loop.call_soon_threadsafe(self._notices, list(frames), carrier)

            return on_notices

        self.receiving.files = tuple(self.regions.files)
        made = await asyncio.to_thread(receivers, self.config.transfer, self.member, notices_of)
        self.receiving.receivers = tuple(made)
        for receiver in made:
            await asyncio.to_thread(receiver.register, self.regions.files, self.regions.views)
        self.lives.start()
        hash_key = await asyncio.to_thread(load_hash_key, self.config.key_file(Path.home()))
        self.host_face = HostFace(self, names_key(hash_key))
        self.spawn(self.sessions.watch())

    def add_to(self, server: Any) -> None:
        """Serve ``proto/store.proto`` and ``proto/store_admin.proto`` on a ``grpc.aio`` server."""
        from moonpool.kvstore.admin import StoreAdmin
        from moonpool.kvstore.service import StoreService

        pb.store_rpc.add_StoreServicer_to_server(StoreService(self), server)
        pb.store_admin_rpc.add_StoreAdminServicer_to_server(StoreAdmin(self), server)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Work that outlives the call that began it, and that ``close`` ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # The pool changed.

    def changed(self) -> None:
        """Call after every change of the pool: wakes who waits, polls while needed, and sends the events soon."""
        self.verifier.pulse()
        self.receiving.poll_as_needed(self.lives.is_frozen)
        self.lower.pulse()
        if self._flush is None and not self._closed:
            self._flush = asyncio.get_running_loop().call_soon(self._send_events)

    def _send_events(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        batches = self.pool.take_events()
        self.watchers.publish(batches)
        self.lower.heard(batches)

    def _new_layout(self, layout: KVLayout) -> None:
        self.lower.register(layout)
        self.compressor.learn(layout)

    def _snapshot(self) -> IndexSnapshot:
        self._send_events()
        return self.pool.snapshot()

    def _wipe(self, slot: int) -> None:
        region, offset = self.slots.place(slot)
        self.regions.views[region][offset : offset + self.slots.size(slot)] = self._freed_byte or 0

    def _move(self, slot: int, to: int) -> None:
        (region, offset), (to_region, to_offset), size = self.slots.place(slot), self.slots.place(to), self.slots.size(slot)
        self.regions.views[to_region][to_offset : to_offset + size] = self.regions.views[region][offset : offset + size]

    # Landings.

    async def grant(self, ask: LandingAsk) -> Landing:
        """Busy where slots lack; if making the endpoint anew would free some, that is done first (not too often)."""
        if self.leaving.begun:
            raise Busy(f"store node {self.member.node} is leaving and takes no new blocks", peer=self.member.node)
        try:
            landing = self.pool.landings.grant(ask, self.clock())
        except Busy:
            if not await self.receiving.free_for_room():
                raise
            self.changed()
            self.lives.require_live(ask.writer)  # meanwhile either may have gone, and nobody would end the landing
            if ask.reader is not None:
                self.sessions.get(ask.reader)
            landing = self.pool.landings.grant(ask, self.clock())
        self.changed()
        return landing

    def drained(self, landing: int, writer: Life) -> None:
        claim = self.pool.landings.get(landing)
        if not self.pool.landings.drained(landing, writer, self.clock()) or claim is None:
            return
        if claim.reader_open and not claim.fenced:
            torn = TransferFailed(f"{writer.member} ended landing {landing} before all of it had landed", peer=writer.member)
            self.sessions.tell_through(claim.ask.reader, claim.landing, Failure.of(torn) if claim.incomplete else None)
        self.changed()

    def end_landing(self, landing: int) -> None:
        if self.pool.landings.end(landing, self.clock()):
            self.changed()

    def _notices(self, frames: list[bytes], carrier: str) -> None:
        for frame in frames:
            self.spawn(self._notice(frame, carrier))

    async def _notice(self, frame: bytes, carrier: str) -> None:
        try:
            await self.verifier.take(frame, carrier)
        except InvalidRequest as e:
            log.warning("notice_refused", error=e.message)

    def _tell_landed(self, reader: int | None, landed: Landed) -> None:
        self.sessions.tell(reader, pb.store.StoreMessage(landed=to_wire(landed, pb.types.Landed())))

    async def _push(self, order: PushOrder) -> Moved:
        drained = await self.pusher.push_blocks(order.landing, order.targets, order.target_address, order.layout, order.blocks)
        return Moved(drained.bytes_sent, drained.carrier)

    async def remake(self) -> Endpoint:
        """Destroy the endpoint and make it anew: slots fenced before are free then. Healthy senders connect again."""
        endpoint = await self.receiving.remake()
        self.changed()
        return endpoint

    async def bring(self, layout: KVLayout, keys: Sequence[bytes], use: Use, deadline_s: float) -> None:
        """Bring the leading ``keys`` from lower tiers into DRAM, as far as there is time. Nothing to do without such tiers."""
        await self.lower.bring(layout, keys, use, deadline_s)

    async def leave(self) -> MovedOut:
        """Before ``close``, while others can still be reached: copy to them what only this node holds, and to its own SSD
        what only DRAM has."""
        limit_s = self.config.store.drain_ms / 1e3
        moved, flushed = await asyncio.gather(self.leaving.move_out(limit_s), self.lower.flush(limit_s))
        if flushed:
            log.info("flushed_to_ssd", blocks=flushed)
        return moved

    @property
    def generation(self) -> int:
        """The life of the carrier's endpoint."""
        return self.receiving.generation

    @property
    def lifetimes(self) -> Lifetimes:
        """Of the landings that ended here."""
        return self.pool.landings.lives

    def _session_ended(self, session: NodeSession) -> None:
        self.lives.session_ended(session)
        if self.host_face is not None:
            self.host_face.session_ended(session)

    # core.membership.Service

    def numbers(self) -> dict[str, float]:
        agent = self.lives.agent
        own: dict[str, float] = {
            "sessions": len(self.sessions),
            "watchers": len(self.watchers),
            "watchers_cut": self.watchers.cut,
            "pidfds": agent.watched,
            "hand_overs_refused": agent.refused,
            "slices_pending": self.verifier.pending,
            "bytes_landed": self.verifier.bytes_landed.total(),
            "bytes_sent": self.pusher.bytes_sent(),
        }
        if self.host_face is not None:
            own |= self.host_face.numbers()
        landed = {f"bytes_landed_{carrier}": float(n) for carrier, n in self.verifier.bytes_landed.items()}
        parts = (self.pool, self.lower, self.receiving, self.fetcher, self.spreader, self.leaving, self.compressor)
        landed |= {f"bytes_sent_{carrier}": float(n) for carrier, n in self.pusher.sent_by_carrier().items()}
        return own | landed | {name: value for part in parts for name, value in part.numbers().items()}

    def words(self) -> dict[str, str]:
        out = {"layout": self.layout.fingerprint, "agent_socket": str(self.lives.agent.path)}
        if self.host_face is not None:
            out["store_socket"] = str(self.host_face.path)
        out |= self.receiving.words()
        out |= self.lower.words()
        if sent := self.pusher.carriers():
            out["carriers_sent"] = sent
        if landed := self.verifier.landed_word():
            out["landed_from"] = landed
        return out

    def report(self) -> WorkerReport | None:
        return None

    async def close(self) -> None:
        """Carriers let go of the regions before these are unlinked; readers keep what they have mapped."""
        if self._closed:
            return
        self._closed = True
        for session in self.sessions:
            self.sessions.end(session, f"the store node of {self.member.node} is leaving")
        if self.host_face is not None:
            self.host_face.close()
        self.lives.close()
        self.watchers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._flush is not None:
            self._flush.cancel()
        await self.lower.close()
        await self.fetcher.close()
        await self.pusher.close()
        await self.receiving.close()
        await self.verifier.close()
        await asyncio.to_thread(self.regions.close)
        self._lock.release()
