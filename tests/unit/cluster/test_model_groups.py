"""Groups of several models in one membership: who sees whom, who leads, and what two of them may not share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.etcd_members import TIMING as ETCD_TIMING
from support.etcd_members import eventually
from support.etcd_server import EtcdServer

from moonpool.cluster.groups import Group, belongs
from moonpool.cluster.leadership import Leadership
from moonpool.cluster.membership import Membership
from moonpool.cluster.registry import Registry
from moonpool.cluster.rolling import gap
from moonpool.cluster.roster import require_agreement
from moonpool.core.config import TimingConfig
from moonpool.core.errors import LayoutMismatch
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange

TIMING = TimingConfig(heartbeat_ms=50, silent_after_ms=400)
LAYOUT = KVLayout("m", layers=2, kv_heads=1, head_dim=8, dtype="float32")


def member(role: Role, model: str, node: str = "", number: int = 0, life: int = 1, **changes: object) -> Member:
    name = MemberId(f"{role.value}-{model}{number}")
    made = Member(name, role, NodeId(node or f"n-{model}"), Incarnation(life), "127.0.0.1:1", 1, model=model)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("role", "theirs", "mine", "seen"),
    [
        (Role.DECODE, "a", "a", True),
        (Role.DECODE, "b", "a", False),
        (Role.STORE, "", "a", True),
        (Role.GATEWAY, "b", "a", True),
        (Role.CONDUCTOR, "b", "", True),
    ],
)
def test_a_group_is_those_of_its_model_and_who_serves_everybody(role: Role, theirs: str, mine: str, seen: bool) -> None:
    assert belongs(member(role, theirs), mine) is seen


@pytest.mark.parametrize("other", [Role.STORE, Role.PREFILL, Role.DECODE, Role.BOTH])
def test_a_node_is_of_one_model(other: Role) -> None:
    known = [MemberChange(member(other, "a", node="n"), Liveness.LIVE)]
    with pytest.raises(LayoutMismatch, match=r"model differs: 'b' at decode-b0, 'a' at .*, both on node 'n'.*--node"):
        require_agreement(member(Role.DECODE, "b", node="n"), known)
    require_agreement(member(Role.DECODE, "b", node="n2"), known)
    require_agreement(member(Role.GATEWAY, "b", node="n"), known)


def test_layouts_agree_within_a_model_and_differ_between_models() -> None:
    known = [MemberChange(member(Role.DECODE, "a", layout=LAYOUT), Liveness.LIVE)]
    other = replace(LAYOUT, block_tokens=32)
    require_agreement(member(Role.PREFILL, "b", layout=other), known)
    with pytest.raises(LayoutMismatch, match="block_tokens"):
        require_agreement(member(Role.PREFILL, "a", node="n2", layout=other), known)


class Process:
    """One process's membership and whom it heard of."""

    def __init__(self, registry: str, model: str, timing: TimingConfig = TIMING) -> None:
        self.heard: list[tuple[str, str]] = []
        self.peers = Membership(registry, timing, lambda why, replaced: None, model)
        self.peers.subscribe(lambda change: self.heard.append((change.member.id, change.liveness.value)))

    async def until(self, condition: Callable[[], object]) -> None:
        await self.peers.until(lambda: bool(condition()), 5.0, "change")


async def test_a_process_hears_of_its_own_group_a_gateway_of_all_and_each_group_has_a_leader() -> None:
    registry = Registry(TIMING)
    address = await registry.start("127.0.0.1")
    watching = Process(address, "")
    conductors = {name: Process(address, name[0]) for name in ("a1", "a2", "b1")}
    try:
        for name, one in conductors.items():
            await one.peers.join(member(Role.CONDUCTOR, name[0], number=int(name[1])))
        places = {name: Leadership(one.peers, TIMING) for name, one in conductors.items()}
        try:
            await eventually(lambda: places["b1"].term() and (places["a1"].term() or places["a2"].term()))
            leads, follows = ("a1", "a2") if places["a1"].term() else ("a2", "a1")
            assert not places[follows].term()
            before = places["b1"].term()
            await places.pop(leads).close()
            await conductors[leads].peers.leave()
            await eventually(lambda: places[follows].term())
            assert places["b1"].term() == before, "the other group goes on as it was"
        finally:
            for place in places.values():
                await place.close()
        await watching.until(lambda: len(watching.peers.live(Role.CONDUCTOR)) == 2)
        assert {name for name, _ in conductors["b1"].heard} == {"conductor-b1"}
        assert {name for name, _ in conductors[follows].heard} == {"conductor-a1", "conductor-a2"}
        group = Group(watching.peers, "b")
        assert [m.id for m in group.live(Role.CONDUCTOR)] == ["conductor-b1"]
        assert group.get(MemberId("conductor-a1")) is None
        heard: list[str] = []
        group.subscribe(lambda change: heard.append(change.member.id))()
        assert heard == ["conductor-b1"]
    finally:
        await asyncio.gather(watching.peers.leave(), *(one.peers.leave() for one in conductors.values()))
        await registry.close()


async def test_a_name_that_comes_back_in_another_group_is_gone_from_the_first() -> None:
    registry = Registry(TIMING)
    address = await registry.start("127.0.0.1")
    first, second, seeing = (Process(address, model) for model in ("a", "b", "a"))
    try:
        await first.peers.join(replace(member(Role.CONDUCTOR, "a"), id=MemberId("c")))
        await seeing.until(lambda: seeing.peers.live(Role.CONDUCTOR))
        await second.peers.join(replace(member(Role.CONDUCTOR, "b", life=2), id=MemberId("c")))
        await seeing.until(lambda: not seeing.peers.live(Role.CONDUCTOR))
        assert seeing.heard == [("c", "live"), ("c", "gone")]
    finally:
        await asyncio.gather(*(one.peers.leave() for one in (first, second, seeing)))
        await registry.close()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


async def test_each_group_has_a_leader_of_its_own_in_etcd_whatever_its_name(etcd: EtcdServer) -> None:
    names = {"x/../y": "c1", "x": "c2"}
    seen = {model: Process(etcd.registry, model, ETCD_TIMING) for model in names}
    places: list[Leadership] = []
    try:
        for model, one in seen.items():
            await one.peers.join(replace(member(Role.CONDUCTOR, "", node="n"), id=MemberId(names[model]), model=model))
            places.append(Leadership(one.peers, ETCD_TIMING))
        await eventually(lambda: all(place.term() for place in places))
    finally:
        for place in places:
            await place.close()
        await asyncio.gather(*(one.peers.leave() for one in seen.values()))


def test_a_rolling_restart_counts_only_those_of_the_same_model_as_others() -> None:
    both = [member(Role.BOTH, "a"), member(Role.BOTH, "a", number=1), member(Role.BOTH, "b")]
    others = [member(Role.CONDUCTOR, "a"), member(Role.CONDUCTOR, "b"), member(Role.GATEWAY, "")]
    assert gap([*both, *others], MemberId("both-a0")) == ""
    assert gap([*both, *others], MemberId("both-b0")).startswith("of model 'b': no other prefill worker")
