"""The Triton kernels compile for an H100, fit into its multiprocessors and use its tensor cores. Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = 232_448  # of one multiprocessor, at most
TESTS = Path(__file__).parents[2]


@pytest.mark.skipif(not os.environ.get("MOONPOOL_LONG_TESTS"), reason="takes minutes")
def test_triton_kernels_compile_for_a_gpu_within_its_memory_and_with_its_tensor_cores() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(TESTS)}
    told = subprocess.run(
        [sys.executable, "-m", "support.compiled_kernels"], env=environment, capture_output=True, text=True, timeout=280
    )
    assert told.returncode == 0, told.stderr
    kernels = {str(one["name"]): one for one in map(json.loads, told.stdout.splitlines())}
    assert len(kernels) > 20
    assert all(one["shared"] <= SHARED_BYTES for one in kernels.values())
    for kind in ("auto", "int8", "fp8"):
        answers, chunks = kernels[f"answers {kind}"], kernels[f"chunks {kind}"]
        assert answers["mma"] and chunks["wgmma"]
        assert answers["asynchronous"] and chunks["asynchronous"]  # loads run ahead of what computes
        assert not answers["spilled"] and not chunks["spilled"]
