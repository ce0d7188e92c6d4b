from __future__ import annotations

import pickle  # noqa: TID251  to write one, never to read one
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cluster.etcd.address import EtcdAddress, registry_of
from moonpool.cluster.etcd.book import Book, Item
from moonpool.cluster.etcd.records import MAX_BYTES, decode, encode
from moonpool.cluster.etcd.trust import Trust
from moonpool.core.config import ClusterConfig, Config
from moonpool.core.errors import ConfigError, InvalidRequest
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange

ADDRESS = EtcdAddress.parse("etcd://a:1/moonpool/test")
NAME = MemberId("prefill-0")
LIFE, BEAT = ADDRESS.life(NAME), ADDRESS.beat(NAME)


def life(incarnation: int = 1, liveness: Liveness = Liveness.LIVE, proof: str = "") -> MemberChange:
    return MemberChange(Member(NAME, Role.PREFILL, NodeId("a"), Incarnation(incarnation), "host:1", pid=1), liveness, proof)


def told(changes: list[MemberChange]) -> list[tuple[int, str]]:
    return [(c.member.incarnation, c.liveness.value) for c in changes]


# addresses


@pytest.mark.parametrize(
    ("text", "endpoints", "prefix"),
    [
        ("etcd://127.0.0.1:2379", ("127.0.0.1:2379",), "/moonpool"),
        ("etcd://etcd-0.etcd:2379,etcd-1.etcd:2379", ("etcd-0.etcd:2379", "etcd-1.etcd:2379"), "/moonpool"),
        ("etcd://[::1]:2379/teams/red/", ("[::1]:2379",), "/teams/red"),
    ],
)
def test_addresses_name_endpoints_and_a_prefix(text: str, endpoints: tuple[str, ...], prefix: str) -> None:
    address = EtcdAddress.parse(text)
    assert (address.endpoints, address.prefix) == (endpoints, prefix)
    assert EtcdAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    "text", ["etcd://", "etcd://host", "etcd://host:0", "etcd://a:1,,b:2", "etcd://a:1/../x y", "etcd://a:70000"]
)
def test_a_malformed_address_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.registry: .*write etcd://host:port"):
        EtcdAddress.parse(text)


def test_clusters_share_an_etcd_under_their_names() -> None:
    assert registry_of(Config(cluster=ClusterConfig(name="red", registry="etcd://a:1"))) == "etcd://a:1/moonpool/red"
    assert registry_of(Config(cluster=ClusterConfig(registry="a:1"))) == "a:1"
    assert registry_of(Config()) == ""


# records


def test_a_record_comes_back_whole() -> None:
    layout = KVLayout("m", layers=2, kv_heads=1, head_dim=8, dtype="float32")
    member = Member(
        NAME, Role.PREFILL, NodeId("a"), Incarnation(7), "h:1", 9, layout, "m", "k", 10, 11, False, {"carrier": "segment"}
    )
    change = MemberChange(member, Liveness.SILENT, "why")
    assert decode(NAME, encode(change)) == change


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_a_record_or_refused(value: bytes) -> None:
    try:
        change = decode(NAME, value)
    except InvalidRequest:
        return
    assert change.member.id == NAME


def test_a_pickle_an_oversized_value_and_the_record_of_another_are_refused_and_counted(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (marker,)

    book = Book(ADDRESS)
    other = encode(life()).replace(b"prefill-0", b"prefill-1")
    long = encode(replace(life(), proof="x" * MAX_BYTES))
    values = [pickle.dumps(Bomb()), long, other]
    for revision, value in enumerate(values, 1):
        assert book.event(Item(LIFE, value, revision)) == []
    assert book.refused == len(values)
    assert not marker.exists()


# the book


def test_a_life_is_told_once_it_beats_and_is_a_suspect_once_it_does_not() -> None:
    book = Book(ADDRESS)
    assert book.event(Item(LIFE, encode(life()), 5)) == []
    assert told(book.event(Item(BEAT, b"1", 5))) == [(1, "live")]
    assert book.verdicts() == []
    assert book.event(Item(BEAT, None, 6)) == []
    (verdict,) = book.verdicts()
    assert (verdict.change.liveness, verdict.change.proof, verdict.revision, verdict.lapsed) == (
        Liveness.SILENT,
        "its lease lapsed",
        5,
        True,
    )
    assert told(book.event(Item(LIFE, encode(verdict.change), 7))) == [(1, "silent")]
    assert book.verdicts() == []


def test_whoever_lives_stays_known_when_etcd_comes_back_empty_and_is_told_once() -> None:
    book = Book(ADDRESS)
    both = [Item(LIFE, encode(life()), 90), Item(BEAT, b"1", 90)]
    assert told(book.restart(both, 100)) == [(1, "live")]
    assert book.restart([], 1) == []
    assert [v.change.proof for v in book.verdicts()] == ["unknown to the registry"]
    assert [told(book.event(Item(item.key, item.value, 2))) for item in both] == [[], []]
    assert book.verdicts() == []


def test_a_life_left_over_without_a_lease_is_not_told_before_it_is_judged() -> None:
    book = Book(ADDRESS)
    assert book.restart([Item(LIFE, encode(life()), 3)], 9) == []
    (verdict,) = book.verdicts()
    assert told(book.event(Item(LIFE, encode(verdict.change), 10))) == [(1, "silent")]


def test_what_a_reread_has_told_is_not_told_again_by_a_watch_that_lags() -> None:
    book = Book(ADDRESS)
    book.restart([Item(LIFE, encode(life(2)), 8), Item(BEAT, b"2", 8)], 10)
    assert book.event(Item(BEAT, None, 7)) == []
    assert book.event(Item(LIFE, encode(life(1, Liveness.SILENT)), 7)) == []
    assert book.verdicts() == []


def test_a_silent_life_that_an_emptied_etcd_took_for_a_live_one_is_contested() -> None:
    book = Book(ADDRESS)
    book.restart([Item(LIFE, encode(life(1, Liveness.SILENT, "froze")), 3)], 9)
    book.restart([], 1)
    assert book.event(Item(LIFE, encode(life()), 2)) == []
    (verdict,) = book.verdicts()
    assert (verdict.change.proof, verdict.revision, verdict.lapsed) == ("froze", 2, False)
    book.event(Item(LIFE, encode(verdict.change), 3))
    assert book.verdicts() == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["live", "silent", "gone", "beat", "lapse", "lost", "empty", "reread"]), st.integers(1, 3)),
        max_size=40,
    )
)
def test_a_life_never_goes_back_and_older_lives_are_gone_before_newer_ones_live(steps: list[tuple[str, int]]) -> None:
    """Whatever etcd says, in whatever order, emptied in between."""
    book, order = Book(ADDRESS), list(Liveness)
    data: dict[bytes, Item] = {}
    seen: dict[int, Liveness] = {}
    revision, newest = 0, 0
    for step, incarnation in steps:
        revision += 1
        changes: list[MemberChange] = []
        if step in ("empty", "reread"):
            data, revision = ({}, 1) if step == "empty" else (data, revision)
            changes = book.restart(list(data.values()), revision)
        else:
            key = BEAT if step in ("beat", "lapse") else LIFE
            value = encode(life(incarnation, Liveness(step))) if step in order else b"1" if step == "beat" else None
            data[key] = Item(key, value, revision)
            changes = book.event(data[key])
            if value is None:
                del data[key]
        for change in changes:
            life_ = change.member.incarnation
            assert life_ >= newest or change.liveness is Liveness.GONE
            assert order.index(change.liveness) >= order.index(seen.get(life_, Liveness.LIVE))
            if life_ > newest and newest:
                assert seen[newest] is Liveness.GONE
            seen[life_], newest = change.liveness, max(newest, life_)


# trust


def test_silence_counts_against_nobody_until_all_had_time_to_come_back() -> None:
    trust = Trust(gap_s=0.5, grace_s=10.0)
    assert not trust.may_judge(0.0)
    trust.answered(1.0)
    for tenth in range(14, 110, 4):
        trust.answered(tenth / 10)
    assert not trust.may_judge(10.9)
    trust.answered(11.0)
    assert trust.may_judge(11.0)
    assert not trust.may_judge(11.6)  # no answer for longer than usual: it may be etcd
    trust.answered(13.0)
    assert not trust.may_judge(13.1)
    trust.lost()
    trust.answered(13.2)
    assert not trust.may_judge(23.1)
