"""The registry of a struck cluster: a process that the run itself starts, so that it can be struck like any other."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from moonpool.bench.chaos.network import die_with_parent
from moonpool.core.errors import ConfigError

START_S = 120.0


class RegistryProcess(Protocol):
    """Keeps its address over restarts."""

    @property
    def name(self) -> str:
        """As ``cluster.registry`` names it."""

    @property
    def pid(self) -> int: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


class _Kept:
    def __init__(self, host: str, folder: Path) -> None:
        self._host, self._folder = host, folder
        self._port = free_port(host)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _command(self) -> Sequence[str]:
        raise NotImplementedError

    def start(self) -> None:
        """Returns when it listens. ConfigError: it does not within START_S."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._process is not None:
            self._process.wait()
        with (self._folder / "registry.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        until = time.monotonic() + START_S
        while not _listens(self._host, self._port):
            if self._process.poll() is not None or time.monotonic() > until:
                raise ConfigError(f"chaos: the registry did not start; see {self._folder / 'registry.log'}", param="--registry")
            time.sleep(0.05)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for number in (signal.SIGCONT, signal.SIGTERM):
                if process.poll() is None:
                    process.send_signal(number)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Embedded(_Kept):
    """``moonpool run registry``: what `moonpool up` has inside, by itself."""

    def __init__(self, host: str, folder: Path, timing: Sequence[str]) -> None:
        """``timing`` are ``--set`` words."""
        super().__init__(host, folder)
        self._timing = timing

    @property
    def name(self) -> str:
        return f"{self._host}:{self._port}"

    def _command(self) -> Sequence[str]:
        settings = [word for value in self._timing for word in ("--set", value)]
        return [sys.executable, "-m", "moonpool.cli.main", "run", "registry", "--registry", self.name, *settings]


class Etcd(_Kept):
    """One etcd with a folder of its own; a kill loses nothing that it acknowledged."""

    def __init__(self, host: str, folder: Path) -> None:
        super().__init__(host, folder)
        if shutil.which("etcd") is None:
            raise ConfigError("--registry: there is no etcd here; install it (Debian: etcd-server)", param="--registry")
        self._peer_port = free_port(host)

    @property
    def name(self) -> str:
        return f"etcd://{self._host}:{self._port}"

    def _command(self) -> Sequence[str]:
        client, peer = f"http://{self._host}:{self._port}", f"http://{self._host}:{self._peer_port}"
        options = {
            "data-dir": self._folder / "data",
            "log-level": "error",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
        }
        return ["etcd", *(f"--{name}={value}" for name, value in options.items())]


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
