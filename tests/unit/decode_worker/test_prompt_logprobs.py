"""How likely a prompt's own ids were: over both paths, in chunks of any size, cached, preempted, begun again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.split import Split, split_path
from support.workers import Answer, Gateway, ref

from moonpool.cluster.both import BothWorker
from moonpool.core.blocks import blocks_for
from moonpool.core.errors import Reason
from moonpool.core.placement import Placement
from moonpool.core.request import Attempt, FinishReason, Request, Sibling
from moonpool.engine.engine import Engine, Row

WIDTH = 3


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


def reference(engine: Engine, prompt: Sequence[int]) -> tuple[list[float], list[list[int]]]:
    """Of every id but the first: its log-probability and the likeliest ids, token by token from single rows."""
    pages = engine.pages.allocate(blocks_for(len(prompt), engine.layout.block_tokens))
    own, top = [], []
    try:
        for at in range(len(prompt) - 1):
            logprobs = torch.log_softmax(engine.forward([Row(prompt[at : at + 1], at, pages, True)])[0], dim=-1)
            own.append(float(logprobs[prompt[at + 1]]))
            top.append(logprobs.topk(WIDTH).indices.tolist())
    finally:
        engine.pages.release(pages)
    return own, top


def check(split: Split, request: Request, answer: Answer) -> None:
    told = [e.prompt_logprobs for e in answer.emissions]
    parts = [part for part in told if part is not None]
    assert all(part is not None for part in told[: len(parts)]), "they come before the first id"
    own = [p for part in parts for p in part.logprobs]
    top = [list(part.top_tokens[i : i + WIDTH]) for part in parts for i in range(0, len(part.top_tokens), WIDTH)]
    want = reference(split.decode_engine, request.prompt)
    assert own == pytest.approx(want[0], abs=1e-4)
    assert top == want[1]
    for part in parts:
        for i, rank in enumerate(part.ranks):
            likeliest = part.top_tokens[i * WIDTH : (i + 1) * WIDTH]
            assert (rank <= WIDTH) == (request.prompt[part.first + i] in likeliest)


@pytest.mark.parametrize("chunk", [1, 16, 33, 99, 100, 101])
@pytest.mark.parametrize("local", [False, True])
async def test_every_position_is_told_and_nothing_leaves_before_the_last_chunk(
    tmp_path: Path, tiny_model: Path, chunk: int, local: bool
) -> None:
    async with split_path(tmp_path, tiny_model, prefill_chunk=chunk, decode_kind=BothWorker) as split:
        own = Gateway(split.decode, Placement(ref(split.decode_member), ref(split.decode_member)))
        gateway = own if local else split.gateway
        for cached in (False, True):
            request = split.asker.request(ids(100), max_tokens=4, prompt_logprobs=WIDTH)
            answer = await gateway.ask(request)
            await split.idle()
            check(split, request, answer)
            assert answer.ids == split.oracle(request)
            assert (answer.emissions[1].cached_tokens, len(gateway.steps[0])) == (0, 2), f"cached: {cached}"
        await own.close()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("local", [False, True])
async def test_a_prompt_may_be_scored_with_nothing_generated(
    tmp_path: Path, tiny_model: Path, length: int, local: bool
) -> None:
    async with split_path(tmp_path, tiny_model, decode_kind=BothWorker) as split:
        own = Gateway(split.decode, Placement(ref(split.decode_member), ref(split.decode_member)))
        for _ in range(2):
            request = split.asker.request(ids(length), max_tokens=0, prompt_logprobs=WIDTH)
            answer = await (own if local else split.gateway).ask(request)
            await split.idle()
            check(split, request, answer)
            assert (answer.ids, answer.finish) == ([], FinishReason.LENGTH)
            assert answer.emissions[-1].position == 0
        await own.close()


async def test_a_prompt_as_long_as_the_pages_may_be_scored_but_not_answered(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, decode_pages=4) as split:
        scored = split.asker.request(ids(64), max_tokens=0, prompt_logprobs=WIDTH)
        answer = await split.gateway.ask(scored)
        await split.idle()  # the reference takes all pages
        check(split, scored, answer)
        refused = await split.gateway.ask(split.asker.request(ids(64), max_tokens=1, prompt_logprobs=WIDTH))
        assert refused.error is not None and refused.error.reason is Reason.CONTEXT_LENGTH
        await split.idle()


async def test_a_prompt_that_is_preempted_is_scored_once_and_whole(tmp_path: Path, tiny_model: Path) -> None:
    tight = {"decode_pages": 12, "growth_reserve": 0.0, "prefill_chunk": 16}
    async with split_path(tmp_path, tiny_model, decode_kind=BothWorker, **tight) as split:
        own = Gateway(split.decode, Placement(ref(split.decode_member), ref(split.decode_member)))
        running = [own.begin(split.asker.request(ids(29, i), max_tokens=12)) for i in range(2)]
        scored = [split.asker.request(ids(120, 9), max_tokens=2, prompt_logprobs=WIDTH)]
        answers = [own.begin(request) for request in scored]
        async with asyncio.timeout(30):
            await asyncio.gather(*(answer.over.wait() for answer in (*running, *answers)))
        await split.idle()
        assert split.decode.numbers()["preemptions_count"] > 0
        for request, answer in zip(scored, answers, strict=True):
            check(split, request, answer)
            assert answer.ids == split.oracle(request)
        await own.close()


async def test_an_attempt_with_ids_is_not_scored_again(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        request = split.asker.request(ids(40), max_tokens=8, prompt_logprobs=WIDTH)
        whole = await split.gateway.ask(request)
        resumed = split.gateway.begin(request, number=2, emitted=whole.ids[:3])
        await resumed.over.wait()
        await split.idle()
        assert whole.ids[:3] + resumed.ids == whole.ids
        assert all(e.prompt_logprobs is None for e in resumed.emissions)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("local", [False, True])
async def test_of_several_choices_the_first_one_tells_of_the_prompt(
    tmp_path: Path, tiny_model: Path, tokens: int, local: bool
) -> None:
    async with split_path(tmp_path, tiny_model, decode_kind=BothWorker) as split:
        own = Gateway(split.decode, Placement(ref(split.decode_member), ref(split.decode_member)))
        gateway = own if local else split.gateway
        first, second = (split.asker.request(ids(50), max_tokens=tokens, prompt_logprobs=WIDTH) for _ in range(2))
        answers = [gateway.expect(request, 1) for request in (first, second)]
        split.decode.begin(
            gateway.stream, Attempt(first, 1, siblings=(Sibling(second.id, 1, second.sampling.seed),)), gateway.placement
        )
        async with asyncio.timeout(20):
            await asyncio.gather(*(answer.over.wait() for answer in answers))
        await split.idle()
        check(split, first, answers[0])
        assert all(e.prompt_logprobs is None for e in answers[1].emissions)
        assert answers[0].ids == answers[1].ids == (split.oracle(first) if tokens else [])
        await own.close()
