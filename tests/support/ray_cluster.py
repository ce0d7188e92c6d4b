"""A real Ray cluster of two nodes on this machine, started by ``ray start`` as a user starts one, with a token."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from support.etcd_server import free_port

# Not 127.0.0.1: Ray replaces that by the machine's address on its network.
HEAD, SECOND = "127.0.0.2", "127.0.0.3"
PR_SET_PDEATHSIG = 1
READY_S = 90.0
LEFT = """
import json, ray
from ray.util import list_named_actors, placement_group_table
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
groups = [g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
print(json.dumps({"actors": [a["name"] for a in list_named_actors(all_namespaces=True)], "groups": groups}))
"""
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class RayCluster:
    """``start`` the head, ``add`` nodes. Use as a context manager: nothing ends it but ``__exit__``, by process id.

    Every node has the label ``room=NAME``.
    """

    def __init__(self, *, token: str = "", variables: Mapping[str, str] | None = None) -> None:
        # Short: the paths of Ray's sockets lie below it and may not pass 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="mpr-", dir="/tmp"))
        self.port, self.dashboard_port = free_port(), free_port()
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.token_file = self.folder / "token"
        scripts = Path(sys.executable).parent
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token" if token else "disabled",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_raylet_start_wait_time_s": "120",
            **(variables or {}),
        }
        if token:
            self.token_file.write_text(token)
            self.environment["RAY_AUTH_TOKEN_PATH"] = str(self.token_file)

    @property
    def address(self) -> str:
        return f"{HEAD}:{self.port}"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def start(self, room: str, *, cpus: int) -> None:
        self._ray_start(
            room,
            HEAD,
            cpus,
            "--head",
            f"--port={self.port}",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self.dashboard_port}",
            f"--dashboard-agent-listen-port={free_port()}",
            f"--ray-client-server-port={free_port()}",
        )

    def add(self, room: str, *, cpus: int, host: str = SECOND) -> None:
        self._ray_start(room, host, cpus, f"--address={self.address}", f"--dashboard-agent-listen-port={free_port()}")

    def _ray_start(self, room: str, host: str, cpus: int, *options: str) -> None:
        command = [
            "ray",
            "start",
            "--block",
            f"--node-ip-address={host}",
            f"--temp-dir={self.folder}",
            f"--num-cpus={cpus}",
            "--num-gpus=0",
            f"--object-store-memory={80 << 20}",
            f"--labels=room={room}",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            "--min-worker-port=0",
            "--max-worker-port=0",
            *options,
        ]
        with (self.folder / f"{room}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self._nodes.append(process)
        until = time.monotonic() + READY_S
        while b"Ray runtime started" not in (said := (self.folder / f"{room}.log").read_bytes()):
            assert process.poll() is None and time.monotonic() < until, said.decode(errors="replace")
            time.sleep(0.1)

    def processes(self) -> set[int]:
        """Of all nodes, with everything that runs on them."""
        found = set()
        for node in self._nodes:
            try:
                found |= {p.pid for p in [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]}
            except psutil.NoSuchProcess:
                continue
        return found

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        left = [psutil.Process(pid) for pid in self.processes() if psutil.pid_exists(pid)]
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(left, timeout=5)
        for node in self._nodes:
            node.wait(5)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- as its users --------------------------------------------------------------------------------------------------

    def command(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return subprocess.run(
            words, env={**self.environment, **variables}, capture_output=True, text=True, timeout=150, check=False
        )

    def submit(self, entry: Sequence[str], *, working_dir: Path, runtime_env: dict[str, Any], name: str, wait: bool) -> str:
        """``ray job submit``; what it said, the job's log included where it ``wait``s for the job's end."""
        options = [
            f"--address={self.dashboard}",
            f"--submission-id={name}",
            f"--working-dir={working_dir}",
            f"--runtime-env-json={json.dumps(runtime_env)}",
            *([] if wait else ["--no-wait"]),
        ]
        done = self.command("ray", "job", "submit", *options, "--", *entry)
        return f"{done.stdout}\n{done.stderr}\n[ray job submit: {done.returncode}]"

    def log(self, job: str) -> str:
        """What ``ray job logs`` shows, read on the head: that command takes seconds of a core."""
        found = list(self.folder.glob(f"session_*/logs/job-driver-{job}.log"))
        return found[0].read_text(errors="replace") if found else ""

    def left(self) -> dict[str, list[str]]:
        """Names of the actors and placement groups that there are. Those of Ray's own jobs have a space of their own."""
        done = self.command(sys.executable, "-c", LEFT, RAY_ADDRESS=self.address)
        assert done.returncode == 0, done.stderr
        found: dict[str, list[str]] = json.loads(done.stdout.strip().splitlines()[-1])
        return {kind: [name for name in names if not name.startswith("_ray_internal")] for kind, names in found.items()}
