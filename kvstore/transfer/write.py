"""A push on its way through a sending end, and what all targets of that end share."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from moonpool.core.errors import MoonpoolError
from moonpool.kvstore.transfer.carrier import LENGTH, Pieces
from moonpool.kvstore.transfer.pieces import Extents
from moonpool.kvstore.transfer.throttle import TokenBucket

MAX_POSTED = 32  # pushes sent to one target and not answered; the rest waits, where it can still be cancelled


class Source:
    """The registered memories, and what all links share: the throttle and the count of bytes."""

    def __init__(self, bytes_per_s: float) -> None:
        self.views: tuple[memoryview, ...] = ()
        self.extents = Extents({}, {})
        self.sent = 0
        self._bucket = TokenBucket(bytes_per_s)
        self._lock = threading.Lock()

    def book(self, size: int, now: float) -> float:
        """When ``size`` bytes may go."""
        with self._lock:
            return now + self._bucket.take(size, now)

    def count(self, size: int) -> None:
        with self._lock:
            self.sent += size


@dataclass(slots=True, eq=False)
class Write:
    """One push. ``future`` is pending while it waits, running once bytes of it may have left."""

    pieces: Pieces
    frame: bytes
    future: Future[None]
    due: float | None = None  # when the throttle lets it go
    number: int = 0

    @property
    def size(self) -> int:
        return int(self.pieces[:, LENGTH].sum()) + len(self.frame)


def end(future: Future[None], error: MoonpoolError | None) -> None:
    """End one that is pending; one that was cancelled stays so."""
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
