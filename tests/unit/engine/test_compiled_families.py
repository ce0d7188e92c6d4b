"""The compiled step against the library in float32, and against itself: its bits never depend on company, cuts or threads.

Models are random, their weights rounded to bfloat16 beforehand; every byte of a page that nobody wrote is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled_runner import assert_nearer_than_the_library, needs_avx512_bf16, rounded_tiny
from engine_runner import VOCAB, Runner, random_ids
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from moonpool.core.config import Config, EngineConfig, ModelConfig
from moonpool.engine.engine import Engine, Row, load_engine

pytestmark = needs_avx512_bf16

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
NO_HEAD_DIM = {**SHAPE, "hidden_size": 192}
NO_HEAD_DIM.pop("head_dim")
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, heads of 64, all its own keys": LlamaConfig(**{**SHAPE, "head_dim": 64, "num_key_value_heads": 6}),
    "llama, heads of 128, one key for seven": LlamaConfig(
        **{**SHAPE, "head_dim": 128, "hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1, "vocab_size": 131}
    ),
    "llama, heads of 96, biases, tied": LlamaConfig(
        **{**SHAPE, "head_dim": 96}, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama, odd sizes": LlamaConfig(
        **{**SHAPE, "hidden_size": 80, "intermediate_size": 112, "num_attention_heads": 5, "num_key_value_heads": 1}
    ),
    "mistral with a window": MistralConfig(**SHAPE, sliding_window=70),
    "qwen2 with biases": Qwen2Config(**NO_HEAD_DIM, use_sliding_window=True, sliding_window=40, max_window_layers=1),
    "qwen3 with head norms": Qwen3Config(**{**SHAPE, "head_dim": 64}),
    "gemma, one key for all": GemmaConfig(**{**SHAPE, "num_key_value_heads": 1, "head_dim": 256}),
    "gemma2 with caps": Gemma2Config(
        **SHAPE, sliding_window=50, layer_types=MIXED, query_pre_attn_scalar=24, final_logit_softcapping=4.0
    ),
    "gemma3, two angles": Gemma3TextConfig(**SHAPE, sliding_window=50, layer_types=MIXED, query_pre_attn_scalar=24),
}
STEP_BY_STEP = ("llama", "gemma2 with caps")
LENGTHS = (1, 16, 33, 100, 300)
OUTPUTS = 4


def _load(directory: Path, threads: int) -> Engine:
    config = Config(
        model=ModelConfig(path=str(directory)), engine=EngineConfig(block_tokens=16, poison=True, backend="compiled")
    )
    return load_engine(config, directory, threads=threads, pages=72, cache=directory / "cache")


def _logits(
    engine: Engine, rows: Sequence[Sequence[int]], lengths: Sequence[int], chunk: int, reuse: bool
) -> list[torch.Tensor]:
    """[OUTPUTS, vocabulary] of each: those of its last prompt token and of all forced ones but the last."""
    prompts = [ids[:n] for ids, n in zip(rows, lengths, strict=True)]
    forced = [ids[n:] for ids, n in zip(rows, lengths, strict=True)]
    got = Runner(engine, reuse=reuse).run(prompts, OUTPUTS, chunk=lambda start: chunk, forced=forced)
    return [torch.stack(one.logits) for one in got]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_near_the_librarys_and_the_same_bits_on_every_way(kind: str, tmp_path: Path) -> None:
    rounded_tiny(tmp_path, KINDS[kind])
    rows = [random_ids(n + OUTPUTS, seed=n, vocab=KINDS[kind].vocab_size) for n in LENGTHS]
    engine = _load(tmp_path, 2)
    whole = _logits(engine, rows, LENGTHS, 1 << 30, False)
    for got, ids, n in zip(whole, rows, LENGTHS, strict=True):
        assert_nearer_than_the_library(got, tmp_path, ids, range(n - 1, n - 1 + OUTPUTS))
    for chunk in (16, 33, 99, *([1] if kind in STEP_BY_STEP else [])):
        _assert_same_bits(_logits(engine, rows, LENGTHS, chunk, False), whole, f"chunks of {chunk}")
    for ids, n, want in zip(rows, LENGTHS, whole, strict=True):
        _assert_same_bits(_logits(engine, [ids], [n], 1 << 30, False), [want], f"{n} alone")
    for cached in (False, True):
        _assert_same_bits(_logits(engine, rows, LENGTHS, 1 << 30, True), whole, f"cached: {cached}")
    engine.close()
    for threads in (1, 3):
        engine = _load(tmp_path, threads)
        _assert_same_bits(_logits(engine, rows[-2:], LENGTHS[-2:], 70, False), whole[-2:], f"{threads} threads")
        engine.close()


def _assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        apart = (a - b).abs().max().item()
        assert torch.equal(a, b), f"{what}: row {i} differs by {apart:.3g}"


def test_batches_of_sixteen_repeat_their_bits_in_shuffled_pages(tmp_path: Path) -> None:
    """Races show as bits that change; a table read in the wrong order as other logits."""
    rounded_tiny(tmp_path, KINDS["llama"])
    lengths = [1 + 13 * i for i in range(16)]
    rows = [random_ids(n + OUTPUTS, seed=500 + n) for n in lengths]
    config = Config(
        model=ModelConfig(path=str(tmp_path)), engine=EngineConfig(block_tokens=32, poison=True, backend="compiled")
    )
    engine = load_engine(config, tmp_path, threads=2, pages=80, cache=tmp_path / "cache")
    want = _logits(engine, rows, lengths, 1 << 30, False)
    for got, ids, n in zip(want[::5], rows[::5], lengths[::5], strict=True):
        assert_nearer_than_the_library(got, tmp_path, ids, range(n - 1, n - 1 + OUTPUTS))
    draw = np.random.default_rng(3)
    for turn in range(12):
        held = engine.pages.allocate(engine.pages.total)
        engine.pages.release([held[i] for i in draw.permutation(len(held))])
        _assert_same_bits(_logits(engine, rows, lengths, (1 << 30, 50)[turn % 2], False), want, f"turn {turn}")
    engine.close()


def test_hooks_see_each_layer_once_and_change_no_bit(tmp_path: Path) -> None:
    rounded_tiny(tmp_path, KINDS["qwen3 with head norms"])
    engine = _load(tmp_path, 2)
    table = engine.pages.allocate(4)
    ids = random_ids(60, seed=1)
    want = engine.forward([Row(ids, 0, table, True)]).clone()
    engine.kv_bytes[table] = 0
    seen: list[tuple[str, int]] = []

    def before(layer: int) -> None:
        seen.append(("before", layer))
        assert not engine.kv_bytes[table[0], layer].any()

    def after(layer: int) -> None:
        seen.append(("on", layer))
        assert engine.kv_bytes[table[0], layer].any()

    assert torch.equal(engine.forward([Row(ids, 0, table, True)], before_layer=before, on_layer=after), want)
    assert seen == [(what, layer) for layer in range(3) for what in ("before", "on")]

    def fail(layer: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.forward([Row(ids, 0, table, True)], on_layer=fail)
    assert torch.equal(engine.forward([Row(ids, 0, table, True)]), want)
    engine.close()


@pytest.mark.parametrize("missing", ["_buffer", "_muster"])
def test_a_step_too_large_for_memory_fails_alone(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded_tiny(tmp_path, KINDS["llama"])
    model = ModelConfig(path=str(tmp_path))
    few = EngineConfig(block_tokens=16, backend="compiled", prefill_chunk=16, max_batch=1)
    engine = load_engine(Config(model=model, engine=few), tmp_path, threads=2, pages=40, cache=tmp_path / "cache")
    table, ids = engine.pages.allocate(20), random_ids(300, seed=1)
    want = engine.forward([Row(ids[:9], 0, table, True)]).clone()

    def refuse(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(engine._backend, missing, refuse)
        with pytest.raises(MemoryError):
            engine.forward([Row(ids, 0, table, True)])
    assert torch.equal(engine.forward([Row(ids[:9], 0, table, True)]), want)
    engine.forward([Row(ids, 0, table, True)])
    engine.close()
