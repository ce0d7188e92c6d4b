"""Which backend serves a model, and that one which computes something else does not."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numba
import numpy as np
import pytest
import torch
from engine_runner import VOCAB, Runner, eager_logits, load_tiny, random_ids, save_tiny
from numpy.typing import NDArray
from transformers import GPT2Config

from moonpool.cluster.consistent import COMPILED_TILE
from moonpool.core.errors import ConfigError
from moonpool.core.layout import KVLayout
from moonpool.engine import choosing
from moonpool.engine.backends import Hook, Span
from moonpool.engine.compiled.features import unfit
from moonpool.engine.compiled.tiles import TILE_KEYS
from moonpool.engine.fused_backend import FusedBackend
from moonpool.engine.recipe import Recipe


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    return save_tiny(tmp_path_factory.mktemp("gpt2"), config)


def test_a_backend_that_cannot_serve_the_model_is_refused_with_the_reason(tiny_llama: Path, gpt2: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.backend: 'fused'.*GPT2LMHeadModel is of no family.*use auto"):
        load_tiny(gpt2, backend="fused")
    with pytest.raises(ConfigError, match=r"engine.backend: 'compiled'.*GPT2LMHeadModel is of no family"):
        load_tiny(gpt2, backend="compiled")
    with pytest.raises(ConfigError, match=r"engine.backend: 'compiled'.*model.dtype is float32, it computes bfloat16"):
        load_tiny(tiny_llama, backend="compiled")


def test_the_configuration_knows_the_tile_of_the_compiled_backend() -> None:
    assert COMPILED_TILE == TILE_KEYS


def test_the_note_says_why_no_faster_backend_serves(tiny_llama: Path, gpt2: Path) -> None:
    assert (load_tiny(gpt2).backend_name, load_tiny(tiny_llama, backend="torch").backend_name) == ("torch", "torch")
    assert "GPT2LMHeadModel" in load_tiny(gpt2).backend_note
    engine = load_tiny(tiny_llama)
    assert engine.backend_name == "fused"


class _Wrong(FusedBackend):
    """Answers after the fifth part of a second norm; or nonsense."""

    factor = 1.2

    def forward(
        self,
        ids: NDArray[np.int64],
        spans: Sequence[Span],
        wanted: Sequence[int],
        before_layer: Hook | None,
        on_layer: Hook | None,
    ) -> torch.Tensor:
        return super().forward(ids, spans, wanted, before_layer, on_layer) * self.factor


class _Nonsense(_Wrong):
    factor = float("nan")


@pytest.mark.parametrize("kind", [_Wrong, _Nonsense])
def test_a_backend_that_computes_something_else_does_not_serve(
    kind: type[FusedBackend], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choosing, "FusedBackend", kind)
    with caplog.at_level(logging.WARNING):
        engine = load_tiny(tiny_llama)
    assert engine.backend_name == "torch"
    assert "fused: its logits differ" in engine.backend_note
    assert "backend fused is not used: its logits differ" in caplog.text
    ids = random_ids(30, seed=3)
    got = Runner(engine).run([ids], 1)[0]
    torch.testing.assert_close(got.logits[0], eager_logits(tiny_llama, ids)[-1], atol=2e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"engine.backend: 'fused' cannot serve.*its logits differ"):
        load_tiny(tiny_llama, backend="fused")


@pytest.mark.parametrize(("pages", "context"), [(1, 0), (2, 0), (48, 1), (48, 2)])
def test_the_trial_needs_no_more_than_there_is_and_leaves_nothing_behind(tiny_llama: Path, pages: int, context: int) -> None:
    engine = load_tiny(tiny_llama, pages=pages, context=context)
    assert engine.backend_name == "fused"
    assert not engine.kv_bytes.any()


def test_a_cpu_that_numba_may_not_use_whole_is_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """NUMBA_CPU_NAME=generic; the compiler would end the process."""
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+sse2,-avx512bf16,+avx512f,+avx512vl,+avx512bw")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    recipe, layout = mock.create_autospec(Recipe), mock.create_autospec(KVLayout)
    assert unfit(recipe, layout) == "the CPU, or what numba is told of it, lacks avx512bf16"
