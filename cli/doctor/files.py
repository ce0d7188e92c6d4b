"""Certificates, keys, and ports that others reach: what a start would read, and refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from moonpool.cli.doctor.finding import Finding, fail, ok, warn
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError

SOON_S = 7 * 86_400.0


def exposed(config: Config) -> Iterator[Finding]:
    from moonpool.cluster.identity.exposure import exposures

    for exposure in exposures(config):
        yield fail(exposure.what, exposure.fix) if exposure.refused else warn(exposure.what, exposure.fix)


def certificates(config: Config) -> Iterator[Finding]:
    from moonpool.cluster.identity.authority import utc_now
    from moonpool.cluster.identity.folders import FOLDER
    from moonpool.cluster.identity.told import folders_below, shown

    security = config.security
    where = Path(security.tls_dir) if security.tls == "files" else Path(config.cluster.state_dir) / FOLDER
    found = [] if security.tls == "off" else [shown(folder) for folder in folders_below(where)]
    if security.tls == "files" and not found:
        yield fail(f"security.tls_dir: no certificate in {where}", "moonpool certs make")
    for one in found:
        left_s = one.says.left_s(utc_now()) if one.says else 0.0
        if one.says is None:
            yield fail(one.trouble, f"make it anew: moonpool certs make --out {one.folder}")
        elif left_s <= 0:
            yield fail(f"{one.says.principal.uri} has expired", f"moonpool certs renew {one.folder}")
        elif security.tls == "files" and left_s < SOON_S:
            yield warn(f"{one.says.principal.uri} expires in {left_s / 86_400:.1f} days", "moonpool certs renew")
        else:
            yield ok(f"{one.says.principal.uri} until {one.says.ends:%Y-%m-%d %H:%M} UTC")


def files_named(config: Config) -> Iterator[Finding]:
    """What a start would read: the HTTPS certificate, API keys, the key of KV where it is made already."""
    from moonpool.cluster.gateway.tenants.file import read_book
    from moonpool.cluster.identity.https import server_context
    from moonpool.kvstore.sealing.keys import kv_keys

    security, home = config.security, Path.home()
    looks: list[tuple[str, Callable[[], object]]] = []
    if security.https_cert:
        cert, key = Path(security.https_cert), Path(security.https_key)
        looks.append((f"HTTPS certificate {cert}", lambda: server_context(cert, key)))
    if security.api_keys_file:
        looks.append((f"API keys in {security.api_keys_file}", lambda: read_book(Path(security.api_keys_file))))
    if security.kv_encryption != "off" and config.kv_key_file(home).exists():
        looks.append((f"KV key {config.kv_key_file(home)}", lambda: kv_keys(config, home)))
    for what, look in looks:
        try:
            look()
        except ConfigError as e:
            told, _, fix = e.message.rpartition("; ")
            yield fail(told or e.message, fix if told else f"mend or replace {what}")
        else:
            yield ok(what)
