"""A cluster of one's own for the length of a measurement, started and stopped the way a user does it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from moonpool.cluster.launch.state import StateDir
from moonpool.core.errors import ConfigError

_START_S = 300.0
_STOP_S = 180.0

BOTH = '[{"name": "a", "both": 1, "conductor": 1, "gateway": 1}]'
SPLIT = '[{"name": "a", "prefill": 1}, {"name": "b", "decode": 1, "conductor": 1, "gateway": 1}]'


@dataclass(frozen=True, slots=True)
class LocalCluster:
    url: str
    registry: str  # host:port
    state_dir: Path
    supervisor: int  # process id


@contextmanager
def local_cluster(
    nodes: str,
    model_dir: Path,
    settings: Mapping[str, str],
    *,
    launcher: Literal["ray", "process"] = "process",
    environment: Mapping[str, str] | None = None,
) -> Iterator[LocalCluster]:
    """``moonpool up --detach`` with ``nodes`` (JSON of cluster.nodes); ``moonpool down`` in any case.

    ``environment``: variables of its processes beside our own. Progress goes to standard error. ConfigError: it did not
    become ready.
    """
    name = f"bench-{os.getpid()}"
    port = free_port()
    values = {"cluster.nodes": nodes, **settings}
    options = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    up = ["up", "--detach", "--launcher", launcher, "--name", name, "--port", str(port), "--model", str(model_dir)]
    with terminable(), tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        place = ["--set", f"cluster.state_dir={folder}"]
        try:
            if _moonpool([*up, *options, *place], _START_S, environment) != 0:
                raise ConfigError("bench: the cluster did not start; its reason is above", param="bench")
            state = StateDir(Path(folder)).read()
            yield LocalCluster(
                f"http://127.0.0.1:{port}",
                state.registry if state else "",
                Path(folder),
                state.supervisor.pid if state else 0,
            )
        finally:
            _moonpool(["down", "--name", name, *place], _STOP_S)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends the block as an exit would, so that a terminated measurement takes its cluster with it. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _moonpool(words: list[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> int:
    try:
        return subprocess.run(
            [sys.executable, "-m", "moonpool.cli.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            timeout=timeout_s,
            env={**os.environ, **(environment or {})},
        ).returncode
    except subprocess.TimeoutExpired as e:
        raise ConfigError(f"bench: `moonpool {words[0]}` took more than {timeout_s:.0f} s", param="bench") from e


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
