"""A channel that follows its certificate: calls made after the files changed go over a new connection.

gRPC reads a client's certificate once per channel. Connections outlive a certificate, but one that breaks could not come
back once the old certificate has expired; so the channel beneath is made anew, and the old one ends with its last call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc.aio

LOOK_S = 1.0  # files are looked at this often, at most
LAST_CALLS_S = 3_600.0  # streams of the channel before may go on this long


class RenewedChannel(grpc.aio.Channel):  # type: ignore[misc]  # grpc has no types
    """``make``: a channel by the files as they are now. ``version``: differs once they changed."""

    def __init__(
        self,
        make: Callable[[], grpc.aio.Channel],
        version: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._version, self._clock = make, version, clock
        self._seen, self._looked = version(), clock()
        self._inner = make()
        self._ending: set[asyncio.Task[None]] = set()

    def inner(self) -> grpc.aio.Channel:
        """The channel that a call made now takes."""
        now = self._clock()
        if now >= self._looked + LOOK_S:
            self._looked = now
            if (found := self._version()) != self._seen:
                older, self._inner, self._seen = self._inner, self._make(), found
                ending = asyncio.create_task(older.close(LAST_CALLS_S), name="channel-last-calls")
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
        return self._inner

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_stream", args, kwargs)

    async def close(self, grace: float | None = None) -> None:
        for ending in self._ending:
            ending.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> Any:
        return self.inner().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: Any) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.inner().channel_ready()

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Method:
    """One RPC of a stub: made once per channel beneath."""

    def __init__(self, channel: RenewedChannel, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._channel, self._kind, self._args, self._kwargs = channel, kind, args, kwargs
        self._made: tuple[grpc.aio.Channel, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._channel.inner()
        if self._made is None or self._made[0] is not inner:
            self._made = (inner, getattr(inner, self._kind)(*self._args, **self._kwargs))
        return self._made[1](*args, **kwargs)
