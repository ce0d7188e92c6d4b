"""A decode worker is gone in the middle of an answer: the next attempt fetches what it left in the pool, and says the same."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.patience import wait_for_loads
from support.split import Split, split_path
from support.workers import Answer

from moonpool.core.ids import NodeId
from moonpool.core.placement import Segment, Source
from moonpool.core.request import FinishReason, Request

SIZE = 16
TOTAL = 70  # tokens of prompt and answer


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


async def until(true: Callable[[], object], what: str, seconds: float = 10.0) -> None:
    """For states that have no event of their own."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.002)


async def interrupted(split: Split, request: Request, count: int) -> Answer:
    """``count`` ids of an attempt whose worker's device memory is lost then; what it had begun to store is stored.

    The first id comes from the prefill worker, maybe before the KV of the prompt: that is waited for, too.
    """
    answer = split.gateway.begin(request)
    await answer.count(count)
    await until(lambda: not split.decode.numbers()["requests_filling"], "landed")
    split.decode.cancel(split.gateway.stream, request.id, 1)
    await until(lambda: not split.decode.numbers()["pages_publishing"], "published")
    await split.idle()
    await split.clear_device_pages()
    return answer


async def resumed(split: Split, request: Request, emitted: list[int]) -> Answer:
    """The next attempt, by a prefill worker on another host, with the conductor's plan for what the pool holds."""
    blocks = (len(request.prompt) + len(emitted)) // SIZE
    split.place(segments=[Segment(0, blocks, Source.FETCH, NodeId("b"))] if blocks else [])
    answer = split.gateway.begin(request, number=2, emitted=emitted)
    await answer.over.wait()
    assert answer.error is None
    return answer


def counted(split: Split) -> dict[str, float]:
    return {name: split.prefills[0].numbers().get(f"{name}_count", 0) for name in ("prompt_tokens", "reused_tokens")}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_loads(monkeypatch)


@asynccontextmanager
async def apart(folder: Path, model: Path, **settings: Any) -> AsyncIterator[Split]:
    """The prefill worker on node a, the decode worker on node b."""
    async with split_path(folder, model, nodes=("a", "b"), **settings) as split:
        yield split


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 33])
async def test_at_every_place_around_block_borders_the_answer_goes_on_and_less_than_a_block_is_computed(
    tmp_path: Path, tiny_model: Path, prompt: int
) -> None:
    async with apart(tmp_path, tiny_model) as split:
        lengths = [n for border in (16, 32, 48, 64) for n in (border - 1, border, border + 1) if prompt < n < TOTAL]
        for length in lengths:
            cut = length - prompt
            request = split.asker.request(ids(prompt, seed=length), max_tokens=TOTAL - prompt)
            whole = split.oracle(request)
            first = await interrupted(split, request, cut)
            assert first.ids[:cut] == whole[:cut]
            before = counted(split)
            rest = await resumed(split, request, whole[:cut])
            assert whole[:cut] + rest.ids == whole, (prompt, length)
            assert [e.position for e in rest.emissions] == list(range(cut, TOTAL - prompt))
            after = counted(split)
            tokens, reused = (after[k] - before[k] for k in ("prompt_tokens", "reused_tokens"))
            assert tokens == length
            assert tokens - reused <= SIZE, "the KV of the last id does not exist, so its block may be unfinished"
            assert reused >= (length - 1) // SIZE * SIZE
        await split.idle()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.9, "seed": 6, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1.0, "seed": 7, "top_p": 0.8, "top_k": 20, "logprobs": 3},
        {"temperature": 1.0, "seed": 8, "stop_token_ids": tuple(range(0, 128, 5)), "min_tokens": 30},
    ],
    ids=["seed", "penalties", "logprobs", "min_tokens"],
)
async def test_a_resumed_answer_draws_what_the_first_attempt_would_have_drawn(
    tmp_path: Path, tiny_model: Path, sampling: dict[str, Any]
) -> None:
    async with apart(tmp_path, tiny_model) as split:
        for cut in (1, 11, 12, 13, 28):
            request = split.asker.request(ids(20, seed=cut), max_tokens=40, **sampling)
            twin = split.asker.request(ids(20, seed=cut), max_tokens=40, **sampling)
            whole = await split.gateway.ask(twin)
            await interrupted(split, request, cut)
            rest = await resumed(split, request, whole.ids[:cut])
            assert whole.ids[:cut] + rest.ids == whole.ids
            assert rest.finish is whole.finish
            for mine, theirs in zip(rest.emissions, whole.emissions[cut:], strict=True):
                assert mine.sampled is not None and theirs.sampled is not None
                assert [t.token for t in mine.sampled.top] == [t.token for t in theirs.sampled.top]
                assert mine.sampled.logprob == pytest.approx(theirs.sampled.logprob, abs=1e-4)
        await split.idle()


async def test_an_answer_one_id_from_its_end_is_finished_by_the_next_attempt(tmp_path: Path, tiny_model: Path) -> None:
    async with apart(tmp_path, tiny_model) as split:
        for prompt in (31, 32, 33):
            request = split.asker.request(ids(prompt), max_tokens=16)
            whole = split.oracle(request)
            await interrupted(split, request, 15)
            rest = await resumed(split, request, whole[:15])
            assert (rest.ids, rest.finish) == (whole[15:], FinishReason.LENGTH)
        await split.idle()


async def test_what_the_pool_lost_of_a_running_sequence_is_filled_in_again_from_its_pages(
    tmp_path: Path, tiny_model: Path
) -> None:
    async with apart(tmp_path, tiny_model, slots=96) as split:
        request = split.asker.request(ids(100), max_tokens=60)
        whole = split.oracle(request)
        answer = split.gateway.begin(request)
        await answer.count(3)
        await until(lambda: split.stores["b"].pool.clear().cleared > 0, "the hand-off let go of its blocks")
        await answer.count(40)
        assert split.decode.numbers()["blocks_mended_count"] >= 6
        split.decode.cancel(split.gateway.stream, request.id, 1)
        await until(lambda: not split.decode.numbers()["pages_publishing"], "published")
        await split.idle()
        await split.clear_device_pages()
        before = counted(split)
        rest = await resumed(split, request, whole[:40])
        assert whole[:40] + rest.ids == whole
        assert counted(split)["reused_tokens"] - before["reused_tokens"] >= 128
