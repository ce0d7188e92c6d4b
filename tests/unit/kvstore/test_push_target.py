"""A store node's writers lose the channel to it while they call."""

from __future__ import annotations

import asyncio

import pytest
from support.deaf_server import deaf_server
from support.store import LAYOUT, member

from moonpool.core.errors import PeerSilent
from moonpool.core.ids import Role
from moonpool.kvstore.push_target import PushTarget


async def test_a_call_whose_channel_is_closed_fails_and_its_caller_does_not_count_as_cancelled() -> None:
    async with deaf_server() as (address, called):
        target = PushTarget("store-b", address, member("prefill-0", Role.PREFILL, "a"), LAYOUT, (), lambda carrier: None)  # type: ignore[arg-type,return-value]
        asking = asyncio.create_task(target.state(1, 0.0))
        await asyncio.wait_for(called.get(), 5.0)
        await target.retire()
        with pytest.raises(PeerSilent):
            await asking


async def test_a_call_after_its_channel_was_closed_fails_alike() -> None:
    target = PushTarget("store-b", "127.0.0.1:1", member("prefill-0", Role.PREFILL, "a"), LAYOUT, (), lambda carrier: None)  # type: ignore[arg-type,return-value]
    await target.close()
    with pytest.raises(PeerSilent, match="no longer a target"):
        await target.state(1, 0.0)
