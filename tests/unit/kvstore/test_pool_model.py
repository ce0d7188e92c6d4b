"""The pool under random interleavings, against a record that a test keeps of who holds what, and brute force for the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonpool.core.errors import Busy
from moonpool.core.events import BlockChange
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId
from moonpool.core.landing import LandingSlot, PushNotice, SliceNotice, SlotRef
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.claims import LandingAsk, Life, Reach, Reserved
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.landings import tail_key
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.slots import SlotMap, SlotState

SLOT = 4096
LAYERS = 2
TOKENS = 16
REGIONS = (4, 3)
TOTAL = sum(REGIONS)
LAYOUT = KVLayout("m", layers=LAYERS, kv_heads=1, head_dim=4, dtype="float32", block_tokens=TOKENS)
MEMBERS = ("p0", "p1", "d0")

# A sequence of blocks is a path in a binary tree: "0", "01", "011" ...; the key of a block is the path to it.
paths = st.text("01", min_size=1, max_size=5)


def chain(path: str) -> list[bytes]:
    return [path[: i + 1].encode().ljust(16, b".") for i in range(len(path))]


def parent_of(key: bytes) -> bytes | None:
    path = key.rstrip(b".")
    return path[:-1].ljust(16, b".") if len(path) > 1 else None


@dataclass
class Grant:
    """What the test knows of a landing: the slots it may write, which layers of them landed, and who is through."""

    id: int
    ask: LandingAsk
    slots: tuple[LandingSlot, ...]
    held: tuple[LandingSlot, ...]
    landed: dict[int, set[int]] = field(default_factory=dict)  # by prompt block
    sealed: set[int] = field(default_factory=set)  # prompt blocks whose slot was sealed
    writer_open: bool = True
    reader_open: bool = True
    fenced: bool = False

    @property
    def over(self) -> bool:
        return not self.writer_open and not self.reader_open


@dataclass
class Writing:
    session: int
    life: Life
    slot: SlotRef
    fenced: bool = False


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.slots = SlotMap([n * SLOT for n in REGIONS], self.freed.append)
        self.pool = Pool(NodeId("n"), Incarnation(1), self.slots, Lru())
        self.pool.register(LAYOUT)
        self.now = 0.0
        self.grants: list[Grant] = []
        self.tickets: dict[int, tuple[int, tuple[SlotRef, ...]]] = {}
        self.writing: dict[int, Writing] = {}
        self.sessions: dict[int, Life] = {}
        self.lives = {name: Life(MemberId(name), Incarnation(1)) for name in MEMBERS}
        self.count = 0
        self.replayed: dict[bytes, None] = {}
        self.next_event = 1

    # Small things.

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def number(self, ref: SlotRef) -> int:
        slot = self.slots.at(ref.region, ref.offset)
        return -1 if slot is None else slot  # its span went back

    def replay(self) -> list[bytes]:
        """Take the events; returns the keys that were removed."""
        removed = []
        for batch in self.pool.take_events():
            assert batch.number == self.next_event
            self.next_event += len(batch.events)
            for event in batch.events:
                for key in event.keys:
                    if event.change is BlockChange.STORED:
                        assert key not in self.replayed
                        assert parent_of(key) is None or parent_of(key) in self.replayed
                        self.replayed[key] = None
                    else:
                        del self.replayed[key]
                        removed.append(key)
        return removed

    def holders(self) -> Counter[bytes]:
        """Pins of every findable key, from the test's own record."""
        pins: Counter[int] = Counter()
        for _, refs in self.tickets.values():
            pins.update(self.number(ref) for ref in refs)
        for grant in self.grants:
            if grant.over:
                continue
            pins.update(self.number(s.slot) for s in grant.slots if s.block in grant.sealed)
            if grant.reader_open:
                pins.update(self.number(s.slot) for s in grant.held)
        found = Counter({key: pins[entry.slot] for key in self.replayed if (entry := self.pool.held.index.get(key))})
        return found

    def anchored(self) -> set[bytes]:
        """Keys that are pinned as the parent of something being written."""
        out = {parent_of(w.slot.key) for w in self.writing.values()}
        out |= {grant.ask.parent for grant in self.grants if not grant.over}
        return {key for key in out if key is not None}

    def victims(self, needed: int, spared: set[bytes]) -> list[bytes] | None:
        """Which blocks the least-recently-used rule gives up for ``needed`` slots, one leaf after the other. None: too few."""
        held = {key for key, n in self.holders().items() if n} | spared
        held |= {key for key in self.anchored() if (e := self.pool.held.index.get(key)) and e.pins}
        there, out = set(self.replayed), []
        while self.slots.free(SLOT) + len(out) < needed:
            parents = {parent_of(key) for key in there}
            leaves = [key for key in there if key not in parents and key not in held]
            if not leaves:
                return None
            oldest = min(self.used_of(key) for key in leaves)
            out.append(next(key for key in leaves if self.used_of(key) == oldest))
            there.discard(out[-1])
        return out

    def used_of(self, key: bytes) -> float:
        entry = self.pool.held.index.get(key)
        assert entry is not None
        return entry.used

    def life(self, name: str) -> Life:
        return self.lives[name]

    # Rules.

    @initialize()
    def begin(self) -> None:
        self.open_session("d0")

    @rule(name=st.sampled_from(MEMBERS))
    def open_session(self, name: str) -> None:
        self.sessions[len(self.sessions) + 1] = self.life(name)

    @rule(
        path=paths,
        skip=st.integers(0, 3),
        tail=st.integers(0, TOKENS - 1),
        writer=st.sampled_from(MEMBERS),
        reads=st.booleans(),
        names_parent=st.booleans(),
        data=st.data(),
    )
    def grant(self, path: str, skip: int, tail: int, writer: str, reads: bool, names_parent: bool, data: st.DataObject) -> None:
        self.replay()
        keys = chain(path)
        first = min(skip, len(keys))
        parent = keys[first - 1] if first and names_parent else None
        reader = data.draw(st.sampled_from(sorted(self.sessions))) if reads and self.sessions else None
        self.count += 1
        ask = LandingAsk(
            RequestId(f"r{self.count}"), 1, self.life(writer), reader, LAYOUT, tuple(keys[first:]), first, tail, parent,
            reach=Reach.MAPPED if writer == "d0" else Reach.CARRIER,
        )  # fmt: skip
        missing = [key for key in ask.keys if key not in self.replayed]
        needed = len(missing) + (tail > 0)
        spared = {key for key in ask.keys if key in self.replayed} | ({parent} if parent in self.replayed else set())
        expected = self.victims(needed, {key for key in spared if key})
        used = {key: self.used_of(key) for key in self.replayed}
        try:
            landing = self.pool.landings.grant(ask, self.tick())
        except Busy:
            assert expected is None
            assert self.replay() == []
            return
        assert expected is not None
        gone = self.replay()
        assert [used[key] for key in gone] == [used[key] for key in expected]
        assert [s.slot.key for s in landing.slots] == missing + ([tail_key(ask.request, 1, len(keys))] if tail else [])
        assert [s.slot.key for s in landing.held] == [key for key in ask.keys if key in self.replayed]
        assert self.pool.landings.grant(ask, self.now) is landing
        self.grants.append(Grant(landing.id, ask, landing.slots, landing.held, {s.block: set() for s in landing.slots}))

    def some_grant(self, data: st.DataObject) -> Grant:
        return data.draw(st.sampled_from(self.grants))

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), layers=st.sampled_from([(0, 1), (1, 0), (0,), (1,)]), good=st.sampled_from([True, True, True, False]))
    def land(self, data: st.DataObject, layers: tuple[int, ...], good: bool) -> None:
        grant = self.some_grant(data)
        if not grant.slots:
            return
        slots = data.draw(st.just(list(grant.slots)) | st.lists(st.sampled_from(grant.slots), unique=True))
        for layer in layers:
            pieces = tuple(SliceNotice(s.slot.region, s.slot.offset, s.valid, 0) for s in slots)
            notice = PushNotice(grant.id, grant.ask.request, 1, 0, layer, pieces)
            _, expected = self.pool.landings.expected(notice)
            if grant.fenced or grant.over:
                assert expected == []
            else:
                assert {e.block for e in expected} == {s.block for s in slots if layer not in grant.landed[s.block]}
            for one in expected:
                if not good:
                    self.pool.landings.rejected(grant.id, one.slot, layer)
                elif self.pool.landings.misses(grant.id, one.slot, layer):
                    self.pool.landings.landed(grant.id, one.slot, layer, self.tick())
                    grant.landed[one.block].add(layer)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), right=st.booleans())
    def drain(self, data: st.DataObject, right: bool) -> None:
        grant = self.some_grant(data)
        writer = grant.ask.writer if right else Life(MemberId("stranger"), Incarnation(7))
        done = self.pool.landings.drained(grant.id, writer, self.tick())
        assert done == (right and grant.writer_open and not grant.over)
        if done:
            self.through(grant)

    def through(self, grant: Grant) -> None:
        self.note_seals()
        grant.writer_open = False
        if grant.ask.reader is None:
            grant.reader_open = False

    def end(self, grant: Grant) -> None:
        self.note_seals()
        grant.reader_open = False
        grant.fenced = grant.fenced or grant.writer_open

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def land_all_and_drain(self, data: st.DataObject) -> None:
        grant = self.some_grant(data)
        for slot in grant.slots:
            for layer in range(LAYERS):
                number = self.number(slot.slot)
                if self.pool.landings.misses(grant.id, number, layer):
                    self.pool.landings.landed(grant.id, number, layer, self.tick())
                    grant.landed[slot.block].add(layer)
        if self.pool.landings.drained(grant.id, grant.ask.writer, self.tick()):
            self.through(grant)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def end_landing(self, data: st.DataObject) -> None:
        grant = self.some_grant(data)
        assert self.pool.landings.end(grant.id, self.tick()) == grant.reader_open
        if grant.reader_open:
            self.end(grant)

    @precondition(lambda self: self.sessions)
    @rule(path=paths, data=st.data())
    def pin(self, path: str, data: st.DataObject) -> None:
        self.replay()
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        keys = chain(path)
        ticket = self.pool.pin(session, keys, Use(), self.tick())
        lead = [key for i, key in enumerate(keys) if all(k in self.replayed for k in keys[: i + 1])]
        assert [ref.key for ref in ticket.slots] == lead
        assert self.pool.lookup(keys) == len(lead)
        if lead:
            self.tickets[ticket.id] = (session, ticket.slots)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        session, _ = self.tickets.pop(ticket)
        assert not self.pool.unpin(session + 1000, ticket, self.tick())
        assert self.pool.unpin(session, ticket, self.tick())
        assert not self.pool.unpin(session, ticket, self.tick())

    @precondition(lambda self: self.sessions)
    @rule(path=paths, skip=st.integers(0, 3), data=st.data())
    def reserve(self, path: str, skip: int, data: st.DataObject) -> None:
        self.replay()
        self.note_seals()
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        keys = chain(path)
        first = min(skip, len(keys) - 1)
        parent = keys[first - 1] if first else None
        coming = self.coming()
        answers = self.pool.reserve(session, self.sessions[session], LAYOUT, keys[first:], parent, Use(), self.tick())
        gone = set(self.replay())
        above, new = parent, set()
        for answer in answers:
            if answer.key in self.replayed or answer.key in gone:
                assert answer.state is Reserved.SEALED
            elif answer.key in coming:
                assert answer.state is Reserved.IN_FLIGHT
            elif above is None or above in coming or above in new or above in self.replayed or above in gone:
                assert answer.state in (Reserved.NEW, Reserved.FULL)
                new.add(answer.key)
            else:
                assert answer.state is Reserved.NO_PARENT
            above = answer.key
            if answer.state is Reserved.NEW:
                assert answer.slot is not None
                self.writing[answer.id] = Writing(session, self.sessions[session], answer.slot)
        assert not gone & {parent_of(answer.key) for answer in answers if answer.state is Reserved.NEW}
        if any(answer.state is Reserved.FULL for answer in answers):
            assert self.slots.free(SLOT) == 0

    def coming(self) -> set[bytes]:
        """Keys that somebody may yet seal."""
        out = {w.slot.key for w in self.writing.values() if not w.fenced}
        for grant in self.grants:
            if grant.fenced or grant.over:
                continue
            for slot in grant.slots:
                whole = len(grant.landed[slot.block]) == LAYERS
                if slot.block in grant.sealed or slot.valid < TOKENS or (slot.block and self.parent_in(grant, slot) is None):
                    continue
                if (grant.writer_open or whole) and not (whole and self.lost(grant, slot)):
                    out.add(slot.slot.key)
        return out

    def parent_in(self, grant: Grant, slot: LandingSlot) -> bytes | None:
        return grant.ask.parent if slot.block == grant.ask.first_block else parent_of(slot.slot.key)

    def lost(self, grant: Grant, slot: LandingSlot) -> bool:
        """Complete, but another writer's copy was sealed first: the pool's own word, since it depends on the order."""
        claim = self.pool.landings.get(grant.id)
        assert claim is not None
        return not claim.targets[self.number(slot.slot)].coming

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), seal=st.booleans())
    def finish_writing(self, data: st.DataObject, seal: bool) -> None:
        self.replay()
        ids = data.draw(st.lists(st.sampled_from(sorted(self.writing)), unique=True, min_size=1))
        by_session: dict[int, list[int]] = {}
        for id in ids:
            by_session.setdefault(self.writing[id].session, []).append(id)
        for session, own in by_session.items():
            if seal:
                before = len(self.pool.held.index)
                alive = [id for id in own if not self.writing[id].fenced]
                assert self.pool.seal(session, own, self.tick()) <= len(alive)
                assert len(self.pool.held.index) >= before
            else:
                assert self.pool.abandon(session, own, self.tick()) == len(own)
            for id in own:
                del self.writing[id]

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def session_ends(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        self.pool.session_ended(session, self.tick())
        self.tickets = {id: t for id, t in self.tickets.items() if t[0] != session}
        for writing in self.writing.values():
            writing.fenced = writing.fenced or writing.session == session
        for grant in self.grants:
            if grant.ask.reader == session and grant.reader_open:
                self.end(grant)

    @rule(name=st.sampled_from(MEMBERS))
    def writer_silent(self, name: str) -> None:
        broken = {landing.id for landing in self.pool.writer_silent(self.life(name), self.tick())}
        self.note_seals()
        for grant in self.grants:
            if grant.ask.writer == self.life(name) and grant.writer_open and not grant.fenced:
                assert (grant.id in broken) == any(len(done) < LAYERS for done in grant.landed.values())
                grant.fenced = True
                if grant.ask.reader is None:
                    self.end(grant)

    @rule(name=st.sampled_from(MEMBERS))
    def writer_gone(self, name: str) -> None:
        life = self.life(name)
        self.pool.writer_gone(life, self.tick())
        for grant in self.grants:
            if grant.ask.writer == life and grant.writer_open:
                self.through(grant)
        self.writing = {id: w for id, w in self.writing.items() if w.life != life}
        self.lives[name] = Life(life.member, Incarnation(life.incarnation + 1))
        for session, owner in list(self.sessions.items()):
            if owner == life:
                self.pool.session_ended(session, self.tick())
                self.tickets = {id: t for id, t in self.tickets.items() if t[0] != session}
                for grant in self.grants:
                    if grant.ask.reader == session and grant.reader_open:
                        self.end(grant)
                self.sessions[session] = self.life(name)

    @rule()
    def remade(self) -> None:
        fenced = self.pool.fenced_remote()
        waiting = [g for g in self.grants if g.fenced and g.writer_open and g.ask.reach is Reach.CARRIER]
        assert fenced == {grant.id for grant in waiting}
        assert self.pool.endpoint_remade(fenced, self.tick()) == len(waiting)
        for grant in waiting:
            self.through(grant)

    @rule(path=paths)
    def quarantine(self, path: str) -> None:
        self.replay()
        key = chain(path)[-1]
        below = {k for k in self.replayed if k.rstrip(b".").startswith(path.encode())}
        there = key in self.replayed
        assert self.pool.quarantine(key, "test") == (len(below) if there else 0)
        assert set(self.replay()) == (below if there else set())

    @rule(path=st.none() | paths)
    def clear(self, path: str | None) -> None:
        self.replay()
        before = len(self.replayed)
        done = self.pool.clear(None if path is None else [chain(path)[-1]])
        gone = self.replay()
        assert len(gone) == done.cleared
        if path is None:
            assert done.kept == before - done.cleared
            assert done.kept == len(self.pool.held.index) and self.pool.held.index.evictable(SLOT) == 0

    # Invariants, re-derived after every step.

    def note_seals(self) -> None:
        """Which slots of landings were sealed: by the pool's word, checked against what landed in them."""
        for grant in self.grants:
            claim = self.pool.landings.get(grant.id)
            for slot in grant.slots if claim else ():
                assert claim is not None
                if claim.targets[self.number(slot.slot)].row is not None and slot.block not in grant.sealed:
                    assert len(grant.landed[slot.block]) == LAYERS
                    assert slot.valid == TOKENS
                    assert not grant.fenced
                    grant.sealed.add(slot.block)

    @invariant()
    def landings_are_those_not_over(self) -> None:
        assert {claim.landing.id for claim in self.pool.landings} == {grant.id for grant in self.grants if not grant.over}

    @invariant()
    def every_slot_is_in_one_state_with_one_owner(self) -> None:
        self.note_seals()
        owners: dict[int, SlotState] = {}
        for grant in self.grants:
            for slot in () if grant.over else grant.slots:
                if slot.block not in grant.sealed:
                    number = self.number(slot.slot)
                    assert number not in owners
                    owners[number] = SlotState.FENCED if grant.fenced else SlotState.RESERVED
        for writing in self.writing.values():
            number = self.number(writing.slot)
            assert number not in owners
            owners[number] = SlotState.FENCED if writing.fenced else SlotState.RESERVED
        for slot in self.slots:
            state = self.slots.state(slot)
            assert state is owners.get(slot, state)
            assert (state in (SlotState.RESERVED, SlotState.FENCED)) == (slot in owners)
        assert sum(self.slots.counts.values()) + self.slots.free(SLOT) == TOTAL == self.slots.total(SLOT)
        for state, count in self.slots.counts.items():
            assert count == sum(self.slots.state(i) is state for i in self.slots)

    @invariant()
    def nothing_pinned_is_given_away(self) -> None:
        for _, refs in self.tickets.values():
            assert all(self.slots.state(self.number(ref)) is SlotState.SEALED for ref in refs)
        for grant in self.grants:
            if grant.reader_open and not grant.over:
                assert all(self.slots.state(self.number(s.slot)) is SlotState.SEALED for s in grant.held)

    @invariant()
    def the_index_is_prefix_closed_and_its_counts_are_right(self) -> None:
        index = self.pool.held.index
        entries = {key: index.get(key) for key in index.keys()}  # noqa: SIM118 not a dict
        for key, entry in entries.items():
            assert entry is not None
            assert self.slots.state(entry.slot) is SlotState.SEALED
            assert entry.pins >= 0
            assert entry.parent is None or entry.parent in entries
            assert entry.parent == parent_of(key)

        def busy(key: bytes) -> bool:
            entry = entries[key]
            assert entry is not None
            return entry.pins > 0 or any(busy(child) for child in entry.children)

        assert index.evictable(SLOT) == sum(not busy(key) for key in entries)

    @invariant()
    def events_replayed_give_the_index(self) -> None:
        self.replay()
        assert list(self.replayed) == list(self.pool.held.index.keys())
        shot = self.pool.snapshot()
        assert shot.number == self.next_event - 1
        assert shot.entries[0][1] == tuple(self.replayed)

    def teardown(self) -> None:
        """Everybody goes: everything is free."""
        for session in list(self.sessions):
            self.pool.session_ended(session, self.tick())
        for claim in self.pool.landings:
            self.pool.landings.end(claim.landing.id, self.tick())
        for life in self.pool.lives():
            self.pool.writer_gone(life, self.tick())
        self.pool.clear(None)
        numbers = self.pool.numbers()
        assert numbers["slots_free"] == TOTAL
        assert (numbers["pins"], numbers["tickets"], numbers["reservations"], numbers["landings_open"]) == (0, 0, 0, 0)
        assert not self.pool.held._writing
        assert not self.pool.landings._orphans
        assert len(self.slots._ground) == len(REGIONS)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
pytest.mark.timeout(120)(TestPool)
