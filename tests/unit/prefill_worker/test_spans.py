"""One prompt over several prefill workers: the same ids and the same K/V as from one, whatever is cached where."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.split import Split, split_path
from support.workers import Answer

from moonpool.core.blocks import blocks_for
from moonpool.core.request import Request
from moonpool.engine.engine import Engine, Row

SIZE = 16


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


@asynccontextmanager
async def group(folder: Path, model: Path, workers: int = 2, **settings: Any) -> AsyncIterator[Split]:
    """Every prefill worker and the decode worker on a node of its own."""
    nodes, chunks = tuple("abcd"[: workers + 1]), {"prefill_chunk": 32}
    async with split_path(folder, model, nodes=nodes, prefills=workers, prefill_config=chunks, **settings) as split:
        yield split


def count(split: Split, prefill: int, name: str) -> float:
    return split.prefills[prefill].numbers().get(f"{name}_count", 0)


async def asked(split: Split, request: Request) -> Answer:
    answer = await split.gateway.ask(request)
    assert answer.error is None, answer.error
    await split.idle()
    return answer


def kept(split: Split, request: Request) -> np.ndarray:
    """K/V of the whole blocks of the prompt, as the decode worker keeps them."""
    pool = split.decode_engine.pages
    pages = pool.match(request.keys)
    try:
        assert len(pages) == len(request.keys)
        return split.decode_engine.kv_bytes[pages].copy().view(np.float32)
    finally:
        pool.release(pages)


def computed(engine: Engine, request: Request) -> np.ndarray:
    """The same by one forward pass."""
    pages = engine.pages.allocate(blocks_for(len(request.prompt), SIZE))
    try:
        engine.forward([Row(list(request.prompt), 0, pages, True)])
        return engine.kv_bytes[pages[: len(request.keys)]].copy().view(np.float32)
    finally:
        engine.pages.release(pages)


def same(split: Split, request: Request, answer: Answer) -> None:
    assert answer.ids == split.oracle(request)
    np.testing.assert_allclose(kept(split, request), computed(split.decode_engine, request), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [(20 * SIZE + 5, [11]), (20 * SIZE, [19]), (3 * SIZE + 1, [1, 2]), (30 * SIZE + 15, [12, 22])],
    ids=["tail", "whole blocks", "spans of a block", "three workers"],
)
async def test_spans_of_a_group_make_the_same_prompt(tmp_path: Path, tiny_model: Path, tokens: int, ends: list[int]) -> None:
    workers = len(ends) + 1
    async with group(tmp_path, tiny_model, workers) as split:
        split.place(workers - 1, ends=ends)
        request = split.asker.request(ids(tokens, tokens))
        answer = await asked(split, request)
        same(split, request, answer)
        assert answer.cached_tokens == 0
        for i, end in enumerate([*ends, None]):
            before = ends[i - 1] * SIZE if i else 0
            assert count(split, i, "prefix_tokens_computed") == (tokens if end is None else end * SIZE) - before
            assert count(split, i, "span_tokens") == before
            assert count(split, i, "spans_alone") == 0
