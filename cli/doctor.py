"""``moonpool doctor``: what this machine has and lacks, each line with its fix."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moonpool.cli.options import ConfigFile, Settings, read_config

if TYPE_CHECKING:
    from moonpool.core.config import Config

GIB = 1 << 30
LEAST_FILES = 4_096
SOON_S = 7 * 86_400.0
TRY_UCX = """
import os
os.environ.update({name: value for name, value in (("UCX_TLS", "tcp"), ("UCX_LOG_LEVEL", "error")) if name not in os.environ})
if not os.path.exists("/sys/class/infiniband"):
    os.environ.setdefault("UCX_MODULES", "^ib")
from nixl_cu12._api import nixl_agent, nixl_agent_config
nixl_agent("doctor", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """``grade``: ok, warn or fail. ``fix`` is empty for ok."""

    grade: str
    what: str
    fix: str = ""


def doctor(config_file: ConfigFile = None, settings: Settings = None) -> None:
    """Check this machine: each line is ok, warn or fail, with what to do about it. Exit code 1 if anything fails."""
    config, _ = read_config(config_file, settings)
    worst = 0
    for finding in _findings(config):
        worst = max(worst, finding.grade == "fail")
        print(f"{finding.grade:<5} {finding.what}" + (f" -> {finding.fix}" if finding.fix else ""), flush=True)
    raise typer.Exit(worst)


def _findings(config: Config) -> Iterator[Finding]:
    yield _python()
    yield _cores(config)
    yield _memory()
    yield _shared_memory(config)
    yield _files()
    yield _child("UCX through NIXL", TRY_UCX, "reinstall nixl-cu12; on a host without RDMA set UCX_MODULES=^ib")
    yield _child("ray", "import ray", "run scripts/setup again, or use --launcher process")
    yield _model(config)
    yield _port(config)
    yield from _security(config)
    yield from files_named(config)
    if config.cluster.registry:
        yield check_registry(config)
    yield _state(config)


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("ok", f"python {found}") if sys.version_info >= (3, 11) else Finding("fail", f"python {found}", "use 3.11")


def _cores(config: Config) -> Finding:
    cores = len(os.sched_getaffinity(0))
    workers = sum(n.prefill + n.decode + n.both for n in config.cluster.nodes)
    if workers > cores:
        return Finding("warn", f"{cores} cores for {workers} workers", "they share cores: expect slower tokens, or run fewer")
    return Finding("ok", f"{cores} cores for {workers} workers")


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available
    text = f"{free / GIB:.1f} GiB of memory available"
    return Finding("ok", text) if free > 6 * GIB else Finding("warn", text, "set store.pool_bytes and engine.page_bytes lower")


def _shared_memory(config: Config) -> Finding:
    folder = Path(config.store.directory or "/dev/shm")
    try:
        free = shutil.disk_usage(folder).free
    except OSError as e:
        return Finding("fail", f"{folder}: {e.strerror}", "set store.directory to a folder on a memory file system")
    wanted = config.store.pool_bytes * len(config.cluster.nodes)
    text = f"{folder}: {free / GIB:.1f} GiB free"
    if free < max(wanted, GIB):
        return Finding("fail", text, "lower store.pool_bytes, or mount it larger (containers: --shm-size)")
    return Finding("ok", text)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files allowed"
    return Finding("ok", text) if soft >= LEAST_FILES else Finding("warn", text, f"ulimit -n {min(hard, 65_536)}")


def _child(name: str, code: str, fix: str) -> Finding:
    """In a process of its own: a library that crashes shall not take the doctor along."""
    try:
        done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return Finding("fail", f"{name}: no answer within 60 s", fix)
    if done.returncode == 0:
        return Finding("ok", name)
    why = f"killed by signal {-done.returncode}" if done.returncode < 0 else (done.stderr.strip().splitlines() or [""])[-1]
    return Finding("fail", f"{name}: {why}", fix)


def _model(config: Config) -> Finding:
    path = config.model.path
    for folder in (Path(path).expanduser(), Path.home() / ".cache/moonpool/models" / path):
        if (folder / "config.json").is_file():
            return Finding("ok", f"model {path}: {folder}")
    return Finding("warn", f"model {path} is not here yet", f"moonpool model fetch {path} (`moonpool up` does it, too)")


def _port(config: Config) -> Finding:
    from moonpool.cluster.launch.supervisor import require_free_port
    from moonpool.core.errors import ConfigError

    try:
        require_free_port(config)
    except ConfigError as e:
        return Finding("warn", e.message, "give another --port")
    return Finding("ok", f"port {config.gateway.port} is free")


def _security(config: Config) -> Iterator[Finding]:
    """Certificates that are there, and ports that others reach."""
    from moonpool.cluster.identity.authority import utc_now
    from moonpool.cluster.identity.exposure import exposures
    from moonpool.cluster.identity.folders import FOLDER
    from moonpool.cluster.identity.told import folders_below, shown

    for exposure in exposures(config):
        yield Finding("fail" if exposure.refused else "warn", exposure.what, exposure.fix)
    security = config.security
    where = Path(security.tls_dir) if security.tls == "files" else Path(config.cluster.state_dir) / FOLDER
    found = [] if security.tls == "off" else [shown(folder) for folder in folders_below(where)]
    if security.tls == "files" and not found:
        yield Finding("fail", f"security.tls_dir: no certificate in {where}", "moonpool certs make")
    for one in found:
        left_s = one.says.left_s(utc_now()) if one.says else 0.0
        if one.says is None:
            yield Finding("fail", one.trouble, f"make it anew: moonpool certs make --out {one.folder}")
        elif left_s <= 0:
            yield Finding("fail", f"{one.says.principal.uri} has expired", f"moonpool certs renew {one.folder}")
        elif security.tls == "files" and left_s < SOON_S:
            yield Finding("warn", f"{one.says.principal.uri} expires in {left_s / 86_400:.1f} days", "moonpool certs renew")
        else:
            yield Finding("ok", f"{one.says.principal.uri} until {one.says.ends:%Y-%m-%d %H:%M} UTC")


def files_named(config: Config) -> Iterator[Finding]:
    """What a start would read: the HTTPS certificate, API keys, the key of KV where it is made already."""
    from moonpool.cluster.gateway.tenants.file import read_book
    from moonpool.cluster.identity.https import server_context
    from moonpool.core.errors import ConfigError
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
            yield Finding("fail", told or e.message, fix if told else f"mend or replace {what}")
        else:
            yield Finding("ok", what)


def check_registry(config: Config) -> Finding:
    import asyncio

    from moonpool.cluster.etcd.address import is_etcd, registry_of
    from moonpool.cluster.survey import members
    from moonpool.core.errors import NoPath

    registry = registry_of(config)
    try:
        known = asyncio.run(members(registry))
    except NoPath as e:
        return Finding("fail", e.message, "start etcd" if is_etcd(registry) else "moonpool run registry")
    return Finding("ok", f"registry {registry} answers; members it knows: {len(known)}")


def _state(config: Config) -> Finding:
    from moonpool.cluster.launch.state import StateDir

    state = StateDir(Path(config.cluster.state_dir))
    there = next(folder for folder in (state.path, *state.path.parents) if os.path.exists(folder))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("fail", f"cluster.state_dir: cannot write {there}", "set cluster.state_dir")
    left = state.recorded()
    if left and state.read() is None:
        return Finding("warn", f"left by a dead cluster: {', '.join(left)}", "moonpool down")
    return Finding("ok", f"state in {state.path}")
