"""An error at every step of the sending end of a hand-off: mended, or the attempt fails soon; the next one is served."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.failing_carrier import SENDER_STEPS, FailingSender, Plan
from support.split import split_path
from support.store import until
from support.workers import idle

from moonpool.core.errors import Reason


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


@pytest.mark.parametrize("step", SENDER_STEPS)
async def test_an_error_at_one_step_of_a_hand_off_ends_soon_and_the_next_request_goes_over_the_same_link(
    tmp_path: Path, tiny_model: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.kvstore.push_landing.SETTLE_S", 0.2)
    plan = Plan()
    async with split_path(tmp_path, tiny_model, nodes=("a", "b"), carrier="tcp") as split:
        pusher = split.prefills[0]._pusher
        make: Any = pusher._make_sender
        pusher._make_sender = lambda *given: FailingSender(plan, make(*given))  # type: ignore[method-assign]
        if step not in ("sender register", "sender connect"):
            assert (await split.gateway.ask(split.asker.request(ids(40, 9), max_tokens=2))).error is None  # the link is there
            await split.idle()
        plan.step = step
        if step == "sender release":
            await split.stores["b"].remake()
        request = split.asker.request(ids(70), max_tokens=4)
        async with asyncio.timeout(5):
            answer = await split.gateway.ask(request)
        assert plan.done == [step]
        if answer.error is None:
            assert answer.ids == split.oracle(request)
        else:
            assert answer.error.reason in (Reason.TRANSFER_FAILED, Reason.PEER_SILENT, Reason.BUG)
        await idle(split.decode)
        await until(lambda: not split.stores["b"].numbers()["slots_reserved"], "nobody waits for what will not come")
        await split.stores["b"].remake()  # a write that failed is a write that may yet come: only this frees its slots
        await split.idle()
        after = split.asker.request(ids(70, 1), max_tokens=4)
        assert (await split.gateway.ask(after)).ids == split.oracle(after)
        await split.idle()
