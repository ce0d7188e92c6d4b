"""The client's end of a session with a store node: heartbeats and relayed messages, on threads of their own.

A worker's event loop or interpreter may be busy for longer than a node waits for a beat, so neither beats nor the
reading of the stream depend on it. What arrives is handed to the loop in order.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from moonpool.core.errors import MoonpoolError, PeerSilent
from moonpool.core.membership import Member
from moonpool.wire import pb
from moonpool.wire.channels import dial_blocking
from moonpool.wire.convert import to_wire
from moonpool.wire.status import error_of

LEAVE_S = 1.0  # how long the node may take to end the stream after we said we leave


class Session:
    """Both callbacks run on the event loop that made it; ``on_end`` once, unless ``close`` came first."""

    def __init__(
        self,
        address: str,
        member: Member,
        beat_s: float,
        on_message: Callable[[pb.store.StoreMessage], None],
        on_end: Callable[[MoonpoolError], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._hello = pb.store.SessionMessage(hello=pb.store.Hello(member=to_wire(member, pb.types.Member())))
        self._beat_s = beat_s
        self._on_message = on_message
        self._on_end = on_end
        self._leaving = threading.Event()
        self._channel: Any = dial_blocking(address)
        self._call: Any = pb.store_rpc.StoreStub(self._channel).Session(self._beats())
        self._reader = threading.Thread(target=self._read, name="store session", daemon=True)
        self._reader.start()

    def _beats(self) -> Iterator[pb.store.SessionMessage]:
        yield self._hello
        beat = pb.store.SessionMessage(beat=pb.types.Empty())
        while not self._leaving.wait(self._beat_s):
            yield beat

    def _read(self) -> None:
        end: MoonpoolError = PeerSilent(f"the store node at {self._address} ended the session")
        try:
            for message in self._call:
                self._to_loop(self._on_message, message)
        except grpc.RpcError as e:
            end = error_of(e, f"the store node at {self._address}")
        if not self._leaving.is_set():
            self._to_loop(self._on_end, end)

    def _to_loop(self, call: Callable[[Any], None], value: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, value)
        except RuntimeError:
            pass  # the loop is closed: nobody is left to tell

    async def close(self) -> None:
        """Leave: the node ends the stream; both threads are gone on return."""
        self._leaving.set()
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        self._reader.join(LEAVE_S)
        self._call.cancel()
        self._reader.join()
        self._channel.close()
