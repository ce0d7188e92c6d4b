"""etcd frozen, restarted, emptied; processes frozen or busy: who is told what, and who comes back."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.etcd_members import NAME, TIMING, beating, eventually, member, members, operator
from support.etcd_server import EtcdServer

from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.cluster.etcd.core import Core
from moonpool.cluster.spec import RoleSpec, with_absolute_paths
from moonpool.core.config import ClusterConfig, Config
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, MemberChange

pytestmark = pytest.mark.processes

OUTAGE_S = 3.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


def frozen(etcd: EtcdServer) -> Callable[[], None]:
    etcd.freeze()
    return etcd.thaw


def restarted(etcd: EtcdServer) -> Callable[[], None]:
    etcd.kill()
    return etcd.start


def emptied(etcd: EtcdServer) -> Callable[[], None]:
    etcd.kill()
    etcd.forget()
    return etcd.start


@pytest.mark.parametrize("away", [frozen, restarted, emptied])
async def test_an_outage_changes_nobodys_view_and_everybody_registers_again_by_itself(
    etcd: EtcdServer, away: Callable[[EtcdServer], Callable[[], None]]
) -> None:
    async with members(etcd.registry, 3) as seen:
        names = [f"prefill-{i}" for i in range(3)]
        await asyncio.gather(*(s.peers.join(member(name)) for s, name in zip(seen, names, strict=True)))
        for s in seen:
            await s.hears(*((name, 1, "live") for name in names))
        back, since = away(etcd), time.monotonic()
        for s in seen:  # every lease is past its end by now
            await s.shows("registry_presumed_silent", bool)
        assert [[m.id for m in s.peers.live(Role.PREFILL)] for s in seen] == [names] * 3
        if away is frozen:
            await asyncio.sleep(OUTAGE_S - (time.monotonic() - since))
        back()
        for s in seen:
            await s.shows("registry_presumed_silent", lambda n: not n)
        async with operator(etcd.registry) as (client, address):
            await beating(client, address, 3)
        seen[0].peers.update(replace(member(), ready=False))
        for s in seen:
            await s.until(lambda s=s: not s.known().member.ready)
        await asyncio.sleep(TIMING.registry_return_ms / 1000 + 0.3)  # now silence would count again
        for s in seen:
            assert sorted(t for t in s.told if t[0] != NAME) == [(name, 1, "live") for name in names[1:]]
            assert [t[1:] for t in s.told if t[0] == NAME] == [(1, "live"), (1, "live")]
            assert not s.fenced.done()


async def test_who_died_while_etcd_was_away_is_silent_once_the_others_had_time_to_return(etcd: EtcdServer) -> None:
    async with members(etcd.registry, 2) as (one, watcher):
        await one.peers.join(member())
        await watcher.peers.join(member("prefill-1"))
        await watcher.hears((NAME, 1, "live"))
        etcd.kill()
        await one.peers.leave()  # nobody hears it
        etcd.start()
        await watcher.hears((NAME, 1, "silent"))
        assert ("prefill-1", 1, "silent") not in watcher.told


async def test_a_proof_of_death_given_while_etcd_is_away_is_not_lost(etcd: EtcdServer) -> None:
    async with members(etcd.registry, 2) as (one, watcher):
        await one.peers.join(member())
        await watcher.hears((NAME, 1, "live"))
        etcd.kill()
        watcher.peers.report_gone(NAME, Incarnation(1), "pidfd")
        etcd.start()
        await watcher.hears((NAME, 1, "gone"))
        assert watcher.known().proof == "pidfd"


async def test_a_busy_event_loop_does_not_lose_the_lease(etcd: EtcdServer) -> None:
    async with members(etcd.registry, 2) as (one, watcher):
        await one.peers.join(member())
        await watcher.hears((NAME, 1, "live"))
        threading.Event().wait(2.8)  # this thread is where the event loop runs; a lease lasts 2 s
        async with operator(etcd.registry) as (client, address):
            assert await client.get(address.beat(NAME)) is not None
        assert not one.peers.numbers()["registry_presumed_silent"]
        assert [t[2] for t in watcher.told] == ["live"]


async def test_a_frozen_process_falls_silent_and_wakes_as_a_newer_life(etcd: EtcdServer, tmp_path: Path) -> None:
    timing = TIMING.model_copy(update={"registry_return_ms": 2_000})  # half of it is what a call may take, on a busy machine
    config = with_absolute_paths(Config(timing=timing, cluster=ClusterConfig(state_dir=str(tmp_path / "state"))), tmp_path)
    (tmp_path / "state" / "logs").mkdir(parents=True)
    spec = tmp_path / "spec.json"
    name = MemberId("conductor-0")
    spec.write_text(RoleSpec(name, Role.CONDUCTOR, NodeId("a"), config, etcd.registry, Path("none")).to_json())
    async with members(etcd.registry, 1) as (watcher,):
        command = (sys.executable, str(Path(__file__).with_name("dummy_role.py")), str(spec))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            await watcher.until(lambda: bool(watcher.peers.live(Role.CONDUCTOR)), "life")
            first = watcher.known(name).member
            os.kill(process.pid, signal.SIGSTOP)
            await watcher.hears((name, first.incarnation, "silent"))
            os.kill(process.pid, signal.SIGCONT)
            await watcher.until(lambda: watcher.known(name).liveness is Liveness.LIVE, "return")
            second = watcher.known(name).member
            assert (second.pid, second.incarnation > first.incarnation) == (first.pid, True)
            process.terminate()
            await watcher.hears((name, second.incarnation, "gone"))
            assert watcher.known(name).proof == "left"
        finally:
            process.kill()
            process.communicate()


STORM = 50
DOWN_S = 5.0


async def test_fifty_that_lost_etcd_together_come_back_apart_and_within_bounds(tmp_path: Path) -> None:
    """All on one loop; while etcd is down, a listener on its port counts who tries."""
    server = EtcdServer(tmp_path / "etcd")
    timing = TIMING.model_copy(update={"heartbeat_ms": 500, "silent_after_ms": 5_000, "registry_return_ms": 10_000})
    address = EtcdAddress.parse(server.registry)
    changes: list[MemberChange] = []
    cores = [Core(address, timing, changes.append, lambda why, replaced: None) for _ in range(STORM)]
    with server:
        runs = [asyncio.create_task(core.run()) for core in cores]
        await asyncio.gather(*(core.join(member(f"prefill-{i}")) for i, core in enumerate(cores)))
        server.kill()
        tries = await _count_tries(server.port, DOWN_S)
        before = [core.attempts for core in cores]
        server.start()
        await eventually(lambda: all(c.connected and not c.numbers()["registry_presumed_silent"] for c in cores), 30.0)
        async with operator(server.registry) as (client, _):
            await beating(client, address, STORM)
        assert {c.liveness for c in changes} == {Liveness.LIVE}
        per_second = Counter(math.floor(t) for t in tries)
        per_tenth = Counter(math.floor(10 * t) for t in tries)
        print(f"connection attempts per second while down: {[per_second[s] for s in range(int(DOWN_S))]}")
        assert max(per_second.values()) <= 4 * STORM  # the first second, each trying after 0 to 0.5, 1, 2 s...
        assert max(per_tenth.values()) <= STORM / 2 + 10  # never all at once
        assert sum(per_second[s] for s in range(3, int(DOWN_S))) <= (DOWN_S - 3) * STORM
        assert all(core.attempts - was <= 4 for core, was in zip(cores, before, strict=True))
        for core in cores:
            core.leave()
        await asyncio.gather(*runs)


async def _count_tries(port: int, seconds: float) -> list[float]:
    began, tries = time.monotonic(), []

    def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tries.append(time.monotonic() - began)
        writer.transport.abort()

    listener = await asyncio.start_server(refuse, "127.0.0.1", port, family=socket.AF_INET, reuse_address=True)
    await asyncio.sleep(seconds)
    listener.close()
    await listener.wait_closed()
    return tries
