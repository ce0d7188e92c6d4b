"""What the tests of the compiled step share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine_runner import save_tiny
from llvmlite import binding
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from moonpool.engine.trial import difference

needs_avx512_bf16 = pytest.mark.skipif(
    not binding.get_host_cpu_features().get("avx512bf16"), reason="the compiled backend needs AVX-512 bf16"
)


def rounded_tiny(directory: Path, config: PreTrainedConfig, *, seed: int = 0) -> Path:
    """A tiny model whose weights are bfloat16 numbers: the same ones in either dtype."""
    save_tiny(directory, config, seed=seed)
    file = directory / "model.safetensors"
    weights = {name: weight.to(torch.bfloat16).float() for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return directory


@torch.inference_mode()
def library_logits(directory: Path, ids: Sequence[int], at: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """[len(at), vocabulary] after the tokens at those positions."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    wanted = torch.tensor(list(at))
    logits: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=wanted).logits[0]
    return logits.float()


def assert_nearer_than_the_library(got: torch.Tensor, directory: Path, ids: Sequence[int], at: Sequence[int]) -> None:
    """Sums, residuals, norms and angles in float32 leave less rounding than the library's bfloat16; a mistake leaves more."""
    want = library_logits(directory, ids, at, torch.float32)
    apart, theirs = difference(got, want), difference(library_logits(directory, ids, at, torch.bfloat16), want)
    assert apart < theirs < 0.15, f"{len(ids)} tokens: {apart:.3g} of the spread of logits, the library {theirs:.3g}"
