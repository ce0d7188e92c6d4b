"""The store node's book-keeping: which slot holds what, who may write it, who reads it, and what ends each claim.

Pure: ``now`` is an argument, nothing here waits. Slots are in ``slots``, what can be found in ``index``, both together in
``holdings``; pushed prompts are in ``landings``. Here: read tickets, publishing by local workers, lives and proofs.

A slot is written under a *claim*: a landing (a prefill worker or another node pushes a prompt's missing blocks) or a
reservation (a local worker publishes a block through its mapping). A claim that ends without its writer's word leaves
the slot fenced until proof that nothing can be written into it any more; there is no time-out.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.landing import Landing, Ticket
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.claims import Life, Reach, Reservation, ReservationClaim, Reserved, TicketClaim
from moonpool.kvstore.eviction.policy import EvictionPolicy
from moonpool.kvstore.holdings import Holdings
from moonpool.kvstore.landings import Landings
from moonpool.kvstore.slots import SlotMap


class Pool:
    def __init__(
        self,
        node: NodeId,
        incarnation: Incarnation,
        slots: SlotMap,
        policy: EvictionPolicy,
        ssd_policy: EvictionPolicy | None = None,
    ) -> None:
        self.slots = slots
        self.held = Holdings(node, incarnation, slots)
        self.landings = Landings(self.held)
        self._reservations: dict[int, ReservationClaim] = {}
        self._tickets: dict[int, TicketClaim] = {}

    # Layouts.

    def register(self, layout: KVLayout, who: str = "the caller") -> None:
        """Blocks of this layout may be stored from now on; again is a no-op. Other models live side by side.

        LayoutMismatch, with both values: this model is known with another block size or shape, or its blocks are larger
        than a region.
        """
        self.held.register(layout, who)

    def layout(self, fingerprint: str) -> KVLayout:
        """LayoutMismatch, naming what is registered, where this one is not."""
        return self.held.layout(fingerprint)

    # Reading.

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are here. Pins nothing, and does not count as a use."""
        return len(self.held.index.leading(keys))

    def pin(self, session: int, keys: Sequence[bytes], use: Use, now: float, layout: str = "") -> Ticket:
        """A ticket on the leading blocks that are here; with none of them there is nothing to unpin."""
        entries = self.held.leading(keys, layout)
        ticket = TicketClaim(self.held.next_id(), session, entries)
        self.held.pin(entries, now)
        if entries:
            self._tickets[ticket.id] = ticket
        return Ticket(ticket.id, tuple(self.held.ref(entry) for entry in entries))

    def unpin(self, session: int, ticket: int, now: float) -> bool:
        """End a ticket. Doing it again is a no-op that is counted."""
        claim = self._tickets.get(ticket)
        if claim is None or claim.session != session:
            self.held.counted["unpins_ignored"] += 1
            return False
        del self._tickets[ticket]
        self.held.unpin(claim.entries, now)
        return True

    def quarantine(self, key: bytes, place: str) -> int:
        """A reader's copy of ``key`` failed its digest: it and its descendants are no longer findable. Returns how many."""
        self.held.mismatch(place)
        gone = self.held.withdraw(key)
        self.held.counted["quarantined"] += gone
        return gone

    def clear(self, keys: Sequence[bytes] | None) -> tuple[int, int]:
        """Drop ``keys`` with their descendants (None: everything) where nothing holds them. Returns (cleared, kept)."""
        index = self.held.index
        before = len(index)
        if keys is None:
            while (entry := index.evict()) is not None:
                self.slots.release([entry.slot])
            return before - len(index), len(index)
        kept = 0
        for key in keys:
            entry = index.get(key)
            if entry is not None and entry.busy:
                kept += 1
            else:
                self.held.withdraw(key)
        return before - len(index), kept

    # Publishing.

    def reserve(
        self,
        session: int,
        writer: Life,
        layout: KVLayout,
        keys: Sequence[bytes],
        parent: bytes | None,
        use: Use,
        now: float,
    ) -> list[Reservation]:
        """One answer per key. ``keys`` follow one another; ``parent`` comes before the first (None: it begins a sequence).

        A new block's parent is pinned until it is sealed or abandoned, so that making room cannot evict it.
        LayoutMismatch: the layout is not registered here.
        """
        self.held.layout(layout.fingerprint).require_same(layout, writer.member)
        parents = (parent, *keys[:-1])
        states = self._states(keys, parent)
        index = self.held.index
        anchors = [
            index.get(above) if state is Reserved.NEW and above is not None else None
            for above, state in zip(parents, states, strict=True)
        ]
        self.held.pin([anchor for anchor in anchors if anchor], now)
        slots = self.held.take_some(layout.slot_bytes, states.count(Reserved.NEW))[::-1]
        out = []
        for key, above, state, anchor in zip(keys, parents, states, anchors, strict=True):
            if state is Reserved.NEW and slots:
                claim = ReservationClaim(self.held.next_id(), session, writer, layout, use, slots.pop(), key, above, anchor)
                self._reservations[claim.id] = claim
                self.held.expect(key)
                out.append(Reservation(key, state, self.slots.ref(claim.slot, key), claim.id))
            elif state is Reserved.NEW:
                self.held.unpin([anchor] if anchor else [], now)
                out.append(Reservation(key, Reserved.FULL))
            else:
                out.append(Reservation(key, state))
        return out

    def _states(self, keys: Sequence[bytes], parent: bytes | None) -> list[Reserved]:
        index, held = self.held.index, self.held
        out: list[Reserved] = []
        new: set[bytes] = set()
        for key in keys:
            if index.get(key) is not None:
                out.append(Reserved.SEALED)
            elif key in new or held.coming(key):
                out.append(Reserved.IN_FLIGHT)
            elif parent is None or parent in new or held.coming(parent) or index.get(parent) is not None:
                out.append(Reserved.NEW)
                new.add(key)
            else:
                out.append(Reserved.NO_PARENT)
            parent = key
        return out

    def seal(self, session: int, ids: Sequence[int], now: float) -> int:
        """The writer filled these reservations, trailers included. Returns how many blocks are newly findable.

        One that was fenced meanwhile, whose key somebody else sealed first or whose parent is gone, is freed instead.
        """
        sealed = 0
        index = self.held.index
        for claim in self._own(session, ids):
            lost = index.get(claim.key) is not None
            orphan = claim.parent is not None and index.get(claim.parent) is None
            if claim.fenced or lost or orphan:
                self.held.counted["seals_lost" if lost else "seals_dropped"] += 1
                self._free(claim, now)
                continue
            self._close(claim, now)
            self.held.seal(claim.key, claim.parent, claim.slot, claim.layout, claim.use, now)
            self.landings.wake(claim.key, now)
            sealed += 1
        return sealed

    def abandon(self, session: int, ids: Sequence[int], now: float) -> int:
        """The writer's word that it writes no more into these reservations, and has nothing to seal."""
        own = self._own(session, ids)
        for claim in own:
            self._free(claim, now)
        return len(own)

    def _own(self, session: int, ids: Sequence[int]) -> list[ReservationClaim]:
        found = {id: claim for id in ids if (claim := self._reservations.get(id)) and claim.session == session}
        self.held.counted["reservations_unknown"] += len(ids) - len(found)
        return list(found.values())

    def _close(self, claim: ReservationClaim, now: float) -> None:
        """The claim ends; its slot is the caller's to seal or release."""
        del self._reservations[claim.id]
        if not claim.fenced:
            self.held.expect_no_more(claim.key)
        self.held.unpin([claim.anchor] if claim.anchor else [], now)
        claim.anchor = None

    def _free(self, claim: ReservationClaim, now: float) -> None:
        self._close(claim, now)
        self.slots.release([claim.slot])

    # Lives and proofs.

    def session_ended(self, session: int, now: float) -> None:
        """The holder fell silent or left: its tickets go, what it publishes is fenced, its landings as a reader end."""
        for ticket in [t for t in self._tickets.values() if t.session == session]:
            del self._tickets[ticket.id]
            self.held.unpin(ticket.entries, now)
        for claim in self._reservations.values():
            if claim.session == session and not claim.fenced:
                claim.fenced = True
                self.slots.fence([claim.slot])
                self.held.expect_no_more(claim.key)
        for landing in self.landings:
            if landing.ask.reader == session:
                self.landings.end(landing.landing.id, now)

    def writer_silent(self, life: Life, now: float) -> list[Landing]:
        """Fence what ``life`` writes. Returns the landings that will stay incomplete."""
        broken = []
        for claim in self.landings:
            if claim.ask.writer == life and claim.writer_open and not claim.fenced:
                if claim.incomplete:
                    broken.append(claim.landing)
                self.landings.fence(claim)
                if claim.ask.reader is None:
                    self.landings.end(claim.landing.id, now)
        return broken

    def writer_gone(self, life: Life, now: float) -> list[Landing]:
        """Proof of death: nothing of ``life`` can be written any more. Returns landings that will stay incomplete."""
        broken = []
        for claim in self.landings:
            if claim.ask.writer == life and claim.writer_open:
                if claim.incomplete and not claim.fenced:
                    broken.append(claim.landing)
                self.landings.writer_through(claim, now)
        for reservation in [r for r in self._reservations.values() if r.writer == life]:
            self._free(reservation, now)
        return broken

    def lives(self) -> set[Life]:
        """Everybody who may write here."""
        writers = {claim.ask.writer for claim in self.landings if claim.writer_open}
        return writers | {claim.writer for claim in self._reservations.values()}

    def fenced_remote(self) -> frozenset[int]:
        """Landings that wait for proof and that making the endpoint anew would prove: ask before it begins."""
        return frozenset(c.landing.id for c in self.landings if c.fenced and c.writer_open and c.ask.reach is Reach.CARRIER)

    def endpoint_remade(self, fenced: frozenset[int], now: float) -> int:
        """Proof that no remote writer can write under what was ``fenced`` before. Returns how many landings that ended.

        Open landings go on: their writers connect again and push what is missing.
        """
        proved = [c for c in self.landings if c.landing.id in fenced and c.writer_open]
        for claim in proved:
            self.landings.writer_through(claim, now)
        return len(proved)

    @property
    def waiting_for_remake(self) -> int:
        """Fenced slots that making the endpoint anew would free."""
        return sum(
            sum(target.entry is None for target in claim.targets.values())
            for claim in self.landings
            if claim.fenced and claim.writer_open and claim.ask.reach is Reach.CARRIER and not claim.reader_open
        )

    # What others see.

    def take_events(self) -> list[EventBatch]:
        return self.held.log.take()

    def snapshot(self) -> IndexSnapshot:
        """Call with all events taken."""
        return self.held.log.snapshot(self.held.index.keys())

    @property
    def evictable_bytes(self) -> int:
        """Of DRAM: what making room could give, beside what is free."""
        return self.held.evictable_bytes

    def numbers(self) -> dict[str, float]:
        counts = self.slots.counts
        out: dict[str, float] = {f"slots_{state}": counts[state] for state in counts}
        sizes = {layout.slot_bytes for layout in self.held.layouts.values()}
        out |= {
            "slots_free": max(map(self.slots.free, sizes), default=0),
            "slots_total": max(map(self.slots.total, sizes), default=0),
            "pool_bytes": self.slots.total_bytes,
            "pool_free_bytes": self.slots.free_bytes,
            "layouts": len(self.held.layouts),
            "blocks_findable": len(self.held.index),
            "blocks_evictable": self.held.index.evictable,
            "pins": self.held.pins,
            "landings_open": len(self.landings),
            "tickets": len(self._tickets),
            "reservations": len(self._reservations),
            "event_head": self.held.log.head,
            "digest_mismatches": self.held.mismatches.total(),
        }
        out |= {f"digest_mismatches_{place}": n for place, n in self.held.mismatches.items()}
        return out | {name: float(n) for name, n in self.held.counted.items()}
