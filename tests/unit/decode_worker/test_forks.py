"""Several choices of one prompt, which is computed once: handed off, or computed where they are drawn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.split import Split, split_path
from support.workers import Answer, Gateway, generate, ref

from moonpool.cluster.both import BothWorker
from moonpool.core.errors import Reason
from moonpool.core.ids import MemberId
from moonpool.core.membership import Liveness, MemberChange
from moonpool.core.placement import Placement
from moonpool.core.request import Attempt, Request, Sibling

N = 4


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


def choices(split: Split, prompt: Sequence[int], n: int = N, **sampling: object) -> list[Request]:
    """Requests that differ in name and seed."""
    return [split.asker.request(prompt, **{"temperature": 1.0, "seed": 40 + i, **sampling}) for i in range(n)]


def begin(gateway: Gateway, requests: Sequence[Request], number: int = 1) -> list[Answer]:
    answers = [gateway.expect(request, number) for request in requests]
    siblings = tuple(Sibling(request.id, number, request.sampling.seed) for request in requests[1:])
    gateway.worker.begin(gateway.stream, Attempt(requests[0], number, siblings=siblings), gateway.placement)
    return answers


async def over(answers: Sequence[Answer]) -> None:
    async with asyncio.timeout(20):
        await asyncio.gather(*(answer.over.wait() for answer in answers))


def check(split: Split, requests: Sequence[Request], answers: Sequence[Answer]) -> None:
    for request, answer in zip(requests, answers, strict=True):
        assert answer.error is None
        assert answer.ids == generate(split.decode_engine, request), request.id
        assert [e.position for e in answer.emissions] == list(range(len(answer.ids)))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("local", [False, True])
async def test_each_choice_draws_what_it_would_alone_and_the_prompt_is_computed_once(
    tmp_path: Path, tiny_model: Path, length: int, local: bool
) -> None:
    async with split_path(tmp_path, tiny_model, decode_kind=BothWorker) as split:
        own = Gateway(split.decode, Placement(ref(split.decode_member), ref(split.decode_member)))
        requests = choices(split, ids(length), max_tokens=12)
        answers = begin(own if local else split.gateway, requests)
        await over(answers)
        await split.idle()
        jobs, computed = split.prefills[0].numbers().get("jobs_count", 0), len(split.decode.report().prefills)
        assert (jobs, computed) == ((0, 1) if local else (1, 0))
        check(split, requests, answers)
        await own.close()


async def test_greedy_choices_are_alike_and_choices_may_end_at_any_length(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        alike = choices(split, ids(40), temperature=0.0, max_tokens=6)
        ended = choices(split, ids(40, 1), max_tokens=30, stop_token_ids=tuple(range(0, 128, 3)))
        short = choices(split, ids(40, 2), max_tokens=1)
        answers = [begin(split.gateway, requests) for requests in (alike, ended, short)]
        await over([one for group in answers for one in group])
        await split.idle()
        for requests, group in zip((alike, ended, short), answers, strict=True):
            check(split, requests, group)
        assert len({tuple(answer.ids) for answer in answers[0]}) == 1
        assert len({len(answer.ids) for answer in answers[1]}) > 1
        assert split.prefills[0].numbers()["jobs_count"] == 3


@pytest.mark.parametrize("reuse", [True, False])
async def test_choices_that_find_no_room_wait_and_lose_nothing(tmp_path: Path, tiny_model: Path, reuse: bool) -> None:
    async with split_path(tmp_path, tiny_model, decode_pages=12, max_batch=4, reuse=reuse) as split:
        requests = choices(split, ids(40), n=8, max_tokens=50)
        answers = begin(split.gateway, requests)
        await over(answers)
        await split.idle()
        check(split, requests, answers)
        assert split.prefills[0].numbers()["jobs_count"] == 1


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("left", [0, 2])
async def test_a_choice_that_is_given_up_while_the_prompt_is_computed_leaves_the_others(
    tmp_path: Path, tiny_model: Path, local: bool, left: int
) -> None:
    async with split_path(tmp_path, tiny_model, prefill_chunk=16, decode_kind=BothWorker) as split:
        own = Gateway(split.decode, Placement(ref(split.decode_member), ref(split.decode_member)))
        gateway = own if local else split.gateway
        requests = choices(split, ids(150), max_tokens=9)
        answers = begin(gateway, requests)
        await asyncio.sleep(0.01)
        split.decode.cancel(gateway.stream, requests[left].id, 1)
        await over(answers)
        await split.idle()
        kept = [i for i in range(N) if i != left]
        check(split, [requests[i] for i in kept], [answers[i] for i in kept])
        await own.close()


@pytest.mark.parametrize("seed", range(3))
async def test_choices_given_up_at_random_moments_leave_nothing_behind(tmp_path: Path, tiny_model: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with split_path(tmp_path, tiny_model, prefill_chunk=32, decode_kind=BothWorker) as split:
        own = Gateway(split.decode, Placement(ref(split.decode_member), ref(split.decode_member)))
        for _ in range(8):
            gateway = rng.choice((own, split.gateway))
            requests = choices(split, ids(rng.randint(1, 150), rng.randint(0, 5)), max_tokens=30)
            answers = begin(gateway, requests)
            for i in rng.sample(range(N), rng.choice((1, 3, N))):
                await asyncio.sleep(rng.random() * 0.02)
                split.decode.cancel(gateway.stream, requests[i].id, 1)
            await over(answers)
            for request, answer in zip(requests, answers, strict=True):
                wanted = generate(split.decode_engine, request)
                assert answer.ids == wanted[: len(answer.ids)]
        await split.idle()
        await own.close()


async def test_a_failed_hand_off_fails_every_choice_and_they_begin_again_together(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        engine = split.prefill_engines[0]
        forward = engine.forward

        def broken(*args: object, **hooks: object) -> object:
            engine.forward = forward  # type: ignore[method-assign]
            raise RuntimeError("as the test wants it")

        engine.forward = broken  # type: ignore[method-assign, assignment]
        requests = choices(split, ids(40), max_tokens=6)
        failed = begin(split.gateway, requests)
        await over(failed)
        assert {answer.error.reason for answer in failed if answer.error} == {Reason.BUG}
        again = begin(split.gateway, requests, number=2)
        await over(again)
        await split.idle()
        check(split, requests, again)
        assert split.prefills[0].numbers()["jobs_count"] == 2


async def test_one_choice_goes_on_by_itself_where_its_ids_end(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        requests = choices(split, ids(40), max_tokens=20)
        answers = begin(split.gateway, requests)
        await over(answers)
        whole = answers[2].ids
        resumed = split.gateway.begin(requests[2], number=2, emitted=whole[:7])
        await resumed.over.wait()
        await split.idle()
        assert whole[:7] + resumed.ids == whole


async def test_choices_whose_prompt_waits_leave_a_leaving_worker_together(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, decode_pages=12) as split:
        other = replace(split.decode_member, id=MemberId("decode-9"))
        split.crowd.tell(MemberChange(other, Liveness.LIVE))
        first = split.asker.request(ids(150), max_tokens=12)
        running = split.gateway.begin(first)
        requests = choices(split, ids(100, 3), max_tokens=12)
        waiting = begin(split.gateway, requests)
        draining = asyncio.create_task(split.decode.drain(20.0))
        await over([*waiting, running])
        await draining
        assert {answer.error.reason for answer in waiting if answer.error} == {Reason.MOVED}
        assert all(answer.error is not None for answer in waiting)
        assert running.ids == generate(split.decode_engine, first)
        await split.idle()


async def test_siblings_of_an_attempt_with_ids_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        requests = choices(split, ids(20), n=2)
        answers = [split.gateway.expect(request, 1) for request in requests]
        sibling = Sibling(requests[1].id, 1, 5)
        split.decode.begin(split.gateway.stream, Attempt(requests[0], 1, (3,), siblings=(sibling,)), split.gateway.placement)
        await over(answers)
        assert [answer.error.reason for answer in answers if answer.error] == [Reason.INVALID_REQUEST] * 2
