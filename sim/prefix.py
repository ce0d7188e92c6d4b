"""The reusable part of one prompt at its prefill node: blocks pinned there, and those on their way from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.core.ids import NodeId
from moonpool.core.landing import Ticket
from moonpool.core.membership import LinkTiming
from moonpool.core.placement import Segment, Source
from moonpool.core.use import Use
from moonpool.sim.links import Flow, Links
from moonpool.sim.store_node import StoreNode


@dataclass(slots=True, eq=False)
class Coming:
    """Blocks [first, end) on their way from ``source``, over the network into the slots ``ids``, or from its own SSD.

    ``ok`` is None until they are there, or lost.
    """

    first: int
    end: int
    source: StoreNode
    begun: float
    ids: list[int] = field(default_factory=list)
    ticket: Ticket | None = None
    move: bool = False
    size: int = 0  # bytes over the network
    ok: bool | None = None
    flow: Flow | None = None
    sealed: bool = False


@dataclass(slots=True, eq=False)
class Prefix:
    """``have`` leading blocks are pinned in the node's own pool. ``told`` hears of blocks that came, or that are lost."""

    store: StoreNode
    links: Links
    keys: tuple[bytes, ...]
    use: Use
    told: Callable[[], None]
    have: int = 0
    tickets: list[Ticket] = field(default_factory=list)
    coming: list[Coming] = field(default_factory=list)
    timings: list[LinkTiming] = field(default_factory=list)
    closed: bool = False

    def pin(self) -> None:
        """What lies in the node's DRAM behind the blocks pinned so far."""
        if self.have < len(self.keys) and self.store.alive:
            ticket = self.store.pin(self.keys[self.have :], self.use)
            if ticket.slots:
                self.tickets.append(ticket)
                self.have += len(ticket.slots)

    def bring(self, segments: Sequence[Segment], stores: dict[NodeId, StoreNode]) -> None:
        """Begin to bring in what the placement says lies on this node's SSD, then what it says another node holds."""
        at = self.have
        for segment in segments:
            if segment.source is not Source.FETCH or segment.node is None or not self.store.alive:
                continue
            first, end = max(segment.first, at), min(segment.first + segment.count, len(self.keys))
            source = stores.get(segment.node)
            if first >= end or source is None or not source.alive:
                continue
            if source is not self.store:
                self._fetch(at, first, end, source, segment.move)
                return
            if first == at:
                at = self._read(first, end)

    def _read(self, first: int, end: int) -> int:
        """From this node's own SSD, as far as blocks lie in either of its tiers; returns where that ends."""
        end = min(self.store.pool.lookup(self.keys[:end]), end)
        if not self._on_ssd(self.store, first, end):
            return first
        coming = Coming(first, end, self.store, self.links.clock.now)
        self.coming.append(coming)
        self._climb(coming, lambda: self._arrived(coming, True))
        return end

    def _on_ssd(self, store: StoreNode, first: int, end: int) -> bool:
        return store.ssd is not None and bool(store.pool.on_ssd(self.keys[first:end]))

    def _climb(self, coming: Coming, then: Callable[[], None]) -> None:
        """All are named, those in DRAM too: making room for the others must not evict them."""
        ssd = coming.source.ssd
        assert ssd is not None
        ssd.read(self.keys[coming.first : coming.end], self.use, lambda _: None if self.closed else then())

    def _fetch(self, at: int, first: int, end: int, source: StoreNode, move: bool) -> None:
        """Blocks [at, first) are computed meanwhile, or on their way already."""
        coming = Coming(first, end, source, self.links.clock.now, move=move)
        self.coming.append(coming)
        if self._on_ssd(source, first, end):
            self._climb(coming, lambda: self._send(coming, at))
        else:
            self._send(coming, at)

    def _send(self, coming: Coming, at: int) -> None:
        source, first = coming.source, coming.first
        ticket = source.pin(self.keys[first : coming.end], self.use) if source.alive else None
        if ticket is None or not ticket.slots or not self.store.alive:
            self._lost(coming)
            return
        above = self.keys[at - 1] if at else None
        end = first + len(ticket.slots)
        good, ids, brought = self.store.reserve(self.keys[at:end], above, self.use)
        coming.ticket, coming.ids, coming.end = ticket, ids, min(end, at + good)
        if coming.end <= first:
            self._lost(coming)
            return
        coming.size = min(brought, coming.end - first) * self.store.layout.block_bytes
        coming.flow = self.links.send(
            source.node, self.store.node, coming.size, lambda ok: self._arrived(coming, ok), fetch=True
        )

    def _lost(self, coming: Coming) -> None:
        """Told later in this instant, as whatever comes is."""
        self.links.clock.after(0.0, lambda: None if self.closed else self._arrived(coming, False))

    def _arrived(self, coming: Coming, ok: bool) -> None:
        coming.ok = ok and self.store.alive
        self._unpin_source(coming)
        if coming.ok:
            self._settle()
            if coming.source is self.store and self.have < coming.end:  # no room for all of it
                coming.end = max(self.have, coming.first)
            if coming.size:
                seconds = self.links.clock.now - coming.begun
                self.timings.append(LinkTiming(coming.source.node, self.store.node, coming.size, seconds))
            if coming.move and coming.source.alive:
                coming.source.cool(self.keys[: coming.end])
        else:
            self._abandon(coming)
        self.told()

    def _settle(self) -> None:
        """Seal and pin, in order, what has come and has nothing missing before it."""
        for coming in self.coming:
            if coming.ok and not coming.sealed and coming.first <= self.have:
                coming.sealed = True
                self.store.seal(coming.ids)
                self.pin()

    def _unpin_source(self, coming: Coming) -> None:
        if coming.ticket is not None and coming.source.alive:
            coming.source.unpin(coming.ticket)
        coming.ticket = None

    def _abandon(self, coming: Coming) -> None:
        if not coming.sealed and self.store.alive:
            self.store.abandon(coming.ids)
        coming.ids = []

    @property
    def pending(self) -> bool:
        return any(one.ok is None for one in self.coming)

    def reused(self) -> tuple[int, int, int]:
        """Blocks: ``have`` are here, or will be; then up to ``first`` computed; then up to ``end`` fetched."""
        have = first = end = self.have
        for one in self.coming:
            if one.ok is False:
                break
            if one.end <= end:
                continue
            if one.first > end:
                return have, one.first, one.end
            have = first = end = one.end
        return have, first, end

    def computed(self) -> None:
        """Blocks before those fetched were computed meanwhile: all of them are there."""
        for coming in self.coming:
            if coming.ok and not coming.sealed and self.store.alive:
                coming.sealed = True
                self.store.seal(coming.ids)

    def close(self) -> None:
        """The job is over: pins end, and what is still coming is of no interest."""
        self.closed = True
        for coming in self.coming:
            if coming.ok is None and coming.flow is not None:
                self.links.stop(coming.flow)
            self._unpin_source(coming)
            self._abandon(coming)
        self.coming.clear()
        tickets, self.tickets = self.tickets, []
        if self.store.alive:
            for ticket in tickets:
                self.store.unpin(ticket)
