"""Prefill here, decode there: the hand-off with real store nodes, against bare engine calls."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.split import split_path


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 100])
async def test_greedy_answers_equal_bare_generation_cold_and_cached(tmp_path: Path, tiny_model: Path, length: int) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        prompt = ids(length)
        for cached in (0, (length - 1) if length % 16 == 0 else length // 16 * 16):
            request = split.asker.request(prompt, max_tokens=6)
            answer = await split.gateway.ask(request)
            await split.idle()
            assert answer.error is None
            assert answer.ids == split.oracle(request)
            assert answer.cached_tokens == cached
