"""A decode worker that leaves: what it finishes, what it hands over, and where that goes on."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.split import Split, split_path

from moonpool.core.errors import Reason
from moonpool.core.ids import MemberId
from moonpool.core.membership import Liveness, MemberChange
from moonpool.decode_worker import leaving

SOON_S = 10.0


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


def another(split: Split, *, ready: bool = True) -> None:
    """Somebody else who decodes, as far as membership knows."""
    other = replace(split.decode_member, id=MemberId("decode-9"), ready=ready)
    split.crowd.tell(MemberChange(other, Liveness.LIVE))


async def test_what_can_be_finished_is_finished_and_nothing_new_is_taken(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        another(split)
        request = split.asker.request(ids(40), max_tokens=30)
        running = split.gateway.begin(request)
        await running.count(3)
        draining = asyncio.create_task(split.decode.drain(SOON_S))
        await asyncio.sleep(0)
        refused = split.gateway.begin(split.asker.request(ids(20, 1)))
        await asyncio.wait_for(refused.over.wait(), 5.0)
        assert refused.error is not None
        assert (refused.error.reason, refused.error.peer) == (Reason.MOVED, split.decode_member.id)
        await asyncio.wait_for(draining, SOON_S)
        assert running.ids == split.oracle(request)
        assert split.decode.numbers()["moved_count"] == 0


async def test_what_cannot_be_finished_is_handed_over_with_its_blocks_in_the_pool(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, slots=128) as split:
        request = split.asker.request(ids(40), max_tokens=700)
        want = split.oracle(request)
        running = split.gateway.begin(request)
        await running.count(70)
        await split.decode.drain(0.2)
        await asyncio.wait_for(running.over.wait(), 5.0)
        assert running.error is not None and running.error.reason is Reason.MOVED
        got = running.ids
        assert 70 <= len(got) < 700 and got == want[: len(got)]
        context = [*request.prompt, *got]
        keys = split.asker.hasher.keys(context)
        held = split.stores["a"].pool.held.index
        whole = (len(context) - 1) // 16
        found = sum(held.get(key) is not None for key in keys[:whole])
        assert found >= whole - 1, "all whole blocks, but for the one that a step under way completed"
        assert split.decode.numbers()["moved_count"] == 1


async def test_one_who_would_be_too_slow_goes_elsewhere_at_once_where_there_is_somebody(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "MEASURE_S", 0.1)  # a fast machine is through with 900 tokens in less than a second
    async with split_path(tmp_path, tiny_model) as split:
        another(split)
        running = split.gateway.begin(split.asker.request(ids(40), max_tokens=900))
        await running.count(3)
        draining = asyncio.create_task(split.decode.drain(0.2))
        await asyncio.wait_for(running.over.wait(), 20.0)
        await draining
        assert running.error is not None and running.error.reason is Reason.MOVED


async def test_only_those_that_do_not_end_in_time_are_too_slow(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        running = split.gateway.begin(split.asker.request(ids(40), max_tokens=900))
        await running.count(3)
        (live,) = split.decode.held()
        before = {live.request: live.position - 2}  # two ids in the time that was measured
        left = live.possible
        assert leaving.too_slow([live], before, 1.0, left / 2 + 1.0) == []
        assert leaving.too_slow([live], before, 1.0, left / 2 - 1.0) == [live]
        assert leaving.too_slow([live], {live.request: live.position}, 1.0, 1e9) == [live], "it does not move at all"
        assert leaving.too_slow([live], {}, 1.0, 0.0) == [], "it has begun since"


async def test_a_prefill_worker_that_leaves_finishes_or_gives_back(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, prefills=2) as split:
        worker = split.prefills[0]
        request = split.asker.request(ids(100), max_tokens=4)
        running = split.gateway.begin(request)
        draining = asyncio.create_task(worker.drain(SOON_S))
        await asyncio.wait_for(running.over.wait(), 10.0)
        if running.error is None:  # it had come before the worker began to leave
            assert running.ids == split.oracle(request)
        else:
            assert (running.error.reason, running.error.peer) == (Reason.MOVED, split.prefill_members[0].id)
        later = await split.gateway.ask(split.asker.request(ids(50, 2)))
        assert later.error is not None
        assert (later.error.reason, later.error.peer) == (Reason.MOVED, split.prefill_members[0].id)
        split.place(1)
        elsewhere = split.asker.request(ids(50, 3))
        answer = await split.gateway.ask(elsewhere)
        assert answer.ids == split.oracle(elsewhere)
        await asyncio.wait_for(draining, SOON_S)
        await split.idle(5.0)


async def test_a_refusal_because_it_leaves_frees_the_prefill_worker_s_pages(tmp_path: Path, tiny_model: Path) -> None:
    """It comes in the middle of the hand-off: what is pushed is for nobody any more."""
    async with split_path(tmp_path, tiny_model) as split:
        for seed in range(5):
            running = split.gateway.begin(split.asker.request(ids(300, seed), max_tokens=200))
            while not split.decode.numbers()["handoffs"] and not running.over.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            await split.decode.drain(0.0)
            await asyncio.wait_for(running.over.wait(), 5.0)
            assert running.error is not None and running.error.reason is Reason.MOVED
            await split.idle(2.0)
            split.decode._leaving = False  # its next life
