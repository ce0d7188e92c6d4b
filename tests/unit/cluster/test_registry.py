from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from moonpool.cluster import registry_link
from moonpool.cluster.membership import Membership
from moonpool.cluster.registry import Registry
from moonpool.core.config import TimingConfig
from moonpool.core.errors import ConfigError, LayoutMismatch, NoPath
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.wire import pb, renewed
from moonpool.wire.convert import to_wire

TIMING = TimingConfig(heartbeat_ms=50, silent_after_ms=400)


def member(name: str, role: Role = Role.PREFILL, incarnation: int = 1) -> Member:
    return Member(MemberId(name), role, NodeId("a"), Incarnation(incarnation), "host:1", pid=1)


class Seen:
    """One process's membership, and what it was told in order."""

    def __init__(self, registry: str, timing: TimingConfig = TIMING) -> None:
        self.fenced: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.told: list[tuple[str, int, str]] = []
        self.peers = Membership(registry, timing, lambda why, replaced: self.fenced.set_result(replaced))
        self.peers.subscribe(self._hear)

    def _hear(self, change: MemberChange) -> None:
        self.told.append((change.member.id, change.member.incarnation, change.liveness.value))

    async def until(self, condition: Callable[[], bool]) -> None:
        await self.peers.until(condition, 5.0, "change")

    async def hears(self, *what: tuple[str, int, str]) -> None:
        await self.until(lambda: all(w in self.told for w in what))


@asynccontextmanager
async def cluster(size: int) -> AsyncIterator[tuple[Registry, list[Seen]]]:
    registry = Registry(TIMING)
    address = await registry.start("127.0.0.1")
    seen = [Seen(address) for _ in range(size)]
    try:
        yield registry, seen
    finally:
        await asyncio.gather(*(s.peers.leave() for s in seen))
        await registry.close()


async def test_joining_changing_and_leaving_are_watched_in_order() -> None:
    async with cluster(2) as (_, (one, other)):
        await one.peers.join(member("prefill-0"))
        await other.hears(("prefill-0", 1, "live"))
        one.peers.update(replace(member("prefill-0"), ready=False))
        await other.until(lambda: [m.ready for m in other.peers.live(Role.PREFILL)] == [False])
        await one.peers.leave()
        await other.hears(("prefill-0", 1, "gone"))
        assert [t[2] for t in other.told][:2] == ["live", "live"]
        assert other.told[-1] == ("prefill-0", 1, "gone")
        known = other.peers.get(MemberId("prefill-0"))
        assert known is not None
        assert known.proof == "left"


async def test_a_late_watcher_hears_everybody_known_first() -> None:
    async with cluster(2) as (_, (one, other)):
        await one.peers.join(member("prefill-0"))
        await other.hears(("prefill-0", 1, "live"))
        told: list[MemberChange] = []
        other.peers.subscribe(told.append)
        assert [c.member.id for c in told] == ["prefill-0"]


async def test_live_members_are_found_by_role_and_node() -> None:
    async with cluster(3) as (_, (a, b, c)):
        await a.peers.join(member("store-a", Role.STORE))
        await b.peers.join(member("prefill-1"))
        await c.peers.join(member("prefill-0"))
        await a.until(lambda: len(a.peers.everybody()) == 3)
        assert [m.id for m in a.peers.live(Role.PREFILL)] == ["prefill-0", "prefill-1"]
        store = a.peers.store_of(NodeId("a"))
        assert store is not None
        assert store.id == "store-a"
        assert a.peers.store_of(NodeId("b")) is None


async def test_missed_heartbeats_make_silent_and_only_a_report_makes_gone() -> None:
    async with cluster(1) as (registry, (watcher,)):
        async with grpc.aio.insecure_channel(registry.address) as channel:
            hold = asyncio.Event()

            async def beats() -> AsyncIterator[pb.registry.MemberBeat]:
                yield pb.registry.MemberBeat(member=to_wire(member("prefill-0"), pb.types.Member()), incarnation=1)
                await hold.wait()  # the stream stays, the beats do not come

            call = pb.registry_rpc.RegistryStub(channel).Join(beats())
            await watcher.hears(("prefill-0", 1, "live"), ("prefill-0", 1, "silent"))
            assert ("prefill-0", 1, "gone") not in watcher.told
            watcher.peers.report_gone(MemberId("prefill-0"), Incarnation(1), "pidfd")
            await watcher.hears(("prefill-0", 1, "gone"))
            call.cancel()


async def test_who_joins_for_a_life_that_is_over_hears_so_and_waits_no_longer() -> None:
    async with cluster(1) as (registry, (one,)):
        life, now = member("prefill-0"), registry._clock()
        registry.roster.join(life, now)
        registry.roster.broken(life.id, life.incarnation, now)
        await asyncio.wait_for(one.peers.join(life), 5.0)
        assert await asyncio.wait_for(one.fenced, 5.0) is False


async def test_a_broken_session_is_silent_at_once() -> None:
    async with cluster(1) as (registry, (watcher,)):
        channel = grpc.aio.insecure_channel(registry.address)
        hold = asyncio.Event()

        async def beats() -> AsyncIterator[pb.registry.MemberBeat]:
            yield pb.registry.MemberBeat(member=to_wire(member("prefill-0"), pb.types.Member()), incarnation=1)
            await hold.wait()

        call = pb.registry_rpc.RegistryStub(channel).Join(beats())
        await watcher.hears(("prefill-0", 1, "live"))
        call.cancel()
        await watcher.hears(("prefill-0", 1, "silent"))
        known = watcher.peers.get(MemberId("prefill-0"))
        assert known is not None
        assert known.proof == "its session broke"
        await channel.close()


async def test_a_newer_life_fences_the_older_one() -> None:
    async with cluster(3) as (_, (older, newer, watcher)):
        await older.peers.join(member("prefill-0"))
        await newer.peers.join(member("prefill-0", incarnation=2))
        assert await asyncio.wait_for(older.fenced, 5.0) is True
        await watcher.until(lambda: ("prefill-0", 2, "live") in watcher.told)
        known = watcher.peers.get(MemberId("prefill-0"))
        assert known is not None
        assert (known.member.incarnation, known.liveness) == (2, Liveness.LIVE)


@pytest.mark.parametrize("wrong", [replace(member("a"), node=NodeId("../a")), member("a\x1b[31m")])
async def test_names_that_are_none_are_refused(wrong: Member) -> None:
    async with cluster(1) as (registry, (seen,)):
        with pytest.raises(LayoutMismatch, match="is not a name"):
            await seen.peers.join(wrong)
        assert registry.roster.snapshot() == []


async def test_a_different_model_is_refused_naming_both() -> None:
    async with cluster(2) as (_, (one, other)):
        await one.peers.join(replace(member("prefill-0"), model="smollm2"))
        with pytest.raises(LayoutMismatch, match="'other' at prefill-1, 'smollm2' at prefill-0"):
            await other.peers.join(replace(member("prefill-1"), model="other"))


async def test_a_registry_that_comes_back_empty_hears_everybody_again() -> None:
    registry = Registry(TIMING)
    address = await registry.start("127.0.0.1")
    one, watcher = Seen(address), Seen(address)
    await one.peers.join(member("prefill-0"))
    await watcher.hears(("prefill-0", 1, "live"))
    await registry.close()
    assert [m.id for m in watcher.peers.live(Role.PREFILL)] == ["prefill-0"]  # the last known view stays
    again = Registry(TIMING)
    await again.start("127.0.0.1", int(address.rpartition(":")[2]))
    try:
        late = Seen(again.address)
        await late.hears(("prefill-0", 1, "live"))
        assert not one.fenced.done()
        await asyncio.gather(*(s.peers.leave() for s in (one, watcher, late)))
    finally:
        await again.close()


async def test_terms_that_others_than_conductors_say_are_nobodys() -> None:
    async with cluster(2) as (_, (one, other)):
        await one.peers.join(member("conductor-0", Role.CONDUCTOR))
        await other.peers.join(replace(member("prefill-0"), term=2**64 - 1))
        said = None
        async with asyncio.timeout(10):
            while said is None or not said.term:  # a registry that begins grants nothing for a whole lease
                await asyncio.sleep(0.05)
                said = await one.peers.lead(0)
        assert (said.leader, said.term) == ("conductor-0", 1)


async def test_a_taken_port_is_a_clear_error() -> None:
    async with cluster(0) as (registry, _):
        with pytest.raises(ConfigError, match="cannot listen"):
            await Registry(TIMING).start("127.0.0.1", int(registry.address.rpartition(":")[2]))


async def test_waiting_ends_in_bounded_time_naming_what_was_missing() -> None:
    async with cluster(1) as (_, (one,)):
        with pytest.raises(NoPath, match="no decode worker within 0 s"):
            await one.peers.until(lambda: False, 0.05, "decode worker")


async def test_a_process_that_joins_anew_in_another_role_ends_its_older_life_and_is_not_fenced() -> None:
    async with cluster(2) as (_, (one, other)):
        await one.peers.join(member("prefill-0"))
        await other.hears(("prefill-0", 1, "live"))
        await one.peers.join(member("prefill-0", Role.DECODE, 2))
        await other.hears(("prefill-0", 2, "live"))
        assert other.told == [("prefill-0", 1, "live"), ("prefill-0", 1, "gone"), ("prefill-0", 2, "live")]
        assert [m.id for m in other.peers.live(Role.DECODE)] == ["prefill-0"]
        assert not other.peers.live(Role.PREFILL)
        await asyncio.sleep(2 * TIMING.heartbeat_ms / 1e3)
        assert not one.fenced.done()


async def test_while_the_registry_is_away_the_last_known_view_stays_and_who_does_not_come_back_is_silent_afterwards() -> None:
    timing = TIMING.model_copy(update={"registry_return_ms": 300})
    registry = Registry(timing)
    address = await registry.start("127.0.0.1")
    watcher, stays, dies = (Seen(address, timing) for _ in range(3))
    await stays.peers.join(member("prefill-0"))
    await dies.peers.join(member("prefill-1"))
    await watcher.hears(("prefill-0", 1, "live"), ("prefill-1", 1, "live"))
    await registry.close()
    await dies.peers.leave()
    await asyncio.sleep(4 * timing.registry_return_ms / 1000)
    assert [m.id for m in watcher.peers.live(Role.PREFILL)] == ["prefill-0", "prefill-1"], "nobody has said otherwise"
    again = Registry(timing)
    await again.start("127.0.0.1", int(address.split(":")[1]))
    await watcher.hears(("prefill-1", 1, "silent"))
    await watcher.until(lambda: [m.id for m in watcher.peers.live(Role.PREFILL)] == ["prefill-0"])
    await asyncio.gather(watcher.peers.leave(), stays.peers.leave())
    await again.close()


async def test_the_watch_goes_on_after_its_channel_gave_way_to_one_with_a_newer_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certificate = 0
    monkeypatch.setattr(renewed, "LOOK_S", 0.0)
    monkeypatch.setattr(renewed, "LAST_CALLS_S", 0.05)
    make = grpc.aio.insecure_channel
    monkeypatch.setattr(registry_link, "dial", lambda to: renewed.RenewedChannel(lambda: make(to), lambda: certificate))
    async with cluster(2) as (_, (one, other)):
        await one.peers.join(member("conductor-0", Role.CONDUCTOR))
        await one.hears(("conductor-0", 1, "live"))
        certificate = 1
        await one.peers.lead(0)  # the first call that takes the new channel
        await asyncio.sleep(0.2)
        await other.peers.join(member("prefill-0"))
        await one.hears(("prefill-0", 1, "live"))


async def test_a_subscriber_that_raises_does_not_end_the_watch() -> None:
    async with cluster(2) as (_, (one, other)):
        broken = True

        def hear(change: MemberChange) -> None:
            if broken:
                raise RuntimeError("of this change nothing is understood")

        one.peers.subscribe(hear)
        await other.peers.join(member("prefill-0"))
        await one.hears(("prefill-0", 1, "live"))
        broken = False
        other.peers.update(replace(member("prefill-0"), model="tiny"))
        await one.until(lambda: (c := one.peers.get(MemberId("prefill-0"))) is not None and c.member.model == "tiny")
