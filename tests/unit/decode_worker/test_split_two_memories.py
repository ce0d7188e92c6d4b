"""The split path where device pages and the host's view of them are two memories, as on a GPU: real pushes, landings, loads."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.lanes import late_view
from support.split import Split, split_path
from transformers import LlamaConfig, LlamaForCausalLM

from moonpool.cluster.both import BothWorker
from moonpool.core.ids import NodeId, RequestId
from moonpool.core.placement import Segment, Source
from moonpool.engine.engine import Row


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


async def check(split: Split, length: int, cached: int, seed: int = 0, outputs: int = 20) -> None:
    request = split.asker.request(ids(length, seed), max_tokens=outputs)
    answer = await split.gateway.ask(request)
    await split.idle()
    assert answer.error is None
    assert answer.ids == split.oracle(request)
    assert answer.cached_tokens == cached


@pytest.mark.parametrize("length", [1, 17, 48])
async def test_answers_equal_bare_generation_cold_from_device_pages_and_from_the_pool(
    tmp_path: Path, tiny_model: Path, length: int
) -> None:
    cached = (length - 1) if length % 16 == 0 else length // 16 * 16
    async with split_path(tmp_path, tiny_model, make_view=late_view) as split:
        for found in (0, cached):
            await check(split, length, found)
        await split.clear_device_pages()
        await check(split, length, cached)


async def test_a_prompt_fetched_from_another_node_and_computed_behind_it(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, nodes=("a", "b"), make_view=late_view, prefill_chunk=32) as split:
        await check(split, 100, 0)
        await split.clear_device_pages()
        split.place(segments=[Segment(0, 4, Source.FETCH, NodeId("b"))])
        await check(split, 100, 64)


async def test_pages_that_a_worker_computed_in_another_role_are_pushed_from_the_host_too(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Steps of answers leave the host behind; the worker was a decode worker, and has their pages still."""
    async with split_path(tmp_path, tiny_model, make_view=late_view) as split:
        engine, request = split.prefill_engines[0], split.asker.request(ids(48), max_tokens=6)
        pages = engine.pages.allocate(3)
        engine.forward([Row(list(request.prompt), 0, pages, False)])
        for i, page in enumerate(pages):
            engine.pages.publish(page, request.keys[i], request.keys[i - 1] if i else None)
        engine.pages.release(pages)
        answer = await split.gateway.ask(request)
        await split.idle()
        assert (answer.ids, answer.cached_tokens) == (split.oracle(request), 47)


async def test_blocks_of_answers_are_published_from_pages_that_the_host_did_not_have(tmp_path: Path, tiny_model: Path) -> None:
    """Role both: what it computed goes into the pool as it completes, and comes back from there."""
    async with split_path(tmp_path, tiny_model, prefills=0, decode_kind=BothWorker, make_view=late_view) as split:
        await check(split, 40, 0, outputs=30)
        prompt = ids(40)
        answer = await split.gateway.ask(split.asker.request(prompt, max_tokens=30))
        await split.idle()
        await split.clear_device_pages()
        longer = split.asker.request([*prompt, *answer.ids], max_tokens=4)
        again = await split.gateway.ask(longer)
        await split.idle()
        assert again.ids == split.oracle(longer)
        assert again.cached_tokens == 64


@pytest.fixture
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer and one head: kernels are interpreted."""
    folder = tmp_path_factory.mktemp("smallest")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=64, eos_token_id=None, **shape)).save_pretrained(
        folder
    )
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


async def test_triton_pages_in_eight_bits_are_handed_over_without_loss(tmp_path: Path, smallest: Path) -> None:
    """Cold and from the pool the same ids: canonical bytes carry what the pages hold."""
    async with split_path(tmp_path, smallest, backend="triton", kv_dtype="fp8") as split:
        request = split.asker.request(ids(18), max_tokens=2)
        want = split.oracle(request)
        for cached in (0, 16):
            answer = await split.gateway.ask(replace(request, id=RequestId(f"r{cached}")))
            await split.idle()
            assert (answer.ids, answer.cached_tokens) == (want, cached)
            await split.clear_device_pages()
