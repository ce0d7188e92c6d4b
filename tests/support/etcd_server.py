"""A real etcd on loopback with a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

MISSING = "no etcd here; scripts/setup --dev installs it (Debian: etcd-server)"


def etcd_binary() -> str:
    """Skips the test where there is none."""
    found = shutil.which("etcd")
    if found is None:
        pytest.skip(MISSING)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EtcdServer:
    """Keeps its port over restarts. Use as a context manager: it stops, whatever state it is in.

    ``tls``: a folder with ca.pem, cert.pem and key.pem; it then speaks TLS only, and asks clients for certificates of that CA.
    """

    def __init__(self, folder: Path, *, tls: Path | None = None) -> None:
        self._tls = tls
        self._binary, self._folder = etcd_binary(), folder
        self.port, self._peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def registry(self) -> str:
        return f"etcd://127.0.0.1:{self.port}/moonpool/test"

    def start(self) -> None:
        client, peer = f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        options = {
            "data-dir": self._folder / "data",
            "log-level": "error",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
        }
        if self._tls:
            files = {"cert-file": "cert.pem", "key-file": "key.pem", "trusted-ca-file": "ca.pem"}
            options |= {name: self._tls / file for name, file in files.items()} | {"client-cert-auth": "true"}
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                (self._binary, *(f"--{name}={value}" for name, value in options.items())),
                stdout=log,
                stderr=log,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine},
            )
        until = time.monotonic() + 20.0
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < until, (self._folder / "etcd.log").read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def forget(self) -> None:
        """What it stored is lost. To be called while it is down."""
        shutil.rmtree(self._folder / "data", ignore_errors=True)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
