"""Sliding windows and soft caps: equal to the library's eager attention at, before and beyond the border."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_runner import VOCAB, Runner, eager_logits, hand_over, load_tiny, random_ids, save_tiny
from transformers import Gemma2Config, Gemma3TextConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from moonpool.engine.engine import Row

WINDOW = 32
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, layer_types=MIXED, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**SHAPE, layer_types=MIXED, query_pre_attn_scalar=16),
    "qwen2": Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}, use_sliding_window=True, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, use_sliding_window=True, layer_types=MIXED),
}
LENGTHS = (1, 30, 31, 32, 33, 34, 70)
OUTPUTS = 20


@pytest.mark.parametrize("backend", ["fused", "torch"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_equal_the_library_alone_chunked_batched_and_with_prefixes_beyond_the_window(
    kind: str, backend: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, CONFIGS[kind])
    engine = load_tiny(tmp_path, poison=True, pages=64, backend=backend)
    ids = [random_ids(n + OUTPUTS, seed=n) for n in LENGTHS]
    prompts, forced = (
        [seq[:n] for seq, n in zip(ids, LENGTHS, strict=True)],
        [seq[n:] for seq, n in zip(ids, LENGTHS, strict=True)],
    )
    want = [eager_logits(tmp_path, seq)[n - 1 : -1] for seq, n in zip(ids, LENGTHS, strict=True)]
    runner = Runner(engine, reuse=True)
    for chunk in (1 << 30, 16, 13, 1):  # the first run computes; the others begin behind the cached prefix
        got = runner.run(prompts, OUTPUTS, chunk=lambda start, size=chunk: size, forced=forced)  # type: ignore[misc]
        for one, expected in zip(got, want, strict=True):
            torch.testing.assert_close(torch.stack(one.logits), expected, atol=2e-5, rtol=1e-5)
    assert got[-1].cached == 64
    for chunk in (1 << 30, 16, 13):
        engine.pages.clear_cached()
        got = runner.run(prompts, OUTPUTS, chunk=lambda start, size=chunk: size, forced=forced)  # type: ignore[misc]
        assert all(one.cached == 0 for one in got)
        for one, expected in zip(got, want, strict=True):
            torch.testing.assert_close(torch.stack(one.logits), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_prompts_around_the_window_go_on_where_other_pages_were_filled(kind: str, tmp_path: Path) -> None:
    """Prefill by one backend, its pages and the valid tokens of the last one copied, decode by the other."""
    save_tiny(tmp_path, CONFIGS[kind])
    fused, module = (load_tiny(tmp_path, poison=True, backend=name) for name in ("fused", "torch"))
    for prefill, decode in ((fused, module), (module, fused)):
        for n in (30, 31, 32, 33, 34):
            ids = random_ids(n + OUTPUTS, seed=n)
            there = prefill.pages.allocate(-(-n // 16))
            logits = [prefill.forward([Row(ids[:n], 0, there, True)])[0].clone()]
            here = hand_over(prefill, there, decode, n)
            here += decode.pages.allocate(-(-(n + OUTPUTS) // 16) - len(here))
            logits += [decode.forward([Row(ids[at : at + 1], at, here, True)])[0].clone() for at in range(n, n + OUTPUTS)]
            torch.testing.assert_close(torch.stack(logits), eager_logits(tmp_path, ids)[n - 1 :], atol=2e-5, rtol=1e-5)
            prefill.pages.release(there)
            decode.pages.release(here)


def test_the_window_is_seen_in_the_reference_at_all(tmp_path: Path) -> None:
    """Guards the tests above: without its window the same model answers otherwise."""
    narrow = save_tiny(tmp_path / "narrow", MistralConfig(**SHAPE))
    wide = save_tiny(tmp_path / "wide", MistralConfig(**{**SHAPE, "sliding_window": None}))
    ids = random_ids(34, seed=1)
    apart = (eager_logits(narrow, ids) - eager_logits(wide, ids)).abs().amax(1)
    assert float(apart[:WINDOW].max()) < 1e-5
    assert float(apart[WINDOW:].min()) > 1e-3
