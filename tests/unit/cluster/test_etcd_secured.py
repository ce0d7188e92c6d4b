"""A real etcd that asks for certificates, and one that has users."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from etcd3aio import _protobuf as etcd
from support.certificates import Certificates
from support.etcd_members import NAME, Seen, member, members
from support.etcd_server import EtcdServer

from moonpool.cluster.etcd.access import Access
from moonpool.cluster.etcd.address import EtcdAddress, registry_of
from moonpool.cluster.survey import members as survey_members
from moonpool.core.config import ClusterConfig, Config, SecurityConfig
from moonpool.core.errors import ConfigError, NoPath
from moonpool.core.ids import Role
from moonpool.core.principal import Party

PASSWORD = "correct horse battery staple"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd-tls"), tls=certificates.https("127.0.0.1")) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One with users: moonpool may do as it likes below /moonpool/, and root everywhere."""
    with EtcdServer(tmp_path_factory.mktemp("etcd-users")) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            auth = etcd.AuthStub(channel)
            for name in ("root", "moonpool"):
                auth.UserAdd(etcd.AuthUserAddRequest(name=name, password=PASSWORD), timeout=10)
                auth.RoleAdd(etcd.AuthRoleAddRequest(name=name), timeout=10)
                auth.UserGrantRole(etcd.AuthUserGrantRoleRequest(user=name, role=name), timeout=10)
            grant = etcd.AuthRoleGrantPermissionRequest(name="moonpool")
            grant.perm.permType, grant.perm.key, grant.perm.range_end = 2, b"/moonpool/", b"/moonpool0"  # READWRITE
            auth.RoleGrantPermission(grant, timeout=10)
            auth.AuthEnable(etcd.AuthEnableRequest(), timeout=10)
        yield server


def shown(folder: Path) -> SecurityConfig:
    """The values of a process whose files are in ``folder``."""
    return SecurityConfig(etcd_ca=str(folder / "ca.pem"), etcd_cert=str(folder / "cert.pem"), etcd_key=str(folder / "key.pem"))


def secret(folder: Path, password: str = PASSWORD) -> SecurityConfig:
    file = folder / "password"
    file.write_text(f"{password}\n")
    file.chmod(0o600)
    return SecurityConfig(etcd_user="moonpool", etcd_password_file=str(file))


def registry(server: EtcdServer, security: SecurityConfig, scheme: str = "etcd", name: str = "red") -> str:
    cluster = ClusterConfig(name=name, registry=f"{scheme}://127.0.0.1:{server.port}/moonpool")
    return registry_of(Config(cluster=cluster, security=security))


async def test_members_meet_in_an_etcd_that_asks_for_certificates(private: EtcdServer, certificates: Certificates) -> None:
    where = registry(private, shown(certificates.of(Party.GATEWAY)), "etcds")
    async with members(where, 2) as (one, other):
        await one.peers.join(member())
        await other.hears((NAME, 1, "live"))
        one.peers.update(replace(member(), ready=False))
        await other.until(lambda: [m.ready for m in other.peers.live(Role.PREFILL)] == [False])
        assert [change.member.id for change in await survey_members(where)] == [NAME]


async def test_without_a_certificate_or_the_right_authority_nobody_is_let_in(
    private: EtcdServer, certificates: Certificates, tmp_path: Path
) -> None:
    stranger = Certificates(tmp_path).of(Party.GATEWAY)
    only_ca = SecurityConfig(etcd_ca=str(certificates.of(Party.GATEWAY) / "ca.pem"))
    for security, scheme in ((only_ca, "etcds"), (shown(stranger), "etcds"), (SecurityConfig(), "etcd")):
        with pytest.raises(NoPath, match="does not answer"):
            await survey_members(registry(private, security, scheme))


async def test_members_meet_in_an_etcd_that_has_users(guarded: EtcdServer, tmp_path: Path) -> None:
    where = registry(guarded, secret(tmp_path))
    async with members(where, 2) as (one, other):
        await one.peers.join(member())
        await other.hears((NAME, 1, "live"))
        await one.peers.leave()
        await other.hears((NAME, 1, "gone"))


async def test_a_wrong_password_is_told_and_shown_to_nobody(guarded: EtcdServer, tmp_path: Path) -> None:
    for security in (secret(tmp_path, "a wrong guess"), SecurityConfig()):
        with pytest.raises(NoPath, match="does not answer") as refused:
            await survey_members(registry(guarded, security))
        assert "guess" not in refused.value.message


async def test_keys_of_others_are_closed_to_the_user(guarded: EtcdServer, tmp_path: Path) -> None:
    elsewhere = registry(guarded, secret(tmp_path)).replace("/moonpool/red", "/others/red")
    with pytest.raises(NoPath, match="permission denied"):
        await survey_members(elsewhere)


async def test_a_restarted_etcd_is_logged_into_again(guarded: EtcdServer, tmp_path: Path) -> None:
    """Its tokens are gone with it."""
    async with members(registry(guarded, secret(tmp_path), name="blue"), 1) as (one,):
        await one.peers.join(member())
        guarded.kill()
        guarded.start()
        late = Seen(registry(guarded, secret(tmp_path), name="blue"))
        await late.hears((NAME, 1, "live"))
        await late.peers.leave()


def test_an_address_carries_names_of_files_and_nothing_that_is_in_them(tmp_path: Path) -> None:
    where = registry_of(Config(cluster=ClusterConfig(name="red", registry="etcds://a:1,b:2"), security=secret(tmp_path)))
    address = EtcdAddress.parse(where)
    assert address.access == Access(user="moonpool", password_file=str(tmp_path / "password"))
    assert str(address) == where and address.secure and address.prefix == "/moonpool/red"
    assert PASSWORD not in where


@pytest.mark.parametrize(
    ("security", "wrong"),
    [
        (SecurityConfig(etcd_user="u"), "etcd_password_file: missing"),
        (SecurityConfig(etcd_password_file="p"), "etcd_user: missing"),
        (SecurityConfig(etcd_cert="c"), "etcd_key: missing"),
        (SecurityConfig(etcd_ca="c"), "by TLS only"),
    ],
)
def test_halves_and_what_is_of_no_use_are_refused(security: SecurityConfig, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        registry_of(Config(cluster=ClusterConfig(registry="etcd://a:1"), security=security))


@pytest.mark.parametrize("query", ["password=x", "ca", "user=a&&"])
def test_what_no_address_carries_is_refused(query: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.registry|security"):
        EtcdAddress.parse(f"etcds://a:1/p?{query}")
