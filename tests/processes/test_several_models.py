"""Two models on a live cluster behind one gateway: each answers as it does alone, and outlives the other."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import LocalCluster, complete, running
from support.oracle import Oracle
from support.other_weights import other_weights
from typer.testing import CliRunner

from moonpool.cli.main import Choices, build
from moonpool.core.membership import Liveness

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

BLOCK = 16
NODES = [
    {"name": "a", "both": 1, "conductor": 1, "gateway": 1},
    {"name": "b", "model": "other", "prefill": 1, "decode": 1, "conductor": 1},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    return {"tiny": tiny_model, "other": other_weights(tiny_model, tmp_path_factory.mktemp("other") / "model")}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("several-models")
    other = {"name": "other", "path": str(models["other"]), "dtype": "float32", "aliases": ["gpt-4o-mini"]}
    settings = {
        "model__name": "tiny",
        "model__dtype": "float32",
        "gateway__models": json.dumps([other]),
        "gateway__usage_log": str(folder / "usage.jsonl"),
        "engine__poison": True,
        "engine__block_tokens": BLOCK,
        "engine__page_bytes": 8 << 20,
        "store__pool_bytes": 16 << 20,
        "store__region_bytes": 8 << 20,
    }
    with running(LocalCluster(folder, models["tiny"], NODES, **settings)) as cluster:
        yield cluster
        cluster.assert_idle()


@pytest.fixture(scope="module")
def oracles(models: dict[str, Path]) -> Iterator[dict[str, Oracle]]:
    made = {name: Oracle(path, threads=1) for name, path in models.items()}
    yield made
    for oracle in made.values():
        oracle.comparison.allow()


def prompt(seed: int, blocks: int = 6) -> list[int]:
    return random.Random(seed).choices(range(128), k=blocks * BLOCK + 3)


async def test_each_model_answers_as_it_does_alone_and_never_from_the_others_kv(
    served: LocalCluster, oracles: dict[str, Oracle]
) -> None:
    asked = prompt(1)
    answers = {}
    async with served.client() as client:
        for model in ("tiny", "other", "tiny", "other", "gpt-4o-mini"):
            answer = await complete(client, asked, 8, model=model)
            assert answer.status == 200 and answer.body is not None, answer.body
            name = answer.body["model"]
            assert name == ("tiny" if model == "tiny" else "other")
            oracles[name].check(asked, answer.ids, name)
            assert answer.cached == 0 or name in answers, "the first one found nothing, whatever the other model has stored"
            answers[name] = answer.ids
        refused = await complete(client, asked, 8, model="gpt-4")
    assert answers["tiny"] != answers["other"]
    assert refused.status == 404 and refused.body is not None
    assert "use 'tiny', 'other'" in refused.body["error"]["message"]


def test_each_group_has_a_leader_and_status_tells_them_apart(served: LocalCluster) -> None:
    def leaders() -> dict[str, str]:
        live = [c.member for c in served.changes().values() if c.liveness is Liveness.LIVE]
        return {m.model: m.id for m in live if m.term}

    served.until(lambda: leaders() == {"tiny": "conductor-0", "other": "conductor-1"}, "each group has a leader")
    told = moonpool(served, "status", "--json")
    assert json.loads(told)["leaders"] == {"tiny": "conductor-0", "other": "conductor-1"}


def test_prompts_are_warmed_once_and_usage_tells_who_took_what(served: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "warm.jsonl"
    lines = [{"prompt": prompt(seed), "model": model} for seed in (11, 12) for model in ("tiny", "gpt-4o-mini")]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cold = json.loads(moonpool(served, "warm", str(file), "--json"))
    assert (cold["prompts"], cold["failed"], cold["cached_tokens"]) == (4, 0, 0)

    def again() -> bool:  # what was computed is in the pool a moment after its answer
        warm = json.loads(moonpool(served, "warm", str(file), "--json"))
        return bool(warm["computed_tokens"] == 4 * 3 and warm["cached_tokens"] == 4 * 6 * BLOCK)

    served.until(again, "all whole blocks are there")
    log = served.folder / "usage.jsonl"
    told = json.loads(moonpool(served, "usage", str(log), "--by", "model", "--json"))
    groups = {one["model"]: one for one in told["groups"]}
    assert set(groups) >= {"tiny", "other"}
    assert groups["tiny"]["prompt_tokens"] >= 4 * (6 * BLOCK + 3)


async def test_a_model_whose_workers_die_takes_nothing_from_the_other(served: LocalCluster, oracles: dict[str, Oracle]) -> None:
    asked = prompt(3)
    killed = served.member("prefill-0")
    async with served.client() as client:
        os.kill(killed.pid, signal.SIGKILL)
        served.until(
            lambda: served.member("prefill-0").pid != killed.pid or not_live(served, "prefill-0"), "its death is known"
        )
        while not_live(served, "prefill-0"):
            answer = await complete(client, asked, 4, model="tiny")
            assert answer.status == 200, answer.body
            oracles["tiny"].check(asked, answer.ids, "tiny beside a dead worker of the other model")
            assert (await client.get("/ready")).status_code == 200
    async with served.client() as client:
        answer = await complete(client, asked, 4, model="other")
        assert answer.status == 200, answer.body
        oracles["other"].check(asked, answer.ids, "other, once its worker is back")


def not_live(cluster: LocalCluster, name: str) -> bool:
    change = cluster.changes()[name]
    return change.liveness is not Liveness.LIVE or not change.member.ready


def moonpool(cluster: LocalCluster, *words: str) -> str:
    where = () if words[0] == "usage" else ("--name", cluster.name, "--set", f"cluster.state_dir={cluster.folder / 'state'}")
    ran = CliRunner().invoke(build(Choices()), [*words, *where])
    assert ran.exit_code == 0, ran.output
    return ran.stdout
