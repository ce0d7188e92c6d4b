"""What a client's connection may cost: how many there are, how large and slow heads are, how slowly answers are read.

uvicorn bounds what it buffers of bodies (64 KiB each way) and closes idle connections between requests. It bounds neither
heads nor trailers, nor how long either side takes: this does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b"
)
_FULL_BODY = (
    b'{"error":{"message":"gateway: too many connections (gateway.max_connections); try again later",'
    b'"type":"server_error","param":null,"code":"overloaded"}}'
)


_HEAD_BYTES = 64 << 10  # of request line and headers
_HEADERS = 256  # trailers included
_SEND_BYTES = 128 << 10  # that the kernel takes for a reader (it doubles this); else it would grow to megabytes


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """``head_s``: for a whole request head, from the connection's or the head's first byte. ``reader_s``: for a reader to
    take what is buffered for it. Seconds."""

    most: int
    head_s: float
    reader_s: float


class Connections:
    """Makes the protocol of each connection. ``counted``: connections refused and cut, by why."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.counted: Counter[str] = Counter()

    def numbers(self) -> dict[str, float]:
        names = ("connections_refused", "slow_heads_cut", "large_heads_cut", "slow_readers_cut")
        return {f"{name}_count": float(self.counted[name]) for name in names}

    def protocol(self) -> type[HttpToolsProtocol]:
        """The class that uvicorn makes one of for each connection."""
        told = self

        class Bounded(_BoundedProtocol):
            owner = told

        return Bounded


class _BoundedProtocol(HttpToolsProtocol):
    owner: Connections
    _refused = False
    _head_bytes = 0
    _head: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._refused = len(self.connections) >= self.owner.limits.most
        if self._refused:
            self.owner.counted["connections_refused"] += 1
            transport.write(_FULL % (len(_FULL_BODY), _FULL_BODY))
            transport.close()
            return
        transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, _SEND_BYTES)
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        cycle: Any = self.cycle  # None before the first request
        if cycle is None or cycle.response_complete:
            self._head_bytes += len(data)
            self._expect_head()
        else:
            self._head_bytes = 0
            self._stop_timing_head()
        if self._head_bytes > _HEAD_BYTES or len(self.headers or ()) > _HEADERS:
            self._cut("large_heads_cut")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timing_head()
        self._stop_timing_reader()
        if not self._refused:
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader is None:
            self._reader = self.loop.call_later(self.owner.limits.reader_s, self._cut, "slow_readers_cut")

    def resume_writing(self) -> None:
        self._stop_timing_reader()
        super().resume_writing()

    def _expect_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(self.owner.limits.head_s, self._cut, "slow_heads_cut")

    def _cut(self, why: str) -> None:
        """Without waiting for what is still buffered: nobody reads it."""
        if not self.transport.is_closing():
            self.owner.counted[why] += 1
            self.transport.abort()

    def _stop_timing_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _stop_timing_reader(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
