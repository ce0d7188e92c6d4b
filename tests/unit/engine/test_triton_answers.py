"""Whole greedy answers of tiny models by Triton's kernels, interpreted, equal those of the torch backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_runner import VOCAB, Runner, load_tiny, random_ids, save_tiny
from transformers import DeepseekV2Config, Gemma2Config, LlamaConfig, PreTrainedConfig

from moonpool.engine.trial import difference

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "gemma2": Gemma2Config(
        **SHAPE, sliding_window=20, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=16
    ),
    "deepseek_v2": DeepseekV2Config(
        **{**SHAPE, "num_key_value_heads": 4, "head_dim": None},
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
    ),
}
OUTPUTS = 3
LONG = random_ids(40, seed=1)
PROMPTS = [LONG, random_ids(5, seed=2), [*LONG[:34], *random_ids(3, seed=3)]]


@pytest.fixture(scope="module", params=CONFIGS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])


def test_greedy_answers_by_triton_kernels_equal_those_of_the_torch_backend_chunked_and_behind_a_cached_prefix(
    tiny: Path,
) -> None:
    want = [one.tokens for one in Runner(load_tiny(tiny, backend="torch")).run(PROMPTS, OUTPUTS)]
    engine = load_tiny(tiny, backend="triton", poison=True)
    assert (engine.backend_name, engine.backend_note) == ("triton", "")
    runner = Runner(engine, reuse=True)
    cold = runner.run(PROMPTS[:2], OUTPUTS, chunk=lambda start: 25)
    assert [one.tokens for one in cold] == want[:2]
    behind = runner.run(PROMPTS[2:], OUTPUTS)
    assert [one.tokens for one in behind] == want[2:]
    assert [one.cached for one in behind] == [32]


def test_logits_of_a_bfloat16_model_by_triton_kernels_stay_near_those_of_the_torch_backend(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The interpreter has no bfloat16 of its own: whatever is loaded has to be widened before it is multiplied."""
    tiny = save_tiny(tmp_path_factory.mktemp("bfloat16"), CONFIGS["llama"])
    ours, plain = (load_tiny(tiny, backend=backend, dtype="bfloat16") for backend in ("triton", "torch"))
    assert ours.backend_name == "triton"
    got, want = (Runner(one).run([LONG], 2, chunk=lambda start: 30, forced=[[5, 6]])[0] for one in (ours, plain))
    assert difference(torch.stack(got.logits), torch.stack(want.logits)) < 0.1
