"""What the attention bench says of a backend that runs everywhere."""

from __future__ import annotations

import torch

from moonpool.bench.attention import AttentionOptions, attention


def test_figures_of_each_dtype_beside_what_the_machine_can_do() -> None:
    before = torch.get_num_threads()
    options = AttentionOptions(threads=1, rounds=1, contexts=(2048,), batches=(2,), prefixes=(1024,), backends=("fused",))
    try:
        figures = attention(options)
    finally:
        torch.set_num_threads(before)
    for name in ("read_gbs", "copy_gbs", "bfloat16_gemm_gflops", "float32_gemm_gflops"):
        assert figures.pop(name) > 0
    kinds = {name.removesuffix("_over_read").removesuffix("_over_gemm") for name in figures}
    assert kinds <= {
        f"{t}_fused_{what}" for t in ("bfloat16", "float32") for what in ("decode_2048_2_gbs", "chunk_1024_gflops")
    }
    assert kinds
    assert all(value > 0 for value in figures.values())
