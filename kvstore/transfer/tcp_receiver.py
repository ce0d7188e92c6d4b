"""The receiving end over plain sockets: a thread per connection reads a peer's bytes straight into the regions.

What a connection may write is bounded by the regions; whether it should have is for digests to say. Closing a
connection and joining its thread proves that nothing more of its sender lands: that is done to one sender (``cut``) or
to all (``remake``). A sender that was cut off comes back only by asking for the endpoint again, under its own name.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.errors import Bug, ConfigError
from moonpool.core.landing import Region
from moonpool.core.membership import Member
from moonpool.kvstore.claims import Life
from moonpool.kvstore.sealing.keys import KvKey
from moonpool.kvstore.transfer import tcp_wire
from moonpool.kvstore.transfer.carrier import Endpoint, OnNotices
from moonpool.kvstore.transfer.pieces import Extents, region_sizes
from moonpool.kvstore.transfer.tcp_connection import Connection, Target

HELLO_S = 2.0  # from being accepted to a whole hello
MAX_CONNECTIONS = 256
MAX_STRANGERS = 64  # without a hello yet; one more, and the oldest of them goes: a peer needs milliseconds for it
MAX_CUT = 4096  # senders remembered as cut off; then only ``remake`` is left
NO_ROOM_S = 0.1  # after accepting failed (no descriptors left)
log = structlog.get_logger(__name__)


class TcpReceiver:
    """See ``carrier.Receiver``. Binds ``port`` (0: a free one) of the member's own host.

    With a ``key``, only its holders can push.
    """

    carrier = "tcp"

    def __init__(
        self, member: Member, on_notices: OnNotices, *, hello_s: float = HELLO_S, key: KvKey | None = None, port: int = 0
    ) -> None:
        self._member = member
        self._port = port
        self._key = key
        self._on_notices = on_notices
        self._hello_s = hello_s
        self._host = member.address.rpartition(":")[0].strip("[]") or "127.0.0.1"
        self._regions: tuple[Region, ...] = ()
        self._target: Target | None = None
        self._generation = 0
        self._token = b""
        self._cuts: dict[Life, int] = {}  # in this life
        self._opened = 0
        self._connections: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}  # those of them without a hello yet, oldest first
        self._counted = dict.fromkeys(("refused", "malformed", "forged", "broken", "cut"), 0)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def register(self, regions: Sequence[Region], views: Sequence[NDArray[np.uint8]]) -> None:
        """ConfigError where no port can be bound on the member's host."""
        if self._target is not None or len(regions) != len(views):
            raise Bug("register: once, with one view per region")
        self._regions = tuple(regions)
        numbers = [region.number for region in regions]
        extents = Extents(dict.fromkeys(numbers, 0), region_sizes(regions))
        views_of = {number: view.data for number, view in zip(numbers, views, strict=True)}
        self._target = Target(views_of, extents, self._on_notices)
        self._listener = _listen(self._host, self._port)
        self._begin()
        self._thread = threading.Thread(target=self._accept, args=(self._listener,), name="tcp-accept", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        """The next life. Under the lock where threads run."""
        self._generation += 1
        self._token = secrets.token_bytes(tcp_wire.TOKEN_BYTES)
        self._cuts.clear()

    def describe(self, writer: Life | None = None) -> Endpoint:
        if self._listener is None:
            raise Bug("describe: no regions are registered")
        with self._lock:
            generation, admission = self._generation, 0 if writer is None else self._cuts.get(writer, 0)
            port = self._listener.getsockname()[1]
            address = tcp_wire.Address(self._host, port, self._token, admission)
        me = self._member
        name = f"{me.incarnation:x}t{generation}.{admission}.{me.id}"
        bases = (0,) * len(self._regions)
        return Endpoint(me.node, me.incarnation, generation, self.carrier, name, address.encode(), bases, self._regions)

    def open(self) -> None:
        """Counted only: the threads wait in the kernel."""
        with self._lock:
            self._opened += 1

    def idle(self) -> None:
        with self._lock:
            if self._opened == 0:
                raise Bug("idle: more often than open")
            self._opened -= 1

    async def cut(self, writer: Life) -> bool:
        with self._lock:
            if len(self._cuts) >= MAX_CUT and writer not in self._cuts:
                return False
            self._cuts[writer] = self._cuts.get(writer, 0) + 1
            theirs = [connection for connection in self._connections if connection.writer == writer]
            self._counted["cut"] += len(theirs)
        await asyncio.to_thread(_end, theirs)
        return True

    async def remake(self) -> Endpoint:
        with self._lock:
            self._begin()
            former = list(self._connections)
        await asyncio.to_thread(_end, former)
        return self.describe()

    def writers(self) -> set[Life]:
        """Who is connected."""
        with self._lock:
            return {one.writer for one in self._connections if one.writer is not None}

    def transport_used(self) -> str:
        return "tcp"

    def numbers(self) -> dict[str, float]:
        """Connections now; since the start: refused (no room, no valid token), malformed, broken mid-push, cut off."""
        with self._lock:
            counted = {f"tcp_{name}": float(count) for name, count in self._counted.items()}
            return {"tcp_connections": float(len(self._connections))} | counted

    def close(self) -> None:
        if self._thread is None or self._listener is None:
            return
        with self._lock:
            self._closing.set()
            former = list(self._connections)
        _shut(self._listener)
        self._thread.join()
        _end(former)
        self._listener.close()
        self._target = None

    # Below: on the accepting thread.

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                accepted, _ = listener.accept()
            except OSError as e:
                if not self._closing.wait(NO_ROOM_S):
                    log.warning("tcp_accept", error=str(e))
                continue
            self._enter(accepted)

    def _enter(self, accepted: socket.socket) -> None:
        """A thread for the connection, unless there are too many; strangers never crowd out those who said hello."""
        assert self._target is not None
        connection = Connection(accepted, self._target, self._hello_s, self._admit, self._leave, self._key)
        with self._lock:
            full = self._closing.is_set() or len(self._connections) >= MAX_CONNECTIONS
            # Begun under the lock: whoever finds it among the connections may wait for its end.
            taken = not full and _begun(connection)
            crowded = len(self._strangers) >= MAX_STRANGERS
            self._counted["refused"] += (not taken) + crowded
            if crowded:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.shut()
            if taken:
                self._connections.add(connection)
                self._strangers[connection] = None
        if not taken:
            accepted.close()

    # Below: on a connection's thread.

    def _admit(self, connection: Connection, hello: tcp_wire.Hello, writer: Life) -> bool:
        """Under the lock, so that whoever gets in is seen by the next ``cut`` or ``remake``."""
        with self._lock:
            known = hmac.compare_digest(hello.token, self._token) and connection in self._strangers
            if not known or hello.admission != self._cuts.get(writer, 0) or self._closing.is_set():
                self._counted["refused"] += 1
                return False
            del self._strangers[connection]
            connection.writer = writer
            return True

    def _leave(self, connection: Connection, why: str) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._strangers.pop(connection, None)
            if why:
                self._counted[why] += 1


def _begun(connection: Connection) -> bool:
    try:
        connection.start()
    except RuntimeError as e:  # no more threads
        log.warning("tcp_accept", error=str(e))
        return False
    return True


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server((host, port), family=found[0][0], backlog=MAX_CONNECTIONS)
    except OSError as e:
        if port:
            raise ConfigError(
                f"transfer.port: cannot listen on {host}:{port} for KV ({e}); choose another, or 0 for any free one",
                param="transfer.port",
            ) from e
        raise ConfigError(f"cluster.host: no port can be bound on {host!r} for KV ({e})", param="cluster.host") from e


def _shut(listener: socket.socket) -> None:
    """Wakes the thread that accepts."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _end(connections: Iterable[Connection]) -> None:
    """Blocks until none of them writes any more."""
    ended = list(connections)
    for connection in ended:
        connection.shut()
    for connection in ended:
        connection.join()
