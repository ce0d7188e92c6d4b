"""The registry itself with certificates: who joins is who it says, from the first word to the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from support.certificates import Certificates

from moonpool.cluster.membership import Membership
from moonpool.cluster.registry import Registry
from moonpool.core.config import TimingConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member
from moonpool.core.principal import IDENTITY, Party
from moonpool.wire import pb
from moonpool.wire.channels import dial
from moonpool.wire.convert import to_wire

TIMING = TimingConfig()
Become = Callable[[Party, str], None]


@pytest.fixture
def become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Become:
    certificates = Certificates(tmp_path)
    return lambda party, name: monkeypatch.setenv(IDENTITY, str(certificates.of(party, name)))


@pytest.fixture
async def registry(become: Become) -> AsyncIterator[Registry]:
    become(Party.REGISTRY, "registry")
    registry = Registry(TIMING)
    await registry.start("127.0.0.1")
    yield registry
    await registry.close()


def gateway(name: str, role: Role = Role.GATEWAY, term: int = 0) -> Member:
    return Member(MemberId(name), role, NodeId("a"), Incarnation(1), "127.0.0.1:1", 1, term=term)


async def test_a_process_that_takes_another_ones_name_is_told_and_not_known(registry: Registry, become: Become) -> None:
    become(Party.GATEWAY, "gateway-0")
    peers = Membership(registry.address, TIMING, lambda why, replaced: None)
    try:
        with pytest.raises(ConfigError, match=r"gateway-0 \(gateway\) may not speak for gateway-1"):
            await peers.join(gateway("gateway-1"))
        assert registry.roster.snapshot() == []
        await peers.join(gateway("gateway-0"))
        assert [change.member.id for change in registry.roster.snapshot()] == ["gateway-0"]
    finally:
        await peers.leave()


async def test_a_session_that_speaks_for_another_later_is_ended(registry: Registry, become: Become) -> None:
    become(Party.GATEWAY, "gateway-0")
    welcome = asyncio.Event()

    async def beats() -> AsyncIterator[pb.registry.MemberBeat]:
        yield pb.registry.MemberBeat(member=to_wire(gateway("gateway-0"), pb.types.Member()), incarnation=1)
        await welcome.wait()
        yield pb.registry.MemberBeat(member=to_wire(gateway("gateway-1"), pb.types.Member()), incarnation=1)
        await asyncio.sleep(30)

    async with dial(registry.address) as channel:
        told = aiter(pb.registry_rpc.RegistryStub(channel).Join(beats(), timeout=20))
        assert (await anext(told)).HasField("welcome")
        welcome.set()
        assert "spoke for gateway-1" in (await anext(told)).fenced
    assert registry.roster.get(MemberId("gateway-1")) is None


@pytest.mark.parametrize(
    ("party", "role", "welcome"),
    [
        (Party.GATEWAY, Role.DECODE, False),
        (Party.GATEWAY, Role.STORE, False),
        (Party.PREFILL, Role.CONDUCTOR, False),
        (Party.PREFILL, Role.BOTH, True),
    ],
)
async def test_a_process_has_the_role_of_its_certificate(
    registry: Registry, become: Become, party: Party, role: Role, welcome: bool
) -> None:
    become(party, "one")
    peers = Membership(registry.address, TIMING, lambda why, replaced: None)
    try:
        if welcome:
            await peers.join(gateway("one", role))
        else:
            with pytest.raises(ConfigError, match=f"one .{party}. may not be a {role}"):
                await peers.join(gateway("one", role))
        assert len(registry.roster.snapshot()) == welcome
    finally:
        await peers.leave()


async def test_a_session_that_takes_another_role_later_is_ended(registry: Registry, become: Become) -> None:
    become(Party.GATEWAY, "gateway-0")
    welcome = asyncio.Event()

    async def beats() -> AsyncIterator[pb.registry.MemberBeat]:
        yield pb.registry.MemberBeat(member=to_wire(gateway("gateway-0"), pb.types.Member()), incarnation=1)
        await welcome.wait()
        yield pb.registry.MemberBeat(member=to_wire(gateway("gateway-0", Role.DECODE), pb.types.Member()), incarnation=1)
        await asyncio.sleep(30)

    async with dial(registry.address) as channel:
        told = aiter(pb.registry_rpc.RegistryStub(channel).Join(beats(), timeout=20))
        assert (await anext(told)).HasField("welcome")
        welcome.set()
        assert "turned from gateway into decode" in (await anext(told)).fenced


async def test_deaths_are_reported_by_those_who_hold_the_proof(registry: Registry, become: Become) -> None:
    become(Party.GATEWAY, "gateway-0")
    peers = Membership(registry.address, TIMING, lambda why, replaced: None)
    try:
        await peers.join(gateway("gateway-0"))
        report = pb.registry.GoneReport(member="gateway-0", incarnation=1, proof="says I")
        for party, may in ((Party.GATEWAY, False), (Party.OPERATOR, False), (Party.LAUNCHER, True)):
            become(party, party.value)
            async with dial(registry.address) as channel:
                call = pb.registry_rpc.RegistryStub(channel).ReportGone(report, timeout=10)
                if may:
                    await call
                else:
                    with pytest.raises(grpc.aio.AioRpcError, match=r"may not call Registry\.ReportGone"):
                        await call
            known = registry.roster.get(MemberId("gateway-0"))
            assert known is not None and (known.liveness is Liveness.GONE) is may
    finally:
        await peers.leave()
