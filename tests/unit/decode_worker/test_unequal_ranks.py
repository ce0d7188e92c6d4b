"""Prefill and decode of different degrees: what one rank or two made of a prompt is gone on with by two or one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from support.split import split_path
from support.thread_ranks import ranks_in_threads

PROMPTS, TOKENS, OUTPUTS = 16, 200, 4


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
async def test_answers_are_those_of_equal_degrees(
    tmp_path: Path, tiny_model: Path, prefill: int, decode: int, block: int
) -> None:
    prompts = [random.Random(i).choices(range(128), k=TOKENS) for i in range(PROMPTS)]
    sizes = {"pages": 320 * 16 // block, "block_tokens": block}
    with ranks_in_threads():
        async with split_path(
            tmp_path,
            tiny_model,
            nodes=("a", "b"),
            slots=320 * 16 // block,
            prefill_config={"tensor_parallel": prefill},
            tensor_parallel=decode,
            **sizes,
        ) as split:
            notes = [engine.backend_note for engine in (*split.prefill_engines, split.decode_engine)]
            assert ["2 ranks" in note for note in notes] == [prefill == 2, decode == 2]
            requests = [split.asker.request(ids, max_tokens=OUTPUTS) for ids in prompts]
            answers = await asyncio.gather(*(split.gateway.ask(request) for request in requests))
            again = await split.gateway.ask(split.asker.request(prompts[0], max_tokens=OUTPUTS))
            await split.idle()
            assert again.cached_tokens == TOKENS // block * block
            for request, answer in zip(requests, answers, strict=True):
                assert answer.error is None
                assert answer.ids == split.oracle(request)
            assert again.ids == answers[0].ids


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
async def test_ranks_with_pages_of_their_own_push_and_take_in_the_same_blocks(
    tmp_path: Path, tiny_model: Path, prefill: int, decode: int
) -> None:
    """As on GPUs; cold, from the pages of the worker that computed it, and from the pool."""
    prompt = random.Random(3).choices(range(128), k=50)
    with ranks_in_threads(apart=True):
        async with split_path(
            tmp_path, tiny_model, prefill_config={"tensor_parallel": prefill}, tensor_parallel=decode
        ) as split:
            for cached in (0, 48, 48):
                request = split.asker.request(prompt, max_tokens=20)
                answer = await split.gateway.ask(request)
                await split.idle()
                assert (answer.error, answer.cached_tokens) == (None, cached)
                assert answer.ids == split.oracle(request)
                if cached:
                    await split.clear_device_pages()
