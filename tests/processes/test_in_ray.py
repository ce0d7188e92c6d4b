"""A cluster inside a Ray cluster that is there: two nodes, a token, jobs that start it, use it, fail and stop."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.cluster import complete
from support.oracle import Oracle
from support.ray_cluster import HEAD, SECOND, RayCluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

DEPLOY = Path(__file__).parents[2] / "deploy" / "ray"
TOKEN = "0123456789abcdef0123456789abcdef"
NODES = [
    {"name": "a", "prefill": 1, "labels": {"room": "prefill"}},
    {"name": "b", "decode": 1, "conductor": 1, "gateway": 1, "labels": {"room": "decode"}},
]
PROMPT = [1 + i % 100 for i in range(200)]
START_S = 120.0


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
            "cluster.ray_cpus": json.dumps({"store": 0.1, "prefill": 0.4, "decode": 0.4, "conductor": 0.1, "gateway": 0.1}),
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
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": "90"}
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
    entry = ["moonpool", "replay", "--generate", "--limit", "3", "--report", str(tmp_path / "report"), *find]
    said = ray_cluster.submit(entry, working_dir=DEPLOY, runtime_env={}, name="replay", wait=True)
    assert "moonpool: exit code 0" in said and "[ray job submit: 0]" in said, said
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
        time.sleep(0.2)


def test_a_job_that_cannot_start_says_why_and_its_exit_code_is_on_the_last_line(
    ray_cluster: RayCluster, tmp_path: Path, tiny_model: Path
) -> None:
    job = Job(ray_cluster, tmp_path, tiny_model, "unplaced")
    said = job.submit(wait=True, cluster__nodes=json.dumps([{**NODES[0], "labels": {"room": "cellar"}}, NODES[1]]))
    assert "node 'a' wants labels room=cellar, and no Ray node has them" in said, said
    assert "room=decode" in said, "which labels there are"
    assert "moonpool: exit code 2" in said and "[ray job submit: 1]" in said
    assert ray_cluster.left()["groups"] == []


@pytest.mark.parametrize(
    ("nodes", "more", "missing"),
    [
        ([{"name": "a", "both": 2, "conductor": 1, "gateway": 1}], {}, "node 'a' needs 2.1 CPU, no Ray node has more than 1"),
        (NODES, {"cluster__ray_gpus_per_worker": 1}, "node 'a' needs 1 GPU, no Ray node like that has more than 0"),
        ([{**NODES[0], "resources": {"nic": 1}}, NODES[1]], {}, "node 'a' needs 1 nic, no Ray node like that has more than 0"),
        ([*NODES, {"name": "c"}], {}, "cluster.ray_strategy STRICT_SPREAD needs 3 Ray nodes, there are 2"),
    ],
)
def test_what_ray_lacks_is_named_in_bounded_time(
    ray_cluster: RayCluster, tmp_path: Path, tiny_model: Path, nodes: Any, more: dict[str, Any], missing: str
) -> None:
    cpus = {"store": 0.1, "both": 0.9, "prefill": 0.4, "decode": 0.4, "conductor": 0.1, "gateway": 0.1}
    words = Job(ray_cluster, tmp_path, tiny_model, "unfit").words(
        cluster__nodes=json.dumps(nodes),
        cluster__ray_cpus=json.dumps(cpus),
        cluster__ray_place_ms=500,
        cluster__ray_address=ray_cluster.address,
        **more,
    )
    words[words.index("hosts.toml")] = str(DEPLOY / "hosts.toml")
    done = ray_cluster.command(*words)
    assert done.returncode == 2, done.stderr
    assert missing in done.stderr.strip().splitlines()[-1], done.stderr


@pytest.mark.parametrize(("variables", "why"), [({"RAY_AUTH_TOKEN": "f" * 32}, "token"), ({"RAY_AUTH_MODE": "disabled"}, "token")])
def test_a_wrong_or_missing_token_is_refused_with_the_way_to_give_the_right_one(
    ray_cluster: RayCluster, tmp_path: Path, tiny_model: Path, variables: dict[str, str], why: str
) -> None:
    words = Job(ray_cluster, tmp_path, tiny_model, "refused").words(cluster__ray_address=ray_cluster.address)
    words[words.index("hosts.toml")] = str(DEPLOY / "hosts.toml")
    done = ray_cluster.command(*words, **variables)
    assert done.returncode == 2, done.stderr
    assert "RAY_AUTH_TOKEN" in done.stderr.strip().splitlines()[-1], done.stderr
    assert TOKEN not in done.stderr
