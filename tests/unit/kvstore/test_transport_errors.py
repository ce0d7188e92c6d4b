"""An error at every step of a transfer, at either end: the fetch ends in a miss, all comes free, the next one works."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.failing_carrier import RECEIVER_STEPS, SENDER_STEPS, FailingSender, Plan, fail_receiver, failing_notices
from support.stores import block_keys, stores


@pytest.mark.parametrize("step", SENDER_STEPS + RECEIVER_STEPS)
async def test_an_error_at_one_step_ends_the_fetch_soon_and_the_next_one_goes_over_the_same_link(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.kvstore.push_landing.SETTLE_S", 0.2)
    plan = Plan()
    ends: dict[str, Any] = {
        "sender": lambda inner: FailingSender(plan, inner),
        "receiver": lambda network, who, heard: fail_receiver(plan, network.receiver(who, failing_notices(plan, heard))),
    }
    async with stores(tmp_path, "a", "b", **ends) as s:
        first, second = block_keys("k", 4), block_keys("n", 4)
        await s.publish("b", first)
        await s.publish("b", second)
        if step not in ("sender register", "sender connect"):
            await s.publish("b", block_keys("w", 1))
            await s.fetch("a", block_keys("w", 1), "b")  # the link is there
        plan.step = step
        if step == "sender release":
            await s.nodes["a"].remake()
        async with asyncio.timeout(4):
            came = len((await s.fetch("a", first, "b")).slots)
        assert plan.done == [step]
        if came:
            await s.require_right("a", first[:came])
        assert [slot.key for slot in (await s.fetch("a", second, "b")).slots] == second
        await s.require_right("a", second)
        await s.nodes["a"].remake()
        await s.require_idle()
