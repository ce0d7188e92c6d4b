"""Freed pages leave nothing behind where that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.core.config import Config, EngineConfig, ModelConfig, SecurityConfig
from moonpool.engine.engine import load_engine


@pytest.mark.parametrize(("poison", "zeroise", "filled"), [(False, True, 0), (True, True, 0xFF), (False, False, 7)])
def test_a_freed_page_is_overwritten_before_anybody_gets_it_again(
    tiny_llama: Path, tmp_path: Path, poison: bool, zeroise: bool, filled: int
) -> None:
    config = Config(
        model=ModelConfig(path=str(tiny_llama), dtype="float32"),
        engine=EngineConfig(block_tokens=16, poison=poison),
        security=SecurityConfig(zeroise=zeroise),
    )
    engine = load_engine(config, tiny_llama, threads=1, pages=4, cache=tmp_path)
    taken = engine.pages.allocate(3)
    engine.kv_bytes[taken] = 7
    engine.pages.publish(taken[0], b"k" * 16, None)
    engine.pages.release(taken)
    assert (engine.kv_bytes[taken[0]] == 7).all(), "it is still found by its key"
    assert (engine.kv_bytes[taken[1:]] == filled).all()
    engine.pages.clear_cached()
    assert (engine.kv_bytes[taken] == filled).all()
    memory = engine.kv_bytes
    memory[:] = 7
    engine.close()
    assert (memory == filled).all()
