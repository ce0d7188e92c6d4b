"""One accepted connection of the tcp carrier and the thread that reads it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from moonpool.core.errors import AttemptFailed, Bug, DigestMismatch, InvalidRequest, LayoutMismatch
from moonpool.kvstore.claims import Life
from moonpool.kvstore.sealing.handshake import OFFER, Handshake, Streams
from moonpool.kvstore.sealing.keys import KvKey
from moonpool.kvstore.sealing.stream import TAG_BYTES
from moonpool.kvstore.transfer import tcp_streams, tcp_wire
from moonpool.kvstore.transfer.carrier import OnNotices
from moonpool.kvstore.transfer.pieces import Extents

KEEPALIVE = (  # a peer whose machine vanished is gone after half a minute
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """What connections write into, by region number, and who hears of it."""

    views: dict[int, memoryview]
    extents: Extents
    on_notices: OnNotices


class Connection:
    """``writer`` is None until its hello was admitted; ``admit`` and ``leave`` are called on its thread.

    With a ``key`` nothing is taken but what a member that holds it sealed. ``leave`` is told why it ended: ``malformed``,
    ``forged``, ``broken`` (in the middle of a push), or nothing special.
    """

    def __init__(
        self,
        accepted: socket.socket,
        target: Target,
        hello_s: float,
        admit: Callable[[Connection, tcp_wire.Hello, Life], bool],
        leave: Callable[[Connection, str], None],
        key: KvKey | None = None,
    ) -> None:
        self.writer: Life | None = None
        self._socket = accepted
        self._target = target
        self._hello_s = hello_s
        self._admit = admit
        self._leave = leave
        self._key = key
        self._reader: tcp_streams.Reader = tcp_streams.PlainReader(accepted)
        self._sealed: Callable[[bytes, bytes], bytes] = _as_it_is
        self._in_push = False
        self._lock = threading.Lock()  # nobody shuts a descriptor that was closed, and maybe given out again
        self._thread = threading.Thread(target=self._run, name="tcp-receive", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def shut(self) -> None:
        """The thread ends soon: the kernel resets a peer that goes on sending. Any thread; again is a no-op."""
        with self._lock:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def join(self) -> None:
        """Blocks until the thread writes nothing any more."""
        self._thread.join()

    # Below: on the thread.

    def _run(self) -> None:
        why = ""
        try:
            for level, option, value in KEEPALIVE:
                self._socket.setsockopt(level, option, value)
            if self._greet():
                while self._take_message():
                    pass
        except OSError as e:
            why = "broken" if self._in_push else ""
            say = log.debug if self.writer is None else log.info  # strangers may come in crowds
            say("tcp_connection_ended", writer=self.writer, in_push=self._in_push, error=str(e))
        except (InvalidRequest, Bug, LayoutMismatch, AttemptFailed) as e:
            why = "forged" if isinstance(e, DigestMismatch) else "malformed"
            log.warning("tcp_refused", writer=self.writer, error=e.message)
        finally:
            with self._lock:
                self._socket.close()
            self._leave(self, why)

    def _greet(self) -> bool:
        """Whether the other end may push. TimeoutError where its hello takes too long, however it trickles in."""
        until = time.monotonic() + self._hello_s
        streams = None if self._key is None else self._agree(self._key, until)
        tag, opened = (0, _as_it_is) if streams is None else (TAG_BYTES, streams.hears.open)
        hello = tcp_wire.Hello.decode(opened(self._read_by(until, tcp_wire.HELLO.size + tag), tcp_streams.HELLO))
        writer = tcp_wire.life_of(hello, opened(self._read_by(until, hello.name_bytes + tag), tcp_streams.NAME))
        if not self._admit(self, hello, writer):
            return False
        self._socket.settimeout(None)
        if streams is not None:
            self._reader, self._sealed = tcp_streams.SealedReader(self._socket, streams.hears), streams.sends.seal
        self._socket.sendall(self._sealed(tcp_wire.encode_welcome(), tcp_streams.WELCOME))
        return True

    def _agree(self, key: KvKey, until: float) -> Streams:
        """Both offers cross before either is judged, so that each side can name both keys where they differ."""
        handshake = Handshake(key)
        offer = self._read_by(until, OFFER.size)
        self._socket.sendall(handshake.offer)
        return handshake.meet(offer, caller=False)

    def _read_by(self, until: float, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._socket.settimeout(max(until - time.monotonic(), 1e-3))
            more = self._socket.recv(size - len(data))
            if not more:
                raise ConnectionResetError("closed before its hello was whole")
            data += more
        return data

    def _take_message(self) -> bool:
        """Read one message into the regions; answer where it ends its push. False: the other end is through."""
        head = bytearray(tcp_wire.HEADER.size)
        if not self._reader.begin((tcp_streams.HEADER, memoryview(head))):
            if self._in_push:
                raise ConnectionResetError("closed in the middle of a push")
            return False
        self._in_push = True
        header = tcp_wire.Header.decode(head)
        table, frame = bytearray(header.pieces * 3 * tcp_wire.PIECE.itemsize), bytearray(header.frame_bytes)
        self._reader.fill([(tcp_streams.TABLE, memoryview(table))])
        self._reader.fill([*self._places(table), (tcp_streams.NOTICE, memoryview(frame))])
        if header.last:
            self._in_push = False
            self._tell(bytes(frame))
            self._socket.sendall(self._sealed(tcp_wire.ANSWER.pack(header.number), tcp_streams.ANSWER))
        return True

    def _places(self, table: bytearray) -> list[tcp_streams.Part]:
        """Bug where a piece leaves its region."""
        rows = tcp_wire.decode_table(table)
        self._target.extents.require(rows[:, 0], rows[:, 1], rows[:, 2], "region")
        views = self._target.views
        return [
            (tcp_streams.place(region, offset, length), views[region][offset : offset + length])
            for region, offset, length in rows.tolist()
        ]

    def _tell(self, frame: bytes) -> None:
        if not frame:
            return
        try:
            self._target.on_notices([frame])
        except Exception:
            log.exception("notices_not_taken", frames=1)


def _as_it_is(data: bytes, meaning: bytes) -> bytes:
    return data
