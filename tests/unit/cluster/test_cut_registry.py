"""A member cut off from the registry alone, and one whose line to it broke."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from support.etcd_members import TIMING, Seen, eventually, member
from support.line import Line

from moonpool.cluster.leadership import Leadership
from moonpool.cluster.registry import Registry
from moonpool.core.ids import Role

SILENT = ("prefill-0", 1, "silent")


@asynccontextmanager
async def behind_a_line() -> AsyncIterator[tuple[Line, Seen, Seen]]:
    """The line, who is behind it, and who is not."""
    registry = Registry(TIMING)
    address = await registry.start("127.0.0.1")
    async with Line(int(address.split(":")[1])) as line:
        cut, near = Seen(f"127.0.0.1:{line.port}"), Seen(address)
        try:
            yield line, cut, near
        finally:
            await asyncio.gather(cut.peers.leave(), near.peers.leave())
            await registry.close()


async def test_a_member_that_only_the_registry_cannot_hear_is_silent_to_all_and_comes_back_as_a_newer_life() -> None:
    async with behind_a_line() as (line, cut, near):
        await cut.peers.join(member())
        await near.hears(("prefill-0", 1, "live"))
        line.fall_silent()
        await near.hears(SILENT)
        line.mend()
        why, replaced = await asyncio.wait_for(cut.fenced, 15.0)
        assert "silent" in why and not replaced
        cut.fenced = asyncio.get_running_loop().create_future()
        await cut.peers.join(member(incarnation=2))
        await near.hears(("prefill-0", 1, "gone"), ("prefill-0", 2, "live"))
        assert not cut.fenced.done()


async def test_a_leader_that_is_cut_off_stops_before_another_one_begins() -> None:
    async with behind_a_line() as (line, cut, near):
        await near.peers.join(member("conductor-1", Role.CONDUCTOR))
        await cut.peers.join(member("conductor-0", Role.CONDUCTOR))
        first = Leadership(cut.peers, TIMING)
        await eventually(lambda: first.term() > 0)
        second = Leadership(near.peers, TIMING)
        try:
            await near.until(lambda: near.known("conductor-0").member.term == first.term(), "the leader's term is told")
            term = first.term()
            line.fall_silent()
            both = False

            def follows() -> bool:
                nonlocal both
                both |= bool(first.term() and second.term())
                return second.term() > term

            await eventually(follows)
            assert not both
            assert second.leader() == "conductor-1" and first.term() == 0
            line.mend()
            await asyncio.wait_for(cut.fenced, 15.0)
            assert first.term() == 0
            cut.fenced = asyncio.get_running_loop().create_future()
            await cut.peers.join(replace(member("conductor-0", Role.CONDUCTOR), incarnation=member(incarnation=2).incarnation))
            await eventually(lambda: first.leader() == "conductor-1")
            assert first.term() == 0
        finally:
            await first.close()
            await second.close()
