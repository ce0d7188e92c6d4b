"""Keeps one worker connected to its host's store node, whichever life that node is in."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from moonpool.core.config import TimingConfig
from moonpool.core.errors import LayoutMismatch, MoonpoolError
from moonpool.core.ids import NodeId, Role
from moonpool.core.landing import Landed
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange, Peers
from moonpool.kvstore.client import LandingFailure, WorkerStore

RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # pauses between tries to connect to a node that is said to be live
log = logging.getLogger(__name__)


def _nothing(_: object) -> None:
    pass


class StoreLink:
    """``client`` is the session with the live store node of ``member.node``, or None. Event-loop only.

    ``on_lost`` is called whenever a session ends before ``close``: its landings and pins are gone.
    """

    def __init__(
        self,
        member: Member,
        layout: KVLayout,
        peers: Peers,
        timing: TimingConfig,
        *,
        on_landed: Callable[[Landed], None] = _nothing,
        on_failed: Callable[[LandingFailure], None] = _nothing,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.client: WorkerStore | None = None
        self.store: Member | None = None  # the life that ``client`` is connected to
        self._member, self._layout, self._peers, self._timing = member, layout, peers, timing
        self._on_landed, self._on_failed, self._on_lost = on_landed, on_failed, on_lost
        self._connecting: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] = lambda: None
        self._closed = False

    @property
    def node(self) -> NodeId:
        """Whose store it is."""
        return self._member.node

    async def start(self) -> None:
        """Returns once connected, or at once where no store node of this node is live, or not any more: it is then joined
        when it comes.

        LayoutMismatch where the node refuses this worker for good.
        """
        self._unsubscribe = self._peers.subscribe(self._changed)
        if self._connecting is not None:
            await asyncio.wait({self._connecting}, timeout=5.0)
            connecting = self._connecting
            if connecting.done() and not connecting.cancelled() and (error := connecting.exception()):
                raise error

    async def close(self) -> None:
        self._closed = True
        self._unsubscribe()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        client, self.client = self.client, None
        if client is not None:
            await client.close()
        await asyncio.gather(*self._closing)

    def _changed(self, change: MemberChange) -> None:
        store = change.member
        if store.role is not Role.STORE or store.node != self._member.node or self._closed:
            return
        same = self.store is not None and self.store.incarnation == store.incarnation
        if change.liveness is Liveness.LIVE and not same:
            self._drop()
            self._connect_to(store)
        elif change.liveness is not Liveness.LIVE and same:
            self._drop()

    def _connect_to(self, store: Member) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        self.store = store
        self._connecting = asyncio.create_task(self._connect(store), name="store link")

    async def _connect(self, store: Member) -> None:
        tries = 0
        while True:
            try:
                client = await WorkerStore.connect(
                    store.address,
                    self._member,
                    self._layout,
                    on_landed=self._on_landed,
                    on_failed=self._on_failed,
                    on_lost=lambda: self._lost(store),
                    timing=self._timing,
                )
            except LayoutMismatch:
                log.exception("refused by store node %s", store.id)
                raise
            except (MoonpoolError, OSError) as e:
                log.warning("store node %s at %s: %s", store.id, store.address, e)
                await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)] * random.uniform(0.5, 1.0))  # not all in step
                tries += 1
                continue
            self.client = client
            return

    def _lost(self, store: Member) -> None:
        """The session broke: if the node still counts as live, this tries again until it answers or is replaced."""
        if self._closed or self.store is not store:
            return
        self._drop()
        self._connect_to(store)

    def _drop(self) -> None:
        client, self.client, self.store = self.client, None, None
        if self._connecting is not None and client is None:
            self._connecting.cancel()
        if client is not None:
            closing = asyncio.create_task(client.close(), name="store link closing")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._on_lost()
