"""A model with windows of two blocks and a full layer, served split and by one worker: same ids and numbers as the library.

Windows let a sequence forget; its blocks are kept and found all the same, because full layers read every one of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from support.oracle import Oracle
from support.split import Split, split_path
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from moonpool.cluster.both import BothWorker
from moonpool.core.request import Request

BLOCK = 16
NEAR = 1e-4  # log-probabilities


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    torch.manual_seed(5)
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        sliding_window=2 * BLOCK,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=0.2,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def library(windows: Path) -> Oracle:
    return Oracle(windows, threads=1)


@pytest.fixture(params=["split", "one worker"])
async def served(request: pytest.FixtureRequest, windows: Path, tmp_path: Path) -> AsyncIterator[Split]:
    if request.param == "split":
        async with split_path(tmp_path, windows, slots=128) as split:
            yield split
    else:
        async with split_path(tmp_path, windows, slots=128, prefills=0, decode_kind=BothWorker) as split:
            yield split


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


async def asked(served: Split, request: Request, library: Oracle) -> tuple[int, list[int], list[float]]:
    """Cached tokens, ids (which are the library's) and their log-probabilities."""
    answer = await served.gateway.ask(request)
    await served.idle()
    assert answer.error is None
    assert answer.ids == list(library.greedy(request.prompt, request.sampling.max_tokens))
    return answer.cached_tokens, answer.ids, [e.sampled.logprob or 0.0 for e in answer.emissions if e.sampled]


async def test_moved_tokens_are_not_cached_tokens(served: Split, library: Oracle) -> None:
    first = ids(100, 1)
    for prompt, cached in ((first, 0), (first, 96), ([*first[:64], *ids(36, 2)], 64)):
        assert (await asked(served, served.asker.request(prompt, max_tokens=6), library))[0] == cached


async def test_prompts_around_block_borders_repeat_their_answer_from_pages_and_from_the_pool(
    served: Split, library: Oracle
) -> None:
    for n in (15, 16, 17, 31, 32, 33, 48, 100):
        cold, _, want = await asked(served, served.asker.request(ids(n, n), max_tokens=8, logprobs=1), library)
        assert cold == 0
        for place in ("pages", "pages", "pool"):
            if place == "pool":
                await served.clear_device_pages()
            request = served.asker.request(ids(n, n), max_tokens=8, logprobs=1)
            cached, _, got = await asked(served, request, library)
            assert cached == min(n // BLOCK * BLOCK, n - 1), f"{n} tokens from {place}"
            assert got == pytest.approx(want, abs=NEAR)


@pytest.mark.parametrize(("total", "cached"), [(31, 16), (32, 16), (33, 32), (65, 64)])
async def test_blocks_that_the_answer_completed_serve_the_next_turn(
    served: Split, library: Oracle, total: int, cached: int
) -> None:
    """The last sampled id has no KV: with exactly 32 tokens in all, the second block is one token short of whole."""
    first = served.asker.request(ids(20, 3), max_tokens=total - 20)
    _, answer, _ = await asked(served, first, library)
    follow_up = served.asker.request([*first.prompt, *answer, *ids(10, 9)], max_tokens=6)
    assert (await asked(served, follow_up, library))[0] == cached


async def test_many_at_once_around_the_window(served: Split, library: Oracle) -> None:
    requests = [served.asker.request(ids(n, n), max_tokens=20) for n in (1, 30, 31, 32, 33, 34, 70)]
    answers = await asyncio.gather(*(served.gateway.ask(request) for request in requests))
    await served.idle()
    for request, answer in zip(requests, answers, strict=True):
        assert answer.ids == list(library.greedy(request.prompt, 20))
