"""A carrier whose next call of a chosen kind goes wrong, once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from numpy.typing import NDArray

from moonpool.core.errors import Bug, PeerSilent, TransferFailed
from moonpool.kvstore.transfer.carrier import Endpoint, OnNotices, Pieces, Receiver, Sender

SENDER_STEPS = (
    "sender connect",
    "sender register",
    "sender post",
    "sender post refused",
    "sender poll",
    "sender completion",
    "sender release",
)
RECEIVER_STEPS = ("receiver describe", "receiver notice")


class Plan:
    """What shall go wrong next; once."""

    def __init__(self) -> None:
        self.step = ""
        self.done: list[str] = []

    def fails(self, step: str) -> bool:
        if step != self.step:
            return False
        self.step = ""
        self.done.append(step)
        return True


def failed(error: Exception) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(error)
    return future


class FailingSender:
    """A carrier's sending end, but for one call."""

    def __init__(self, plan: Plan, inner: Sender) -> None:
        self._plan, self._inner = plan, inner
        self.carrier = inner.carrier

    def register(self, memories: Sequence[NDArray[Any]]) -> None:
        if self._plan.fails("sender register"):
            raise TransferFailed("the memory could not be registered")
        self._inner.register(memories)

    def connect(self, target: Endpoint) -> Future[None]:
        if self._plan.fails("sender connect"):
            return failed(TransferFailed("no connection"))
        return self._inner.connect(target)

    def push(self, target: Endpoint, pieces: Pieces, frame: bytes) -> Future[None]:
        if self._plan.fails("sender post refused"):
            raise Bug("a piece outside its memory")
        if self._plan.fails("sender post"):
            return failed(TransferFailed("the post failed"))
        if self._plan.fails("sender poll"):
            return failed(PeerSilent("no bytes for the stall time"))
        pushed = self._inner.push(target, pieces, frame)
        if self._plan.fails("sender completion"):
            later: Future[None] = Future()
            pushed.add_done_callback(lambda _: later.set_exception(TransferFailed("the completion was an error")))
            return later
        return pushed

    def forget(self, target: Endpoint) -> None:
        if self._plan.fails("sender release"):
            raise TransferFailed("the connection could not be released")
        self._inner.forget(target)

    def bytes_sent(self) -> int:
        return self._inner.bytes_sent()

    def transport_used(self) -> str:
        return self._inner.transport_used()

    def close(self) -> None:
        self._inner.close()


def fail_receiver(plan: Plan, receiver: Any) -> Receiver:
    """``receiver``, whose next ``describe`` may raise. ``open`` and ``idle`` only count: they never do."""
    describe = receiver.describe

    def instead(*args: Any) -> Endpoint:
        if plan.fails("receiver describe"):
            raise TransferFailed("the endpoint is gone")
        told: Endpoint = describe(*args)
        return told

    receiver.describe = instead
    made: Receiver = receiver
    return made


def failing_notices(plan: Plan, on_notices: OnNotices) -> OnNotices:
    def take(frames: Sequence[bytes]) -> None:
        if plan.fails("receiver notice"):
            raise RuntimeError("the notice was not taken")
        on_notices(frames)

    return take
