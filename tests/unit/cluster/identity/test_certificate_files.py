"""The authority, who takes which files, renewal in time, and what a configuration exposes."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from support.certificates import HOUR, OVER, Certificates

from moonpool.cluster.identity.authority import Authority, utc_now
from moonpool.cluster.identity.exposure import exposures, require_unexposed
from moonpool.cluster.identity.folders import folder_of, make_for, require_good, take, take_operator
from moonpool.cluster.identity.https import Https, https_of
from moonpool.cluster.identity.keeper import Keeper
from moonpool.cluster.identity.told import own_certificate
from moonpool.cluster.restart import _answers
from moonpool.cluster.spec import with_absolute_paths
from moonpool.core.config import ClusterConfig, Config, GatewayConfig, SecurityConfig
from moonpool.core.errors import ConfigError
from moonpool.core.principal import IDENTITY, Party
from moonpool.wire.identity import Identity, version


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IDENTITY, "")


def config(tmp_path: Path, **security: object) -> Config:
    cluster = ClusterConfig(name="test", state_dir=str(tmp_path / "state"))
    return with_absolute_paths(Config(cluster=cluster, security=SecurityConfig.model_validate(security)), tmp_path)


def test_processes_that_start_together_share_one_authority(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as starting:
        opened = [starting.submit(Authority.open, tmp_path / "ca", "test", utc_now()) for _ in range(4)]
        assert len({one.result().certificate.serial_number for one in opened}) == 1
    assert (tmp_path / "ca/ca.key.pem").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "ca").stat().st_mode & 0o777 == 0o700


def test_a_renewed_certificate_keeps_its_key_and_says_the_same(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    before = Identity.read(certificates.of(Party.GATEWAY, "gateway-0"))
    seen = version(certificates.folder / "gateway-0")
    after = Identity.read(certificates.of(Party.GATEWAY, "gateway-0", 2 * HOUR))
    assert (after.key, after.says.principal) == (before.key, before.says.principal)
    assert after.says.ends > before.says.ends
    assert version(certificates.folder / "gateway-0") != seen


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    folder = certificates.of(Party.GATEWAY, life=timedelta(days=50_000))
    assert Identity.read(folder).says.ends <= certificates.authority.certificate.not_valid_after_utc


def test_an_authority_whose_key_others_can_read_signs_nothing(tmp_path: Path) -> None:
    Certificates(tmp_path)
    (tmp_path / "ca/ca.key.pem").chmod(0o644)
    with pytest.raises(ConfigError, match="others can read it"):
        Authority.open(tmp_path / "ca", "test", utc_now())


def test_each_member_has_its_folder_and_a_given_folder_serves_one_or_all(tmp_path: Path) -> None:
    assert folder_of(config(tmp_path), "prefill-0") is None
    assert folder_of(config(tmp_path, tls="auto"), "prefill-0") == tmp_path / "state/tls/prefill-0"
    given = tmp_path / "given"
    (given / "prefill-0").mkdir(parents=True)
    files = config(tmp_path, tls="files", tls_dir=str(given))
    assert folder_of(files, "prefill-0") == given / "prefill-0"
    assert folder_of(files, "prefill-1") == given


def test_a_process_takes_its_own_and_one_without_tls_nobodys(tmp_path: Path) -> None:
    auto = config(tmp_path, tls="auto")
    make_for(auto, [(Party.PREFILL, "prefill-0"), (Party.OPERATOR, "operator")])
    take(auto, "prefill-0")
    assert os.environ[IDENTITY] == str(tmp_path / "state/tls/prefill-0")
    numbers, words = own_certificate()
    assert 80_000 < numbers["certificate_left_s"] < numbers["certificate_life_s"] < 90_000
    assert words["certificate"].startswith("until ")
    take(config(tmp_path), "prefill-0")
    assert os.environ[IDENTITY] == "" and own_certificate() == ({}, {})
    take_operator(config(tmp_path), str(tmp_path / "state/tls/operator"))
    assert os.environ[IDENTITY] == str(tmp_path / "state/tls/operator")


@pytest.mark.parametrize(
    ("cluster", "life", "wrong"), [("test", OVER, "expired at .* certs renew"), ("other", HOUR, "of the cluster 'other'")]
)
def test_a_certificate_that_does_not_do_is_told_before_anything_starts(
    tmp_path: Path, cluster: str, life: timedelta, wrong: str
) -> None:
    folder = Certificates(tmp_path, cluster).of(Party.GATEWAY, life=life)
    with pytest.raises(ConfigError, match=wrong):
        require_good(folder, "test")


def test_a_missing_certificate_is_told_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*key\.pem.*moonpool certs make"):
        take(config(tmp_path, tls="files", tls_dir=str(tmp_path)), "prefill-0")


async def test_certificates_are_made_anew_from_time_to_time_also_after_a_failure(tmp_path: Path) -> None:
    made: asyncio.Queue[list[str]] = asyncio.Queue()
    loop, said, failures = asyncio.get_running_loop(), [], [False, True, False]

    def make(_: Config, processes: object) -> None:
        fails = failures.pop(0) if failures else False
        loop.call_soon_threadsafe(made.put_nowait, [member for _, member in processes])  # type: ignore[attr-defined]
        if fails:
            raise ConfigError("no space")

    keeper = Keeper(config(tmp_path, tls="auto"), said.append, every_s=0.01, make=make)
    keeper.add((Party.STORE, "store-a"))
    async with asyncio.timeout(10):
        assert [await made.get() for _ in range(3)] == [["store-a"]] * 3
    await keeper.close()
    assert said == ["certificates are not renewed: no space"]


async def test_without_tls_nothing_is_made(tmp_path: Path) -> None:
    keeper = Keeper(config(tmp_path), print)
    keeper.add((Party.STORE, "store-a"))
    await keeper.close()
    assert not (tmp_path / "state").exists()


# HTTPS


async def served_serial(https: Https) -> int:
    """The certificate that a new connection is shown."""
    from cryptography import x509

    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(quiet, "127.0.0.1", 0, ssl=https.context)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2], ssl=context)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
    finally:
        server.close()
    return x509.load_der_x509_certificate(shown).serial_number


async def test_a_restart_believes_the_gateway_by_its_own_certificate_whatever_host_it_is_for(tmp_path: Path) -> None:
    folder = Certificates(tmp_path).https()
    https = https_of(https_values(folder))
    assert https is not None

    async def ready(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(ready, "127.0.0.1", 0, ssl=https.context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert await asyncio.to_thread(_answers, url, str(folder / "cert.pem"))
    assert await asyncio.to_thread(_answers, url, str(folder / "ca.pem"))
    assert not await asyncio.to_thread(_answers, url, "")
    server.close()
    await https.close()


def https_values(folder: Path) -> SecurityConfig:
    return SecurityConfig(https_cert=str(folder / "cert.pem"), https_key=str(folder / "key.pem"))


async def test_a_replaced_https_certificate_is_shown_to_the_next_client(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    https = https_of(https_values(certificates.https()))
    assert https is not None
    first = await served_serial(https)
    certificates.https()
    https.look()
    second = await served_serial(https)
    assert second != first
    (tmp_path / "https/cert.pem").write_text("nothing")
    https.look()
    assert await served_serial(https) == second, "what is damaged does not count"
    await https.close()


def break_mode(folder: Path) -> SecurityConfig:
    (folder / "key.pem").chmod(0o644)
    return https_values(folder)


def break_pair(folder: Path) -> SecurityConfig:
    other = Certificates(folder / "other").https()
    return SecurityConfig(https_cert=str(folder / "cert.pem"), https_key=str(other / "key.pem"))


@pytest.mark.parametrize(
    ("broken", "wrong"),
    [
        (break_mode, r"https_key: .* others can read it"),
        (break_pair, r"https_cert: cannot use .*KEY_VALUES_MISMATCH"),
        (lambda folder: SecurityConfig(https_cert=str(folder / "cert.pem")), r"https_key: missing"),
        (lambda folder: https_values(folder / "none"), r"https_key: cannot read .*certs make --https HOST"),
        (
            lambda folder: SecurityConfig(https_cert=str(folder / "key.pem"), https_key=str(folder / "key.pem")),
            "no certificate",
        ),
    ],
)
async def test_https_files_that_do_not_do_are_told(
    tmp_path: Path, broken: Callable[[Path], SecurityConfig], wrong: str
) -> None:
    with pytest.raises(ConfigError, match=wrong):
        https_of(broken(Certificates(tmp_path).https()))


async def test_without_https_files_there_is_none() -> None:
    assert https_of(SecurityConfig()) is None


# what others reach


@pytest.mark.parametrize(
    ("cluster_host", "http_host", "security", "refused", "warned"),
    [
        ("127.0.0.1", "127.0.0.1", {}, False, 0),
        ("::1", "localhost", {}, False, 0),
        ("10.0.0.1", "127.0.0.1", {}, True, 0),
        ("10.0.0.1", "127.0.0.1", {"allow_plain": True}, False, 1),
        ("10.0.0.1", "127.0.0.1", {"tls": "auto"}, False, 0),
        ("127.0.0.1", "0.0.0.0", {}, False, 2),
        ("127.0.0.1", "0.0.0.0", {"api_keys_file": "k"}, False, 1),
        ("127.0.0.1", "0.0.0.0", {"api_keys_file": "k", "https_cert": "c", "https_key": "k"}, False, 0),
        ("node.example", "127.0.0.1", {}, True, 0),
    ],
)
def test_ports_off_loopback_are_refused_or_told(
    cluster_host: str, http_host: str, security: dict[str, object], refused: bool, warned: int
) -> None:
    values = Config(
        cluster=ClusterConfig(host=cluster_host),
        gateway=GatewayConfig(host=http_host),
        security=SecurityConfig.model_validate(security),
    )
    if refused:
        with pytest.raises(ConfigError, match="allow_plain"):
            require_unexposed(values)
    else:
        assert len(require_unexposed(values)) == warned
    assert any(one.refused for one in exposures(values)) is refused
