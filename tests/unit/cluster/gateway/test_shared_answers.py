"""Answers that many consoles share."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.cluster.gateway.console.shared import SharedAnswer, SharedAnswers
from moonpool.core.errors import Overloaded


async def test_whoever_asks_meanwhile_gets_the_one_answer_and_who_leaves_ends_it_for_nobody() -> None:
    go = asyncio.Event()

    async def make() -> bytes:
        await go.wait()
        return b"seen"

    answer = SharedAnswer(make, fresh_s=60.0)
    asking = [asyncio.create_task(answer.get()) for _ in range(10)]
    await asyncio.sleep(0)
    asking[0].cancel()
    go.set()
    assert await asyncio.gather(*asking[1:]) == [b"seen"] * 9
    assert (await answer.get(), answer.made) == (b"seen", 1)
    await answer.close()


async def test_the_next_one_comes_no_sooner_than_four_times_what_the_last_one_took() -> None:
    async def make() -> bytes:
        await asyncio.sleep(0.05)
        return b"%d" % answer.made

    answer = SharedAnswer(make, fresh_s=0.0)
    begun = asyncio.get_running_loop().time()
    assert await answer.get() == b"1"
    while await answer.get() == b"1":  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - begun >= 5 * 0.05
    await answer.close()


async def test_what_fails_is_tried_again_later() -> None:
    async def make() -> bytes:
        if answer.made == 1:
            raise ValueError("once")
        return b"better"

    answer = SharedAnswer(make, fresh_s=0.01)
    with pytest.raises(ValueError, match="once"):
        await answer.get()
    await asyncio.sleep(0.02)
    assert await answer.get() == b"better"


async def test_lookups_are_kept_by_name_and_bounded() -> None:
    held = asyncio.Event()

    async def make(name: str) -> bytes:
        if name.startswith("slow"):
            await held.wait()
        return name.encode()

    answers = SharedAnswers(make, 60.0, kept=3, at_once=2)
    slow = [asyncio.create_task(answers.get(f"slow-{i}")) for i in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await answers.get("another")
    held.set()
    assert await asyncio.gather(*slow) == [b"slow-0", b"slow-1"]
    for i in range(9):
        assert await answers.get(f"{i}") == f"{i}".encode()
    assert len(answers._answers) == 3
    await answers.close()
