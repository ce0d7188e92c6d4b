"""The carrier inside one process, with faults on order: what the real ones do rarely, every time.

``MemoryNetwork`` is the wire between all ends made with it; faults name pushes by their number on that wire.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.config import TransferConfig
from moonpool.core.errors import Bug, MoonpoolError, PeerSilent, TransferFailed
from moonpool.core.landing import Region
from moonpool.core.membership import Member
from moonpool.kvstore.claims import Life
from moonpool.kvstore.transfer.carrier import LENGTH, MEMORY, OFFSET, REGION, TARGET, Endpoint, OnNotices, Pieces
from moonpool.kvstore.transfer.pieces import Extents, memory_extents, region_sizes, require_inside
from moonpool.kvstore.transfer.throttle import TokenBucket

STALE = 4  # pushes back: where layers are few, that is another landing
LULL_S = 0.02  # a notice held back to be overtaken comes after this long without a successor
log = structlog.get_logger(__name__)
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Faults:
    """Numbers of the pushes that go wrong, counted over the network from 0 in the order they are carried out."""

    drop: frozenset[int] = _NONE  # all bytes land, the notice is lost
    duplicate: frozenset[int] = _NONE  # the notice comes twice
    reorder: frozenset[int] = _NONE  # the notice is overtaken by the next one
    corrupt: frozenset[int] = _NONE  # one byte lands wrong
    misplace: frozenset[int] = _NONE  # pieces of one size land in one another's place
    stale: frozenset[int] = _NONE  # after it, the bytes of a push some time ago land once more
    cut: frozenset[int] = _NONE  # the connection breaks after half of the pieces
    park: frozenset[int] = _NONE  # nothing happens until ``MemoryNetwork.unpark``
    delay_s: float = 0.0  # before every push


class MemoryNetwork:
    """Thread-safe. ``carried`` counts pushes so far."""

    def __init__(self, faults: Faults = Faults()) -> None:
        self.faults = faults
        self.unparked = threading.Event()
        self._numbers = count()
        self._lives: dict[str, MemoryReceiver] = {}
        self._lock = threading.Lock()

    def number(self) -> int:
        with self._lock:
            return next(self._numbers)

    def unpark(self) -> None:
        """Parked pushes go on, as after SIGCONT."""
        self.unparked.set()

    def enter(self, name: str, receiver: MemoryReceiver) -> None:
        with self._lock:
            self._lives[name] = receiver

    def leave(self, name: str) -> None:
        with self._lock:
            self._lives.pop(name, None)

    def find(self, target: Endpoint) -> MemoryReceiver:
        """TransferFailed for a life that is over."""
        with self._lock:
            found = self._lives.get(target.agent_name)
        if found is None:
            raise TransferFailed(f"node {target.node}: this life of its endpoint is over", peer=target.node)
        return found

    def receiver(self, member: Member, on_notices: OnNotices) -> MemoryReceiver:
        return MemoryReceiver(self, member, on_notices)

    def sender(self, config: TransferConfig, *, stall_s: float = 5.0) -> MemorySender:
        return MemorySender(self, config, stall_s)


class MemoryReceiver:
    """See ``carrier.Receiver``. Notices come on the sending end's thread."""

    carrier = "memory"

    def __init__(self, network: MemoryNetwork, member: Member, on_notices: OnNotices) -> None:
        self._network = network
        self._member = member
        self._on_notices = on_notices
        self._regions: tuple[Region, ...] = ()
        self._views: dict[int, NDArray[np.uint8]] = {}
        self._generation = 0
        self._opened = 0
        self._changed = threading.Condition()  # also held while bytes land: a remake waits for that

    def register(self, regions: Sequence[Region], views: Sequence[NDArray[np.uint8]]) -> None:
        self._regions = tuple(regions)
        self._views = {region.number: view for region, view in zip(regions, views, strict=True)}
        self._begin()

    def _begin(self) -> None:
        self._generation += 1
        self._network.enter(self.describe().agent_name, self)

    def describe(self, writer: Life | None = None) -> Endpoint:
        name = f"{self._member.id}.{self._member.incarnation}.{self._generation}"
        bases = tuple(int(view.ctypes.data) for view in self._views.values())
        return Endpoint(
            self._member.node, self._member.incarnation, self._generation, self.carrier, name, b"", bases, self._regions
        )

    def open(self) -> None:
        with self._changed:
            self._opened += 1
            self._changed.notify_all()

    def idle(self) -> None:
        with self._changed:
            if self._opened == 0:
                raise Bug("idle: more often than open")
            self._opened -= 1

    async def remake(self) -> Endpoint:
        with self._changed:
            self._network.leave(self.describe().agent_name)
            self._begin()
            self._changed.notify_all()
            return self.describe()

    async def cut(self, writer: Life) -> bool:
        return False

    def numbers(self) -> dict[str, float]:
        return {}

    def transport_used(self) -> str:
        return "memory"

    def close(self) -> None:
        with self._changed:
            self._network.leave(self.describe().agent_name)
            self._changed.notify_all()

    def land(self, target: Endpoint, write: Callable[[dict[int, NDArray[np.uint8]]], None], patience_s: float) -> None:
        """Let ``write`` put bytes into the regions. Waits while nobody has the receiver open (it does not poll then).

        TransferFailed when the life is over by then, PeerSilent after ``patience_s``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._opened or self._over(target), patience_s):
                raise PeerSilent(f"node {target.node} took no bytes for {patience_s:g} s", peer=target.node)
            if self._over(target):
                raise TransferFailed(f"node {target.node}: this life of its endpoint is over", peer=target.node)
            write(self._views)

    def _over(self, target: Endpoint) -> bool:
        try:
            self._network.find(target)
        except TransferFailed:
            return True
        return False

    def notify(self, frames: Sequence[bytes]) -> None:
        try:
            self._on_notices(frames)
        except Exception:
            log.exception("notices_not_taken", frames=len(frames))


class MemorySender:
    """See ``carrier.Sender``: one thread carries out the pushes in order."""

    carrier = "memory"

    def __init__(self, network: MemoryNetwork, config: TransferConfig, stall_s: float) -> None:
        self._network = network
        self._bucket = TokenBucket(config.throttle_bytes_per_s)
        self._stall_s = stall_s
        self._memories: tuple[NDArray[np.uint8], ...] = ()
        self._sources = Extents({}, {})
        self._sent = 0
        self._lost: set[str] = set()
        self._held: list[tuple[MemoryReceiver, bytes]] = []  # notices to be overtaken
        self._past: deque[list[tuple[int, int, NDArray[np.uint8]]]] = deque(maxlen=STALE)  # region, offset, bytes
        self._closed = threading.Event()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="memory-send", daemon=True)
        self._thread.start()

    def register(self, memories: Sequence[NDArray[np.uint8]]) -> None:
        self._sources = memory_extents(memories)
        self._memories = tuple(memories)

    def connect(self, target: Endpoint) -> Future[None]:
        return self._submit(lambda: self._lost.discard(target.agent_name))

    def push(self, target: Endpoint, pieces: Pieces, frame: bytes) -> Future[None]:
        return self._submit(lambda: self._carry(target, pieces, frame))

    def forget(self, target: Endpoint) -> None:
        self._submit(lambda: self._lost.discard(target.agent_name))

    def bytes_sent(self) -> int:
        return self._sent

    def transport_used(self) -> str:
        return "memory"

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._calls.put(lambda: None)
        self._thread.join()

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                if self._closed.is_set():
                    raise TransferFailed("the sending end is closed")
                work()
            except MoonpoolError as e:
                done.set_exception(e)
            else:
                done.set_result(None)

        if self._closed.is_set():
            done.set_exception(TransferFailed("the sending end is closed"))
        else:
            self._calls.put(run)
        return done

    # Below: on the thread.

    def _run(self) -> None:
        while not self._closed.is_set() or not self._calls.empty():
            try:
                self._calls.get(timeout=LULL_S if self._held else None)()
            except queue.Empty:
                self._let_go()
        self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for receiver, frame in held:
            receiver.notify([frame])

    def _carry(self, target: Endpoint, pieces: Pieces, frame: bytes) -> None:
        if target.agent_name in self._lost:
            raise TransferFailed(f"the connection to node {target.node} is broken", peer=target.node)
        require_inside(pieces, self._sources, Extents({r.number: 0 for r in target.regions}, region_sizes(target.regions)))
        size = int(pieces[:, LENGTH].sum()) + len(frame)
        self._closed.wait(self._bucket.take(size, time.monotonic()) + self._network.faults.delay_s)
        number, faults = self._network.number(), self._network.faults
        try:
            if number in faults.park and not self._network.unparked.wait(self._stall_s):
                raise PeerSilent(f"node {target.node} took no bytes for {self._stall_s:g} s", peer=target.node)
            receiver = self._network.find(target)
            whole = len(pieces) if number not in faults.cut else len(pieces) // 2
            written = _swapped(pieces) if number in faults.misplace else pieces[:whole]
            receiver.land(target, lambda views: self._write(views, written, number in faults.corrupt), self._stall_s)
            if number in faults.stale and self._past:
                receiver.land(target, self._write_again, self._stall_s)
            if faults.stale:
                self._past.append([(int(p[REGION]), int(p[TARGET]), self._source(p).copy()) for p in pieces])
            if number in faults.cut:
                raise TransferFailed(f"the connection to node {target.node} broke", peer=target.node)
        except (TransferFailed, PeerSilent):
            self._lost.add(target.agent_name)
            raise
        self._sent += size
        self._tell(receiver, frame, number)

    def _write(self, views: dict[int, NDArray[np.uint8]], pieces: Pieces, corrupt: bool) -> None:
        for piece in pieces:
            at, n = piece[TARGET], piece[LENGTH]
            views[int(piece[REGION])][at : at + n] = self._source(piece)
        if corrupt and len(pieces):
            views[int(pieces[0, REGION])][pieces[0, TARGET]] ^= 0x40

    def _source(self, piece: NDArray[np.int64]) -> NDArray[np.uint8]:
        memory = self._memories[int(piece[MEMORY])]
        return memory[piece[OFFSET] : piece[OFFSET] + piece[LENGTH]]

    def _write_again(self, views: dict[int, NDArray[np.uint8]]) -> None:
        for region, at, data in self._past[0]:
            views[region][at : at + len(data)] = data

    def _tell(self, receiver: MemoryReceiver, frame: bytes, number: int) -> None:
        faults = self._network.faults
        if number in faults.reorder:
            self._held.append((receiver, frame))
            return
        if number not in faults.drop:
            receiver.notify([frame, frame] if number in faults.duplicate else [frame])
        self._let_go()


def _swapped(pieces: Pieces) -> Pieces:
    """Every piece goes where the next one of its size belongs."""
    out = pieces.copy()
    for size in np.unique(pieces[:, LENGTH]):
        same = np.flatnonzero(pieces[:, LENGTH] == size)
        out[same, REGION : TARGET + 1] = pieces[np.roll(same, 1), REGION : TARGET + 1]
    return out
