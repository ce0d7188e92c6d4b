"""The sending end over plain sockets: one connection and one thread per target, straight from source memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from moonpool.core.config import TransferConfig
from moonpool.core.errors import TransferFailed
from moonpool.core.membership import Member
from moonpool.kvstore.claims import Life
from moonpool.kvstore.sealing.keys import KvKey
from moonpool.kvstore.transfer.carrier import Endpoint, Pieces
from moonpool.kvstore.transfer.pieces import memory_extents
from moonpool.kvstore.transfer.tcp_link import Link
from moonpool.kvstore.transfer.write import Source, Write

MAX_LINKS = 128  # above it those that are lost go: a push to one of them then finds out by itself
CONNECT_S = 2.0  # for connecting and being welcomed


class TcpSender:
    """See ``carrier.Sender``. A target that takes no bytes for ``stall_s`` is given up (``PeerSilent``)."""

    carrier = "tcp"

    def __init__(
        self,
        member: Member,
        config: TransferConfig,
        *,
        stall_s: float = 5.0,
        connect_s: float = CONNECT_S,
        key: KvKey | None = None,
    ) -> None:
        self._key = key
        self._me = Life(member.id, member.incarnation)
        self._source = Source(config.throttle_bytes_per_s)
        self._stall_s = stall_s
        self._connect_s = connect_s
        self._links: dict[str, Link] = {}
        self._closed = False
        self._lock = threading.Lock()

    def register(self, memories: Sequence[NDArray[np.uint8]]) -> None:
        self._source.extents = memory_extents(memories)
        self._source.views = tuple(memory.data for memory in memories)

    def connect(self, target: Endpoint) -> Future[None]:
        done: Future[None] = Future()
        link = self._link(target, anew=True)
        if link is None:
            done.set_exception(TransferFailed("the sending end is closed"))
        else:
            link.when_connected(done)
        return done

    def push(self, target: Endpoint, pieces: Pieces, frame: bytes) -> Future[None]:
        write = Write(pieces, frame, Future())
        link = self._link(target, anew=False)
        if link is None:
            write.future.set_exception(TransferFailed("the sending end is closed"))
        else:
            link.submit(write)
        return write.future

    def forget(self, target: Endpoint) -> None:
        with self._lock:
            link = self._links.pop(target.agent_name, None)
        if link is not None:
            link.leave()

    def bytes_sent(self) -> int:
        return self._source.sent

    def transport_used(self) -> str:
        return "tcp"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()
        for link in links:
            link.join()
        self._source.views = ()

    def _link(self, target: Endpoint, *, anew: bool) -> Link | None:
        """None once closed. A link that was lost stays so, and refuses pushes, until it is made ``anew``."""
        with self._lock:
            if self._closed:
                return None
            link = self._links.get(target.agent_name)
            if link is None or (anew and link.lost):
                self._forget_old()
                link = Link(target, self._me, self._source, self._stall_s, self._connect_s, self._key)
                self._links[target.agent_name] = link
                link.start()
            return link

    def _forget_old(self) -> None:
        if len(self._links) > MAX_LINKS:
            self._links = {name: link for name, link in self._links.items() if not link.lost}
