"""A whole cluster of real processes on loopback, started as a user starts it, and looked into through its own services."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from moonpool.cluster.launch.state import ClusterState, StateDir
from moonpool.core.idle import not_idle
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.wire import pb
from moonpool.wire.convert import from_wire

START_S = 240.0
NOTICED_S = 15.0
SPLIT = [{"name": "a", "prefill": 2}, {"name": "b", "decode": 1, "conductor": 1, "gateway": 1}]
LAPTOP = [{"name": "a", "both": 1, "conductor": 1, "gateway": 1}]

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """A test run that is killed takes its clusters with it."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


@dataclass(frozen=True)
class Answer:
    ids: tuple[int, ...]
    cached: int
    finish: str
    status: int = 200
    body: dict[str, Any] | None = None
    headers: dict[str, str] | None = None


class LocalCluster:
    """``settings`` are ``section.key -> value`` as for ``--set``."""

    def __init__(self, folder: Path, model_dir: Path, nodes: Sequence[dict[str, Any]], **settings: Any) -> None:
        self.folder, self.name = folder, folder.name.replace("_", "-")[:40]
        values = {
            "cluster.nodes": json.dumps(list(nodes)),
            "cluster.state_dir": str(folder / "state"),
            "cluster.key_file": str(folder / "hash.key"),
            "cluster.name": self.name,
            "model.path": str(model_dir),
            "model.name": "smollm2",
            "gateway.port": 0,
            "store.pool_bytes": 512 << 20,
            "engine.page_bytes": 256 << 20,
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        self._settings = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        self._log = folder / "up.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.state: ClusterState | None = None

    def start(self, launcher: str = "process") -> None:
        command = [sys.executable, "-m", "moonpool.cli.main", "up", "--launcher", launcher, *self._settings]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, preexec_fn=_end_with_parent
            )
        states, until = StateDir(self.folder / "state"), time.monotonic() + START_S
        while self.state is None:
            found = states.read()
            if found is not None and found.phase == "ready":
                self.state = found
            elif self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise AssertionError(f"cluster did not start:\n{self.log()}")
            time.sleep(0.1)

    def stop(self) -> int:
        """Ctrl-C; returns the exit code. Nothing it started may be left."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise AssertionError(f"cluster did not stop:\n{self.log()}") from None
        left = StateDir(self.folder / "state").recorded()
        assert not left, f"left behind: {left}\n{self.log()}"
        return code

    def log(self) -> str:
        parts = [self._log.read_text(errors="replace")[-6000:]]
        for path in sorted((self.folder / "state" / "logs").glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(parts)

    @property
    def url(self) -> str:
        assert self.state is not None
        return self.state.url

    # -- looking into it ---------------------------------------------------------------------------------------------

    def changes(self) -> dict[str, MemberChange]:
        """Every member's newest life."""
        assert self.state is not None
        with grpc.insecure_channel(self.state.registry) as channel:
            known = pb.registry_rpc.RegistryStub(channel).List(pb.types.Empty(), timeout=5.0)
        return {change.member.id: change for change in (from_wire(m, MemberChange) for m in known.members)}

    def member(self, name: str) -> Member:
        return self.changes()[name].member

    def stats(self, name: str) -> pb.admin.AdminStats:
        with grpc.insecure_channel(self.member(name).address) as channel:
            return pb.admin_rpc.AdminStub(channel).Stats(pb.types.Empty(), timeout=5)

    def numbers(self) -> dict[str, dict[str, float]]:
        """Gauges of every live member. One that has just died is live until that is noticed: all are asked again then."""
        until = time.monotonic() + NOTICED_S
        while True:
            live = [name for name, change in self.changes().items() if change.liveness is Liveness.LIVE]
            try:
                return {name: dict(self.stats(name).numbers) for name in live}
            except grpc.RpcError as e:
                if e.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                    raise
            time.sleep(0.1)

    def handles(self, *without: str) -> dict[str, tuple[float, float]]:
        """(threads, sockets) of every live member but those named."""
        return {name: (n["process_threads"], n["process_sockets"]) for name, n in self.numbers().items() if name not in without}

    def clear_device_pages(self, *names: str) -> None:
        for name in names:
            with grpc.insecure_channel(self.member(name).address) as channel:
                pb.admin_rpc.AdminStub(channel).ClearDevicePages(pb.types.Empty(), timeout=5)

    def until(self, true: Callable[[], Any], what: str, limit_s: float = 20.0) -> Any:
        until = time.monotonic() + limit_s
        while not (value := true()):
            assert time.monotonic() < until, f"not within {limit_s:.0f} s: {what}\n{self.log()}"
            time.sleep(0.1)
        return value

    def busy(self) -> dict[str, float]:
        """What is not idle: ``member.gauge -> value``."""
        found = {}
        for member, numbers in self.numbers().items():
            found |= {f"{member}.{gauge}": value for gauge, value in not_idle(numbers).items()}
        return found

    def assert_idle(self, limit_s: float = 10.0) -> None:
        until = time.monotonic() + limit_s
        while busy := self.busy():
            assert time.monotonic() < until, f"not idle: {busy}\n{self.log()}"
            time.sleep(0.1)

    # -- using it ----------------------------------------------------------------------------------------------------

    def client(self, timeout_s: float = 120.0) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=timeout_s)


async def complete(client: httpx.AsyncClient, prompt: Sequence[int], tokens: int, **extra: Any) -> Answer:
    """Greedy ids after a token-id prompt, end-of-sequence ignored. ``headers`` may be given beside body fields."""
    headers = extra.pop("headers", None)
    body = {
        "model": "smollm2",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **extra,
    }
    response = await client.post("/v1/completions", json=body, headers=headers)
    parsed = response.json()
    if response.status_code != 200:
        return Answer((), 0, "", response.status_code, parsed, dict(response.headers))
    choice, usage = parsed["choices"][0], parsed["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(tuple(choice["token_ids"]), cached, choice["finish_reason"], 200, parsed, dict(response.headers))


@contextmanager
def running(cluster: LocalCluster, launcher: str = "process") -> Iterator[LocalCluster]:
    cluster.start(launcher)
    try:
        yield cluster
    finally:
        cluster.stop()
