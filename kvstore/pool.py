"""The store node's book-keeping: which slot holds what, who may write it, who reads it, and what ends each claim.

Pure: ``now`` is an argument, nothing here waits. Slots are in ``slots``, what can be found in ``index``, both together in
``holdings``; pushed prompts are in ``landings``, publishing by local workers in ``reservations``, the way between DRAM and
SSD in ``tiers``, blocks kept by name in ``holds``. Here: read tickets, clearing, lives and proofs.

A slot is written under a *claim*: a landing (a prefill worker or another node pushes a prompt's missing blocks), a
reservation (a local worker publishes a block through its mapping) or a promotion (this node reads it from SSD). A claim
that ends without its writer's word leaves the slot fenced until proof that nothing can be written into it any more; there
is no time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moonpool.core.events import EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.landing import Landing, Ticket
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.claims import Life, Reach, Reservation, TicketClaim
from moonpool.kvstore.eviction.policy import EvictionPolicy
from moonpool.kvstore.holdings import Holdings
from moonpool.kvstore.holds import Holds
from moonpool.kvstore.ladder_claims import Demotion, Promotion
from moonpool.kvstore.landings import Landings
from moonpool.kvstore.reservations import Reservations
from moonpool.kvstore.slots import SlotMap, SlotState
from moonpool.kvstore.tiers import OnDisk, Tiers


@dataclass(frozen=True, slots=True)
class Cleared:
    """Blocks that went, or would go, with their bytes in all tiers; and blocks that stay because they are in use."""

    cleared: int
    kept: int
    bytes: int


class Pool:
    """``ssd_policy`` is None where there is no SSD tier. ``quotas``: bytes of DRAM by tenant; the default tenant has none.

    ``on_layout`` hears of every layout once it is registered.
    """

    def __init__(
        self,
        node: NodeId,
        incarnation: Incarnation,
        slots: SlotMap,
        policy: EvictionPolicy,
        ssd_policy: EvictionPolicy | None = None,
        *,
        quotas: Mapping[str, int] | None = None,
        hard_pin_share: float = 0.5,
        soft_pin_share: float = 0.25,
        on_layout: Callable[[KVLayout], None] = lambda layout: None,
    ) -> None:
        self.slots = slots
        self.held = Holdings(node, incarnation, slots, policy, ssd_policy, quotas or {})
        self.landings = Landings(self.held)
        self.reservations = Reservations(self.held, self.landings)
        self.tiers = Tiers(self.held)
        self.holds = Holds(self.held, hard_pin_share, soft_pin_share)
        self._tickets: dict[int, TicketClaim] = {}
        self._on_layout = on_layout
        self._cleared: list[tuple[KVLayout, bytes]] = []

    # Layouts.

    def register(self, layout: KVLayout, who: str = "the caller") -> None:
        """Blocks of this layout may be stored from now on; again is a no-op. Other models live side by side.

        LayoutMismatch, with both values: this model is known with another block size or shape, or its blocks are larger
        than a region.
        """
        known = layout.fingerprint in self.held.layouts
        self.held.register(layout, who)
        if not known:
            self._on_layout(layout)

    def layout(self, fingerprint: str) -> KVLayout:
        """LayoutMismatch, naming what is registered, where this one is not."""
        return self.held.accounts.layout(fingerprint)

    # Reading.

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are here, in any tier. Pins nothing, and does not count as a use."""
        return len(self.held.index.leading(keys))

    def pin(self, session: int, keys: Sequence[bytes], use: Use, now: float, layout: str = "") -> Ticket:
        """A ticket on the leading blocks that are in DRAM; with none of them there is nothing to unpin.

        Blocks of another layout than that with this fingerprint, where one is named, are a miss.
        """
        rows = self.held.leading(keys, layout)
        ticket = TicketClaim(self.held.next_id(), session, rows)
        if rows:
            self.held.pin(rows)
            self.held.index.touch(rows, 0, use, now)
            self._tickets[ticket.id] = ticket
        return Ticket(ticket.id, self.held.refs_of(rows))

    def unpin(self, session: int, ticket: int, now: float) -> bool:
        """End a ticket. Doing it again is a no-op that is counted."""
        claim = self._tickets.get(ticket)
        if claim is None or claim.session != session:
            self.held.counted["unpins_ignored"] += 1
            return False
        del self._tickets[ticket]
        self.held.unpin(claim.rows)
        return True

    def quarantine(self, key: bytes, place: str) -> int:
        """A reader's copy of ``key`` failed its digest: it and its descendants are no longer findable. Returns how many."""
        self.held.mismatch(place)
        gone = self.held.withdraw(key)
        self.held.counted["quarantined"] += gone
        return gone

    def clear(
        self, keys: Sequence[bytes] | None = None, *, model: str = "", tenant: str = "", dry_run: bool = False
    ) -> Cleared:
        """Drop ``keys`` with their descendants (None: everything), from all tiers, where nothing holds them.

        Only blocks of ``model`` (its fingerprint, or that of one layout) and of ``tenant``, where these are named. What
        has a block after it that stays, stays.
        """
        index, accounts = self.held.index, self.held.accounts
        rows = index.rows() if keys is None else index.descending(keys)
        wanted = {
            row
            for row in rows
            if (not tenant or accounts.tenant_of[index.account[row]] == tenant)
            and (not model or model in _names(accounts.layout_of[index.account[row]]))
        }
        going: list[int] = []
        gone: set[int] = set()
        for row in reversed(rows):  # children before parents
            if row in wanted and not index.is_kept(row) and gone.issuperset(index.children(row)):
                going.append(row)
                gone.add(row)
        size = sum(accounts.size_of[index.account[row]] * index.copies(row) for row in going)
        if not dry_run:
            for row in going:
                self._cleared.append((accounts.layout_of[index.account[row]], index.key[row]))
                self.held.withdraw(index.key[row])
        return Cleared(len(going), len(wanted) - len(going), size)

    def take_cleared(self) -> list[tuple[KVLayout, bytes]]:
        """Blocks cleared since the last call: a tier that keeps no index of them must forget them, too."""
        out, self._cleared = self._cleared, []
        return out

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
    ) -> Sequence[Reservation]:
        """One answer per key. ``keys`` follow one another; ``parent`` comes before the first (None: it begins a sequence).

        A new block's parent is pinned until it is sealed or abandoned, so that making room cannot evict it.
        LayoutMismatch: the layout is not registered here.
        """
        return self.reservations.reserve(session, writer, layout, keys, parent, use, now)

    def seal(self, session: int, ids: Sequence[int], now: float) -> int:
        """The writer filled these reservations, trailers included. Returns how many blocks are newly findable.

        One that was fenced meanwhile, whose key somebody else sealed first or whose parent is gone, is freed instead.
        """
        return self.reservations.seal(session, ids, now)

    def abandon(self, session: int, ids: Sequence[int], now: float) -> int:
        """The writer's word that it writes no more into these reservations, and has nothing to seal."""
        return self.reservations.abandon(session, ids)

    def cool(self, keys: Sequence[bytes], now: float) -> int:
        """Another node took over the leading blocks among ``keys``, and has what comes before them: here all of these are
        the first to go, unless used again.

        Those before the last fork stay as they are. How many cooled; 0 under a policy that cannot tell them apart.
        """
        cooled = self.held.index.cool(self.held.index.leading(keys), now)
        self.held.counted["cooled"] += cooled
        return cooled

    def ended(self, use: Use, output_tokens: int, now: float) -> None:
        """The newest request of ``use`` was answered with so many tokens: a hint for eviction."""
        index = self.held.index
        for policy in (index.policy, index.ssd_policy):
            if policy is not None:
                policy.ended(use, output_tokens, now)

    # DRAM and SSD.

    def demotions(self, limit: int, now: float) -> list[Demotion]:
        """At most ``limit`` blocks that only DRAM has, the coldest first, each after all before it in its sequence.

        Pinned until ``demoted``.
        """
        return self.tiers.demotions(limit, now)

    def demoted(self, id: int, extent: int | None, now: float) -> bool:
        """Written there (None: failed): the copy in DRAM may go without loss. False where the extent is of no use."""
        return self.tiers.demoted(id, extent, now)

    def on_ssd(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """(key, extent) of those of the leading blocks that are here which SSD only has, in order."""
        return self.tiers.on_ssd(keys)

    def promote(self, keys: Sequence[bytes], use: Use, now: float) -> list[Promotion]:
        """Slots for those of ``keys`` that SSD only has and nobody brings up yet: fewer, from the front, where room lacks."""
        return self.tiers.promote(keys, use, now)

    def promoted(self, id: int, ok: bool, now: float) -> bool:
        """It lies in its slot, digests checked; else the slot is freed. Whether the block is in DRAM by this."""
        return self.tiers.promoted(id, ok, now)

    def let_go(self, keys: Iterable[bytes]) -> list[bytes]:
        """Drop the DRAM copy of those of ``keys`` that are on SSD, too. Returns those that somebody still uses."""
        return self.tiers.let_go(keys)

    def extents_lost(self, extents: Sequence[int], now: float) -> None:
        """The tier lost these: what DRAM does not have goes, with its descendants."""
        self.tiers.lost(extents)

    def extents_moved(self, extents: Mapping[int, int]) -> None:
        """The tier moved blocks, from extent to extent."""
        self.tiers.moved(extents)

    def recovered(self, blocks: Iterable[OnDisk], now: float) -> list[int]:
        """Take over what the tier found, parents first. Returns extents of no use: orphans, unknown layouts, second copies."""
        return self.tiers.recovered(blocks, now)

    def evict_extents(self, n: int, now: float) -> list[int]:
        """At most ``n`` extents to free, of the coldest blocks that may go from SSD: not findable there any more."""
        return self.tiers.evict(n, now)

    def take_dropped_extents(self) -> list[int]:
        """Extents of blocks that were withdrawn or cleared since the last call: the tier's to erase."""
        dropped = self.held.index.dropped
        out = dropped[:]
        dropped.clear()
        return out

    # Holds and quotas.

    def hold(self, tenant: str, keys: Sequence[bytes], hard: bool, now: float) -> int:
        """Keep the leading ``keys`` that are in DRAM, by name and for no session. Returns how many are held.

        Soft: evicted last. Hard: never evicted. Busy, with the numbers, above the share that may be held.
        """
        return self.holds.hold(tenant, keys, hard)

    def unhold(self, tenant: str, keys: Sequence[bytes] | None, now: float) -> int:
        """Take back the tenant's holds on ``keys`` (None: all of them). Returns how many there were."""
        return self.holds.unhold(tenant, keys)

    def set_quota(self, tenant: str, limit: int | None) -> None:
        """``limit`` bytes of DRAM from now on; None: as much as there is. The default tenant has no quota."""
        self.held.accounts.set_quota(tenant, limit)

    def quotas(self) -> dict[str, tuple[int, int | None]]:
        """(bytes filled, bytes allowed) of every tenant that has filled some or has a quota."""
        accounts = self.held.accounts
        names = dict.fromkeys([*accounts.tenant_of, *accounts.quotas])
        return {name: (accounts.filled(name), accounts.quotas.get(name)) for name in names}

    # Lives and proofs.

    def session_ended(self, session: int, now: float) -> None:
        """The holder fell silent or left: its tickets go, what it publishes is fenced, its landings as a reader end."""
        for ticket in [t for t in self._tickets.values() if t.session == session]:
            del self._tickets[ticket.id]
            self.held.unpin(ticket.rows)
        self.reservations.session_ended(session)
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
        self.reservations.writer_gone(life)
        return broken

    def lives(self) -> set[Life]:
        """Everybody who may write here."""
        return {claim.ask.writer for claim in self.landings if claim.writer_open} | self.reservations.writers()

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
            sum(target.row is None for target in claim.targets.values())
            for claim in self.landings
            if claim.fenced and claim.writer_open and claim.ask.reach is Reach.CARRIER and not claim.reader_open
        )

    # What others see.

    def take_events(self) -> list[EventBatch]:
        return self.held.log.take()

    def snapshot(self) -> IndexSnapshot:
        """Call with all events taken."""
        tiers = (Tier.G2, Tier.G3) if self.held.index.on_ssd else (Tier.G2,)
        return self.held.log.snapshot((tier, self.held.index.keys_in(tier)) for tier in tiers)

    @property
    def evictable_bytes(self) -> int:
        """Of DRAM: what making room could give, beside what is free."""
        index = self.held.index
        return sum(size * index.evictable(size) for size in index.in_dram)

    @property
    def clean_bytes(self) -> int:
        """Of DRAM: blocks that are on SSD, too. Those of them that nobody has pinned can go without loss."""
        return sum(size * n for size, n in self.held.index.clean.items())

    def numbers(self) -> dict[str, float]:
        held, index, counts = self.held, self.held.index, self.slots.counts
        sizes = {layout.slot_bytes for layout in held.accounts.layouts.values()}
        going, coming = self.tiers.open
        out: dict[str, float] = {f"slots_{state}": counts[state] for state in counts}
        out |= {
            f"slots_{SlotState.FREE}": max(map(self.slots.free, sizes), default=0),
            "slots_total": max(map(self.slots.total, sizes), default=0),
            "spans_vacated": self.slots.vacated,
            "pool_bytes": self.slots.total_bytes,
            "pool_free_bytes": self.slots.free_bytes,
            "pool_evictable_bytes": self.evictable_bytes,
            "pool_clean_bytes": self.clean_bytes,
            "layouts": len(held.accounts.layouts),
            "blocks_findable": len(index),
            "blocks_evictable": sum(index.evictable(size) for size in sizes),
            "blocks_on_ssd": index.on_ssd,
            "pins": held.pins,
            "landings_open": len(self.landings),
            "tickets": len(self._tickets),
            "reservations": len(self.reservations),
            "demotions_open": going,
            "promotions_open": coming,
            "event_head": held.log.head,
            "digest_mismatches": held.mismatches.total(),
        }
        out |= self.holds.numbers()
        out |= {f"digest_mismatches_{place}": n for place, n in held.mismatches.items()}
        return out | {name: float(n) for name, n in held.counted.items()}


def _names(layout: KVLayout) -> tuple[str, str]:
    return layout.model, layout.fingerprint
