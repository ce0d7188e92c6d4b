"""Who acts in the background: one at a time, whatever is frozen, cut off, emptied or restarted."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from support.etcd_members import member

from moonpool.cluster.election import NOBODY, Election, Lead, Tenure
from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.cluster.etcd.book import Item
from moonpool.cluster.etcd.standing import Bid, stand
from moonpool.core.ids import Incarnation, MemberId, Role

LEASE_S = 2.0
A, B = MemberId("conductor-0"), MemberId("conductor-1")
ONE = Incarnation(1)


def election(now: float = 0.0) -> Election:
    """One whose first lease has passed."""
    return Election(LEASE_S, now - LEASE_S)


def test_the_first_to_ask_leads_until_its_lease_ends_unrenewed() -> None:
    held = election()
    assert held.ask(A, ONE, 0, 0, 0.0) == Lead(A, ONE, 1, LEASE_S)
    assert held.ask(B, ONE, 0, 0, 1.9) == Lead(A, ONE, 1, 0.0)
    assert held.ask(A, ONE, 1, 1, 1.9).lease_s == LEASE_S
    assert held.ask(B, ONE, 1, 0, 3.8).leader == A
    assert held.ask(B, ONE, 1, 0, 4.0) == Lead(B, ONE, 2, LEASE_S)
    assert held.ask(A, ONE, 1, 0, 4.1) == Lead(B, ONE, 2, 0.0)


def test_one_that_left_or_is_proved_dead_is_followed_at_once_one_that_is_silent_is_not() -> None:
    held = election()
    held.ask(A, ONE, 0, 0, 0.0)
    held.ended(A, Incarnation(2))
    assert held.ask(B, ONE, 1, 0, 0.1).leader == A
    held.ended(A, ONE)
    assert held.ask(B, ONE, 1, 0, 0.2) == Lead(B, ONE, 2, LEASE_S)


def test_a_registry_that_comes_back_empty_lets_the_leader_go_on_and_grants_nothing_before_its_lease_is_over() -> None:
    empty = Election(LEASE_S, 10.0)
    assert empty.ask(B, ONE, 7, 0, 10.1).leader is None
    assert empty.ask(A, ONE, 7, 7, 10.2) == Lead(A, ONE, 7, LEASE_S)
    again = Election(LEASE_S, 20.0)
    assert again.ask(B, ONE, 7, 0, 21.9) == Lead(None, Incarnation(0), 7, 0.0)
    assert again.ask(B, ONE, 7, 0, 22.0) == Lead(B, ONE, 8, LEASE_S)


def test_a_newer_life_does_not_hold_what_an_older_one_held() -> None:
    held, tenure = election(), Tenure()
    tenure.told(held.ask(A, ONE, 0, 0, 0.0), 0.0)
    assert tenure.term(ONE, 1.0) == 1
    assert tenure.term(Incarnation(2), 1.0) == 0
    assert tenure.term(None, 1.0) == 0, "fenced"
    assert held.ask(A, Incarnation(2), 1, 0, 1.0).lease_s == 0.0
    held.ended(A, ONE)
    assert held.ask(A, Incarnation(2), 1, 0, 1.1) == Lead(A, Incarnation(2), 2, LEASE_S)


@dataclass
class World:
    """A registry and two conductors. Asking and hearing the answer are steps of their own, any time apart."""

    now: float = 0.0
    held: Election = field(default_factory=lambda: Election(LEASE_S, 0.0))
    tenures: dict[MemberId, Tenure] = field(default_factory=lambda: {A: Tenure(), B: Tenure()})
    known: dict[MemberId, int] = field(default_factory=lambda: {A: 0, B: 0})
    coming: dict[MemberId, list[tuple[Lead, float]]] = field(default_factory=lambda: {A: [], B: []})

    def do(self, what: str, who: MemberId) -> None:
        tenure = self.tenures[who]
        match what:
            case "ask":
                said = self.held.ask(who, ONE, self.known[who], tenure.term(ONE, self.now), self.now)
                self.coming[who].append((said, self.now))
            case "hear" if self.coming[who]:
                said, asked_at = self.coming[who].pop(0)
                tenure.told(said, asked_at)
                self.known[who] = max(self.known[who], said.term)
            case "empty":
                self.held = Election(LEASE_S, self.now)

    def leading(self) -> list[int]:
        return [term for tenure in self.tenures.values() if (term := tenure.term(ONE, self.now))]


@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "ask", "hear", "hear", "empty"]), st.sampled_from([A, B]), st.floats(0, 1.5)),
        max_size=80,
    )
)
def test_never_do_two_lead_and_terms_only_grow(steps: list[tuple[str, MemberId, float]]) -> None:
    world, newest = World(), 0
    for what, who, passed in steps:
        world.now += passed
        world.do(what, who)
        leading = world.leading()
        assert len(leading) <= 1
        for term in leading:
            assert term >= newest
            newest = term


# etcd


ADDRESS = EtcdAddress.parse("etcd://h:1/moonpool/test")


@dataclass
class Keys:
    """etcd, as far as two keys go."""

    items: dict[bytes, Item] = field(default_factory=dict)
    revision: int = 0

    def stand(self, name: str, known: int = 0, life: int = 1) -> Lead | Bid:
        me = member(name, Role.CONDUCTOR, life)
        return stand(ADDRESS, me, known, self.items.get(ADDRESS.leader("")), self.items.get(ADDRESS.term))

    def write(self, bid: Bid) -> bool:
        if any((self.items[key].revision if key in self.items else 0) != revision for key, revision in bid.expected.items()):
            return False
        self.revision += 1
        for key, value in ((ADDRESS.leader(""), bid.leader), (ADDRESS.term, bid.newest)):
            self.items[key] = Item(key, value, self.revision)
        return True


def bid(found: Lead | Bid) -> Bid:
    assert isinstance(found, Bid)
    return found


def test_of_two_that_stand_at_once_in_etcd_one_leads() -> None:
    keys = Keys()
    first, second = bid(keys.stand(A)), bid(keys.stand(B))
    assert keys.write(first) and not keys.write(second)
    assert keys.stand(B) == Lead(A, ONE, 1, 0.0) == keys.stand(A)


def test_terms_go_on_from_what_etcd_or_anybody_remembers() -> None:
    keys = Keys()
    assert keys.write(bid(keys.stand(A, known=4)))
    del keys.items[ADDRESS.leader("")]  # its lease lapsed
    assert bid(keys.stand(B)).term == 6
    keys.items.clear()  # etcd came back empty
    assert bid(keys.stand(B, known=5)).term == 6


def test_a_newer_life_under_the_same_lease_begins_a_new_term() -> None:
    keys = Keys()
    keys.write(bid(keys.stand(A)))
    assert bid(keys.stand(A, life=2)).term == 2


@given(st.binary(max_size=300), st.binary(max_size=40))
def test_what_others_write_there_is_a_leader_or_gives_way(leader: bytes, newest: bytes) -> None:
    items = [Item(ADDRESS.leader(""), leader, 3), Item(ADDRESS.term, newest, 4)]
    found = stand(ADDRESS, member(A, Role.CONDUCTOR), 0, *items)
    if isinstance(found, Bid):
        assert found.expected == {ADDRESS.leader(""): 3, ADDRESS.term: 4} and found.term > 0
    else:
        assert found.leader and found.term


def test_nobody_is_no_leader() -> None:
    tenure = Tenure()
    tenure.told(NOBODY, 5.0)
    assert tenure.term(ONE, 5.0) == 0 and tenure.leader is None
