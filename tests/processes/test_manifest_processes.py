"""Processes started as the chart's manifests say, with a kubelet's eyes on them: killed, frozen, leaving."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.chart import Manifest, config_text, golden, pods, role_of
from support.etcd_server import EtcdServer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

START_S = 120.0
END_S = 60.0


def until(true: Callable[[], bool], limit_s: float, what: Callable[[], str]) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"not within {limit_s:.0f} s: {what()}"
        time.sleep(0.05)


@dataclass
class Started:
    """One container of ``pod`` as a process here: what the kubelet fills in and mounts is put into its words and files."""

    container: Manifest
    process: subprocess.Popen[bytes]
    address: str
    log: Path

    def get(self, probe: str) -> int:
        """The status that ``probe`` of the manifest gets; 0: no answer within its own time-out."""
        asked = self.container[f"{probe}Probe"]
        names = {one["name"]: one["containerPort"] for one in self.container["ports"]}
        url = f"http://{self.address}:{names[asked['httpGet']['port']]}{asked['httpGet']['path']}"
        try:
            with httpx.Client(trust_env=False, timeout=min(2.0, asked["timeoutSeconds"])) as client:
                return client.get(url).status_code
        except httpx.HTTPError:
            return 0

    def told(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class Kubelet:
    """Starts containers of the CPU profile's prefill pod, on an address of loopback that nobody else has."""

    def __init__(self, folder: Path, registry: str, model: Path) -> None:
        self._folder, self._registry, self._model = folder, registry, model
        self.address = "127." + ".".join(str(random.randint(1, 254)) for _ in range(3))
        self.pod = next(p for p in pods(golden("cpu")) if p.owner == "StatefulSet/moonpool-prefill")
        self.started: list[Started] = []
        for name in ("home", "tmp", "state", "keys", "config"):
            (folder / name).mkdir(mode=0o700)
        (folder / "keys/hash.key").write_bytes(bytes(range(32)))
        (folder / "keys/hash.key").chmod(0o440)
        text = self._localised(config_text(golden("cpu")))
        for pattern, value in ((r'registry = ".*"', f'registry = "{registry}"'), (r'path = ".*"', f'path = "{model}"')):
            text, found = re.subn(pattern, value, text)
            assert found == 1, pattern
        text = re.sub(r"pool_bytes = \d+", f"pool_bytes = {16 << 20}", text)
        (folder / "config/moonpool.toml").write_text(text)

    def _localised(self, text: str) -> str:
        mounts = {m["mountPath"]: m["name"] for c in self.pod.containers() for m in c["volumeMounts"] if m["name"] != "shm"}
        for path, name in sorted(mounts.items(), key=lambda one: -len(one[0])):
            text = text.replace(path, str(self._folder / name)) if path != "/tmp" else text
        return text

    def start(self, role: str) -> Started:
        container = next(c for c in self.pod.containers() if role_of(c) == role)
        fields = {"status.podIP": self.address, "metadata.name": f"pod-{os.getpid()}", "spec.nodeName": "host-1"}
        given = {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }
        words = [re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], word) for word in container["args"]]
        assert container["command"] == ["moonpool"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MOONPOOL_")}
        environment |= {name: self._localised(value) for name, value in given.items()}
        log = self._folder / f"{role}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                (sys.executable, "-m", "moonpool.cli.main", *map(self._localised, words)),
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )
        self.started.append(Started(container, process, self.address, log))
        return self.started[-1]

    def stop(self) -> None:
        for one in reversed(self.started):
            one.process.send_signal(signal.SIGCONT)
            one.process.kill()
            one.process.wait(10)


@pytest.fixture
def kubelet(tmp_path: Path, tiny_model: Path) -> Iterator[Kubelet]:
    with EtcdServer(tmp_path / "etcd") as etcd:
        kubelet = Kubelet(tmp_path, f"etcd://127.0.0.1:{etcd.port}", tiny_model)
        try:
            yield kubelet
        finally:
            kubelet.stop()


def test_probes_of_helm_manifests_tell_a_process_that_is_killed_frozen_or_leaves(kubelet: Kubelet) -> None:
    store, worker = kubelet.start("store"), kubelet.start("prefill")
    for one in (store, worker):
        until(lambda one=one: one.get("startup") == 200, START_S, one.told)  # type: ignore[misc]
        until(lambda one=one: one.get("readiness") == 200, START_S, one.told)  # type: ignore[misc]
        assert one.get("liveness") == 200

    worker.process.send_signal(signal.SIGSTOP)
    assert worker.get("liveness") == 0, "a frozen process passes no probe, so failureThreshold of them end it"
    assert store.get("liveness") == store.get("readiness") == 200
    worker.process.send_signal(signal.SIGCONT)
    until(lambda: worker.get("liveness") == 200, END_S, worker.told)

    worker.process.kill()
    worker.process.wait(10)
    assert (worker.get("liveness"), worker.get("readiness")) == (0, 0)

    seen: set[tuple[int, int]] = set()
    store.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + kubelet.pod.spec["terminationGracePeriodSeconds"]  # then the kubelet kills
    while store.process.poll() is None:
        assert time.monotonic() < end, store.told()
        seen.add((store.get("liveness"), store.get("readiness")))
    assert (200, 503) in seen, f"while it leaves it is alive and wants no more: {seen}"
    assert store.process.returncode == 143, store.told()
