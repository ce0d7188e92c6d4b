from __future__ import annotations

import asyncio
import random

import pytest

from moonpool.kvstore.fair_turns import FairTurns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_flood_leaves_every_other_turn_to_another_tenant() -> None:
    turns, order = FairTurns(1), []

    async def use(tenant: str) -> None:
        async with turns.turn(tenant, 1.0):
            order.append(tenant)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(use("flood")) for _ in range(20)]
    await settle()
    before = len(order)
    tasks += [asyncio.create_task(use("quiet")) for _ in range(3)]
    await asyncio.gather(*tasks)
    assert order[before : before + 8].count("quiet") == 3
    assert turns.idle


async def test_nobody_waits_while_there_is_room_and_no_more_than_that_are_let_in() -> None:
    turns, inside, most = FairTurns(3), 0, 0

    async def use(tenant: str) -> None:
        nonlocal inside, most
        async with turns.turn(tenant, 1.0):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(use("ab"[i % 2]) for i in range(40)))
    assert most == 3
    assert turns.idle


@pytest.mark.parametrize("seed", range(20))
async def test_whoever_is_cancelled_at_any_moment_no_turn_is_lost(seed: int) -> None:
    draw, turns, done = random.Random(seed), FairTurns(2), 0

    async def use(tenant: str) -> None:
        nonlocal done
        async with turns.turn(tenant, draw.random()):
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
        done += 1

    tasks = [asyncio.create_task(use(draw.choice("abc"))) for _ in range(40)]
    for task in draw.sample(tasks, 20):
        for _ in range(draw.randrange(3)):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert turns.idle
    assert done >= 20
    async with asyncio.timeout(1), turns.turn("last", 1.0):
        pass


async def test_one_cancelled_just_before_another_leaves_only_ends() -> None:
    turns, done = FairTurns(1), asyncio.Event()

    async def use(tenant: str) -> None:
        async with turns.turn(tenant, 1.0):
            await done.wait()

    inside, waiting = asyncio.create_task(use("a")), asyncio.create_task(use("b"))
    await settle()
    done.set()  # the one inside leaves first, then the other one hears that it is cancelled
    waiting.cancel()
    ends = await asyncio.gather(inside, waiting, return_exceptions=True)
    assert isinstance(ends[1], asyncio.CancelledError)
    assert turns.idle
