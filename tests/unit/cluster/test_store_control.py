"""The control API over two real store nodes that found each other through a registry."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from support.registered_stores import store_cluster
from support.store import LAYOUT, block_keys, member, worker

from moonpool.cluster.store_control import StoreControl, What
from moonpool.cluster.store_events import Line, StoreEvents
from moonpool.core.errors import InvalidRequest, NoPath
from moonpool.core.ids import Role
from moonpool.core.use import Use

KEYS = block_keys("k", 5)


async def test_lookup_says_what_each_node_holds_and_pins_nothing(tmp_path: Path) -> None:
    async with store_cluster(tmp_path) as cluster, await StoreControl.open(cluster.registry) as control:
        await cluster.publish("a", KEYS[:3])
        a, b = await control.inspect(KEYS)
        assert (a.node, a.facts["leading"], a.facts["found"], a.facts["asked"]) == ("a", 3, 3, 5)
        assert [(row["block"], row["key"], row["tiers"]) for row in a.rows] == [
            (i, key.hex(), "g2") for i, key in enumerate(KEYS[:3])
        ]
        assert (b.facts["leading"], b.rows) == (0, ())
        assert cluster.nodes["a"].numbers()["pins"] == 0


async def test_a_copy_is_kept_at_its_target_and_a_second_one_moves_nothing(tmp_path: Path) -> None:
    async with store_cluster(tmp_path) as cluster, await StoreControl.open(cluster.registry) as control:
        await cluster.publish("a", KEYS[:4])
        await cluster.publish("b", KEYS[:1])
        plan = await control.copy(KEYS, "a", "b", dry_run=True)
        assert (plan.facts["wanted"], plan.facts["brought"]) == (4, 3)
        assert (await control.inspect(KEYS))[1].facts["leading"] == 1
        done = await control.copy(KEYS, "a", "b", dry_run=False)
        assert (done.node, done.facts["blocks"], done.facts["brought"], done.facts["carrier"]) == ("b", 4, 3, "memory")
        again = await control.copy(KEYS, "a", "b", dry_run=False)
        assert (again.facts["blocks"], again.facts["brought"], again.facts["bytes"]) == (4, 0, 0)
        assert [r.facts["leading"] for r in await control.inspect(KEYS)] == [4, 4]


async def test_a_move_drops_at_the_source_what_the_target_has_and_nothing_that_others_follow(tmp_path: Path) -> None:
    async with store_cluster(tmp_path) as cluster, await StoreControl.open(cluster.registry) as control:
        await cluster.publish("a", KEYS)
        branch = block_keys("other", 2)
        await cluster.publish("a", branch, parent=KEYS[1])
        plan = await control.move(KEYS, "a", "b", dry_run=True)
        assert [r.node for r in plan] == ["b", "a"]
        assert (plan[1].facts["cleared"], plan[1].facts["kept"]) == (3, 2)
        assert [r.facts["leading"] for r in await control.inspect(KEYS)] == [5, 0]
        done = await control.move(KEYS, "a", "b", dry_run=False)
        assert done[0].facts["blocks"] == 5
        assert done[1].facts == plan[1].facts
        assert [r.facts["leading"] for r in await control.inspect(KEYS)] == [2, 5]
        assert (await control.inspect([*KEYS[:2], *branch]))[0].facts["leading"] == 4


async def test_what_continues_a_prompt_moves_with_it_and_is_copied_only_with_it_where_asked(tmp_path: Path) -> None:
    async with store_cluster(tmp_path) as cluster, await StoreControl.open(cluster.registry) as control:
        await cluster.publish("a", KEYS)
        branch = block_keys("other", 2)
        await cluster.publish("a", branch, parent=KEYS[2])
        assert (await control.copy(KEYS[:3], "a", "b", dry_run=True)).facts["wanted"] == 3
        assert (await control.copy(KEYS[:3], "a", "b", following=True, dry_run=True)).facts["wanted"] == 7
        done = await control.move(KEYS[:3], "a", "b", dry_run=False)
        assert (done[0].facts["brought"], done[1].facts["cleared"], done[1].facts["kept"]) == (7, 7, 0)
        for chain in (KEYS, [*KEYS[:3], *branch]):
            a, b = await control.inspect(chain)
            assert (a.facts["leading"], b.facts["leading"]) == (0, len(chain))


async def test_clearing_a_block_takes_what_follows_it_but_nothing_in_use(tmp_path: Path) -> None:
    async with store_cluster(tmp_path) as cluster, await StoreControl.open(cluster.registry) as control:
        await cluster.publish("a", KEYS)
        async with worker(cluster.nodes["a"]) as (reader, _):
            ticket = await reader.pin(KEYS[:3])
            plan = (await control.clean(What(keys=(KEYS[1],)), dry_run=True))[0]
            assert (plan.facts["cleared"], plan.facts["kept"]) == (2, 2)
            assert plan.facts["bytes"] == 2 * LAYOUT.slot_bytes
            assert (await control.inspect(KEYS))[0].facts["leading"] == 5
            assert (await control.clean(What(keys=(KEYS[1],)), dry_run=False))[0].facts == plan.facts
            assert (await control.inspect(KEYS))[0].facts["leading"] == 3
            await reader.unpin(ticket)
        assert (await control.clean(What(everything=True), dry_run=False))[0].facts["cleared"] == 3
        assert cluster.nodes["a"].numbers()["slots_sealed"] == 0


@pytest.mark.parametrize("what", [What(), What(keys=(KEYS[0],), everything=True), What(model="m", tenant="t")])
async def test_clearing_by_nothing_or_by_two_things_is_refused_and_clears_nothing(tmp_path: Path, what: What) -> None:
    async with store_cluster(tmp_path, ["a"]) as cluster, await StoreControl.open(cluster.registry) as control:
        await cluster.publish("a", KEYS)
        with pytest.raises(InvalidRequest, match="exactly one of"):
            await control.clean(what, dry_run=False)
        assert (await control.inspect(KEYS))[0].facts["leading"] == 5


async def test_a_node_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    async with store_cluster(tmp_path) as cluster:
        await cluster.publish("b", KEYS)
        gone = member("store-a", Role.STORE, "a", address="127.0.0.1:1")
        async with StoreControl([gone, cluster.nodes["b"].member]) as control:
            a, b = await control.inspect(KEYS)
            assert "store node a cannot be reached" in a.trouble
            assert b.facts["leading"] == 5
            assert "store node a cannot be reached" in (await control.copy(KEYS, "b", "a", dry_run=False)).trouble


async def test_nodes_are_named_by_their_ids(tmp_path: Path) -> None:
    async with store_cluster(tmp_path) as cluster:
        async with await StoreControl.open(cluster.registry, ["b"]) as control:
            assert [m.node for m in control.stores] == ["b"]
        with pytest.raises(InvalidRequest, match="'c' is no live store node; use one of a, b"):
            await StoreControl.open(cluster.registry, ["c"])
        async with await StoreControl.open(cluster.registry) as control:
            with pytest.raises(InvalidRequest, match="name another node"):
                await control.copy(KEYS, "a", "a", dry_run=True)


async def test_what_one_node_refuses_and_another_does_is_that_nodes_trouble(tmp_path: Path) -> None:
    lossy = {"codecs": ("int8",), "lossy_for": ("alice",)}
    async with store_cluster(tmp_path, store=lossy) as cluster, store_cluster(tmp_path / "other", ["c"]) as strict:
        await cluster.publish("a", KEYS, tenant="alice", values=True)
        async with StoreControl([cluster.nodes["a"].member, strict.nodes["c"].member]) as control:
            a, c = await control.compress(KEYS, "int8", dry_run=False)
            assert (a.facts["compressed"], a.trouble) == (5, "")
            assert "store.codecs of node c allows none" in c.trouble


async def test_without_store_nodes_there_is_nothing_to_control(tmp_path: Path) -> None:
    async with store_cluster(tmp_path, []) as cluster:
        with pytest.raises(NoPath, match="no store node is live"):
            await StoreControl.open(cluster.registry)


async def test_watching_begins_with_what_is_held_and_follows_every_change(tmp_path: Path) -> None:
    async with store_cluster(tmp_path, ["a"]) as cluster:
        await cluster.publish("a", KEYS[:2])
        events = StoreEvents(cluster.registry, cluster.settings.timing)
        async with asyncio.timeout(20), aclosing(events.lines()) as lines:
            assert [await anext(lines) for _ in range(2)] == [Line("a", "live"), Line("a", "holds", "g2", 2)]
            await cluster.publish("a", KEYS[2:], parent=KEYS[1])
            assert await anext(lines) == Line("a", "stored", "g2", 3, tuple(KEYS[2:]))
            async with await StoreControl.open(cluster.registry) as control:
                await control.clean(What(keys=(KEYS[3],)), dry_run=False)
            assert await anext(lines) == Line("a", "removed", "g2", 2, (KEYS[4], KEYS[3]))


async def test_lossy_copies_travel_as_they_are_and_are_moved_like_full_blocks(tmp_path: Path) -> None:
    lossy = {"codecs": ("int8",), "lossy_for": ("alice",)}
    async with store_cluster(tmp_path, store=lossy) as cluster, await StoreControl.open(cluster.registry) as control:
        await cluster.publish("a", KEYS, tenant="alice", values=True)
        (done,) = (r for r in await control.compress(KEYS, "int8", dry_run=False) if r.node == "a")
        assert done.facts["compressed"] == 5
        assert {row["codec"] for row in (await control.inspect(KEYS))[0].rows} == {"int8"}
        moved = await control.move(KEYS, "a", "b", dry_run=False)
        assert (moved[0].facts["blocks"], moved[0].facts["brought"]) == (5, 5)
        assert (moved[1].facts["cleared"], moved[1].facts["kept"]) == (5, 0)
        a, b = await control.inspect(KEYS)
        assert (a.facts["leading"], b.facts["leading"]) == (0, 5)
        assert {(row["codec"], row["tenant"]) for row in b.rows} == {("int8", "alice")}
        async with worker(cluster.nodes["b"]) as (reader, _):
            for tenant, blocks in (("bob", 0), ("alice", 5)):
                ticket = await reader.pin(KEYS, Use(tenant), 5_000)
                assert len(ticket.slots) == blocks
                await reader.unpin(ticket)
        assert (await control.clean(What(keys=(KEYS[0],)), dry_run=False))[1].facts["cleared"] == 10  # decoded ones, too
