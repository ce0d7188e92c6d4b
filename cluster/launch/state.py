"""What a running cluster leaves in its state folder, so that ``status``, ``down`` and the next ``up`` find it.

A process is named by (pid, start time): a number alone may belong to somebody else by now.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from moonpool.cluster.role_switch import forget_roles
from moonpool.core.errors import ConfigError
from moonpool.core.parsing import read_json


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    pid: int
    started: float  # seconds since the epoch, as the system says

    @classmethod
    def of(cls, pid: int) -> ProcessRecord:
        return cls(pid, psutil.Process(pid).create_time())

    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return bool(process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE)
        except (psutil.NoSuchProcess, ValueError):  # a number that no process has, or could have
            return False

    def signal(self, number: int) -> None:
        if self.alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass


@dataclass(frozen=True, slots=True)
class ClusterState:
    """``phase`` is starting or ready; ``url`` is known once ready."""

    supervisor: ProcessRecord
    name: str
    launcher: str
    registry: str
    phase: str = "starting"
    url: str = ""
    identity: str = ""  # folder of the operator's certificate, where the cluster has TLS
    trust: str = ""  # PEM file that a client of ``url`` trusts, where it is HTTPS


class StateDir:
    """Asking changes nothing on disk; only ``create`` makes the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> StateDir:
        """For a cluster that starts. ConfigError where it cannot be written."""
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)  # logs tell names of requests and tenants
            (path / "pids").mkdir(exist_ok=True)
            (path / "logs").mkdir(exist_ok=True)
        except OSError as e:
            raise ConfigError(f"cluster.state_dir: cannot write {path}: {e.strerror}; give a writable folder") from e
        return cls(path)

    @property
    def _state_file(self) -> Path:
        return self.path / "cluster.json"

    def read(self) -> ClusterState | None:
        """The running cluster, or None; what a dead supervisor left is not believed."""
        try:
            raw = read_json(self._state_file.read_text(encoding="utf-8"))
            state = ClusterState(**{**raw, "supervisor": ProcessRecord(**raw["supervisor"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return state if state.supervisor.alive() else None

    def write(self, state: ClusterState) -> None:
        fresh = self._state_file.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(state)), encoding="utf-8")
        fresh.replace(self._state_file)

    def clear(self) -> None:
        self._state_file.unlink(missing_ok=True)
        for record in (self.path / "pids").glob("*.json"):
            record.unlink(missing_ok=True)
        forget_roles(self.path)

    def record(self, name: str, pid: int) -> None:
        """Remembers a process of this cluster under ``name``, over the launcher's own death."""
        text = json.dumps(asdict(ProcessRecord.of(pid)))
        (self.path / "pids" / f"{name}.json").write_text(text, encoding="utf-8")

    def recorded(self) -> dict[str, ProcessRecord]:
        """Recorded processes that still live."""
        found = {}
        for path in sorted((self.path / "pids").glob("*.json")):
            try:
                record = ProcessRecord(**read_json(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):
                continue
            if record.alive():
                found[path.stem] = record
        return found

    def keep_scratch(self, folder: Path) -> None:
        """A folder outside this one that ends with the cluster."""
        link = self.path / "scratch"
        link.unlink(missing_ok=True)
        link.symlink_to(folder)

    def drop_scratch(self) -> None:
        link = self.path / "scratch"
        if link.is_symlink():
            shutil.rmtree(link.resolve(), ignore_errors=True)
            link.unlink()

    def end_leftovers(self, patience_s: float = 3.0) -> list[str]:
        """Ends recorded processes that still live, kindly and then not; returns their names. Blocks."""
        left = self.recorded()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for record in left.values():
                record.signal(signal.SIGCONT)
                record.signal(number)
            until = time.monotonic() + patience_s
            while any(r.alive() for r in left.values()) and time.monotonic() < until:
                time.sleep(0.05)
        self.drop_scratch()
        return sorted(left)
