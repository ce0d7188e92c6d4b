"""Faults of a chaos run on processes and files of their own: what each does, and that its end ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from moonpool.bench.chaos import clocks, network
from moonpool.bench.chaos.faults import FAULTS, Fault
from moonpool.bench.chaos.house import House
from moonpool.bench.chaos.kinds import chosen
from moonpool.bench.chaos.schedule import Planned
from moonpool.core.config import Config


@dataclass
class OneProcess:
    """As much of a house as faults see: every member is the same process."""

    child: subprocess.Popen[bytes]
    config: Config
    name: str = "chaos-test"
    clocks: clocks.Clocks | None = None
    network: None = None

    def pid(self, member: str) -> int:
        return 0 if self.child.poll() is not None else self.child.pid


@pytest.fixture
def house(tmp_path: Path) -> Iterator[OneProcess]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    config = Config.model_validate({"store": {"directory": str(tmp_path), "ssd_path": str(tmp_path / "ssd")}})
    try:
        yield OneProcess(child, config)
    finally:
        child.kill()
        child.wait()


def fault(house: OneProcess, kind: str) -> Fault:
    made = chosen((kind,))[0]
    return FAULTS[made.what](Planned(0, 0.0, made, "a", 0.0, 1), cast(House, house))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def until_state(pid: int, wanted: str) -> None:
    limit = time.monotonic() + 10
    while state(pid) not in wanted:
        assert time.monotonic() < limit, state(pid)
        time.sleep(0.005)


def rng() -> np.random.Generator:
    return np.random.default_rng(4)


def test_a_killed_process_is_remembered_so_that_another_one_is_waited_for(house: OneProcess) -> None:
    kill = fault(house, "kill-decode")
    kill.strike(rng())
    assert (kill.targets, kill.killed) == (("decode-0",), house.child.pid)
    assert house.child.wait(10) == -9
    kill.heal()
    assert "was not there" in fault(house, "kill-decode").strike(rng())


def test_a_stopped_process_runs_again(house: OneProcess) -> None:
    stop = fault(house, "freeze-prefill")
    stop.strike(rng())
    until_state(house.child.pid, "T")
    stop.heal()
    until_state(house.child.pid, "SR")


def test_a_hang_is_over_when_the_process_is_another_one(house: OneProcess) -> None:
    hang = fault(house, "hang-prefill")
    hang.strike(rng())
    assert not hang.over()
    house.child.kill()
    house.child.wait()
    assert hang.over()
    hang.heal()


def test_slices_leave_the_process_running(house: OneProcess) -> None:
    delay = fault(house, "delay")
    delay.strike(rng())
    for wanted in ("T", "SR", "T"):
        until_state(house.child.pid, wanted)
    delay.heal()
    until_state(house.child.pid, "SR")


def test_bits_flip_in_the_struck_nodes_regions_alone(house: OneProcess, tmp_path: Path) -> None:
    mine = tmp_path / f"moonpool+chaos-test+a+{house.child.pid}+0"
    other = tmp_path / f"moonpool+chaos-test+b+{house.child.pid}+0"
    for path in (mine, other):
        path.write_bytes(bytes(4096))
    flip = fault(house, "flip-slots")
    flip.strike(rng())
    limit = time.monotonic() + 10
    while not any(mine.read_bytes()):
        assert time.monotonic() < limit
        time.sleep(0.01)
    flip.heal()
    assert not any(other.read_bytes())
    assert mine.stat().st_size == 4096


def test_bits_flip_in_ssd_files(house: OneProcess, tmp_path: Path) -> None:
    folder = tmp_path / "ssd" / "a"
    folder.mkdir(parents=True)
    (folder / "segment-000001").write_bytes(bytes(8192))
    (folder / "lock").write_bytes(b"")
    fault(house, "flip-ssd").strike(rng())
    assert sum((folder / "segment-000001").read_bytes()) > 0
    assert (folder / "lock").read_bytes() == b""
    (folder / "segment-000001").unlink()
    assert "0 bits" in fault(house, "flip-ssd").strike(rng())


@pytest.mark.skipif(bool(clocks.why_not()), reason=clocks.why_not())
def test_a_clock_steps_in_one_process_and_waits_end_when_they_would(house: OneProcess, tmp_path: Path) -> None:
    house.clocks = clocks.Clocks(tmp_path / "clocks")
    house.clocks.build()
    tell = (
        "import sys, threading, time\n"
        "for line in sys.stdin:\n"
        "    began = time.monotonic(); threading.Event().wait(0.05)\n"
        "    print(time.time() - float(line), time.monotonic() - began, flush=True)\n"
    )
    variables = [house.clocks.environment(f"{role}-0") for role in ("prefill", "decode", "conductor", "gateway")]
    variables.append(house.clocks.environment("store-a"))
    step = fault(house, "clock-back")
    hit = step.strike(rng())
    struck = next(v for v in variables if v[clocks.VARIABLE].endswith(step.targets[0]))
    env = {**os.environ, **struck}
    with subprocess.Popen(
        [sys.executable, "-c", tell], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def ahead() -> tuple[float, float]:
            print(time.time(), file=child.stdin, flush=True)
            off, waited = child.stdout.readline().split()  # type: ignore[union-attr]
            return float(off), float(waited)

        assert ahead()[0] < -4, hit
        assert 0.04 < ahead()[1] < 5
        step.heal()
        assert abs(ahead()[0]) < 4
        child.stdin.close()
    house.clocks.close()


CUTS = """
import socket, subprocess, sys
from moonpool.bench.chaos.network import Network, OURS
net = Network(["one", "two"])
net.enter()
listen = "import socket; s = socket.create_server(('0.0.0.0', 7)); print('up', flush=True)\\nwhile True: s.accept()"
server = subprocess.Popen([*net.into("two"), sys.executable, "-c", listen], stdout=subprocess.PIPE)
server.stdout.readline()
dial = f"import socket; socket.create_connection(('{net.address('two')}', 7), 0.4)"
def is_cut(who):
    before = net.into(who) if who else []
    return subprocess.run([*before, sys.executable, "-c", dial], stderr=subprocess.DEVNULL).returncode != 0
def reaches(who):  # a busy machine may need more than one try
    return not all(is_cut(who) for _ in range(10))
told = [reaches("one"), reaches("")]
net.cut("one", "two"); told += [not is_cut("one"), reaches("")]
net.mend("one", "two"); told += [reaches("one")]
net.cut("two", "registry"); told += [reaches("one"), not is_cut("")]
net.mend("two", "registry"); net.pull("two"); told += [not is_cut("one"), not is_cut("")]
net.plug("two"); told += [reaches("one"), reaches("")]
server.kill(); server.wait(); net.close()
print(*map(int, told))
"""


def test_links_are_cut_one_by_one_and_mended() -> None:
    if why := network.why_not():
        pytest.skip(why)
    done = subprocess.run([sys.executable, "-c", CUTS], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == list("11011100011"), done.stderr
