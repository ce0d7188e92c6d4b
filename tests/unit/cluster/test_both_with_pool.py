"""Role both beside a store node: prefixes come from the pool, completed blocks go there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.split import Split, split_path

from moonpool.cluster.both import BothWorker
from moonpool.core.ids import NodeId
from moonpool.core.placement import Placement, Segment, Source
from moonpool.kvstore.client import WorkerStore


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


@asynccontextmanager
async def both(folder: Path, model: Path, **options: Any) -> AsyncIterator[Split]:
    async with split_path(folder, model, prefills=0, decode_kind=BothWorker, **options) as split:
        yield split


@pytest.mark.parametrize("length", [15, 16, 17, 48, 100])
async def test_a_prompt_comes_from_the_pool_after_the_device_pages_are_gone(
    tmp_path: Path, tiny_model: Path, length: int
) -> None:
    """The same numbers of cached tokens as on the split path."""
    async with both(tmp_path, tiny_model) as split:
        cached = (length - 1) if length % 16 == 0 else length // 16 * 16
        for cold in (True, False):
            request = split.asker.request(ids(length), max_tokens=6)
            answer = await split.gateway.ask(request)
            await split.idle()
            assert answer.ids == split.oracle(request)
            assert answer.cached_tokens == (0 if cold else cached)
            assert split.decode.report().prefills[0].loaded_tokens // 16 * 16 == (0 if cold else length // 16 * 16)
            await split.clear_device_pages()


async def test_an_answers_blocks_serve_the_next_turn_from_the_pool(tmp_path: Path, tiny_model: Path) -> None:
    async with both(tmp_path, tiny_model) as split:
        first = split.asker.request(ids(20), max_tokens=29)
        answer = await split.gateway.ask(first)
        await split.idle()
        await split.clear_device_pages()
        follow_up = split.asker.request([*first.prompt, *answer.ids, *ids(10, 9)], max_tokens=4)
        second = await split.gateway.ask(follow_up)
        await split.idle()
        assert second.cached_tokens == 48
        assert second.ids == split.oracle(follow_up)


@pytest.mark.parametrize("context", [31, 32, 33, 63, 64, 65])
async def test_an_answer_goes_on_from_the_pool_after_its_attempt_and_the_device_pages_were_lost(
    tmp_path: Path, tiny_model: Path, context: int
) -> None:
    async with both(tmp_path, tiny_model) as split:
        request = split.asker.request(ids(17), max_tokens=60, temperature=1.0, seed=3, presence_penalty=0.5)
        whole, cut = split.oracle(request), context - 17
        first = split.gateway.begin(request)
        await first.count(cut)
        split.decode.cancel(split.gateway.stream, request.id, 1)
        async with asyncio.timeout(10):
            while split.decode.numbers()["pages_publishing"]:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        await split.idle()
        await split.clear_device_pages()
        split.decode.report()
        rest = split.gateway.begin(request, number=2, emitted=whole[:cut])
        await rest.over.wait()
        await split.idle()
        assert whole[:cut] + rest.ids == whole
        (timing,) = split.decode.report().prefills
        assert timing.prompt_tokens == context
        assert timing.loaded_tokens >= (context - 1) // 16 * 16


async def test_a_prompt_is_fetched_from_the_node_that_the_placement_names(tmp_path: Path, tiny_model: Path) -> None:
    async with both(tmp_path, tiny_model, nodes=("a", "b")) as split:
        request = split.asker.request(ids(100), max_tokens=1)
        await split.gateway.ask(request)
        await split.idle()
        await split.clear_device_pages()
        there, here = split.stores["a"], split.stores["b"]
        client = await WorkerStore.connect(
            there.member.address,
            there.member,
            there.layout,
            on_landed=lambda landed: None,
            on_failed=lambda failed: None,
            on_lost=lambda: None,
        )
        fetched = await client.fetch(request.keys, NodeId("b"), here.member.address, 5_000)
        await client.unpin(fetched.ticket)
        await client.close()
        here.pool.clear(None)
        me = split.gateway.placement.decode
        split.gateway.placement = Placement(me, me, (Segment(0, 6, Source.FETCH, NodeId("a")),))
        again = split.asker.request(ids(100), max_tokens=4)
        split.decode.report()
        answer = await split.gateway.ask(again)
        await split.idle()
        assert answer.ids == split.oracle(again)
        assert answer.cached_tokens == 96
        report = split.decode.report()
        (link,), (timing,) = report.links, report.prefills
        assert (link.source, link.target, link.seconds) == ("a", "b", timing.fetch_seconds)
        assert link.bytes > 0


async def test_a_flipped_bit_in_the_pool_is_found_and_computed_anew(tmp_path: Path, tiny_model: Path) -> None:
    async with both(tmp_path, tiny_model) as split:
        first = split.asker.request(ids(100), max_tokens=6)
        await split.gateway.ask(first)
        await split.idle()
        await split.clear_device_pages()
        store = split.stores["a"]
        entry = store.pool.held.index.get(first.keys[3])
        assert entry is not None
        ref = store.pool.held.ref(entry)
        store.regions.views[ref.region][ref.offset + store.layout.slice_bytes + 7] ^= 4
        again = split.asker.request(ids(100), max_tokens=6)
        answer = await split.gateway.ask(again)
        await split.idle()
        assert answer.ids == split.oracle(again)
        assert answer.cached_tokens == 48
        assert store.numbers()["digest_mismatches_prefix_load"] == 1


async def test_cancels_while_a_prefix_loads_leave_nothing_behind(tmp_path: Path, tiny_model: Path) -> None:
    async with both(tmp_path, tiny_model) as split:
        await split.gateway.ask(split.asker.request(ids(150), max_tokens=1))
        await split.idle()
        rng = random.Random(1)
        for _ in range(15):
            await split.clear_device_pages()
            request = split.asker.request(ids(150), max_tokens=40)
            split.gateway.begin(request)
            await asyncio.sleep(rng.random() * 0.02)
            split.decode.cancel(split.gateway.stream, request.id, 1)
        await split.idle()


async def test_a_lost_store_session_costs_cache_and_no_answer(tmp_path: Path, tiny_model: Path) -> None:
    async with both(tmp_path, tiny_model) as split:
        requests = [split.asker.request(ids(60, i), max_tokens=30) for i in range(3)]
        answers = [split.gateway.begin(r) for r in requests]
        await answers[0].count(5)
        store = split.stores["a"]
        for session in list(store.sessions):
            store.sessions.end(session, "the test cuts it")
        for request, answer in zip(requests, answers, strict=True):
            await answer.over.wait()
            assert answer.ids == split.oracle(request)
