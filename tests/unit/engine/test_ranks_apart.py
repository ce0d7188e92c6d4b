"""Ranks that keep pages of their own heads, as on GPUs, beside one host's view of all.

All memories are the host's here, and every copy between them is made as late as it may be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_runner import VOCAB, Runner, hand_over, load_tiny, random_ids, save_tiny
from support.lanes import LateLane, coming_in, under_way
from support.thread_ranks import ThreadRanks, ranks_in_threads
from transformers import LlamaConfig

from moonpool.core.config import Config, EngineConfig, ModelConfig
from moonpool.core.errors import ConfigError, PeerSilent, TransferFailed
from moonpool.engine import device as devices
from moonpool.engine import loading
from moonpool.engine.engine import Engine, Row, load_engine
from moonpool.engine.host_view import StagedView
from moonpool.engine.lanes import HostLanes
from moonpool.engine.loading import ModelFacts
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.shape import Shape
from moonpool.engine.slice_packing import TorchPacking
from moonpool.engine.tensor_parallel import part, ranks, start
from moonpool.engine.triton.making import measure

LAYERS, BLOCK = 3, 16
SHAPE = Shape(LAYERS, 6, 3, 16)
Pair = tuple[Engine, ThreadRanks]


def late_view(memory: PageTensor, host: torch.Tensor, heads: range) -> StagedView:
    return StagedView(memory, TorchPacking(memory), HostLanes(LateLane(), LateLane()), host, heads)


def model_of(layers: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=48,
        num_hidden_layers=layers,
        max_position_embeddings=256,
        num_attention_heads=2 * heads,
        num_key_value_heads=heads,
        head_dim=16,
    )


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny-apart"), model_of(LAYERS, 3))


@pytest.fixture(scope="module", params=["memory", "gloo"])
def pair(request: pytest.FixtureRequest, tiny_pair: Path) -> Iterator[Pair]:
    """Rank 0 has the first of 3 K/V heads, rank 1 the other two."""
    with pytest.MonkeyPatch.context() as patched, ranks_in_threads(apart=True) as newest:
        patched.setattr(part, "staged_view", late_view)
        engine = load_tiny(tiny_pair, tensor_parallel=2, rank_sums=request.param, poison=True)
        yield engine, newest()
        engine.close()


@pytest.fixture(scope="module")
def one(tiny_pair: Path) -> Engine:
    return load_tiny(tiny_pair, backend="fused")


@pytest.fixture
def pages(pair: Pair) -> Iterator[list[int]]:
    held = pair[0].pages.allocate(8)
    yield held
    assert [under_way(view) for view in views(pair)] == [0, 0]
    pair[0].pages.release(held)


def views(pair: Pair) -> list[StagedView]:
    found = [pair[0]._backend._part.view, pair[1].made[1]._part.view]
    assert all(isinstance(view, StagedView) for view in found)
    return found


def kept(pair: Pair, page: int, layer: int) -> torch.Tensor:
    """uint8 [2, heads, bytes] of the ranks' own pages, put together."""
    parts = [view._packing.pack([page], layer, [BLOCK])[0].view(2, -1, BLOCK * 64) for view in views(pair)]
    assert [one.shape[1] for one in parts] == [1, 2]
    return torch.cat(parts, dim=1)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=3e-5, rtol=1e-5)


def numbers(engine: Engine, pages: list[int], tokens: int) -> torch.Tensor:
    """What ``kv_bytes`` holds of so many tokens: [layers, 2 * heads, tokens, head_dim]."""
    held = torch.from_numpy(engine.kv_bytes[pages].copy()).view(torch.float32)
    return held.view(len(pages), LAYERS, 6, BLOCK, 16).permute(1, 2, 0, 3, 4).reshape(LAYERS, 6, -1, 16)[:, :, :tokens]


def test_answers_cold_cached_and_chunked_are_those_of_one_rank(pair: Pair, one: Engine) -> None:
    prompts = [random_ids(n, seed=n) for n in (1, 17, 48)]
    want, got = Runner(one, reuse=True), Runner(pair[0], reuse=True)
    for chunk in (1 << 30, 7):
        expected = want.run(prompts, 4, chunk=lambda start, size=chunk: size)
        for a, b in zip(got.run(prompts, 4, chunk=lambda start, size=chunk: size), expected, strict=True):
            assert (a.tokens, a.cached) == (b.tokens, b.cached)
            close(torch.stack(a.logits), torch.stack(b.logits))
    for engine in (one, pair[0]):
        engine.pages.clear_cached()
        assert engine.pages.free == engine.pages.total


def test_the_hosts_view_has_the_bytes_of_ranks_that_share_their_pages(
    tiny_pair: Path, pair: Pair, one: Engine, pages: list[int]
) -> None:
    row, nothing = random_ids(40, 1), lambda layer: None
    pair[0].kv_bytes[pages] = 0
    pair[0].forward([Row(row, 0, pages, False)], on_layer=nothing)
    with ranks_in_threads():
        shared = load_tiny(tiny_pair, tensor_parallel=2)
        held = shared.pages.allocate(3)
        shared.forward([Row(row, 0, held, False)], on_layer=nothing)
        assert (pair[0].kv_bytes[pages[:3]] == shared.kv_bytes[held]).all()
        shared.close()
    alone = one.pages.allocate(3)
    one.forward([Row(row, 0, alone, False)])
    close(numbers(pair[0], pages[:3], 40), numbers(one, alone, 40))
    one.pages.release(alone)


def test_a_layer_is_told_one_layer_late_and_is_on_the_host_by_then_from_all_ranks(pair: Pair, pages: list[int]) -> None:
    engine, seen, written = pair[0], [], []
    engine.kv_bytes[pages] = 0

    def before(layer: int) -> None:
        seen.append(("before", layer))
        assert not engine.kv_bytes[pages[:2], layer].any(), "some rank is ahead"

    def after(layer: int) -> None:
        seen.append(("on", layer))
        written.append(engine.kv_bytes[pages[:2], layer].copy())

    for wants_logits in (False, True):
        engine.forward([Row(random_ids(32, 0), 0, pages, wants_logits)], before_layer=before, on_layer=after)
        assert seen == [
            ("before", 0),
            *[(what, layer + shift) for layer in range(LAYERS - 1) for what, shift in (("before", 1), ("on", 0))],
            ("on", LAYERS - 1),
        ]
        for layer, slices in enumerate(written):
            assert (slices == engine.kv_bytes[pages[:2], layer]).all(), "K/V came after the hook"
            assert slices.reshape(2, 6, -1).any(axis=2).all(), "a head is missing"
            assert torch.equal(torch.from_numpy(slices[0]), kept(pair, pages[0], layer).view(-1))
        assert not engine.view.behind(pages[:2])
        engine.kv_bytes[pages] = 0
        del seen[:], written[:]


def test_slices_from_outside_are_with_all_ranks_before_their_layer_is_computed(pair: Pair, pages: list[int]) -> None:
    engine, ids = pair[0], random_ids(40, 3)
    want = engine.forward([Row(ids, 0, pages[:3], True)], on_layer=lambda layer: None)
    saved = engine.kv_bytes[pages[:3]].copy()

    def bring(layer: int) -> None:
        for i, page in enumerate(pages[3:6]):
            engine.kv_bytes[page, layer] = saved[i, layer]
        engine.view.came_in(layer, pages[3:6])

    close(engine.forward([Row(ids[-1:], 39, pages[3:6], True)], before_layer=bring), want)
    engine.kv_bytes[pages[:6]] = 255  # each rank has its own
    for table in (pages[:3], pages[3:6]):
        close(engine.forward([Row(ids[-1:], 39, table, True)]), want)


def test_what_one_rank_handed_over_is_gone_on_with_and_the_other_way_round(pair: Pair, one: Engine) -> None:
    ids = random_ids(41, 4)
    for source, target in ((one, pair[0]), (pair[0], one)):
        held = source.pages.allocate(3)
        source.forward([Row(ids[:-1], 0, held, False)], on_layer=lambda layer: None)
        fresh = hand_over(source, held, target, 40)
        for layer in range(LAYERS):
            target.view.came_in(layer, fresh)
            target.view.landed(layer)
        close(
            target.forward([Row(ids[-1:], 40, fresh, True)]),
            source.forward([Row(ids[-1:], 40, held, True)]),
        )
        target.pages.release(fresh)
        source.pages.release(held)


def test_a_step_without_hooks_leaves_the_host_behind_until_it_is_wanted(
    pair: Pair, pages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also right after a step that nobody's logits wait for, at a rank that is slow to end it."""
    engine, ids, end = pair[0], random_ids(20, 5), views(pair)[1]._end
    engine.forward([Row(ids, 0, pages, False)], on_layer=lambda layer: None)
    want = engine.kv_bytes[pages[:2]].copy()
    engine.kv_bytes[pages[2:4]] = 0

    def slow(*args: object) -> None:
        time.sleep(0.05)
        end(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(views(pair)[1], "_end", slow)
        engine.forward([Row(ids, 0, pages[2:4], False)])
        assert engine.view.behind(pages[2:4]) and not engine.kv_bytes[pages[2:4]].any()
        engine.view.gone_out(pages[2:4])
    assert not engine.view.behind(pages[2:4])
    tokens = np.s_[:, :, :, :4]  # of the second page
    shape = (2, LAYERS, 6, BLOCK, 64)
    assert (engine.kv_bytes[pages[2]] == want[0]).all()
    assert (engine.kv_bytes[pages[2:4]].reshape(shape)[tokens] == want.reshape(shape)[tokens]).all()


def test_copied_and_freed_pages_are_so_at_all_ranks(pair: Pair, pages: list[int]) -> None:
    engine, ids = pair[0], random_ids(16, 6)
    want = engine.forward([Row(ids, 0, pages, True)], on_layer=lambda layer: None)
    engine.kv_bytes[pages[1]] = engine.kv_bytes[pages[0]]
    for layer in range(LAYERS):
        engine.view.came_in(layer, [pages[1]])
    engine.copy_page(pages[1], pages[2])
    assert (engine.kv_bytes[pages[2]] == engine.kv_bytes[pages[0]]).all()
    close(engine.forward([Row(ids[-1:], 15, [pages[2]], True)]), want)
    freed = engine.pages.allocate(1)
    engine.forward([Row(ids, 0, freed, False)])
    engine.pages.release(freed)
    assert [coming_in(view) for view in views(pair)] == [0, 0]
    assert (engine.kv_bytes[freed] == 0xFF).all()
    assert all((kept(pair, freed[0], layer) == 0xFF).all() for layer in range(LAYERS))


@pytest.mark.parametrize("hook", ["before_layer", "on_layer"])
def test_a_step_that_a_hook_broke_off_leaves_all_ranks_ready_for_the_next(pair: Pair, pages: list[int], hook: str) -> None:
    engine, ids = pair[0], random_ids(20, 7)
    want = engine.forward([Row(ids, 0, pages, True)])
    for where in range(LAYERS):

        def fail(layer: int, where: int = where) -> None:
            if layer == where:
                raise KeyboardInterrupt

        for wants_logits in (False, True):
            with pytest.raises(KeyboardInterrupt):
                engine.forward([Row(ids, 0, pages, wants_logits)], **{hook: fail})
            assert torch.equal(engine.forward([Row(ids, 0, pages, True)], on_layer=lambda layer: None), want)


def test_a_rank_that_cannot_send_ends_the_step_and_one_that_cannot_take_slices_says_so(
    pair: Pair, pages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ids = pair[0], random_ids(20, 8)
    want = engine.forward([Row(ids, 0, pages, True)])

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    for rank, error in ((0, RuntimeError), (1, TransferFailed)):
        with monkeypatch.context() as patched:
            patched.setattr(views(pair)[rank], "send", fail)
            with pytest.raises(error):
                engine.forward([Row(ids, 0, pages, True)], on_layer=lambda layer: None)
        with monkeypatch.context() as patched:
            patched.setattr(views(pair)[rank], "came_in", fail)
            with pytest.raises(error, match="out of memory"):
                engine.view.came_in(0, pages[4:5])
        assert torch.equal(engine.forward([Row(ids, 0, pages, True)], on_layer=lambda layer: None), want)


def test_kernels_are_measured_on_all_ranks_before_they_serve(pair: Pair, one: Engine) -> None:
    engine, shared = pair[0], pair[1].pages
    assert shared is not None
    memory = PageTensor(engine.layout, engine.pages.total, memory=shared.bytes)
    measure(engine._backend, memory, ModelFacts(SHAPE, VOCAB, 256, frozenset()), chunk=40, answers=3)
    assert not engine.kv_bytes.any()
    ids = [random_ids(17, 11)]
    assert Runner(engine).run(ids, 3)[0].tokens == Runner(one).run(ids, 3)[0].tokens


def test_pages_can_be_freed_once_a_rank_is_gone_and_nothing_else(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TOLD_S", 0.01)
    with ranks_in_threads(apart=True) as newest:
        engine = load_tiny(tiny_pair, tensor_parallel=2, poison=True)
        held = engine.pages.allocate(2)
        newest().lines[0].send_end(1.0)
        newest()._threads[0].join(10)
        newest().made.clear()
        for _ in range(2):
            with pytest.raises(PeerSilent, match="rank"):
                engine.view.came_in(0, held)
        engine.kv_bytes[held] = 0
        engine.pages.release(held)
        assert (engine.kv_bytes[held].reshape(2, LAYERS, 2, 3, -1)[:, :, :, :1] == 0xFF).all(), "rank 0's own head"
        engine.close()


def test_a_rank_that_cannot_overwrite_freed_pages_is_lost_and_nobody_who_frees_them_hears_of_it(
    tiny_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("device-side assert")

    with ranks_in_threads(apart=True):
        engine = load_tiny(tiny_pair, tensor_parallel=2, poison=True)
        held = engine.pages.allocate(2)
        other = engine._backend._ranks.made[1]._part.view
        with monkeypatch.context() as patched:
            patched.setattr(other, "fill", fail)
            engine.pages.release(held)
        assert engine.lost is not None and "device-side assert" in engine.lost.result(0)
        with pytest.raises(PeerSilent, match="could not overwrite freed pages"):
            engine.forward([Row([1, 2], 0, held, True)])
        engine.close()


def settings(model: Path, count: int, **values: object) -> Config:
    chosen = {"block_tokens": BLOCK, "tensor_parallel": count, **values}
    return Config(model=ModelConfig(path=str(model), dtype="float32"), engine=EngineConfig.model_validate(chosen))


def test_ranks_attend_by_triton_over_pages_in_eight_bits(tmp_path: Path) -> None:
    """Interpreted. Eight bits are kept apart on any device."""
    tiny, answers = save_tiny(tmp_path, model_of(layers=1, heads=2)), []
    with ranks_in_threads():
        for count in (1, 2):
            config = settings(tiny, count, backend="triton", kv_dtype="int8")
            engine = load_engine(config, tiny, threads=1, pages=8, cache=tiny / "cache")
            assert (engine.backend_name, engine.device_note) == ("triton", "cpu, K/V kept as int8")
            held = engine.pages.allocate(2)
            logits = engine.forward([Row(random_ids(20, 9), 0, held, True)], on_layer=lambda layer: None).clone()
            answers.append((logits, torch.from_numpy(engine.kv_bytes[held].copy()).view(torch.float32)))
            engine.close()
    assert (answers[0][0] - answers[1][0]).abs().max() < 0.05 * answers[0][0].abs().max()
    assert (answers[0][1] - answers[1][1]).abs().max() < 0.05 * answers[0][1].abs().max()


def test_ranks_get_a_gpu_each_or_are_refused_with_the_numbers(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = settings(tiny_pair, 2, device="cuda")
    assert devices.device_of(config) == torch.device("cuda", 0)
    keeping = start._keeping(config)
    assert (keeping.kind, keeping.attention, keeping.apart, start._sums(config, keeping)) == ("cuda", "triton", True, "nccl")
    assert [keeping.device_of(rank).index for rank in (0, 1)] == [0, 1]
    free = {0: 3 << 20, 1: 2 << 20}
    monkeypatch.setattr(loading, "available", lambda device: free[device.index])
    budget = loading.memory_budget(config, tiny_pair, pages=8)
    whole = loading.memory_budget(settings(tiny_pair, 2, device="cpu"), tiny_pair, pages=8)
    assert (budget.available, budget.weights) == (2 << 20, -(-whole.weights // 2))
    assert (budget.page_bytes * 3, budget.view_bytes) == (
        whole.page_bytes * 2,
        whole.page_bytes,
    )  # the larger share, of 3 heads
    with pytest.raises(ConfigError, match=r"engine.device: 'cuda' .* engine.tensor_parallel is 3, and torch sees 2 GPUs"):
        devices.device_of(settings(tiny_pair, 3, device="cuda"))
    assert devices.device_of(settings(tiny_pair, 3)).type == "cpu"
    for sums, asked in (("gloo", config), ("nccl", settings(tiny_pair, 2, device="cpu"))):
        chosen = asked.model_copy(update={"engine": asked.engine.model_copy(update={"rank_sums": sums})})
        with pytest.raises(ConfigError, match=f"engine.rank_sums: '{sums}' is not for ranks that compute on"):
            start._sums(chosen, start._keeping(chosen))
