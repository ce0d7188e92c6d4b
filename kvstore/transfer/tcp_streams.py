"""What a connection of the tcp carrier reads and writes with: plain bytes, or records that only members can make.

Both take parts: what a stretch of bytes means, and where it lies. A sealed part is cut into records of at most
``CHUNK`` bytes, each bound to the part's meaning; KV bytes mean the place that they go to (``place``), so a record that
opens is right there and nowhere else. Records pass through a bounded buffer of the connection: what comes is opened
straight into its place, so no byte that a stranger made lies there for longer than the check takes.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from moonpool.kvstore.sealing.stream import TAG_BYTES, Stream

AT_ONCE = 1024  # buffers of one system call (IOV_MAX)
CHUNK = 256 << 10
BUFFER = 1 << 20  # sealed bytes of one system call

HELLO, NAME, WELCOME, HEADER, TABLE, BYTES, NOTICE, ANSWER = (bytes((i,)) for i in range(8))
_PLACE = struct.Struct("<cqqq")
Part = tuple[bytes, memoryview]
"""(meaning, bytes)"""


def place(region: int, offset: int, length: int) -> bytes:
    """The meaning of KV bytes that go there."""
    return _PLACE.pack(BYTES, region, offset, length)


def _chunks(parts: Iterable[Part]) -> Iterator[Part]:
    for meaning, view in parts:
        for at in range(0, len(view), CHUNK):
            yield meaning, view[at : at + CHUNK]


class Reader(Protocol):
    """Of a connection's thread."""

    def fill(self, parts: Sequence[Part]) -> None:
        """Read into all of ``parts``. ConnectionResetError where the stream ends before, DigestMismatch where it is forged."""

    def begin(self, part: Part) -> bool:
        """As ``fill``, for the first part of a message; False where the stream has ended in order instead."""


class PlainReader:
    def __init__(self, source: socket.socket) -> None:
        self._socket = source

    def begin(self, part: Part) -> bool:
        _, into = part
        taken = self._socket.recv_into(into, len(into), socket.MSG_WAITALL)
        if taken:
            self.fill([(b"", into[taken:])])
        return bool(taken)

    def fill(self, parts: Sequence[Part]) -> None:
        into, at = [view for _, view in parts], 0
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


class SealedReader:
    def __init__(self, source: socket.socket, stream: Stream) -> None:
        self._plain = PlainReader(source)
        self._stream = stream
        self._buffer = memoryview(bytearray(BUFFER))

    def begin(self, part: Part) -> bool:
        meaning, into = part
        record = self._buffer[: len(into) + TAG_BYTES]
        if not self._plain.begin((b"", record)):
            return False
        self._stream.open_into(record, meaning, into)
        return True

    def fill(self, parts: Sequence[Part]) -> None:
        records: list[Part] = []
        size = 0
        for meaning, into in _chunks(parts):
            if size + len(into) + TAG_BYTES > BUFFER:
                self._take(records, size)
                records, size = [], 0
            records.append((meaning, into))
            size += len(into) + TAG_BYTES
        self._take(records, size)

    def _take(self, records: Sequence[Part], size: int) -> None:
        self._plain.fill([(b"", self._buffer[:size])])
        at = 0
        for meaning, into in records:
            end = at + len(into) + TAG_BYTES
            self._stream.open_into(self._buffer[at:end], meaning, into)
            at = end


class Writer(Protocol):
    """What waits to be sent. True while there is some."""

    def put(self, parts: Iterable[Part]) -> None: ...

    def next(self) -> list[memoryview]:
        """What goes to the socket now; at least one byte while there is any."""

    def took(self, size: int) -> None:
        """The socket took so many bytes of that."""

    def clear(self) -> None: ...

    def __bool__(self) -> bool: ...


class PlainWriter:
    def __init__(self) -> None:
        self._views: deque[memoryview] = deque()

    def __bool__(self) -> bool:
        return bool(self._views)

    def put(self, parts: Iterable[Part]) -> None:
        self._views.extend(view for _, view in parts if view)

    def next(self) -> list[memoryview]:
        return list(islice(self._views, AT_ONCE))

    def took(self, size: int) -> None:
        while size and size >= len(self._views[0]):
            size -= len(self._views.popleft())
        if size:
            self._views[0] = self._views[0][size:]

    def clear(self) -> None:
        self._views.clear()


class SealedWriter:
    """Seals as much as fits into its buffer when all before it has gone: source memory is read only then."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._parts: deque[Part] = deque()
        self._buffer = memoryview(bytearray(BUFFER))
        self._ready = self._buffer[:0]

    def __bool__(self) -> bool:
        return bool(self._ready) or bool(self._parts)

    def put(self, parts: Iterable[Part]) -> None:
        self._parts.extend(_chunks(parts))

    def next(self) -> list[memoryview]:
        if not self._ready:
            at = 0
            while self._parts and at + len(self._parts[0][1]) + TAG_BYTES <= BUFFER:
                meaning, view = self._parts.popleft()
                end = at + len(view) + TAG_BYTES
                self._stream.seal_into(view, meaning, self._buffer[at:end])
                at = end
            self._ready = self._buffer[:at]
        return [self._ready]

    def took(self, size: int) -> None:
        self._ready = self._ready[size:]

    def clear(self) -> None:
        self._parts.clear()
        self._ready = self._buffer[:0]
