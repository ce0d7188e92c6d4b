"""docs/hosts.md, walked with two hosts that are network namespaces: the units' own command lines, etcd, TLS files."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.etcd_server import etcd_binary, free_port
from support.oracle import Oracle
from typer.testing import CliRunner

from moonpool.cli.main import Choices, build
from moonpool.cluster.leaving import end_s
from moonpool.cluster.process import EXIT_FENCED, EXIT_RESTART, EXIT_STUCK
from moonpool.core.config import Config
from moonpool.core.ids import Role

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT = UNITS / "moonpool@.service"
ALPHA, BETA = "10.77.0.1", "10.77.0.2"
PROMPT = [1 + i % 100 for i in range(150)]
ASK = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"content-type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def lines(section: str, key: str, file: Path = UNIT) -> list[str]:
    """Values of ``key`` in ``[section]``, in order."""
    found, here = [], ""
    for line in file.read_text().splitlines():
        if line.startswith("["):
            here = line.strip("[]")
        name, _, value = line.partition("=")
        if here == section and name == key:
            found.append(value)
    return found


@dataclass
class HostLike:
    """A host: a namespace of the network (none: the machine's own loopback), and folders of its own."""

    name: str
    root: Path
    address: str
    enter: Sequence[str]
    units: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def own(self, text: str) -> str:
        """``text`` of a shipped file, with this host's folders."""
        for folder in ("/etc/moonpool", "/var/lib/moonpool"):
            text = text.replace(folder, f"{self.root}{folder}")
        return text.replace("/opt/moonpool/bin/moonpool", f"{sys.executable} -m moonpool.cli.main")

    def start(self, instance: str) -> None:
        """As ``systemctl start moonpool@INSTANCE``."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
        for value in lines("Service", "Environment"):
            variables |= dict([self._specified(value, instance).split("=", 1)])
        for file in lines("Service", "EnvironmentFile"):
            path = Path(self._specified(file, instance).removeprefix("-"))
            if path.exists():
                variables |= dict(line.split("=", 1) for line in path.read_text().splitlines())
        command = self._specified(lines("Service", "ExecStart")[0], instance).replace("${ROLE}", variables["ROLE"])
        with (self.root / f"{instance}.log").open("ab") as journal:
            self.units[instance] = subprocess.Popen(
                [*self.enter, *shlex.split(command)], env=variables, stdout=journal, stderr=journal, cwd=self.root
            )

    def _specified(self, text: str, instance: str) -> str:
        return self.own(text.replace("%i", instance).replace("%l", self.name))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        config = str(self.root / "etc/moonpool/moonpool.toml")
        variables = {**os.environ, "HOME": str(self.root), **self.variables()}
        command = [*self.enter, sys.executable, "-m", "moonpool.cli.main", *words, "--config", config]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=90, check=False)

    def variables(self) -> dict[str, str]:
        written = (self.root / "etc/moonpool/moonpool.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in written)

    def is_ready(self, instance: str) -> bool:
        return "ready at" in (self.root / f"{instance}.log").read_text(errors="replace")

    def journal(self) -> str:
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-2000:]}" for f in sorted(self.root.glob("*.log")))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[HostLike, HostLike]]:
    """Alpha and beta, joined by one cable; without root both are this machine's loopback."""
    spaces = [f"mp{uuid.uuid4().hex[:8]}{end}" for end in "ab"]
    apart = os.geteuid() == 0 and shutil.which("ip") is not None
    if apart:
        a, b = spaces
        steps = f"netns add {a}\nnetns add {b}\nlink add {a} netns {a} type veth peer name {b} netns {b}\n"
        for space, address in ((a, ALPHA), (b, BETA)):
            steps += (
                f"-n {space} addr add {address}/24 dev {space}\n-n {space} link set {space} up\n-n {space} link set lo up\n"
            )
        done = [subprocess.run(["ip", *s.split()], capture_output=True, text=True, check=False) for s in steps.splitlines()]
        apart = not any(one.returncode for one in done)
    made = [
        HostLike(name, tmp_path / name, address if apart else "127.0.0.1", ["ip", "netns", "exec", space] if apart else [])
        for name, address, space in (("alpha", ALPHA, spaces[0]), ("beta", BETA, spaces[1]))
    ]
    try:
        yield made[0], made[1]
    finally:
        for process in [p for host in made for p in host.units.values()]:
            process.kill()
            process.wait()
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


@pytest.fixture
def etcd(hosts: tuple[HostLike, HostLike], tmp_path: Path) -> Iterator[str]:
    """On beta; its address."""
    _, beta = hosts
    client, peer = (f"http://{beta.address}:{free_port()}" for _ in range(2))
    options = ("--data-dir", str(tmp_path / "etcd"), "--log-level", "error", "--initial-cluster", f"default={peer}")
    urls = [f"--{name}={url}" for name, url in (("listen-client-urls", client), ("advertise-client-urls", client))]
    urls += [f"--{name}={peer}" for name in ("listen-peer-urls", "initial-advertise-peer-urls")]
    process = subprocess.Popen([*beta.enter, etcd_binary(), *options, *urls], stderr=subprocess.DEVNULL)
    yield f"etcd://{client.removeprefix('http://')}"
    process.kill()
    process.wait()


def set_up(host: HostLike, registry: str, model: Path, members: Sequence[str], authority: Path) -> None:
    """Steps 2 to 5 of docs/hosts.md."""
    etc, lib = host.root / "etc/moonpool", host.root / "var/lib/moonpool"
    etc.mkdir(parents=True)
    lib.mkdir(parents=True)
    (etc / "moonpool.toml").write_text(host.own((UNITS / "moonpool.toml").read_text()))
    (lib / "hash.key").write_bytes(b"k" * 32)
    values = {
        "CLUSTER_REGISTRY": registry,
        "MODEL_PATH": model,
        "MODEL_NAME": "tiny",
        "MODEL_DTYPE": "float32",
        "GATEWAY_HOST": "auto",
        "GATEWAY_PORT": 0,
        "STORE_POOL_BYTES": "64 MiB",
        "ENGINE_PAGE_BYTES": "32 MiB",
        "TRANSFER_UCX_TLS": "tcp",
        "TIMING_DRAIN_MS": 2000,
        "STORE_DRAIN_MS": 1000,
    }
    (etc / "moonpool.env").write_text("".join(f"MOONPOOL_{name}={value}\n" for name, value in values.items()))
    for member in [*members, "operator"]:
        words = ["certs", "make", "--name", "moonpool", "--authority", str(authority), "--role", member.split("-")[0]]
        done = CliRunner().invoke(build(Choices()), [*words, "--id", member, "--out", str(lib / "tls" / member)])
        assert done.exit_code == 0, done.output


def until(what: str, hosts: Sequence[HostLike], true: Any, limit_s: float = 90.0) -> Any:
    end = time.monotonic() + limit_s
    while not (value := true()):
        assert time.monotonic() < end, f"{what}\n" + "\n".join(host.journal() for host in hosts)
        time.sleep(0.2)
    return value


def test_two_hosts_serve_by_their_units_restart_and_stop_in_order(
    hosts: tuple[HostLike, HostLike], etcd: str, tmp_path: Path, tiny_model: Path
) -> None:
    alpha, beta = hosts
    here = {alpha.name: ["store", "prefill"], beta.name: ["store", "decode", "conductor", "gateway"]}
    for host in hosts:
        set_up(host, etcd, tiny_model, [f"{i}-{host.name}" for i in here[host.name]], tmp_path / "authority")
    for host in hosts:
        host.start("store")
    names = {f"{i}-{h}" for h, instances in here.items() for i in instances}

    def shown() -> dict[str, Any]:
        done = alpha.run("status", "--json")
        told = json.loads(done.stdout) if done.returncode == 0 else {"members": []}
        return {m["id"]: m for m in told["members"] if m["liveness"] == "live"}

    until("store nodes", hosts, lambda: all(host.is_ready("store") for host in hosts))
    for host in hosts:
        for instance in here[host.name][1:]:
            host.start(instance)
    until("everybody", hosts, lambda: all(host.is_ready(instance) for host in hosts for instance in here[host.name]))
    members = until("everybody in status", hosts, lambda: everybody if set(everybody := shown()) == names else None)
    assert {m["address"].rpartition(":")[0] for m in members.values()} == {alpha.address, beta.address}
    url = members["gateway-beta"]["details"]["url"]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def ask() -> list[int] | None:
        command = [*beta.enter, sys.executable, "-c", ASK, f"{url}/v1/completions", json.dumps(body)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        return list(json.loads(done.stdout)["choices"][0]["token_ids"]) if done.returncode == 0 else None

    Oracle(tiny_model).check(PROMPT, until("an answer", hosts, ask), "over two hosts")

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(alpha.run, "restart", "--member", "prefill-alpha", "--force")
        assert str(alpha.units["prefill"].wait(60)) in lines("Service", "RestartForceExitStatus")[0].split()
        alpha.start("prefill")
        assert asked.result().returncode == 0, asked.result().stderr

    clean = lines("Service", "SuccessExitStatus")[0].split()
    for host, instances in (
        (beta, ["gateway", "conductor", "decode"]),
        (alpha, ["prefill"]),
        (alpha, ["store"]),
        (beta, ["store"]),
    ):
        for instance in instances:
            host.units[instance].send_signal(signal.SIGTERM)
        for instance in instances:
            code = host.units[instance].wait(60)
            assert str(code) in clean, (instance, code, host.journal())
    assert not list(Path("/dev/shm").glob("moonpool+moonpool+alpha+*")) + list(
        Path("/dev/shm").glob("moonpool+moonpool+beta+*")
    )


def test_units_outlast_every_drain_and_start_anew_what_asks_for_it() -> None:
    longest = max(end_s(Config(), role) for role in Role)
    assert float(lines("Service", "TimeoutStopSec")[0]) > longest
    assert lines("Service", "Restart") == ["on-failure"]
    clean = {int(code) for code in lines("Service", "SuccessExitStatus")[0].split()}
    assert clean == {EXIT_RESTART, 128 + signal.SIGTERM}
    assert lines("Service", "RestartForceExitStatus") == [str(EXIT_RESTART)]
    assert not clean & {EXIT_FENCED, EXIT_STUCK}, "restarted, being failures"
    hiding = (
        "PrivateDevices",
        "ProtectClock",
        "PrivateUsers",
        "PrivatePIDs",
        "PrivateIPC",
        "MemoryDenyWriteExecute",
        "DynamicUser",
    )
    assert not [key for key in hiding if lines("Service", key)], (
        "GPUs, pidfds, region files and compiled kernels need these off"
    )


def test_the_units_verify_in_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    for file in UNITS.glob("moonpool*"):
        if file.is_dir():
            shutil.copytree(file, tmp_path / file.name)
        elif file.suffix in (".service", ".target"):
            text = file.read_text().replace("/opt/moonpool/bin/moonpool", sys.executable)
            (tmp_path / file.name).write_text(
                text.replace("User=moonpool", "User=root").replace("Group=moonpool", "Group=root")
            )
    for instance in ("store", "prefill"):
        shutil.copy(tmp_path / "moonpool@.service", tmp_path / f"moonpool@{instance}.service")
    units = [str(tmp_path / f"moonpool@{instance}.service") for instance in ("store", "prefill")]
    done = subprocess.run(
        ["systemd-analyze", "verify", *units, str(tmp_path / "moonpool.target")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    complaints = [line for line in done.stderr.splitlines() if "moonpool" in line and "Documentation" not in line]
    assert done.returncode == 0 and complaints == [], done.stderr
