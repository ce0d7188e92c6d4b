"""Every process of a cluster restarted, one after the other, while streams and whole answers go through both gateways."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.cluster import LocalCluster, running
from support.oracle import Oracle
from support.steady_load import SteadyLoad

from moonpool.cluster.probe.catalogue.declared import part_of, series_names
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

TWICE = [{"name": n, "prefill": 1, "decode": 1, "conductor": 1, "gateway": 1} for n in ("a", "b")]
TOKENS = 60


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Iterator[Oracle]:
    oracle = Oracle(tiny_model, threads=1)
    yield oracle
    oracle.comparison.allow()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LocalCluster]:
    settings = {
        "model__dtype": "float32",
        "timing__silent_after_ms": 4_000,
        "engine__poison": True,
        "engine__block_tokens": 16,
        "engine__page_bytes": 8 << 20,
        "store__pool_bytes": 32 << 20,
        "store__region_bytes": 8 << 20,
    }
    with running(LocalCluster(tmp_path_factory.mktemp("rolling"), tiny_model, TWICE, **settings)) as cluster:
        yield cluster


def prompt(length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(f"rolling {seed}")
    return tuple(draw.randrange(128) for _ in range(length))


def urls(cluster: LocalCluster) -> list[str]:
    live = (c.member for c in cluster.changes().values() if c.liveness is Liveness.LIVE and c.member.role is Role.GATEWAY)
    return [member.details["url"] for member in live if member.ready]


def restart(cluster: LocalCluster, *options: str) -> subprocess.CompletedProcess[str]:
    """``moonpool restart`` as a user types it."""
    where = ("--set", f"cluster.state_dir={cluster.folder / 'state'}", "--set", f"cluster.name={cluster.name}")
    command = [sys.executable, "-m", "moonpool.cli.main", "restart", *where, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)


async def test_every_process_restarts_in_turn_and_no_request_is_lost(cluster: LocalCluster, oracle: Oracle) -> None:
    before = {name: change.member for name, change in cluster.changes().items()}
    prompts = [prompt(40 + 50 * (seed % 4), seed) for seed in range(12)]
    load = SteadyLoad(lambda: urls(cluster), prompts, TOKENS)
    loading = asyncio.create_task(load.run())
    done = await asyncio.to_thread(restart, cluster, "--rolling", "--json")
    load.enough.set()
    await loading
    assert done.returncode == 0, done.stdout + done.stderr + cluster.log()
    told = json.loads(done.stdout)
    print(done.stderr, dict(load.counts))
    assert [r["member"] for r in told["restarted"]] == [
        *("store-a", "store-b", "prefill-0", "prefill-1", "decode-0", "decode-1"),
        *("conductor-0", "conductor-1", "gateway-0", "gateway-1"),
    ]
    after = {name: change.member for name, change in cluster.changes().items()}
    assert all(after[name].pid != member.pid for name, member in before.items())
    assert not load.lost, (load.lost[:5], len(load.lost), cluster.log())
    assert load.counts["streamed"] and load.counts["whole"]
    for asked, ids in load.answers:
        assert len(ids) == TOKENS
        oracle.check(asked, ids, "while every process was restarted")
    await asyncio.to_thread(cluster.assert_idle)


def test_a_role_that_nobody_else_has_is_not_restarted_unasked(cluster: LocalCluster) -> None:
    done = restart(cluster, "--member", "nobody-0")
    assert done.returncode == 2 and "these are: conductor-0" in done.stderr
    done = restart(cluster, "--role", "gateway")
    assert done.returncode == 2 and "--rolling: give it to restart gateway-0, gateway-1" in done.stderr


def test_every_process_answers_its_probes_with_metrics_that_parse(cluster: LocalCluster) -> None:
    strict = {"accept": "application/openmetrics-text; version=1.0.0"}
    for name, change in cluster.changes().items():
        where = f"http://{change.member.details['probe']}"
        with httpx.Client(base_url=where, timeout=10.0, trust_env=False) as client:
            assert client.get("/live").status_code == 200, name
            cluster.until(lambda ask=client.get: ask("/ready").status_code == 200, f"{name} is ready")  # each gateway by itself
            text, openmetrics = client.get("/metrics").text, client.get("/metrics", headers=strict).text
        for families in (list(parse_text(text)), list(parse_openmetrics(openmetrics))):
            samples = {sample.name for family in families for sample in family.samples}
            part = part_of(change.member.role)
            assert "moonpool_process_ready" in samples and "moonpool_process_threads" in samples, name
            assert all(name.startswith((f"moonpool_{part}_", "moonpool_process")) for name in samples)
            undeclared = {name for name in samples if not name.endswith("_created")} - series_names()
            assert not undeclared, f"{name}: declare these in cluster/probe/catalogue"
            assert all(family.documentation for family in families)
