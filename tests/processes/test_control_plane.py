"""Two gateways and two conductors serve on while whoever leads, or the registry, is killed, frozen or comes back empty."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from support.cluster import LocalCluster, complete, running
from support.etcd_server import EtcdServer, free_port

from moonpool.bench.tiny_model import TINY_IDS
from moonpool.cluster.survey import Answer, leader_of, survey
from moonpool.core.errors import NoPath
from moonpool.core.membership import Liveness, Member

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.timeout(300)]

NODES = [{"name": "a", "both": 1, "conductor": 2, "gateway": 2}]
NAMES = {"both-0", "conductor-0", "conductor-1", "gateway-0", "gateway-1", "store-a"}
SMALL = {
    "engine__block_tokens": 16,
    "engine__page_bytes": 8 << 20,
    "store__pool_bytes": 32 << 20,
    "store__region_bytes": 8 << 20,
    "timing__kill_after_ms": 0,
}


class Seen:
    """A running cluster, by its registry."""

    def __init__(self, cluster: LocalCluster) -> None:
        assert cluster.state is not None
        self.registry = cluster.state.registry
        self.log = cluster.log

    async def until(self, true: Callable[[list[Answer]], object], what: str, limit_s: float = 40.0) -> list[Answer]:
        answers: list[Answer] = []
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    answers = await self.survey()
                    if true(answers):
                        return answers
                    await asyncio.sleep(0.1)
        except TimeoutError:
            seen = [(a.change.member.id, a.change.liveness.value, a.change.member.term) for a in answers]
            raise AssertionError(f"not within {limit_s} s: {what}; {seen}\n{self.log()}") from None

    async def survey(self) -> list[Answer]:
        """Nobody, where the registry does not answer: it may be the one that is away."""
        try:
            return await survey(self.registry)
        except NoPath:
            return []

    async def leader(self, after: int = 0) -> Member:
        """The only one, in a newer term than ``after``, once everybody is live again."""

        def one(answers: list[Answer]) -> bool:
            leads = [a.numbers.get("leading_term", 0.0) for a in answers if a.change.member.role == "conductor"]
            leading = leader_of(answers)
            return live(answers) == NAMES and sum(map(bool, leads)) == 1 and leading is not None and leading.term > after

        found = leader_of(await self.until(one, f"everybody is live and one leads after term {after}"))
        assert found is not None
        return found


def live(answers: list[Answer]) -> set[str]:
    return {a.change.member.id for a in answers if a.change.liveness is Liveness.LIVE and a.change.member.ready}


def agree(answers: list[Answer]) -> bool:
    """Both conductors know every block that there is."""
    known = [a.numbers.get("blocks_indexed") for a in answers if a.change.member.role == "conductor"]
    there = [a.numbers.get("blocks_findable") for a in answers if a.change.member.role == "store"]
    return len(known) == 2 and known[0] == known[1] and 0 < (there[0] or 0) <= (known[0] or 0)


@asynccontextmanager
async def traffic(urls: list[str]) -> AsyncIterator[list[str]]:
    """Requests one after the other at every gateway; how each ended."""
    statuses: list[str] = []
    ended = asyncio.Event()

    async def ask(url: str) -> None:
        draws = random.Random(url)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            while not ended.is_set():
                prompt = [draws.randrange(TINY_IDS) for _ in range(80)]
                answer = await complete(client, prompt, 2)
                statuses.append("ok" if answer.status == 200 else f"{answer.status}: {answer.body}")

    asking = [asyncio.create_task(ask(url)) for url in urls]
    try:
        yield statuses
    finally:
        ended.set()
        await asyncio.gather(*asking)


async def gateways(seen: Seen) -> list[str]:
    await seen.leader()
    return [a.change.member.details["url"] for a in await seen.survey() if a.change.member.role == "gateway"]


async def more(statuses: list[str], count: int = 4) -> None:
    """Until so many more requests were answered."""
    goal = len(statuses) + count
    async with asyncio.timeout(60):
        while len(statuses) < goal:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


async def test_another_conductor_leads_after_the_leading_one_froze_or_was_killed_and_etcd_was_away(
    etcd: EtcdServer, tmp_path: Path, tiny_model: Path
) -> None:
    cluster = LocalCluster(tmp_path, tiny_model, NODES, cluster__registry=f"etcd://localhost:{etcd.port}", **SMALL)
    with running(cluster):
        seen = Seen(cluster)
        async with traffic(await gateways(seen)) as statuses:
            first = await seen.leader()
            os.kill(first.pid, signal.SIGSTOP)
            await seen.until(lambda found: (one := leader_of(found)) and one.term > first.term, "another one leads")
            await more(statuses)
            os.kill(first.pid, signal.SIGCONT)
            second = await seen.leader(first.term)
            os.kill(second.pid, signal.SIGKILL)
            await more(statuses)
            third = await seen.leader(second.term)
            etcd.freeze()
            await more(statuses, 12)
            etcd.thaw()
            await more(statuses)
            etcd.kill()
            etcd.forget()
            etcd.start()
            fourth = await seen.leader(third.term)
        assert {first.id, second.id, third.id, fourth.id} == {"conductor-0", "conductor-1"}
        assert set(statuses) == {"ok"}
        await seen.until(agree, "both know every block")


class LoneRegistry:
    """``moonpool run registry`` on a port that it keeps over restarts. Use as a context manager."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = (sys.executable, "-m", "moonpool.cli.main", "run", "registry", "--registry", self.address)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> LoneRegistry:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


async def test_requests_and_leadership_go_on_through_a_registry_that_is_frozen_or_comes_back_empty(
    tmp_path: Path, tiny_model: Path
) -> None:
    with LoneRegistry() as registry:
        cluster = LocalCluster(tmp_path, tiny_model, NODES, cluster__registry=registry.address, **SMALL)
        with running(cluster):
            seen = Seen(cluster)
            async with traffic(await gateways(seen)) as statuses:
                first = await seen.leader()
                registry.send(signal.SIGSTOP)
                await more(statuses, 12)
                registry.send(signal.SIGCONT)
                second = await seen.leader()
                assert second.term >= first.term
                registry.kill()
                await more(statuses, 12)
                registry.start()
                third = await seen.leader()
                assert third.term >= second.term, "terms go on from what the members know"
                await more(statuses)
            assert set(statuses) == {"ok"}
