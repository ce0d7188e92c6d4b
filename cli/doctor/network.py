"""Ports that are to be taken, and whom this machine has to reach: registry or etcd, and Ray."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from moonpool.cli.doctor.child import run_child, works
from moonpool.cli.doctor.finding import Finding, fail, ok, warn
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError, NoPath

ANSWER_S = 15.0  # of all endpoints of a registry together
CONNECT_S = 3.0
RAY_S = 30.0
CROWDED = 1_600 << 20  # bytes of etcd's database; its own limit is 2 GiB unless it was raised
OLDEST_ETCD = (3, 4)
LOG_IN = "set security.etcd_user and security.etcd_password_file"
RAY_TOKEN = Path(".ray/auth_token")


def ports(config: Config) -> Iterator[Finding]:
    from moonpool.cluster.own_host import LOOPBACK, with_own_host

    config = with_own_host(config, LOOPBACK)  # which address it will be matters little to whether a port is free
    yield gateway_port(config)
    cluster, nodes = config.cluster, config.cluster.nodes
    processes = sum(1 + n.prefill + n.decode + n.both + n.conductor + n.gateway for n in nodes)
    for name, host, first, count in (
        ("cluster.probe_port", cluster.probe_host, cluster.probe_port, processes),
        ("cluster.port", cluster.host, cluster.port, processes),
        ("transfer.port", cluster.host, config.transfer.port, len(nodes)),
    ):
        if first:
            yield ports_from(name, host, first, count)


def gateway_port(config: Config) -> Finding:
    from moonpool.cluster.launch.state import StateDir
    from moonpool.cluster.launch.supervisor import require_free_port

    try:
        require_free_port(config)
    except ConfigError as e:
        running = StateDir(Path(config.cluster.state_dir)).read()
        if running is not None and running.url.endswith(f":{config.gateway.port}"):
            return ok(f"gateway: {running.url} is the cluster {running.name!r} that runs here")
        return warn(e.message.partition(";")[0], "stop what listens there, or give another --port")
    if not config.gateway.port:
        return ok("gateway.port: any free one")
    return ok(f"gateway.port: {config.gateway.port} is free")


def ports_from(name: str, host: str, first: int, count: int) -> Finding:
    """Of a setting that gives the first of ``count`` ports: one for each process of the cluster that is configured here."""
    taken = [port for port in range(first, min(first + count, 65_536)) if not _free(host, port)]
    text = f"{name}: {first} to {first + count - 1}" if count > 1 else f"{name}: {first}"
    if first + count - 1 > 65_535:
        return fail(f"{text} are {count} ports, and 65535 is the last", f"set it to {65_536 - count} or less, or to 0")
    if taken:
        return warn(f"{text}: taken are {', '.join(map(str, taken))}", f"stop what listens there, or set another {name}")
    return ok(f"{text}, free")


def _free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def registry(config: Config) -> Iterator[Finding]:
    from moonpool.cluster.etcd.address import is_etcd, registry_of
    from moonpool.cluster.identity.folders import take_operator

    if not config.cluster.registry:
        return
    where = registry_of(config)
    if is_etcd(where):
        yield from asyncio.run(_etcd(where))
    else:
        take_operator(config, "")
    yield check_registry(config)


def check_registry(config: Config) -> Finding:
    from moonpool.cluster.etcd.address import is_etcd, registry_of
    from moonpool.cluster.survey import members

    where = registry_of(config)

    async def ask() -> int:
        async with asyncio.timeout(ANSWER_S):
            return len(await members(where))

    fix = "start etcd" if is_etcd(where) else "moonpool run registry"
    try:
        known = asyncio.run(ask())
    except NoPath as e:
        return fail(e.message, LOG_IN if _refused(e.message) else fix)
    except TimeoutError:
        return fail(f"registry: {where} does not answer within {ANSWER_S:.0f} s", fix)
    return ok(f"registry {where} answers; members it knows: {known}")


async def _etcd(where: str) -> list[Finding]:
    """Of each endpoint: version, leader, size, and how long it took to say so. All of them at once."""
    from moonpool.cluster.etcd.address import EtcdAddress
    from moonpool.cluster.etcd.login import Login

    address = EtcdAddress.parse(where)
    login = Login.read(address)
    found = await asyncio.gather(*(_endpoint(endpoint, login) for endpoint in address.endpoints))
    host = address.endpoints[0].rpartition(":")[0].strip("[]")
    if not address.secure and not _loopback(host):
        found.append(warn(f"etcd at {host} is asked in the clear", "use etcds:// with security.etcd_ca"))
    return list(found)


async def _endpoint(endpoint: str, login: object) -> Finding:
    from moonpool.cluster.etcd.client import Away, Etcd
    from moonpool.cluster.etcd.login import Login

    assert isinstance(login, Login)
    etcd, begun = Etcd(endpoint, lambda: None, login), time.monotonic()
    try:
        says = await etcd.status()
    except Away as e:
        return _away(endpoint, str(e), bool(login.user))
    finally:
        etcd.close()
    text = f"etcd {endpoint}: version {says.version}, {says.bytes / 1e6:.1f} MB, {1e3 * (time.monotonic() - begun):.0f} ms"
    if login.user:
        text += f", as user {login.user[0]}"
    if not says.leader:
        return fail(f"{text}, without a leader", "start the other members of etcd: most of them are needed")
    if tuple(int(part) for part in says.version.split(".")[:2] if part.isdigit()) < OLDEST_ETCD:
        return warn(text, "use etcd 3.4 or newer")
    if says.bytes > CROWDED:
        return warn(text, "etcdctl defrag, or raise --quota-backend-bytes: above its limit it takes no more writes")
    return ok(text)


def _away(endpoint: str, why: str, has_user: bool) -> Finding:
    if _refused(why):
        return fail(f"etcd {endpoint} lets nobody in: {why}", "check that user and its password" if has_user else LOG_IN)
    return fail(f"etcd {endpoint} does not answer: {why}", "start etcd, or mend the way there (firewall, TLS: etcds://)")


def _refused(why: str) -> bool:
    return any(word in why for word in ("UNAUTHENTICATED", "PERMISSION_DENIED", "authentication", "user name is empty"))


def _loopback(host: str) -> bool:
    from moonpool.cluster.identity.exposure import is_loopback

    return is_loopback(host)


def ray(config: Config) -> Iterator[Finding]:
    """An existing Ray where one is named, else whether this machine can start its own."""
    if config.cluster.launcher != "ray":
        return
    yield works("ray can be imported", "import ray", "run scripts/setup again, or use --launcher process")
    named = config.cluster.ray_address
    address = os.environ.get("RAY_ADDRESS", "") if named == "auto" else named
    if address not in ("", "local", "auto"):
        yield from _ray_at(address)
    elif named == "auto":
        yield warn(
            "cluster.ray_address is auto, and there is no RAY_ADDRESS here", "run it by ray job submit, or name host:6379"
        )


def _ray_at(address: str) -> Iterator[Finding]:
    yield from of_ray_token(os.environ, Path.home())
    kind, _, rest = address.partition("://") if "://" in address else ("", "", address)
    host, _, port = rest.partition("/")[0].rpartition(":")
    if not host or not port.isdigit():
        yield fail(f"Ray at {address!r}: that is not host:port", "write host:6379, ray://host:10001 or http://host:8265")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as e:
        fix = "start it (ray start --head), open the port, or set cluster.ray_address to local for a Ray of its own"
        yield fail(f"Ray at {address}: nobody listens ({e.strerror or e})", fix)
        return
    if kind:
        yield ok(f"Ray at {address} takes connections")
        return
    command = (sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address)
    ended = run_child(command, limit_s=RAY_S)
    fix = "use the same Ray version and, with token authentication, the same token on both sides"
    yield fail(f"Ray at {address}: {ended.trouble}", fix) if ended.trouble else ok(f"Ray at {address} is healthy")


def of_ray_token(environment: Mapping[str, str], home: Path) -> Iterator[Finding]:
    """Token authentication is on by default: without a token every call to Ray is refused."""
    if environment.get("RAY_AUTH_MODE", "token") != "token":
        yield ok(f"RAY_AUTH_MODE: {environment['RAY_AUTH_MODE']}")
        return
    named = environment.get("RAY_AUTH_TOKEN_PATH", "")
    file = Path(named) if named else home / RAY_TOKEN
    if environment.get("RAY_AUTH_TOKEN") or file.is_file():
        yield ok("Ray's token is here")
    else:
        fix = "set RAY_AUTH_TOKEN_PATH to a file with the cluster's token (ray get-auth-token), or RAY_AUTH_MODE=disabled"
        yield warn(f"Ray's token: none in {file} or the environment", fix)
