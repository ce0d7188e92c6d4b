"""Several ranks against one: logits, hooks, failures in the middle of a step. Ranks are threads here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_runner import VOCAB, Runner, load_tiny, random_ids, save_tiny
from support.thread_ranks import ThreadRanks, ranks_in_threads
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from moonpool.core.errors import PeerSilent, TransferFailed
from moonpool.engine.engine import Engine, Row
from moonpool.engine.trial import difference

LAYERS = 3
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}


def heads(query: int, kv: int, dim: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": dim}


MODELS: dict[str, tuple[int, PreTrainedConfig]] = {
    "8 of 8 heads of 16": (2, LlamaConfig(**BASE, **heads(8, 8, 16))),
    "8 of 4 heads of 24": (2, LlamaConfig(**BASE, **heads(8, 4, 24))),
    "8 of 2 heads of 80": (2, LlamaConfig(**BASE, **heads(8, 2, 80))),
    "8 of 2 heads on 4 ranks": (4, LlamaConfig(**BASE, **heads(8, 2, 16))),
    "8 of 1 head": (2, LlamaConfig(**BASE, **heads(8, 1, 16))),
    "6 of 3 heads on 3 ranks": (3, LlamaConfig(**{**BASE, "hidden_size": 48}, **heads(6, 3, 24))),
    "9 of 3 heads and odd columns": (2, LlamaConfig(**{**BASE, "hidden_size": 36, "intermediate_size": 49}, **heads(9, 3, 16))),
    "biases and an odd vocabulary": (2, Qwen2Config(**{**BASE, "vocab_size": VOCAB + 3}, **heads(4, 2, 16))),
    "norms of heads": (2, Qwen3Config(**BASE, **heads(4, 2, 16))),
    "a window": (2, MistralConfig(**BASE, **heads(4, 2, 16), sliding_window=24)),
    "windows, caps and norms after": (
        2,
        Gemma2Config(**BASE, **heads(4, 2, 16), sliding_window=24, layer_types=["sliding_attention", "full_attention"]),
    ),
    "experts": (
        2,
        Qwen3MoeConfig(**BASE, **heads(4, 2, 16), moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_several_ranks_answer_as_one_does(name: str, tmp_path: Path) -> None:
    ranks, config = MODELS[name]
    save_tiny(tmp_path, config)
    prompts = [random_ids(n, seed=n) for n in (1, 40, 17, 90)]
    one = load_tiny(tmp_path, poison=True, backend="fused")
    with ranks_in_threads():
        several = load_tiny(tmp_path, poison=True, tensor_parallel=ranks)
        assert f"on {ranks} ranks" in several.backend_note
        want, got = Runner(one, reuse=True), Runner(several, reuse=True)
        for chunk in (1 << 30, 7):  # cold, then cached
            expected = want.run(prompts, 6, chunk=lambda start, size=chunk: size)
            for a, b in zip(got.run(prompts, 6, chunk=lambda start, size=chunk: size), expected, strict=True):
                torch.testing.assert_close(torch.stack(a.logits), torch.stack(b.logits), atol=3e-5, rtol=1e-5)
                assert (a.tokens, a.cached) == (b.tokens, b.cached)
        assert [run.cached for run in got.run(prompts, 1)] == [0, 32, 16, 80]
        several.close()
    one.close()


def test_bfloat16_is_as_near_to_float32_on_two_ranks_as_on_one(tiny_pair: Path) -> None:
    prompts = [random_ids(n, seed=n) for n in (40, 17)]

    def logits(**settings: object) -> torch.Tensor:
        engine = load_tiny(tiny_pair, backend="fused", **settings)
        seen = Runner(engine).run(prompts, 4, chunk=lambda start: 16, forced=[[5, 6, 7, 8]] * 2)
        engine.close()
        return torch.cat([torch.stack(one.logits) for one in seen])

    exact = logits()
    with ranks_in_threads():
        apart = difference(logits(dtype="bfloat16", tensor_parallel=2), exact)
    assert apart < 1.5 * difference(logits(dtype="bfloat16"), exact)


@pytest.fixture(scope="module", params=["memory", "gloo"])
def pair(request: pytest.FixtureRequest, tiny_pair: Path) -> Iterator[tuple[Engine, ThreadRanks]]:
    with ranks_in_threads() as newest:
        engine = load_tiny(tiny_pair, tensor_parallel=2, rank_sums=request.param)
        assert newest().sums == request.param
        yield engine, newest()
        engine.close()


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**{**BASE, "num_hidden_layers": LAYERS}, **heads(4, 2, 16))
    return save_tiny(tmp_path_factory.mktemp("tiny-pair"), config)


@pytest.fixture
def pages(pair: tuple[Engine, ThreadRanks]) -> Iterator[list[int]]:
    engine = pair[0]
    held = engine.pages.allocate(4)
    yield held
    engine.pages.release(held)


def test_hooks_run_once_all_ranks_came_so_far(pair: tuple[Engine, ThreadRanks], pages: list[int]) -> None:
    engine, seen, written = pair[0], [], []
    engine.kv_bytes[pages] = 0

    def before(layer: int) -> None:
        seen.append(("before", layer))
        assert not engine.kv_bytes[pages[:2], layer].any(), "some rank is ahead"

    def after(layer: int) -> None:
        seen.append(("on", layer))
        written.append(engine.kv_bytes[pages[:2], layer].copy())

    engine.forward([Row(random_ids(32, 0), 0, pages, False)], before_layer=before, on_layer=after)
    assert seen == [(what, layer) for layer in range(LAYERS) for what in ("before", "on")]
    heads_in_a_slice = [slices.reshape(2, 4, -1) for slices in written]
    for layer, slices in enumerate(heads_in_a_slice):
        assert (slices.reshape(2, -1) == engine.kv_bytes[pages[:2], layer]).all(), "K/V came after the hook"
        assert slices.any(axis=2).all(), "a head is missing"


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("hook", ["before_layer", "on_layer"])
def test_a_step_that_a_hook_broke_off_leaves_all_ranks_ready_for_the_next(
    pair: tuple[Engine, ThreadRanks], pages: list[int], hook: str, layer: int
) -> None:
    engine, ids = pair[0], random_ids(20, 1)
    want = engine.forward([Row(ids, 0, pages, True)])

    def fail(at: int) -> None:
        if at == layer:
            raise KeyboardInterrupt

    for wants_logits in (False, True):
        with pytest.raises(KeyboardInterrupt):
            engine.forward([Row(ids, 0, pages, wants_logits)], **{hook: fail})
        assert torch.equal(engine.forward([Row(ids, 0, pages, True)]), want)


@pytest.mark.parametrize("method", ["through_layers", "logits"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_one_rank_cannot_compute_fails_alone(
    pair: tuple[Engine, ThreadRanks], pages: list[int], rank: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ranks = pair
    ids = random_ids(20, 2)
    want = engine.forward([Row(ids, 0, pages, True)])
    part = engine._backend._part if rank == 0 else ranks.made[rank]._part

    def fail(*_: object) -> None:
        raise MemoryError("too large")

    with monkeypatch.context() as patched:
        patched.setattr(part, method, fail)
        with pytest.raises(MemoryError if rank == 0 else TransferFailed):
            engine.forward([Row(ids, 0, pages, True)])
    assert torch.equal(engine.forward([Row(ids, 0, pages, True)]), want)


def test_a_rank_is_told_nothing_of_what_is_found_in_cache(pair: tuple[Engine, ThreadRanks]) -> None:
    """Hits are rank 0's pool's alone: others learn the pages of each row with each step, and keep none."""
    engine, ranks = pair
    ids = random_ids(40, 3)
    runner = Runner(engine, reuse=True)
    cold = runner.run([ids], 3)[0]
    engine.pages.clear_cached()
    again = runner.run([ids], 3)[0]
    warm = runner.run([ids], 3)[0]
    assert [run.cached for run in (cold, again, warm)] == [0, 0, 32]
    assert cold.tokens == again.tokens == warm.tokens
    assert not any("pool" in name for name in vars(ranks.made[1]))


def test_no_step_follows_one_that_lost_a_rank(tiny_pair: Path) -> None:
    with ranks_in_threads() as newest:
        engine = load_tiny(tiny_pair, tensor_parallel=2)
        pages = engine.pages.allocate(2)
        newest().lines[0].send_end(1.0)
        newest()._threads[0].join(10)
        newest().made.clear()  # the group goes with it
        for _ in range(2):
            with pytest.raises(PeerSilent, match="rank"):
                engine.forward([Row(random_ids(20, 4), 0, pages, True)])
        assert engine.lost is not None and engine.lost.done()
        engine.close()
