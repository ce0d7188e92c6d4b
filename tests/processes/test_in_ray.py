"""A cluster inside a Ray cluster that is there: two nodes, a token, jobs that start it, use it, fail and stop."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.cluster import complete
from support.oracle import Oracle
from support.ray_cluster import HEAD, SECOND, RayCluster

from moonpool.bench.tiny_model import make_tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.timeout(600)]

DEPLOY = Path(__file__).parents[2] / "deploy" / "ray"
TRACE = [{"timestamp": 50 * i, "input_length": 200, "output_length": 4, "hash_ids": [i % 2]} for i in range(4)]
TOKEN = "0123456789abcdef0123456789abcdef"
NODES = [
    {"name": "a", "prefill": 1, "labels": {"room": "prefill"}},
    {"name": "b", "decode": 1, "conductor": 1, "gateway": 1, "labels": {"room": "decode"}},
]
PROMPT = [1 + i % 100 for i in range(200)]
START_S = 240.0
EXACT = {"store": 0.5, "prefill": 0.5, "decode": 0.3, "conductor": 0.1, "gateway": 0.1}  # all of both nodes' CPUs
IDS = 33_000  # replays draw from the ids that most vocabularies have


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), IDS)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """Node `prefill` of 1 CPU with the head, node `decode` of 1 CPU."""
    with RayCluster(token=TOKEN) as cluster:
        cluster.start("prefill", cpus=1)
        cluster.add("decode", cpus=1)
        yield cluster


def title(pid: int) -> str:
    """A worker of Ray is called after what it runs."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return ""


class Job:
    """``moonpool up`` as a Ray job with the shipped configuration and runtime environment."""

    def __init__(self, ray: RayCluster, folder: Path, model: Path, name: str) -> None:
        self.ray, self.folder, self.name = ray, folder, name
        self._settings = {
            "cluster.name": name,
            "cluster.nodes": json.dumps(NODES),
            "cluster.state_dir": str(folder / "state"),
            "cluster.key_file": str(folder / "hash.key"),
            "cluster.ray_gpus_per_worker": 0,
            "cluster.ray_cpus": json.dumps(EXACT),
            "cluster.ray_place_ms": 2_000,
            "model.path": str(model),
            "model.name": "smollm2",
            "model.dtype": "float32",
            "transfer.ucx_tls": "tcp",
            "gateway.port": 0,
            "store.pool_bytes": 64 << 20,
            "engine.page_bytes": 32 << 20,
        }

    def words(self, **more: Any) -> list[str]:
        values = {**self._settings, **{key.replace("__", "."): value for key, value in more.items()}}
        return ["moonpool", "up", "--config", "hosts.toml", *(w for k, v in values.items() for w in ("--set", f"{k}={v}"))]

    def submit(self, *, wait: bool, **more: Any) -> str:
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": "120"}
        return self.ray.submit(
            self.words(**more), working_dir=DEPLOY, runtime_env={"env_vars": variables}, name=self.name, wait=wait
        )

    def url(self) -> str:
        """Of its gateway, once it serves."""
        until = time.monotonic() + START_S
        while (found := re.search(r"serving \S+ at (http://\S+)", log := self.ray.log(self.name))) is None:
            assert time.monotonic() < until and "exit code" not in log, log
            time.sleep(0.5)
        return found[1]


async def test_a_job_serves_from_two_nodes_is_replayed_against_by_another_and_stops_leaving_nothing(
    ray_cluster: RayCluster, tmp_path: Path, tiny_model: Path
) -> None:
    before = ray_cluster.processes()
    job = Job(ray_cluster, tmp_path, tiny_model, "rayjob")
    said = job.submit(wait=False)
    assert "[ray job submit: 0]" in said, said
    url = job.url()
    log = ray_cluster.log("rayjob")
    assert f"placed: a on {HEAD}, b on {SECOND}" in log
    assert f"http://127.0.0.1:{ray_cluster.dashboard_port}" in log, "the dashboard's link"
    assert url.startswith(f"http://{SECOND}:"), "the gateway announces the address of its own node"
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await complete(client, PROMPT, 8)
    Oracle(tiny_model).check(PROMPT, answer.ids, "inside Ray")

    # another job finds it by Ray, though it runs with another state folder
    find = ["--name", "rayjob", "--set", "cluster.ray_address=auto", "--set", f"cluster.state_dir={tmp_path / 'none'}"]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, TRACE)))
    entry = ["moonpool", "replay", str(tmp_path / "trace.jsonl"), "--report", str(tmp_path / "report"), *find]
    said = ray_cluster.submit(entry, working_dir=DEPLOY, runtime_env={}, name="replay", wait=True)
    assert "4 sent: 4 ok" in said and "moonpool: exit code 0" in said and "[ray job submit: 0]" in said, said
    assert f"report and pictures in {tmp_path / 'report'}" in said
    assert (tmp_path / "report" / "summary.json").exists()

    stopped = ray_cluster.command("moonpool", "down", *find, RAY_ADDRESS=ray_cluster.address)
    assert stopped.returncode == 0 and "Ray job rayjob: stopped" in stopped.stderr, stopped.stderr
    log = ray_cluster.log("rayjob")
    assert log.rstrip().endswith("moonpool: exit code 143"), log
    assert not list(Path("/dev/shm").glob("moonpool+rayjob+*"))
    assert ray_cluster.left() == {"actors": [], "groups": []}
    ended = time.monotonic() + 20
    while grown := {p for p in ray_cluster.processes() - before if "RoleActor" in title(p)}:
        assert time.monotonic() < ended, grown
        await asyncio.sleep(0.2)


def test_a_job_that_cannot_start_says_why_and_its_exit_code_is_on_the_last_line(
    ray_cluster: RayCluster, tmp_path: Path, tiny_model: Path
) -> None:
    """The exact fit starts, in the test above; one tenth of a CPU less does not."""
    job = Job(ray_cluster, tmp_path, tiny_model, "unfit")
    said = job.submit(wait=True, cluster__ray_cpus=json.dumps({**EXACT, "prefill": 0.6}), cluster__ray_place_ms=500)
    assert "not placed within 0.5 s: node 'a' needs 1.1 CPU, no Ray node like that has more than 1" in said, said
    assert ray_cluster.log("unfit").rstrip().endswith("moonpool: exit code 2")
    assert "[ray job submit: 1]" in said


def test_what_ray_lacks_or_refuses_is_named_in_bounded_time(ray_cluster: RayCluster, tmp_path: Path, tiny_model: Path) -> None:
    cellar = json.dumps([{**NODES[0], "labels": {"room": "cellar"}}, NODES[1]])
    cases: list[tuple[dict[str, Any], dict[str, str], str]] = [
        (
            {"cluster__nodes": cellar},
            {},
            "node 'a' wants labels room=cellar, and no Ray node has them (there are room=decode, ",
        ),
        (
            {},
            {"RAY_AUTH_TOKEN": "f" * 32, "RAY_NUM_REDIS_GET_RETRIES": "1"},
            "refuses the token of this process, or asks for one",
        ),
    ]

    def outside(number: int) -> subprocess.CompletedProcess[str]:
        """The same command from a shell, no job."""
        more, variables, _ = cases[number]
        job = Job(ray_cluster, tmp_path / str(number), tiny_model, f"lacking{number}")
        words = [str(DEPLOY / word) if word == "hosts.toml" else word for word in job.words(cluster__ray_place_ms=500, **more)]
        return ray_cluster.command(*words, "--set", f"cluster.ray_address={ray_cluster.address}", **variables)

    with ThreadPoolExecutor(len(cases)) as pool:
        for done, (_, _, why) in zip(pool.map(outside, range(len(cases))), cases, strict=True):
            assert done.returncode == 2, done.stderr
            assert why in done.stderr.strip().splitlines()[-1], done.stderr
            assert TOKEN not in done.stderr
