"""What the conductor does about a store node whose events it cannot take in."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.cluster.store_watches import StoreWatches
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange

STORE = Member(MemberId("store-a"), Role.STORE, NodeId("a"), Incarnation(1), "127.0.0.1:1", 1)


async def test_a_node_is_followed_on_after_a_frame_that_cannot_be_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    listened = asyncio.Queue[int]()

    async def listen(watches: StoreWatches, member: Member, stub: object) -> bool:
        listened.put_nowait(watches.bad_frames)
        raise AttributeError("frame")

    monkeypatch.setattr(StoreWatches, "_listen", listen)
    watches = StoreWatches(lambda event: False, lambda node, life: 0, 1.0)
    watches.on_change(MemberChange(STORE, Liveness.LIVE))
    async with asyncio.timeout(2):
        assert [await listened.get(), await listened.get()] == [0, 1]
    await watches.close()
