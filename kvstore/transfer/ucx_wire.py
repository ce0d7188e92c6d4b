"""Writes to peers over one NIXL agent: connect, post, poll, give up. Used by one thread only; see ``ucx_sender``.

Descriptors are made per post: for a layer of eight blocks that costs 12 us against 2 us with lists prepared ahead, of
0.7 ms in all, and needs no fixed geometry on either side, so tails and joined neighbours are ordinary pieces.

A write that was posted cannot be withdrawn (releasing it stops the notice, not the bytes), so cancelling is draining.
The one hard fence on this side is to destroy the agent, which drops unsent bytes: that is done when a target takes
nothing for the stall time, and writes to other targets are then posted again by the next agent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.config import TransferConfig
from moonpool.core.device_memory import DeviceMemory
from moonpool.core.errors import MoonpoolError, PeerSilent, TransferFailed
from moonpool.core.membership import Member
from moonpool.kvstore.transfer import ucx
from moonpool.kvstore.transfer.carrier import LENGTH, MEMORY, OFFSET, REGION, TARGET, UNKNOWN, Endpoint, Pieces
from moonpool.kvstore.transfer.pieces import Extents, coalesce, endpoint_extents, memory_extents, require_inside
from moonpool.kvstore.transfer.throttle import TokenBucket

MAX_POSTED = 32  # writes in flight per target; the rest waits, where it can still be cancelled
WARM_UP_BYTES = 64
HICCUP_S = 1.0  # a thread that did not run for longer than this was stopped itself: no stall of its peers
log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Write:
    """One push on its way. ``future`` is pending while it waits, running once it is posted."""

    pieces: Pieces
    frame: bytes
    future: Future[None]
    warms_up: bool = False  # a small read ahead of the first write
    due: float | None = None  # when the throttle lets it go
    handle: Any = None

    @property
    def size(self) -> int:
        return int(self.pieces[:, LENGTH].sum()) + len(self.frame)


@dataclass(slots=True, eq=False)
class _Peer:
    target: Endpoint
    regions: Extents
    waiting: deque[Write] = field(default_factory=deque)
    posted: list[Write] = field(default_factory=list)
    moved: float = 0.0  # when a write of it last ended, or was posted with none before it
    connected: bool = False
    lanes_seen: bool = False
    forgotten: bool = False
    lost: MoonpoolError | None = None  # why nothing more is posted to it


class UcxWire:
    """Peers and their writes. Methods never raise for what NIXL says: it ends futures."""

    def __init__(self, member: Member, config: TransferConfig, stall_s: float, new_agent: ucx.NewAgent) -> None:
        self._member = member
        self._config = config
        self._new_agent = new_agent
        self._stall_s = stall_s
        self._bucket = TokenBucket(config.throttle_bytes_per_s)
        self._memories: tuple[NDArray[np.uint8], ...] = ()
        self._scratch = np.zeros(WARM_UP_BYTES, dtype=np.uint8)
        self._sources = Extents({}, {})
        self._agent: Any = None
        self._registered: list[Any] = []
        self._device: DeviceMemory | None = None  # where memory 0 lies, too
        self._from_device = False
        self._life = 0
        self._errors: tuple[type[Exception], ...] = ()
        self._peers: dict[str, _Peer] = {}
        self._stepped: float | None = None
        self.sent = 0
        self.transport = UNKNOWN
        self.read = ""  # where memory 0 is read, where there is a choice

    def read_from(self, memory: DeviceMemory) -> None:
        self._device = memory

    def begin(self, memories: Sequence[NDArray[np.uint8]]) -> None:
        """Where the agent cannot be made now, it is tried again for the next push or connection."""
        self._memories = tuple(memories)
        self._sources = memory_extents(self._memories)
        try:
            self._ready()
        except MoonpoolError as e:
            log.warning("ucx_agent", error=e.message)

    def _ready(self) -> None:
        """TransferFailed, ConfigError: there is no agent, and none can be made."""
        if self._agent is None:
            self._make_agent()

    def accept(self, target: Endpoint, write: Write) -> None:
        """Queue ``write``; a target that was lost refuses it at once (``connect`` first)."""
        try:
            self._ready()
            peer = self._peers.get(target.agent_name) or self._add(target)
            require_inside(write.pieces, self._sources, peer.regions)
            if peer.lost is not None:
                raise peer.lost
        except MoonpoolError as e:
            _fail(write, e)
        else:
            peer.waiting.append(write)

    def connect(self, target: Endpoint, future: Future[None]) -> None:
        """Connect anew where it was lost, and read a few bytes from the target: that establishes every lane."""
        try:
            self._ready()
        except MoonpoolError as e:
            if future.set_running_or_notify_cancel():
                future.set_exception(e)
            return
        peer = self._peers.get(target.agent_name)
        if peer is not None and peer.lost is not None:
            del self._peers[target.agent_name]
            peer = None
        if (peer is not None and peer.connected) or not target.regions:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
            return
        region = target.regions[0].number
        pieces = np.array([[len(self._memories), 0, region, 0, WARM_UP_BYTES]], dtype=np.int64)
        (peer or self._add(target)).waiting.append(Write(pieces, b"", future, warms_up=True))

    def forget(self, target: Endpoint) -> None:
        peer = self._peers.get(target.agent_name)
        if peer is not None:
            peer.forgotten = True

    def busy(self) -> bool:
        return any(peer.posted for peer in self._peers.values())

    def next_due(self) -> float | None:
        """When the earliest waiting write may go (0: now); None when nothing waits."""
        due = [peer.waiting[0].due or 0.0 for peer in self._peers.values() if peer.waiting]
        return min(due, default=None)

    def step(self, now: float) -> None:
        """Post what may go, take what has ended, give up on peers that stall."""
        pause = now - self._stepped if self._stepped is not None else 0.0
        self._stepped = now
        for peer in list(self._peers.values()):
            if pause > HICCUP_S:
                peer.moved += pause
            self._guarded(peer, lambda peer=peer: self._advance(peer, now))  # type: ignore[misc]
            if peer.posted and now - peer.moved > self._stall_s:
                self._fence(peer)
            if peer.forgotten and not peer.posted and not peer.waiting:
                self._disconnect(peer)
                del self._peers[peer.target.agent_name]

    def refuse_waiting(self, error: MoonpoolError) -> None:
        for peer in self._peers.values():
            while peer.waiting:
                _fail(peer.waiting.popleft(), error)

    def end(self) -> None:
        """Let go of peers, memory and agent."""
        for peer in self._peers.values():
            self._lose(peer, TransferFailed("the sending end is closed", peer=peer.target.node))
        self._peers.clear()
        self._destroy_agent()

    def _guarded(self, peer: _Peer, work: Callable[[], None]) -> None:
        try:
            work()
        except self._errors as e:
            node = peer.target.node
            self._lose(peer, TransferFailed(f"the connection to node {node} broke ({type(e).__name__}: {e})", peer=node))

    def _add(self, target: Endpoint) -> _Peer:
        peer = self._peers[target.agent_name] = _Peer(target, endpoint_extents(target))
        return peer

    def _advance(self, peer: _Peer, now: float) -> None:
        while peer.waiting and len(peer.posted) < MAX_POSTED:
            write = peer.waiting[0]
            if write.due is None:
                write.due = now if write.warms_up else now + self._bucket.take(write.size, now)
            if write.due > now:
                break
            if not peer.connected:
                self._agent.add_remote_agent(peer.target.metadata)
                peer.connected = True
            peer.waiting.popleft()
            if write.future.set_running_or_notify_cancel():
                self._post(peer, write, now)
        ended = [write for write in peer.posted if self._has_ended(write)]
        if not ended:
            return
        if not peer.lanes_seen:
            self.transport, peer.lanes_seen = ucx.lanes_used(self._agent.name), True
        peer.moved = now
        peer.posted = [write for write in peer.posted if write not in ended]
        for write in ended:
            self._quietly(write.handle.release)
            write.future.set_result(None)

    def _post(self, peer: _Peer, write: Write, now: float) -> None:
        """``write`` is in ``posted`` from before the first call on, so that an exception ends it too."""
        if not peer.posted:
            peer.moved = now
        peer.posted.append(write)
        pieces = coalesce(write.pieces)
        here, there = (np.zeros((len(pieces), 3), dtype=np.uint64) for _ in range(2))
        memory: Any = self._scratch.ctypes.data if write.warms_up else self._sources.begin[pieces[:, MEMORY]]
        kind = "DRAM"
        if self._from_device and self._device is not None and not write.warms_up:
            memory, kind, here[:, 2] = self._device.address, "VRAM", self._device.device
        here[:, 0] = memory + pieces[:, OFFSET]
        there[:, 0] = peer.regions.begin[pieces[:, REGION]] + pieces[:, TARGET]
        here[:, 1] = there[:, 1] = pieces[:, LENGTH]
        agent = self._agent
        local, remote = agent.get_xfer_descs(here, kind), agent.get_xfer_descs(there, "DRAM")
        operation = "READ" if write.warms_up else "WRITE"
        write.handle = agent.initialize_xfer(operation, local, remote, peer.target.agent_name)
        if not write.warms_up:
            self.sent += write.size
        agent.transfer(write.handle, write.frame)

    def _has_ended(self, write: Write) -> bool:
        state = self._agent.check_xfer_state(write.handle)
        if state == "ERR":
            raise self._errors[0]("a write ended in error")
        return bool(state == "DONE")

    def _lose(self, peer: _Peer, error: MoonpoolError) -> None:
        """Everything of ``peer`` ends with ``error``, and nothing more is posted: each failed post logs an error line."""
        peer.lost = error
        self._disconnect(peer)
        posted, peer.posted = peer.posted, []
        for write in posted:
            write.future.set_exception(error)
        while peer.waiting:
            _fail(peer.waiting.popleft(), error)

    def _disconnect(self, peer: _Peer) -> None:
        for write in peer.posted:
            if write.handle is not None:
                self._quietly(write.handle.release)
            write.handle = None
        if peer.connected:
            self._quietly(lambda: self._agent.remove_remote_agent(peer.target.agent_name))
            peer.connected = False

    def _quietly(self, work: Callable[[], None]) -> None:
        try:
            work()
        except self._errors as e:
            log.info("ucx_release", error=f"{type(e).__name__}: {e}")

    def _fence(self, stalled: _Peer) -> None:
        """``stalled`` takes no bytes: end this agent, so that nothing reads our memory for it; the others go on anew."""
        node = stalled.target.node
        log.warning("push_stalled", node=node, seconds=self._stall_s)
        self._lose(stalled, PeerSilent(f"node {node} took no bytes for {self._stall_s:g} s", peer=node))
        for peer in self._peers.values():
            self._disconnect(peer)
            peer.lanes_seen = False
        self._destroy_agent()
        try:
            self._make_agent()
        except MoonpoolError as e:
            for peer in self._peers.values():
                self._lose(peer, e)
            return
        for peer in self._peers.values():
            again, peer.posted = peer.posted, []
            self._guarded(peer, lambda peer=peer, again=again: self._post_again(peer, again))  # type: ignore[misc]

    def _post_again(self, peer: _Peer, writes: list[Write]) -> None:
        if not writes:
            return
        peer.posted = []
        self._agent.add_remote_agent(peer.target.metadata)
        peer.connected = True
        for i, write in enumerate(writes):
            try:
                self._post(peer, write, self._stepped or 0.0)
            except self._errors:
                peer.posted += writes[i + 1 :]
                raise

    def _make_agent(self) -> None:
        self._life += 1
        name = ucx.agent_name(self._member.id, self._member.incarnation, "s", self._life)
        agent = self._new_agent(name, self._config)
        self._errors = ucx.nixl_errors()
        wanted = [(m.ctypes.data, m.size, 0, "") for m in (*self._memories, self._scratch) if m.size]
        try:
            self._registered = [agent.register_memory(wanted, "DRAM")]
        except self._errors as e:
            raise TransferFailed(f"UCX could not register the source memory ({type(e).__name__}: {e})") from e
        self._agent = agent
        if self._device is not None:
            trouble = self._register_device(agent, self._device)
            self._from_device = trouble is None
            self.read = ", from device pages" if trouble is None else f", from the host's view: {trouble}"
            log.info("ucx_source", read=self.read)

    def _register_device(self, agent: Any, device: DeviceMemory) -> str | None:
        """Or why not."""
        trouble = ucx.device_trouble(agent, self._config) if len(self._memories) == 1 else "there are several memories"
        if trouble is None:
            try:
                self._registered.append(agent.register_memory([(device.address, device.size, device.device, "")], "VRAM"))
            except self._errors as e:
                trouble = f"UCX could not register it ({type(e).__name__}: {e})"
        return trouble

    def _destroy_agent(self) -> None:
        if self._agent is None:
            return
        for registered in self._registered:
            self._quietly(lambda registered=registered: self._agent.deregister_memory(registered))  # type: ignore[misc]
        self._agent, self._registered = None, []
        ucx.collect_agent()


def _fail(write: Write, error: MoonpoolError) -> None:
    """End a write that still waits; one that was cancelled stays so."""
    if write.future.set_running_or_notify_cancel():
        write.future.set_exception(error)
