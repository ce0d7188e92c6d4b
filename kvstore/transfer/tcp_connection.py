"""One accepted connection of the tcp carrier and the thread that reads it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from moonpool.core.errors import Bug, InvalidRequest
from moonpool.kvstore.claims import Life
from moonpool.kvstore.transfer import tcp_wire
from moonpool.kvstore.transfer.carrier import OnNotices
from moonpool.kvstore.transfer.pieces import Extents

AT_ONCE = 1024  # buffers of one system call (IOV_MAX)
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

    ``leave`` is told why it ended: ``malformed``, ``broken`` (in the middle of a push), or nothing special.
    """

    def __init__(
        self,
        accepted: socket.socket,
        target: Target,
        hello_s: float,
        admit: Callable[[Connection, tcp_wire.Hello, Life], bool],
        leave: Callable[[Connection, str], None],
    ) -> None:
        self.writer: Life | None = None
        self._socket = accepted
        self._target = target
        self._hello_s = hello_s
        self._admit = admit
        self._leave = leave
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
        except (InvalidRequest, Bug) as e:
            why = "malformed"
            log.warning("tcp_refused", writer=self.writer, error=e.message)
        finally:
            with self._lock:
                self._socket.close()
            self._leave(self, why)

    def _greet(self) -> bool:
        """Whether the other end may push. TimeoutError where its hello takes too long, however it trickles in."""
        until = time.monotonic() + self._hello_s
        hello = tcp_wire.Hello.decode(self._read_by(until, tcp_wire.HELLO.size))
        writer = tcp_wire.life_of(hello, self._read_by(until, hello.name_bytes))
        if not self._admit(self, hello, writer):
            return False
        self._socket.settimeout(None)
        self._socket.sendall(tcp_wire.encode_welcome())
        return True

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
        read = self._socket.recv_into(head, len(head), socket.MSG_WAITALL)
        if not read and not self._in_push:
            return False
        self._in_push = True
        self._read([memoryview(head)[read:]])
        header = tcp_wire.Header.decode(head)
        table, frame = bytearray(header.pieces * 3 * tcp_wire.PIECE.itemsize), bytearray(header.frame_bytes)
        self._read([memoryview(table)])
        self._read([*self._places(table), memoryview(frame)])
        if header.last:
            self._in_push = False
            self._tell(bytes(frame))
            self._socket.sendall(tcp_wire.ANSWER.pack(header.number))
        return True

    def _places(self, table: bytearray) -> list[memoryview]:
        """Bug where a piece leaves its region."""
        rows = tcp_wire.decode_table(table)
        self._target.extents.require(rows[:, 0], rows[:, 1], rows[:, 2], "region")
        views = self._target.views
        return [views[region][offset : offset + length] for region, offset, length in rows.tolist()]

    def _read(self, into: list[memoryview]) -> None:
        """Fill every buffer. ConnectionResetError where the stream ends before."""
        at = 0
        while at < len(into):
            if not into[at]:
                at += 1
                continue
            batch = into[at : at + AT_ONCE]
            taken = self._socket.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
            if not taken:
                raise ConnectionResetError("closed in the middle of a push")
            if taken == sum(map(len, batch)):
                at += len(batch)
                continue
            while taken and taken >= len(into[at]):
                taken -= len(into[at])
                at += 1
            if taken:
                into[at] = into[at][taken:]

    def _tell(self, frame: bytes) -> None:
        if not frame:
            return
        try:
            self._target.on_notices([frame])
        except Exception:
            log.exception("notices_not_taken", frames=1)
