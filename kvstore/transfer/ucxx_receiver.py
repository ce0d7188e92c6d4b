"""The receiving end over UCXX: for every announced piece a receive is posted straight into its place.

Only what was posted can be written, so destroying the worker, with all its receives, is the proof that nothing more lands.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.config import TransferConfig
from moonpool.core.errors import Bug, MoonpoolError
from moonpool.core.landing import Region
from moonpool.core.membership import Member
from moonpool.kvstore.claims import Life
from moonpool.kvstore.transfer import tcp_wire, ucx
from moonpool.kvstore.transfer.carrier import UNKNOWN, Endpoint, OnNotices
from moonpool.kvstore.transfer.pieces import Extents, region_sizes
from moonpool.kvstore.transfer.ucxx_worker import (
    ANSWER_TAG,
    CONTROL,
    HELLO_BYTES,
    LOOK_S,
    WELCOME,
    WELCOME_TAG,
    Requests,
    UcxxThread,
    Worker,
    copied,
    empty,
    tag_of,
)

HELLO_S = 2.0
MAX_CONNECTIONS = 256
log = structlog.get_logger(__name__)


class _Connection:
    """One accepted endpoint. ``then`` runs when everything it waits for has arrived."""

    def __init__(self, endpoint: Any, number: int, then: Callable[[], None]) -> None:
        self.endpoint = endpoint
        self.number = number
        self.welcomed = False
        self.since = time.monotonic()
        self.waits = Requests()
        self.sends = Requests()
        self.tags = 0
        self.then = then


class UcxxReceiver:
    """See ``carrier.Receiver``. ``open`` and ``idle`` are counted only: the thread waits in the kernel."""

    carrier = "ucxx"

    def __init__(self, member: Member, config: TransferConfig, on_notices: OnNotices) -> None:
        self._member = member
        self._host = member.address.rpartition(":")[0].strip("[]") or "127.0.0.1"
        self._on_notices = on_notices
        self._regions: tuple[Region, ...] = ()
        self._views: dict[int, NDArray[np.uint8]] = {}
        self._extents = Extents({}, {})
        self._endpoint: Endpoint | None = None
        self._token = b""
        self._listener: Any = None
        self._worker: Worker | None = None
        self._connections: list[_Connection] = []
        self._transport = UNKNOWN
        self._opened = 0
        self._counted = dict.fromkeys(("refused", "malformed", "broken"), 0)
        self._thread = UcxxThread("ucxx-receive", config, self._advance)

    def register(self, regions: Sequence[Region], views: Sequence[NDArray[np.uint8]]) -> None:
        if self._endpoint is not None or len(regions) != len(views):
            raise Bug("register: once, with one view per region")
        self._regions = tuple(regions)
        self._views = {region.number: view for region, view in zip(regions, views, strict=True)}
        self._extents = Extents(dict.fromkeys(self._views, 0), region_sizes(regions))
        self._thread.call(self._begin).result()

    def describe(self, writer: Life | None = None) -> Endpoint:
        if self._endpoint is None:
            raise Bug("describe: no regions are registered")
        return self._endpoint

    def open(self) -> None:
        self._opened += 1

    def idle(self) -> None:
        if self._opened == 0:
            raise Bug("idle: more often than open")
        self._opened -= 1

    async def cut(self, writer: Life) -> bool:
        return False

    async def remake(self) -> Endpoint:
        return await asyncio.wrap_future(self._thread.call(self._remake))

    def numbers(self) -> dict[str, float]:
        counted = {f"ucxx_{name}": float(count) for name, count in self._counted.items()}
        return {"ucxx_connections": float(len(self._connections))} | counted

    def transport_used(self) -> str:
        return self._transport

    def close(self) -> None:
        self._thread.stop(self._end)
        self._views = {}

    # Below: on the thread.

    def _begin(self) -> Endpoint:
        self._worker = self._thread.worker()
        self._listener = self._thread.api.UCXListener.create(worker=self._worker.ucx, port=0, cb_func=self._accept)
        self._token = secrets.token_bytes(tcp_wire.TOKEN_BYTES)
        me, generation = self._member, 1 if self._endpoint is None else self._endpoint.generation + 1
        address = tcp_wire.Address(self._host, self._listener.port, self._token, 0)
        name = f"{me.incarnation:x}x{generation}.{me.id}"
        bases = (0,) * len(self._regions)
        self._endpoint = Endpoint(
            me.node, me.incarnation, generation, self.carrier, name, address.encode(), bases, self._regions
        )
        return self._endpoint

    def _end(self) -> None:
        former, self._connections = self._connections, []
        self._listener = None
        worker, self._worker = self._worker, None
        if worker is None:
            return
        for connection in former:
            connection.endpoint = None
        self._thread.end(worker, *(requests for one in former for requests in (one.waits, one.sends)))
        for connection in former:
            connection.waits.clear()
            connection.sends.clear()

    def _remake(self) -> Endpoint:
        if self._worker is not None:
            self._worker.ucx.progress()  # what has arrived counts
        self._advance()
        self._end()
        return self._begin()

    def _accept(self, request: int) -> None:
        """From within the worker's progress."""
        assert self._worker is not None
        endpoint = self._listener.create_endpoint_from_conn_request(request, True)
        self._worker.endpoints.append(endpoint)
        connection = _Connection(endpoint, secrets.randbelow(1 << 32), lambda: None)
        hello = empty(HELLO_BYTES)
        connection.then = lambda: self._greet(connection, hello.tobytes())
        self._connections.append(connection)
        if len(self._connections) > MAX_CONNECTIONS:
            connection.since = 0.0  # dropped at the next look
            return
        self._await_control(connection, hello)
        welcome = WELCOME.pack(tcp_wire.MAGIC, tcp_wire.VERSION, connection.number)
        self._thread.send(connection.sends, endpoint, copied(welcome), WELCOME_TAG)

    def _await_control(self, connection: _Connection, memory: NDArray[np.uint8]) -> None:
        self._thread.receive(connection.waits, connection.endpoint, memory, tag_of(connection.number, CONTROL))

    def _answer(self, connection: _Connection, number: int) -> None:
        answer = copied(tcp_wire.ANSWER.pack(number))
        self._thread.send(connection.sends, connection.endpoint, answer, ANSWER_TAG)

    def _advance(self) -> float:
        busy, now = False, time.monotonic()
        for connection in list(self._connections):
            try:
                connection.sends.ended()
                if not connection.welcomed and now - connection.since > HELLO_S:
                    self._drop(connection, "refused")
                elif connection.waits.ended():
                    busy = True
                    connection.then()
            except MoonpoolError as e:
                log.warning("ucxx_refused", error=e.message)
                self._drop(connection, "malformed")
            except Exception as e:  # noqa: BLE001 UCXX's exceptions share no base that is public
                log.info("ucxx_connection_ended", error=f"{type(e).__name__}: {e}")
                self._drop(connection, "broken" if connection.tags else "")
        return 0.0 if busy else LOOK_S

    def _drop(self, connection: _Connection, why: str) -> None:
        self._connections.remove(connection)
        if self._worker is not None:
            self._worker.close(connection.endpoint)
        connection.endpoint = None
        if why:
            self._counted[why] += 1

    def _greet(self, connection: _Connection, data: bytes) -> None:
        hello = tcp_wire.Hello.decode(data[: tcp_wire.HELLO.size])
        if not hmac.compare_digest(hello.token, self._token):
            self._drop(connection, "refused")
            return
        connection.welcomed = True
        self._answer(connection, 0)
        if self._transport == UNKNOWN:
            self._transport = ucx.lanes_of(connection.endpoint.handle)
        self._await_header(connection)

    def _await_header(self, connection: _Connection) -> None:
        head = empty(tcp_wire.HEADER.size)
        connection.then = lambda: self._await_table(connection, tcp_wire.Header.decode(head.tobytes()))
        self._await_control(connection, head)

    def _await_table(self, connection: _Connection, header: tcp_wire.Header) -> None:
        table = empty(header.pieces * 3 * tcp_wire.PIECE.itemsize)
        connection.then = lambda: self._await_pieces(connection, header, table.tobytes())
        if len(table):
            self._await_control(connection, table)

    def _await_pieces(self, connection: _Connection, header: tcp_wire.Header, table: bytes) -> None:
        """Bug where a piece leaves its region."""
        rows = tcp_wire.decode_table(table)
        self._extents.require(rows[:, 0], rows[:, 1], rows[:, 2], "region")
        for region, offset, length in rows.tolist():
            memory = self._views[region][offset : offset + length]
            self._thread.receive(connection.waits, connection.endpoint, memory, tag_of(connection.number, connection.tags))
            connection.tags = (connection.tags + 1) % CONTROL
        frame = empty(header.frame_bytes)
        connection.then = lambda: self._ended(connection, header, frame.tobytes())
        if len(frame):
            self._await_control(connection, frame)

    def _ended(self, connection: _Connection, header: tcp_wire.Header, frame: bytes) -> None:
        if header.last:
            try:
                self._on_notices([frame])
            except Exception:
                log.exception("notices_not_taken", frames=1)
            self._answer(connection, header.number)
        self._await_header(connection)
