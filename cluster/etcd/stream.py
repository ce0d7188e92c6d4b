"""gRPC calls of the blocking kind, awaited.

gRPC's asyncio calls share one completion queue among all event loops of a process: each event of one loop wakes the others,
and a loop that ends leaves events behind. Membership has a loop of its own, so its calls stay out of that queue.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc

Q = TypeVar("Q", contravariant=True)
A = TypeVar("A")

Metadata = tuple[tuple[str, str], ...]

AHEAD = 64  # answers read before anybody wants them


class Ended(Exception):
    """The other side closed the stream."""


class Unary(Protocol[Q]):
    def future(self, request: Q, timeout: float | None = ..., metadata: Metadata | None = ...) -> Any: ...


async def unary(method: Unary[Q], request: Q, timeout_s: float, metadata: Metadata = ()) -> Any:
    """The answer. grpc.RpcError, also where the channel was closed meanwhile."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    call = method.future(request, timeout=timeout_s, metadata=metadata)
    call.add_done_callback(lambda _: _post(loop, _set, ended))
    try:
        await ended
    finally:
        call.cancel()  # says nothing where it is done
    return call.result()


class Stream(Generic[Q, A]):
    """One call with requests and answers, read by a thread of its own."""

    def __init__(self, method: Callable[..., Any], metadata: Metadata = ()) -> None:
        self._loop = asyncio.get_running_loop()
        self._requests: queue.SimpleQueue[Q | None] = queue.SimpleQueue()
        self._answers: asyncio.Queue[A | Exception] = asyncio.Queue()
        self._room = threading.Semaphore(AHEAD)
        self._call = method(iter(self._requests.get, None), metadata=metadata)
        threading.Thread(target=self._read, name="membership-etcd-stream", daemon=True).start()

    def send(self, request: Q) -> None:
        self._requests.put(request)

    async def next(self) -> A:
        """The next answer. grpc.RpcError, or Ended."""
        answer = await self._answers.get()
        self._room.release()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._requests.put(None)
        self._call.cancel()
        self._room.release()

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._room.acquire()
                _post(self._loop, self._answers.put_nowait, answer)
            _post(self._loop, self._answers.put_nowait, Ended("its stream ended"))
        except grpc.RpcError as e:
            _post(self._loop, self._answers.put_nowait, e)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:  # the loop is closed: nobody waits
        pass


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
