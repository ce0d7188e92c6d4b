"""The sending end over UCXX: pieces as tagged messages, announced and answered over the endpoint's stream."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.config import TransferConfig
from moonpool.core.errors import InvalidRequest, MoonpoolError, PeerSilent, TransferFailed
from moonpool.core.membership import Member
from moonpool.kvstore.claims import Life
from moonpool.kvstore.transfer import tcp_wire, ucx
from moonpool.kvstore.transfer.carrier import LENGTH, MEMORY, OFFSET, UNKNOWN, Endpoint, Pieces
from moonpool.kvstore.transfer.pieces import Extents, coalesce, memory_extents, require_inside
from moonpool.kvstore.transfer.throttle import TokenBucket
from moonpool.kvstore.transfer.ucxx_peer import Peer
from moonpool.kvstore.transfer.ucxx_worker import (
    ANSWER_TAG,
    CONTROL,
    HELLO_BYTES,
    LOOK_S,
    WELCOME,
    WELCOME_TAG,
    UcxxThread,
    copied,
    empty,
    tag_of,
)
from moonpool.kvstore.transfer.write import MAX_POSTED, Write, end

CONNECT_S = 2.0
HICCUP_S = 1.5  # a thread that did not run for longer than this (it looks every second) was stopped itself
log = structlog.get_logger(__name__)


class UcxxSender:
    """See ``carrier.Sender``. A target that takes no bytes for ``stall_s`` is given up (``PeerSilent``)."""

    carrier = "ucxx"

    def __init__(self, member: Member, config: TransferConfig, *, stall_s: float = 5.0, connect_s: float = CONNECT_S) -> None:
        self._me = Life(member.id, member.incarnation)
        self._stall_s = stall_s
        self._connect_s = connect_s
        self._bucket = TokenBucket(config.throttle_bytes_per_s)
        self._memories: tuple[NDArray[np.uint8], ...] = ()
        self._sources = Extents({}, {})
        self._peers: dict[str, Peer] = {}
        self._sent = 0
        self._transport = UNKNOWN
        self._looked: float | None = None
        self._closing = False
        self._thread = UcxxThread("ucxx-send", config, self._advance)

    def register(self, memories: Sequence[NDArray[np.uint8]]) -> None:
        self._sources = memory_extents(memories)
        self._memories = tuple(memories)

    def connect(self, target: Endpoint) -> Future[None]:
        done: Future[None] = Future()
        self._submit(lambda: self._connect(target, done), done)
        return done

    def push(self, target: Endpoint, pieces: Pieces, frame: bytes) -> Future[None]:
        write = Write(pieces, frame, Future())
        self._submit(lambda: self._accept(target, write), write.future)
        return write.future

    def forget(self, target: Endpoint) -> None:
        self._thread.call(lambda: self._forget(target))

    def bytes_sent(self) -> int:
        return self._sent

    def transport_used(self) -> str:
        return self._transport

    def close(self) -> None:
        self._thread.call(self._refuse_waiting).exception()
        end = time.monotonic() + self._stall_s + LOOK_S
        while time.monotonic() < end and self._thread.call(self._busy).exception() is None and self._still_busy():
            time.sleep(0.005)
        self._thread.stop(self._end)
        self._memories = ()

    def _still_busy(self) -> bool:
        return bool(self._thread.call(self._busy).result())

    def _submit(self, call: Any, future: Future[None]) -> None:
        def failed(done: Future[None]) -> None:
            if (error := done.exception()) is not None and not future.done():
                end(future, error if isinstance(error, MoonpoolError) else TransferFailed(f"sending end: {error}"))

        self._thread.call(call).add_done_callback(failed)

    # Below: on the thread.

    def _busy(self) -> bool:
        return any(peer.posted for peer in self._peers.values())

    def _refuse_waiting(self) -> None:
        self._closing = True
        for peer in self._peers.values():
            while peer.waiting:
                end(peer.waiting.popleft().future, TransferFailed("the sending end is closed"))

    def _end(self) -> None:
        for peer in self._peers.values():
            self._lose(peer, TransferFailed("the sending end is closed", peer=peer.target.node))
        self._peers.clear()

    def _connect(self, target: Endpoint, done: Future[None]) -> None:
        peer = self._peers.get(target.agent_name)
        if peer is not None and peer.lost is not None:
            del self._peers[target.agent_name]
        peer = self._peer(target)
        if peer.connected:
            end(done, None)
        elif peer.lost is not None:
            end(done, peer.lost)
        else:
            peer.connects.append(done)

    def _accept(self, target: Endpoint, write: Write) -> None:
        if self._closing:
            raise TransferFailed("the sending end is closed")
        peer = self._peer(target)
        require_inside(write.pieces, self._sources, peer.regions)
        if peer.lost is not None:
            raise peer.lost
        peer.waiting.append(write)

    def _forget(self, target: Endpoint) -> None:
        peer = self._peers.get(target.agent_name)
        if peer is not None:
            peer.forgotten = True

    def _peer(self, target: Endpoint) -> Peer:
        found = self._peers.get(target.agent_name)
        if found is None:
            found = self._peers[target.agent_name] = Peer(target)
            self._guarded(found, lambda: self._dial(found))
        return found

    def _dial(self, peer: Peer) -> None:
        address = tcp_wire.Address.decode(peer.target.metadata)
        peer.since = time.monotonic()
        peer.hello = tcp_wire.encode_hello(address, self._me).ljust(HELLO_BYTES, b"\0")
        if len(peer.hello) > HELLO_BYTES:
            raise TransferFailed(f"{self._me.member}: a name too long for this carrier")
        peer.worker = self._thread.worker()
        endpoint = peer.worker.ucx.create_endpoint_from_hostname(address.host, address.port, True)
        peer.worker.endpoints.append(endpoint)
        self._listen(peer, WELCOME.size, WELCOME_TAG)

    def _send(self, peer: Peer, data: NDArray[np.uint8], number: int = CONTROL) -> None:
        assert peer.worker is not None and peer.number is not None
        self._thread.send(peer.sends, peer.worker.endpoints[0], data, tag_of(peer.number, number))

    def _listen(self, peer: Peer, size: int, tag: int) -> None:
        assert peer.worker is not None
        peer.heard = empty(size)
        self._thread.receive(peer.hears, peer.worker.endpoints[0], peer.heard, tag)

    def _guarded(self, peer: Peer, work: Any) -> None:
        node = peer.target.node
        try:
            work()
        except MoonpoolError as e:
            self._lose(peer, e if isinstance(e, PeerSilent | TransferFailed) else TransferFailed(e.message, peer=node))
        except Exception as e:  # noqa: BLE001 UCXX's exceptions share no base that is public
            self._lose(peer, TransferFailed(f"the connection to node {node} broke ({type(e).__name__}: {e})", peer=node))

    def _advance(self) -> float:
        now = time.monotonic()
        pause = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        wait_s = LOOK_S
        for peer in list(self._peers.values()):
            if peer.lost is not None:
                if peer.forgotten:
                    self._peers.pop(peer.target.agent_name, None)
                continue
            if pause > HICCUP_S:
                peer.moved += pause
            self._guarded(peer, lambda peer=peer: self._hear(peer, now))
            if peer.connected and not peer.lost:
                self._guarded(peer, lambda peer=peer: self._post_what_may_go(peer, now))
            if peer.lost is None:
                wait_s = min(wait_s, self._patience(peer, now))
            if peer.forgotten and not peer.posted and not peer.waiting:
                self._lose(peer, TransferFailed("the target was forgotten", peer=peer.target.node))
                self._peers.pop(peer.target.agent_name, None)
        return wait_s

    def _hear(self, peer: Peer, now: float) -> None:
        peer.sends.ended()
        while peer.hears.ended():
            peer.moved = now
            data = peer.heard.tobytes()
            if peer.number is None:
                magic, version, peer.number = WELCOME.unpack(data)
                tcp_wire.require_welcome(tcp_wire.WELCOME.pack(magic, version))
                self._send(peer, copied(peer.hello))
            else:
                self._answered(peer, *tcp_wire.ANSWER.unpack(data))
            self._listen(peer, tcp_wire.ANSWER.size, ANSWER_TAG)

    def _answered(self, peer: Peer, number: int) -> None:
        if not peer.connected:  # the answer to the hello
            assert peer.worker is not None
            peer.connected = True
            self._transport = ucx.lanes_of(peer.worker.endpoints[0].handle)
            connects, peer.connects = peer.connects, []
            for done in connects:
                end(done, None)
        elif not peer.posted or peer.posted[0].number != number:
            raise InvalidRequest(f"node {peer.target.node} answered push {number}, which is not its turn")
        else:
            peer.posted.popleft().future.set_result(None)

    def _patience(self, peer: Peer, now: float) -> float:
        """Seconds until something of ``peer`` is due; loses it where it took nothing for too long."""
        node = peer.target.node
        if not peer.connected and now - peer.since > self._connect_s:
            self._lose(peer, PeerSilent(f"node {node} did not answer at its KV port within {self._connect_s:g} s", peer=node))
        elif peer.posted and now - peer.moved > self._stall_s:
            log.warning("push_stalled", node=node, seconds=self._stall_s)
            self._lose(peer, PeerSilent(f"node {node} took no bytes for {self._stall_s:g} s", peer=node))
        due = peer.waiting[0].due if peer.waiting and len(peer.posted) < MAX_POSTED else None
        if due is not None:
            return max(0.0, due - now)
        return LOOK_S if peer.connected and not peer.posted else min(self._stall_s, self._connect_s) / 10

    def _post_what_may_go(self, peer: Peer, now: float) -> None:
        while peer.waiting and len(peer.posted) < MAX_POSTED:
            write = peer.waiting[0]
            if write.due is None:
                write.due = now + self._bucket.take(write.size, now)
            if write.due > now:
                return
            peer.waiting.popleft()
            if write.future.set_running_or_notify_cancel():
                self._post(peer, write, now)

    def _post(self, peer: Peer, write: Write, now: float) -> None:
        if not peer.posted:
            peer.moved = now
        peer.pushes += 1
        write.number = peer.pushes
        peer.posted.append(write)
        self._sent += write.size
        pieces = coalesce(write.pieces)
        for at in range(0, max(len(pieces), 1), tcp_wire.MAX_PIECES):
            part = pieces[at : at + tcp_wire.MAX_PIECES]
            last = at + tcp_wire.MAX_PIECES >= len(pieces)
            frame = write.frame if last else b""
            message = tcp_wire.encode_message(write.number, part, frame, last=last)
            self._send(peer, copied(message[: tcp_wire.HEADER.size]))
            if len(part):
                self._send(peer, copied(message[tcp_wire.HEADER.size :]))
            for memory, offset, length in part[:, (MEMORY, OFFSET, LENGTH)].tolist():
                self._send(peer, self._memories[memory][offset : offset + length], peer.tags)
                peer.tags = (peer.tags + 1) % CONTROL
            if frame:
                self._send(peer, copied(frame))

    def _lose(self, peer: Peer, error: MoonpoolError) -> None:
        """End its worker, so that nothing reads our memory for it; what has not ended ends with ``error``."""
        if peer.lost is not None:
            return
        peer.lost = error
        if peer.worker is not None:
            self._thread.end(peer.worker, peer.sends, peer.hears)
            peer.worker = None
        peer.sends.clear()
        peer.hears.clear()
        posted, peer.posted = peer.posted, deque()
        for write in posted:
            write.future.set_exception(error)
        while peer.waiting:
            end(peer.waiting.popleft().future, error)
        for done in peer.connects:
            end(done, error)
        peer.connects.clear()
