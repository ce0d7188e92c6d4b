"""What every carrier of KV bytes offers: a receiving end at a store node, a sending end at whoever pushes.

Memory. The receiver writes nothing itself: a peer's bytes appear in its regions, which its owner (the store node) keeps
mapped until ``Receiver.close`` has returned. The sender reads its caller's memory until the push's future is done, and
nowhere else keeps a copy; the caller changes none of those bytes before. A push that is cancelled after it was posted
is polled to its end: its future then ends like any other.

Notices. A push carries one frame (``wire.frames`` push notice, opaque here). It reaches the receiver after all bytes
of its push, and never before them; it may be lost, doubled or overtaken by other notices when a connection breaks, so
the node trusts its digests and not the order.

Failures. A future ends with ``TransferFailed`` when the connection to the target broke (the target died, or was made
anew: ask it for its endpoint and push again), and with ``PeerSilent`` when the target took no bytes for the stall
time. Bytes of a failed push may still land until the receiving endpoint is made anew or its process is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moonpool.core.device_memory import DeviceMemory
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.landing import Region
from moonpool.kvstore.claims import Life

UNKNOWN = "unknown"  # a transport that could not be read from the carrier's library

# Columns of a piece: one contiguous range of bytes to move. An array of pieces is int64 [n, 5].
MEMORY, OFFSET, REGION, TARGET, LENGTH = range(5)
Pieces = NDArray[np.int64]
"""[n, 5]: number of the registered source memory, byte offset in it, number of the target region, byte offset in that,
bytes. Pieces of one push do not overlap."""

OnNotices = Callable[[Sequence[bytes]], None]
"""Takes the frames of one poll, in order of arrival. Called on the carrier's own thread: it hands them on (for
instance with ``loop.call_soon_threadsafe``) and returns at once. An exception is logged and the frames are gone."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to push: one life of one node's receiving end. Mirrors ``EndpointReply``.

    ``agent_name`` is new for every life (node incarnation and ``generation``); ``bases[i]`` is the address of
    ``regions[i]`` in the receiver, for one-sided writes. ``metadata`` lets its holder write anywhere in the regions:
    it goes to members of the cluster only.
    """

    node: NodeId
    incarnation: Incarnation
    generation: int
    carrier: str
    agent_name: str
    metadata: bytes
    bases: tuple[int, ...]
    regions: tuple[Region, ...]


class Receiver(Protocol):
    """The receiving end. Made with an ``OnNotices``; its one thread makes every call on the carrier's library.

    Methods may be called from any thread. ``open`` and ``idle`` are counted and cheap: the thread polls while at least
    one caller has it open, and blocks otherwise. A node opens it for every landing that is granted and idles it when
    that landing's writers have drained or are fenced by proof.
    """

    carrier: str

    def register(self, regions: Sequence[Region], views: Sequence[NDArray[np.uint8]]) -> None:
        """Offer ``views[i]``, the mapped bytes of ``regions[i]``, for writing. Once, before the first ``describe``."""

    def describe(self, writer: Life | None = None) -> Endpoint:
        """The current life; for ``writer`` where it is known, so that it may come back after it was cut off."""

    def open(self) -> None: ...

    def idle(self) -> None: ...

    async def remake(self) -> Endpoint:
        """End this life and begin the next: when it returns, nothing that was posted to the old life can land.

        Notices that had arrived are handed over first. Every sender gets ``TransferFailed`` and asks again for the
        endpoint. Takes about 0.2 s.
        """

    async def cut(self, writer: Life) -> bool:
        """The same for one writer alone: when True is returned, nothing that it posted before can land.

        It comes back with an endpoint described for it from then on. False: this carrier cannot, ``remake`` is the way.
        """

    def numbers(self) -> dict[str, float]:
        """Gauges and counters of this end, for operators."""

    def transport_used(self) -> str:
        """What the library itself says carries the bytes (``tcp``), or ``unknown``; never what was asked for."""

    def close(self) -> None:
        """Blocks until the thread is gone and the memory is no longer offered; only then may it be unmapped."""


@runtime_checkable
class ReadsDevice(Protocol):
    """A sending end that may read source memory 0 from a GPU."""

    def read_from(self, memory: DeviceMemory) -> None:
        """Before ``register``: memory 0 lies there, too, with the same bytes at the same offsets whenever they are pushed.

        Where that cannot be, the host's copy is read, and ``transport_used`` says why.
        """


class Sender(Protocol):
    """The sending end, shared by all targets of one process. Methods may be called from any thread."""

    carrier: str

    def register(self, memories: Sequence[NDArray[np.uint8]]) -> None:
        """Source memories 0, 1, ... as flat contiguous uint8. Once, before the first push; kept until ``close``."""

    def connect(self, target: Endpoint) -> Future[None]:
        """Connect and send one small warm-up ahead of the first push, which otherwise pays for it. Optional."""

    def push(self, target: Endpoint, pieces: Pieces, frame: bytes) -> Future[None]:
        """Queue one write of ``pieces`` with its notice; returns at once.

        The future is done when the bytes and the notice have left this process for good (the source may change).
        Pushes to one target are posted in the order of the calls. ValueError: a piece outside its memory or region.
        """

    def forget(self, target: Endpoint) -> None:
        """Drop what is kept for an endpoint whose life is over. Pushes in flight to it fail."""

    def bytes_sent(self) -> int:
        """Payload and notice bytes posted since the start, repeated pushes included, warm-ups excluded."""

    def transport_used(self) -> str:
        """As ``Receiver.transport_used``."""

    def close(self) -> None:
        """Fail what is queued, poll what is posted to its end or the stall time, stop. Blocks; then the memory is free."""
