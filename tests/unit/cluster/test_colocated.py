"""A decode worker that computes some prompts itself, between hand-offs of others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.split import Split, split_path
from support.workers import Gateway, ref

from moonpool.cluster.both import BothWorker
from moonpool.core.placement import Placement
from moonpool.core.request import Request


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


@asynccontextmanager
async def colocating(folder: Path, model: Path) -> AsyncIterator[tuple[Split, Gateway]]:
    """The split path, and a gateway whose placements leave the prompt to the decode worker."""
    async with split_path(folder, model, decode_kind=BothWorker) as split:
        own = Gateway(split.decode, Placement(ref(split.decode_member), ref(split.decode_member)))
        try:
            yield split, own
        finally:
            await own.close()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 256])
async def test_ids_equal_those_of_the_cache_off_oracle_cold_and_cached(tmp_path: Path, tiny_model: Path, length: int) -> None:
    async with colocating(tmp_path, tiny_model) as (split, own):
        request = split.asker.request(ids(length), max_tokens=6)
        answer = await own.ask(request)
        assert answer.ids == split.oracle(request)
        assert answer.cached_tokens == 0
        again = split.asker.request(ids(length), max_tokens=6)
        cached = await own.ask(again)
        assert cached.ids == split.oracle(again)
        assert cached.cached_tokens == (length - 1 if length % 16 == 0 else length // 16 * 16)
        await split.idle()


async def test_a_prefix_that_was_handed_off_serves_a_prompt_that_is_computed_here(tmp_path: Path, tiny_model: Path) -> None:
    async with colocating(tmp_path, tiny_model) as (split, own):
        first = split.asker.request(ids(64), max_tokens=4)
        await split.gateway.ask(first)
        await split.idle()
        await split.clear_device_pages()
        longer = split.asker.request([*ids(64), *ids(20, seed=9)], max_tokens=6)
        answer = await own.ask(longer)
        assert answer.ids == split.oracle(longer)
        assert answer.cached_tokens == 64
        assert split.decode.report().prefills[0].loaded_tokens == 64
        await split.idle()


async def test_colocated_and_handed_off_prompts_share_batches_and_keep_their_ids(tmp_path: Path, tiny_model: Path) -> None:
    async with colocating(tmp_path, tiny_model) as (split, own):
        requests = [split.asker.request(ids(20 + 13 * n, n), max_tokens=8) for n in range(6)]

        async def ask(n: int, request: Request) -> list[int]:
            return (await (own if n % 2 else split.gateway).ask(request)).ids

        answers = await asyncio.gather(*(ask(n, request) for n, request in enumerate(requests)))
        for request, answer in zip(requests, answers, strict=True):
            assert answer == split.oracle(request)
        report = split.decode.report()
        assert sorted(timing.prompt_tokens for timing in report.prefills) == [33, 59, 85]
        await split.idle()
