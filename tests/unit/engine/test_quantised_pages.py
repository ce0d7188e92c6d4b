"""Greedy answers with pages in eight bits, by Triton's kernels in the interpreter; and who is refused them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_runner import VOCAB, Runner, load_tiny, random_ids, save_tiny
from transformers import LlamaConfig

from moonpool.cluster.models import kv_layout
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.engine.engine import Engine, Row, load_engine
from moonpool.engine.loading import memory_budget

BLOCK, LAYERS, DIM = 16, 2, 16
KEPT = ["int8", "fp8"]


def config_of(model: Path, **engine: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "engine": {"block_tokens": BLOCK, "backend": "triton", "poison": True, **engine},
        }
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=DIM,
        max_position_embeddings=64,
    )
    return save_tiny(tmp_path_factory.mktemp("small"), config)


def load_quantised(model: Path, kept: str) -> Engine:
    return load_engine(config_of(model, kv_dtype=kept), model, threads=1, pages=24, cache=model / "cache")


@pytest.fixture(scope="module", params=KEPT)
def engine(request: pytest.FixtureRequest, small: Path) -> Iterator[Engine]:
    made = load_quantised(small, request.param)
    yield made
    made.pages.clear_cached()
    assert made.pages.free == made.pages.total
    made.close()


def test_triton_answers_cached_and_chunked_equal_the_cold_run_with_the_same_pages(engine: Engine) -> None:
    prompt = random_ids(20, 40)
    want = Runner(engine).run([prompt], 2)[0].tokens
    chunked = Runner(engine, reuse=True).run([prompt], 2, chunk=lambda start: 11)[0]
    cached = Runner(engine, reuse=True).run([prompt], 2)[0]
    assert (chunked.cached, cached.cached) == (0, 16)
    assert chunked.tokens == cached.tokens == want


def test_triton_steps_leave_pages_near_those_of_the_model_that_stay_as_they_are(engine: Engine, small: Path) -> None:
    """Their canonical bytes, moved to other pages, are the same bytes again, and give the same logits bit by bit."""
    plain, ids = load_tiny(small, pages=4, backend="fused"), random_ids(40, 9)
    pages, other = engine.pages.allocate(6), plain.pages.allocate(3)
    want = plain.forward([Row(ids, 0, other, True)])
    engine.forward([Row(ids[:-1], 0, pages[:3], False)], on_layer=lambda layer: None)
    exact = torch.from_numpy(plain.kv_bytes[other]).view(torch.float32)
    kept = torch.from_numpy(engine.kv_bytes[pages[:3]]).view(torch.float32)
    exact, kept = (x.view(3, LAYERS, -1, BLOCK, engine.layout.head_dim) for x in (exact, kept))
    exact[2, :, :, 7:] = 0
    assert torch.linalg.norm(kept - exact) < 0.06 * torch.linalg.norm(exact)
    engine.kv_bytes[pages[3:]] = engine.kv_bytes[pages[:3]]
    for layer in range(LAYERS):
        engine.view.came_in(layer, pages[3:])
    got, moved = (engine.forward([Row(ids[-1:], 39, table, True)]) for table in (pages[:3], pages[3:]))
    assert torch.equal(got, moved)
    assert torch.linalg.norm(got - want) < 0.2 * torch.linalg.norm(want)
    before = engine.kv_bytes[pages[3:5]].copy()
    engine.view._behind[pages[3:5]] = True  # type: ignore[attr-defined]
    engine.view.gone_out(pages[3:5])
    assert (engine.kv_bytes[pages[3:5]] == before).all()
    engine.pages.release(pages)


@pytest.mark.parametrize("backend", ["auto", "compiled", "fused", "torch"])
def test_pages_in_eight_bits_are_refused_where_another_backend_would_compute(small: Path, backend: str) -> None:
    if torch.cuda.is_available() and backend == "auto":
        pytest.skip("auto is triton on a GPU")
    config = config_of(small, kv_dtype="fp8", backend=backend)
    with pytest.raises(ConfigError, match=r"engine.kv_dtype: 'fp8' is for the backend triton"):
        load_engine(config, small, threads=1, pages=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_by_name(small: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.device: 'cuda' cannot be used: torch .*use auto or cpu"):
        load_engine(config_of(small, device="cuda"), small, threads=1, pages=4)


@pytest.mark.parametrize("kept", KEPT)
def test_the_budget_counts_small_pages_and_the_hosts_view_of_them(small: Path, kept: str) -> None:
    plain = memory_budget(config_of(small, page_bytes=1 << 20), small)
    quantised = memory_budget(config_of(small, page_bytes=1 << 20, kv_dtype=kept), small)
    rows = LAYERS * 2 * BLOCK
    assert plain.page_bytes == rows * DIM * 4 and quantised.page_bytes == rows * (DIM + 1)
    assert quantised.pages == (1 << 20) // quantised.page_bytes > 3 * plain.pages
    assert quantised.needed - quantised.weights == quantised.pages * (quantised.page_bytes + plain.page_bytes)


def test_blocks_of_engines_that_round_differently_have_different_names(small: Path, engine: Engine) -> None:
    """And their store nodes, which load no model, expect these names."""
    assert engine.layout in [kv_layout(config_of(small, kv_dtype=kept), small) for kept in KEPT]
    names = {load_tiny(small, pages=2, backend="fused").layout.model, engine.layout.model}
    assert len(names) == 2 and len({len(name) for name in names}) == 1
