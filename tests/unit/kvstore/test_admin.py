"""What operators may do to one store node, over gRPC, and what goes when blocks are dropped, against a dumb reference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.store import LAYOUT, Roll, block_bytes, block_keys, config, store_node, worker

from moonpool.core.ids import Incarnation, MemberId, NodeId
from moonpool.core.layout import SLOT_ALIGN
from moonpool.core.use import Use
from moonpool.kvstore.claims import Life
from moonpool.kvstore.control import Control
from moonpool.kvstore.eviction.make import make_policy
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.slots import SlotMap
from moonpool.wire import pb

KEYS = block_keys("k", 5)
NOW = 1.0
ME = Life(MemberId("w"), Incarnation(1))


@asynccontextmanager
async def admin(folder: Path, **sections: dict[str, Any]) -> AsyncIterator[tuple[StoreNode, Any]]:
    async with store_node(config(folder, **sections), Roll()) as node:
        async with grpc.aio.insecure_channel(node.member.address) as channel:
            yield node, pb.store_admin_rpc.StoreAdminStub(channel)


async def publish(node: StoreNode, keys: list[bytes], parent: bytes | None = None, use: Use = Use()) -> None:
    async with worker(node) as (client, _):
        assert await client.publish([(key, block_bytes(key)) for key in keys], parent, use) == len(keys)


def inspect(keys: list[bytes]) -> pb.store_admin.InspectRequest:
    return pb.store_admin.InspectRequest(keys=keys)


async def test_blocks_are_told_with_their_tier_layout_and_owner(tmp_path: Path) -> None:
    async with admin(tmp_path) as (node, stub):
        await publish(node, KEYS[:2], use=Use("alice"))
        found = await stub.Inspect(inspect(KEYS))
        assert found.leading == 2
        assert [list(one.tiers) for one in found.blocks] == [["g2"], ["g2"], [], [], []]
        one = found.blocks[1]
        assert (one.tenant, one.layout, one.bytes, one.codec) == ("alice", LAYOUT.fingerprint, LAYOUT.slot_bytes, "")
        assert (await stub.Inspect(inspect(KEYS[1:]))).leading == 1


async def test_a_tenants_blocks_and_a_models_blocks_are_cleared_and_others_stay(tmp_path: Path) -> None:
    async with admin(tmp_path) as (node, stub):
        other = block_keys("b", 3)
        await publish(node, KEYS, use=Use("alice"))
        await publish(node, other, KEYS[1], Use("bob"))
        plan = await stub.Clean(pb.store_admin.CleanRequest(tenant="alice", dry_run=True))
        assert (plan.cleared, plan.kept) == (3, 2)  # bob's follow alice's first two
        assert (await stub.Inspect(inspect(KEYS))).leading == 5
        assert await stub.Clean(pb.store_admin.CleanRequest(tenant="alice")) == plan
        assert (await stub.Inspect(inspect(KEYS))).leading == 2
        assert (await stub.Inspect(inspect(other))).leading == 3
        assert (await stub.Clean(pb.store_admin.CleanRequest(model="somebody else's"))).cleared == 0
        assert (await stub.Clean(pb.store_admin.CleanRequest(model=LAYOUT.model))).cleared == 5
        assert (await stub.Describe(pb.types.Empty())).numbers["blocks_findable"] == 0


async def test_a_description_counts_the_blocks_of_each_layout(tmp_path: Path) -> None:
    async with admin(tmp_path) as (node, stub):
        await publish(node, KEYS)
        (one,) = (await stub.Describe(pb.types.Empty())).layouts
        assert (one.layout.model, one.blocks, one.bytes) == (LAYOUT.model, 5, 5 * LAYOUT.slot_bytes)


async def test_holds_outlive_sessions_keep_blocks_and_end_by_name(tmp_path: Path) -> None:
    async with admin(tmp_path) as (node, stub):
        await publish(node, KEYS)
        hold = pb.store_admin.HoldRequest(tenant="alice", keys=KEYS[:3], hard=True)
        assert (await stub.Hold(hold)).held == 3
        assert [one.held for one in (await stub.Inspect(inspect(KEYS))).blocks] == ["hard"] * 3 + [""] * 2
        (alice,) = [one for one in (await stub.Quotas(pb.types.Empty())).tenants if one.tenant == "alice"]
        assert (alice.hard, alice.soft, alice.used) == (3 * LAYOUT.slot_bytes, 0, 0)
        gone = await stub.Clean(pb.store_admin.CleanRequest(everything=True))
        assert (gone.cleared, gone.kept) == (2, 3)
        assert (await stub.Drop(pb.store_admin.DropRequest(keys=KEYS))).kept == 3
        assert (await stub.Unhold(pb.store_admin.HoldRequest(tenant="bob", keys=KEYS))).held == 0
        ended = await stub.Unhold(pb.store_admin.HoldRequest(tenant="alice", keys=KEYS))
        assert (ended.held, ended.missing) == (3, 2)
        assert (await stub.Clean(pb.store_admin.CleanRequest(everything=True))).cleared == 3


async def test_holds_above_a_share_are_refused_with_the_numbers(tmp_path: Path) -> None:
    async with admin(tmp_path) as (node, stub):
        await publish(node, KEYS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Hold(pb.store_admin.HoldRequest(tenant="alice", keys=KEYS))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "store.soft_pin_share" in (caught.value.details() or "")
        assert (await stub.Hold(pb.store_admin.HoldRequest(tenant="alice", keys=KEYS[:4]))).held == 4


async def test_a_quota_is_shown_and_set_and_its_owner_pays_with_its_own_blocks(tmp_path: Path) -> None:
    async with admin(tmp_path, store={"quotas": {"alice": 1 << 20}}) as (node, stub):
        await publish(node, KEYS, use=Use("alice"))
        await publish(node, block_keys("b", 2), use=Use("bob"))
        shown = {one.tenant: one for one in (await stub.Quotas(pb.types.Empty())).tenants}
        assert (shown["alice"].quota, shown["alice"].used, shown["alice"].blocks) == (1 << 20, 5 * LAYOUT.slot_bytes, 5)
        assert (shown["bob"].quota, shown["bob"].blocks) == (0, 2)
        ask = pb.store_admin.SetQuotaRequest(tenant="alice", bytes=3 * LAYOUT.slot_bytes, dry_run=True)
        plan = await stub.SetQuota(ask)
        assert (plan.before, plan.used, plan.above) == (1 << 20, 5 * LAYOUT.slot_bytes, 2 * LAYOUT.slot_bytes)
        assert (await stub.SetQuota(ask)).before == 1 << 20
        ask.dry_run = False
        await stub.SetQuota(ask)
        assert (await stub.SetQuota(ask)).before == 3 * LAYOUT.slot_bytes
        await publish(node, block_keys("new", 1), use=Use("alice"))
        shown = {one.tenant: one for one in (await stub.Quotas(pb.types.Empty())).tenants}
        assert (shown["alice"].blocks, shown["bob"].blocks) == (3, 2)
        await stub.SetQuota(pb.store_admin.SetQuotaRequest(tenant="alice"))
        assert (await stub.SetQuota(pb.store_admin.SetQuotaRequest(tenant="alice", dry_run=True))).before == 0


BAD_REQUESTS: list[tuple[str, Any, str]] = [
    ("Inspect", pb.store_admin.InspectRequest(keys=[b"short"]), "a block key has 16 bytes, this one 5"),
    ("Inspect", pb.store_admin.InspectRequest(keys=[KEYS[0], KEYS[0]]), "one key twice"),
    ("Drop", pb.store_admin.DropRequest(keys=[b""]), "a block key has 16 bytes"),
    ("Clean", pb.store_admin.CleanRequest(), "exactly one of keys, model, tenant, everything"),
    ("Clean", pb.store_admin.CleanRequest(tenant="t" * 300), "tenant: 300 characters; at most 256"),
    ("Hold", pb.store_admin.HoldRequest(keys=KEYS), "tenant: it is empty"),
    ("SetQuota", pb.store_admin.SetQuotaRequest(tenant="default", bytes=1), "has no quota; name another"),
    ("Compress", pb.store_admin.CompressRequest(keys=KEYS, codec="int8"), "store.codecs of node a allows none"),
    ("Compress", pb.store_admin.CompressRequest(keys=KEYS, codec="zip"), "'zip' is no lossy codec; use one of fp8, int8"),
]


async def test_a_bad_request_is_refused_by_name(tmp_path: Path) -> None:
    async with admin(tmp_path) as (node, stub):
        await publish(node, KEYS)
        for verb, request, said in BAD_REQUESTS:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(stub, verb)(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in (caught.value.details() or "")
        assert node.pool.lookup(KEYS) == 5


async def test_a_large_clear_lets_others_have_their_turn(tmp_path: Path) -> None:
    chains = [block_keys(f"{i:x}.", 40) for i in range(60)]
    async with admin(tmp_path, store={"pool_bytes": 2400 * LAYOUT.slot_bytes, "region_bytes": 16 << 20}) as (node, stub):
        me = Life(node.member.id, node.member.incarnation)
        for chain in chains:
            given_ = node.pool.reserve(0, me, LAYOUT, chain, None, Use("alice"), NOW)
            node.pool.seal(0, [one.id for one in given_], NOW)
        node.pool.take_events()
        clearing = asyncio.ensure_future(stub.Clean(pb.store_admin.CleanRequest(tenant="alice")))
        seen = set()
        while not clearing.done():
            seen.add(len(node.pool.held.index))
            await asyncio.sleep(0)
        assert (await clearing).cleared == 2400
        assert len(seen - {0, 2400}) >= 2


@st.composite
def forests(draw: st.DrawFn) -> list[int | None]:
    """The parent of each block, by number; parents come first."""
    n = draw(st.integers(1, 14))
    return [draw(st.none() | st.integers(0, i - 1)) if i else None for i in range(n)]


@settings(deadline=None)
@given(parents=forests(), data=st.data())
def test_what_goes_is_what_a_dumb_reference_drops_one_leaf_after_the_other(
    parents: list[int | None], data: st.DataObject
) -> None:
    pool = Pool(NodeId("a"), Incarnation(1), SlotMap([len(parents) * SLOT_ALIGN]), make_policy("lru"))
    layout = replace(LAYOUT, block_tokens=1, layers=1)
    pool.register(layout)
    keys = block_keys("n", len(parents))
    for key, parent in zip(keys, parents, strict=True):
        above = None if parent is None else keys[parent]
        (given_,) = pool.reserve(1, ME, layout, [key], above, Use(), NOW)
        assert pool.seal(1, [given_.id], NOW) == 1
    numbers = st.sets(st.integers(0, len(parents) - 1))
    pinned, meant = data.draw(numbers), data.draw(numbers)
    for i in pinned:
        pool.pin(1, [keys[i]], Use(), NOW)

    left = set(range(len(parents)))
    while leaves := [i for i in left & meant - pinned if not any(parents[j] == i for j in left)]:
        left -= set(leaves)
    gone = len(parents) - len(left)
    order = data.draw(st.permutations(sorted(meant)))
    control = Control(pool)
    plan = control.drop([keys[i] for i in order], dry_run=True)
    assert (plan.cleared, plan.kept, plan.bytes) == (gone, len(meant) - gone, gone * layout.slot_bytes)
    assert len(pool.held.index) == len(parents)
    assert control.drop([keys[i] for i in order], dry_run=False) == plan
    assert {i for i, key in enumerate(keys) if pool.lookup([key])} == left
