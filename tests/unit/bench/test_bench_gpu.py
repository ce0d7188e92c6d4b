"""The bench of a GPU worker's kernels: where there is no GPU it says so; its code runs in Triton's interpreter."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from moonpool.bench.gpu import GpuOptions, gpu
from moonpool.cli.bench import bench

TINY = GpuOptions(
    rounds=1,
    contexts=(20,),
    batches=(2,),
    prefixes=(0,),
    chunk=4,
    heads=2,
    kv_heads=1,
    dim=16,
    latent_heads=2,
    rank=16,
    rope=8,
    block=16,
    layers=1,
    copy_bytes=1 << 16,
    gemm=32,
    spread_bytes=1,
    moved_pages=1,
    kept=("auto", "fp8"),
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_bench_says_so_and_ends_with_1() -> None:
    ended = CliRunner().invoke(bench, ["gpu", "--json"])
    assert ended.exit_code == 1
    told = json.loads(ended.stdout)
    assert told["measured"] is False and "there is no GPU that torch" in told["reason"]


def test_triton_figures_of_every_kernel_beside_the_ceilings_of_the_same_run() -> None:
    figures = gpu(TINY, torch.device("cpu"))
    kernels = ["write", "pack", "unpack", "decode_20_2"]
    beside = {f"{kept}_{kernel}" for kept in ("bfloat16", "fp8") for kernel in kernels} | {"mla_decode_20_2"}
    assert {name.removesuffix("_over_copy") for name in figures if name.endswith("_over_copy")} == beside
    for name in ("copy_gbs", "gemm_tflops", "pinned_to_host_gbs", "prefill_0_tflops", "mla_decode_20_2_tflops"):
        assert figures.pop(name) > 0
