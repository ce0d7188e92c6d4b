"""Prefill here, decode there: the hand-off with real store nodes, against bare engine calls."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.split import Split, split_path

from moonpool.core.errors import Reason
from moonpool.core.ids import NodeId
from moonpool.core.membership import Liveness, MemberChange
from moonpool.core.placement import Segment, Source
from moonpool.core.request import FinishReason, Request


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


async def check(split: Split, *requests: Request) -> None:
    """Asked all at once, each answer equals its bare generation, and everything is idle afterwards."""
    answers = await asyncio.gather(*(split.gateway.ask(r) for r in requests))
    await split.idle()
    for request, answer in zip(requests, answers, strict=True):
        assert answer.error is None
        assert answer.ids == split.oracle(request), request.id
        assert [e.position for e in answer.emissions] == list(range(len(answer.ids)))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 100])
async def test_greedy_answers_equal_bare_generation_cold_and_cached(tmp_path: Path, tiny_model: Path, length: int) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        prompt = ids(length)
        for cached in (0, (length - 1) if length % 16 == 0 else length // 16 * 16):
            request = split.asker.request(prompt, max_tokens=6)
            answer = await split.gateway.ask(request)
            await split.idle()
            assert answer.ids == split.oracle(request)
            assert answer.cached_tokens == cached
            assert answer.finish is FinishReason.LENGTH


@pytest.mark.parametrize(("carrier", "used"), [("auto", "tcp (tcp)"), ("ucx", "ucx (tcp)")])
async def test_between_node_ids_the_bytes_go_by_a_carrier_between_hosts(
    tmp_path: Path, tiny_model: Path, carrier: str, used: str
) -> None:
    async with split_path(tmp_path, tiny_model, nodes=("a", "b"), carrier=carrier) as split:
        await check(split, *(split.asker.request(ids(n, n), max_tokens=5) for n in (1, 33, 100)))
        assert split.prefills[0].words()["carriers"] == used


@pytest.mark.parametrize("length", [15, 16, 17, 48, 100])
async def test_a_prompt_comes_from_this_hosts_pool_after_the_device_pages_are_gone(
    tmp_path: Path, tiny_model: Path, length: int
) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        request = split.asker.request(ids(length), max_tokens=6)
        await check(split, request)
        await split.clear_device_pages()
        again = split.asker.request(ids(length), max_tokens=6)
        split.prefills[0].report()
        answer = await split.gateway.ask(again)
        await split.idle()
        assert answer.ids == split.oracle(again)
        assert answer.cached_tokens == ((length - 1) if length % 16 == 0 else length // 16 * 16)
        assert split.prefills[0].report().prefills[0].loaded_tokens == answer.cached_tokens


async def test_several_chunks_are_computed_after_a_prefix_from_the_pool(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        shared = ids(48)
        await check(split, split.asker.request(shared, max_tokens=2))
        await split.clear_device_pages()
        longer = split.asker.request([*shared, *ids(150, seed=1)], max_tokens=6)
        async with asyncio.timeout(20):
            answer = await split.gateway.ask(longer)
        await split.idle()
        assert answer.ids == split.oracle(longer)
        assert answer.cached_tokens == 48
        assert split.prefills[0].numbers().get("prefix_blocks_lost_count", 0) == 0


@pytest.mark.parametrize("length", [48, 100])
async def test_a_prompt_is_fetched_from_the_node_that_the_placement_names(
    tmp_path: Path, tiny_model: Path, length: int
) -> None:
    async with split_path(tmp_path, tiny_model, nodes=("a", "b")) as split:
        await check(split, split.asker.request(ids(length), max_tokens=6))
        await split.clear_device_pages()
        split.place(segments=[Segment(0, length // 16, Source.FETCH, NodeId("b"))])
        again = split.asker.request(ids(length), max_tokens=6)
        split.prefills[0].report()
        answer = await split.gateway.ask(again)
        await split.idle()
        assert answer.ids == split.oracle(again)
        assert answer.cached_tokens == ((length - 1) if length % 16 == 0 else length // 16 * 16)
        report = split.prefills[0].report()
        (link,), (timing,) = report.links, report.prefills
        assert (link.source, link.target) == ("b", "a")
        assert link.bytes == split.prefills[0].numbers()["fetched_bytes_count"] > 0
        assert 0 < link.seconds == timing.fetch_seconds <= timing.load_seconds < timing.seconds
        assert split.prefills[0].report().links == ()


async def test_a_fetch_from_a_node_that_is_not_there_is_computed_instead(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        split.place(segments=[Segment(0, 6, Source.FETCH, NodeId("nowhere"))])
        await check(split, split.asker.request(ids(100)))


async def test_a_batch_of_sixteen_in_mixed_lengths_with_seeds_and_penalties(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, pages=200, slots=200) as split:
        sampled = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5}
        await check(
            split,
            *(split.asker.request(ids(3 + 7 * i, i), max_tokens=5 + i) for i in range(8)),
            *(split.asker.request(ids(3 + 7 * i, i), max_tokens=5 + i, seed=i, **sampled) for i in range(8)),
        )


async def test_one_token_prompts_and_one_token_answers(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        await check(
            split,
            split.asker.request([5], max_tokens=1),
            split.asker.request([5], max_tokens=1, temperature=1.0, seed=3),
            split.asker.request([5], max_tokens=9, temperature=1.0, seed=3, repetition_penalty=1.3, presence_penalty=1.0),
            split.asker.request(ids(40), max_tokens=1),
        )


async def test_a_prompt_whose_answer_was_one_token_is_cache_for_the_next(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        await check(split, split.asker.request(ids(100), max_tokens=1))
        assert split.stores["a"].numbers()["blocks_findable"] == 6


async def test_a_prompt_in_chunks_is_answered_after_its_last_chunk(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, prefill_chunk=16) as split:
        await check(split, split.asker.request(ids(160), max_tokens=3))


async def test_preemption_at_the_decode_worker_changes_no_answer(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, decode_pages=12) as split:
        await check(split, *(split.asker.request(ids(20, i), max_tokens=60) for i in range(4)))
        assert split.decode.numbers()["preemptions_count"] > 0


async def test_the_reader_has_a_part_of_the_prefix_that_the_writer_lacks(tmp_path: Path, tiny_model: Path) -> None:
    """Each block lands at its own position: the decode worker's pages hold two blocks, the pool none, the writer none."""
    async with split_path(tmp_path, tiny_model, nodes=("a", "b")) as split:
        await check(split, split.asker.request(ids(40), max_tokens=4))
        await split.prefills[0].clear_device_pages()
        split.stores["b"].pool.clear(None)
        longer = split.asker.request([*ids(40), *ids(60, 1)], max_tokens=4)
        await check(split, longer)


async def test_the_writer_has_a_prefix_that_the_reader_lacks(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, nodes=("a", "b")) as split:
        await check(split, split.asker.request(ids(40), max_tokens=4))
        await split.decode.clear_device_pages()
        split.stores["b"].pool.clear(None)
        again = split.asker.request([*ids(40), *ids(60, 1)], max_tokens=4)
        answer = await split.gateway.ask(again)
        await split.idle()
        assert answer.ids == split.oracle(again)
        assert answer.cached_tokens == 32


async def test_without_reuse_nothing_counts_as_cached_and_every_byte_is_pushed_again(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, reuse=False) as split:
        landed = [0.0]
        for _ in range(2):
            answer = await split.gateway.ask(split.asker.request(ids(48)))
            assert answer.cached_tokens == 0
            await split.idle()
            landed.append(split.stores["a"].numbers()["bytes_landed"])
        assert landed[1] > 0
        assert landed[2] == 2 * landed[1]


@pytest.mark.parametrize(("total", "cached"), [(31, 16), (32, 16), (33, 32)])
async def test_blocks_completed_by_the_answer_serve_the_next_turn_from_the_pool(
    tmp_path: Path, tiny_model: Path, total: int, cached: int
) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        first = split.asker.request(ids(20), max_tokens=total - 20)
        answer = await split.gateway.ask(first)
        await split.idle()
        await split.clear_device_pages()
        follow_up = split.asker.request([*first.prompt, *answer.ids, *ids(10, 9)], max_tokens=4)
        second = await split.gateway.ask(follow_up)
        await split.idle()
        assert second.cached_tokens == cached
        assert second.ids == split.oracle(follow_up)


async def test_a_small_pool_makes_landings_wait_and_all_are_served(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, slots=8) as split:
        await check(split, *(split.asker.request(ids(100, i), max_tokens=4) for i in range(6)))


async def test_a_prompt_above_the_prefill_workers_pages_is_refused_once_and_takes_nothing(
    tmp_path: Path, tiny_model: Path
) -> None:
    async with split_path(tmp_path, tiny_model, prefill_pages=4) as split:
        answer = await split.gateway.ask(split.asker.request(ids(74)))
        assert answer.error is not None and answer.error.reason is Reason.PROMPT_TOO_LARGE
        assert "74 tokens" in answer.error.message and "64" in answer.error.message
        assert len(answer.emissions) == 1
        await split.idle()
        assert split.prefills[0].numbers()["refused_count"] == 1


async def test_layers_land_while_later_ones_are_computed(tmp_path: Path, tiny_model: Path) -> None:
    """The last layer is not computed before the first one has landed: a push after prefill would wait for ever."""
    async with split_path(tmp_path, tiny_model, nodes=("a", "b")) as split:
        engine = split.prefill_engines[0]
        forward = engine.forward
        landed = threading.Event()
        order: list[str] = []

        def slow_forward(rows: Any, *, before_layer: Callable[[int], None], on_layer: Callable[[int], None]) -> Any:
            def before(layer: int) -> None:
                before_layer(layer)
                if layer == engine.layout.layers - 1:
                    assert landed.wait(5.0), "layer 0 did not land while the last one was held back"
                    order.append("last layer begins")

            return forward(rows, before_layer=before, on_layer=on_layer)

        engine.forward = slow_forward  # type: ignore[method-assign, assignment]
        told = split.stores["b"]._tell_landed

        def tell_landed(reader: Any, notice: Any) -> None:
            order.append(f"layer {notice.layer} landed")
            landed.set()
            told(reader, notice)

        split.stores["b"].verifier._on_landed = tell_landed
        await check(split, split.asker.request(ids(100), max_tokens=3))
        assert order[:2] == ["layer 0 landed", "last layer begins"]


async def test_a_flipped_bit_in_the_pool_is_found_and_the_prefix_computed_anew(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        first = split.asker.request(ids(100), max_tokens=6)
        await check(split, first)
        await split.clear_device_pages()
        store = split.stores["a"]
        entry = store.pool.held.index.get(first.keys[3])
        assert entry is not None
        ref = store.pool.held.ref(entry)
        store.regions.views[ref.region][ref.offset + store.layout.slice_bytes + 7] ^= 4  # layer 1
        again = split.asker.request(ids(100), max_tokens=6)
        answer = await split.gateway.ask_until_answered(again)
        await split.idle()
        assert answer.ids == split.oracle(again)
        assert store.numbers()["digest_mismatches"] >= 1


async def test_a_silent_prefill_worker_fails_its_attempts_at_once_by_name(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, prefills=2) as split:
        hold = threading.Event()
        forward = split.prefill_engines[0].forward

        def held(*args: Any, **hooks: Any) -> Any:
            hold.wait(10.0)
            return forward(*args, **hooks)

        split.prefill_engines[0].forward = held  # type: ignore[method-assign]
        request = split.asker.request(ids(50), max_tokens=6)
        lost = split.gateway.begin(request)
        await asyncio.sleep(0.1)
        split.crowd.tell(MemberChange(split.prefill_members[0], Liveness.SILENT, "no heartbeat for 1000 ms"))
        async with asyncio.timeout(1.0):
            await lost.over.wait()
        assert lost.error is not None
        assert (lost.error.reason, lost.error.peer) == (Reason.PEER_SILENT, "prefill-0")
        split.place(prefill=1)
        again = split.gateway.begin(request, number=2)
        await again.over.wait()
        assert again.ids == split.oracle(request)
        hold.set()
        await split.idle()


@pytest.mark.parametrize("seed", range(4))
async def test_cancels_at_random_moments_leave_nothing_behind(tmp_path: Path, tiny_model: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with split_path(tmp_path, tiny_model, nodes=("a", "b") if seed % 2 else ("a", "a"), prefill_chunk=32) as split:
        for _ in range(12):
            requests = [split.asker.request(ids(rng.randint(1, 150), rng.randint(0, 5)), max_tokens=40) for _ in range(3)]
            answers = [split.gateway.begin(r) for r in requests]
            await asyncio.sleep(rng.random() * 0.06)
            for request in requests[:2]:
                split.decode.cancel(split.gateway.stream, request.id, 1)
            await answers[2].over.wait()
            assert answers[2].ids == split.oracle(requests[2])
        await split.idle()


async def test_a_gateway_that_leaves_ends_its_hand_offs(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, prefill_chunk=16) as split:
        for i in range(4):
            split.gateway.begin(split.asker.request(ids(150, i), max_tokens=100))
        await asyncio.sleep(0.05)
        split.decode.close_stream(split.gateway.stream)
        await split.idle()


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
async def test_ids_and_logprobs_are_the_same_cold_from_device_pages_from_the_pool_and_from_another_node(
    tmp_path: Path, tiny_model: Path, length: int
) -> None:
    async with split_path(tmp_path, tiny_model, nodes=("a", "b")) as split:
        runs = []
        for way in ("cold", "device", "remote", "pool"):
            if way in ("remote", "pool"):
                await split.clear_device_pages()
                split.place(segments=[Segment(0, length // 16, Source.FETCH, NodeId("b"))] if way == "remote" else [])
            answer = await split.gateway.ask(split.asker.request(ids(length), max_tokens=5, logprobs=2))
            await split.idle()
            assert answer.cached_tokens < length
            assert (answer.cached_tokens > 0) == (way != "cold" and length >= 16)
            runs.append([e.sampled for e in answer.emissions if e.sampled])
        for run in runs[1:]:
            assert [s.token for s in run] == [s.token for s in runs[0]]
            for mine, cold in zip(run, runs[0], strict=True):
                assert mine.logprob == pytest.approx(cold.logprob, abs=1e-4)
                assert [t.logprob for t in mine.top] == pytest.approx([t.logprob for t in cold.top], abs=1e-4)


async def test_a_resumed_attempt_goes_on_where_the_first_one_stopped(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        sampling = {"max_tokens": 40, "temperature": 1.0, "seed": 11, "presence_penalty": 1.0}
        whole = await split.gateway.ask(split.asker.request(ids(30), **sampling))
        for cut in (1, 2, 3, 20, 39):
            request = split.asker.request(ids(30), **sampling)
            resumed = split.gateway.begin(request, number=2, emitted=whole.ids[:cut])
            await resumed.over.wait()
            assert whole.ids[:cut] + resumed.ids == whole.ids
            assert resumed.emissions[0].position == cut
        await split.idle()
