"""Membership over a real etcd: the same meaning as over the embedded registry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.etcd_members import NAME, Seen, member, members, operator
from support.etcd_server import EtcdServer

from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.cluster.etcd.client import Put
from moonpool.cluster.etcd.records import encode
from moonpool.core.errors import LayoutMismatch, NoPath
from moonpool.core.ids import Incarnation, NodeId, Role
from moonpool.core.membership import Liveness, MemberChange


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def registry(shared: EtcdServer, request: pytest.FixtureRequest) -> str:
    """A cluster of this test's own in the shared etcd."""
    return f"etcd://127.0.0.1:{shared.port}/moonpool/{request.node.name[:60]}"


async def test_joining_changing_and_leaving_are_watched_in_order(registry: str) -> None:
    async with members(registry, 2) as (one, other):
        await one.peers.join(member())
        await other.hears((NAME, 1, "live"))
        one.peers.update(replace(member(), ready=False))
        await other.until(lambda: [m.ready for m in other.peers.live(Role.PREFILL)] == [False])
        await one.peers.leave()
        await other.hears((NAME, 1, "gone"))
        assert [t[2] for t in other.told] == ["live", "live", "gone"]
        assert other.known().proof == "left"


async def test_a_late_watcher_hears_of_the_living_and_of_the_dead(registry: str) -> None:
    async with members(registry, 2) as (one, other):
        await one.peers.join(member())
        await other.peers.join(member("prefill-1"))
        await other.peers.leave()
        late = Seen(registry)
        await late.hears((NAME, 1, "live"), ("prefill-1", 1, "gone"))
        await late.peers.leave()


async def test_live_members_are_found_by_role_and_node(registry: str) -> None:
    async with members(registry, 3) as (a, b, c):
        await a.peers.join(member("store-a", Role.STORE))
        await b.peers.join(member("prefill-1"))
        await c.peers.join(member("prefill-0"))
        await a.until(lambda: len(a.peers.everybody()) == 3)
        assert [m.id for m in a.peers.live(Role.PREFILL)] == ["prefill-0", "prefill-1"]
        store = a.peers.store_of(NodeId("a"))
        assert store is not None
        assert store.id == "store-a"


async def test_a_lapsed_lease_makes_silent_and_only_a_report_makes_gone(registry: str) -> None:
    async with members(registry, 2) as (watcher, other), operator(registry) as (etcd, address):
        lease, _ = await etcd.grant(1)
        puts = [
            Put(address.life(NAME), encode(MemberChange(member(), Liveness.LIVE))),
            Put(address.beat(NAME), b"1", lease),
        ]
        await etcd.put_if({}, puts)  # a process that registered and then froze
        await watcher.hears((NAME, 1, "live"), (NAME, 1, "silent"))
        await other.hears((NAME, 1, "silent"))
        assert watcher.known().proof == "its lease lapsed"
        assert not watcher.known().member.ready
        watcher.peers.report_gone(NAME, Incarnation(1), "pidfd")
        await other.hears((NAME, 1, "gone"))
        assert [t[2] for t in other.told] == ["live", "silent", "gone"]


async def test_a_life_declared_silent_is_fenced_and_comes_back_as_a_newer_one(registry: str) -> None:
    async with members(registry, 2) as (one, watcher), operator(registry) as (etcd, address):
        await one.peers.join(member())
        await watcher.hears((NAME, 1, "live"))
        item = await etcd.get(address.life(NAME))
        assert item is not None
        silent = encode(MemberChange(replace(member(), ready=False), Liveness.SILENT, "it froze"))
        await etcd.put_if({item.key: item.revision}, [Put(item.key, silent)])
        why, replaced = await asyncio.wait_for(one.fenced, 5.0)
        assert not replaced and "declared silent: it froze" in why
        await one.peers.join(member(incarnation=2))
        await watcher.hears((NAME, 1, "silent"), (NAME, 1, "gone"), (NAME, 2, "live"))


async def test_a_newer_life_fences_the_older_one(registry: str) -> None:
    async with members(registry, 3) as (older, newer, watcher):
        await older.peers.join(member())
        await watcher.hears((NAME, 1, "live"))
        await newer.peers.join(member(incarnation=2))
        _, replaced = await asyncio.wait_for(older.fenced, 5.0)
        assert replaced
        await watcher.hears((NAME, 1, "gone"), (NAME, 2, "live"))
        await older.peers.leave()  # takes nothing of the newer life along
        late = Seen(registry)
        await late.hears((NAME, 2, "live"))
        await late.peers.leave()


async def test_a_different_model_is_refused_naming_both(registry: str) -> None:
    async with members(registry, 2) as (one, other):
        await one.peers.join(replace(member(), model="smollm2"))
        with pytest.raises(LayoutMismatch, match="'other' at prefill-1, 'smollm2' at prefill-0"):
            await other.peers.join(replace(member("prefill-1"), model="other"))
        assert [t[0] for t in one.told] == [NAME]


async def test_two_that_disagree_and_come_at_the_same_instant_are_not_both_welcome(registry: str) -> None:
    async with members(registry, 2) as (one, other):
        joined = await asyncio.gather(
            one.peers.join(replace(member(), model="a")),
            other.peers.join(replace(member("prefill-1"), model="b")),
            return_exceptions=True,
        )
        assert any(isinstance(end, LayoutMismatch) for end in joined)


async def test_joining_without_etcd_ends_in_bounded_time_naming_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.cluster.etcd.link.JOIN_S", 0.5)
    async with members("etcd://127.0.0.1:1,localhost:1", 1) as (one,):
        with pytest.raises(NoPath, match=r"etcd://127\.0\.0\.1:1,localhost:1/moonpool in .*does etcd run"):
            await one.peers.join(member())


async def test_names_are_resolved_and_a_dead_endpoint_is_passed_over(shared: EtcdServer, registry: str) -> None:
    prefix = EtcdAddress.parse(registry).prefix
    async with members(f"etcd://127.0.0.1:1,localhost:{shared.port}{prefix}", 1) as (one,):
        await one.peers.join(member())
        await one.hears((NAME, 1, "live"))


async def test_a_process_that_joins_anew_in_another_role_ends_its_older_life_and_is_not_fenced(registry: str) -> None:
    async with members(registry, 2) as (one, other):
        await one.peers.join(member())
        await other.hears((NAME, 1, "live"))
        await one.peers.join(member(NAME, Role.DECODE, 2))
        await other.hears((NAME, 2, "live"))
        assert other.told == [(NAME, 1, "live"), (NAME, 1, "gone"), (NAME, 2, "live")]
        assert [m.id for m in other.peers.live(Role.DECODE)] == [NAME]
        assert not other.peers.live(Role.PREFILL)
        assert not one.fenced.done()
