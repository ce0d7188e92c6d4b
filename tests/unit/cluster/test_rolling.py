from __future__ import annotations

from dataclasses import replace

import pytest

from moonpool.cluster import restart
from moonpool.cluster.rolling import gap, in_order
from moonpool.core.errors import NoPath
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Member


def member(role: Role, number: int, node: str) -> Member:
    name = f"store-{node}" if role is Role.STORE else f"{role.value}-{number}"
    return Member(MemberId(name), role, NodeId(node), Incarnation(1), "127.0.0.1:1", 1)


ROLES = (Role.GATEWAY, Role.CONDUCTOR, Role.DECODE, Role.PREFILL, Role.STORE)
TWICE = [member(role, number, node) for number, node in enumerate("ab") for role in ROLES]
ONCE = [member(role, 0, "a") for role in ROLES]


def test_store_nodes_go_first_and_gateways_last() -> None:
    assert [m.id for m in in_order(TWICE)] == [
        *("store-a", "store-b", "prefill-0", "prefill-1", "decode-0", "decode-1"),
        *("conductor-0", "conductor-1", "gateway-0", "gateway-1"),
    ]


@pytest.mark.parametrize("name", [m.id for m in TWICE])
def test_with_two_of_each_nobody_is_missed(name: MemberId) -> None:
    assert gap(TWICE, name) == ""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gateway-0", "connections are refused"),
        ("conductor-0", "only ready conductor"),
        ("prefill-0", "no other prefill worker"),
        ("decode-0", "no other decode worker"),
        ("store-a", "with a ready store node"),
    ],
)
def test_the_only_one_is_missed(name: str, told: str) -> None:
    assert told in gap(ONCE, MemberId(name))


def test_one_that_is_not_ready_is_no_other_and_what_is_missing_anyway_is_not_said() -> None:
    unready = [replace(m, ready=False) if m.id == "decode-1" else m for m in TWICE]
    assert "no other decode worker" in gap(unready, MemberId("decode-0"))
    assert gap(unready, MemberId("decode-1")) == ""
    assert "with a ready store node" in gap(unready, MemberId("store-a"))
    assert gap(unready, MemberId("store-b")) == ""


def test_role_both_stands_in_for_prefill_and_decode() -> None:
    crowd = [*ONCE, member(Role.BOTH, 0, "b")]
    assert gap(crowd, MemberId("prefill-0")) == gap(crowd, MemberId("decode-0")) == gap(crowd, MemberId("store-a")) == ""
    assert gap([m for m in crowd if m.role not in (Role.PREFILL, Role.DECODE)], MemberId("both-0"))


@pytest.mark.parametrize(("newer", "told"), [(True, "it is back, but does not serve"), (False, "kept by a launcher")])
async def test_who_does_not_serve_again_is_told_with_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch, newer: bool, told: str
) -> None:
    one = TWICE[0]

    async def asked(member: Member) -> None:
        pass

    async def life(registry: str, member: MemberId) -> Member | None:
        return replace(one, incarnation=Incarnation(2), ready=False) if newer else None

    monkeypatch.setattr(restart, "_ask", asked)
    monkeypatch.setattr(restart, "_life_of", life)
    with pytest.raises(NoPath, match=told):
        await restart.restart("r:1", one, 0.1, lambda line: None)
