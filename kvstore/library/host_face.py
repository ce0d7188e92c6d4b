"""The store node's face for users of the library on its host: fixed frames on a unix socket (mode 0600, same user).

The connection is the session. When it ends, pins go and what was being written is fenced until its process is proved
dead or comes back as a newer life of the same client. A malformed frame is counted and ends its connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from moonpool.core.errors import InvalidRequest, MoonpoolError, Overloaded
from moonpool.core.ids import Incarnation, MemberId
from moonpool.core.use import Use
from moonpool.kvstore.agent import caller_of, listen, socket_path, stop_listening
from moonpool.kvstore.claims import Life
from moonpool.kvstore.library.host_calls import HostCalls, Layouts
from moonpool.kvstore.node_sessions import NodeSession
from moonpool.wire import host_frames as frames
from moonpool.wire.host_frames import Head, Kind, Welcome

if TYPE_CHECKING:
    from moonpool.kvstore.node import StoreNode

MAX_CALLERS = 1024
HELLO_S = 5.0
_SO_PEERPIDFD = 77  # Linux 6.5: a descriptor of the very process that connected
log = structlog.get_logger(__name__)


class Caller:
    """One connection. ``calls`` is there from its hello on."""

    def __init__(self, connection: socket.socket, pid: int, pidfd: int) -> None:
        self.socket = connection
        self.pid = pid
        self.pidfd = pidfd  # closed with the connection unless a life took it over
        self.session: NodeSession | None = None
        self.calls: HostCalls | None = None
        self.unsent: deque[bytes] = deque()
        self.open = True


class HostFace:
    """Event-loop only. Made by ``start``."""

    def __init__(self, node: StoreNode, names_key: bytes) -> None:
        self.layouts = Layouts(node.pool.register)
        folder = node.config.state_dir(Path.home())
        self.path = socket_path(folder, node.member.node, "store")
        self._named = folder / f"{node.member.node}.store.sock"  # a link to it where its own path is too long for a socket
        self.counted: Counter[str] = Counter()
        self._node = node
        self._names_key = names_key
        self._callers: set[Caller] = set()
        self._buffer = bytearray(frames.MAX_FRAME_BYTES)
        self._listener, self._inode = listen(self.path)
        if self._named != self.path:
            self._named.unlink(missing_ok=True)
            self._named.symlink_to(self.path)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def numbers(self) -> dict[str, float]:
        return {
            "library_clients": len(self._callers),
            "library_refused": self.counted["refused"],
            "library_malformed": self.counted["malformed"],
            "library_calls": self.counted["calls"],
        }

    def session_ended(self, session: NodeSession) -> None:
        """The node ended it: so does its connection."""
        for caller in list(self._callers):
            if caller.session is session:
                self._hang_up(caller)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        stop_listening(self._listener, self.path, self._inode)
        if self._named.is_symlink() and not self._named.exists():
            self._named.unlink()
        for caller in list(self._callers):
            self._hang_up(caller)

    # Connections.

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        try:
            if len(self._callers) >= MAX_CALLERS:
                raise Overloaded(f"{MAX_CALLERS} clients are connected", retry_after_s=1.0)
            pid = caller_of(connection)
            caller = Caller(connection, pid, _pidfd_of(connection, pid))
        except (MoonpoolError, OSError) as e:
            self.counted["refused"] += 1
            log.warning("client_refused", error=str(e))
            connection.close()
            return
        self._callers.add(caller)
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._receive, caller)
        loop.call_later(HELLO_S, self._require_hello, caller)

    def _require_hello(self, caller: Caller) -> None:
        if caller.session is None:
            self._hang_up(caller)

    def _hang_up(self, caller: Caller) -> None:
        """Again is a no-op."""
        if not caller.open:
            return
        caller.open = False
        self._callers.discard(caller)
        loop = asyncio.get_running_loop()
        loop.remove_reader(caller.socket)
        loop.remove_writer(caller.socket)
        caller.socket.close()
        if caller.pidfd >= 0:
            os.close(caller.pidfd)
        if caller.session is not None:
            self._node.sessions.end(caller.session)
            self._node.lives.client_left(caller.session.life)

    # Frames.

    def _receive(self, caller: Caller) -> None:
        try:
            size = caller.socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self._hang_up(caller)
            return
        self.counted["calls"] += 1
        number = 0
        try:
            frame = memoryview(self._buffer)[:size]
            head = frames.head(frame)
            number = head.number
            answer = self._take(caller, head, frame)
            if answer is None:  # it comes later: until then nothing more is taken, so that answers keep their order
                asyncio.get_running_loop().remove_reader(caller.socket)
            else:
                self._reply(caller, number, answer)
        except InvalidRequest as e:
            self.counted["malformed"] += 1
            log.warning("frame_refused", pid=caller.pid, error=e.message)
            self._send(caller, frames.encode_error(number, e))
            self._hang_up(caller)
        except MoonpoolError as e:
            self._reply(caller, number, frames.encode_error(number, e))
        except Exception as e:
            log.error("call_failed", pid=caller.pid, exc_info=e)
            self._hang_up(caller)

    def _take(self, caller: Caller, head: Head, frame: memoryview) -> bytes | None:
        if caller.calls is not None:
            return caller.calls.answer(head, frame)
        if head.kind is not Kind.HELLO:
            raise InvalidRequest("frame: the first one must be a hello")
        return self._hello(caller, head, frame)

    def _hello(self, caller: Caller, head: Head, frame: memoryview) -> bytes:
        hello = frames.decode_hello(frame)
        node = self._node
        if node.config.store.ssd_path:
            self.layouts.expect_values()
        life = Life(MemberId(f"client-{caller.pid}-{hello.client}"), Incarnation(time.time_ns()))
        session = caller.session = node.lives.admit_client(life, caller.pid, caller.pidfd)
        caller.pidfd = -1

        def later(number: int, frame: bytes) -> None:
            if caller.open:
                asyncio.get_running_loop().add_reader(caller.socket, self._receive, caller)
                self._reply(caller, number, frame)

        caller.calls = HostCalls(node, session, Use(hello.tenant), self.layouts, later)
        welcome = Welcome(session.number, node.member.incarnation, self._names_key, len(node.regions.files))
        return frames.encode_welcome(head.number, welcome)

    def _reply(self, caller: Caller, number: int, frame: bytes) -> None:
        if number and caller.open:
            self._send(caller, frame)

    def _send(self, caller: Caller, frame: bytes) -> None:
        if not caller.unsent:
            try:
                caller.socket.send(frame)
                return
            except BlockingIOError:
                pass
            except OSError:
                self._hang_up(caller)
                return
        # Its answers lie unread: nothing more is taken from it until it reads.
        caller.unsent.append(frame)
        loop = asyncio.get_running_loop()
        loop.remove_reader(caller.socket)
        loop.add_writer(caller.socket, self._flush, caller)

    def _flush(self, caller: Caller) -> None:
        try:
            while caller.unsent:
                caller.socket.send(caller.unsent[0])
                caller.unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._hang_up(caller)
            return
        loop = asyncio.get_running_loop()
        loop.remove_writer(caller.socket)
        loop.add_reader(caller.socket, self._receive, caller)


def _pidfd_of(connection: socket.socket, pid: int) -> int:
    with suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    if not pid:
        raise InvalidRequest("the client is in another PID namespace, and this system cannot tell when it ends (Linux 6.5 can)")
    return os.pidfd_open(pid)
