"""Processes started as the chart's manifests say, with a kubelet's eyes on them: killed, frozen, leaving."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from support.chart import Manifest, Pod, config_text, golden, pods
from support.etcd_server import EtcdServer

from moonpool.cluster.etcd.address import registry_of
from moonpool.cluster.survey import members
from moonpool.core.config import ClusterConfig, Config
from moonpool.core.membership import Liveness

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

PROFILE = "gpu"
# As pods have them; only root may make them.
NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc") if os.geteuid() == 0 else ()
START_S = 120.0
END_S = 60.0


def until(true: Callable[[], bool], limit_s: float, what: Callable[[], str]) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"not within {limit_s:.0f} s: {what()}"
        time.sleep(0.05)


@dataclass
class Started:
    """One container as a process here. ``inner``: itself, where ``process`` only made its PID namespace."""

    container: Manifest
    process: subprocess.Popen[bytes]
    address: str
    log: Path

    def inner(self) -> psutil.Process:
        made = psutil.Process(self.process.pid)
        return next(iter(made.children()), made) if NAMESPACES else made

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
    """Starts containers of the single-node profile, each pod with an address of loopback and a PID namespace of its own.

    What the kubelet fills in and mounts is put into their words and files; a folder of the host is one folder for all of them.
    """

    def __init__(self, folder: Path, registry: str, model: Path) -> None:
        self._folder, self._registry, self._model = folder, registry, model
        (folder / "host").mkdir(mode=0o700)
        self.started: list[Started] = []
        self.registry = registry_of(Config(cluster=ClusterConfig(name="moonpool", registry=registry)))

    def _mounts(self, pod: Pod, container: Manifest) -> dict[str, str]:
        """Path in the container -> path here."""
        found = {}
        for mount in container["volumeMounts"]:
            name = mount["name"]
            shared = name == "host"
            place = self._folder / name if shared else self._folder / container["name"] / name
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if mount["mountPath"] != "/tmp":
                found[mount["mountPath"]] = str(place)
        assert pod.volume("host")["hostPath"]["path"].startswith("/dev/shm/")
        return found

    def _write_files(self, mounts: dict[str, str]) -> None:
        keys = Path(mounts["/etc/moonpool/keys"], "hash.key")
        keys.write_bytes(bytes(range(32)))
        keys.chmod(0o440)
        if "/etc/moonpool/api-keys" in mounts:
            Path(mounts["/etc/moonpool/api-keys"], "keys.toml").touch(0o600)
        text = _localised(config_text(golden(PROFILE)), mounts)
        changes = {"registry": f'"{self._registry}"', "path": f'"{self._model}"', "pool_bytes": 16 << 20, "ssd_bytes": 64 << 20}
        for key, value in changes.items():
            text, found = re.subn(rf"(?m)^{key} = .*", f"{key} = {value}", text)
            assert found == 1, key
        Path(mounts["/etc/moonpool/config"], "moonpool.toml").write_text(text)

    def start(self, owner: str) -> Started:
        pod = next(p for p in pods(golden(PROFILE)) if p.owner == owner)
        container = pod.spec["containers"][0]
        address = "127." + ".".join(str(random.randint(1, 254)) for _ in range(3))
        fields = {"status.podIP": address, "metadata.name": f"pod-{len(self.started)}", "spec.nodeName": f"host-{os.getpid()}"}
        given = {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }
        mounts = self._mounts(pod, container)
        self._write_files(mounts)
        words = [re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], word) for word in container["args"]]
        assert container["command"] == ["moonpool"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MOONPOOL_")}
        environment |= {name: _localised(value, mounts) for name, value in given.items()}
        log = self._folder / f"{container['name']}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                (*NAMESPACES, sys.executable, "-m", "moonpool.cli.main", *(_localised(word, mounts) for word in words)),
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )
        self.started.append(Started(container, process, address, log))
        return self.started[-1]

    def stop(self) -> None:
        for one in reversed(self.started):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.inner().kill()
            one.process.kill()
            one.process.wait(10)


def _localised(text: str, mounts: dict[str, str]) -> str:
    for path in sorted(mounts, key=len, reverse=True):
        text = text.replace(path, mounts[path])
    return text


@pytest.fixture
def kubelet(tmp_path: Path, tiny_model: Path) -> Iterator[Kubelet]:
    with EtcdServer(tmp_path / "etcd") as etcd:
        kubelet = Kubelet(tmp_path, f"etcd://127.0.0.1:{etcd.port}", tiny_model)
        try:
            yield kubelet
        finally:
            kubelet.stop()


async def test_probes_of_helm_manifests_tell_a_process_that_is_killed_frozen_or_leaves(kubelet: Kubelet) -> None:
    store, worker = kubelet.start("DaemonSet/moonpool-store"), kubelet.start("StatefulSet/moonpool-prefill")
    for one in (store, worker):
        until(lambda one=one: one.get("startup") == 200, START_S, one.told)  # type: ignore[misc]
        until(lambda one=one: one.get("readiness") == 200, START_S, one.told)  # type: ignore[misc]
        assert one.get("liveness") == 200

    frozen = worker.inner()
    frozen.suspend()
    assert worker.get("liveness") == 0, "a frozen process passes no probe, so failureThreshold of them end it"
    assert store.get("liveness") == store.get("readiness") == 200
    frozen.resume()
    until(lambda: worker.get("liveness") == 200, END_S, worker.told)

    frozen.kill()
    worker.process.wait(10)
    assert (worker.get("liveness"), worker.get("readiness")) == (0, 0)
    proved = await _gone("pod-1", kubelet.registry)
    assert proved == "its process ended (pidfd)", "its host's store node saw it, though its process numbers are others"

    seen: set[tuple[int, int]] = set()
    store.inner().send_signal(signal.SIGTERM)
    end = time.monotonic() + grace_s("DaemonSet/moonpool-store")  # then the kubelet kills
    while store.process.poll() is None:
        assert time.monotonic() < end, store.told()
        seen.add((store.get("liveness"), store.get("readiness")))
    assert (200, 503) in seen, f"while it leaves it is alive and wants no more: {seen}"
    assert store.process.returncode == 143, store.told()


def grace_s(owner: str) -> float:
    return float(next(p for p in pods(golden(PROFILE)) if p.owner == owner).spec["terminationGracePeriodSeconds"])


async def _gone(member: str, registry: str) -> str:
    async with asyncio.timeout(END_S):
        while True:
            for change in await members(registry):
                if change.member.id == member and change.liveness is Liveness.GONE:
                    return change.proof
            await asyncio.sleep(0.1)
