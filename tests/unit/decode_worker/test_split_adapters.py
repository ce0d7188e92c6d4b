"""Requests that name adapters, prefilled here and decoded there: own answers, own blocks, side by side with the model alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.adapters import write_adapter
from support.split import Split, split_path

from moonpool.cluster.both import BothWorker
from moonpool.core.blocks import BlockHasher, load_hash_key, namespace
from moonpool.core.errors import Reason
from moonpool.core.request import Adapter, Request
from moonpool.engine.checkpoint import adapter_digest

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("polite", "terse")):
        write_adapter(folder / name, tiny_model, TARGETS, rank=4, alpha=8, seed=seed)
    return {name: folder / name for name in ("polite", "terse")}


@pytest.fixture(params=["split", "one worker"])
async def served(
    request: pytest.FixtureRequest, tiny_model: Path, adapters: dict[str, Path], tmp_path: Path
) -> AsyncIterator[Split]:
    named = {name: str(place) for name, place in adapters.items()}
    if request.param == "split":
        async with split_path(tmp_path, tiny_model, adapters=named) as split:
            yield split
    else:
        async with split_path(tmp_path, tiny_model, adapters=named, prefills=0, decode_kind=BothWorker) as split:
            yield split


def asks(served: Split, prompt: list[int], name: str, place: Path | None, max_tokens: int = 6) -> Request:
    """As a gateway writes it."""
    request = served.asker.request(prompt, max_tokens=max_tokens)
    if place is None:
        return request
    adapter = Adapter(name, adapter_digest(name, place, place))
    layout = served.decode_engine.layout
    named = namespace(layout, adapter=adapter.digest)
    hasher = BlockHasher(load_hash_key(Path(served.config.cluster.key_file)), named, layout.block_tokens)
    return replace(request, adapter=adapter, namespace=named, keys=tuple(hasher.keys(prompt)))


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


async def test_one_prompt_has_blocks_and_answers_of_its_own_for_every_adapter(served: Split, adapters: dict[str, Path]) -> None:
    prompt, told = ids(100), {}
    for known in (0, 96):
        for name, place in {"": None, **adapters}.items():
            request = asks(served, prompt, name, place)
            answer = await served.gateway.ask(request)
            await served.idle()
            assert (answer.error, answer.cached_tokens) == (None, known), name
            assert answer.ids == served.oracle(request)
            told[name] = answer.ids
        await served.clear_device_pages()  # the next ones come from the pool
    assert len({tuple(answer) for answer in told.values()}) == 3


async def test_adapters_mix_in_one_batch(served: Split, adapters: dict[str, Path]) -> None:
    kinds = [("", None), *adapters.items()] * 3
    requests = [asks(served, ids(5 + 11 * i, i), name, place, max_tokens=10) for i, (name, place) in enumerate(kinds)]
    answers = await asyncio.gather(*(served.gateway.ask(request) for request in requests))
    await served.idle()
    for request, answer in zip(requests, answers, strict=True):
        assert answer.ids == served.oracle(request)


async def test_an_adapter_that_a_worker_lacks_is_refused_by_name(served: Split, tiny_model: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "new", tiny_model, TARGETS, rank=2, alpha=2, seed=9)
    answer = await served.gateway.ask(asks(served, ids(20), "new", tmp_path / "new"))
    assert answer.error is not None and answer.error.reason is Reason.LAYOUT_MISMATCH
    assert "adapter 'new' with digest" in answer.error.message and "model.adapters" in answer.error.message
    await served.idle()
