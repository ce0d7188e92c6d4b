"""Units of a phase: taken once each, taken over where a thread is away, counted once whoever does them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled_runner import needs_avx512_bf16, rounded_tiny
from engine_runner import VOCAB, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from moonpool.core.config import Config, EngineConfig, ModelConfig
from moonpool.engine.compiled.phases import LINE, finish, row_bytes, take
from moonpool.engine.engine import Engine, Row, load_engine

pytestmark = needs_avx512_bf16


class Board:
    """One phase, as threads see it."""

    def __init__(self, units: int, parts: int, threads: int) -> None:
        self._memory = np.zeros(row_bytes(threads, units) + LINE, np.uint8)
        self._row = -(-self._memory.ctypes.data // LINE) * LINE
        self._units, self._parts, self._threads = units, parts, threads

    def take(self, thread: int) -> int:
        return int(take(self._row, self._units, self._parts, thread, self._threads))

    def finish(self, unit: int) -> None:
        finish(self._row, self._threads, unit)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 30), st.booleans(), st.data())
def test_every_unit_is_done_although_threads_are_away(threads: int, units: int, ordered: bool, data: st.DataObject) -> None:
    board = Board(units, 1 if ordered else threads, threads)
    away = data.draw(st.sets(st.integers(0, threads - 1), max_size=threads - 1))
    held = {thread: unit for thread in away if (unit := board.take(thread)) >= 0}
    present = [thread for thread in range(threads) if thread not in away]
    done: list[int] = []
    while True:
        thread = data.draw(st.sampled_from(present))
        unit = board.take(thread)
        if unit < 0:
            break
        done.append(unit)
        board.finish(unit)
    assert sorted(done) == list(range(units))
    for thread, unit in held.items():  # it is back, and finds its unit done and nothing else to do
        board.finish(unit)
        assert board.take(thread) == -1


def test_units_that_are_to_be_begun_in_order_are() -> None:
    board = Board(5, 1, 2)
    assert [board.take(thread) for thread in (1, 0, 1, 1, 0)] == list(range(5))


def test_a_thread_goes_through_its_own_part_first() -> None:
    board = Board(6, 2, 2)
    assert [board.take(1), board.take(1), board.take(0)] == [3, 4, 0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("phases")
    shape = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 5, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}
    return rounded_tiny(directory, LlamaConfig(**shape, **heads))


def _engine(model: Path, threads: int) -> Engine:
    config = Config(model=ModelConfig(path=str(model)), engine=EngineConfig(backend="compiled"))
    return load_engine(config, model, threads=threads, pages=40, cache=model / "cache")


def _steps(engine: Engine) -> Iterator[torch.Tensor]:
    """Chunks with and without hooks, and batches of answers, over again."""
    ids = [random_ids(700, seed=seed) for seed in range(2)]
    tables = [engine.pages.allocate(12) for _ in ids]
    for _ in range(3):
        for row, table in zip(ids, tables, strict=True):
            yield engine.forward([Row(row[:500], 0, table, True)]).clone()
            yield engine.forward([Row(row[500:600], 500, table, True)], on_layer=lambda _: None).clone()
        for at in range(600, 640):
            rows = [Row(row[at : at + 1], at, table, True) for row, table in zip(ids, tables, strict=True)]
            yield engine.forward(rows).clone()
    for table in tables:
        engine.pages.release(table)


def test_more_threads_than_cores_make_the_same_bits(model: Path) -> None:
    alone, crowd = _engine(model, 1), _engine(model, 7)
    try:
        for want, got in zip(_steps(alone), _steps(crowd), strict=True):
            assert torch.equal(want, got)
    finally:
        alone.close()
        crowd.close()


def test_every_logit_is_of_its_own_step(tmp_path: Path) -> None:
    """Units of the output head are the last that a step does, and here they fill the last row of the board."""
    shape = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 62 * 16 * 16}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}
    engine = _engine(rounded_tiny(tmp_path, LlamaConfig(**shape, **heads)), 1)
    ids, table = random_ids(44, seed=3), engine.pages.allocate(1)
    try:
        engine.forward([Row(ids[:40], 0, table, False)])
        for at in range(40, 44):
            row = Row(ids[at : at + 1], at, table, True)
            want = engine.forward([row], on_layer=lambda _: None).clone()
            assert torch.equal(engine.forward([row]), want)
            assert torch.equal(engine.forward([row]), want)
    finally:
        engine.close()
