"""The pool with two layouts, an SSD tier, holds and quotas under random interleavings, against dicts that a test keeps."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.pool_record import LARGE, SMALL, TENANTS, TOKENS, Record, chain, layout_of, parent_of, use_of

from moonpool.core.errors import Busy
from moonpool.core.events import Tier
from moonpool.core.ids import Incarnation, MemberId, RequestId
from moonpool.core.landing import LandingSlot, PushNotice, SliceNotice
from moonpool.core.layout import SLOT_ALIGN
from moonpool.kvstore.claims import LandingAsk, Life, Reserved
from moonpool.kvstore.ladder_claims import Demotion, Promotion
from moonpool.kvstore.slots import SlotState
from moonpool.kvstore.ssd.blocks import Recovered

REGIONS = (17, 12)
paths = st.text("01", min_size=1, max_size=5)
tenants = st.sampled_from(TENANTS)
rarely = st.sampled_from([False, False, False, False, True])
WRITER = Life(MemberId("w"), Incarnation(1))
SESSIONS = (1, 2)


class TiersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.record = Record(REGIONS)
        self.pool = self.record.pool
        self.now = 0.0
        self.requests = 0
        self.tickets: dict[int, tuple[int, list[bytes]]] = {}
        self.writing: dict[int, tuple[int, bytes]] = {}  # reservation: session, key
        self.fenced: set[int] = set()
        self.landings: dict[int, tuple[LandingAsk, tuple[LandingSlot, ...], tuple[LandingSlot, ...]]] = {}
        self.going: dict[int, Demotion] = {}
        self.coming: dict[int, Promotion] = {}
        self.hard: dict[str, set[bytes]] = {name: set() for name in TENANTS}
        self.spoiled: set[bytes] = set()  # keys that were withdrawn, so that a hold on them may have ended

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    @initialize()
    def begin(self) -> None:
        assert self.pool.slots.total_bytes == sum(REGIONS) * SLOT_ALIGN

    # Publishing.

    @rule(path=paths, skip=st.integers(0, 3), tenant=tenants, session=st.sampled_from(SESSIONS))
    def reserve(self, path: str, skip: int, tenant: str, session: int) -> None:
        self.record.replay()
        keys = chain(path)
        first = min(skip, len(keys) - 1)
        above = keys[first - 1] if first else None
        layout, use = layout_of(keys[0]), use_of(tenant)
        answers = self.pool.reserve(session, WRITER, layout, keys[first:], above, use, self.tick())
        got = [answer for answer in answers if answer.state is Reserved.NEW]
        for answer in got:
            assert answer.slot is not None
            self.record.guard("writing", answer.id, [answer.slot])
            self.writing[answer.id] = session, answer.key
        gone = self.record.replay()
        assert above is None or not got or got[0].key != keys[first] or above not in gone[Tier.G2] + gone[Tier.G3]
        filled, quota = self.pool.quotas().get(tenant, (0, None))
        assert quota is None or not got or filled <= quota
        if any(answer.state is Reserved.FULL for answer in answers) and (quota is None or filled + layout.slot_bytes <= quota):
            assert self.pool.slots.free(layout.slot_bytes) == 0
            spared = sum(key in self.record.tiers[Tier.G2] for key in keys)  # parents of what was asked for
            assert self.pool.held.index.evictable(layout.slot_bytes) <= spared

    @rule(path=paths, tenant=tenants, more=paths)
    def store(self, path: str, tenant: str, more: str) -> None:
        """Whole sequences at once: this is what fills the pool."""
        for one in (path, more):
            keys = chain(one)
            answers = self.pool.reserve(1, WRITER, layout_of(keys[0]), keys, None, use_of(tenant), self.tick())
            got = [answer for answer in answers if answer.state is Reserved.NEW]
            for answer in got:
                assert answer.slot is not None
                self.record.write(answer.slot)
            self.pool.seal(1, [answer.id for answer in got], self.tick())

    @rule(paths=st.lists(paths, min_size=2, max_size=4))
    def store_more(self, paths: list[str]) -> None:
        for path in paths:
            self.store(path, "default", path)

    @rule(limit=st.integers(1, 6))
    def demote_all_the_way(self, limit: int) -> None:
        for one in self.pool.demotions(limit, self.tick()):
            assert self.pool.demoted(one.id, self.record.new_extent(one.key), self.tick())

    @rule(path=paths)
    def promote_all_the_way(self, path: str) -> None:
        for one in self.pool.promote(chain(path), use_of("default"), self.tick()):
            self.record.write(one.slot)
            self.pool.promoted(one.id, True, self.tick())

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), seal=st.sampled_from([True, True, False]), every=st.booleans())
    def finish_writing(self, data: st.DataObject, seal: bool, every: bool) -> None:
        some = st.lists(st.sampled_from(sorted(self.writing)), unique=True, min_size=1)
        ids = sorted(self.writing) if every else data.draw(some)
        for session in SESSIONS:
            mine = [id for id in ids if self.writing.get(id, (0,))[0] == session]
            for id in mine:
                self.write_guarded("writing", id, self.writing[id][1])
                self.record.unguard("writing", id)
                del self.writing[id]
            if seal:
                assert self.pool.seal(session, mine, self.tick()) <= sum(id not in self.fenced for id in mine)
            else:
                assert self.pool.abandon(session, mine, self.tick()) == len(mine)
            assert self.pool.seal(session, mine, self.tick()) == 0, "they are over"

    def write_guarded(self, kind: str, number: int, key: bytes) -> None:
        for place in self.record.guarded[kind, number]:
            self.record.memory[place] = key

    # Landings.

    @rule(path=paths, skip=st.integers(0, 3), tenant=tenants, reads=st.booleans())
    def grant(self, path: str, skip: int, tenant: str, reads: bool) -> None:
        self.record.replay()
        keys = chain(path)
        first = min(skip, len(keys) - 1)
        self.requests += 1
        parent = keys[first - 1] if first else None
        layout, wanted, reader = layout_of(keys[0]), tuple(keys[first:]), 1 if reads else None
        name, use = RequestId(f"r{self.requests}"), use_of(tenant)
        ask = LandingAsk(name, 1, WRITER, reader, layout, wanted, first, 0, parent, use=use)
        try:
            landing = self.pool.landings.grant(ask, self.tick())
        except Busy:
            return
        assert {s.slot.key for s in landing.slots} | {s.slot.key for s in landing.held} == set(wanted)
        assert all(s.slot.key in self.record.tiers[Tier.G2] for s in landing.held)
        self.record.replay()
        assert all(s.slot.key in self.record.tiers[Tier.G2] for s in landing.held), "making room spared them"
        self.landings[landing.id] = ask, landing.slots, landing.held
        self.record.guard("landing", landing.id, [s.slot for s in landing.slots])
        if reads:
            self.record.guard("reading", landing.id, [s.slot for s in landing.held])

    @precondition(lambda self: self.landings)
    @rule(data=st.data(), ends=st.booleans())
    def land(self, data: st.DataObject, ends: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.landings)))
        ask, slots, _ = self.landings[number]
        for slot in slots:
            self.record.write(slot.slot)
        for layer in range(ask.layout.layers):
            pieces = tuple(SliceNotice(s.slot.region, s.slot.offset, TOKENS, 0) for s in slots)
            layout, expected = self.pool.landings.expected(PushNotice(number, ask.request, 1, 0, layer, pieces))
            assert layout is None or layout == ask.layout
            for one in expected:
                self.pool.landings.landed(number, one.slot, layer, self.tick())
        if ends:
            self.through(number)

    def through(self, number: int) -> None:
        self.record.unguard("landing", number)
        self.pool.landings.drained(number, WRITER, self.tick())
        self.record.unguard("reading", number)
        self.pool.landings.end(number, self.tick())
        del self.landings[number]

    @precondition(lambda self: self.landings)
    @rule(data=st.data())
    def give_up_landing(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.landings)))
        self.record.unguard("reading", number)
        self.pool.landings.end(number, self.tick())
        ask, slots, _ = self.landings[number]
        self.landings[number] = ask, slots, ()

    # Reading.

    @rule(path=paths, tenant=tenants, session=st.sampled_from(SESSIONS), right=st.booleans())
    def pin(self, path: str, tenant: str, session: int, right: bool) -> None:
        self.record.replay()
        keys = chain(path)
        layout = layout_of(keys[0]) if right else SMALL if layout_of(keys[0]) is LARGE else LARGE
        ticket = self.pool.pin(session, keys, use_of(tenant), self.tick(), layout.fingerprint)
        lead = self.record.leading(keys, Tier.G2)
        assert [ref.key for ref in ticket.slots] == (lead if right else [])
        assert self.pool.lookup(keys) == len(self.record.leading(keys))
        if ticket.slots:
            self.tickets[ticket.id] = session, lead
            self.record.guard("ticket", ticket.id, list(ticket.slots))
            for ref in ticket.slots:
                assert self.record.memory[ref.region, ref.offset] == ref.key

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        session, _ = self.tickets.pop(ticket)
        self.record.unguard("ticket", ticket)
        ignored = self.pool.held.counted["unpins_ignored"]
        assert self.pool.unpin(session, ticket, self.tick())
        assert not self.pool.unpin(session, ticket, self.tick())
        assert self.pool.held.counted["unpins_ignored"] == ignored + 1

    @rule(session=st.sampled_from(SESSIONS), really=rarely)
    def session_ends(self, session: int, really: bool) -> None:
        if not really:
            return
        for ticket, (owner, _) in list(self.tickets.items()):
            if owner == session:
                self.record.unguard("ticket", ticket)
                del self.tickets[ticket]
        for number, (ask, slots, _) in list(self.landings.items()):
            if ask.reader == session:
                self.record.unguard("reading", number)
                self.landings[number] = ask, slots, ()
        self.pool.session_ended(session, self.tick())
        self.fenced |= {id for id, (owner, _) in self.writing.items() if owner == session}

    @rule(really=rarely)
    def writer_gone(self, really: bool) -> None:
        if not really:
            return
        for id in self.writing:
            self.record.unguard("writing", id)
        self.writing.clear()
        for number, (ask, slots, _) in list(self.landings.items()):
            self.record.unguard("landing", number)
            if ask.reader is None or ("reading", number) not in self.record.guarded:
                del self.landings[number]
            else:
                self.landings[number] = ask, slots, ()
        self.pool.writer_gone(WRITER, self.tick())
        self.landings = {n: kept for n, kept in self.landings.items() if self.pool.landings.get(n) is not None}

    # Between the tiers.

    @rule(limit=st.integers(1, 6))
    def demote(self, limit: int) -> None:
        self.record.replay()
        busy = {one.key for one in self.going.values()}
        some = self.pool.demotions(limit, self.tick())
        assert len(some) <= limit
        on_its_way = {*self.record.tiers[Tier.G3], *busy}
        for one in some:
            assert one.key in self.record.tiers[Tier.G2] and one.key not in on_its_way
            assert one.parent == parent_of(one.key)
            assert one.parent is None or one.parent in on_its_way, "what lies on SSD can be found again by itself"
            on_its_way.add(one.key)
            self.going[one.id] = one
            self.record.guard("going", one.id, [one.slot])
            assert self.record.memory[one.slot.region, one.slot.offset] == one.key

    @precondition(lambda self: self.going)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]), every=st.booleans())
    def demoted(self, data: st.DataObject, ok: bool, every: bool) -> None:
        for number in sorted(self.going) if every else [data.draw(st.sampled_from(sorted(self.going)))]:
            one = self.going.pop(number)
            self.record.unguard("going", number)
            extent = self.record.new_extent(one.key) if ok else None
            good = self.pool.demoted(number, extent, self.tick())
            assert not good or ok
            self.record.replay()
            assert (extent in self.record.disk) == good
            assert not self.pool.demoted(number, None, self.tick())

    @rule(path=paths, tenant=tenants)
    def promote(self, path: str, tenant: str) -> None:
        self.record.replay()
        keys = chain(path)
        only = [key for key in self.record.leading(keys) if key not in self.record.tiers[Tier.G2]]
        assert [key for key, _ in self.pool.on_ssd(keys)] == only
        busy = {one.key for one in self.coming.values()}
        some = self.pool.promote(keys, use_of(tenant), self.tick())
        wanted = [key for key in only if key not in busy]
        assert [one.key for one in some] == wanted[: len(some)]
        for one in some:
            assert self.record.disk[one.extent] == one.key
            self.coming[one.id] = one
            self.record.guard("coming", one.id, [one.slot])
        self.record.replay()
        assert all(self.record.is_here(key) for key in only), "making room for some spared the others"

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def promoted(self, data: st.DataObject, ok: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.coming)))
        one = self.coming.pop(number)
        self.record.replay()
        self.record.write(one.slot)
        self.record.unguard("coming", number)
        here = one.key in self.record.tiers[Tier.G3] and one.key not in self.record.tiers[Tier.G2]
        assert self.pool.promoted(number, ok, self.tick()) == (ok and here)
        assert not self.pool.promoted(number, ok, self.tick())

    @rule(n=st.integers(1, 3))
    def evict_extents(self, n: int) -> None:
        self.record.replay()
        extents = self.pool.evict_extents(n, self.tick())
        reading = {one.extent for one in self.coming.values()}
        assert len(extents) <= n and not reading & set(extents)
        gone = self.record.replay()
        assert sorted(self.record.disk[extent] for extent in extents) == sorted(gone[Tier.G3])
        self.record.freed_on_disk(extents)

    @precondition(lambda self: self.record.disk)
    @rule(data=st.data(), really=rarely)
    def lose_extents(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        self.record.replay()
        lost = data.draw(st.lists(st.sampled_from(sorted(self.record.disk)), unique=True, min_size=1, max_size=3))
        keys = {self.record.disk[extent] for extent in lost}
        for extent in lost:
            del self.record.disk[extent]
        self.note_spoiled({key for key in keys if key not in self.record.tiers[Tier.G2]})
        self.pool.extents_lost(lost, self.tick())

    @precondition(lambda self: self.record.disk)
    @rule(data=st.data())
    def move_extents(self, data: st.DataObject) -> None:
        self.record.replay()
        some = data.draw(st.lists(st.sampled_from(sorted(self.record.disk)), unique=True, min_size=1, max_size=3))
        moved = {extent: self.record.new_extent(self.record.disk.pop(extent)) for extent in some}
        self.pool.extents_moved(moved)
        for number, one in self.coming.items():
            if one.extent in moved:
                self.coming[number] = Promotion(one.id, one.key, one.layout, one.slot, moved[one.extent])

    @rule(path=paths, tenant=tenants, known=st.sampled_from([True, True, False]))
    def recover(self, path: str, tenant: str, known: bool) -> None:
        self.record.replay()
        keys, had = chain(path), dict(self.record.tiers[Tier.G3])
        blocks = []
        for key in keys:
            layout = layout_of(keys[0]).fingerprint if known else "unknown"
            blocks.append(Recovered(key, parent_of(key), layout, self.record.new_extent(key), use_of(tenant)))
        unwanted = set(self.pool.recovered(blocks, self.tick()))
        assert unwanted == {b.extent for b in blocks if b.key in had or not known}
        self.record.freed_on_disk(list(unwanted))

    # Withdrawing and keeping.

    def note_spoiled(self, keys: set[bytes]) -> None:
        self.spoiled |= {key for key in self.record.here() if any(key.startswith(top.rstrip(b".")) for top in keys)}

    @rule(path=paths, really=rarely)
    def quarantine(self, path: str, really: bool) -> None:
        if not really:
            return
        self.record.replay()
        key = chain(path)[-1]
        below = {k for k in self.record.here() if k.startswith(path.encode())}
        self.note_spoiled({key})
        assert self.pool.quarantine(key, "test") == (len(below) if self.record.is_here(key) else 0)

    @rule(
        path=st.none() | paths,
        model=st.sampled_from(["", "small", "large"]),
        tenant=st.sampled_from(["", *TENANTS]),
        really=rarely,
    )
    def clear(self, path: str | None, model: str, tenant: str, really: bool) -> None:
        if not really:
            return
        self.record.replay()
        keys = None if path is None else [chain(path)[-1]]
        before = self.record.here()
        said = self.pool.clear(keys, model=model, tenant=tenant, dry_run=True)
        self.record.replay()
        assert self.record.here() == before, "a dry run changes nothing"
        assert self.pool.clear(keys, model=model, tenant=tenant) == said
        self.record.replay()
        gone = before - self.record.here()
        assert len(gone) == said.cleared
        assert all(key.startswith(path.encode()) for key in gone if path is not None)
        assert all(layout_of(key).model == model for key in gone if model)
        assert not gone & set().union(*self.hard.values())

    @rule(path=paths, tenant=tenants, hard=st.booleans())
    def hold(self, path: str, tenant: str, hard: bool) -> None:
        self.record.replay()
        keys = chain(path)
        lead = self.record.leading(keys, Tier.G2)
        held = {key for name in TENANTS for key in self.hard[name] if key in self.record.tiers[Tier.G2]}
        try:
            n = self.pool.hold(tenant, keys, hard, self.tick())
        except Busy:
            if hard:
                assert sum(layout_of(k).slot_bytes for k in held | set(lead)) > self.pool.slots.total_bytes / 2
            return
        assert n == len(lead)
        if hard:
            self.hard[tenant] |= set(lead)
            self.spoiled -= set(lead)
            assert sum(layout_of(k).slot_bytes for k in held | set(lead)) <= self.pool.slots.total_bytes / 2
        else:
            self.hard[tenant] -= set(lead)

    @rule(path=st.none() | paths, tenant=tenants)
    def unhold(self, path: str | None, tenant: str) -> None:
        keys = None if path is None else chain(path)
        self.pool.unhold(tenant, keys, self.tick())
        self.hard[tenant] -= self.hard[tenant].copy() if keys is None else set(keys)

    @rule(tenant=tenants, blocks=st.none() | st.integers(0, 9))
    def set_quota(self, tenant: str, blocks: int | None) -> None:
        self.pool.set_quota(tenant, None if blocks is None else blocks * SMALL.slot_bytes)
        assert self.pool.quotas().get("default", (0, None))[1] is None

    # Invariants, re-derived after every step.

    @invariant()
    def events_replayed_give_the_index_and_both_tiers_together_are_prefix_closed(self) -> None:
        self.record.replay()
        index = self.pool.held.index
        for tier, keys in self.record.tiers.items():
            assert sorted(keys) == sorted(index.keys_in(tier))
        here = self.record.here()
        assert here == set(index.keys())
        assert all(parent_of(key) is None or parent_of(key) in here for key in here)
        shot = dict(self.pool.snapshot().entries)
        assert set(shot[Tier.G2]) == set(self.record.tiers[Tier.G2])
        assert set(shot.get(Tier.G3, ())) == set(self.record.tiers[Tier.G3])

    @invariant()
    def every_block_is_where_the_index_says(self) -> None:
        self.record.replay()
        index, extents = self.pool.held.index, []
        for key in index.keys():  # noqa: SIM118 not a dict
            entry = index.get(key)
            assert entry is not None
            assert entry.layout == layout_of(key)
            assert entry.parent == parent_of(key)
            assert entry.children == {k for k in self.record.here() if parent_of(k) == key}
            if entry.slot is not None:
                assert self.record.memory[self.pool.slots.place(entry.slot)] == key
                assert self.pool.slots.owner(entry.slot) == entry.row
                assert self.pool.slots.size(entry.slot) == entry.layout.slot_bytes
            if entry.extent is not None:
                extents.append(entry.extent)
                assert self.record.disk[entry.extent] == key
        held = {one.extent for one in self.coming.values()}
        reading = {extent for row in index.pins if not index.is_found(row) and (extent := index.extent[row]) >= 0}
        assert len(set(extents)) == len(extents)
        assert set(self.record.disk) == set(extents) | reading
        assert held & set(self.record.disk) <= set(extents) | reading

    @invariant()
    def pinned_blocks_keep_their_bytes(self) -> None:
        for ticket, (_, keys) in self.tickets.items():
            assert {self.record.memory[place] for place in self.record.guarded["ticket", ticket]} == set(keys)

    @invariant()
    def bytes_are_conserved(self) -> None:
        slots, accounts, index = self.pool.slots, self.pool.held.accounts, self.pool.held.index
        used = [slot for slot in slots if slots.state(slot) is not SlotState.FREE]
        assert sum(map(slots.size, used)) == slots.used_bytes
        assert sum(n * size for n, size in zip(accounts.slots_of, accounts.size_of, strict=True)) == slots.used_bytes
        places: Counter[tuple[int, int]] = Counter()
        for slot in used:
            region, offset = slots.place(slot)
            places.update((region, offset + at) for at in range(0, slots.size(slot), SLOT_ALIGN))
        assert not places or max(places.values()) == 1, "slots overlap"
        open_slots = sum(slots.open_slots(size)[1] * size for size in (SMALL.slot_bytes, LARGE.slot_bytes))
        assert slots.used_bytes + open_slots <= slots.total_bytes
        assert self.pool.held.pins == sum(index.pins.values())
        assert all(n > 0 for n in index.pins.values())

    @invariant()
    def counts_are_those_of_brute_force(self) -> None:
        self.record.replay()
        index = self.pool.held.index
        entries = {key: entry for key in index.keys() if (entry := index.get(key))}  # noqa: SIM118 not a dict

        def busy(key: bytes) -> bool:
            entry = entries[key]
            return entry.pins > 0 or entry.held == "hard" or any(map(busy, entry.children))

        for layout in (SMALL, LARGE):
            mine = [e for e in entries.values() if e.layout == layout and e.slot is not None]
            stuck = [e for e in mine if busy(e.key) and (e.pins or e.held == "hard" or e.extent is None)]
            assert index.in_dram[layout.slot_bytes] == len(mine)
            assert index.evictable(layout.slot_bytes) == len(mine) - len(stuck)
            assert index.clean[layout.slot_bytes] == sum(e.extent is not None for e in mine)
        assert index.on_ssd == len(self.record.tiers[Tier.G3])

    @invariant()
    def what_is_held_hard_stays(self) -> None:
        self.record.replay()
        for tenant in TENANTS:
            self.hard[tenant] -= self.spoiled
            for key in self.hard[tenant]:
                assert key in self.record.tiers[Tier.G2]

    def teardown(self) -> None:
        """Everybody goes: everything is free."""
        for number in list(self.going):
            self.record.unguard("going", number)
            self.pool.demoted(number, None, self.tick())
        for number in list(self.coming):
            self.record.unguard("coming", number)
            self.pool.promoted(number, False, self.tick())
        self.record.guarded.clear()
        for tenant in TENANTS:
            self.pool.unhold(tenant, None, self.tick())
        self.pool.writer_gone(WRITER, self.tick())
        for session in SESSIONS:
            self.pool.session_ended(session, self.tick())
        assert self.pool.clear().kept == 0
        self.record.replay()
        numbers = self.pool.numbers()
        assert numbers["pool_free_bytes"] == numbers["pool_bytes"]
        assert self.record.disk == {}
        assert self.record.here() == set()
        names = ("pins", "tickets", "reservations", "landings_open", "demotions_open", "promotions_open", "held_hard_bytes")
        assert {numbers[name] for name in names} == {0}
        assert not self.pool.held._writing
        assert len(self.pool.slots._ground) == len(REGIONS)


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
pytest.mark.timeout(120)(TestTiers)
