"""Ports that are taken, registries and Rays that are not there, or take calls and never answer."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.deaf_server import deaf_server
from support.etcd_server import EtcdServer, free_port

from moonpool.cli.doctor import network
from moonpool.cli.doctor.finding import Finding, Grade
from moonpool.core.config import ClusterConfig, Config, GatewayConfig, NodeConfig


@contextmanager
def listening() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def of(config: Config, check: str) -> list[Finding]:
    return list(getattr(network, check)(config))


def with_registry(registry: str, tmp_path: Path) -> Config:
    return Config(cluster=ClusterConfig(name="red", registry=registry, state_dir=str(tmp_path)))


def test_a_port_that_is_taken_is_named_with_what_to_do(tmp_path: Path) -> None:
    with listening() as port:
        (gateway,) = of(Config(gateway=GatewayConfig(port=port), cluster=ClusterConfig(state_dir=str(tmp_path))), "ports")
        assert gateway.grade is Grade.WARN
        assert str(port) in gateway.what and "--port" in gateway.fix
        nodes = (NodeConfig(name="a", both=1),)
        cluster = ClusterConfig(state_dir=str(tmp_path), probe_port=port - 1, nodes=nodes)
        gateway, probes = of(Config(gateway=GatewayConfig(port=0), cluster=cluster), "ports")
    assert gateway.grade is Grade.OK
    assert (probes.grade, f"taken are {port}" in probes.what) == (Grade.WARN, True)
    cluster = ClusterConfig(state_dir=str(tmp_path), probe_port=65_535, nodes=nodes)
    _, probes = of(Config(gateway=GatewayConfig(port=0), cluster=cluster), "ports")
    assert (probes.grade, "set it to 65534 or less" in probes.fix) == (Grade.FAIL, True)


@pytest.mark.processes
def test_etcd_is_asked_for_its_version_and_whether_it_lets_one_in(tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "etcd") as etcd:
        config = with_registry(f"etcd://127.0.0.1:{etcd.port}", tmp_path)
        version, members = of(config, "registry")
        assert (version.grade, members.grade) == (Grade.OK, Grade.OK)
        assert f"etcd 127.0.0.1:{etcd.port}: version 3." in version.what
        assert f"etcd://127.0.0.1:{etcd.port}/moonpool/red answers; members it knows: 0" in members.what
        ctl = ("etcdctl", f"--endpoints=127.0.0.1:{etcd.port}")
        try:
            for words in (("user", "add", "root:secret"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
                subprocess.run((*ctl, *words), check=True, capture_output=True, timeout=20)
        except FileNotFoundError:
            pytest.skip("no etcdctl here; scripts/setup --dev installs it (Debian: etcd-client)")
        *_, members = of(config, "registry")
        assert (members.grade, "security.etcd_user" in members.fix) == (Grade.FAIL, True)
    away, members = of(config, "registry")
    assert (away.grade, members.grade, members.fix) == (Grade.FAIL, Grade.FAIL, "start etcd")
    assert "does not answer" in away.what and "does not answer" in members.what


async def test_an_etcd_that_takes_calls_and_never_answers_costs_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.cluster.etcd.client.CALL_S", 0.2)
    async with deaf_server() as (address, called):
        findings = await network._etcd(f"etcd://{address}/moonpool/red")
        assert called.get_nowait() == "/etcdserverpb.Maintenance/Status"
    assert [finding.grade for finding in findings] == [Grade.FAIL]
    assert f"etcd {address} does not answer: DEADLINE_EXCEEDED" in findings[0].what


def test_a_registry_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    (finding,) = of(with_registry(f"127.0.0.1:{free_port()}", tmp_path), "registry")
    assert (finding.grade, finding.fix) == (Grade.FAIL, "moonpool run registry")
    assert not of(with_registry("", tmp_path), "registry")


def test_a_ray_that_is_named_and_not_there_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    address, begun = f"127.0.0.1:{free_port()}", time.monotonic()
    mode, connection = network._ray_at(address)
    assert mode.grade is Grade.OK
    assert (connection.grade, f"Ray at {address}: nobody listens" in connection.what) == (Grade.FAIL, True)
    assert "cluster.ray_address" in connection.fix
    assert time.monotonic() - begun < 10.0
    (_, odd) = network._ray_at("somewhere")
    assert "that is not host:port" in odd.what
    with listening() as port:
        (_, client) = network._ray_at(f"ray://127.0.0.1:{port}")
    assert client.grade is Grade.OK


def test_without_rays_token_one_is_told_where_it_belongs(tmp_path: Path) -> None:
    (missing,) = network.of_ray_token({}, tmp_path)
    assert (missing.grade, "RAY_AUTH_TOKEN_PATH" in missing.fix) == (Grade.WARN, True)
    token = tmp_path / ".ray/auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    assert [f.grade for f in network.of_ray_token({}, tmp_path)] == [Grade.OK]
    assert [f.grade for f in network.of_ray_token({"RAY_AUTH_TOKEN": "secret"}, Path("/nowhere"))] == [Grade.OK]
    assert [f.what for f in network.of_ray_token({"RAY_AUTH_MODE": "disabled"}, Path("/nowhere"))] == [
        "RAY_AUTH_MODE: disabled"
    ]
