"""The reusable prefix of a prompt: where its blocks are, and how they come into device pages while the rest computes.

Order of search: the worker's own device pages (the caller's match), the pool of its own host, then what the placement
says another node holds. The pool's pin answer is the truth; whatever it does not give is computed. Used by prefill
workers and by role ``both``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

from moonpool.core.errors import DigestMismatch, MoonpoolError
from moonpool.core.hits import usable
from moonpool.core.ids import NodeId
from moonpool.core.landing import SlotRef, Ticket
from moonpool.core.layout import KVLayout
from moonpool.core.membership import LinkTiming, Member, Peers
from moonpool.core.page_view import PageView
from moonpool.core.placement import Segment, Source
from moonpool.core.use import Use
from moonpool.kvstore.client import WorkerStore
from moonpool.prefill_worker.pace import Pace

FETCH_SHARE = 0.25  # of the time left that a load or a fetch may take before its blocks are computed instead,
FETCH_LIMIT_MS = 5_000  # and never more than this: meanwhile the worker computes nothing
CONNECT_MS = 500  # more for a fetch: the first one from a node makes connections in both directions
log = logging.getLogger(__name__)


class Load(Protocol):
    """Blocks of a prompt, from block ``first`` on, that come into pages layer by layer while others are computed.

    ``trusted`` of them are not to be computed. ``bad``: (slot, layer) of a copy that failed its digest.
    """

    first: int
    trusted: int

    @property
    def bad(self) -> tuple[SlotRef, int] | None: ...

    def needed(self, blocks: int) -> int: ...

    def has(self, layer: int, blocks: int) -> bool: ...

    def wait(self, layer: int, blocks: int) -> None: ...

    def stop(self) -> None: ...

    async def ended(self) -> None: ...


class PrefixLost(Exception):
    """Only the first ``blocks`` of the blocks of ``load`` are good: the rest must be computed."""

    def __init__(self, load: Load, blocks: int) -> None:
        super().__init__(f"{blocks} blocks of the prefix are left")
        self.load = load
        self.blocks = blocks


class LoadStopped(Exception):
    """The load was stopped; nobody wants it any more."""


@dataclass(slots=True)
class Found:
    """Blocks pinned in the pool of this host: ``slots[i]`` holds the i-th block asked for. ``close`` ends the pins."""

    client: WorkerStore | None = None
    slots: list[SlotRef] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    links: list[LinkTiming] = field(default_factory=list)  # of its fetches

    @property
    def fetched_bytes(self) -> int:
        return sum(timing.bytes for timing in self.links)

    @property
    def fetch_seconds(self) -> float:
        return sum(timing.seconds for timing in self.links)

    def add(self, more: Found) -> None:
        """``more`` holds the blocks that follow."""
        self.slots += more.slots
        self.tickets += more.tickets
        self.links += more.links

    def cut(self, first: int, quantum: int) -> None:
        """Of the blocks held, the prompt's from ``first`` on, use no more than whole quanta of the prompt."""
        del self.slots[max(usable(first + len(self.slots), quantum) - first, 0) :]

    async def close(self) -> None:
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            try:
                await self.client.unpin(ticket)  # type: ignore[union-attr]  # tickets come from a client
            except MoonpoolError as e:  # the session is over, and the pin with it
                log.info("ticket %d not unpinned: %s", ticket.id, e)


@dataclass(frozen=True, slots=True)
class Wait:
    """How long blocks may take to come: not longer than computing them here would, nor than a share of the time left."""

    pace: Pace
    block_tokens: int
    deadline_ms: int
    use: Use

    def limit_ms(self, blocks: int) -> int:
        return self.pace.limit_ms(blocks * self.block_tokens, min(int(self.deadline_ms * FETCH_SHARE), FETCH_LIMIT_MS))


async def find(
    client: WorkerStore | None,
    here: NodeId,
    peers: Peers,
    keys: Sequence[bytes],
    first: int,
    segments: Sequence[Segment],
    wait: Wait,
) -> Found:
    """Pin in the pool of ``here`` the blocks ``keys[first:]`` as far as they can be had, from its lower tiers too; where
    ``segments`` say so they come from other nodes. Nothing is waited for longer than ``wait`` allows."""
    found = await find_here(client, keys, first, wait)
    try:
        found.add(await find_elsewhere(client, here, peers, keys, first + len(found.slots), segments, wait))
    except asyncio.CancelledError:
        await found.close()
        raise
    return found


async def find_here(client: WorkerStore | None, keys: Sequence[bytes], first: int, wait: Wait) -> Found:
    """Those of ``keys[first:]`` that lead and are in this host's pool, lower tiers included, pinned."""
    found = Found(client)
    if client is None or first >= len(keys):
        return found
    try:
        _take(found, await client.pin(keys[first:], wait.use, wait.limit_ms(len(keys) - first)))
    except MoonpoolError as e:
        log.warning("prefix: none of %d blocks is known to be here: %s", len(keys) - first, e)
    return found


async def find_elsewhere(
    client: WorkerStore | None,
    here: NodeId,
    peers: Peers,
    keys: Sequence[bytes],
    first: int,
    segments: Sequence[Segment],
    wait: Wait,
) -> Found:
    """Those of ``keys[first:]`` that lead and come from where ``segments`` say, pinned here."""
    found = Found(client)
    try:
        while client is not None and await _fetch_next(found, client, here, peers, keys, first, segments, wait):
            pass
    except MoonpoolError as e:  # what is pinned so far is good
        log.warning("prefix: %d of %d blocks fetched, then: %s", len(found.slots), len(keys) - first, e)
    except asyncio.CancelledError:
        await found.close()
        raise
    return found


def from_elsewhere(segments: Sequence[Segment], first: int, blocks: int) -> list[tuple[NodeId, int]]:
    """(node, blocks) of the fetches that lead from block ``first`` of ``blocks``."""
    out: list[tuple[NodeId, int]] = []
    for segment in segments:
        end = min(segment.first + segment.count, blocks)
        if segment.source is Source.FETCH and segment.node is not None and segment.first <= first < end:
            out.append((segment.node, end - first))
            first = end
    return out


async def quarantine(client: WorkerStore | None, slot: SlotRef, layer: int) -> None:
    """``slot`` failed its digest while it was loaded: it is no longer findable."""
    try:
        if client is not None:
            await client.quarantine(slot.key, layer, "prefix_load")
    except MoonpoolError as e:  # the session is over: the node has forgotten the block, or is gone
        log.info("not quarantined: %s", e)


async def _fetch_next(
    found: Found,
    client: WorkerStore,
    here: NodeId,
    peers: Peers,
    keys: Sequence[bytes],
    first: int,
    segments: Sequence[Segment],
    wait: Wait,
) -> bool:
    """Fetch the segment that the next missing block lies in; False when there is none, or it did not come whole."""
    have = first + len(found.slots)
    for segment in segments:
        end = min(segment.first + segment.count, len(keys))
        if segment.source is Source.FETCH and segment.node is not None and segment.first <= have < end:
            store = peers.store_of(segment.node)
            if store is None:
                return False
            limit_ms = wait.limit_ms(end - have) + CONNECT_MS
            await fetch(found, client, here, keys[have:end], store, limit_ms, wait.use, move=segment.move)
            return first + len(found.slots) == end
    return False


async def fetch(
    found: Found,
    client: WorkerStore,
    here: NodeId,
    keys: Sequence[bytes],
    store: Member,
    limit_ms: int,
    use: Use,
    *,
    move: bool,
) -> None:
    """Bring what can be had of ``keys`` from ``store`` into the pool of ``here``, and pin it."""
    begun = time.monotonic()
    fetched = await client.fetch(keys, store.node, store.address, limit_ms, use, move=move)
    found.links.append(LinkTiming(store.node, here, fetched.bytes, time.monotonic() - begun))
    _take(found, fetched.ticket)


def _take(found: Found, ticket: Ticket) -> None:
    if ticket.slots:
        found.tickets.append(ticket)
        found.slots += ticket.slots


class PrefixLoad:
    """Copies pinned blocks into pages, layer by layer, on a thread that runs ahead of the compute thread.

    ``bad`` is set once a copy failed its digest: (slot, layer) of the copy that the caller quarantines.
    """

    def __init__(
        self,
        client: WorkerStore,
        slots: Sequence[SlotRef],
        first: int,
        pages: Sequence[int],
        view: PageView,
        layout: KVLayout,
    ) -> None:
        """``pages[i]`` takes ``slots[i]``, block ``first + i`` of the prompt. The caller holds both until ``ended``."""
        self._client = client
        self._slots = slots
        self._pages = pages
        self._view = view
        self._layout = layout
        self._changed = threading.Condition()
        self._layers_in = 0
        self._stopped = False
        self.first = first
        self.trusted = len(slots)  # of its blocks, so many are not to be computed
        self.blocks = len(slots)  # good so far
        self.bad: tuple[SlotRef, int] | None = None
        self._over = asyncio.Event()

    def start(self, thread: Executor) -> None:
        asyncio.get_running_loop().run_in_executor(thread, self._run).add_done_callback(self._end)

    async def ended(self) -> None:
        """Until the thread writes these pages no more."""
        await self._over.wait()

    def stop(self) -> None:
        """Waiters raise LoadStopped, and the thread ends after the slice under way: await ``ended``."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def needed(self, blocks: int) -> int:
        """Of the first ``blocks`` of the prompt, how many come from here."""
        return max(min(blocks - self.first, self.trusted), 0)

    def has(self, layer: int, blocks: int) -> bool:
        """Whether ``wait`` would return at once."""
        with self._changed:
            return self._layers_in > layer and self.blocks >= blocks and not self._stopped

    def wait(self, layer: int, blocks: int) -> None:
        """Until ``layer`` of the first ``blocks`` blocks is in pages. PrefixLost where fewer are good, or LoadStopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._layers_in > layer or self.blocks < blocks or self._stopped)
            if self._stopped:
                raise LoadStopped
            if self.blocks < blocks:
                raise PrefixLost(self, self.blocks)

    def _run(self) -> None:
        for layer in range(self._layout.layers):
            self._load_layer(layer)
            self._view.came_in(layer, self._pages[: self.blocks])
            with self._changed:
                self._layers_in = layer + 1
                self._changed.notify_all()

    def _load_layer(self, layer: int) -> None:
        for i, (slot, page) in enumerate(zip(self._slots, self._pages, strict=True)):
            if self._stopped or i >= self.blocks:
                return
            try:
                self._client.read_slice(slot, layer, self._view.bytes[page, layer], self._layout.block_tokens)
            except DigestMismatch:
                self._lose(i, (slot, layer))
            except MoonpoolError as e:  # the session is over: what was read is good, but no block of it is whole
                log.warning("prefix load ends at layer %d: %s", layer, e)
                self._lose(0, None)

    def _lose(self, blocks: int, bad: tuple[SlotRef, int] | None) -> None:
        with self._changed:
            self.blocks = blocks
            self.bad = bad or self.bad
            self._changed.notify_all()

    def _end(self, run: asyncio.Future[None]) -> None:
        if (error := run.exception()) is not None:
            log.error("prefix load broke", exc_info=error)
            self._lose(0, None)
        self._over.set()
