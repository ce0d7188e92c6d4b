"""The pool under the split path when it is full, slow, poisoned, or has less than it was asked for."""

from __future__ import annotations

import asyncio
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.split import Split, split_path

from moonpool.cluster.both import BothWorker
from moonpool.core.errors import DigestMismatch, Reason
from moonpool.core.landing import SlotRef, Ticket
from moonpool.core.request import Request
from moonpool.core.use import Use
from moonpool.kvstore.client import WorkerStore

BOTH: dict[str, Any] = {"prefills": 0, "decode_kind": BothWorker}


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


async def all_right(split: Split, *requests: Request) -> list[int]:
    """Asked all at once and, when all is idle again, equal to their bare generations: the cached tokens of each."""
    answers = await asyncio.gather(*(split.gateway.ask_until_answered(request) for request in requests))
    await split.idle()
    for request, answer in zip(requests, answers, strict=True):
        assert answer.error is None
        assert answer.ids == split.oracle(request), request.id
    return [answer.cached_tokens for answer in answers]


async def right(split: Split, request: Request) -> int:
    return (await all_right(split, request))[0]


async def test_thirty_refusals_after_the_prefill_is_done_leave_no_page_at_the_prefill_worker(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with split_path(tmp_path, tiny_model, nodes=("a", "b")) as split:
        read, last = WorkerStore.read_slice, split.decode_engine.layout.layers - 1

        def refusing(self: WorkerStore, slot: SlotRef, layer: int, into: Any, valid: int) -> None:
            if layer == last:
                raise DigestMismatch(f"layer {layer}")
            read(self, slot, layer, into, valid)

        with monkeypatch.context() as patched:
            patched.setattr(WorkerStore, "read_slice", refusing)
            for i in range(30):
                answer = await split.gateway.ask(split.asker.request(ids(70, i), max_tokens=4))
                assert answer.error is not None and answer.error.reason is Reason.DIGEST_MISMATCH
                await split.idle()
        await right(split, split.asker.request(ids(70, 99), max_tokens=4))


@pytest.mark.parametrize("role", ["split", "both"])
async def test_a_hundred_clients_that_leave_while_their_prefix_loads_slowly_leave_nothing_behind(
    tmp_path: Path, tiny_model: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with split_path(tmp_path, tiny_model, **(BOTH if role == "both" else {})) as split:
        await right(split, split.asker.request(ids(500), max_tokens=1))
        await split.clear_device_pages()
        read = WorkerStore.read_slice

        def slow(self: WorkerStore, *given: Any) -> None:
            time.sleep(0.015)  # about a second for the prefix
            read(self, *given)

        with monkeypatch.context() as patched:
            patched.setattr(WorkerStore, "read_slice", slow)
            requests = [split.asker.request(ids(500), max_tokens=30) for _ in range(100)]
            answers = [split.gateway.begin(request) for request in requests]
            await asyncio.sleep(0.3)
            assert split.stores["a"].numbers()["pins"] > 0, "one of them loads"
            assert not any(answer.ids for answer in answers)
            for request in requests:
                split.decode.cancel(split.gateway.stream, request.id, 1)
            await split.idle()
        assert await right(split, split.asker.request(ids(500), max_tokens=4)) > 0


async def test_a_prefix_that_is_evicted_between_lookup_and_load_is_computed_and_others_go_on(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with split_path(tmp_path, tiny_model, slots=24, **BOTH) as split:
        await right(split, split.asker.request(ids(200), max_tokens=1))
        await split.clear_device_pages()
        pin, evicted = WorkerStore.pin, []

        async def too_late(self: WorkerStore, *given: Any, **more: Any) -> Ticket:
            evicted.append(split.stores["a"].pool.clear(None).cleared)
            return await pin(self, *given, **more)

        monkeypatch.setattr(WorkerStore, "pin", too_late)
        hit, other = split.asker.request(ids(200), max_tokens=4), split.asker.request(ids(150, 5), max_tokens=4)
        assert await all_right(split, hit, other) == [0, 0]
        assert sum(evicted) >= 12, "the hit was there when it was asked for"


async def test_a_load_into_full_pages_from_a_full_pool_works_and_the_counters_agree(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, decode_pages=12, slots=20, **BOTH) as split:
        store = split.stores["a"]
        for _ in range(3):
            for seed in (1, 2, 3):
                await right(split, split.asker.request(ids(130, seed), max_tokens=20))
            assert split.decode.numbers()["pages_cached"] + split.decode.numbers()["pages_free"] == 12
            numbers = store.numbers()
            assert numbers["slots_free"] + numbers["slots_sealed"] == 20
            assert numbers["slots_sealed"] == numbers["blocks_findable"] == numbers["blocks_evictable"]
        assert numbers["evicted"] > 20
        only_in_pool = split.asker.request(ids(130, 3), max_tokens=4)
        await split.clear_device_pages()
        await right(split, split.asker.request(ids(150, 9), max_tokens=4))  # the pages are full again
        assert await right(split, only_in_pool) > 0


@pytest.mark.parametrize(("block", "blocks"), [(16, 32), (64, 8)])
async def test_every_missing_block_lands_in_its_own_place_when_the_reader_has_all_but_the_last(
    tmp_path: Path, tiny_model: Path, block: int, blocks: int
) -> None:
    prompt = ids(block * blocks + 1)
    async with split_path(
        tmp_path, tiny_model, nodes=("a", "b"), block_tokens=block, pages=2 * blocks + 8, slots=3 * blocks
    ) as split:
        await right(split, split.asker.request(prompt[: block * (blocks - 1)], max_tokens=1))
        await split.prefills[0].clear_device_pages()
        split.stores["b"].pool.clear(None)
        await right(split, split.asker.request(prompt[:-1], max_tokens=4))
        await right(split, split.asker.request(prompt, max_tokens=4))
        await split.prefills[0].clear_device_pages()
        pusher = split.prefills[0]._pusher
        grant = pusher.grant

        async def after_eviction(*given: Any, **more: Any) -> Any:
            await split.decode.clear_device_pages()
            split.stores["b"].pool.clear(None)
            return await grant(*given, **more)

        pusher.grant = after_eviction  # type: ignore[method-assign]
        await right(split, split.asker.request(prompt, max_tokens=4))


async def test_transfers_start_whatever_the_requests_are_called(tmp_path: Path, tiny_model: Path) -> None:
    names = ["a_b-c", "a-b_c", "a-b", "a_b", "r.1", "r:1/2 ?#", "üñï-🍋", "x" * 200, "0", "fetch.store-b.1.1"]
    async with split_path(tmp_path, tiny_model, nodes=("a", "b"), pages=128) as split:
        pusher = split.prefills[0]._pusher
        grant = pusher.grant

        async def late(*given: Any, **more: Any) -> Any:
            await asyncio.sleep(0.02)
            return await grant(*given, **more)

        pusher.grant = late  # type: ignore[method-assign]
        requests = [split.asker.request(ids(40, i), name, max_tokens=3) for i, name in enumerate(names)]
        async with asyncio.timeout(20):
            await all_right(split, *requests)


@pytest.mark.parametrize(("block", "cached"), [(16, 48), (64, 0)])
async def test_only_whole_shared_blocks_are_predicted_and_those_are_loaded(
    tmp_path: Path, tiny_model: Path, block: int, cached: int
) -> None:
    async with split_path(tmp_path, tiny_model, block_tokens=block) as split:
        first = split.asker.request(ids(150), max_tokens=2)
        second = split.asker.request([*ids(48), *ids(100, 1)], max_tokens=2)
        await right(split, first)
        await split.clear_device_pages()
        predicted = split.stores["a"].pool.lookup(second.keys) * block
        assert predicted == cached
        assert await right(split, second) == cached


async def test_freed_pages_and_slots_full_of_nan_change_no_answer_of_any_length(tmp_path: Path, tiny_model: Path) -> None:
    """The node and the engines of these tests poison what they free; more is freed than there is."""
    async with split_path(tmp_path, tiny_model, nodes=("a", "b"), pages=24, slots=24) as split:
        assert split.config.engine.poison
        for cold in (True, False):
            for first in range(1, 51, 10):
                requests = [split.asker.request(ids(n, n), max_tokens=3, logprobs=1) for n in range(first, first + 10)]
                answers = await asyncio.gather(*(split.gateway.ask_until_answered(request) for request in requests))
                for request, answer in zip(requests, answers, strict=True):
                    assert answer.ids == split.oracle(request), (len(request.prompt), cold)
                    assert all(math.isfinite(e.sampled.logprob) for e in answer.emissions if e.sampled)
            await split.idle()
            await split.clear_device_pages()
        assert split.stores["b"].numbers()["evicted"] > 24


@pytest.mark.parametrize("eviction", ["hazard", "lru"])
async def test_only_a_policy_that_learns_from_answers_is_told_of_them(tmp_path: Path, tiny_model: Path, eviction: str) -> None:
    async with split_path(tmp_path, tiny_model, store={"eviction": eviction}) as split:
        ended: list[tuple[Use, int]] = []
        policy = split.stores["a"].pool.held.index.policy
        policy.ended = lambda use, tokens, now: ended.append((use, tokens))  # type: ignore[method-assign]
        request = split.asker.request(ids(40), max_tokens=5)
        await right(split, request)
        for _ in range(200):
            if ended or eviction == "lru":
                break
            await asyncio.sleep(0.01)
        assert ended == ([(request.use, 5)] if eviction == "hazard" else [])
