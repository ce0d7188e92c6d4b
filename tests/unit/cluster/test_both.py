"""Role both against bare engine calls on a tiny random model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.workers import Asker, Crowd, Gateway, config_for, generate, idle, member, ref

from moonpool.cluster.both import BothWorker
from moonpool.core.errors import Reason
from moonpool.core.ids import Role
from moonpool.core.placement import Placement
from moonpool.core.request import FinishReason, Request
from moonpool.engine.engine import Engine, load_engine


@dataclass
class Bench:
    engine: Engine
    worker: BothWorker
    gateway: Gateway
    asker: Asker

    async def both_ways(self, *requests: Request) -> None:
        """Asked all at once, each answer equals its bare generation."""
        answers = await asyncio.gather(*(self.gateway.ask(r) for r in requests))
        await idle(self.worker)
        for request, answer in zip(requests, answers, strict=True):
            assert answer.error is None
            assert answer.ids == generate(self.engine, request), request.id
            assert [e.position for e in answer.emissions] == list(range(len(answer.ids)))


Start = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def start(tiny_model: Path) -> AsyncIterator[Start]:
    made: list[Bench] = []

    async def make(**engine_options: object) -> Bench:
        config = config_for(tiny_model, **engine_options)  # type: ignore[arg-type]
        engine = load_engine(config, tiny_model, threads=1, cache=tiny_model)
        me = member("both-0", Role.BOTH, engine.layout)
        worker = await BothWorker.start(config, engine, me, Crowd())
        gateway = Gateway(worker, Placement(ref(me), ref(me)))
        made.append(Bench(engine, worker, gateway, Asker(config, engine.layout)))
        return made[-1]

    yield make
    for bench in made:
        await bench.gateway.close()
        await bench.worker.close()
        assert bench.engine.pages.used == 0
        bench.engine.close()


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 100])
async def test_greedy_answers_equal_bare_generation_cold_and_cached(start: Start, length: int) -> None:
    bench = await start()
    prompt = ids(length)
    for cached in (0, (length - 1) if length % 16 == 0 else length // 16 * 16, None):
        request = bench.asker.request(prompt, max_tokens=6)
        answer = await bench.gateway.ask(request)
        await idle(bench.worker)
        assert answer.ids == generate(bench.engine, request)
        assert answer.finish is FinishReason.LENGTH
        if cached is not None:
            assert answer.cached_tokens == cached


async def test_sampled_answers_with_penalties_and_seeds_equal_bare_generation(start: Start) -> None:
    bench = await start()
    await bench.both_ways(
        *(
            bench.asker.request(
                ids(20, seed),
                max_tokens=12,
                temperature=1.0,
                top_p=0.9,
                seed=seed,
                repetition_penalty=1.2,
                presence_penalty=0.5,
                frequency_penalty=0.3,
            )
            for seed in range(4)
        )
    )


async def test_one_token_prompts_and_one_token_answers(start: Start) -> None:
    bench = await start()
    await bench.both_ways(
        bench.asker.request([5], max_tokens=1),
        bench.asker.request([5], max_tokens=1, temperature=1.0, seed=3),
        bench.asker.request([5], max_tokens=9, temperature=1.0, seed=3, repetition_penalty=1.3),
        bench.asker.request(ids(40), max_tokens=1),
    )


async def test_a_batch_of_sixteen_in_mixed_lengths(start: Start) -> None:
    bench = await start(pages=200)
    await bench.both_ways(*(bench.asker.request(ids(3 + 7 * i, i), max_tokens=5 + i) for i in range(16)))


async def test_nothing_is_emitted_before_the_last_chunk_of_a_prompt(start: Start) -> None:
    bench = await start(prefill_chunk=16)
    request = bench.asker.request(ids(160), max_tokens=3)
    answer = await bench.gateway.ask(request)
    assert bench.worker.numbers()["steps_count"] == 10 + 2
    assert len(answer.emissions) == 3
    assert answer.ids == generate(bench.engine, request)


async def test_preemption_with_few_pages_changes_no_answer(start: Start) -> None:
    bench = await start(pages=12)
    await bench.both_ways(*(bench.asker.request(ids(20, i), max_tokens=60) for i in range(4)))
    assert bench.worker.numbers()["preemptions_count"] > 0


async def test_preemption_without_reuse_changes_no_answer(start: Start) -> None:
    bench = await start(pages=12, reuse=False)
    await bench.both_ways(*(bench.asker.request(ids(20, i), max_tokens=60) for i in range(4)))
    assert bench.worker.numbers()["preemptions_count"] > 0
    assert bench.worker.numbers()["pages_cached"] == 0


@pytest.mark.parametrize(("total", "cached"), [(31, 16), (32, 16), (33, 32)])
async def test_blocks_completed_by_the_answer_serve_the_next_turn(start: Start, total: int, cached: int) -> None:
    """The last sampled id has no KV: with exactly 32 tokens in all, the second block is one token short of whole."""
    bench = await start()
    first = bench.asker.request(ids(20), max_tokens=total - 20)
    answer = await bench.gateway.ask(first)
    follow_up = bench.asker.request([*first.prompt, *answer.ids, *ids(10, 9)], max_tokens=4)
    second = await bench.gateway.ask(follow_up)
    await idle(bench.worker)
    assert second.cached_tokens == cached
    assert second.ids == generate(bench.engine, follow_up)


async def test_without_reuse_nothing_counts_as_cached(start: Start) -> None:
    bench = await start(reuse=False)
    prompt = ids(48)
    for _ in range(2):
        answer = await bench.gateway.ask(bench.asker.request(prompt))
        assert answer.cached_tokens == 0


async def test_a_resumed_attempt_goes_on_where_the_first_one_stopped(start: Start) -> None:
    bench = await start()
    request = bench.asker.request(ids(30), max_tokens=20, temperature=1.0, seed=11, presence_penalty=1.0)
    whole = await bench.gateway.ask(request)
    again = bench.asker.request(ids(30), name="again", max_tokens=20, temperature=1.0, seed=11, presence_penalty=1.0)
    resumed = bench.gateway.begin(again, number=2, emitted=whole.ids[:7])
    await resumed.over.wait()
    assert whole.ids[:7] + resumed.ids == whole.ids
    assert resumed.emissions[0].position == 7


async def test_a_cancelled_request_leaves_and_says_so_while_others_go_on(start: Start) -> None:
    bench = await start()
    doomed = bench.asker.request(ids(40, 1), max_tokens=500, ignore_eos=True)
    other = bench.asker.request(ids(40, 2), max_tokens=30)
    first, second = bench.gateway.begin(doomed), bench.gateway.begin(other)
    await first.count(5)
    bench.worker.cancel(bench.gateway.stream, doomed.id, 1)
    await second.over.wait()
    await idle(bench.worker)
    assert first.finish is FinishReason.CANCELLED
    assert second.ids == generate(bench.engine, other)


async def test_a_newer_attempt_silences_the_older_one(start: Start) -> None:
    bench = await start()
    request = bench.asker.request(ids(40, 1), max_tokens=100)
    old = bench.gateway.begin(request, number=1)
    await old.count(3)
    seen = len(old.emissions)
    new = bench.gateway.begin(request, number=2, emitted=old.ids)
    late = bench.gateway.begin(request, number=1)
    await new.over.wait()
    assert old.ids[:seen] + new.ids == generate(bench.engine, request)
    assert late.error is not None and late.error.reason is Reason.CANCELLED
    await idle(bench.worker)


async def test_a_stream_that_breaks_ends_its_attempts(start: Start) -> None:
    bench = await start()
    for i in range(3):
        bench.gateway.begin(bench.asker.request(ids(30, i), max_tokens=900))
    await asyncio.sleep(0)
    bench.worker.close_stream(bench.gateway.stream)
    await idle(bench.worker)
    assert bench.worker.numbers()["requests_waiting"] == 0


async def test_a_passed_deadline_ends_the_attempt_with_its_reason(start: Start) -> None:
    bench = await start()
    answer = bench.gateway.begin(bench.asker.request(ids(30), max_tokens=900), deadline_ms=150)
    await answer.over.wait()
    assert answer.error is not None and answer.error.reason is Reason.DEADLINE
    await idle(bench.worker)


async def test_bad_attempts_are_refused_before_any_page_is_taken(start: Start) -> None:
    bench = await start(pages=8)
    for prompt, reason in (
        ([], Reason.INVALID_REQUEST),
        ([500], Reason.INVALID_REQUEST),
        (ids(128), Reason.CONTEXT_LENGTH),
        (ids(129), Reason.CONTEXT_LENGTH),
    ):
        answer = await bench.gateway.ask(bench.asker.request(prompt))
        assert answer.error is not None and answer.error.reason is reason
    assert bench.worker.numbers()["pages_used"] == 0
    assert bench.worker.numbers()["refused_count"] == 4


async def test_a_full_queue_answers_busy(tiny_model: Path, start: Start) -> None:
    from moonpool.core.config import TimingConfig

    bench = await start(timing=TimingConfig(queue_limit=2))
    answers = [bench.gateway.begin(bench.asker.request(ids(20, i))) for i in range(3)]
    await answers[2].over.wait()
    assert answers[2].error is not None and answers[2].error.reason is Reason.BUSY
    await asyncio.gather(*(a.over.wait() for a in answers))


async def test_an_answer_ends_where_the_pages_end(start: Start) -> None:
    bench = await start(pages=3)
    answer = await bench.gateway.ask(bench.asker.request(ids(20), max_tokens=500))
    assert answer.finish is FinishReason.LENGTH
    assert len(answer.ids) == 3 * 16 - 20


async def test_reports_carry_live_attempts_timings_and_page_events(start: Start) -> None:
    bench = await start()
    answer = bench.gateway.begin(bench.asker.request(ids(40), max_tokens=50))
    await answer.count(3)
    report = bench.worker.report()
    assert [(a.prompt_tokens, a.prompt_left) for a in report.attempts] == [(40, 0)]
    assert 0 < report.attempts[0].remaining_tokens <= 47
    assert report.attempts[0].output_tokens >= 3
    assert report.attempts[0].output_tokens + report.attempts[0].remaining_tokens == 50
    assert [(p.prompt_tokens, p.cached_tokens) for p in report.prefills] == [(40, 0)]
    assert report.steps and report.steps[0].batch == 1
    assert report.g1_frames
    await answer.over.wait()
    assert bench.worker.report().prefills == ()


async def test_a_worker_that_closes_while_it_computes_gives_all_its_pages_back(start: Start) -> None:
    """The fixture closes it, and looks at its pages."""
    bench = await start()
    answers = [bench.gateway.begin(bench.asker.request(list(range(40 + n)), max_tokens=200)) for n in range(3)]
    for answer in answers:
        await answer.count(2)
