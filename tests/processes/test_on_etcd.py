"""A cluster whose registry is a real etcd: it serves on while etcd is frozen, and after etcd came back with nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import LAPTOP, LocalCluster, complete, running
from support.etcd_server import EtcdServer

from moonpool.cluster.survey import members
from moonpool.core.membership import Liveness, MemberChange

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

FROZEN_S = 3.0
PROMPT = list(range(20))
NAMES = ["both-0", "conductor-0", "gateway-0", "store-a"]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


async def test_serving_goes_on_through_an_outage_of_etcd(etcd: EtcdServer, tmp_path: Path, tiny_model: Path) -> None:
    settings = {
        "cluster__registry": f"etcd://localhost:{etcd.port}",
        "store__pool_bytes": 64 << 20,
        "engine__page_bytes": 32 << 20,
    }
    cluster = LocalCluster(tmp_path, tiny_model, LAPTOP, model__dtype="float32", **settings)
    with running(cluster):
        assert cluster.state is not None
        registry = cluster.state.registry
        before = await members(registry)
        assert {c.member.id: c.liveness for c in before} == dict.fromkeys(NAMES, Liveness.LIVE)
        async with cluster.client() as client:
            assert (await complete(client, PROMPT, 2)).status == 200
            etcd.freeze()
            frozen = time.monotonic()
            while True:
                assert (await complete(client, PROMPT, 2)).status == 200
                if time.monotonic() > frozen + FROZEN_S:
                    break
            etcd.thaw()
            etcd.kill()
            etcd.forget()
            assert (await complete(client, PROMPT, 2)).status == 200
            etcd.start()
            assert (await complete(client, PROMPT, 2)).status == 200
            after = await _registered(registry)
            assert (await complete(client, PROMPT, 2)).status == 200
        assert [(c.member.id, c.member.incarnation, c.member.pid) for c in after] == [
            (c.member.id, c.member.incarnation, c.member.pid) for c in before
        ]
        shown = await asyncio.to_thread(_status, cluster)
        assert [m["id"] for m in shown["members"]] == NAMES
        assert all(
            m["numbers"]["registry_connected"] and not m["numbers"]["registry_presumed_silent"] for m in shown["members"]
        )
    assert {c.member.id: c.proof for c in await members(registry)} == dict.fromkeys(NAMES, "left")


async def _registered(registry: str) -> list[MemberChange]:
    """Everybody, once all have a lease again."""
    async with asyncio.timeout(30.0):
        while True:
            known = await members(registry)
            if [c.member.id for c in known if c.liveness is Liveness.LIVE] == NAMES:
                return known
            await asyncio.sleep(0.1)


def _status(cluster: LocalCluster) -> dict[str, Any]:
    where = ("--set", f"cluster.name={cluster.name}", "--set", f"cluster.state_dir={cluster.folder / 'state'}")
    command = (sys.executable, "-m", "moonpool.cli.main", "status", "--json", *where)
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
