"""One load of the real model per dtype and session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_runner import VOCAB, Reference, save_tiny
from transformers import LlamaConfig

from moonpool.core.config import Config, EngineConfig, ModelConfig
from moonpool.engine.engine import Engine, load_engine


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _engine(model_dir: Path, dtype: str, tmp_path_factory: pytest.TempPathFactory, backend: str = "auto") -> Engine:
    config = Config(
        model=ModelConfig.model_validate({"path": str(model_dir), "dtype": dtype}),
        engine=EngineConfig.model_validate({"poison": True, "backend": backend}),
    )
    return load_engine(config, model_dir, threads=1, pages=160, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def engine_fp32(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return _engine(model_dir, "float32", tmp_path_factory)


@pytest.fixture(scope="session", params=["auto", "fused"])
def engine_bf16(request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """What serves here, and what serves on CPUs without AVX-512 bf16."""
    return _engine(model_dir, "bfloat16", tmp_path_factory, request.param)


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=512,
    )
    return save_tiny(tmp_path_factory.mktemp("tiny-llama"), config)
