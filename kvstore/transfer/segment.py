"""The same-host carrier: the target's region files are mapped here and one thread copies into them.

There is no receiving end: the frames go to the store node by its ``Notify`` call, as many at once as have gathered
while the last call was on its way. Nothing can stop a writer that holds the mapping except its death, so a slot whose
local writer fell silent is freed by that writer's pidfd, never by making an endpoint anew.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from moonpool.core.config import TransferConfig
from moonpool.core.errors import MoonpoolError, TransferFailed
from moonpool.kvstore.regions import map_region
from moonpool.kvstore.transfer.carrier import LENGTH, Endpoint, Pieces
from moonpool.kvstore.transfer.pieces import Extents, coalesce, memory_extents, region_sizes, require_inside
from moonpool.kvstore.transfer.throttle import TokenBucket

Notify = Callable[[Endpoint, Sequence[bytes]], Future[None]]
"""Hands frames to the target's ``Notify`` call; the future ends with TransferFailed or PeerSilent where it fails."""

MAX_FRAMES = 64  # of one Notify call
MAX_FRAME_BYTES = 512 << 10  # of one Notify call, unless one frame alone has more


@dataclass(slots=True, eq=False)
class _Target:
    endpoint: Endpoint
    regions: dict[int, NDArray[np.uint8]]
    extents: Extents
    copied: list[tuple[bytes, Future[None]]] = field(default_factory=list)  # wait for the next Notify call
    calling: bool = False
    forgotten: bool = False


class SegmentSender:
    """See ``carrier.Sender``. A push is done when the target's store node has taken its notice."""

    carrier = "segment"

    def __init__(self, config: TransferConfig, notify: Notify) -> None:
        self._notify = notify
        self._bucket = TokenBucket(config.throttle_bytes_per_s)
        self._memories: tuple[NDArray[np.uint8], ...] = ()
        self._sources = Extents({}, {})
        self._targets: dict[str, _Target] = {}
        self._sent = 0
        self._calling = 0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="segment-copy", daemon=True)
        self._thread.start()

    def register(self, memories: Sequence[NDArray[np.uint8]]) -> None:
        self._sources = memory_extents(memories)
        self._memories = tuple(memories)

    def connect(self, target: Endpoint) -> Future[None]:
        done: Future[None] = Future()
        self._submit(lambda: self._connect(target, done), done)
        return done

    def push(self, target: Endpoint, pieces: Pieces, frame: bytes) -> Future[None]:
        done: Future[None] = Future()
        self._submit(lambda: self._copy(target, pieces, frame, done), done)
        return done

    def forget(self, target: Endpoint) -> None:
        self._submit(lambda: self._forget(target))

    def bytes_sent(self) -> int:
        return self._sent

    def transport_used(self) -> str:
        return "mmap"

    def close(self) -> None:
        """Pushes that wait fail; calls under way are awaited. The mappings go with the last reference."""
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._calls.put(lambda: None)
        self._thread.join()

    def _submit(self, call: Callable[[], None], future: Future[None] | None = None) -> None:
        with self._lock:
            if not self._closed.is_set():
                self._calls.put(call)
                return
        if future is not None:
            future.set_exception(TransferFailed("the sending end is closed"))

    # Below: on the thread.

    def _run(self) -> None:
        while not self._closed.is_set() or self._calling or not self._calls.empty():
            self._calls.get()()
        self._targets.clear()

    def _connect(self, endpoint: Endpoint, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            self._target(endpoint)
        except MoonpoolError as e:
            done.set_exception(e)
        else:
            done.set_result(None)

    def _target(self, endpoint: Endpoint) -> _Target:
        found = self._targets.get(_name(endpoint))
        if found is None:
            regions = {r.number: map_region(r) for r in endpoint.regions}
            extents = Extents(dict.fromkeys(regions, 0), region_sizes(endpoint.regions))
            found = self._targets[_name(endpoint)] = _Target(endpoint, regions, extents)
        return found

    def _copy(self, endpoint: Endpoint, pieces: Pieces, frame: bytes, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            if self._closed.is_set():
                raise TransferFailed("the sending end is closed")
            target = self._target(endpoint)
            require_inside(pieces, self._sources, target.extents)
            size = int(pieces[:, LENGTH].sum()) + len(frame)
            self._closed.wait(self._bucket.take(size, time.monotonic()))
            for memory, offset, region, to, length in coalesce(pieces).tolist():
                target.regions[region][to : to + length] = self._memories[memory][offset : offset + length]
        except MoonpoolError as e:
            done.set_exception(e)
            return
        self._sent += size
        target.copied.append((frame, done))
        self._notify_more(target)

    def _notify_more(self, target: _Target) -> None:
        """At most one call to a target at a time: frames that gather meanwhile go together."""
        if target.calling or not target.copied:
            return
        sizes = accumulate(len(frame) for frame, _ in target.copied[:MAX_FRAMES])
        count = max(1, sum(size <= MAX_FRAME_BYTES for size in sizes))
        batch, target.copied = target.copied[:count], target.copied[count:]
        target.calling = True
        self._calling += 1
        call = self._notify(target.endpoint, [frame for frame, _ in batch])
        call.add_done_callback(lambda call: self._calls.put(partial(self._notified, target, batch, call)))

    def _notified(self, target: _Target, batch: list[tuple[bytes, Future[None]]], call: Future[None]) -> None:
        target.calling = False
        self._calling -= 1
        error = TransferFailed("the notice was not sent") if call.cancelled() else call.exception()
        for _, done in batch:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
        self._notify_more(target)
        if target.forgotten and not target.calling:
            self._targets.pop(_name(target.endpoint), None)

    def _forget(self, endpoint: Endpoint) -> None:
        target = self._targets.get(_name(endpoint))
        if target is not None:
            target.forgotten = True
            if not target.calling:
                del self._targets[_name(endpoint)]


def _name(endpoint: Endpoint) -> str:
    """Region files belong to a node's life, whatever the generation of its endpoint for other hosts."""
    return f"{endpoint.node}.{endpoint.incarnation}"
