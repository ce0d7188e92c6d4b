"""Long contexts on the compiled step: every logit against the library in float32."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from compiled_runner import assert_nearer_than_the_library, needs_avx512_bf16, rounded_tiny
from engine_runner import VOCAB, Reference, random_ids
from transformers import LlamaConfig

from moonpool.core.blocks import blocks_for
from moonpool.core.config import Config, EngineConfig, ModelConfig
from moonpool.engine.engine import Engine, Row, load_engine

pytestmark = needs_avx512_bf16

LONG = bool(os.environ.get("MOONPOOL_LONG_TESTS"))


def _load(directory: Path, tokens: int) -> Engine:
    config = Config(model=ModelConfig(path=str(directory)), engine=EngineConfig(poison=True, backend="compiled"))
    return load_engine(config, directory, threads=2, pages=2 * blocks_for(tokens, 64), cache=directory / "cache")


def _logits(engine: Engine, ids: list[int], at: list[int], chunk: int) -> torch.Tensor:
    """Those at the positions ``at``, each the end of a chunk; the last one is asked for again, as a decode step."""
    table = engine.pages.allocate(blocks_for(len(ids), 64))[::-1]
    ends = sorted({*range(chunk, len(ids), chunk), *(position + 1 for position in at), len(ids)})
    got, start = {}, 0
    for end in ends:
        got[end - 1] = engine.forward([Row(ids[start:end], start, table, True)])[0].clone()
        start = end
    again = engine.forward([Row(ids[-1:], len(ids) - 1, table, True)])[0]
    assert torch.equal(again, got[len(ids) - 1])
    engine.pages.release(table)
    return torch.stack([got[position] for position in at])


def test_a_small_model_up_to_8000_tokens(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192}
    rounded_tiny(tmp_path, LlamaConfig(**shape, **heads))
    ids = random_ids(8000, seed=8)
    at = [0, 1, 511, 512, 2047, 4096, 6000, 7999]
    engine = _load(tmp_path, len(ids))
    got = _logits(engine, ids, at, 512)
    assert torch.equal(_logits(engine, ids, at, 3000), got)
    assert_nearer_than_the_library(got, tmp_path, ids, at)
    engine.close()


@pytest.mark.model
@pytest.mark.parametrize("tokens", [400, pytest.param(8000, marks=pytest.mark.skipif(not LONG, reason="takes minutes"))])
def test_the_bundled_model(model_dir: Path, reference: Reference, tokens: int) -> None:
    ids = (reference.prompt(2100) * 4)[:tokens]
    at = [0, 15, 100, 300, tokens - 1]
    engine = _load(model_dir, tokens)
    assert_nearer_than_the_library(_logits(engine, ids, at, 512), model_dir, ids, at)
    engine.close()
