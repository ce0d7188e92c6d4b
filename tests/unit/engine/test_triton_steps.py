"""What surrounds the Triton kernels: which backend serves, steps over buffers that stay, plans and tiles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runner import VOCAB, load_tiny, random_ids, save_tiny
from transformers import LlamaConfig

from moonpool.core.config import Config, EngineConfig, ModelConfig
from moonpool.core.errors import ConfigError
from moonpool.core.layout import KVLayout
from moonpool.engine import attention
from moonpool.engine.backends import Span
from moonpool.engine.families import recipe_of
from moonpool.engine.fused_backend import FusedBackend
from moonpool.engine.loading import ModelFacts, load_model
from moonpool.engine.page_tensor import CPU, PageTensor
from moonpool.engine.triton import backend as triton_backend
from moonpool.engine.triton import making
from moonpool.engine.triton.answers import Answers, sizes
from moonpool.engine.triton.backend import TritonBackend
from moonpool.engine.triton.making import warm
from moonpool.engine.triton.plans import StepPlan, sent_together
from moonpool.engine.triton.step import triton_step
from moonpool.engine.triton.tiling import CONFIGS, Tiling, fitting, narrow_rows, padded, splits_for, tiling_of, wide_rows

BLOCK, PAGES, CONTEXT = 16, 12, 96


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
    )
    return save_tiny(tmp_path_factory.mktemp("one-layer"), shape)


@pytest.fixture
def made(one_layer: Path) -> Iterator[tuple[FusedBackend, PageTensor, ModelFacts]]:
    attention.register()
    model, facts = load_model(Config(model=ModelConfig(path=str(one_layer), dtype="float32")), one_layer)
    memory = PageTensor(KVLayout("", 1, 1, 16, "float32", BLOCK), PAGES)
    recipe = recipe_of(model, CONTEXT)
    assert recipe is not None
    with torch.inference_mode():
        yield FusedBackend(recipe, memory, triton_step), memory, facts


def test_backend_triton_on_a_cpu_without_the_interpreter_is_refused_with_the_fix(
    one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    with pytest.raises(ConfigError, match=r"engine.backend: 'triton'.*TRITON_INTERPRET was set after triton had been imported"):
        load_tiny(one_layer, backend="triton", pages=4)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match=r"engine.backend: 'triton'.*need a CUDA device; set TRITON_INTERPRET=1"):
        load_tiny(one_layer, backend="triton", pages=4)


def test_backend_triton_without_the_package_is_refused_by_name(one_layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moonpool.engine.triton.backend", None)
    with pytest.raises(ConfigError, match=r"engine.backend: 'triton' cannot serve this model here: it does not load"):
        load_tiny(one_layer, backend="triton", pages=4)


def test_auto_does_not_take_the_interpreted_triton_kernels(one_layer: Path) -> None:
    assert load_tiny(one_layer, pages=8).backend_name == "fused"


class _Wrong(FusedBackend):
    def forward(self, *step: Any) -> torch.Tensor:
        return super().forward(*step) * 1.2


def test_backend_triton_that_computes_something_else_does_not_serve(one_layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "FusedBackend", _Wrong)
    with pytest.raises(ConfigError, match=r"engine.backend: 'triton' cannot serve this model here: its logits differ"):
        load_tiny(one_layer, backend="triton", pages=8)


def _row(first: int, start: int, count: int, table: list[int]) -> Span:
    return Span(first, count, start, np.array(table))


def test_a_step_of_answers_over_staying_buffers_equals_the_plain_step_of_the_triton_kernels(
    made: tuple[FusedBackend, PageTensor, ModelFacts],
) -> None:
    """Also after a larger step has left its rows in the buffers, and after pages have grown."""
    whole, memory, _ = made
    memory.tensor.normal_()
    answers = Answers(whole, memory, 3, CONTEXT)
    ids = np.array(random_ids(3, seed=4))
    large = [_row(0, 40, 1, [3, 1, 5]), _row(1, 0, 1, [2]), _row(2, 31, 1, [7, 4])]
    small = [_row(0, 64, 1, [8, 9, 10, 11, 0])]
    for spans in (large, small, [_row(0, 32, 1, [7, 4, 6])]):
        fresh, before = ids[: len(spans)], memory.tensor.clone()
        want = whole.forward(fresh, spans, list(range(len(spans))), None, None).clone()
        written = memory.tensor.clone()
        memory.tensor.copy_(before)
        assert answers.fit(spans, list(range(len(spans))))
        got = answers.forward(fresh, spans)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(memory.tensor, written, atol=1e-6, rtol=1e-6)


class _Told:
    """Answers that fit always, and say that they were asked."""

    def __init__(self) -> None:
        self.asked = 0

    def fit(self, spans: list[Span], wanted: list[int]) -> bool:
        return True

    def forward(self, ids: object, spans: object) -> torch.Tensor:
        self.asked += 1
        return torch.zeros(1)


def test_steps_with_hooks_chunks_or_rows_without_logits_go_launch_by_launch(
    made: tuple[FusedBackend, PageTensor, ModelFacts],
) -> None:
    whole, memory, _ = made
    answers = Answers(whole, memory, 2, CONTEXT)
    single, chunk = _row(0, 5, 1, [1]), _row(0, 0, 5, [1])
    assert answers.fit([single], [0])
    assert not answers.fit([single], [])
    assert not answers.fit([chunk], [4])
    assert not answers.fit([chunk], [0])  # what its first token says of the second
    assert not answers.fit([single, _row(1, 5, 1, [2]), _row(2, 5, 1, [3])], [0, 1, 2])
    told = _Told()
    backend = TritonBackend(whole, told)  # type: ignore[arg-type]
    fired: list[int] = []
    backend.forward(np.array([4]), [single], [0], None, fired.append)
    backend.forward(np.array([4]), [single], [0], fired.append, None)
    assert (fired, told.asked) == ([0, 0], 0)
    backend.forward(np.array([4]), [single], [0], None, None)
    assert told.asked == 1


def test_warming_triton_kernels_leaves_nothing_in_pages(made: tuple[FusedBackend, PageTensor, ModelFacts]) -> None:
    whole, memory, facts = made
    warm(TritonBackend(whole, Answers(whole, memory, 2, CONTEXT)), memory, facts, chunk=20, answers=2)
    assert not memory.tensor.any()


def test_what_is_sent_together_begins_at_multiples_of_sixteen_bytes() -> None:
    parts = [np.arange(5), np.arange(0), np.arange(3), np.arange(8)]
    sent = sent_together(parts, CPU)
    assert [part.tolist() for part in sent] == [part.tolist() for part in parts]
    assert len({(part.data_ptr() - sent[0].data_ptr()) % 16 for part in sent}) == 1


def test_tiles_cover_every_query_once_and_those_with_the_most_keys_come_first() -> None:
    spans = [_row(0, 30, 7, [0, 1, 2]), _row(7, 90, 1, list(range(6))), _row(8, 60, 40, list(range(7)))]
    plan = StepPlan.of(spans, CPU)
    answers, chunks = plan.answers(3), plan.chunks(3, 16, torch.float32)
    assert answers is not None and chunks is not None
    assert (answers.span.tolist(), answers.flat.tolist(), answers.rows, answers.filled) == ([1], [0], 16, 3)
    covered = [
        (span, flat + i)
        for span, flat in zip(chunks.span.tolist(), chunks.flat.tolist(), strict=True)
        for i in range(chunks.rows)
        if flat + i < spans[span].count * 3
    ]
    assert sorted(covered) == [(0, i) for i in range(21)] + [(2, i) for i in range(120)]
    ends = [spans[s].start + f // 3 for s, f in zip(chunks.span.tolist(), chunks.flat.tolist(), strict=True)]
    assert ends == sorted(ends, reverse=True)
    assert plan.answers(3) is answers
    assert StepPlan.of(spans[:1], CPU).answers(3) is None


def test_splits_fill_the_device_and_no_more() -> None:
    device = Tiling(wide=128, keys=None, split_keys=256, programs=528)
    assert [splits_for(8 * rows, None, device) for rows in (1, 2, 8, 32, 66, 67)] == [64, 32, 8, 2, 1, 1]
    assert [splits_for(8, longest, device) for longest in (1, 511, 512, 5_000, 100_000)] == [1, 1, 2, 16, 64]


def test_sizes_of_tiles_and_of_captured_steps() -> None:
    assert [padded(n) for n in (1, 16, 17, 80, 128, 192, 512)] == [16, 16, 32, 128, 128, 256, 512]
    assert [narrow_rows(share) for share in (1, 4, 20, 64, 128)] == [16, 16, 32, 64, 64]
    large = Tiling(wide=128, keys=None, split_keys=256, programs=528)
    half = [wide_rows(large, values, torch.bfloat16) for values in (64, 128, 256, 512)]
    assert (half, wide_rows(large, 128, torch.float32)) == ([128, 128, 64, 64], 64)
    assert [sizes(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert tiling_of(CPU).keys is not None
    for rows in (16, 64, 128):
        assert fitting(CONFIGS, {}, ROWS=rows)
    assert EngineConfig(backend="triton").backend == "triton"
