"""Attempts cancelled while the compute threads of a prefill and a decode worker are amid their work: only they end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

from support.split import Split, split_path
from support.workers import Answer

from moonpool.core.request import FinishReason, Request
from moonpool.engine.engine import Engine

ROUNDS = 40


class Striker:
    """Cancels one of the requests under way, from within an engine's step, before or behind its arithmetic."""

    def __init__(self, split: Split, seed: int) -> None:
        self.split, self.draw = split, random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.under_way: list[tuple[Request, Answer]] = []
        self.struck: Counter[str] = Counter()
        self.cancelled: list[Answer] = []

    def hook(self, engine: Engine, where: str) -> None:
        forward = engine.forward

        def hooked(*args: Any, **hooks: Any) -> Any:
            self._maybe(f"{where} scheduled")
            logits = forward(*args, **hooks)
            self._maybe(f"{where} computed")
            return logits

        engine.forward = hooked  # type: ignore[method-assign]

    def _maybe(self, moment: str) -> None:
        if self.under_way and self.draw.random() < 0.3:
            self.loop.call_soon_threadsafe(self._strike, moment)

    def _strike(self, moment: str) -> None:
        for request, answer in self.under_way[:1]:
            if not answer.over.is_set():
                self.split.decode.cancel(self.split.gateway.stream, request.id, 1)
                self.struck[moment] += 1
                self.cancelled.append(answer)
        self.under_way = self.under_way[1:]


async def test_cancelling_amid_a_step_ends_one_attempt_and_leaves_nothing_held(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, nodes=("a", "b"), slots=128) as split:
        draw = random.Random(5)
        prompts = [draw.choices(range(128), k=draw.randint(20, 120)) for _ in range(6)]
        right = {tuple(p): split.oracle(split.asker.request(p, max_tokens=4)) for p in prompts}
        striker = Striker(split, 6)
        striker.hook(split.prefill_engines[0], "prefill")
        striker.hook(split.decode_engine, "decode")
        for _ in range(ROUNDS):
            requests = [split.asker.request(draw.choice(prompts), max_tokens=4) for _ in range(3)]
            begun = [(request, split.gateway.begin(request)) for request in requests]
            striker.under_way = begun[:2]
            async with asyncio.timeout(30):
                await asyncio.gather(*(answer.over.wait() for _, answer in begun))
            striker.under_way = []
            for request, answer in begun:
                if answer.finish is FinishReason.CANCELLED:
                    assert answer in striker.cancelled
                else:
                    assert answer.error is None and answer.ids == right[request.prompt]
            await split.idle(10)
        assert min(striker.struck[f"{where} {when}"] for where in ("prefill", "decode") for when in ("scheduled", "computed"))
