"""Prefixes whose blocks lie on SSD, here or at another node, under the split path and role both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import wait_for_loads
from support.split import Split, split_path
from support.store import block_keys, until

from moonpool.cluster.both import BothWorker
from moonpool.core.ids import Incarnation, MemberId, NodeId
from moonpool.core.placement import Segment, Source
from moonpool.core.request import Request
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.node import StoreNode

BOTH: dict[str, Any] = {"prefills": 0, "decode_kind": BothWorker}


@pytest.fixture(autouse=True)
def loading_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_loads(monkeypatch)


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


def ssd(folder: Path, **more: Any) -> dict[str, Any]:
    """Everything is written through: what is gone from DRAM is on SSD."""
    return {"ssd_path": str(folder / "ssd"), "ssd_bytes": 32 << 20, "ssd_write": "through", **more}


async def right(split: Split, request: Request) -> int:
    """Asked and, when all is idle again, equal to its bare generation: its cached tokens."""
    answer = await split.gateway.ask_until_answered(request)
    await split.idle()
    assert answer.error is None
    assert answer.ids == split.oracle(request), request.id
    return answer.cached_tokens


async def push_down(node: StoreNode, keys: Sequence[bytes]) -> None:
    """Until ``keys`` lie on SSD only: other blocks take their room."""
    me = replace(node.member, id=MemberId("filler"), incarnation=Incarnation(1))
    client = await WorkerStore.connect(
        node.member.address, me, node.layout, on_landed=_heed, on_failed=_heed, on_lost=lambda: None
    )
    page = np.zeros(node.layout.block_bytes, np.uint8)
    for turn in range(100):
        if len(node.pool.on_ssd(keys)) == len(keys):
            break
        await client.publish([(key, page) for key in block_keys(f"f{turn}-", 4)])
        await until(lambda: not node.numbers()["demotions_open"], "nothing is on its way down")
    await client.close()
    assert len(node.pool.on_ssd(keys)) == len(keys)


def _heed(_: object) -> None:
    pass


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
async def test_ids_and_logprobs_are_those_of_the_cold_run_from_ssd_and_from_another_nodes_ssd(
    tmp_path: Path, tiny_model: Path, length: int
) -> None:
    async with split_path(tmp_path, tiny_model, nodes=("a", "b"), slots=24, store=ssd(tmp_path)) as split:
        runs = []
        for way in ("cold", "remote SSD", "SSD"):
            keys = split.asker.request(ids(length)).keys
            if way != "cold":
                await split.clear_device_pages()
                there = "b" if way == "remote SSD" else "a"
                split.place(segments=[Segment(0, length // 16, Source.FETCH, NodeId("b"))] if there == "b" else [])
                await push_down(split.stores[there], keys)
                read = split.stores[there].numbers()["ssd_reads_ok"]
            answer = await split.gateway.ask(split.asker.request(ids(length), max_tokens=5, logprobs=2))
            await split.idle()
            if way != "cold":
                assert split.stores[there].numbers()["ssd_reads_ok"] == read + length // 16
            assert answer.cached_tokens < length
            assert (answer.cached_tokens > 0) == (way != "cold" and length >= 16)
            runs.append([e.sampled for e in answer.emissions if e.sampled])
        for run in runs[1:]:
            assert [s.token for s in run] == [s.token for s in runs[0]]
            for mine, cold in zip(run, runs[0], strict=True):
                assert mine.logprob == pytest.approx(cold.logprob, abs=1e-4)
                assert [t.logprob for t in mine.top] == pytest.approx([t.logprob for t in cold.top], abs=1e-4)


@pytest.mark.parametrize("role", ["split", "both"])
async def test_clients_that_leave_while_a_slow_disk_is_read_leave_nothing_behind(
    tmp_path: Path, tiny_model: Path, role: str
) -> None:
    kind = BOTH if role == "both" else {}
    async with split_path(tmp_path, tiny_model, slots=48, store=ssd(tmp_path, ssd_read_bytes_per_s=400_000.0), **kind) as split:
        prompt = ids(500)
        await right(split, split.asker.request(prompt, max_tokens=1))
        await split.clear_device_pages()
        await push_down(split.stores["a"], split.asker.request(prompt).keys)
        requests = [split.asker.request(prompt, max_tokens=30) for _ in range(50)]
        for request in requests:
            split.gateway.begin(request)
        await asyncio.sleep(0.2)
        for request in requests:
            split.decode.cancel(split.gateway.stream, request.id, 1)
        await split.idle(5)
        await right(split, split.asker.request(prompt, max_tokens=4))


async def test_a_load_from_ssd_that_takes_its_room_from_other_blocks_works_and_the_counters_agree(
    tmp_path: Path, tiny_model: Path
) -> None:
    back = ssd(tmp_path, ssd_write="back", demote_below=0.3, demote_until=0.5)
    async with split_path(tmp_path, tiny_model, decode_pages=12, slots=20, store=back, **BOTH) as split:
        store = split.stores["a"]
        for _ in range(3):
            for seed in (1, 2, 3, 4):
                await right(split, split.asker.request(ids(130, seed), max_tokens=20))
            await until(lambda: not store.numbers()["demotions_open"], "nothing is on its way down")
            numbers = store.numbers()
            assert numbers["slots_free"] + numbers["slots_sealed"] == 20
            assert numbers["pins"] == numbers["promotions_open"] == numbers["tickets"] == 0
            assert split.decode.numbers()["pages_cached"] + split.decode.numbers()["pages_free"] == 12
        assert numbers["ssd_reads_ok"] > 0
        assert numbers["digest_mismatches"] == 0


async def test_poisoned_staging_and_slots_change_no_answer_that_comes_from_ssd(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, slots=16, store=ssd(tmp_path), **BOTH) as split:
        assert split.config.engine.poison
        prompts = [ids(n, n) for n in range(17, 51, 3)]
        for cold in (True, False):
            for prompt in prompts:
                cached = await right(split, split.asker.request(prompt, max_tokens=3))
                assert (cached == 0) == cold
            await split.clear_device_pages()
        assert split.stores["a"].numbers()["ssd_reads_ok"] > 0
