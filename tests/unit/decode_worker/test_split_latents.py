"""A model whose KV is latents, prefilled here and decoded there with real store nodes: around borders of blocks, from device
pages, from the pool, from another node and from SSD, against bare engine calls."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.split import Split, split_path

from moonpool.bench.tiny_model import make_tiny_latent_model
from moonpool.core.ids import NodeId
from moonpool.core.placement import Segment, Source
from moonpool.core.request import Request

BORDERS = (15, 16, 17, 31, 32, 33, 48)


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_latent_model(tmp_path_factory.mktemp("latent"))


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


def warm(length: int) -> int:
    """Tokens of a prompt seen before: whole blocks, and never its last token."""
    return min(length // 16 * 16, length - 1)


async def right(split: Split, request: Request) -> int:
    """Asked and, when all is idle again, equal to its bare generation: its cached tokens."""
    answer = await split.gateway.ask(request)
    await split.idle()
    assert answer.error is None
    assert answer.ids == split.oracle(request), request.id
    return answer.cached_tokens


async def test_prompts_around_borders_come_from_device_pages_and_from_the_pool(tmp_path: Path, latent_model: Path) -> None:
    async with split_path(tmp_path, latent_model) as split:
        assert split.decode_engine.layout.kind == "mla"
        for length in BORDERS:
            prompt = ids(length, length)
            for cached in (0, warm(length), warm(length)):
                assert await right(split, split.asker.request(prompt, max_tokens=5)) == cached
        await split.clear_device_pages()
        for length in BORDERS:
            split.prefills[0].report()
            assert await right(split, split.asker.request(ids(length, length), max_tokens=5)) == warm(length)
            assert split.prefills[0].report().prefills[0].loaded_tokens == warm(length)


async def test_between_hosts_and_back(tmp_path: Path, latent_model: Path) -> None:
    """Pushed to the decode worker's host, then fetched from there by the prefill worker's."""
    async with split_path(tmp_path, latent_model, nodes=("a", "b")) as split:
        requests = [split.asker.request(ids(n, n), max_tokens=5) for n in (1, 33, 48, 100)]
        answers = await asyncio.gather(*(split.gateway.ask(request) for request in requests))
        await split.idle()
        for request, answer in zip(requests, answers, strict=True):
            assert answer.ids == split.oracle(request)
        await split.clear_device_pages()
        for length in (48, 100):
            split.place(segments=[Segment(0, length // 16, Source.FETCH, NodeId("b"))])
            assert await right(split, split.asker.request(ids(length, length), max_tokens=5)) == warm(length)
        assert split.prefills[0].numbers()["fetched_bytes_count"] > 0


async def test_a_shared_prefix_counts_whole_blocks_and_moved_tokens_do_not_count(tmp_path: Path, latent_model: Path) -> None:
    async with split_path(tmp_path, latent_model) as split:
        prompt = ids(100, 1)
        assert await right(split, split.asker.request(prompt, max_tokens=4)) == 0
        assert await right(split, split.asker.request(prompt, max_tokens=4)) == 96
        assert await right(split, split.asker.request([*prompt[:64], *ids(30, 2)], max_tokens=4)) == 64


@pytest.mark.parametrize(("prompt", "output", "cached"), [(26, 6, 16), (26, 7, 32), (26, 5, 16), (17, 16, 32)])
async def test_a_turn_that_goes_on_finds_blocks_whose_last_token_was_computed(
    tmp_path: Path, latent_model: Path, prompt: int, output: int, cached: int
) -> None:
    """Of 32 tokens the last one was sampled and never computed: its block is no cache yet."""
    async with split_path(tmp_path, latent_model) as split:
        first = split.asker.request(ids(prompt, 3), max_tokens=output)
        answer = await split.gateway.ask(first)
        await split.idle()
        assert len(answer.ids) == output
        follow_up = split.asker.request([*first.prompt, *answer.ids, *ids(5, 4)], max_tokens=4)
        again = await split.gateway.ask(follow_up)
        await split.idle()
        assert again.ids == split.oracle(follow_up)
        assert again.cached_tokens == cached


async def test_blocks_come_back_from_ssd(tmp_path: Path, latent_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.prefill_worker.pace.MIN_MS", 10_000)  # this model computes faster than any disk answers
    store: dict[str, Any] = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": 32 << 20, "ssd_write": "through"}
    async with split_path(tmp_path, latent_model, slots=16, store=store) as split:
        lengths = (33, 100)
        for length in lengths:
            assert await right(split, split.asker.request(ids(length, length), max_tokens=4)) == 0
        await split.clear_device_pages()
        for filler in range(4):  # other prompts take the room of these in DRAM
            assert await right(split, split.asker.request(ids(64, 50 + filler), max_tokens=2)) == 0
        await split.clear_device_pages()
        for length in lengths:
            assert await right(split, split.asker.request(ids(length, length), max_tokens=4)) == warm(length)
        assert split.stores["a"].numbers()["ssd_reads_ok"] > 0
