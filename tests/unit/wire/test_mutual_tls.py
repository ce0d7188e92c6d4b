"""Channels and ports with certificates: who gets in, who is told why not, what happens when files change."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from support.certificates import OVER, Certificates

from moonpool.core.errors import ConfigError
from moonpool.core.principal import IDENTITY, Party
from moonpool.wire import pb
from moonpool.wire.channels import MAX_MESSAGE_BYTES, bind, dial, dial_blocking, server
from moonpool.wire.guard import require_own_name
from moonpool.wire.identity import Identity
from moonpool.wire.status import why_unreachable

Become = Callable[[Path | None], None]


class Everything(pb.admin_rpc.AdminServicer, pb.registry_rpc.RegistryServicer, pb.conductor_rpc.ConductorServicer):
    """One RPC of each of gRPC's kinds that the schemas have."""

    def __init__(self) -> None:
        self.calls = 0

    async def Stats(self, request: pb.types.Empty, context: grpc.aio.ServicerContext) -> pb.admin.AdminStats:
        self.calls += 1
        return pb.admin.AdminStats(words={"hello": "you"})

    async def Stop(self, request: pb.types.Empty, context: grpc.aio.ServicerContext) -> pb.types.Empty:
        self.calls += 1
        return pb.types.Empty()

    async def Watch(self, request: pb.types.Empty, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.types.MemberChange]:
        self.calls += 1
        while True:
            yield pb.types.MemberChange(proof="one")
            await asyncio.sleep(0.01)

    async def Join(
        self, request_iterator: AsyncIterator[pb.registry.MemberBeat], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.registry.RegistryMessage]:
        async for beat in request_iterator:
            await require_own_name(context, beat.member.id)
            yield pb.registry.RegistryMessage(welcome=pb.types.Empty())


@dataclass
class House:
    certificates: Certificates
    become: Become
    address: str
    served: Everything
    folder: Path

    async def stats(self, folder: Path | None) -> str:
        """What ``Stats`` answers to whoever has the files in ``folder``; or the code, and why in our words."""
        self.become(folder)
        async with dial(self.address) as channel:
            try:
                return (await pb.admin_rpc.AdminStub(channel).Stats(pb.types.Empty(), timeout=10)).words["hello"]
            except grpc.aio.AioRpcError as e:
                return f"{e.code().name}: {why_unreachable(e.details())}"


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Become:
    return lambda folder: monkeypatch.setenv(IDENTITY, str(folder or ""))


@asynccontextmanager
async def serving(
    folder: Path | None, become: Become, certificates: Certificates, address: str = "127.0.0.1:0"
) -> AsyncIterator[House]:
    become(folder)
    running, served = server(), Everything()
    pb.admin_rpc.add_AdminServicer_to_server(served, running)
    pb.registry_rpc.add_RegistryServicer_to_server(served, running)
    port = bind(running, address)
    await running.start()
    try:
        yield House(certificates, become, f"127.0.0.1:{port}", served, folder or Path())
    finally:
        await running.stop(0)


@pytest.fixture
async def house(tmp_path: Path, become: Become) -> AsyncIterator[House]:
    certificates = Certificates(tmp_path)
    async with serving(certificates.of(Party.STORE, "store-a"), become, certificates) as house:
        yield house


async def test_a_member_of_the_cluster_is_answered(house: House) -> None:
    assert await house.stats(house.certificates.of(Party.GATEWAY, "gateway-0")) == "you"


async def test_whoever_has_no_certificate_is_refused_and_told(house: House) -> None:
    assert "wants a certificate" in await house.stats(None)
    assert house.served.calls == 0


async def test_an_expired_certificate_is_refused_and_told(house: House) -> None:
    assert "not expired" in await house.stats(house.certificates.of(Party.GATEWAY, "late", OVER))
    assert house.served.calls == 0


async def test_certificates_of_another_authority_are_refused_by_both_sides(house: House, tmp_path: Path) -> None:
    other = Certificates(tmp_path / "other").of(Party.GATEWAY, "gateway-0")
    assert "not of this side's CA" in await house.stats(other)
    shutil.copy(house.folder / "ca.pem", other / "ca.pem")  # it would believe the server
    assert "wants a certificate of its own CA" in await house.stats(other)
    assert house.served.calls == 0


async def test_an_expired_server_is_refused_and_told(tmp_path: Path, become: Become) -> None:
    certificates = Certificates(tmp_path)
    async with serving(certificates.of(Party.STORE, "store-a", OVER), become, certificates) as house:
        assert "has expired" in await house.stats(certificates.of(Party.GATEWAY))


async def test_a_server_without_tls_is_told_from_one_that_is_away(tmp_path: Path, become: Become) -> None:
    certificates = Certificates(tmp_path)
    async with serving(None, become, certificates) as house:
        assert "speaks without TLS" in await house.stats(certificates.of(Party.GATEWAY))
        house.address = "127.0.0.1:1"
        assert "connection refused" in await house.stats(certificates.of(Party.GATEWAY))


async def test_a_certificate_for_calling_does_not_serve(tmp_path: Path, become: Become) -> None:
    certificates = Certificates(tmp_path)
    async with serving(certificates.of(Party.OPERATOR), become, certificates) as house:
        assert "UNAVAILABLE" in await house.stats(certificates.of(Party.GATEWAY))


async def test_a_server_of_another_cluster_of_the_same_authority_is_not_believed(tmp_path: Path, become: Become) -> None:
    ours, theirs = Certificates(tmp_path), Certificates(tmp_path, "theirs")
    async with serving(theirs.of(Party.STORE, "store-a"), become, ours) as house:
        assert "not of this cluster" in await house.stats(ours.of(Party.GATEWAY, "gateway-0"))


async def test_a_caller_of_another_cluster_of_the_same_authority_is_refused(house: House, tmp_path: Path) -> None:
    stranger = Certificates(tmp_path, "theirs").of(Party.OPERATOR, "stranger")
    house.become(stranger)
    credentials = grpc.ssl_channel_credentials(*((stranger / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem")))
    name = [("grpc.ssl_target_name_override", "test.moonpool")]
    async with grpc.aio.secure_channel(house.address, credentials, options=name) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pb.admin_rpc.AdminStub(channel).Stats(pb.types.Empty(), timeout=10)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "moonpool://theirs/operator/stranger" in (refused.value.details() or "")
    assert house.served.calls == 0


async def test_calls_without_a_right_to_them_do_not_reach_the_service(house: House) -> None:
    house.become(house.certificates.of(Party.GATEWAY, "gateway-0"))
    async with dial(house.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"gateway-0 \(gateway\) may not call Admin.Stop") as refused:
            await pb.admin_rpc.AdminStub(channel).Stop(pb.types.Empty(), timeout=10)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert house.served.calls == 0
    house.become(house.certificates.of(Party.OPERATOR))
    async with dial(house.address) as channel:
        await pb.admin_rpc.AdminStub(channel).Stop(pb.types.Empty(), timeout=10)
    assert house.served.calls == 1


async def test_streams_are_checked_before_their_first_answer(house: House) -> None:
    for party, may in ((Party.REGISTRY, False), (Party.CONDUCTOR, True)):
        house.become(house.certificates.of(party))
        async with dial(house.address) as channel:
            call = pb.registry_rpc.RegistryStub(channel).Watch(pb.types.Empty(), timeout=10)
            if may:
                assert (await anext(aiter(call))).proof == "one"
                call.cancel()
            else:
                with pytest.raises(grpc.aio.AioRpcError, match=r"may not call Registry\.Watch"):
                    await anext(aiter(call))
                assert house.served.calls == 0


@pytest.mark.parametrize(("name", "welcome"), [("gateway-0", True), ("gateway-1", False), ("", False)])
async def test_a_member_joins_under_its_own_name_only(house: House, name: str, welcome: bool) -> None:
    house.become(house.certificates.of(Party.GATEWAY, "gateway-0"))

    async def beats() -> AsyncIterator[pb.registry.MemberBeat]:
        yield pb.registry.MemberBeat(member=pb.types.Member(id=name))

    async with dial(house.address) as channel:
        call = pb.registry_rpc.RegistryStub(channel).Join(beats(), timeout=10)
        if welcome:
            assert (await anext(aiter(call))).HasField("welcome")
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="may not speak for"):
                await anext(aiter(call))


async def test_the_blocking_channel_shows_its_certificate_too(house: House) -> None:
    house.become(house.certificates.of(Party.PREFILL, "prefill-0"))

    def ask() -> str:
        with dial_blocking(house.address) as channel:
            return pb.admin_rpc.AdminStub(channel).Stats(pb.types.Empty(), timeout=10).words["hello"]  # type: ignore[no-any-return]

    assert await asyncio.to_thread(ask) == "you"


async def test_files_that_changed_count_at_the_next_connection_without_a_restart(house: House, tmp_path: Path) -> None:
    """Another authority: the old files reach nobody any more, the new ones do."""
    before = house.certificates.of(Party.GATEWAY, "gateway-0")
    fresh = Certificates(tmp_path / "fresh")
    after = fresh.of(Party.GATEWAY, "gateway-0")
    assert await house.stats(before) == "you"
    new = fresh.of(Party.STORE, "store-a")
    for name in ("key.pem", "ca.pem", "cert.pem"):
        shutil.copy(new / name, house.folder / name)
    assert "not of this side's CA" in await house.stats(before)
    assert await house.stats(after) == "you"


async def test_a_channel_goes_on_with_a_new_certificate_once_its_connection_broke(
    tmp_path: Path, become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides get certificates of another authority, as after the first one's end; the server restarts with them."""
    monkeypatch.setattr("moonpool.wire.renewed.LOOK_S", 0.0)
    old, new = Certificates(tmp_path / "old"), Certificates(tmp_path / "new")
    mine, theirs = old.of(Party.GATEWAY, "gateway-0"), old.of(Party.STORE, "store-a")
    async with serving(theirs, become, old) as house:
        become(mine)
        channel = dial(house.address)
        stub = pb.admin_rpc.AdminStub(channel)
        assert (await stub.Stats(pb.types.Empty(), timeout=10)).words
    for folder, fresh in ((mine, new.of(Party.GATEWAY, "gateway-0")), (theirs, new.of(Party.STORE, "store-a"))):
        for name in ("key.pem", "ca.pem", "cert.pem"):
            shutil.copy(fresh / name, folder / name)
    async with serving(theirs, become, new, house.address):
        become(mine)
        assert (await stub.Stats(pb.types.Empty(), timeout=10, wait_for_ready=True)).words
    await channel.close()


async def test_a_channel_whose_files_became_useless_goes_on_with_those_before_until_they_are_mended(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.wire.renewed.LOOK_S", 0.0)
    mine = house.certificates.of(Party.GATEWAY, "gateway-0")
    house.become(mine)
    async with dial(house.address) as channel:
        stub = pb.admin_rpc.AdminStub(channel)
        assert (await stub.Stats(pb.types.Empty(), timeout=10)).words
        house.certificates.of(Party.GATEWAY, "gateway-0")
        (mine / "key.pem").chmod(0o644)
        assert (await stub.Stats(pb.types.Empty(), timeout=10)).words
        broken = channel.inner()
        (mine / "key.pem").chmod(0o600)
        assert (await stub.Stats(pb.types.Empty(), timeout=10)).words
        assert channel.inner() is not broken


async def test_streams_go_on_over_the_connection_they_began_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.wire.renewed.LOOK_S", 0.0)
    house.become(house.certificates.of(Party.GATEWAY, "gateway-0"))
    async with dial(house.address) as channel:
        watch = aiter(pb.registry_rpc.RegistryStub(channel).Watch(pb.types.Empty()))
        assert (await anext(watch)).proof == "one"
        house.certificates.of(Party.GATEWAY, "gateway-0")
        assert (await pb.admin_rpc.AdminStub(channel).Stats(pb.types.Empty(), timeout=10)).words
        assert (await anext(watch)).proof == "one"


async def test_a_server_whose_files_became_useless_goes_on_with_those_before(house: House) -> None:
    (house.folder / "cert.pem").write_bytes(b"nothing")
    assert await house.stats(house.certificates.of(Party.GATEWAY)) == "you"


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    folder = Certificates(tmp_path).of(Party.GATEWAY)
    (folder / "key.pem").chmod(0o640)
    with pytest.raises(ConfigError, match=r"key\.pem has mode 0640.*chmod 600"):
        Identity.read(folder)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    one, other = certificates.of(Party.GATEWAY, "a"), certificates.of(Party.GATEWAY, "b")
    shutil.copy(other / "key.pem", one / "key.pem")
    with pytest.raises(ConfigError, match="not the key of"):
        Identity.read(one)


def test_files_named_as_in_a_kubernetes_secret_are_read(tmp_path: Path) -> None:
    folder = Certificates(tmp_path).of(Party.GATEWAY, "gateway-0")
    for name, other in (("ca.pem", "ca.crt"), ("cert.pem", "tls.crt"), ("key.pem", "tls.key")):
        (folder / name).rename(folder / other)
    identity = Identity.read(folder)
    assert identity.says.principal.member == "gateway-0"
    assert "PRIVATE" not in repr(identity)


async def test_messages_beyond_the_bound_are_refused_before_the_service_sees_them(tmp_path: Path, become: Become) -> None:
    async with serving(None, become, Certificates(tmp_path)) as house:
        async with dial(house.address, options=[("grpc.max_send_message_length", -1)]) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as refused:
                await channel.unary_unary("/moonpool.v1.Admin/Stats")(bytes(MAX_MESSAGE_BYTES + 1), timeout=30)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert house.served.calls == 0
