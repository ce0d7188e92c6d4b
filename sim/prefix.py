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
    """Blocks [first, end) on their way from ``source`` into reserved slots. ``ok`` is None until they are there, or lost."""

    first: int
    end: int
    source: StoreNode
    ticket: Ticket
    ids: list[int]
    move: bool
    begun: float
    size: int  # bytes
    ok: bool | None = None
    flow: Flow | None = None


@dataclass(slots=True, eq=False)
class Prefix:
    """``have`` leading blocks are pinned in the node's own pool."""

    store: StoreNode
    keys: tuple[bytes, ...]
    use: Use
    block_tokens: int
    block_bytes: int
    have: int = 0
    tickets: list[Ticket] = field(default_factory=list)
    coming: Coming | None = None
    timings: list[LinkTiming] = field(default_factory=list)

    def pin(self) -> None:
        """What lies in the node's pool behind the blocks pinned so far."""
        if self.have < len(self.keys):
            ticket = self.store.pin(self.keys[self.have :], self.use)
            if ticket.slots:
                self.tickets.append(ticket)
                self.have += len(ticket.slots)

    def fetch(
        self, segments: Sequence[Segment], stores: dict[NodeId, StoreNode], links: Links, told: Callable[[], None]
    ) -> None:
        """Bring in what the placement says another node holds; ``told`` once it is there, or lost."""
        for segment in segments:
            source = stores.get(segment.node) if segment.node is not None else None
            if segment.source is Source.FETCH and source is not None and source is not self.store:
                first, end = max(segment.first, self.have), min(segment.first + segment.count, len(self.keys))
                if first < end and source.alive:
                    self._begin(first, end, source, segment.move, links, told)
                return

    def _begin(self, first: int, end: int, source: StoreNode, move: bool, links: Links, told: Callable[[], None]) -> None:
        ticket = source.pin(self.keys[first:end], self.use)
        if not ticket.slots:
            return
        end = first + len(ticket.slots)
        above = self.keys[self.have - 1] if self.have else None
        good, ids, brought = self.store.reserve(self.keys[self.have : end], above, self.use)
        end = min(end, self.have + good)
        if end <= first:
            source.unpin(ticket)
            self.store.abandon(ids)
            return
        size = min(brought, end - first) * self.block_bytes
        self.coming = coming = Coming(first, end, source, ticket, ids, move, links.clock.now, size)

        def done(ok: bool) -> None:
            self._arrived(coming, ok, links.clock.now)
            told()

        coming.flow = links.send(source.node, self.store.node, size, done)

    def _arrived(self, coming: Coming, ok: bool, now: float) -> None:
        coming.ok = ok
        if coming.source.alive:
            coming.source.unpin(coming.ticket)
        if not ok:
            self.store.abandon(coming.ids)
            return
        if coming.first == self.have:  # else the blocks before them are being computed: sealed when all are there
            self.store.seal(coming.ids)
            self.pin()
        self.timings.append(LinkTiming(coming.source.node, self.store.node, coming.size, now - coming.begun))
        if coming.move and coming.source.alive:
            coming.source.cool(self.keys[: coming.end])

    @property
    def pending(self) -> bool:
        return self.coming is not None and self.coming.ok is None

    def reused(self) -> tuple[int, int, int]:
        """Blocks: ``have`` pinned, then up to ``first`` computed, then up to ``end`` fetched or being fetched."""
        coming = self.coming
        if coming is None or coming.ok is False or coming.end <= self.have:
            return self.have, self.have, self.have
        return self.have, max(coming.first, self.have), coming.end

    def computed(self) -> None:
        """Blocks before those fetched were computed meanwhile: all of them are there."""
        coming = self.coming
        if coming is not None and coming.ok and coming.first > self.have:
            self.store.seal(coming.ids)
            self.coming = None

    def close(self, links: Links) -> None:
        """The job is over: pins end, and what is still coming is of no interest."""
        coming, self.coming = self.coming, None
        if coming is not None and coming.ok is None:
            if coming.flow is not None:
                links.stop(coming.flow)
            if coming.source.alive:
                coming.source.unpin(coming.ticket)
        if coming is not None and self.store.alive and (coming.ok is None or (coming.ok and coming.first > self.have)):
            self.store.abandon(coming.ids)
        tickets, self.tickets = self.tickets, []
        if self.store.alive:
            for ticket in tickets:
                self.store.unpin(ticket)
