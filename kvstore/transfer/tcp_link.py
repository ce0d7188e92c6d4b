"""One connection of the tcp carrier as its sender sees it: connect, send, await answers, give up.

A link's thread waits in ``poll`` for the socket and for new pushes. Bytes are gathered from source memory by the
kernel, or sealed from there. A push is done when the receiver has answered it: then its bytes are in place and its notice
was handed over.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from concurrent.futures import Future

import structlog

from moonpool.core.errors import InvalidRequest, MoonpoolError, PeerSilent, TransferFailed
from moonpool.kvstore.claims import Life
from moonpool.kvstore.sealing.handshake import OFFER, Handshake, Streams
from moonpool.kvstore.sealing.keys import KvKey
from moonpool.kvstore.sealing.stream import TAG_BYTES, Stream
from moonpool.kvstore.transfer import tcp_streams, tcp_wire
from moonpool.kvstore.transfer.carrier import Endpoint
from moonpool.kvstore.transfer.pieces import Extents, coalesce, region_sizes, require_inside
from moonpool.kvstore.transfer.tcp_connection import KEEPALIVE
from moonpool.kvstore.transfer.write import MAX_POSTED, Source, Write, end

MAX_ANSWERS = 1024  # read at once
HICCUP_S = 1.0  # a thread that did not run for longer than this was stopped itself: no stall of its peer
DROP_UNSENT = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection
log = structlog.get_logger(__name__)


class Link:
    """Methods may be called from any thread, and never block but for ``join``. Every failure ends futures."""

    def __init__(
        self, target: Endpoint, me: Life, source: Source, stall_s: float, connect_s: float, key: KvKey | None = None
    ) -> None:
        self._target = target
        self._me = me
        self._source = source
        self._regions = Extents({r.number: 0 for r in target.regions}, region_sizes(target.regions))
        self._stall_s = stall_s
        self._connect_s = connect_s
        self._lost: MoonpoolError | None = None  # why nothing more is sent
        self._leaving: MoonpoolError | None = None  # what was sent is awaited, nothing else is
        self._connected = False
        self._connects: list[Future[None]] = []
        self._waiting: deque[Write] = deque()
        self._lock = threading.Lock()  # the five above
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="tcp-send", daemon=True)
        # Of the thread alone:
        self._socket: socket.socket | None = None
        self._posted: deque[Write] = deque()
        self._key = key
        self._out: tcp_streams.Writer = tcp_streams.PlainWriter()  # what is still to be sent of them
        self._hears: Stream | None = None  # opens answers
        self._answers = b""
        self._numbers = 0
        self._moved = 0.0  # when the target last took or answered anything, or something was posted with nothing before it
        self._looked = 0.0

    def start(self) -> None:
        self._thread.start()

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def when_connected(self, done: Future[None]) -> None:
        with self._lock:
            if not self._connected and self._lost is None:
                self._connects.append(done)
                return
        end(done, self._lost)

    def submit(self, write: Write) -> None:
        with self._lock:
            refused = self._lost or self._leaving
            if refused is None:
                self._waiting.append(write)
                os.eventfd_write(self._wake, 1)
        if refused is not None:
            end(write.future, refused)

    def leave(self) -> None:
        """End when everything that was submitted has ended."""
        self._leave(TransferFailed("the target was forgotten", peer=self._target.node), refuse=False)

    def close(self) -> None:
        """Fail what waits, await what was sent (for the stall time), end."""
        self._leave(TransferFailed("the sending end is closed", peer=self._target.node), refuse=True)

    def _leave(self, why: MoonpoolError, *, refuse: bool) -> None:
        waiting: list[Write] = []
        with self._lock:
            self._leaving = why
            if refuse:
                waiting, self._waiting = list(self._waiting), deque()
            if self._lost is None:
                os.eventfd_write(self._wake, 1)
        for write in waiting:
            end(write.future, why)

    def join(self) -> None:
        self._thread.join()

    # Below: on the thread.

    def _run(self) -> None:
        node = self._target.node
        try:
            self._connect()
            self._work()
            error: MoonpoolError = self._leaving or TransferFailed("the sending end is closed", peer=node)
        except MoonpoolError as e:
            error = e if isinstance(e, PeerSilent | TransferFailed) else TransferFailed(e.message, peer=node)
        except OSError as e:
            error = TransferFailed(f"the connection to node {node} broke ({e})", peer=node)
        except Exception as e:
            log.exception("tcp_send_ended", node=node)
            error = TransferFailed(f"sending end: {type(e).__name__}: {e}", peer=node)
        self._lose(error)

    def _connect(self) -> None:
        """PeerSilent where nobody answers in time; OSError, TransferFailed, InvalidRequest where somebody does otherwise."""
        until = time.monotonic() + self._connect_s
        address = tcp_wire.Address.decode(self._target.metadata)
        try:
            self._socket = socket.create_connection((address.host, address.port), self._connect_s)
            for level, option, value in KEEPALIVE:
                self._socket.setsockopt(level, option, value)
            hello = tcp_wire.encode_hello(address, self._me)
            welcome: bytes
            if self._key is None:
                self._socket.sendall(hello)
                welcome = self._read_by(until, tcp_wire.WELCOME.size)
            else:
                streams = self._agree(self._key, until)
                fixed = streams.sends.seal(hello[: tcp_wire.HELLO.size], tcp_streams.HELLO)
                self._socket.sendall(fixed + streams.sends.seal(hello[tcp_wire.HELLO.size :], tcp_streams.NAME))
                record = self._read_by(until, tcp_wire.WELCOME.size + TAG_BYTES)
                welcome = streams.hears.open(record, tcp_streams.WELCOME)
                self._out, self._hears = tcp_streams.SealedWriter(streams.sends), streams.hears
        except TimeoutError as e:
            message = f"node {self._target.node} did not answer at its KV port within {self._connect_s:g} s"
            raise PeerSilent(message, peer=self._target.node) from e
        tcp_wire.require_welcome(welcome)
        self._socket.setblocking(False)
        with self._lock:
            self._connected = True
            connects, self._connects = self._connects, []
        for done in connects:
            end(done, None)

    def _agree(self, key: KvKey, until: float) -> Streams:
        assert self._socket is not None
        handshake = Handshake(key)
        self._socket.sendall(handshake.offer)
        return handshake.meet(self._read_by(until, OFFER.size), caller=True)

    def _read_by(self, until: float, size: int) -> bytes:
        assert self._socket is not None
        data = b""
        while len(data) < size:
            self._socket.settimeout(max(until - time.monotonic(), 1e-3))
            more = self._socket.recv(size - len(data))
            if not more:
                raise TransferFailed(f"node {self._target.node}: this life of its endpoint is over", peer=self._target.node)
            data += more
        return data

    def _work(self) -> None:
        """Until everything has ended after ``leave`` or ``close``."""
        assert self._socket is not None
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        self._looked = time.monotonic()
        while True:
            due = self._post_what_may_go(time.monotonic())
            if self._leaving is not None and not self._posted and due is None:
                return
            self._send()
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
            ready = dict(poll.poll(self._patience_ms(due)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if ready.get(self._socket.fileno(), 0) & ~select.POLLOUT:
                self._hear()
            self._require_motion(time.monotonic())

    def _post_what_may_go(self, now: float) -> float | None:
        """When the next waiting write may go (None: none waits, or an answer has to come first)."""
        while len(self._posted) < MAX_POSTED:
            with self._lock:
                if not self._waiting:
                    return None
                write = self._waiting[0]
            if write.due is None:
                write.due = self._source.book(write.size, now)
            if write.due > now:
                return write.due
            with self._lock:
                if not self._waiting:  # closed meanwhile
                    return None
                self._waiting.popleft()
            if write.future.set_running_or_notify_cancel():
                self._post(write, now)
        return None

    def _post(self, write: Write, now: float) -> None:
        try:
            require_inside(write.pieces, self._source.extents, self._regions)
        except MoonpoolError as e:
            write.future.set_exception(e)
            return
        if not self._posted:
            self._moved = self._looked = now
        self._numbers += 1
        write.number = self._numbers
        self._posted.append(write)
        self._source.count(write.size)
        pieces, views = coalesce(write.pieces), self._source.views
        for at in range(0, max(len(pieces), 1), tcp_wire.MAX_PIECES):
            part = pieces[at : at + tcp_wire.MAX_PIECES]
            last = at + tcp_wire.MAX_PIECES >= len(pieces)
            frame = write.frame if last else b""
            message = memoryview(tcp_wire.encode_message(write.number, part, frame, last=last))
            head, table = message[: tcp_wire.HEADER.size], message[tcp_wire.HEADER.size :]
            parts = [(tcp_streams.HEADER, head), (tcp_streams.TABLE, table)]
            for memory, offset, region, to, length in part.tolist():
                parts.append((tcp_streams.place(region, to, length), views[memory][offset : offset + length]))
            self._out.put([*parts, (tcp_streams.NOTICE, memoryview(frame))])

    def _send(self) -> None:
        """As much as the socket takes."""
        assert self._socket is not None
        while self._out:
            try:
                sent = self._socket.sendmsg(self._out.next())
            except BlockingIOError:
                return
            self._moved = time.monotonic()
            self._out.took(sent)

    def _hear(self) -> None:
        """Take answers; TransferFailed where the other end is through with us."""
        assert self._socket is not None
        size = tcp_wire.ANSWER.size + (0 if self._hears is None else TAG_BYTES)
        try:
            data = self._socket.recv(MAX_ANSWERS * size)
        except BlockingIOError:
            return
        if not data:
            raise TransferFailed(f"node {self._target.node} ended the connection", peer=self._target.node)
        self._moved = time.monotonic()
        data = self._answers + data
        whole = len(data) - len(data) % size
        self._answers = data[whole:]
        for at in range(0, whole, size):
            answer = data[at : at + size]
            if self._hears is not None:
                answer = self._hears.open(answer, tcp_streams.ANSWER)
            (number,) = tcp_wire.ANSWER.unpack(answer)
            if not self._posted or self._posted[0].number != number:
                raise InvalidRequest(f"node {self._target.node} answered push {number}, which is not its turn")
            self._posted.popleft().future.set_result(None)

    def _patience_ms(self, due: float | None) -> float | None:
        """How long to wait for the socket or for more work; None: without end."""
        now = time.monotonic()
        until = [] if due is None else [due]
        if self._posted:
            until.append(min(self._moved + self._stall_s, now + HICCUP_S / 2))
        return max(min(until) - now, 0.0) * 1e3 + 1.0 if until else None

    def _require_motion(self, now: float) -> None:
        """PeerSilent where the target took nothing for the stall time in which this thread itself ran."""
        if self._posted and now - self._looked > HICCUP_S:
            self._moved += now - self._looked
        self._looked = now
        if self._posted and now - self._moved > self._stall_s:
            log.warning("push_stalled", node=self._target.node, seconds=self._stall_s)
            raise PeerSilent(f"node {self._target.node} took no bytes for {self._stall_s:g} s", peer=self._target.node)

    def _lose(self, error: MoonpoolError) -> None:
        """Close, dropping what the kernel has not sent; everything that has not ended ends with ``error``."""
        with self._lock:
            self._lost = error
            waiting, self._waiting = list(self._waiting), deque()
            connects, self._connects = self._connects, []
            os.close(self._wake)
        if self._socket is not None:
            if self._posted:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, DROP_UNSENT)
            self._socket.close()
        self._out.clear()
        for write in self._posted:
            write.future.set_exception(error)
        self._posted.clear()
        for write in waiting:
            end(write.future, error)
        for done in connects:
            end(done, error)
